/** What the report says, in plain words. */
import { Bar } from "./charts/bar";
import { Choices } from "./choices";
import { Findings, verdict } from "./diagnosis";
import { FlowChart, Verdicts } from "./flow";
import { reveal } from "./graph/boxes";
import { Detail } from "./graph/detail";
import { brief, count, counted, moduleName, percent, shape, short } from "./format";
import { Routes } from "./paths/routes";
import { Term, Terms, rules } from "./terms";
import type { Influence, Leaf, Trace } from "./types";
import type { View } from "./view";

const MODULES = 8;
const ROUTES = 5;
const UNREACHED = 6;

export interface Ranked {
  row: number;
  name: string;
  module: number;
  value: number;
  error: number;
  eligible: number; // elements that could run through it
}

/**
 * Components by influence, the most influential first; those without parameters of their own (dropouts,
 * activations) last. Those that nothing could reach are out, and those in series, which have 100% by definition.
 */
export function ranked(table: Influence | undefined, by: "share" | "weighted"): Ranked[] {
  if (!table) return [];
  const found = table.name.map((name, row) => ({
    row,
    name,
    module: table.module[row]!,
    value: table[by][row]!,
    error: by === "share" ? table.error[row]! : NaN,
    eligible: table.eligible[row]!,
  }));
  const plain = (one: Ranked): number => Number(table.own[one.row] === 0);
  return found
    .filter((one) => Number.isFinite(one.value) && one.module !== 0 && !table.series?.[one.row])
    .sort((a, b) => plain(a) - plain(b) || b.value - a.value || a.row - b.row);
}

/** Modules that say something: not one whose every path is that of its only child. */
export function telling(trace: Trace, all: Ranked[]): Ranked[] {
  const children = new Map<number, number[]>();
  trace.modules.forEach((module, n) => {
    if (module.parent < 0) return;
    const mine = children.get(module.parent);
    if (mine) mine.push(n);
    else children.set(module.parent, [n]);
  });
  const value = new Map(all.map((one) => [one.module, one.value]));
  return all.filter((one) => {
    const inner = children.get(one.module) ?? [];
    return !inner.some((child) => value.get(child) === one.value);
  });
}

/** Parameters that no gradient reaches, and those it reaches in part; the emptiest first. */
export function unreached(trace: Trace): { whole: Leaf[]; part: Leaf[] } {
  const mine = trace.leaves.filter((leaf) => leaf.parameter && leaf.zero > 0);
  return {
    whole: mine.filter((leaf) => leaf.zero === leaf.elements),
    part: mine
      .filter((leaf) => leaf.zero < leaf.elements)
      .sort((a, b) => b.zero / b.elements - a.zero / a.elements),
  };
}

export function Overview(view: View) {
  const { trace, state, go, report } = view;
  if (!report.traces.length) {
    return (
      <div class="sheet">
        <div class="nothing">
          <h2>No trace</h2>
          <p>This report holds training alone. See the tab Training.</p>
        </div>
      </div>
    );
  }
  const show = (module: number): void =>
    go({ tab: "graph", module, operator: null, route: null, element: null, open: reveal(trace, state.open, module) });
  const said = new Set(trace.coverage?.words);
  const notes = [...trace.notes, ...(trace.tables[""]?.notes ?? [])].filter((note) => !said.has(note));
  return (
    <div class="sheet overview" data-testid="overview">
      <div class="grid">
        <Detail {...view} />
        <section class="card lead" data-testid="lead">
          <h2>{trace.diagnosis ? verdict(trace.diagnosis) : says(trace)}</h2>
          {trace.diagnosis && (
            <>
              <p class="soft">{says(trace)}</p>
              <Findings found={trace.diagnosis} at={{ trace, show }} />
            </>
          )}
        </section>
        <section class="card full" aria-labelledby="findings-title">
          <h2 id="findings-title">{trace.diagnosis ? "The gradient's flow" : "Findings"}</h2>
          {trace.flow.findings.length ? (
            <ul class="findings" data-testid="findings">
              {trace.flow.findings.map((finding) => (
                <li class={alarming(finding) ? "alarm" : ""}>
                  <bdi>{short(finding, 1000)}</bdi>
                </li>
              ))}
            </ul>
          ) : (
            <p class="fine">
              Nothing was found: there is too little between the loss and the parameters.
            </p>
          )}
          <Verdicts trace={trace} go={show} />
          {notes.length > 0 && (
            <>
              <h3>Notes on these numbers</h3>
              <ul class="notes" data-testid="notes">
                {notes.map((note) => (
                  <li>
                    <bdi>{short(note, 1000)}</bdi>
                  </li>
                ))}
              </ul>
            </>
          )}
        </section>
        <section class="card full" aria-labelledby="choices-title" data-testid="choices">
          <div class="card-head">
            <h2 id="choices-title">Where gradient had a choice</h2>
            <By by={state.by} go={go} />
          </div>
          <Choices trace={trace} by={state.by} show={show} />
        </section>
        {trace.coverage && (
          <section class="card full" aria-labelledby="coverage-title">
            <h2 id="coverage-title">
              How much a single path tells (<Term of="coverage" />)
            </h2>
            {trace.coverage.words.map((line) => (
              <p class="coverage" data-testid="coverage">
                <bdi>{short(line, 1000)}</bdi>
              </p>
            ))}
          </section>
        )}
        <Terms />
        <div class="stack">
          <section class="card" aria-labelledby="influence-title">
            <h2 id="influence-title">Most influential modules</h2>
            <Modules trace={trace} by={state.by} show={show} />
          </section>
          <Unreached view={view} />
        </div>
        <section class="card" aria-labelledby="routes-title">
          <div class="card-head">
            <h2 id="routes-title">Top <Term of="route">routes</Term></h2>
            {trace.routes.length > ROUTES && (
              <button type="button" class="plain-link" onClick={() => go({ tab: "paths" })}>
                All
              </button>
            )}
          </div>
          <Routes view={view} most={ROUTES} />
        </section>
        <section class="card full" aria-labelledby="flow-title">
          <h2 id="flow-title">Flow</h2>
          <FlowChart trace={trace} />
        </section>
        <section class="card full" aria-labelledby="facts-title">
          <h2 id="facts-title">This trace</h2>
          <Facts trace={trace} />
        </section>
        <Made made={report.made} />
      </div>
    </div>
  );
}

/** Whether a finding says that something is wrong; the others say that nothing is. */
export const alarming = (finding: string): boolean =>
  !/^(The gradient|Elsewhere the gradient) neither|^The graph is /.test(finding);

/** One sentence on the whole. */
export function says(trace: Trace): string {
  const parameters = trace.leaves.filter((leaf) => leaf.parameter);
  if (!parameters.length && !trace.leaves.length) {
    return "Gradient of this loss reaches no parameter.";
  }
  const elements = trace.leaves.reduce((sum, leaf) => sum + leaf.elements, 0);
  const zero = trace.leaves.reduce((sum, leaf) => sum + leaf.zero, 0);
  const reached =
    zero === 0 ? "every one of" : zero === elements ? "none of" : `${percent(1 - zero / elements)} of`;
  const trained = parameters.reduce((sum, leaf) => sum + leaf.elements, 0);
  const cut = trace.modules[0]!.parameters > trained ? " that the loss depends on" : "";
  const inputs = trace.leaves.length - parameters.length;
  const where = [
    parameters.length && `${cut && "the "}${counted(parameters.length, "parameter")}${cut}`,
    inputs && counted(inputs, "input"),
  ].filter(Boolean);
  return `Gradient reaches ${reached} ${counted(elements, "element")} in ${where.join(" and ")}.`;
}

function Facts({ trace }: { trace: Trace }) {
  const { paths, drawn, elements } = trace.sample;
  const operators = trace.operators.leaf.reduce((sum, leaf) => sum + (leaf < 0 ? 1 : 0), 0);
  const rows: [string, string, string?][] = [
    [
      "Rule",
      trace.rule,
      rules[trace.rule],
    ],
    ["Operators", count(operators)],
    ["Modules", count(trace.modules.length)],
    ["Elements", count(elements || trace.leaves.reduce((sum, leaf) => sum + leaf.elements, 0))],
    [
      "Sample",
      counted(paths, "path"),
      drawn >= elements ? "of all elements" : `of ${count(drawn)} drawn, seed ${trace.sample.seed}`,
    ],
  ];
  return (
    <dl class="facts" data-testid="facts">
      {rows.map(([name, value, more]) => (
        <div>
          <dt>{name}</dt>
          <dd>
            {value}
            {more && <small>{more}</small>}
          </dd>
        </div>
      ))}
    </dl>
  );
}

/** With what the report was made. */
export function Made({ made }: { made: [string, string][] }) {
  if (!made.length) return null;
  return (
    <p class="made full" data-testid="made">
      {made.map(([name, value], n) => (
        <>
          {n > 0 && " · "}
          <bdi>{short(name, 40)}</bdi> <bdi>{short(value, 80)}</bdi>
        </>
      ))}
    </p>
  );
}

/** How influence is counted. */
export function By({ by, go }: { by: "share" | "weighted"; go: View["go"] }) {
  return (
    <div class="choice" role="group" aria-label="How influence is counted">
      <button type="button" aria-pressed={by === "share"} onClick={() => go({ by: "share" })}>
        Elements
      </button>
      <button type="button" aria-pressed={by === "weighted"} onClick={() => go({ by: "weighted" })}>
        |Gradient|
      </button>
    </div>
  );
}

function Modules({ trace, by, show }: {
  trace: Trace;
  by: "share" | "weighted";
  show: (module: number) => void;
}) {
  const all = ranked(trace.tables[""], by);
  if (!all.length) {
    return <p class="void">There are no modules to rank: all are in series, or nothing reaches them.</p>;
  }
  const shown = telling(trace, all).slice(0, MODULES);
  return (
    <>
      <p class="faint">
        {by === "share"
          ? <><Term of="share">Share</Term> of the <Term of="eligible" /> elements whose path runs through a module.</>
          : <>The same <Term of="by |gradient|" />.</>}
      </p>
      <ul class="bars">
        {shown.map((one) => (
          <li data-testid="influence" data-name={one.name} data-value={one.value}>
            <button type="button" class="plain-link" onClick={() => show(one.module)}>
              <bdi title={`${short(one.name, 400)} · ${short(trace.modules[one.module]?.kind ?? "", 60)}`}>{short(moduleName(one.name), 44)}</bdi>
            </button>
            <Bar share={one.value} error={one.error} />
            <span class="num">
              {percent(one.value)}
              {Number.isFinite(one.error) && <small> ± {percent(one.error)}</small>}
              <small> of {brief(one.eligible)}</small>
            </span>
          </li>
        ))}
      </ul>
    </>
  );
}

function Unreached({ view }: { view: View }) {
  const { trace, go } = view;
  const { whole, part } = unreached(trace);
  if (!trace.leaves.length) return null;
  const row = (leaf: Leaf) => (
    <li>
      <button
        type="button"
        class="plain-link"
        onClick={() => go({ tab: "paths", leaf: trace.leaves.indexOf(leaf), element: null })}
      >
        <bdi title={short(leaf.name, 400)}>{short(leaf.name, 60)}</bdi>
      </button>
      <span class="faint">{shape(leaf.shape)}</span>
      <span class="num">
        {count(leaf.zero)} of {count(leaf.elements)}
        <small> {percent(leaf.zero / leaf.elements)}</small>
      </span>
    </li>
  );
  const list = [...whole, ...part];
  return (
    <section class="card" aria-labelledby="unreached-title" data-testid="unreached">
      <h2 id="unreached-title"><Term of="unreached">Unreached</Term> parameters</h2>
      {list.length === 0 ? (
        <p class="fine">None: every element of every parameter has a gradient other than 0.</p>
      ) : (
        <>
          <p>
            {whole.length > 0
              ? `${counted(whole.length, "parameter")} ${whole.length === 1 ? "gets" : "get"} no gradient at all. `
              : "No parameter is wholly without gradient. "}
            {part.length > 0 &&
              `${counted(part.length, "parameter")} ${part.length === 1 ? "has" : "have"} elements whose gradient is exactly 0.`}
          </p>
          <ul class="zeros">{list.slice(0, UNREACHED).map(row)}</ul>
          {list.length > UNREACHED && (
            <details class="numbers">
              <summary>{count(list.length - UNREACHED)} more</summary>
              <ul class="zeros">{list.slice(UNREACHED, 500).map(row)}</ul>
            </details>
          )}
        </>
      )}
    </section>
  );
}

