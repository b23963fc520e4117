/**
 * The boxes that a graph is drawn in: one for each module, one for each run of equal siblings, and
 * one for the equal operators of a loop.
 *
 * A box's number is its module's; the fold of a run of equal siblings that begins with module m is
 * the number of modules + m; loops come after. Where a module holds nothing but a run of equal ones
 * (a ModuleList) it is itself the fold. Boxes without operators are not drawn.
 */
import type { Module, Trace } from "../types";

export interface Boxes {
  modules: number; // how many; folds are numbered from here on, loops from twice as many
  parent: Int32Array; // the box around; -1 for the root, -2 for folds that are none
  inside: number[][]; // boxes in it that have operators, in the order of modules
  rows: number[][]; // operators and leaves that are directly in it
  size: Int32Array; // operators and leaves in it, with all inside
  first: Int32Array; // the least row inside: what stands closest to the loss
  repeats: Int32Array; // how many equal ones a fold or loop holds; 0 for others
  around: Int32Array; // the innermost box of each operator: a module or a loop
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
  const repeated = loops(trace);
  const length = 2 * count + repeated.length;
  const all: Boxes = {
    modules: count,
    parent: new Int32Array(length).fill(-2),
    inside: Array.from({ length }, () => []),
    rows: Array.from({ length }, () => []),
    size: new Int32Array(length),
    first: new Int32Array(length).fill(operators.name.length),
    repeats: new Int32Array(length),
    around: operators.module.slice(),
  };
  for (let row = 0; row < operators.name.length; row++) {
    const at = operators.module[row]!;
    all.size[at]!++;
    all.first[at] = Math.min(all.first[at]!, row);
  }
  for (let m = count - 1; m > 0; m--) {
    const up = modules[m]!.parent;
    all.size[up]! += all.size[m]!;
    all.first[up] = Math.min(all.first[up]!, all.first[m]!);
  }
  repeated.forEach((rows, n) => {
    const box = 2 * count + n;
    all.parent[box] = operators.module[rows[0]!]!;
    all.size[box] = all.repeats[box] = rows.length;
    all.first[box] = rows[0]!;
    for (const row of rows) all.around[row] = box;
  });
  all.around.forEach((box, row) => all.rows[box]!.push(row));
  const children: number[][] = Array.from({ length: count }, () => []);
  all.parent[0] = -1;
  for (let m = 1; m < count; m++) {
    const up = modules[m]!.parent;
    all.parent[m] = up;
    if (all.size[m]) children[up]!.push(m);
  }
  for (let m = 0; m < count; m++) fold(all, m, runs(children[m]!, modules));
  for (let box = 2 * count; box < length; box++) all.inside[all.parent[box]!]!.push(box);
  return all;
}

/** A module with more operators than these is taken to hold a loop... */
const LOOP = 60;
/** ...of at least so many rounds. */
const ROUNDS = 8;

/** Operators of one module that are alike: name, shape, and the names of what uses their values. */
function loops(trace: Trace): number[][] {
  const { operators, edges } = trace;
  const rows = operators.name.length;
  const own = new Int32Array(trace.modules.length);
  for (let row = 0; row < rows; row++) if (!operators.view[row]) own[operators.module[row]!]!++;
  if (!own.some((count) => count > LOOP)) return [];
  const users: Set<number>[] = Array.from({ length: rows }, () => new Set());
  // Rows come after their users, so what a folded view is used for is known before it is asked.
  const order = Array.from(edges.producer.keys()).sort((a, b) => edges.producer[a]! - edges.producer[b]!);
  for (const edge of order) {
    const [user, maker] = [edges.consumer[edge]!, edges.producer[edge]!];
    if (!operators.view[user]) users[maker]!.add(operators.name[user]!);
    else for (const name of users[user]!) users[maker]!.add(name);
  }
  const groups = new Map<string, number[]>();
  for (let row = 1; row < rows; row++) {
    if (operators.leaf[row]! >= 0 || own[operators.module[row]!]! <= LOOP) continue;
    const names = [...users[row]!].sort((a, b) => a - b);
    const id = `${operators.module[row]} ${operators.name[row]} ${operators.shape[row]} ${names.join()}`;
    const group = groups.get(id);
    if (group) group.push(row);
    else groups.set(id, [row]);
  }
  return [...groups.values()].filter((group) => group.length >= ROUNDS);
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

/** Whether a module, or one inside it, has an operator or a leaf that gradient reaches. */
export function inGraph(trace: Trace, module: number): boolean {
  return module === 0 || boxes(trace).size[module]! > 0;
}

/** Open boxes with all that is needed to see this one. */
export function reveal(trace: Trace, open: readonly number[], box: number): number[] {
  return [...new Set([...open, ...around(boxes(trace), box)])];
}

/** ...to see this operator. */
export function revealRow(trace: Trace, open: readonly number[], row: number): number[] {
  const box = boxes(trace).around[row]!;
  return [...new Set([...reveal(trace, open, box), ...(box ? [box] : [])])];
}

/** As much as can be opened along a path before nobody can read it. */
const LONG = 400;

/** The boxes that operators are in, outer ones first, until too much would be seen. */
export function along(trace: Trace, rows: Iterable<number>): number[] {
  const all = boxes(trace);
  const wanted = new Map<number, number>(); // box: depth
  for (const row of rows) {
    const chain = [all.around[row]!, ...around(all, all.around[row]!)];
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

/** An operator's name as people say it: autograd's endings tell nothing. */
export function plain(word: string): string {
  return word.replace(/Backward\d*$/, "") || word;
}

/** The last part of a dotted name; the whole path is in titles. */
export function brief(trace: Trace, box: number): string {
  const all = boxes(trace);
  const { modules } = trace;
  if (box >= 2 * all.modules) return plain(trace.words[trace.operators.name[all.first[box]!]!]!);
  if (box < all.modules) {
    const name = modules[box]!.name;
    const up = modules[modules[box]!.parent]?.name ?? "";
    return name.startsWith(`${up}.`) ? name.slice(up.length + 1) : name;
  }
  const run = all.inside[box]!;
  return `${brief(trace, run[0]!)} – ${brief(trace, run[run.length - 1]!)}`;
}

/** The class; of a fold that of its members; a loop has none. */
export function kind(trace: Trace, box: number): string {
  const all = boxes(trace);
  const module = all.repeats[box] ? all.inside[box]![0] : box;
  return module === undefined ? "" : trace.modules[module]!.kind;
}
