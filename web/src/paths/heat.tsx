/** A weight as a picture: a cell for each element, or for a part of the matrix. */
import { useEffect, useRef, useState } from "preact/hooks";
import { useWidth } from "../charts/chart";
import { count, number, short } from "../format";
import type { HeatMap, Leaf } from "../types";
import { colour, css, type Mode, mixed, palette, type Range, range } from "./colour";
import { cellOf, indexOf, isWhole } from "./pick";

const LARGEST = 28; // pixels of a cell
const TALLEST = 480;

export interface Lattice {
  across: number; // cells in a line
  lines: number;
  wide: number; // pixels of a cell
  high: number;
}

/** Where cells lie. A vector that is too long for one line goes on in the next. */
export function lattice(map: HeatMap, width: number): Lattice {
  const cells = map.rows * map.columns;
  if (map.rows === 1 && map.columns * 14 > width) {
    const fit = Math.max(1, Math.floor(width / 14));
    const square = Math.ceil(Math.sqrt(cells * 4)); // four times as wide as high
    const across = Math.min(cells, Math.max(fit, Math.min(square, Math.floor(width / 4))));
    const wide = width / across;
    return { across, lines: Math.ceil(cells / across), wide, high: Math.max(wide, 6) };
  }
  const [rows, columns] = [Math.max(1, map.rows), Math.max(1, map.columns)];
  const fit = Math.min(LARGEST, width / columns);
  const high = Math.min(Math.max(fit, Math.min(LARGEST, 96 / rows)), TALLEST / rows);
  // Squares, unless they would make a thread of a tall matrix.
  const wide = Math.min(fit, Math.max(high, 240 / columns));
  return { across: map.columns, lines: map.rows, wide, high };
}

/** A number that changes with the page's colours. */
function useTheme(): number {
  const [n, setN] = useState(0);
  useEffect(() => {
    const changed = (): void => setN((old) => old + 1);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", changed);
    const observer = new MutationObserver(changed);
    observer.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme", "class"] });
    return () => {
      dark.removeEventListener("change", changed);
      observer.disconnect();
    };
  }, []);
  return n;
}

function paint(canvas: HTMLCanvasElement, map: HeatMap, grid: Lattice, mode: Mode): void {
  const context = canvas.getContext("2d");
  if (!context) return;
  const ratio = globalThis.devicePixelRatio || 1;
  const [width, height] = [grid.across * grid.wide, grid.lines * grid.high];
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const [w, h] = [grid.wide * ratio, grid.high * ratio];
  const colours = palette(canvas);
  const span = range(map);
  const gap = Math.min(w, h) >= 7 * ratio ? ratio : 0;
  const partly = map.start.includes(-2);
  for (let cell = 0; cell < map.element.length; cell++) {
    const [x, y] = [(cell % grid.across) * w, Math.floor(cell / grid.across) * h];
    const [left, top] = [Math.round(x), Math.round(y)];
    const [right, bottom] = [Math.round(x + w) - gap, Math.round(y + h) - gap];
    const value = map.gradient[cell]!;
    context.fillStyle = css(colour(value, span, mode, colours));
    context.fillRect(left, top, right - left, bottom - top);
    if (partly && map.start[cell]! >= 0 && Math.min(w, h) >= 5 * ratio) {
      // Followed: a point, light and dark, so that it is seen on any ground.
      const size = Math.max(2, Math.round(Math.min(w, h) / 5));
      const [cx, cy] = [Math.round((left + right - size) / 2), Math.round((top + bottom - size) / 2)];
      context.fillStyle = "rgb(255 255 255 / 85%)";
      context.fillRect(cx - 1, cy - 1, size + 1, size + 1);
      context.fillStyle = "rgb(0 0 0 / 85%)";
      context.fillRect(cx, cy, size, size);
    }
  }
}

export interface HeatProps {
  leaf: Leaf;
  map: HeatMap;
  element: number | null;
  pick: (element: number) => void;
  whole: boolean; // the trace follows whole tensors
}

export function Heat({ leaf, map, element, pick, whole }: HeatProps) {
  const [box, width] = useWidth(600);
  const canvas = useRef<HTMLCanvasElement>(null);
  const [mode, setMode] = useState<Mode>("sign");
  const [at, setAt] = useState<number | null>(null);
  const theme = useTheme();
  const grid = lattice(map, width);
  const cells = map.element.length;
  useEffect(() => {
    if (canvas.current) paint(canvas.current, map, grid, mode);
  }, [map, mode, grid.across, grid.wide, grid.high, theme]);
  useEffect(() => setAt(null), [map]);

  const chosen = element === null ? -1 : cellOf(map, element);
  const hit = (event: MouseEvent): number | null => {
    const area = (event.currentTarget as Element).getBoundingClientRect();
    const [x, y] = [event.clientX - area.left, event.clientY - area.top];
    const column = Math.floor((x / area.width) * grid.across);
    const cell = Math.floor((y / area.height) * grid.lines) * grid.across + column;
    return column >= 0 && column < grid.across && cell >= 0 && cell < cells ? cell : null;
  };
  const keyed = (event: KeyboardEvent): void => {
    const now = at ?? Math.max(0, chosen);
    const line = Math.floor(now / grid.across) * grid.across;
    const moves: Record<string, number> = {
      ArrowRight: now + 1,
      ArrowLeft: now - 1,
      ArrowDown: now + grid.across,
      ArrowUp: now - grid.across,
      Home: event.ctrlKey ? 0 : line,
      End: event.ctrlKey ? cells - 1 : Math.min(cells, line + grid.across) - 1,
      PageDown: now + 8 * grid.across,
      PageUp: now - 8 * grid.across,
    };
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      pick(map.element[now]!);
      return;
    }
    const to = moves[event.key];
    if (to === undefined) return;
    event.preventDefault();
    if (to >= 0 && to < cells) setAt(to);
    else if (event.key.startsWith("Page")) setAt(to < 0 ? now % grid.across : cells - 1);
  };

  const outline = (cell: number): Record<string, string> => ({
    left: `${(100 * (cell % grid.across)) / grid.across}%`,
    top: `${(100 * Math.floor(cell / grid.across)) / grid.lines}%`,
    width: `${100 / grid.across}%`,
    height: `${100 / grid.lines}%`,
  });
  const each = Math.round(leaf.elements / Math.max(1, cells));
  const told = (cell: number): [string, string, string] => {
    const start = map.start[cell]!;
    const status = whole
      ? "its tensor is followed as a whole"
      : start >= 0
        ? "its path is here: press to see it"
        : start === -1
          ? "no path: every contribution is 0"
          : "not followed";
    const part = isWhole(map) ? "" : `, the largest |gradient| of about ${count(each)} elements`;
    return [
      indexOf(leaf, map.element[cell]!),
      `gradient ${number(map.gradient[cell]!)}${part}`,
      status,
    ];
  };
  return (
    <div class="heat">
      <div class="heat-bar">
        <div class="choice" role="group" aria-label="What colours show">
          <button type="button" aria-pressed={mode === "sign"} onClick={() => setMode("sign")}>
            Sign
          </button>
          <button type="button" aria-pressed={mode === "size"} onClick={() => setMode("size")}>
            |Gradient|
          </button>
        </div>
        <Scale span={range(map)} mode={mode} theme={theme} />
      </div>
      <div ref={box} class="heat-box">
        <div
          class="heat-frame"
          style={{ width: `${grid.across * grid.wide}px`, height: `${grid.lines * grid.high}px` }}
        >
          <canvas
            ref={canvas}
            data-testid="heat"
            data-rows={map.rows}
            data-columns={map.columns}
            data-across={grid.across}
            tabIndex={0}
            role="application"
            aria-roledescription="heat map"
            aria-label={`Gradient of ${short(leaf.name, 60)}: ${count(map.rows)} by ${count(map.columns)} cells. Arrow keys move, Enter picks.`}
            onPointerMove={(event) => setAt(hit(event))}
            onPointerLeave={() => setAt(null)}
            onClick={(event) => {
              const cell = hit(event);
              if (cell !== null) pick(map.element[cell]!);
            }}
            onKeyDown={keyed}
            onFocus={(event) => {
              if (event.currentTarget.matches(":focus-visible")) setAt(Math.max(0, chosen));
            }}
            onBlur={() => setAt(null)}
          />
          {chosen >= 0 && !whole && <span class="cell picked" style={outline(chosen)} />}
          {at !== null && at < cells && (
            <>
              <span class="cell here" style={outline(at)} />
              <Tip cell={at} grid={grid} lines={told(at)} />
            </>
          )}
        </div>
      </div>
      <p class="sr" aria-live="polite" data-testid="heat-live">
        {at !== null && at < cells ? told(at).join(", ") : ""}
      </p>
      <p class="faint">
        {isWhole(map)
          ? `Each cell is one of ${count(cells)} elements`
          : `${count(leaf.elements)} elements in ${count(map.rows)} × ${count(map.columns)} cells; each shows its element with the largest |gradient|`}
        {map.rows > 1
          ? `; rows are the first dimension${leaf.shape.length > 2 ? ", columns all others" : ""}.`
          : grid.lines > 1
            ? ", line by line."
            : "."}
        {map.start.includes(-2) && !whole && " A point marks those whose path is in the report."}
      </p>
    </div>
  );
}

function Tip({ cell, grid, lines }: { cell: number; grid: Lattice; lines: string[] }) {
  const [column, line] = [cell % grid.across, Math.floor(cell / grid.across)];
  const share = (column + 0.5) / grid.across;
  const side = share < 0.3 ? "start" : share > 0.7 ? "end" : "middle";
  const above = line * grid.high > 70;
  const style = {
    left: `${100 * share}%`,
    ...(above
      ? { bottom: `${100 * (1 - line / grid.lines)}%` }
      : { top: `${(100 * (line + 1)) / grid.lines}%` }),
  };
  return (
    <div class={`tip ${side}`} style={style} aria-hidden="true">
      <strong>{lines[0]}</strong>
      <span>{lines[1]}</span>
      <span class="faint">{lines[2]}</span>
    </div>
  );
}

/** The legend: colours with the gradients they stand for. */
function Scale({ span, mode, theme }: { span: Range; mode: Mode; theme: number }) {
  const strip = useRef<HTMLCanvasElement>(null);
  const parts = 64;
  useEffect(() => {
    const canvas = strip.current;
    const context = canvas?.getContext("2d");
    if (!canvas || !context) return;
    const colours = palette(canvas);
    canvas.width = mode === "sign" ? 2 * parts : parts;
    canvas.height = 1;
    for (let n = 0; n < parts; n++) {
      const t = n / (parts - 1);
      if (mode === "sign") {
        context.fillStyle = css(mixed(colours.minus, t));
        context.fillRect(parts - 1 - n, 0, 1, 1);
      }
      context.fillStyle = css(mixed(mode === "sign" ? colours.plus : colours.size, t));
      context.fillRect((mode === "sign" ? parts : 0) + n, 0, 1, 1);
    }
  }, [mode, theme, span.high]);
  const least = `${span.cut ? "≤ " : ""}${number(span.low, 2)}`;
  return (
    <div class="scale">
      {span.high > 0 && (
        <>
          <span class="num">{mode === "sign" ? number(-span.high, 2) : least}</span>
          <canvas ref={strip} class="ramp" aria-hidden="true" />
          {mode === "sign" && <span class="sr">through ± {least} to</span>}
          <span class="num">{number(span.high, 2)}</span>
        </>
      )}
      {span.zeros && (
        <span class="key">
          <i class="zero" /> 0
        </span>
      )}
      {span.odd && (
        <span class="key">
          <i class="odd" /> not finite
        </span>
      )}
      <span class="faint">
        ∂loss/∂element, log scale
        {mode === "sign" && span.high > 0 ? `, faintest ± ${least}` : ""}
      </span>
    </div>
  );
}
