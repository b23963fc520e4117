/** Paths as they are told: from a vertex of the forest to the loss, as `trace.path` has them. */
import { element, unravel } from "../format";
import type { Leaf, Trace } from "../types";

export interface Step {
  vertex: number;
  row: number; // into operators
  operator: string;
  module: number; // into modules
  place: string; // the module's name
  call: number;
  shape: number[];
  index: number[];
  derivative: number;
  gradient: number;
  share: number;
  view: boolean;
}

export interface Path {
  leaf: Leaf;
  index: number[];
  steps: Step[];
  gradient: number;
  /** The product of the derivatives along it. */
  weight: number;
  /** log₁₀ |weight|, which no path is too long for. */
  log: number;
  /** The part of the element's gradient that this path alone carries. */
  share: number;
}

/** The vertices from one to the loss. */
export function along(trace: Trace, start: number): number[] {
  const { next } = trace.forest;
  const found: number[] = [];
  // A forest has no circles; a damaged file might, and must not hang the page.
  for (let at = start; at >= 0 && at < next.length && found.length <= next.length; at = next[at]!) {
    found.push(at);
  }
  return found;
}

function step(trace: Trace, vertex: number, first: boolean): Step {
  const { forest, operators } = trace;
  const row = forest.operator[vertex] ?? 0;
  const module = first ? 0 : (operators.module[row] ?? 0);
  const shape = trace.shapes[forest.shape[vertex] ?? 0] ?? [];
  const flat = forest.element[vertex] ?? -1;
  return {
    vertex,
    row,
    operator: first ? "leaf" : (trace.words[forest.word[vertex] ?? 0] ?? ""),
    module,
    place: first ? "" : (trace.modules[module]?.name ?? ""),
    call: first ? 0 : (operators.call[row] ?? 0),
    shape,
    index: flat < 0 ? [] : unravel(flat, shape),
    derivative: forest.derivative[vertex] ?? NaN,
    gradient: forest.gradient[vertex] ?? NaN,
    share: forest.share[vertex] ?? NaN,
    view: !first && operators.view[row] === 1,
  };
}

export function path(trace: Trace, leaf: Leaf, start: number): Path {
  const steps = along(trace, start).map((vertex, n) => step(trace, vertex, n === 0));
  const weight = steps.reduce((product, s) => product * s.derivative, 1);
  const gradient = steps[0]?.gradient ?? NaN;
  return {
    leaf,
    index: steps[0]?.index ?? [],
    steps,
    gradient,
    weight,
    log: steps.reduce((sum, s) => sum + Math.log10(Math.abs(s.derivative)), 0),
    share: gradient ? weight / gradient : NaN,
  };
}

/** The modules from parameter to loss, each once in a row; steps outside of any are left out. */
export function modules(trace: Trace, steps: readonly Step[]): number[] {
  const found: number[] = [];
  for (const s of steps.slice(1)) {
    if (trace.modules[s.module]?.name && found.at(-1) !== s.module) found.push(s.module);
  }
  return found;
}

/** A string as Python writes it, for a line that is copied. */
export function quoted(text: string): string {
  const safe = [...text].map((c) => {
    const code = c.codePointAt(0) ?? 0;
    if (c === "\\" || c === '"') return `\\${c}`;
    if (c === "\n") return "\\n";
    const plain = code >= 0x20 && code < 0x7f;
    if (plain || /^[\p{L}\p{N}\p{M}]$/u.test(c)) return c;
    return code > 0xffff
      ? `\\U${code.toString(16).padStart(8, "0")}`
      : `\\u${code.toString(16).padStart(4, "0")}`;
  });
  return `"${safe.join("")}"`;
}

/** The line of Python that finds a path. */
export function python(leaf: Leaf, index: readonly number[]): string {
  const inside = index.length === 1 ? `(${index[0]},)` : `(${index.join(", ")})`;
  return index.length
    ? `trace.path(${quoted(leaf.name)}, ${inside})`
    : `trace.path(${quoted(leaf.name)})`;
}

export const title = (path: Path): string =>
  path.index.length ? `${path.leaf.name} ${element(path.index)}` : path.leaf.name;
