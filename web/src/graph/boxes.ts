/**
 * The boxes that a graph is drawn in: one for each module, and one for each run of equal siblings.
 *
 * A box's number is its module's; the fold of a run of equal siblings that begins with module m is
 * the number of modules + m. Where a module holds nothing but such a run (a ModuleList) it is
 * itself the fold. Boxes without operators are not drawn.
 */
import type { Module, Trace } from "../types";

export interface Boxes {
  modules: number; // how many; folds are numbered from here on
  parent: Int32Array; // the box around; -1 for the root, -2 for folds that are none
  inside: number[][]; // boxes in it that have operators, in the order of modules
  rows: number[][]; // operators and leaves that are directly in it
  size: Int32Array; // operators and leaves in it, with all inside
  first: Int32Array; // the least row inside: what stands closest to the loss
  repeats: Int32Array; // how many equal ones a fold holds; 0 for others
}

const cache = new WeakMap<Trace, Boxes>();

export function boxes(trace: Trace): Boxes {
  let found = cache.get(trace);
  if (!found) cache.set(trace, (found = build(trace)));
  return found;
}

/** How many equal siblings are worth a fold: two are as quickly seen as "×2". */
const FEW = 3;

function build(trace: Trace): Boxes {
  const { modules, operators } = trace;
  const count = modules.length;
  const all: Boxes = {
    modules: count,
    parent: new Int32Array(2 * count).fill(-2),
    inside: Array.from({ length: 2 * count }, () => []),
    rows: Array.from({ length: 2 * count }, () => []),
    size: new Int32Array(2 * count),
    first: new Int32Array(2 * count).fill(operators.name.length),
    repeats: new Int32Array(2 * count),
  };
  for (let row = 0; row < operators.name.length; row++) {
    const at = operators.module[row]!;
    all.rows[at]!.push(row);
    all.size[at]!++;
    all.first[at] = Math.min(all.first[at]!, row);
  }
  for (let m = count - 1; m > 0; m--) {
    const up = modules[m]!.parent;
    all.size[up]! += all.size[m]!;
    all.first[up] = Math.min(all.first[up]!, all.first[m]!);
  }
  const children: number[][] = Array.from({ length: count }, () => []);
  all.parent[0] = -1;
  for (let m = 1; m < count; m++) {
    const up = modules[m]!.parent;
    all.parent[m] = up;
    if (all.size[m]) children[up]!.push(m);
  }
  for (let m = 0; m < count; m++) fold(all, m, runs(children[m]!, modules));
  return all;
}

/** Siblings in order, equal neighbours with numbers for names together. */
function runs(children: number[], modules: Module[]): number[][] {
  const found: number[][] = [];
  for (const m of children) {
    const last = found[found.length - 1];
    const alike = last && modules[last[0]!]!.like === modules[m]!.like && numbered(modules[m]!);
    if (alike) last.push(m);
    else found.push([m]);
  }
  return found.flatMap((run) => (run.length < FEW ? run.map((m) => [m]) : [run]));
}

/** Items of a list or Sequential; query, key and value are alike too, but not the same. */
const numbered = (module: Module): boolean => /(^|\.)\d+$/.test(module.name);

function fold(all: Boxes, module: number, runs: number[][]): void {
  for (const run of runs) {
    const first = run[0]!;
    if (run.length === 1) {
      all.inside[module]!.push(first);
    } else if (runs.length === 1 && all.rows[module]!.length === 0) {
      all.inside[module] = run;
      all.repeats[module] = run.length;
    } else {
      const box = all.modules + first;
      all.inside[module]!.push(box);
      all.inside[box] = run;
      all.repeats[box] = run.length;
      all.parent[box] = module;
      for (const m of run) {
        all.parent[m] = box;
        all.size[box]! += all.size[m]!;
        all.first[box] = Math.min(all.first[box]!, all.first[m]!);
      }
    }
  }
}

/** What a screen holds and a reader takes in at once. */
const SCREEN = 24;

/**
 * The boxes that are open at first: whole levels of them, while all fits a screen; no folds, and no
 * boxes with but one operator in them.
 */
export function opening(trace: Trace): number[] {
  const all = boxes(trace);
  const shown = (box: number) => all.inside[box]!.length + visible(trace, all.rows[box]!);
  const open: number[] = [];
  let total = shown(0);
  let level = all.inside[0]!;
  while (level.length) {
    const next = level.filter((box) => !all.repeats[box] && (all.inside[box]!.length || shown(box) > 1));
    if (!next.length) break;
    total += next.reduce((sum, box) => sum + shown(box) - 1, 0);
    if (total > SCREEN) break;
    open.push(...next);
    level = next.flatMap((box) => all.inside[box]!);
  }
  return open;
}

function visible(trace: Trace, rows: number[]): number {
  let count = 0;
  for (const row of rows) if (!trace.operators.view[row]) count++;
  return count;
}

/** The boxes around an operator's module or a box, from the inside out, without the root. */
export function around(all: Boxes, box: number): number[] {
  const found: number[] = [];
  for (let at = all.parent[box]!; at > 0; at = all.parent[at]!) found.push(at);
  return found;
}

/** Open boxes with all that is needed to see this one. */
export function reveal(trace: Trace, open: readonly number[], box: number): number[] {
  return [...new Set([...open, ...around(boxes(trace), box)])];
}

/** ...to see this operator. */
export function revealRow(trace: Trace, open: readonly number[], row: number): number[] {
  const module = trace.operators.module[row]!;
  return [...new Set([...reveal(trace, open, module), ...(module ? [module] : [])])];
}

/** As much as can be opened along a path before nobody can read it. */
const LONG = 400;

/** The boxes that operators are in, outer ones first, until too much would be seen. */
export function along(trace: Trace, rows: Iterable<number>): number[] {
  const all = boxes(trace);
  const wanted = new Map<number, number>(); // box: depth
  for (const row of rows) {
    const chain = [trace.operators.module[row]!, ...around(all, trace.operators.module[row]!)];
    chain.forEach((box, at) => {
      if (box > 0) wanted.set(box, chain.length - at);
    });
  }
  const open: number[] = [];
  let total = 0;
  for (const [box] of [...wanted].sort((a, b) => a[1] - b[1])) {
    total += all.inside[box]!.length + visible(trace, all.rows[box]!);
    if (total > LONG) break;
    open.push(box);
  }
  return open;
}

/** The last part of a dotted name; the whole path is in titles. */
export function brief(trace: Trace, box: number): string {
  const all = boxes(trace);
  const { modules } = trace;
  if (box < all.modules) {
    const name = modules[box]!.name;
    const up = modules[modules[box]!.parent]?.name ?? "";
    return name.startsWith(`${up}.`) ? name.slice(up.length + 1) : name;
  }
  const run = all.inside[box]!;
  return `${brief(trace, run[0]!)} – ${brief(trace, run[run.length - 1]!)}`;
}

/** The class; of a fold that of its members. */
export function kind(trace: Trace, box: number): string {
  const all = boxes(trace);
  return trace.modules[all.repeats[box] ? all.inside[box]![0]! : box]!.kind;
}
