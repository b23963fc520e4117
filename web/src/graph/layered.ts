/** Arranges a box with dagre, where dagre can take it. */
import dagre from "@dagrejs/dagre";
import { IN, OUT } from "./fold";
import { ACROSS, arrows, DOWN, ranked, type Arranged, type Job } from "./layout";

/** Beyond these dagre takes seconds; far beyond, all of the stack. */
const NODES = 800;
const LINES = 1600;

export function arranged(job: Job): Arranged {
  if (job.nodes.length > NODES || job.from.length > LINES) return ranked(job);
  try {
    return layered(job);
  } catch {
    return ranked(job);
  }
}

function layered(job: Job): Arranged {
  const graph = new dagre.graphlib.Graph({ multigraph: true });
  graph.setGraph({ rankdir: "TB", nodesep: ACROSS, edgesep: 12, ranksep: DOWN });
  const list = arrows(job);
  const order = Array.from(job.nodes.keys()).sort((a, b) => job.order[a]! - job.order[b]!);
  const port = { width: 16, height: 1 };
  if (list.some((arrow) => arrow.from === IN)) graph.setNode(String(IN), { ...port });
  for (const n of order) graph.setNode(String(n), { width: job.width[n]!, height: job.height[n]! });
  if (list.some((arrow) => arrow.to === OUT)) graph.setNode(String(OUT), { ...port });
  list.forEach(({ from, to }, line) => {
    const weight = 1 + Math.round(4 * job.share[line]!);
    graph.setEdge(String(from), String(to), { weight, minlen: 1 }, String(line));
  });
  dagre.layout(graph);
  const [x, y] = [new Float64Array(order.length), new Float64Array(order.length)];
  for (const n of order) {
    const node = graph.node(String(n)) as { x: number; y: number };
    x[n] = node.x;
    y[n] = node.y;
  }
  const middle = x.length ? x.reduce((sum, each) => sum + each, 0) / x.length : 0;
  const at = (name: number): number =>
    graph.hasNode(String(name)) ? (graph.node(String(name)) as { x: number }).x : middle;
  const ranks = new Map<number, number>(); // the height of each rank, by its middle
  for (const n of order) ranks.set(y[n]!, Math.max(ranks.get(y[n]!) ?? 0, job.height[n]!));
  const bends = list.map(({ from, to, turned }, line) => {
    const edge = graph.edge({ v: String(from), w: String(to), name: String(line) });
    const { points } = edge as { points: { x: number; y: number }[] };
    // Of the points those between nodes of a rank: past them the line goes upright.
    const inner = points.slice(1, to === OUT ? undefined : -1);
    if (to === OUT) inner[inner.length - 1] = graph.node(String(OUT)) as { x: number; y: number };
    const between = inner.flatMap((point) => {
      const tall = ranks.get(point.y);
      if (tall === undefined) return [];
      return [point.x, point.y - tall / 2, point.x, point.y + tall / 2];
    });
    return Float64Array.from(turned ? backwards(between) : between);
  });
  return { x, y, enter: at(IN), leave: at(OUT), bends };
}

function backwards(points: number[]): number[] {
  const found: number[] = [];
  for (let at = points.length - 2; at >= 0; at -= 2) found.push(points[at]!, points[at + 1]!);
  return found;
}
