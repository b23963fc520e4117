/**
 * Reports to test with. `small` is a perceptron whose numbers are computed here, scalar by scalar,
 * so that paths, gradients and influence agree with one another; `large` has the size of a real
 * model and made-up numbers; `encode` writes the container that Python would.
 */
import type {
  Column,
  Edges,
  Finding,
  Flow,
  Forest,
  Influence,
  Leaf,
  Module,
  Operators,
  Report,
  Route,
  Timing,
  Trace,
  Training,
} from "../src/types";

/** Numbers in [0, 1) that are the same in every run. */
export function random(seed: number): () => number {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

export interface Choice {
  name?: string;
  seed?: number;
  rule?: Trace["rule"];
  /** Every n-th element of a weight was not followed. */
  skip?: number;
  /** The name of the second module, in place of "head". */
  head?: string;
  notes?: string[];
}

export const HOSTILE = `</script><script>alert(1)</script>"'&<img src=x onerror=alert(1)>\u202Egnp.exe 🦊`;

/** What a diagnosis says of the module `head`. */
export const finding = (): Finding => ({
  kind: "silent",
  severity: "error",
  title: "no gradient: head.weight (output detached)",
  module: 4,
  place: "head",
  parameters: ["head.weight"],
  line: "net.py:3: return x.detach()",
  evidence: "The output of detach() requires no grad.",
  advice: "leave it out.",
});

// A perceptron, scalar by scalar ------------------------------------------------------------------

interface Node {
  name: string;
  module: number;
  shape: number[];
  view?: boolean;
  leaf?: string;
  /** Of an element: which elements of which operators use it, and their derivatives by it. */
  uses: (element: number) => [number, number, number][];
}

const size = (shape: number[]): number => shape.reduce((a, b) => a * b, 1);

/** mean(pow(relu(x W₁ᵀ + b₁) W₂ᵀ + b₂, 2)), with 5 rows, 4 → 8 → 3 units, of which unit 7 is dead. */
function perceptron(seed: number): Node[] {
  const next = random(seed);
  const draw = (n: number, scale: number): number[] =>
    Array.from({ length: n }, () => (2 * next() - 1) * scale);
  const [B, I, H, O] = [5, 4, 8, 3];
  const x = draw(B * I, 1);
  const w1 = draw(H * I, 0.9);
  const b1 = draw(H, 0.2);
  b1[7] = -9;
  const w2 = draw(O * H, 0.6);
  const b2 = draw(O, 0.2);
  const h = new Array<number>(B * H).fill(0);
  const y = new Array<number>(B * O).fill(0);
  for (let b = 0; b < B; b++) {
    for (let j = 0; j < H; j++) {
      let sum = b1[j]!;
      for (let i = 0; i < I; i++) sum += x[b * I + i]! * w1[j * I + i]!;
      h[b * H + j] = sum;
    }
    for (let k = 0; k < O; k++) {
      let sum = b2[k]!;
      for (let j = 0; j < H; j++) sum += Math.max(h[b * H + j]!, 0) * w2[k * H + j]!;
      y[b * O + k] = sum;
    }
  }
  const rows = Array.from({ length: B }, (_, b) => b);
  const outs = Array.from({ length: O }, (_, k) => k);
  const pass = (to: number, of: (e: number) => number) => (e: number) =>
    [[to, of(e), 1]] as [number, number, number][];
  return [
    { name: "MeanBackward0", module: 0, shape: [], uses: () => [] },
    { name: "PowBackward0", module: 0, shape: [B, O], uses: () => [[0, 0, 1 / (B * O)]] },
    { name: "AddmmBackward0", module: 4, shape: [B, O], uses: (e) => [[1, e, 2 * y[e]!]] },
    {
      name: "ReluBackward0",
      module: 3,
      shape: [B, H],
      uses: (e) => outs.map((k) => [2, Math.floor(e / H) * O + k, w2[k * H + (e % H)]!]),
    },
    {
      name: "AddmmBackward0",
      module: 2,
      shape: [B, H],
      uses: (e) => [[3, e, h[e]! > 0 ? 1 : 0]],
    },
    {
      name: "TBackward0", // of (O, H)
      module: 4,
      shape: [H, O],
      view: true,
      uses: (e) =>
        rows.map((b) => [2, b * O + (e % O), Math.max(h[b * H + Math.floor(e / O)]!, 0)]),
    },
    {
      name: "TBackward0", // of (H, I)
      module: 2,
      shape: [I, H],
      view: true,
      uses: (e) => rows.map((b) => [4, b * H + (e % H), x[b * I + Math.floor(e / H)]!]),
    },
    {
      name: "leaf",
      module: 4,
      shape: [O, H],
      leaf: "weight",
      uses: pass(5, (e) => (e % H) * O + Math.floor(e / H)),
    },
    {
      name: "leaf",
      module: 4,
      shape: [O],
      leaf: "bias",
      uses: (e) => rows.map((b) => [2, b * O + e, 1]),
    },
    {
      name: "leaf",
      module: 2,
      shape: [H, I],
      leaf: "weight",
      uses: pass(6, (e) => (e % I) * H + Math.floor(e / I)),
    },
    {
      name: "leaf",
      module: 2,
      shape: [H],
      leaf: "bias",
      uses: (e) => rows.map((b) => [4, b * H + e, 1]),
    },
  ];
}

/** The gradients of all elements, users first. */
function solve(nodes: Node[]): number[][] {
  const found: number[][] = [[1]];
  for (const [n, node] of nodes.entries()) {
    if (n === 0) continue;
    found.push(
      Array.from({ length: size(node.shape) }, (_, e) =>
        node.uses(e).reduce((sum, [to, at, d]) => sum + d * found[to]![at]!, 0),
      ),
    );
  }
  return found;
}

class Grove {
  operator: number[] = [];
  word: number[] = [];
  shape: number[] = [];
  element: number[] = [];
  derivative: number[] = [];
  gradient: number[] = [];
  share: number[] = [];
  next: number[] = [];
  private known = new Map<string, number>();

  constructor(
    private nodes: Node[],
    private gradients: number[][],
    private word_: (name: string) => number,
    private shape_: (shape: number[]) => number,
  ) {}

  /** The vertex of an element; -1 if no contribution to it differs from 0. */
  scalar(at: number, element: number): number {
    const key = `${at} ${element}`;
    const old = this.known.get(key);
    if (old !== undefined) return old;
    const [to, place, derivative, next] = this.best(at, element);
    if (at !== 0 && (next < 0 || derivative === 0)) {
      this.known.set(key, -1);
      return -1;
    }
    const gradient = this.gradients[at]![element]!;
    const onward = at === 0 ? 1 : this.gradients[to]![place]!;
    return this.put(key, at, element, at === 0 ? 1 : derivative, gradient, {
      share: gradient ? (derivative * onward) / gradient : NaN,
      next,
    });
  }

  private best(at: number, element: number): [number, number, number, number] {
    if (at === 0) return [0, 0, 1, -1];
    let found: [number, number, number, number] = [0, 0, 0, -1];
    let most = 0;
    for (const [to, place, d] of this.nodes[at]!.uses(element)) {
      const size = Math.abs(d * this.gradients[to]![place]!);
      if (size > most) {
        most = size;
        found = [to, place, d, this.scalar(to, place)];
      }
    }
    return found;
  }

  private put(
    key: string,
    at: number,
    element: number,
    derivative: number,
    gradient: number,
    rest: { share: number; next: number },
  ): number {
    const node = this.nodes[at]!;
    const number = this.next.length;
    this.known.set(key, number);
    this.operator.push(at);
    this.word.push(this.word_(node.name));
    this.shape.push(this.shape_(node.shape));
    this.element.push(element);
    this.derivative.push(derivative);
    this.gradient.push(gradient);
    this.share.push(rest.share);
    this.next.push(rest.next);
    return number;
  }

  forest(): Forest {
    return {
      operator: Int32Array.from(this.operator),
      word: Int32Array.from(this.word),
      shape: Int32Array.from(this.shape),
      element: Int32Array.from(this.element),
      derivative: Float64Array.from(this.derivative),
      gradient: Float64Array.from(this.gradient),
      share: Float32Array.from(this.share),
      next: Int32Array.from(this.next),
    };
  }
}

/** Words or shapes, each once. */
function pool<T>(items: T[]): (item: T) => number {
  const known = new Map<string, number>();
  return (item) => {
    const key = JSON.stringify(item);
    let at = known.get(key);
    if (at === undefined) {
      at = items.push(item) - 1;
      known.set(key, at);
    }
    return at;
  };
}

const absolute = (values: ArrayLike<number>): number => {
  let sum = 0;
  for (let n = 0; n < values.length; n++) sum += Math.abs(values[n]!);
  return sum;
};

export function trace(choice: Choice = {}): Trace {
  const { seed = 1, skip = 0, head = "head" } = choice;
  const nodes = perceptron(seed);
  const gradients = solve(nodes);
  const words: string[] = [];
  const shapes: number[][] = [];
  const [word, shape] = [pool(words), pool(shapes)];
  const grove = new Grove(nodes, gradients, word, shape);
  const modules: Module[] = [
    { name: "", kind: "Net", parent: -1, calls: 1, parameters: 67, like: 0 },
    { name: "encoder", kind: "Sequential", parent: 0, calls: 1, parameters: 40, like: 1 },
    { name: "encoder.0", kind: "Linear", parent: 1, calls: 1, parameters: 40, like: 2 },
    { name: "encoder.1", kind: "ReLU", parent: 1, calls: 1, parameters: 0, like: 3 },
    { name: head, kind: "Linear", parent: 0, calls: 1, parameters: 27, like: 4 },
  ];
  const leaves: Leaf[] = [];
  const starts: number[] = [];
  let elements = 0;
  for (const [n, node] of nodes.entries()) {
    if (node.leaf === undefined) continue;
    const name = `${modules[node.module]!.name}.${node.leaf}`;
    const own = gradients[n]!;
    const start = own.map((_, e) => {
      if (skip && e % skip === skip - 1) return -2;
      return grove.scalar(n, e);
    });
    starts.push(...start.filter((s) => s >= 0));
    elements += own.length;
    leaves.push({
      name,
      names: node.shape.length === 1 && node.module === 2 ? [name, "tied.bias"] : [name],
      operator: n,
      module: node.module,
      parameter: true,
      shape: node.shape,
      elements: own.length,
      zero: own.filter((g) => g === 0).length,
      norm: Math.hypot(...own),
      largest: Math.max(...own.map(Math.abs)),
      ...ordered([...own.keys()], own, start),
    });
  }
  const forest = grove.forest();
  return {
    name: choice.name ?? "net",
    rule: choice.rule ?? "greedy",
    notes: choice.notes ?? [],
    words,
    shapes,
    modules,
    operators: {
      name: Int32Array.from(nodes, (node) => word(node.name)),
      module: Int32Array.from(nodes, (node) => node.module),
      call: Int32Array.from(nodes, () => 0),
      shape: Int32Array.from(nodes, (node) => shape(node.shape)),
      leaf: Int32Array.from(nodes, (_, n) => leaves.findIndex((leaf) => leaf.operator === n)),
      view: Uint8Array.from(nodes, (node) => (node.view ? 1 : 0)),
      mass: Float64Array.from(gradients, absolute),
    },
    edges: edges(nodes, gradients),
    leaves,
    forest,
    routes: routes(forest, starts, modules, nodes),
    sample: { paths: starts.length, drawn: elements, elements, seed: 0 },
    tables: { "": influence(forest, starts, modules, nodes) },
    flow: flow(nodes, gradients, modules),
    coverage: null,
    choices: null,
    diagnosis: null,
  };
}

function edges(nodes: Node[], gradients: number[][]): Edges {
  const found = new Map<string, [number, number, number]>();
  for (const [n, node] of nodes.entries()) {
    for (const e of gradients[n]!.keys()) {
      for (const [to, at, d] of node.uses(e)) {
        const row = found.get(`${to} ${n}`) ?? [to, n, 0];
        row[2] += Math.abs(d * gradients[to]![at]!);
        found.set(`${to} ${n}`, row);
      }
    }
  }
  const rows = [...found.values()];
  return {
    consumer: Int32Array.from(rows, (row) => row[0]),
    producer: Int32Array.from(rows, (row) => row[1]),
    position: Int32Array.from(rows, () => 0),
    mass: Float64Array.from(rows, (row) => row[2]),
    share: Float32Array.from(rows, () => 1),
  };
}

function along(forest: Forest, start: number): number[] {
  const found: number[] = [];
  for (let at = start; at >= 0; at = forest.next[at]!) found.push(at);
  return found;
}

function routes(forest: Forest, starts: number[], modules: Module[], nodes: Node[]): Route[] {
  const found = new Map<string, Route>();
  let total = 0;
  for (const start of starts) {
    const operators = along(forest, start)
      .slice(1)
      .map((v) => forest.operator[v]!);
    const key = operators.join();
    const route = found.get(key) ?? {
      operators,
      modules: operators
        .map((o) => nodes[o]!.module)
        .filter((m, n, all) => modules[m]!.name && m !== all[n - 1]),
      count: 0,
      share: 0,
      weighted: 0,
      starts: [],
    };
    const mass = Math.abs(forest.gradient[start]!);
    route.count += 1;
    route.share += 1 / starts.length;
    route.weighted += mass;
    total += mass;
    if (route.starts.length < 5) route.starts.push(start);
    found.set(key, route);
  }
  const all = [...found.values()].sort((a, b) => b.count - a.count);
  for (const route of all) route.weighted /= total || 1;
  return all;
}

function influence(
  forest: Forest,
  starts: number[],
  modules: Module[],
  nodes: Node[],
): Influence {
  const through = modules.map(() => 0);
  const mass = modules.map(() => 0);
  let total = 0;
  for (const start of starts) {
    const seen = new Set<number>();
    for (const at of along(forest, start).slice(1)) {
      for (let m = nodes[forest.operator[at]!]!.module; m >= 0; m = modules[m]!.parent) seen.add(m);
    }
    const size = Math.abs(forest.gradient[start]!);
    total += size;
    for (const m of seen) {
      through[m]! += 1;
      mass[m]! += size;
    }
  }
  const some = modules.map((_, m) => m).filter((m) => m > 0);
  const n = starts.length || 1;
  return {
    name: some.map((m) => modules[m]!.name),
    module: Int32Array.from(some),
    share: Float64Array.from(some, (m) => through[m]! / n),
    weighted: Float64Array.from(some, (m) => mass[m]! / (total || 1)),
    error: Float64Array.from(some, () => NaN),
    through: Float64Array.from(some, (m) => through[m]!),
    eligible: Float64Array.from(some, () => n),
    unreached: Float64Array.from(some, () => 5),
    own: Float64Array.from(some, () => 0),
    notes: [],
    series: new Uint8Array(some.length),
  };
}

function flow(nodes: Node[], gradients: number[][], modules: Module[]): Flow {
  const chain = [0, 1, 2, 3, 4];
  const norms = chain.map((n) => Math.hypot(...gradients[n]!));
  return {
    findings: ["1 of 8 units of encoder.1 (ReLU) passes nothing on: its gradient is 0 throughout."],
    depth: Int32Array.from(chain),
    norm: Float64Array.from(norms),
    rms: Float64Array.from(chain, (n, i) => norms[i]! / Math.sqrt(gradients[n]!.length)),
    zeros: Float64Array.from(
      chain,
      (n) => gradients[n]!.filter((g) => g === 0).length / gradients[n]!.length,
    ),
    operator: chain.map((n) => nodes[n]!.name),
    module: chain.map((n) => modules[nodes[n]!.module]!.name),
    rows: [4, 3, 2].map((module, n) => ({
      module,
      depth: n + 2,
      norm: norms[n + 2]!,
      gain: n === 2 ? null : norms[n + 3]! / norms[n + 2]!,
      zeros: 0,
      own: module === 3 ? null : 0.5,
      verdict: module === 3 ? "mostly dead" : "",
    })),
  };
}

// Whole reports -----------------------------------------------------------------------------------

export function report(traces: Trace[] = [], more: Partial<Report> = {}): Report {
  return {
    schema: 1,
    title: traces[0]?.name ?? "training",
    made: [
      ["gradtrace", "0.6.0"],
      ["torch", "2.13.0"],
    ],
    traces,
    training: null,
    timing: null,
    attribution: null,
    ...more,
  };
}

export const small = (choice: Choice = {}): Report => report([trace(choice)]);

export function hostile(): Report {
  const found = trace({ name: HOSTILE, head: HOSTILE, notes: [HOSTILE] });
  found.modules[3]!.name = "x".repeat(10_000);
  found.modules[3]!.kind = HOSTILE;
  found.flow.findings.push(HOSTILE);
  return report([found], { title: HOSTILE, made: [[HOSTILE, HOSTILE]] });
}

/** A trace with no parameters, no paths, no modules but the root. */
export function bare(): Trace {
  const whole = trace();
  const none = { i: new Int32Array(0), f: new Float64Array(0), s: new Float32Array(0) };
  return {
    ...whole,
    modules: whole.modules.slice(0, 1),
    operators: {
      name: Int32Array.of(0),
      module: Int32Array.of(0),
      call: Int32Array.of(0),
      shape: Int32Array.of(0),
      leaf: Int32Array.of(-1),
      view: Uint8Array.of(0),
      mass: Float64Array.of(1),
    },
    edges: { consumer: none.i, producer: none.i, position: none.i, mass: none.f, share: none.s },
    leaves: [],
    forest: {
      operator: none.i,
      word: none.i,
      shape: none.i,
      element: none.i,
      derivative: none.f,
      gradient: none.f,
      share: none.s,
      next: none.i,
    },
    routes: [],
    sample: { paths: 0, drawn: 0, elements: 0, seed: 0 },
    tables: {},
    flow: {
      findings: [],
      depth: none.i,
      norm: none.f,
      rms: none.f,
      zeros: none.f,
      operator: [],
      module: [],
      rows: [],
    },
  };
}

export function training(steps = 60, components = 14): Training {
  const next = random(5);
  const names = Array.from({ length: components }, (_, n) =>
    n % 2 ? `blocks.${n >> 1}.attention` : `blocks.${n >> 1}.mlp`,
  );
  const course = (n: number): Float64Array =>
    Float64Array.from({ length: steps }, (_, t) => {
      const base = 0.9 / (1 + n * 0.4);
      const late = base * (n % 3 ? 0.6 : 1.08);
      const mix = 1 - Math.exp(-t / (12 + n));
      return Math.max(0, Math.min(1, base + (late - base) * mix + 0.02 * (next() - 0.5)));
    });
  return {
    step: Int32Array.from({ length: steps }, (_, t) => 100 * t),
    loss: Float64Array.from({ length: steps }, (_, t) => 0.4 + 3.6 * Math.exp(-t / 15) + 0.1 * next()),
    components: names,
    share: names.map((_, n) => course(n)),
    weighted: names.map((_, n) => course(n + 1)),
    cost: 0.021,
    running: true,
    notes: [],
  };
}

export function timing(steps = 300, slope = 2e-6): Timing {
  const next = random(8);
  return {
    step: Int32Array.from({ length: steps }, (_, t) => t),
    seconds: Float64Array.from(
      { length: steps },
      (_, t) => 0.012 + slope * t + 0.002 * next() * next() + (next() > 0.98 ? 0.01 : 0),
    ),
    verdict: "Steps slow down: 12.4 ms to 13.0 ms over 300 steps (+4.8%).",
    grows: true,
    slope,
    low: slope * 0.7,
    high: slope * 1.4,
  };
}

// A large one -------------------------------------------------------------------------------------

/** A chain of equal blocks, with about as many operators as asked for. */
export function large(operators = 22_000, side = 64): Report {
  const next = random(3);
  const each = 20;
  const blocks = Math.max(1, Math.round(operators / each));
  const kinds = ["AddBackward0", "AddmmBackward0", "GeluBackward0", "ViewBackward0", "TBackward0"];
  const words = [...kinds, "MeanBackward0", "leaf"];
  const shapes = [[], [8, 128, 768], [3072, 768], [768, 3072]];
  const modules: Module[] = [
    { name: "", kind: "Model", parent: -1, calls: 1, parameters: 0, like: 0 },
    { name: "layers", kind: "ModuleList", parent: 0, calls: 1, parameters: 0, like: 1 },
  ];
  const rows = { name: [5], module: [0], call: [0], shape: [0], leaf: [-1], view: [0], mass: [1] };
  const edge = { consumer: [] as number[], producer: [] as number[], position: [] as number[] };
  const leaves: Leaf[] = [];
  const put = (word: number, module: number, shape: number, user: number, leaf = -1): number => {
    const at = rows.name.push(word) - 1;
    rows.module.push(module);
    rows.call.push(0);
    rows.shape.push(shape);
    rows.leaf.push(leaf);
    rows.view.push(word === 3 || word === 4 ? 1 : 0);
    rows.mass.push(0.1 + next());
    edge.consumer.push(user);
    edge.producer.push(at);
    edge.position.push(0);
    return at;
  };
  let last = 0;
  for (let b = blocks - 1; b >= 0; b--) {
    const block =
      modules.push({
        name: `layers.${b}`,
        kind: "Block",
        parent: 1,
        calls: 1,
        parameters: 768 * 3072,
        like: modules.length > 2 ? 2 : modules.length,
      }) - 1;
    const inner =
      modules.push({
        name: `layers.${b}.mlp`,
        kind: "MLP",
        parent: block,
        calls: 1,
        parameters: 768 * 3072,
        like: modules.length,
      }) - 1;
    for (let n = 0; n < each - 1; n++) {
      last = put(n % kinds.length, n % 4 ? inner : block, 1, last);
    }
    if (b % 4 === 0 && leaves.length < 40) {
      const number = leaves.length;
      const at = put(6, inner, 2, last, number);
      leaves.push(weight(`layers.${b}.mlp.weight`, at, inner, side));
    }
  }
  const forest = chains(leaves, rows, edge, next);
  const n = rows.name.length;
  const of = (values: number[]): Int32Array => Int32Array.from(values);
  const all: Operators = {
    name: of(rows.name),
    module: of(rows.module),
    call: of(rows.call),
    shape: of(rows.shape),
    leaf: of(rows.leaf),
    view: Uint8Array.from(rows.view),
    mass: Float64Array.from(rows.mass),
  };
  const table = modules.slice(1);
  const share = Float64Array.from(table, () => next());
  return report([
    {
      name: `large (${n})`,
      rule: "greedy",
      notes: [],
      words,
      shapes,
      modules,
      operators: all,
      edges: {
        consumer: of(edge.consumer),
        producer: of(edge.producer),
        position: of(edge.position),
        mass: Float64Array.from(edge.consumer, () => next()),
        share: Float32Array.from(edge.consumer, () => 1),
      },
      leaves,
      forest,
      routes: leaves.slice(0, 5).map((leaf) => {
        const way = along(forest, leaf.start[0]!).slice(1);
        const places = way.map((v) => all.module[forest.operator[v]!]!);
        return {
          operators: way.map((v) => forest.operator[v]!),
          modules: places.filter((m, at) => m && m !== places[at - 1]),
          count: 10,
          share: 0.2,
          weighted: 0.2,
          starts: [leaf.start[0]!],
        };
      }),
      sample: { paths: 10_000, drawn: 10_000, elements: leaves.length * 768 * 3072, seed: 0 },
      tables: {
        "": {
          name: table.map((m) => m.name),
          module: Int32Array.from(table, (_, m) => m + 1),
          share,
          weighted: share.map((s) => s * s),
          error: share.map(() => NaN),
          through: share.map((s) => Math.round(s * 1e4)),
          eligible: share.map(() => 1e4),
          unreached: share.map(() => 0),
          own: share.map(() => 0),
          notes: [],
          series: new Uint8Array(share.length),
        },
      },
      flow: {
        findings: [],
        depth: Int32Array.from({ length: 400 }, (_, d) => d),
        norm: Float64Array.from({ length: 400 }, (_, d) => Math.exp(-d / 30) * (0.5 + next())),
        rms: Float64Array.from({ length: 400 }, (_, d) => 1e-3 * Math.exp(-d / 30)),
        zeros: Float64Array.from({ length: 400 }, () => 0.4 * next()),
        operator: Array.from({ length: 400 }, (_, d) => kinds[d % kinds.length]!),
        module: Array.from({ length: 400 }, (_, d) => `layers.${d >> 4}`),
        rows: [],
      },
      coverage: null,
      choices: null,
      diagnosis: null,
    },
  ]);
}

function weight(name: string, operator: number, module: number, many: number): Leaf {
  const [height, width] = [3072, 768];
  const next = random(operator);
  const gradient = Array.from({ length: many }, () => (next() < 0.5 ? -1 : 1) * 10 ** (-6 * next() - 2));
  const element = gradient.map((_, n) => n * 1000 + Math.floor(1000 * next()));
  return {
    name,
    names: [name],
    operator,
    module,
    parameter: true,
    shape: [height, width],
    elements: height * width,
    zero: 1234,
    norm: 0.5,
    largest: Math.max(...gradient.map(Math.abs)),
    ...ordered(element, gradient, gradient.map(() => -2)),
  };
}

/** The elements of a leaf in the order of |gradient|, the largest first. */
function ordered(element: number[], gradient: number[], start: number[]): Pick<Leaf, "element" | "gradient" | "start"> {
  const order = [...gradient.keys()].sort((a, b) => Math.abs(gradient[b]!) - Math.abs(gradient[a]!));
  return {
    element: Int32Array.from(order, (n) => element[n]!),
    gradient: Float64Array.from(order, (n) => gradient[n]!),
    start: Int32Array.from(order, (n) => start[n]!),
  };
}

/** Where the path of an element starts. */
export const startOf = (leaf: Leaf, element: number): number => leaf.start[leaf.element.indexOf(element)]!;

/** Paths of every third element: products and gradients agree, whatever the model would have done. */
function chains(
  leaves: Leaf[],
  rows: { name: number[]; shape: number[] },
  edge: { consumer: number[]; producer: number[] },
  next: () => number,
): Forest {
  const users = new Map<number, number>();
  edge.producer.forEach((producer, n) => users.set(producer, edge.consumer[n]!));
  const found = {
    operator: [0],
    word: [5],
    shape: [0],
    element: [0],
    derivative: [1],
    gradient: [1],
    share: [1],
    next: [-1],
  };
  const known = new Map<number, number>([[0, 0]]);
  const put = (operator: number, element: number, gradient: number | null, to: number): number => {
    const onward = found.gradient[to]!;
    const share = gradient === null ? 0.995 + 0.005 * next() : 0.4 + 0.6 * next();
    const derivative = gradient === null ? share * (0.98 + 0.04 * next()) : (gradient * share) / onward;
    found.operator.push(operator);
    found.word.push(rows.name[operator]!);
    found.shape.push(rows.shape[operator]!);
    found.element.push(element);
    found.derivative.push(derivative);
    found.gradient.push(gradient ?? (derivative * onward) / share);
    found.share.push(share);
    return found.next.push(to) - 1;
  };
  const vertex = (operator: number): number => {
    const way: number[] = [];
    for (let at = operator; !known.has(at); at = users.get(at) ?? 0) way.push(at);
    for (const at of way.reverse()) known.set(at, put(at, 17, null, known.get(users.get(at) ?? 0)!));
    return known.get(operator)!;
  };
  for (const leaf of leaves) {
    const to = vertex(users.get(leaf.operator) ?? 0);
    for (let n = 0; n < leaf.element.length; n += 3) {
      leaf.start[n] = put(leaf.operator, leaf.element[n]!, leaf.gradient[n]!, to);
    }
  }
  return {
    operator: Int32Array.from(found.operator),
    word: Int32Array.from(found.word),
    shape: Int32Array.from(found.shape),
    element: Int32Array.from(found.element),
    derivative: Float64Array.from(found.derivative),
    gradient: Float64Array.from(found.gradient),
    share: Float32Array.from(found.share),
    next: Int32Array.from(found.next),
  };
}

// The container -----------------------------------------------------------------------------------

const isColumn = (value: unknown): value is Column =>
  value instanceof Float32Array ||
  value instanceof Float64Array ||
  value instanceof Int32Array ||
  value instanceof Uint8Array;

const kind = (column: Column): string =>
  column instanceof Float32Array
    ? "f4"
    : column instanceof Float64Array
      ? "f8"
      : column instanceof Int32Array
        ? "i4"
        : "u1";

/** The container before it is packed. */
export function pack(report: Report): Uint8Array {
  const columns: { column: Column; offset: number }[] = [];
  let end = 0;
  const text = JSON.stringify(report, (_, value: unknown) => {
    if (isColumn(value)) {
      columns.push({ column: value, offset: end });
      const row = { $: kind(value), o: end, n: value.length };
      end = Math.ceil((end + value.byteLength) / 8) * 8;
      return row;
    }
    if (typeof value === "number" && !Number.isFinite(value)) {
      return Number.isNaN(value) ? "nan" : value > 0 ? "inf" : "-inf";
    }
    return value;
  });
  const bytes = new TextEncoder().encode(text);
  const head = Math.ceil((4 + bytes.length) / 8) * 8;
  const all = new Uint8Array(head + end);
  new DataView(all.buffer).setUint32(0, bytes.length, true);
  all.set(bytes, 4);
  for (const { column, offset } of columns) {
    all.set(new Uint8Array(column.buffer, column.byteOffset, column.byteLength), head + offset);
  }
  return all;
}

/** As the page holds it: base64 of gzip of the container. */
export async function encode(report: Report): Promise<string> {
  const stream = new Blob([pack(report) as BlobPart]).stream();
  const packed = stream.pipeThrough(new CompressionStream("gzip"));
  const bytes = new Uint8Array(await new Response(packed).arrayBuffer());
  let text = "";
  for (let at = 0; at < bytes.length; at += 0x8000) {
    text += String.fromCharCode(...bytes.subarray(at, at + 0x8000));
  }
  return btoa(text);
}
