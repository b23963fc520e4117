/** From plans to a drawing: every node and line at its place on one sheet. */
import { short } from "../format";
import type { Trace } from "../types";
import { boxes, brief, kind, plain } from "./boxes";
import { IN, key, OUT, type Level, type Scene } from "./fold";
import { TITLE, type Job, type Plan } from "./layout";

export interface Placed {
  node: number;
  x: number;
  y: number;
  width: number;
  height: number;
  depth: number; // how many open boxes are around it
  open: boolean;
}

export interface Stroke {
  key: string;
  path: string;
  share: number;
  mass: number;
  tip: boolean; // an arrow's head at its end: not where it goes on inside an open box, or outside
  from: number;
  to: number;
  box: number;
  left: number;
  top: number;
  right: number;
  bottom: number;
}

export interface Drawing {
  scene: Scene;
  width: number;
  height: number;
  placed: Placed[]; // outer ones first
  at: Map<number, Placed>;
  strokes: Stroke[];
}

export function label(trace: Trace, scene: Scene, node: number): string {
  if (node < scene.base) return short(brief(trace, node), 26) || "model";
  const row = node - scene.base;
  const leaf = trace.leaves[trace.operators.leaf[row]!];
  if (!leaf) return short(plain(trace.words[trace.operators.name[row]!]!), 26);
  const around = trace.modules[trace.operators.module[row]!]!.name;
  const name = around && leaf.name.startsWith(`${around}.`) ? leaf.name.slice(around.length + 1) : leaf.name;
  return short(name, 26);
}

export function second(trace: Trace, node: number): string {
  const all = boxes(trace);
  const repeats = all.repeats[node]!;
  if (node >= 2 * all.modules) return `×${repeats} alike`;
  return `${short(kind(trace, node), 22)}${repeats ? ` ×${repeats}` : ""}`;
}

let pen: CanvasRenderingContext2D | null | undefined;
const known = new Map<string, number>();

/** How wide a text is drawn; about, where nothing can be drawn. */
export function extent(text: string, size: number, bold = false): number {
  const id = `${bold ? "b" : ""}${size} ${text}`;
  let width = known.get(id);
  if (width === undefined) {
    pen ??= typeof document === "undefined" ? null : (document.createElement("canvas").getContext?.("2d") ?? null);
    if (pen) {
      pen.font = `${bold ? 600 : 400} ${size}px ${FONT}`;
      width = pen.measureText(text).width;
    } else width = [...text].length * size * 0.62;
    known.set(id, width);
  }
  return width;
}

/** As --sans in style.css. */
const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Noto Sans", sans-serif';

export function jobs(trace: Trace, scene: Scene): Job[] {
  return [...scene.levels.values()].map((level) => job(trace, scene, level));
}

function job(trace: Trace, scene: Scene, level: Level): Job {
  const { nodes, lines } = level;
  const { base, all } = scene;
  const sizes = nodes.map((node) => size(trace, scene, node));
  return {
    box: level.box,
    nodes: Float64Array.from(nodes),
    width: Float64Array.from(sizes, ([width]) => width),
    height: Float64Array.from(sizes, ([, height]) => height),
    least: level.box ? Math.ceil(title(trace, scene, level.box)) : 0,
    order: Float64Array.from(nodes, (node) => (node < base ? all.first[node]! : node - base)),
    from: Float64Array.from(lines, (line) => line.from),
    to: Float64Array.from(lines, (line) => line.to),
    share: Float64Array.from(lines, (line) => line.share),
  };
}

const title = (trace: Trace, scene: Scene, box: number): number =>
  extent(label(trace, scene, box), 13, true) + extent(second(trace, box), 11.5) + 56;

function size(trace: Trace, scene: Scene, node: number): [number, number] {
  const text = label(trace, scene, node);
  if (node >= scene.base) return [Math.max(52, Math.ceil(extent(text, 12.5, node === scene.base) + 26)), 28];
  const wide = Math.max(extent(text, 13, true), extent(second(trace, node), 11.5));
  return [Math.max(112, Math.ceil(wide + 46)), 54];
}

export function draw(scene: Scene, jobs: Job[], plans: Plan[]): Drawing {
  const planned = new Map(plans.map((plan) => [plan.box, plan]));
  const asked = new Map(jobs.map((job) => [job.box, job]));
  const placed: Placed[] = [];
  const at = new Map<number, Placed>();
  const root = planned.get(0)!;
  const origin = new Map<number, [number, number, number]>([[0, [0, 0, 0]]]);
  for (const box of scene.levels.keys()) {
    const [x, y, depth] = origin.get(box)!;
    const [plan, job] = [planned.get(box)!, asked.get(box)!];
    job.nodes.forEach((node, n) => {
      const inner = planned.get(node);
      const one: Placed = {
        node,
        x: x + plan.x[n]!,
        y: y + plan.y[n]!,
        width: inner?.width ?? job.width[n]!,
        height: inner?.height ?? job.height[n]!,
        depth,
        open: inner !== undefined,
      };
      placed.push(one);
      at.set(node, one);
      if (inner) origin.set(node, [one.x, one.y, depth + 1]);
    });
  }
  const strokes: Stroke[] = [];
  for (const [box, level] of scene.levels) {
    const [x, y] = origin.get(box)!;
    const plan = planned.get(box)!;
    level.lines.forEach((line, n) => {
      const before = order(scene, line.from) <= order(scene, line.to);
      const points: number[] = [];
      if (line.from === IN) points.push(x + plan.enter, y, x + plan.enter, y + TITLE);
      else points.push(...port(at.get(line.from)!, planned, before));
      const bends = plan.bends[n]!;
      for (let i = 0; i < bends.length; i += 2) points.push(x + bends[i]!, y + bends[i + 1]!);
      if (line.to === OUT) points.push(x + plan.leave, y + plan.height);
      else points.push(...port(at.get(line.to)!, planned, !before));
      const tip = line.to !== OUT && !(before && at.get(line.to)!.open);
      strokes.push({ ...line, box, tip, key: key(box, line.from, line.to), ...curve(points, tip) });
    });
  }
  return { scene, width: root.width, height: root.height, placed, at, strokes };
}

function order(scene: Scene, node: number): number {
  if (node === IN) return -1;
  if (node === OUT) return Infinity;
  return node < scene.base ? scene.all.first[node]! : node - scene.base;
}

/** Where lines leave a node (below) or reach it (above). */
function port(node: Placed, planned: Map<number, Plan>, below: boolean): [number, number] {
  const inner = planned.get(node.node);
  const x = inner ? (below ? inner.leave : inner.enter) : node.width / 2;
  return [node.x + x, node.y + (below ? node.height : 0)];
}

const TIP = 6; // room for the arrow's head

/** A smooth line along the points, upright at both ends, and the rectangle it is in. */
function curve(points: number[], tip: boolean): Pick<Stroke, "path" | "left" | "top" | "right" | "bottom"> {
  const last = points.length - 2;
  const [x0, y0, y1] = [points[0]!, points[1]!, points[last + 1]!];
  const sign = Math.sign(y1 - y0) || 1;
  const end = tip ? y1 - sign * TIP : y1;
  points[last + 1] = end;
  let path = `M${round(x0)} ${round(y0)}`;
  let [left, right] = [x0, x0];
  for (let i = 2; i <= last; i += 2) {
    const [px, py, x, y] = [points[i - 2]!, points[i - 1]!, points[i]!, points[i + 1]!];
    const middle = round((py + y) / 2);
    path += px === x ? `V${round(y)}` : `C${round(px)} ${middle} ${round(x)} ${middle} ${round(x)} ${round(y)}`;
    left = Math.min(left, x);
    right = Math.max(right, x);
  }
  return { path, left, right, top: Math.min(y0, y1) - 20, bottom: Math.max(y0, y1) + 20 };
}

const round = (value: number): number => Math.round(value * 10) / 10;
