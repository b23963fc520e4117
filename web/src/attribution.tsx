/** The attribution graph: inputs on the left, the output on the right, a column for each rank. */
import { useMemo, useRef } from "preact/hooks";
import { count, counted, number, percent, short } from "./format";
import { Term } from "./terms";
import type { Attribution as Graph, AttributionEdge as Edge } from "./types";
import type { View } from "./view";

const SCREEN = 60; // lines that a reader takes in at first
const WIDTH = 122;
const HEIGHT = 30;
const GAP = { x: 44, y: 12 };
const WIDEST = 9;
const LISTED = 8;
const LETTERS = 17;

/**
 * The strongest edges that have this share of all stored influence, without loose ends; more, if
 * none of these leads from an input to the output.
 */
export function strongest(graph: Graph, share: number): Edge[] {
  const total = graph.edges.reduce((sum, edge) => sum + edge.influence, 0);
  let sum = 0;
  let many = 0;
  while (many < graph.edges.length && (many === 0 || sum < share * total * (1 - 1e-12))) sum += graph.edges[many++]!.influence;
  for (; many < graph.edges.length; many++) {
    const found = joined(graph, graph.edges.slice(0, many));
    if (found.length) return found;
  }
  return joined(graph, graph.edges);
}

/** The edges on a route from an input to the output. */
function joined(graph: Graph, edges: readonly Edge[]): Edge[] {
  const of = (kind: string) => graph.nodes.flatMap((node, at) => (node.kind === kind ? [at] : []));
  const back = reached(edges, of("output"), "source", "target");
  const on = reached(edges, of("input"), "target", "source");
  return edges.filter((edge) => back.has(edge.target) && on.has(edge.source));
}

/** The nodes that can be reached from some, along edges from `at` to `to`. */
function reached(edges: readonly Edge[], from: Iterable<number>, to: "source" | "target", at: "source" | "target"): Set<number> {
  const next = new Map<number, number[]>();
  for (const edge of edges) {
    const list = next.get(edge[at]);
    if (list) list.push(edge[to]);
    else next.set(edge[at], [edge[to]]);
  }
  const found = new Set(from);
  const stack = [...found];
  for (let node = stack.pop(); node !== undefined; node = stack.pop())
    for (const other of next.get(node) ?? [])
      if (!found.has(other)) {
        found.add(other);
        stack.push(other);
      }
  return found;
}

/** The share that is shown at first: all, unless that is more than a reader takes in. */
export function atFirst(graph: Graph): number {
  const total = graph.edges.reduce((sum, edge) => sum + edge.influence, 0);
  const some = graph.edges.slice(0, SCREEN).reduce((sum, edge) => sum + edge.influence, 0);
  return graph.edges.length <= SCREEN || !(total > 0) ? 100 : Math.max(1, Math.floor((100 * some) / total));
}

/** All edges on routes through a node. */
export function through(edges: readonly Edge[], node: number): Set<Edge> {
  const up = reached(edges, [node], "source", "target");
  const down = reached(edges, [node], "target", "source");
  return new Set(edges.filter((edge) => up.has(edge.target) || down.has(edge.source)));
}

export interface Placed {
  node: number;
  column: number;
  x: number;
  y: number;
}

interface Layout {
  nodes: Map<number, Placed>;
  bends: Map<Edge, number[]>; // heights at which a line passes the columns between its ends
}

/** A line that passes a column takes a place there, so that it does not run behind a box. */
interface Place {
  node: number; // -1 for a line
  joined: { to: Place; by: number }[];
  at: number;
}

const tall = (place: Place): number => (place.node < 0 ? 10 : HEIGHT + GAP.y);

/** A column for each rank that is shown; within one, close to what a node is joined to. */
export function placed(graph: Graph, edges: readonly Edge[]): Layout {
  const shown = [...new Set(edges.flatMap((edge) => [edge.source, edge.target]))].sort((a, b) => a - b);
  const ranks = [...new Set(shown.map((node) => graph.nodes[node]!.rank))].sort((a, b) => a - b);
  const column = (node: number): number => ranks.indexOf(graph.nodes[node]!.rank);
  const columns: Place[][] = ranks.map(() => []);
  const add = (node: number, c: number): Place => {
    const place = { node, joined: [], at: 0 };
    columns[c]!.push(place);
    return place;
  };
  const of = new Map(shown.map((node) => [node, add(node, column(node))]));
  const lines = edges.map((edge) => {
    const passed: Place[] = [];
    for (let c = column(edge.source) + 1; c < column(edge.target); c++) passed.push(add(-1, c));
    const way = [of.get(edge.source)!, ...passed, of.get(edge.target)!];
    way.slice(1).forEach((place, n) => {
      const by = Math.max(edge.influence, 1e-9);
      place.joined.push({ to: way[n]!, by });
      way[n]!.joined.push({ to: place, by });
    });
    return passed;
  });
  const stack = (list: Place[]) => {
    let top = -list.reduce((sum, place) => sum + tall(place), 0) / 2;
    for (const place of list) {
      place.at = top + tall(place) / 2;
      top += tall(place);
    }
  };
  columns.forEach(stack);
  for (let round = 0; round < 6; round++)
    for (const list of round % 2 ? [...columns].reverse() : columns.slice(1)) {
      const wanted = new Map(list.map((place) => [place, pull(place)]));
      list.sort((a, b) => wanted.get(a)! - wanted.get(b)!);
      stack(list);
    }
  const top = Math.min(...columns.flat().map((place) => place.at - tall(place) / 2), 0);
  const nodes = new Map<number, Placed>();
  for (const [node, place] of of) {
    const c = column(node);
    nodes.set(node, { node, column: c, x: c * (WIDTH + GAP.x) + 8, y: place.at - top - HEIGHT / 2 });
  }
  return { nodes, bends: new Map(edges.map((edge, n) => [edge, lines[n]!.map((place) => place.at - top)])) };
}

/** Where what a place is joined to lies, by influence. */
function pull({ joined, at }: Place): number {
  const weight = joined.reduce((sum, { by }) => sum + by, 0);
  return weight ? joined.reduce((sum, { to, by }) => sum + by * to.at, 0) / weight : at;
}

/** A line from the right side of a box to the left side of another, around those between. */
function way(a: Placed, b: Placed, bends: readonly number[]): string {
  const half = GAP.x / 2;
  let [x, y] = [a.x + WIDTH, a.y + HEIGHT / 2];
  let text = `M${x} ${y}`;
  const to = (u: number, v: number) => {
    text += `C${x + half} ${y} ${u - half} ${v} ${u} ${v}`;
    [x, y] = [u, v];
  };
  bends.forEach((height, n) => {
    const left = (a.column + n + 1) * (WIDTH + GAP.x) + 8;
    to(left, height);
    text += `H${left + WIDTH}`;
    x = left + WIDTH;
  });
  to(b.x, b.y + HEIGHT / 2);
  return text;
}

const sign = (score: number): string => (score < 0 ? "minus" : "plus");

export function Attribution({ report, state, go }: View) {
  const graph = report.attribution;
  if (!graph) return null;
  return <Drawn graph={graph} state={state} go={go} />;
}

function Drawn({ graph, state, go }: { graph: Graph; state: View["state"]; go: View["go"] }) {
  const share = state.keep ?? atFirst(graph);
  const edges = useMemo(() => strongest(graph, share / 100), [graph, share]);
  const { nodes: places, bends } = useMemo(() => placed(graph, edges), [graph, edges]);
  const chosen = state.node !== null && places.has(state.node) ? state.node : null;
  const lit = useMemo(() => (chosen === null ? null : through(edges, chosen)), [edges, chosen]);
  const most = Math.max(...edges.map((edge) => Math.abs(edge.score)), Number.MIN_VALUE);
  const all = [...places.values()];
  const width = Math.max(...all.map((one) => one.x), 0) + WIDTH + 8;
  const height = Math.max(...all.map((one) => one.y), 0) + HEIGHT + GAP.y;
  const box = useRef<SVGSVGElement>(null);
  const first = all.find((one) => one.column === 0) ?? all[0];

  const press = (event: KeyboardEvent, one: Placed) => {
    const dx = Number(event.key === "ArrowRight") - Number(event.key === "ArrowLeft");
    const dy = Number(event.key === "ArrowDown") - Number(event.key === "ArrowUp");
    if (event.key === "Enter" || event.key === " ") go({ node: chosen === one.node ? null : one.node });
    else if (event.key === "Escape" && chosen !== null) go({ node: null });
    else if (dx || dy) {
      const column = all.filter((other) => other.column === one.column + dx);
      const wanted = dy ? one.y + dy * (HEIGHT + GAP.y) : one.y;
      const near = column.sort((a, b) => Math.abs(a.y - wanted) - Math.abs(b.y - wanted))[0];
      if (near) box.current?.querySelector<SVGGElement>(`#box-${near.node}`)?.focus();
    } else return;
    event.preventDefault();
    event.stopPropagation();
  };
  const dim = (edge: Edge) => (lit && !lit.has(edge) ? " dim" : "");
  const idle = (node: number) =>
    lit && node !== chosen && ![...lit].some((edge) => edge.source === node || edge.target === node) ? " dim" : "";
  return (
    <div class="sheet attribution" data-testid="attribution">
      <section class="card full lead">
        <h2>
          {counted(places.size, "box", "boxes")} and {counted(edges.length, "line")} show what moves the output
          {Number.isFinite(graph.value) && ` (${number(graph.value)})`}.
        </h2>
        <p class="soft">
          <Term of="score">Scores</Term> add up to {number(graph.total)}
          {graph.points > 0 && `, over ${counted(graph.points, "point")} between the baseline and the inputs`}; rule{" "}
          <bdi>{short(graph.rule, 40)}</bdi>. The file has {count(graph.nodes.length)} of {count(graph.whole[0])} boxes and{" "}
          {count(graph.edges.length)} of {count(graph.whole[1])} lines, with {percent(graph.kept[0])} and{" "}
          {percent(graph.kept[1])} of the <Term of="influence" />.
        </p>
      </section>
      <section class="card full" aria-label="Attribution graph">
        <div class="attribution-tools">
          <label>
            Show{" "}
            <input
              type="range"
              min={1}
              max={100}
              value={share}
              aria-valuetext={`${share}% of the stored influence`}
              data-testid="keep"
              onInput={(event) => go({ keep: Number(event.currentTarget.value) })}
            />{" "}
            <output>{share}%</output> of the stored influence
          </label>
          <span class="legend-item">
            <svg width="30" height="10" aria-hidden="true">
              <path class="link plus" d="M0 5h30" stroke-width="4" />
            </svg>
            raises the output
          </span>
          <span class="legend-item">
            <svg width="30" height="10" aria-hidden="true">
              <path class="link minus" d="M0 5h30" stroke-width="4" />
            </svg>
            lowers it
          </span>
          <span class="legend-item">widest: |score| {number(most)}</span>
        </div>
        <div class="attribution-canvas" tabIndex={0} role="group" aria-label="The graph; scroll, or move between boxes with the arrow keys">
          <svg
            ref={box}
            width={width}
            height={height}
            viewBox={`0 0 ${width} ${height}`}
            style={{ "--whole": `${width}px` }}
            data-export
          >
            {[...edges].reverse().map((edge) => (
                <path
                  class={`link ${sign(edge.score)}${dim(edge)}`}
                  d={way(places.get(edge.source)!, places.get(edge.target)!, bends.get(edge)!)}
                  stroke-width={Math.max(1, (WIDEST * Math.abs(edge.score)) / most)}
                  data-testid="link"
                  data-score={edge.score}
                >
                  <title>{told(graph, edge)}</title>
                </path>
            ))}
            {all.map((one) => {
              const node = graph.nodes[one.node]!;
              const said = `${short(node.label, 80)}: ${node.kind}, score ${number(node.score)}, influence ${percent(node.influence)}`;
              return (
                <g
                  id={`box-${one.node}`}
                  class={`attribution-box ${node.kind}${idle(one.node)}${chosen === one.node ? " chosen" : ""}`}
                  transform={`translate(${one.x},${one.y})`}
                  role="button"
                  tabindex={one.node === (chosen ?? first?.node) ? 0 : -1}
                  aria-pressed={chosen === one.node}
                  aria-label={said}
                  data-testid="box"
                  data-name={node.name}
                  onClick={() => go({ node: chosen === one.node ? null : one.node })}
                  onKeyDown={(event) => press(event, one)}
                >
                  <title>{`${short(node.name, 200)}\n${said}`}</title>
                  <rect width={WIDTH} height={HEIGHT} rx={6} />
                  <rect class="bar" y={HEIGHT - 3} width={WIDTH * Math.min(1, Math.max(0, node.influence))} height={3} rx={1} />
                  <text x={8} y={19}>
                    {ending(node.label)}
                  </text>
                </g>
              );
            })}
          </svg>
        </div>
      </section>
      {chosen !== null && <Chosen graph={graph} edges={edges} node={chosen} go={go} />}
    </div>
  );
}

/** The end of a long name tells more than its beginning. */
function ending(label: string): string {
  const parts = short(label, 400).split(".");
  while (parts.length > 1 && parts.join(".").length > LETTERS) parts.shift();
  return short(parts.join("."), LETTERS);
}

const told = (graph: Graph, edge: Edge): string =>
  `${short(graph.nodes[edge.source]!.label, 80)} → ${short(graph.nodes[edge.target]!.label, 80)}\nscore ${number(edge.score)}, influence ${percent(edge.influence)}`;

function Chosen({ graph, edges, node, go }: { graph: Graph; edges: readonly Edge[]; node: number; go: View["go"] }) {
  const one = graph.nodes[node]!;
  const list = (title: string, mine: Edge[], end: "source" | "target") =>
    mine.length > 0 && (
      <>
        <h3>{title}</h3>
        <table class="attribution-list">
          <thead>
            <tr>
              <th scope="col">{end === "source" ? "from" : "to"}</th>
              <th scope="col">score</th>
              <th scope="col">influence</th>
            </tr>
          </thead>
          <tbody>
            {mine.slice(0, LISTED).map((edge) => (
              <tr>
                <td>
                  <button type="button" class="plain-link" onClick={() => go({ node: edge[end] })}>
                    <bdi>{short(graph.nodes[edge[end]]!.label, 60)}</bdi>
                  </button>
                </td>
                <td>{number(edge.score)}</td>
                <td>{percent(edge.influence)}</td>
              </tr>
            ))}
          </tbody>
        </table>
        {mine.length > LISTED && <p class="fine">and {count(mine.length - LISTED)} more</p>}
      </>
    );
  return (
    <section class="card full" aria-labelledby="chosen-box" data-testid="chosen">
      <div class="card-head">
        <h2 id="chosen-box">
          <bdi>{short(one.label, 80)}</bdi>
        </h2>
        <button type="button" class="plain-link" onClick={() => go({ node: null })}>
          Show all routes
        </button>
      </div>
      <p class="soft">
        {one.kind}; <Term of="score" /> {number(one.score)}, <Term of="influence" /> {percent(one.influence)}
      </p>
      {list("What comes in", edges.filter((edge) => edge.target === node), "source")}
      {list("Where it goes", edges.filter((edge) => edge.source === node), "target")}
    </section>
  );
}
