/** Graphs in the shape of real ones, with made-up numbers: what folds and layouts are tried on. */
import type { Leaf, Module, Trace } from "../src/types";
import { bare, random } from "./sample";

/** Writes operators users first, as the contract has it. */
export class Draft {
  readonly modules: Module[] = [{ name: "", kind: "Model", parent: -1, calls: 1, parameters: 0, like: 0 }];
  readonly words: string[] = [];
  readonly leaves: Leaf[] = [];
  private rows: { name: number; module: number; leaf: number; view: number }[] = [];
  private uses: [number, number][] = [];

  module(name: string, parent = 0, like?: number): number {
    const kind = name.replace(/^.*\./, "").replace(/^\d+$/, "Block");
    const full = this.modules[parent]!.name ? `${this.modules[parent]!.name}.${name}` : name;
    const at = this.modules.length;
    this.modules.push({ name: full, kind, parent, calls: 1, parameters: 0, like: like ?? at });
    return at;
  }

  operator(word: string, module: number, users: number[], view = false): number {
    if (!this.words.includes(word)) this.words.push(word);
    const at = this.rows.push({ name: this.words.indexOf(word), module, leaf: -1, view: Number(view) }) - 1;
    for (const user of users) this.uses.push([user, at]);
    return at;
  }

  leaf(name: string, module: number, users: number[]): number {
    const at = this.operator("leaf", module, users);
    this.rows[at]!.leaf = this.leaves.length;
    const full = `${this.modules[module]!.name}.${name}`;
    this.leaves.push({
      name: full,
      names: [full],
      operator: at,
      module,
      parameter: true,
      shape: [4],
      elements: 4,
      zero: 0,
      norm: 1,
      largest: 1,
      element: new Int32Array(),
      gradient: new Float64Array(),
      start: new Int32Array(),
    });
    return at;
  }

  trace(): Trace {
    const next = random(7);
    const column = (of: (row: Draft["rows"][0]) => number) => Int32Array.from(this.rows, of);
    const mass = Float64Array.from(this.uses, () => 0.1 + next());
    return {
      ...bare(),
      words: this.words,
      shapes: [[4]],
      modules: this.modules,
      operators: {
        name: column((row) => row.name),
        module: column((row) => row.module),
        call: column(() => 0),
        shape: column(() => 0),
        leaf: column((row) => row.leaf),
        view: Uint8Array.from(this.rows, (row) => row.view),
        mass: Float64Array.from(this.rows, () => 1),
      },
      edges: {
        consumer: Int32Array.from(this.uses, ([user]) => user),
        producer: Int32Array.from(this.uses, ([, maker]) => maker),
        position: Int32Array.from(this.uses, () => 0),
        mass,
        share: Float32Array.from(this.uses, () => 1),
      },
      leaves: this.leaves,
    };
  }
}

/** A transformer: equal blocks with attention, a perceptron, and two skips. */
export function transformer(blocks = 12): Trace {
  const draft = new Draft();
  const head = draft.module("head");
  const list = draft.module("h");
  const loss = draft.operator("NllLossBackward0", 0, []);
  let stream = draft.operator("MmBackward0", head, [loss]);
  draft.leaf("weight", head, [stream]);
  const numbers: number[] = [];
  for (let block = 0; block < blocks; block++) numbers.push(draft.module(String(block), list, numbers[0]));
  const parts = numbers.map((block) => ({
    attention: draft.module("attn", block),
    projections: [] as number[],
    mlp: draft.module("mlp", block),
  }));
  for (const part of parts)
    for (const name of ["q", "k", "v"]) part.projections.push(draft.module(name, part.attention, part.projections[0]));
  for (let block = blocks - 1; block >= 0; block--) {
    const { attention, projections, mlp } = parts[block]!;
    const sum = draft.operator("AddBackward0", numbers[block]!, [stream]);
    const up = draft.operator("GeluBackward0", mlp, [sum]);
    const wide = draft.operator("AddmmBackward0", mlp, [up]);
    draft.leaf("weight", mlp, [wide]);
    const middle = draft.operator("AddBackward0", numbers[block]!, [sum, wide]);
    const soft = draft.operator("SoftmaxBackward0", attention, [middle]);
    const moved = draft.operator("ViewBackward0", attention, [soft], true);
    const inputs = projections.map((module, n) => {
      const turned = draft.operator("TransposeBackward0", attention, [n ? soft : moved], true);
      const product = draft.operator("MmBackward0", module, [turned]);
      draft.leaf("weight", module, [product]);
      return product;
    });
    stream = draft.operator("MulBackward0", numbers[block]!, [middle, ...inputs]);
  }
  draft.leaf("embedding", 0, [stream]);
  return draft.trace();
}

/** Mamba over tokens: deep chains inside each layer; 24 × 64 gives about 22,000 operators. */
export function scan(layers = 24, tokens = 64, each = 14): Trace {
  const draft = new Draft();
  const list = draft.module("layers");
  const loss = draft.operator("NllLossBackward0", 0, []);
  const blocks: number[] = [];
  for (let layer = 0; layer < layers; layer++) blocks.push(draft.module(String(layer), list, blocks[0]));
  const mixers = blocks.map((block) => draft.module("mixer", block));
  let stream = loss;
  for (let layer = layers - 1; layer >= 0; layer--) {
    const sum = draft.operator("AddBackward0", blocks[layer]!, [stream]);
    let state = draft.operator("StackBackward0", mixers[layer]!, [sum]);
    const gathered = state;
    for (let token = 0; token < tokens; token++) {
      for (let n = 0; n < each; n++) {
        const users = n === 0 && token ? [state, gathered] : [state];
        state = draft.operator(n % 3 ? "SelectBackward0" : "MulBackward0", mixers[layer]!, users, n % 3 > 0);
      }
    }
    draft.leaf("A_log", mixers[layer]!, [state]);
    stream = draft.operator("RmsNormBackward0", blocks[layer]!, [sum, state]);
  }
  return draft.trace();
}

/** A module that is called again and again: closed, its box and what is around it form circles. */
export function shared(calls = 6): Trace {
  const draft = new Draft();
  const cell = draft.module("cell");
  let stream = draft.operator("MeanBackward0", 0, []);
  for (let call = 0; call < calls; call++) {
    const inner = draft.operator("TanhBackward0", cell, [stream]);
    stream = draft.operator("AddBackward0", 0, [inner]);
  }
  draft.leaf("start", 0, [stream]);
  return draft.trace();
}
