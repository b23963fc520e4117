/** Arranges a box with dagre, where dagre can take it. */
import dagre from "@dagrejs/dagre";
import { IN, OUT } from "./fold";
import { ACROSS, arrows, aside, backwards, DOWN, ranked, spans, type Arranged, type Arrow, type Job } from "./layout";

/**
 * dagre's time grows with the nodes and with the ranks that lines cross, since it puts a point on
 * each. Beyond these it takes seconds; far beyond, all of the stack.
 */
const NODES = 400;
const CROSSED = 250;

export function arranged(job: Job): Arranged {
  const list = arrows(job);
  const far = spans(job, list);
  const long = lengthy(far);
  const crossed = far.reduce((sum, span, line) => sum + (long.has(line) ? 0 : span - 1), 0);
  const loose = job.nodes.length > 12 && list.every(({ from, to }) => from === IN || to === OUT);
  if (loose || job.nodes.length > NODES || crossed > 2 * CROSSED) return ranked(job);
  try {
    const found = layered(job, list, long);
    aside(job, list, (line) => long.has(line), found);
    return found;
  } catch {
    return ranked(job);
  }
}

/** The longest lines, as many as must go for dagre to be quick. */
function lengthy(far: number[]): Set<number> {
  const found = new Set<number>();
  let crossed = far.reduce((sum, span) => sum + span - 1, 0);
  const order = Array.from(far.keys()).sort((a, b) => far[b]! - far[a]!);
  for (const line of order) {
    if (crossed <= CROSSED || far[line]! < 3) break;
    found.add(line);
    crossed -= far[line]! - 1;
  }
  return found;
}

function layered(job: Job, list: Arrow[], long: Set<number>): Arranged {
  const graph = new dagre.graphlib.Graph({ multigraph: true });
  graph.setGraph({ rankdir: "TB", nodesep: ACROSS, edgesep: 12, ranksep: DOWN });
  const order = Array.from(job.nodes.keys()).sort((a, b) => job.order[a]! - job.order[b]!);
  const port = { width: 16, height: 1 };
  if (list.some((arrow) => arrow.from === IN)) graph.setNode(String(IN), { ...port });
  for (const n of order) graph.setNode(String(n), { width: job.width[n]!, height: job.height[n]! });
  if (list.some((arrow) => arrow.to === OUT)) graph.setNode(String(OUT), { ...port });
  list.forEach(({ from, to }, line) => {
    if (long.has(line)) return;
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
    if (long.has(line)) return new Float64Array();
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
