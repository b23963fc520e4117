/**
 * What is to be drawn for a set of open boxes: for each open box its nodes and edges.
 *
 * A node is a closed box, an open box, or an operator (numbered after all boxes). An edge of the
 * graph runs from what uses a value to what made it, as gradient does. If it leaves boxes it is cut
 * at their borders, so each box can be laid out by itself: from the node to OUT, from box to box,
 * from IN to the node. What goes the same way is added up.
 */
import { find } from "../paths/pick";
import type { Trace } from "../types";
import { boxes, type Boxes } from "./boxes";

export const IN = -1;
export const OUT = -2;

export interface Line {
  from: number; // node, or IN
  to: number; // node, or OUT
  mass: number; // Σ |gradient| that goes this way
  share: number; // of all that goes to `to`
}

export interface Level {
  box: number;
  nodes: number[];
  lines: Line[];
}

export interface Scene {
  all: Boxes;
  levels: Map<number, Level>; // by box, outer ones first
  outer: (node: number) => number; // the box around a node
  base: number; // operators are numbered from here on
  /** The node that shows a row; a folded view is shown by what made its value. */
  node: (row: number) => number;
  /** The lines between two rows, as "box:from:to". */
  way: (consumer: number, producer: number) => string[];
}

export const key = (box: number, from: number, to: number): string => `${box}:${from}:${to}`;

const OPEN = -1;

export function fold(trace: Trace, open: Iterable<number>, views: boolean): Scene {
  const all = boxes(trace);
  const { operators, edges } = trace;
  const base = all.parent.length;
  const shown = closed(all, new Set(open));
  /** The box that a row is in: a view that may be folded is in no loop. */
  const home = (row: number): number => (operators.view[row] && !views ? operators.module[row]! : all.around[row]!);
  const outer = (node: number): number => (node < base ? all.parent[node]! : home(node - base));
  const makers = producers(trace);
  const hidden = (row: number): boolean =>
    !views &&
    row > 0 &&
    operators.view[row] === 1 &&
    shown[home(row)] === OPEN &&
    makers.count(row) === 1; // where several values join there is something to see

  /** A loop of views, which is there only where views are shown. */
  const moves = (box: number): boolean => box >= 2 * all.modules && operators.view[all.first[box]!] === 1;
  const direct = (row: number): number => {
    const box = shown[home(row)]!;
    return box === OPEN ? base + row : box;
  };
  const node = (row: number): number => {
    let at = row;
    while (hidden(at)) at = edges.producer[makers.first(at)]!;
    return direct(at);
  };

  const levels = new Map<number, Level>();
  const lines = new Map<number, Map<number, Line>>();
  const visit = [0];
  for (let box = visit.shift(); box !== undefined; box = visit.shift()) {
    const inner = all.inside[box]!.filter((each) => views || !moves(each));
    const loose = views ? [] : all.inside[box]!.filter(moves).flatMap((each) => all.rows[each]!);
    const rows = [...all.rows[box]!, ...loose].filter((row) => !hidden(row)).map((row) => base + row);
    levels.set(box, { box, nodes: [...inner, ...rows], lines: [] });
    lines.set(box, new Map());
    visit.push(...inner.filter((each) => shown[each] === OPEN));
  }

  const wide = base + operators.name.length + 2;
  const add = (box: number, from: number, to: number, mass: number): void => {
    const level = lines.get(box)!;
    const id = (from + 2) * wide + to + 2;
    const line = level.get(id);
    if (line) line.mass += mass;
    else level.set(id, { from, to, mass, share: 0 });
  };
  const depth = depths(all);
  const height = (node: number): number => (node < base ? depth[node]! : depth[home(node - base)]! + 1);
  const climb = (from: number, to: number, each: (box: number, from: number, to: number) => void): void => {
    let [a, b] = [from, to];
    for (let up = outer(a), same = outer(b); up !== same; up = outer(a), same = outer(b)) {
      const [high, low] = [height(a), height(b)];
      if (high >= low) {
        each(up, a, OUT);
        a = up;
      }
      if (low >= high) {
        each(same, IN, b);
        b = same;
      }
    }
    if (a !== b) each(outer(a), a, b);
  };

  for (let edge = 0; edge < edges.consumer.length; edge++) {
    const consumer = edges.consumer[edge]!;
    if (hidden(consumer)) continue; // what goes through it is counted at its users
    const [from, to] = [direct(consumer), node(edges.producer[edge]!)];
    const mass = weight(edges.mass[edge]!);
    if (from !== to) climb(from, to, (box, a, b) => add(box, a, b, mass));
  }
  for (const [box, level] of levels) level.lines = shares([...lines.get(box)!.values()]);

  const way = (consumer: number, producer: number): string[] => {
    const [from, to] = [node(consumer), node(producer)];
    const found: string[] = [];
    if (from !== to) climb(from, to, (box, a, b) => found.push(key(box, a, b)));
    return found;
  };
  return { all, levels, outer, base, node, way };
}

/** Gradients that are not finite have no size to compare. */
const weight = (mass: number): number => (Number.isFinite(mass) ? mass : 0);

/** For each box the closed one that hides it, itself if it is the outermost; OPEN if none does. */
function closed(all: Boxes, open: Set<number>): Int32Array {
  const shown = new Int32Array(all.parent.length).fill(OPEN);
  const decide = (box: number): void => {
    const up = shown[all.parent[box]!]!;
    shown[box] = up !== OPEN ? up : open.has(box) ? OPEN : box;
  };
  for (let m = 1; m < all.modules; m++) {
    if (all.parent[all.modules + m] !== -2) decide(all.modules + m); // before its first member
    decide(m);
  }
  for (let loop = 2 * all.modules; loop < shown.length; loop++) decide(loop);
  return shown;
}

function depths(all: Boxes): Int32Array {
  const depth = new Int32Array(all.parent.length);
  for (let m = 1; m < all.modules; m++) {
    const fold = all.modules + m;
    if (all.parent[fold] !== -2) depth[fold] = depth[all.parent[fold]!]! + 1;
    depth[m] = depth[all.parent[m]!]! + 1;
  }
  for (let loop = 2 * all.modules; loop < depth.length; loop++) depth[loop] = depth[all.parent[loop]!]! + 1;
  return depth;
}

function shares(lines: Line[]): Line[] {
  const total = new Map<number, number>();
  for (const line of lines) total.set(line.to, (total.get(line.to) ?? 0) + line.mass);
  for (const line of lines) {
    const all = total.get(line.to)!;
    line.share = all > 0 ? line.mass / all : 0;
  }
  return lines;
}

export interface Ends {
  count: (row: number) => number;
  first: (row: number) => number;
  each: (row: number, use: (edge: number) => void) => void;
}

/** The edges of each row, by the end that is asked for. */
function ends(column: Int32Array, rows: number): Ends {
  const start = new Int32Array(rows + 1);
  for (const row of column) start[row + 1]!++;
  for (let row = 0; row < rows; row++) start[row + 1]! += start[row]!;
  const next = start.slice();
  const list = new Int32Array(column.length);
  for (let edge = 0; edge < column.length; edge++) list[next[column[edge]!]!++] = edge;
  return {
    count: (row) => start[row + 1]! - start[row]!,
    first: (row) => list[start[row]!]!,
    each: (row, use) => {
      for (let at = start[row]!; at < start[row + 1]!; at++) use(list[at]!);
    },
  };
}

const kept = new WeakMap<Trace, { producers: Ends; consumers: Ends }>();

function both(trace: Trace): { producers: Ends; consumers: Ends } {
  let found = kept.get(trace);
  if (!found) {
    const rows = trace.operators.name.length;
    found = { producers: ends(trace.edges.consumer, rows), consumers: ends(trace.edges.producer, rows) };
    kept.set(trace, found);
  }
  return found;
}

/** Where gradient goes from a row. */
export const producers = (trace: Trace): Ends => both(trace).producers;
/** Where it comes from. */
export const consumers = (trace: Trace): Ends => both(trace).consumers;

/** The rows that the reader's path or route runs over, from leaf to loss; none if there is none. */
export function picked(trace: Trace, state: { route: number | null; leaf: number | null; element: number | null }): number[] {
  const route = state.route === null ? undefined : trace.routes[state.route];
  if (route) return route.operators;
  const leaf = state.leaf === null ? undefined : trace.leaves[state.leaf];
  const found = leaf && state.element !== null ? find(trace, leaf, state.element) : undefined;
  if (found?.kind !== "path") return [];
  const rows: number[] = [];
  const { operator, next } = trace.forest;
  let left = operator.length; // a damaged file may hold a circle
  for (let at = found.start; at >= 0 && left-- > 0; at = next[at]!) rows.push(operator[at]!);
  return rows;
}
