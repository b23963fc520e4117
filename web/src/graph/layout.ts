/**
 * Where things are drawn. Each open box is laid out by itself, inner ones first, since a box is a
 * node of the box around it. `ranked` is a simple way that takes any size; the worker has a better
 * one for what it can take (worker.ts).
 */
import { IN, OUT } from "./fold";

/** One open box to lay out: sizes in pixels; an open box among its nodes has its size to come. */
export interface Job {
  box: number;
  nodes: Float64Array; // their numbers
  width: Float64Array;
  height: Float64Array;
  least: number; // width that the box's own title needs
  order: Float64Array; // a node closer to the loss has a lower one
  from: Float64Array; // of each line, a node's number or IN
  to: Float64Array;
  share: Float64Array;
}

/** A laid-out box: all relative to its upper left corner. */
export interface Plan {
  box: number;
  width: number;
  height: number;
  x: Float64Array; // of each node, left
  y: Float64Array; // top
  enter: number; // x of the port on the upper border
  leave: number; // ...on the lower one
  bends: Float64Array[]; // of each line x, y, x, y...: the points between its two ends
}

/** Within a level, before its frame is put around: centres of nodes, and bends of lines. */
export interface Arranged {
  x: Float64Array;
  y: Float64Array;
  enter: number;
  leave: number;
  bends: Float64Array[];
}

export type Arrange = (job: Job) => Arranged;

export const TITLE = 34; // height of an open box's title bar
export const PAD = 18;
export const FAN = 20; // more, where several lines meet at the border
export const ACROSS = 18; // between neighbours
export const DOWN = 38; // between ranks

/** All boxes, inner ones first: the jobs come outer ones first. */
export function layout(jobs: Job[], arrange: Arrange): Plan[] {
  const plans = new Map<number, Plan>();
  for (let at = jobs.length - 1; at >= 0; at--) {
    const job = jobs[at]!;
    job.nodes.forEach((node, n) => {
      const inner = plans.get(node);
      if (!inner) return;
      job.width[n] = inner.width;
      job.height[n] = inner.height;
    });
    plans.set(job.box, frame(job, arrange(job)));
  }
  return [...plans.values()];
}

/** Room for the title and some air around what was arranged. */
function frame(job: Job, at: Arranged): Plan {
  const count = job.nodes.length;
  const [x, y] = [new Float64Array(count), new Float64Array(count)];
  let [left, top, right, bottom] = [Infinity, Infinity, -Infinity, -Infinity];
  for (let n = 0; n < count; n++) {
    x[n] = at.x[n]! - job.width[n]! / 2;
    y[n] = at.y[n]! - job.height[n]! / 2;
    left = Math.min(left, x[n]!);
    top = Math.min(top, y[n]!);
    right = Math.max(right, x[n]! + job.width[n]!);
    bottom = Math.max(bottom, y[n]! + job.height[n]!);
  }
  if (!count) left = top = right = bottom = 0;
  for (const bends of at.bends) {
    for (let i = 0; i < bends.length; i += 2) {
      left = Math.min(left, bends[i]!);
      right = Math.max(right, bends[i]!);
    }
  }
  const root = job.box === 0;
  const used = (ends: Float64Array, port: number) => ends.reduce((sum, end) => sum + Number(end === port), 0);
  const above = (root ? 0 : TITLE) + PAD + (used(job.from, IN) > 1 ? FAN : 0);
  const below = PAD + (used(job.to, OUT) > 1 ? FAN : 0);
  const spare = Math.max(0, job.least - (right - left + 2 * PAD)) / 2;
  const [dx, dy] = [PAD + spare - left, above - top];
  for (let n = 0; n < count; n++) {
    x[n]! += dx;
    y[n]! += dy;
  }
  for (const bends of at.bends) {
    for (let i = 0; i < bends.length; i += 2) {
      bends[i]! += dx;
      bends[i + 1]! += dy;
    }
  }
  const width = right - left + 2 * (PAD + spare);
  const within = (port: number) => Math.min(Math.max(port + dx, PAD), width - PAD);
  return {
    box: job.box,
    width,
    height: bottom + dy + below,
    x,
    y,
    enter: within(at.enter),
    leave: within(at.leave),
    bends: at.bends,
  };
}

/** Lines by the positions of their ends; those against the order are turned round. */
export interface Arrow {
  from: number;
  to: number; // positions in job.nodes; IN and OUT as they are
  turned: boolean;
}

export function arrows(job: Job): Arrow[] {
  const place = new Map<number, number>();
  job.nodes.forEach((node, n) => place.set(node, n));
  return Array.from(job.from, (tail, line) => {
    const head = job.to[line]!;
    const from = tail === IN ? IN : place.get(tail)!;
    const to = head === OUT ? OUT : place.get(head)!;
    const turned = from >= 0 && to >= 0 && job.order[from]! > job.order[to]!;
    return turned ? { from: to, to: from, turned } : { from, to, turned };
  });
}

/** How many ranks each line goes down; the ports stand above the first and below the last. */
export function spans(job: Job, list: Arrow[]): number[] {
  const rank = ranks(job, list);
  const last = rank.reduce((most, each) => Math.max(most, each), 0);
  return list.map(({ from, to }) => (to === OUT ? last + 1 : rank[to]!) - (from === IN ? -1 : rank[from]!));
}

/** Lines too long to be led between nodes share a lane beside them: down there, and back in. */
export function aside(job: Job, list: Arrow[], long: (line: number) => boolean, at: Arranged): void {
  let right = -Infinity;
  let bottom = -Infinity;
  for (let n = 0; n < job.nodes.length; n++) {
    right = Math.max(right, at.x[n]! + job.width[n]! / 2);
    bottom = Math.max(bottom, at.y[n]! + job.height[n]! / 2);
  }
  const lane = right + ACROSS;
  list.forEach(({ from, to, turned }, line) => {
    if (!long(line)) return;
    const top = from === IN ? -Infinity : at.y[from]! + job.height[from]! / 2;
    const end = to === OUT ? bottom : at.y[to]! - job.height[to]! / 2;
    const bends = [lane, (from === IN ? at.y.reduce((a, b) => Math.min(a, b), Infinity) : top) + DOWN * 0.7, lane, end - (to === OUT ? 0 : DOWN * 0.7)];
    at.bends[line] = Float64Array.from(turned ? backwards(bends) : bends);
  });
}

export function backwards(points: number[]): number[] {
  const found: number[] = [];
  for (let at = points.length - 2; at >= 0; at -= 2) found.push(points[at]!, points[at + 1]!);
  return found;
}

/** Ranks by the longest way from above, each in the order of what stands above it. */
export function ranked(job: Job): Arranged {
  const count = job.nodes.length;
  const every = arrows(job);
  const list = every.filter((arrow) => arrow.from >= 0 && arrow.to >= 0);
  const rank = ranks(job, list);
  const rows: number[][] = [];
  for (let n = 0; n < count; n++) (rows[rank[n]!] ??= []).push(n);
  const area = job.nodes.reduce((sum, _, n) => sum + (job.width[n]! + ACROSS) * (job.height[n]! + DOWN), 0);
  const widest = Math.max(900, 1.6 * Math.sqrt(area));
  const packed = rows.filter(Boolean).flatMap((row) => split(row, job.width, widest));
  const x = new Float64Array(count);
  const above = neighbours(count, list, (arrow) => [arrow.to, arrow.from]);
  const below = neighbours(count, list, (arrow) => [arrow.from, arrow.to]);
  for (const row of packed) spread(row, x, job.width, null);
  for (let sweep = 0; sweep < 4; sweep++) {
    const near = sweep % 2 ? below : above;
    const order = sweep % 2 ? [...packed].reverse() : packed;
    for (const row of order) spread(row, x, job.width, near);
  }
  const y = new Float64Array(count);
  let top = 0;
  for (const row of packed) {
    const tall = row.reduce((most, n) => Math.max(most, job.height[n]!), 0);
    for (const n of row) y[n] = top + tall / 2;
    top += tall + DOWN;
  }
  const first = packed[0]?.[0];
  const last = packed[packed.length - 1]?.[0];
  const found: Arranged = {
    x,
    y,
    enter: first === undefined ? 0 : x[first]!,
    leave: last === undefined ? 0 : x[last]!,
    bends: Array.from(job.from, () => new Float64Array()),
  };
  const far = spans(job, every);
  aside(job, every, (line) => far[line]! > FAR, found);
  return found;
}

/** Past this many ranks a line would hide too much of what it crosses. */
const FAR = 3;

function ranks(job: Job, every: Arrow[]): Int32Array {
  const rank = new Int32Array(job.nodes.length);
  const list = every.filter((arrow) => arrow.from >= 0 && arrow.to >= 0);
  const down = neighbours(rank.length, list, (arrow) => [arrow.from, arrow.to]);
  const order = Array.from(rank.keys()).sort((a, b) => job.order[a]! - job.order[b]!);
  for (const n of order) {
    for (const to of down[n]!) rank[to] = Math.max(rank[to]!, rank[n]! + 1);
  }
  return rank;
}

function neighbours(count: number, list: Arrow[], ends: (arrow: Arrow) => [number, number]): number[][] {
  const found: number[][] = Array.from({ length: count }, () => []);
  for (const arrow of list) {
    const [at, other] = ends(arrow);
    found[at]!.push(other);
  }
  return found;
}

/** A rank of thousands would be a line that nobody can read: it goes on in the next. */
function split(row: number[], width: Float64Array, widest: number): number[][] {
  const found: number[][] = [];
  let room = 0;
  for (const n of row) {
    if (room < width[n]! || !found.length) {
      found.push([]);
      room = widest;
    }
    found[found.length - 1]!.push(n);
    room -= width[n]! + ACROSS;
  }
  return found;
}

/** Nodes of a rank side by side, each as near to the middle of its neighbours as there is room. */
function spread(row: number[], x: Float64Array, width: Float64Array, near: number[][] | null): void {
  const wish = new Map<number, number>();
  for (const n of row) {
    const others = near?.[n] ?? [];
    const sum = others.reduce((total, other) => total + x[other]!, 0);
    wish.set(n, others.length ? sum / others.length : x[n]!);
  }
  if (near) row.sort((a, b) => wish.get(a)! - wish.get(b)!);
  let edge = -Infinity;
  let [want, got] = [0, 0];
  for (const n of row) {
    const half = width[n]! / 2;
    const at = near ? Math.max(wish.get(n)!, edge + half) : (edge === -Infinity ? 0 : edge + half);
    x[n] = at;
    edge = at + half + ACROSS;
    want += near ? wish.get(n)! : 0;
    got += at;
  }
  const shift = (want - got) / row.length; // pushed to the right only: put back on average
  for (const n of row) x[n]! += shift;
}
