/** Two traces side by side: modules by name, the greatest difference first. */
import { useMemo, useState } from "preact/hooks";
import { Bar, Tilt } from "./charts/bar";
import { FlowChart } from "./flow";
import { count, counted, moduleName, percent, points, short } from "./format";
import { By } from "./overview";
import type { Influence, Trace } from "./types";
import type { View } from "./view";

const MOST = 40;

export interface Match {
  name: string;
  rows: [number, number]; // of the tables
  values: [number, number];
  errors: [number, number];
  by: number; // second less first
  error: number; // of the difference; NaN where there is one loss
}

export interface Matched {
  both: Match[];
  only: [string[], string[]];
}

/** Components of both by name; numbers that are not there are left to the end. */
export function matched(a: Influence | undefined, b: Influence | undefined, by: "share" | "weighted"): Matched {
  const names = (table: Influence | undefined): Map<string, number> =>
    new Map(table?.name.map((name, row) => [name, row]));
  const [first, second] = [names(a), names(b)];
  const both: Match[] = [];
  for (const [name, row] of first) {
    const other = second.get(name);
    if (other === undefined || !a || !b) continue;
    const values: [number, number] = [a[by][row]!, b[by][other]!];
    const errors: [number, number] =
      by === "share" ? [a.error[row]!, b.error[other]!] : [NaN, NaN];
    both.push({
      name,
      rows: [row, other],
      values,
      errors,
      by: values[1] - values[0],
      error: Math.sqrt(errors[0] ** 2 + errors[1] ** 2),
    });
  }
  const size = (match: Match): number => (Number.isNaN(match.by) ? -1 : Math.abs(match.by));
  both.sort((x, y) => size(y) - size(x));
  return {
    both,
    only: [
      [...first.keys()].filter((name) => !second.has(name)),
      [...second.keys()].filter((name) => !first.has(name)),
    ],
  };
}

/** What is not the same about two traces, in words. */
export function differing(a: Trace, b: Trace): { name: string; values: [string, string]; same: boolean }[] {
  const operators = (trace: Trace): number => trace.operators.leaf.filter((leaf) => leaf < 0).length;
  const parameters = (trace: Trace): number =>
    trace.leaves.reduce((sum, leaf) => sum + (leaf.parameter ? leaf.elements : 0), 0);
  const rows: [string, (trace: Trace) => string][] = [
    ["Rule", (trace) => trace.rule],
    ["Granularity", (trace) => (trace.granularity === "scalar" ? "element by element" : "whole tensors")],
    ["Losses", (trace) => count(trace.pairs)],
    ["Modules", (trace) => count(trace.modules.length)],
    ["Operators", (trace) => count(operators(trace))],
    ["Elements of parameters", (trace) => count(parameters(trace))],
    ["Paths sampled", (trace) => count(trace.sample.paths)],
    ["Routes", (trace) => count(trace.routes.length)],
    ["Depth", (trace) => count(trace.flow.depth.length)],
  ];
  return rows.map(([name, of]) => {
    const values: [string, string] = [of(a), of(b)];
    return { name, values, same: values[0] === values[1] };
  });
}

export function Compare(view: View) {
  const { report, state, go } = view;
  const [a, b] = report.traces;
  const [all, setAll] = useState(false);
  const [query, setQuery] = useState("");
  const tables = useMemo(
    () => [...Object.keys(a?.tables ?? {})].filter((name) => name in (b?.tables ?? {})),
    [a, b],
  );
  const [table, setTable] = useState("");
  const found = useMemo(
    () => matched(a?.tables[table], b?.tables[table], state.by),
    [a, b, table, state.by],
  );
  if (!a || !b) {
    return (
      <div class="sheet compare" data-testid="compare">
        <div class="nothing">
          <h2>Nothing to compare</h2>
          <p>This report holds {a ? "one trace" : "no trace"}. Two of them come side by side with</p>
          <div class="code">
            <code>gradtrace report before.gradtrace after.gradtrace</code>
          </div>
        </div>
      </div>
    );
  }
  const words = query.toLowerCase().trim();
  const fits = found.both.filter((match) => match.name.toLowerCase().includes(words));
  const shown = all ? fits.slice(0, 1000) : fits.slice(0, MOST);
  // Small differences look small, whatever the largest is.
  const most = found.both.reduce((so, { by }) => (Math.abs(by) > so ? Math.abs(by) : so), 0.05);
  const several = found.both.some((match) => Number.isFinite(match.error));
  return (
    <div class="sheet compare" data-testid="compare">
      <div class="grid">
        <section class="card full">
          <div class="card-head">
            <h2>
              <span class="side-a">A</span> <bdi>{short(a.name, 60)}</bdi> <span class="faint">and</span>{" "}
              <span class="side-b">B</span> <bdi>{short(b.name, 60)}</bdi>
            </h2>
            <By by={state.by} go={go} />
          </div>
          <p>{summary(found, several)}</p>
          <div class="filters">
            <input
              type="search"
              data-testid="compare-filter"
              aria-label="Filter components"
              placeholder={`Filter ${counted(found.both.length, "component")}`}
              value={query}
              onInput={(event) => setQuery(event.currentTarget.value)}
            />
            {tables.length > 1 && (
              <label>
                <span class="sr">Kind of component</span>
                <select value={table} onChange={(event) => setTable(event.currentTarget.value)}>
                  {tables.map((name) => (
                    <option value={name}>{name || "modules"}</option>
                  ))}
                </select>
              </label>
            )}
          </div>
          {shown.length === 0 ? (
            <p class="void">
              {found.both.length
                ? `No component’s name holds “${short(query, 30)}”.`
                : "The two have no component of the same name."}
            </p>
          ) : (
            <Table shown={shown} most={most} several={several} open={(match) => open(view, match, table)} />
          )}
          {fits.length > shown.length && (
            <button type="button" class="button" onClick={() => setAll(true)}>
              Show {counted(fits.length - shown.length, "smaller difference")}
            </button>
          )}
        </section>
        <Only names={found.only[0]} side="A" trace={a} />
        <Only names={found.only[1]} side="B" trace={b} />
        <section class="card full">
          <h2>Flow</h2>
          <FlowChart traces={report.traces} />
        </section>
        <section class="card full">
          <h2>Facts</h2>
          <table class="plain" data-testid="compare-facts">
            <thead>
              <tr>
                <th scope="col">
                  <span class="sr">Fact</span>
                </th>
                <th scope="col">A</th>
                <th scope="col">B</th>
              </tr>
            </thead>
            <tbody>
              {differing(a, b).map(({ name, values, same }) => (
                <tr class={same ? "same" : "differs"}>
                  <th scope="row">{name}</th>
                  <td>{values[0]}</td>
                  <td>
                    {values[1]}
                    {same ? <span class="sr"> the same</span> : ""}
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </section>
      </div>
    </div>
  );
}

function open(view: View, match: Match, table: string): void {
  const side = view.state.trace === 1 ? 1 : 0;
  const module = view.report.traces[side]?.tables[table]?.module[match.rows[side]] ?? -1;
  if (module >= 0) view.go({ tab: "graph", module });
}

function summary(found: Matched, several: boolean): string {
  const [top] = found.both;
  if (!top || Number.isNaN(top.by)) return "Influence of each, matched by name.";
  if (top.by === 0) return "All components that both have are equally influential in the two.";
  const clear = found.both.filter((match) => Math.abs(match.by) > 2 * match.error).length;
  const most = `The greatest difference is ${points(top.by)} percentage points, at ${short(moduleName(top.name), 60)}.`;
  return several
    ? `${most} ${clear ? count(clear) : "None"} of ${counted(found.both.length, "component")} ${clear === 1 ? "differs" : "differ"} by more than two standard errors.`
    : most;
}

function Table({ shown, most, several, open }: {
  shown: Match[];
  most: number;
  several: boolean;
  open: (match: Match) => void;
}) {
  const value = (match: Match, side: 0 | 1) => (
    <td role="cell" class="pair" data-label={side ? "B" : "A"}>
      <Bar share={match.values[side]} error={match.errors[side]} class={side ? "b" : "a"} />
      <span class="num">
        {Number.isNaN(match.values[side]) ? "none eligible" : percent(match.values[side])}
        {several && Number.isFinite(match.errors[side]) && (
          <small> ± {percent(match.errors[side])}</small>
        )}
      </span>
    </td>
  );
  return (
    <table class="compare-table" role="table" aria-label="Influence of A and B">
      <thead role="rowgroup">
        <tr role="row">
          <th role="columnheader" scope="col">
            Component
          </th>
          <th role="columnheader" scope="col">
            A
          </th>
          <th role="columnheader" scope="col">
            B
          </th>
          <th role="columnheader" scope="col">
            B − A, points
          </th>
        </tr>
      </thead>
      <tbody role="rowgroup">
        {shown.map((match) => (
          <tr
            key={match.name}
            role="row"
            data-testid="compare-row"
            data-name={match.name}
            data-a={match.values[0]}
            data-b={match.values[1]}
            data-difference={match.by}
          >
            <th role="rowheader" scope="row">
              <button type="button" class="plain-link" onClick={() => open(match)}>
                <bdi title={short(match.name, 400)}>{short(moduleName(match.name), 48)}</bdi>
              </button>
            </th>
            {value(match, 0)}
            {value(match, 1)}
            <td role="cell" class="pair" data-label="B − A">
              <Tilt by={match.by} most={most} />
              <span class="num">
                {Number.isNaN(match.by) ? "none" : points(match.by)}
                {Number.isFinite(match.error) && <small> ± {points(match.error).slice(1)}</small>}
              </span>
            </td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

function Only({ names, side, trace }: { names: string[]; side: "A" | "B"; trace: Trace }) {
  if (!names.length) return null;
  return (
    <section class="card" data-testid={`only-${side.toLowerCase()}`}>
      <h2>
        Only in <span class={`side-${side.toLowerCase()}`}>{side}</span>
      </h2>
      <p class="faint">
        {counted(names.length, "component")} of <bdi>{short(trace.name, 60)}</bdi>
      </p>
      <ul class="names">
        {names.slice(0, 60).map((name) => (
          <li>
            <bdi class="mono" title={short(name, 400)}>
              {short(moduleName(name), 60)}
            </bdi>
          </li>
        ))}
        {names.length > 60 && <li class="faint">and {count(names.length - 60)} more</li>}
      </ul>
    </section>
  );
}
