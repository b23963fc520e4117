/** The drawing itself, as SVG: only what is seen, and never more than can be drawn at once. */
import { useMemo } from "preact/hooks";
import { counted, percent, shape } from "../format";
import type { Trace } from "../types";
import { overlap, type Rect } from "./camera";
import { extent, label, second, type Drawing, type Placed, type Stroke } from "./draw";
import { TITLE } from "./layout";

/** More nodes than these are drawn as one outline; nobody could read them. */
const MOST = 1500;

export interface Lit {
  nodes: Set<number>;
  lines: Set<string>;
}

interface Props {
  trace: Trace;
  drawing: Drawing;
  region: Rect; // of the sheet, somewhat more than is seen
  lines: Stroke[];
  small: boolean; // too far away to read
  lit: Lit | null;
  focus: number | null;
  chosen: number | null;
  influence: Float64Array;
}

export function Sheet(props: Props) {
  const { trace, drawing, region, lines, small, lit, influence } = props;
  const { focus, chosen } = props;
  return useMemo(() => {
    const near = drawing.placed.filter((one) => overlap(spot(one), region));
    const open = near.filter((one) => one.open);
    const rest = near.filter((one) => !one.open);
    const many = rest.length > MOST;
    const mark = (one: Placed): string =>
      `${lit?.nodes.has(one.node) ? " lit" : lit ? " dim" : ""}${one.node === chosen ? " chosen" : ""}${one.node === focus ? " focus" : ""}`;
    return (
      <g class={lit ? "has-lit" : undefined}>
        {open.slice(0, MOST).map((one) => (
          <rect
            key={`f${one.node}`}
            class={`frame deep${one.depth % 2}${mark(one)}`}
            x={one.x}
            y={one.y}
            width={one.width}
            height={one.height}
            rx={10}
          />
        ))}
        <Lines lines={lines} lit={lit} />
        {many ? <path class="outline" d={outline(rest)} /> : rest.map((one) => closed(props, one, mark(one), small))}
        {many && lit ? <path class="outline lit" d={outline(rest.filter((one) => lit.nodes.has(one.node)))} /> : null}
        {open.slice(0, MOST).map((one) => (
          <g
            key={`t${one.node}`}
            id={`node-${one.node}`}
            data-node={one.node}
            class={`title${mark(one)}`}
            role="button"
            aria-expanded="true"
            aria-label={describe(trace, drawing, one.node, influence)}
            transform={`translate(${one.x},${one.y})`}
          >
            <rect class="bar" x={1} y={1} width={one.width - 2} height={TITLE - 2} rx={9} />
            <path class="mark" d={`M14 ${TITLE / 2}h9`} />
            <text class="name" x={32} y={TITLE / 2 + 4.5}>
              {label(trace, drawing.scene, one.node)}
            </text>{" "}
            <text class="kind" x={40 + extent(label(trace, drawing.scene, one.node), 13, true)} y={TITLE / 2 + 4.5}>
              {second(trace, one.node)}
            </text>
          </g>
        ))}
      </g>
    );
  }, [trace, drawing, region, lines, small, lit, focus, chosen, influence]);
}

/** The lines in sight; of more than can be told apart the strongest, and those of the path. */
export function visible(drawing: Drawing, region: Rect, lit: Lit | null): { lines: Stroke[]; left: number } {
  const all = drawing.strokes.filter((stroke) => overlap(stroke, region));
  if (all.length <= MOST) return { lines: all, left: 0 };
  const rank = (stroke: Stroke) => (lit?.lines.has(stroke.key) ? Infinity : stroke.mass);
  const lines = all.sort((a, b) => rank(b) - rank(a) || 0).slice(0, MOST);
  return { lines, left: all.length - MOST };
}

const spot = (one: Placed): Rect => ({
  left: one.x,
  top: one.y,
  right: one.x + one.width,
  bottom: one.y + one.height,
});

/** How wide a line is for its share of the gradient at its lower end. */
export const breadth = (share: number): number => 1 + 3.5 * Math.min(1, Math.max(0, share || 0));

function Lines({ lines, lit }: { lines: Stroke[]; lit: Lit | null }) {
  const sorted = lit ? [...lines].sort((a, b) => Number(lit.lines.has(a.key)) - Number(lit.lines.has(b.key))) : lines;
  return (
    <>
      {sorted.map((line) => (
        <path
          key={line.key}
          class={lit?.lines.has(line.key) ? "line lit" : "line"}
          d={line.path}
          fill="none"
          stroke-width={breadth(line.share).toFixed(2)}
          marker-end={!line.tip ? undefined : lit?.lines.has(line.key) ? "url(#tip-lit)" : "url(#tip)"}
        />
      ))}
    </>
  );
}

function outline(nodes: Placed[]): string {
  return nodes.map((one) => `M${one.x | 0} ${one.y | 0}h${one.width | 0}v${one.height | 0}h-${one.width | 0}z`).join("");
}

function closed({ trace, drawing, influence }: Props, one: Placed, mark: string, small: boolean) {
  const { node, width, height } = one;
  const { scene } = drawing;
  const box = node < scene.base;
  const leaf = box ? undefined : trace.leaves[trace.operators.leaf[node - scene.base]!];
  const type = box
    ? "box"
    : leaf
      ? leaf.parameter
        ? "leaf"
        : "leaf input"
      : node === scene.base
        ? "loss"
        : trace.operators.view[node - scene.base]
          ? "op moves"
          : "op";
  const round = box ? 8 : leaf || node === scene.base ? height / 2 : 6;
  const repeats = box ? scene.all.repeats[node]! : 0;
  const share = box ? reached(drawing, node, influence) : NaN;
  return (
    <g
      key={node}
      id={`node-${node}`}
      data-node={node}
      class={`node ${type}${mark}`}
      role="button"
      aria-expanded={box ? "false" : undefined}
      aria-label={describe(trace, drawing, node, influence)}
      transform={`translate(${one.x},${one.y})`}
    >
      {repeats > 0 && (
        <>
          <rect class="behind" x={8} y={8} width={width} height={height} rx={round} />
          <rect class="behind" x={4} y={4} width={width} height={height} rx={round} />
        </>
      )}
      <rect class="body" width={width} height={height} rx={round} />
      {!small && box && (
        <>
          <path class="mark" d="M13 20h9M17.5 15.5v9" />
          <text class="name" x={32} y={24}>
            {label(trace, scene, node)}
          </text>{" "}
          <text class="kind" x={32} y={40}>
            {second(trace, node)}
          </text>
          {share >= 0 && (
            <>
              <rect class="track" x={12} y={46} width={width - 24} height={2.5} rx={1.25} />
              <rect class="fill" x={12} y={46} width={(width - 24) * Math.min(1, share)} height={2.5} rx={1.25} />
            </>
          )}
        </>
      )}
      {!small && !box && (
        <text class="name" x={width / 2} y={height / 2 + 4.5} text-anchor="middle">
          {label(trace, scene, node)}
        </text>
      )}
    </g>
  );
}

/** The influence of a box; a fold's is the largest of its members. */
export function reached(drawing: Drawing, node: number, influence: Float64Array): number {
  const { all } = drawing.scene;
  if (node < all.modules) return influence[node]!;
  return Math.max(...all.inside[node]!.map((module) => influence[module]!));
}

/** In words, for titles and those who listen. */
export function describe(trace: Trace, drawing: Drawing, node: number, influence: Float64Array): string {
  const { scene } = drawing;
  const cut = (text: string) => (text.length > 200 ? `${text.slice(0, 200)}…` : text);
  const seen = label(trace, scene, node);
  if (node < scene.base) {
    const all = scene.all;
    const seenToo = second(trace, node);
    const many = counted(all.size[node]!, "operator");
    if (node >= 2 * all.modules) {
      const place = trace.modules[all.parent[node]!]!.name;
      return `${seen} ${seenToo}: ${many}${place ? ` in ${cut(place)}` : ""}`;
    }
    const run = all.repeats[node] ? all.inside[node]! : [node];
    const ends = [run[0]!, run[run.length - 1]!].map((module) => cut(trace.modules[module]!.name) || "the model");
    const names = all.repeats[node] ? ends.join(" to ") : ends[0];
    const share = reached(drawing, node, influence);
    return `${seen} ${seenToo}: ${names}, ${many}${share >= 0 ? `, influence ${percent(share)}` : ""}`;
  }
  const row = node - scene.base;
  const leaf = trace.leaves[trace.operators.leaf[row]!];
  const sizes = shape(trace.shapes[trace.operators.shape[row]!]!);
  if (leaf) return `${seen}: ${leaf.parameter ? "parameter" : "input"} ${cut(leaf.name)}, ${sizes}`;
  const place = trace.modules[trace.operators.module[row]!]!.name;
  return `${seen}${row === 0 ? ", the loss" : ""}${place ? ` in ${cut(place)}` : ""}, ${sizes}`;
}
