/** Where gradient had a choice: forks, and how paths divide at each. */
import { Bar } from "./charts/bar";
import { Dotted } from "./dotted";
import { brief, count, counted, percent, short } from "./format";
import { Term } from "./terms";
import type { Branch, Fork, Trace } from "./types";
import type { State } from "./view";

const FORKS = 6;
const BRANCHES = 6;

/** Modules that every path passes. */
export function seriesOf(trace: Trace): Set<number> {
  const found = new Set<number>();
  const table = trace.tables[""];
  table?.module.forEach((module, row) => {
    if (module > 0 && table.series[row]) found.add(module);
  });
  return found;
}

/** Modules that every path passes, without those inside of one that is listed. */
export function inSeries(trace: Trace): number[] {
  const found = seriesOf(trace);
  const inside = (module: number): boolean => {
    for (let at = trace.modules[module]!.parent; at > 0; at = trace.modules[at]!.parent)
      if (found.has(at)) return true;
    return false;
  };
  return [...found].filter((module) => !inside(module)).sort((a, b) => a - b);
}

/** Branches in the order to show them: the largest first. */
export function byShare(fork: Fork, by: State["by"]): Branch[] {
  return [...fork.branches].sort((a, b) => (b[by] || 0) - (a[by] || 0));
}

export function Choices({ trace, by, show }: {
  trace: Trace;
  by: State["by"];
  show: (module: number) => void;
}) {
  const series = inSeries(trace);
  const forks = trace.choices;
  if (!forks) return <p class="void">There are too many places where paths divide to list them.</p>;
  const some = forks.filter((fork) => fork.branches.some((branch) => branch.elements > 0));
  return (
    <>
      {some.length === 0 ? (
        <p class="fine">
          Nowhere: from every parameter there is one way to the loss only, so all modules are in series.
        </p>
      ) : (
        <>
          <p class="faint">
            At each <Term of="fork" />, of the elements that could take more than one branch and come to it, the share whose path
            takes each{by === "weighted" ? ", counted by |gradient|" : ""}. Shares of a fork add up to 100%.
          </p>
          <ul class="forks">
            {some.slice(0, FORKS).map((fork) => (
              <One fork={fork} by={by} show={show} />
            ))}
          </ul>
          {some.length > FORKS && (
            <details class="numbers">
              <summary>{count(some.length - FORKS)} more forks</summary>
              <ul class="forks">
                {some.slice(FORKS).map((fork) => (
                  <One fork={fork} by={by} show={show} />
                ))}
              </ul>
            </details>
          )}
        </>
      )}
      {series.length > 0 && (
        <p class="series" data-testid="series">
          <Term of="in series">In series</Term>, so every path passes {series.length === 1 ? "it" : "them"}:{" "}
          {series.slice(0, 12).map((module, n) => (
            <>
              {n > 0 && ", "}
              <button type="button" class="plain-link" onClick={() => show(module)}>
                <bdi>{short(trace.modules[module]!.name, 44)}</bdi>
              </button>
            </>
          ))}
          {series.length > 12 && ` and ${count(series.length - 12)} more`}.
        </p>
      )}
    </>
  );
}

function One({ fork, by, show }: { fork: Fork; by: State["by"]; show: (module: number) => void }) {
  const branches = byShare(fork, by);
  const total = fork.branches.reduce((sum, branch) => sum + branch.elements, 0);
  const rows = (some: Branch[]) =>
    some.map((branch) => (
      <li data-testid="branch" data-name={branch.name} data-value={branch[by]}>
        {branch.module > 0 ? (
          <button type="button" class="plain-link" onClick={() => show(branch.module)}>
            <Dotted name={branch.name} most={44} />
          </button>
        ) : (
          <Dotted name={branch.name} most={44} />
        )}
        <Bar share={branch[by]} error={by === "share" ? branch.error : NaN} />
        <span class="num">
          {percent(branch[by])}
          {by === "share" && Number.isFinite(branch.error) && <small> ± {percent(branch.error)}</small>}
        </span>
      </li>
    ));
  return (
    <li data-testid="fork" data-name={fork.name}>
      <h3>
        <bdi title={short(fork.name, 400)}>{short(fork.name, 60)}</bdi>
        <small> {counted(total, "element")}</small>
      </h3>
      <ul class="branches">{rows(branches.slice(0, BRANCHES))}</ul>
      {branches.length > BRANCHES && (
        <details class="numbers">
          <summary>{brief(branches.length - BRANCHES)} more branches</summary>
          <ul class="branches">{rows(branches.slice(BRANCHES))}</ul>
        </details>
      )}
    </li>
  );
}
