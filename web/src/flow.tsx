/** How large the gradient is along depth: norms on a log scale, and how much of it is exactly 0. */
import { useMemo } from "preact/hooks";
import { Chart, type Pane } from "./charts/chart";
import { moduleName, number, percent, short } from "./format";
import type { Flow, Trace } from "./types";

const whole = (value: number): string => `${Math.round(100 * value)}%`;

/** Traces of several depths share an axis: a trace has no number where it has no operator. */
export function aligned(flows: readonly Flow[]): { depth: number[]; at: number[][] } {
  const depth = [...new Set(flows.flatMap((flow) => [...flow.depth]))].sort((a, b) => a - b);
  const at = flows.map((flow) => {
    const rows = new Map([...flow.depth].map((d, row) => [d, row]));
    return depth.map((d) => rows.get(d) ?? -1);
  });
  return { depth, at };
}

export function FlowChart({ traces }: { traces: readonly Trace[] }) {
  const { depth, panes, note } = useMemo(() => drawn(traces), [traces]);
  if (depth.length < 2) return <p class="void">Too few operators for a chart along depth.</p>;
  return (
    <Chart
      title="Gradient along depth, from the loss (left) to the inputs (right)"
      axis="operators below the loss"
      x={depth}
      panes={panes}
      note={note}
      legend={traces.length > 1}
    />
  );
}

function drawn(traces: readonly Trace[]): {
  depth: number[];
  panes: Pane[];
  note: (at: number) => string;
} {
  const flows = traces.map((trace) => trace.flow);
  const { depth, at } = aligned(flows);
  const column = (t: number, values: ArrayLike<number>): number[] =>
    at[t]!.map((row) => (row < 0 ? NaN : values[row]!));
  const name = (t: number, what: string): string =>
    traces.length > 1 ? `${short(traces[t]!.name, 30)}: ${what}` : what;
  const panes: Pane[] = [
    {
      label: "‖gradient‖, largest operator at each depth (log scale)",
      format: (value) => number(value),
      log: true,
      height: 190,
      series: flows.map((flow, t) => ({
        name: name(t, "norm"),
        values: column(t, flow.norm),
        colour: t,
        missing: (n: number) => at[t]![n]! < 0,
      })),
    },
    {
      label: "exact zeros, share of its elements",
      format: percent,
      tick: whole,
      height: 64,
      from: 0,
      to: 1,
      series: flows.map((flow, t) => ({
        name: name(t, "zeros"),
        values: column(t, flow.zeros),
        colour: t,
        missing: (n: number) => at[t]![n]! < 0,
      })),
    },
  ];
  const note = (n: number): string => {
    const places = flows.map((flow, t) => {
      const row = at[t]![n]!;
      if (row < 0) return "";
      const where = flow.module[row];
      return `${flow.operator[row] ?? ""}${where ? ` in ${short(moduleName(where), 40)}` : ""}`;
    });
    return [...new Set(places.filter(Boolean))].join(" / ");
  };
  return { depth, panes, note };
}

/** Modules that the flow has a word for. */
export function Verdicts({ trace, go }: { trace: Trace; go: (module: number) => void }) {
  const rows = trace.flow.rows.filter((row) => row.verdict);
  if (!rows.length) return null;
  return (
    <ul class="verdicts">
      {rows.slice(0, 12).map((row) => (
        <li>
          <button type="button" class="plain-link" onClick={() => go(row.module)}>
            <bdi>{short(moduleName(trace.modules[row.module]?.name ?? ""), 60)}</bdi>
          </button>{" "}
          <span class="tag">{row.verdict}</span>{" "}
          <span class="faint">
            norm {number(row.norm)} at depth {row.depth}
            {row.zeros > 0 ? `, ${percent(row.zeros)} exact zeros` : ""}
          </span>
        </li>
      ))}
      {rows.length > 12 && <li class="faint">and {rows.length - 12} more</li>}
    </ul>
  );
}
