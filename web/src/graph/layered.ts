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
  const port = { width: 1, height: 1 };
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
  const bends = list.map(({ from, to, turned }, line) => {
    const edge = graph.edge({ v: String(from), w: String(to), name: String(line) });
    const points = (edge as { points: { x: number; y: number }[] }).points.slice(1, -1);
    if (turned) points.reverse();
    return Float64Array.from(points.flatMap((point) => [point.x, point.y]));
  });
  return { x, y, enter: at(IN), leave: at(OUT), bends };
}
