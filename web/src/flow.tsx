/** How large the gradient is along depth: norms on a log scale, and how much of it is exactly 0. */
import { useMemo } from "preact/hooks";
import { Chart, type Pane } from "./charts/chart";
import { moduleName, number, percent, short } from "./format";
import type { Trace } from "./types";

const whole = (value: number): string => `${Math.round(100 * value)}%`;

export function FlowChart({ trace: { flow } }: { trace: Trace }) {
  const panes = useMemo<Pane[]>(
    () => [
      {
        label: "‖gradient‖, largest operator at each depth (log scale)",
        format: (value) => number(value),
        log: true,
        height: 190,
        series: [{ name: "norm", values: [...flow.norm], colour: 0 }],
      },
      {
        label: "exact zeros, share of its elements",
        format: percent,
        tick: whole,
        height: 64,
        from: 0,
        to: 1,
        series: [{ name: "zeros", values: [...flow.zeros], colour: 0 }],
      },
    ],
    [flow],
  );
  if (flow.depth.length < 2) return <p class="void">Too few operators for a chart along depth.</p>;
  const note = (n: number): string => {
    const where = flow.module[n];
    return `${flow.operator[n] ?? ""}${where ? ` in ${short(moduleName(where), 40)}` : ""}`;
  };
  return (
    <Chart
      title="Gradient along depth, from the loss (left) to the inputs (right)"
      axis="operators below the loss"
      x={[...flow.depth]}
      panes={panes}
      note={note}
    />
  );
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
