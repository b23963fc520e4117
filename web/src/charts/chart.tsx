/**
 * Curves over one axis, in one or several panes that share it. A reader moves along it with the
 * pointer or the arrow keys and reads the numbers; all of them are in a table below.
 */
import type { JSX } from "preact";
import { useEffect, useId, useMemo, useRef, useState } from "preact/hooks";
import { count, number, power, short } from "../format";
import { extent, linear, logarithmic, nearest, type Scale } from "./scale";

export interface Series {
  name: string;
  values: ArrayLike<number>;
  colour: number; // of the palette: 0 to 7, or 8 for grey
  form?: "line" | "dots" | "trend" | "bound";
}

export interface Pane {
  label: string; // what is measured, with its unit
  series: Series[];
  format: (value: number) => string;
  tick?: (value: number) => string;
  height?: number;
  log?: boolean;
  from?: number; // where the axis must begin
  to?: number;
}

export interface ChartProps {
  title: string;
  axis: string;
  x: ArrayLike<number>;
  panes: Pane[];
  /** More about a place on the axis. */
  note?: (at: number) => string;
  legend?: boolean;
}

const LEFT = 58;
const RIGHT = 14;
const HEAD = 24;
const GAP = 14;
const FOOT = 36;
const MOST = 1200; // points drawn of a series
const ROWS = 200; // rows of the table

/** The width of an element, as it changes. */
export function useWidth(first = 640): [{ current: HTMLDivElement | null }, number] {
  const box = useRef<HTMLDivElement>(null);
  const [width, setWidth] = useState(first);
  useEffect(() => {
    const at = box.current;
    if (!at || typeof ResizeObserver === "undefined") return;
    const measure = (): void => {
      const now = Math.floor(at.clientWidth);
      if (now > 0) setWidth(now);
    };
    measure();
    const observer = new ResizeObserver(measure);
    observer.observe(at);
    return () => observer.disconnect();
  }, []);
  return [box, width];
}

/** Of many points those that show: of every stretch the least and the greatest. */
export function thin(values: ArrayLike<number>, most = MOST): number[] {
  const n = values.length;
  if (n <= most) return Array.from({ length: n }, (_, i) => i);
  const parts = Math.floor(most / 2);
  const found: number[] = [];
  for (let part = 0; part < parts; part++) {
    const [first, last] = [Math.floor((part * n) / parts), Math.floor(((part + 1) * n) / parts)];
    let [low, high] = [first, first];
    for (let i = first; i < last; i++) {
      if (values[i]! < values[low]!) low = i;
      if (values[i]! > values[high]!) high = i;
    }
    found.push(Math.min(low, high));
    if (low !== high) found.push(Math.max(low, high));
  }
  return found;
}

interface Laid {
  pane: Pane;
  scale: Scale;
  top: number;
  height: number;
  y: (value: number) => number;
}

function lay(panes: Pane[]): { laid: Laid[]; height: number } {
  let top = 0;
  const laid = panes.map((pane): Laid => {
    const height = pane.height ?? 180;
    const all = pane.series.map((s) => s.values);
    const range = extent(all, pane.log ? 0 : -Infinity);
    const wanted = Math.max(2, Math.round(height / 44));
    const low = Math.min(pane.from ?? Infinity, range?.[0] ?? pane.from ?? 0);
    const high = Math.max(pane.to ?? -Infinity, range?.[1] ?? pane.to ?? 1);
    const scale = pane.log
      ? logarithmic(range?.[0] ?? 1, range?.[1] ?? 1, wanted)
      : linear(low, high, wanted);
    const start = top + HEAD;
    top = start + height + GAP;
    return { pane, scale, top: start, height, y: (v) => start + height * (1 - scale.place(v)) };
  });
  return { laid, height: top - GAP + FOOT };
}

/** Lines with a gap wherever a number cannot be shown. */
function drawn(series: Series, x: (at: number) => number, y: (value: number) => number): string {
  let text = "";
  let open = false;
  for (const at of thin(series.values)) {
    const place = y(series.values[at]!);
    if (!Number.isFinite(place)) {
      open = false;
      continue;
    }
    text += `${open ? "L" : "M"}${x(at).toFixed(1)} ${place.toFixed(1)}`;
    open = true;
  }
  return text;
}

const strokes = { line: "curve", dots: "curve", trend: "trend", bound: "bound" };

/** Lines that were fitted, not measured, are in no list of numbers. */
const measured = (series: Series): boolean => series.form !== "trend" && series.form !== "bound";

function Curve({ series, laid, x }: { series: Series; laid: Laid; x: (at: number) => number }) {
  const points = useMemo(() => thin(series.values), [series.values]);
  const bottom = laid.top + laid.height;
  const odd = points.filter(
    (at) => !Number.isFinite(laid.y(series.values[at]!)),
  );
  const single = points.length === 1;
  return (
    <g class={`series series-${series.colour}`}>
      {series.form === "dots" || single ? (
        points.map((at) => {
          const y = laid.y(series.values[at]!);
          return Number.isFinite(y) ? <circle class="dot" cx={x(at)} cy={y} r={single ? 3.5 : 2} /> : null;
        })
      ) : (
        <path class={strokes[series.form ?? "line"]} d={drawn(series, x, laid.y)} />
      )}
      {odd.slice(0, 400).map((at) => {
        const zero = series.values[at] === 0;
        const y = zero ? bottom - 4 : laid.top + 5;
        return zero || laid.pane.log ? (
          <path
            class={zero ? "zero-mark" : "odd-mark"}
            d={`M${x(at) - 3} ${y - 3}l6 6m0 -6l-6 6`}
          />
        ) : null;
      })}
    </g>
  );
}

export function Chart({ title, axis, x, panes, note, legend = true }: ChartProps) {
  const [box, width] = useWidth();
  const [at, setAt] = useState<number | null>(null);
  const id = useId();
  const { laid, height } = useMemo(() => lay(panes), [panes]);
  const n = x.length;
  const inner = Math.max(60, width - LEFT - RIGHT);
  const across = useMemo(() => {
    const range = extent([x]) ?? [0, 1];
    return range[0] === range[1]
      ? linear(range[0] - 1, range[1] + 1, 2, 1)
      : linear(range[0], range[1], Math.max(2, Math.round(inner / 90)), 1);
  }, [x, inner]);
  if (n === 0) return null;
  const many = panes.reduce((sum, pane) => sum + pane.series.filter(measured).length, 0) > 3;
  const place = (i: number): number => LEFT + inner * across.place(x[i]!);

  const pointed = (event: PointerEvent): void => {
    const left = (event.currentTarget as Element).getBoundingClientRect().left;
    const share = (event.clientX - left - LEFT) / inner;
    const [low, high] = [x[0]!, x[n - 1]!];
    setAt(nearest(x, low + share * (high - low)));
  };
  const keyed = (event: KeyboardEvent): void => {
    const now = at ?? (event.key === "ArrowLeft" ? n : -1);
    const big = Math.max(1, Math.round(n / 10));
    const moves: Record<string, number> = {
      ArrowRight: now + 1,
      ArrowLeft: now - 1,
      ArrowUp: now + 1,
      ArrowDown: now - 1,
      PageUp: now + big,
      PageDown: now - big,
      Home: 0,
      End: n - 1,
    };
    if (event.key === "Escape") setAt(null);
    const to = moves[event.key];
    if (to === undefined) return;
    event.preventDefault();
    setAt(Math.max(0, Math.min(n - 1, to)));
  };

  const told = (i: number): string =>
    [
      `${axis} ${count(x[i]!)}`,
      ...panes.flatMap((pane) =>
        pane.series
          .filter((s) => measured(s))
          .map((s) => `${short(s.name, 40)} ${pane.format(s.values[i]!)}`),
      ),
      note?.(i) ?? "",
    ]
      .filter(Boolean)
      .join(", ");

  return (
    <figure class="chart" aria-labelledby={`${id}-title`}>
      <figcaption id={`${id}-title`}>{title}</figcaption>
      {legend && <Legend panes={panes} />}
      <div
        ref={box}
        class="chart-box"
        role="slider"
        tabIndex={0}
        aria-label={`${title}. Arrow keys read the values.`}
        aria-valuemin={x[0]}
        aria-valuemax={x[n - 1]}
        aria-valuenow={x[at ?? 0]}
        aria-valuetext={at === null ? `${count(n)} values` : told(at)}
        onPointerMove={pointed}
        onPointerDown={pointed}
        onPointerLeave={() => setAt(null)}
        onBlur={() => setAt(null)}
        onKeyDown={keyed}
      >
        <svg width={width} height={height} viewBox={`0 0 ${width} ${height}`} aria-hidden="true">
          {laid.map((one) => (
            <PaneOf laid={one} left={LEFT} inner={inner} x={place} />
          ))}
          <g class="axis">
            {across.ticks.map((tick) => (
              <text
                x={LEFT + inner * across.place(tick)}
                y={height - FOOT + 17}
                text-anchor="middle"
              >
                {count(tick)}
              </text>
            ))}
            <text class="axis-label" x={LEFT + inner} y={height - 4} text-anchor="end">
              {axis}
            </text>
          </g>
          {at !== null && (
            <g class="cross">
              <line x1={place(at)} x2={place(at)} y1={HEAD} y2={height - FOOT} />
              {laid.map((one) =>
                one.pane.series.map((s) => {
                  const y = one.y(s.values[at]!);
                  return Number.isFinite(y) && measured(s) ? (
                    <circle class={`series-${s.colour}`} cx={place(at)} cy={y} r="4" />
                  ) : null;
                }),
              )}
            </g>
          )}
        </svg>
      </div>
      <p class={`readout ${many ? "many" : ""}`} data-testid="readout">
        {at === null ? (
          <span class="faint">Point at the chart, or focus it and use the arrow keys, to read values.</span>
        ) : (
          told(at)
        )}
      </p>
      <Numbers title={title} axis={axis} x={x} panes={panes} note={note} />
    </figure>
  );
}

/** On a log scale powers of ten are written as such, unless there are others between. */
const raised =
  (ticks: number[]) =>
  (value: number): string => {
    const all = ticks.every((tick) => Number.isInteger(Math.round(Math.log10(tick) * 1e9) / 1e9));
    return all ? power(Math.round(Math.log10(value))) : trimmed(number(value, 2));
  };

/** 0.500 ms as 0.5 ms: digits that say nothing beside an axis. */
const trimmed = (text: string): string =>
  text.replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "");

function PaneOf({ laid, left, inner, x }: {
  laid: Laid;
  left: number;
  inner: number;
  x: (at: number) => number;
}) {
  const { pane, scale, top } = laid;
  const tick = pane.tick ?? (scale.log ? raised(scale.ticks) : (v: number) => trimmed(pane.format(v)));
  return (
    <g>
      <text class="axis-label" x={4} y={top - 10}>
        {pane.label}
      </text>
      {scale.ticks.map((value) => (
        <g class="axis">
          <line class="grid" x1={left} x2={left + inner} y1={laid.y(value)} y2={laid.y(value)} />
          <text x={left - 8} y={laid.y(value)} dy="0.32em" text-anchor="end">
            {tick(value)}
          </text>
        </g>
      ))}
      {pane.series.map((series, n) => (
        <Curve key={n} series={series} laid={laid} x={x} />
      ))}
    </g>
  );
}

function Legend({ panes }: { panes: Pane[] }) {
  const every = panes.flatMap((pane) => pane.series);
  const all = every.filter((one, n) => every.findIndex((other) => other.name === one.name) === n);
  if (all.length < 2) return null;
  return (
    <ul class="curves">
      {all.map((series) => (
        <li>
          <Swatch colour={series.colour} form={series.form} />
          <bdi title={short(series.name, 400)}>{short(series.name, 40)}</bdi>
        </li>
      ))}
    </ul>
  );
}

/** A piece of a series' line, for legends: colour and dashes, so that colour alone never tells. */
export function Swatch({ colour, form }: { colour: number; form?: Series["form"] }): JSX.Element {
  return (
    <svg class={`swatch series series-${colour}`} width="22" height="10" aria-hidden="true">
      {form === "dots" ? (
        <circle class="dot" cx="11" cy="5" r="3" />
      ) : (
        <path class={strokes[form ?? "line"]} d="M1 5H21" />
      )}
    </svg>
  );
}

function Numbers({ title, axis, x, panes, note }: Omit<ChartProps, "legend">) {
  const [open, setOpen] = useState(false);
  const all = panes.flatMap((pane) =>
    pane.series.filter(measured).map((series) => ({ pane, series })),
  );
  const every = Math.max(1, Math.ceil(x.length / ROWS));
  const rows = Array.from({ length: Math.ceil(x.length / every) }, (_, n) => n * every);
  return (
    <details
      class="numbers"
      onToggle={(event) => setOpen((event.currentTarget as HTMLDetailsElement).open)}
    >
      <summary>As a table</summary>
      {open && (
        <div class="scroll" tabIndex={0} role="region" aria-label={`${title}, as a table`}>
          {every > 1 && <p class="faint">Every {count(every)}th of {count(x.length)} rows.</p>}
          <table>
            <thead>
              <tr>
                <th scope="col">{axis}</th>
                {all.map(({ series }) => (
                  <th scope="col" class="num">
                    <bdi title={short(series.name, 400)}>{short(series.name, 32)}</bdi>
                  </th>
                ))}
                {note && <th scope="col">where</th>}
              </tr>
            </thead>
            <tbody>
              {rows.map((at) => (
                <tr>
                  <th scope="row">{count(x[at]!)}</th>
                  {all.map(({ pane, series }) => (
                    <td class="num">
                      {pane.format(series.values[at]!)}
                    </td>
                  ))}
                  {note && <td><bdi>{note(at)}</bdi></td>}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </details>
  );
}
