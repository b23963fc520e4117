/** A path, step by step, from a parameter to the loss. */
import { useEffect, useState } from "preact/hooks";
import { Bar } from "../charts/bar";
import { count, counted, element, exact, number, percent, power, shape, short } from "../format";
import type { Leaf, Trace } from "../types";
import type { View } from "../view";
import { modules, type Path, type Step } from "./walk";

const FACTORS = 6; // written out
const MANY = 120; // steps drawn at first
const MORE = 500; // and with each press after
const STRIP = 14;

export function Steps({ view, path }: { view: View; path: Path }) {
  const { trace } = view;
  return (
    <section class="path" data-testid="path" aria-labelledby="path-title">
      <div class="path-head">
        <h3 id="path-title">
          Path of{" "}
          <bdi class="mono" title={short(path.leaf.name, 400)}>
            {short(path.leaf.name, 80)}
          </bdi>{" "}
          {path.index.length > 0 && <span class="mono">{element(path.index)}</span>}
        </h3>
        <button
          type="button"
          class="button"
          data-testid="show-graph"
          onClick={() => view.go({ tab: "graph", route: null, ...picked(trace, path) })}
        >
          Show in graph
        </button>
      </div>
      <Facts path={path} rule={trace.rule} />
      <Strip view={view} path={path} />
      <Table trace={trace} path={path} />
    </section>
  );
}

function picked(trace: Trace, path: Path): { leaf: number; element: number | null } {
  const first = path.steps[0];
  const flat = first ? (trace.forest.element[first.vertex] ?? -1) : -1;
  return { leaf: trace.leaves.indexOf(path.leaf), element: flat < 0 ? null : flat };
}

function Facts({ path, rule }: { path: Path; rule: Trace["rule"] }) {
  return (
    <>
      <dl class="facts">
        <div>
          <dt>Gradient of the element</dt>
          <dd data-testid="path-gradient" data-value={exact(path.gradient)} title={exact(path.gradient)}>
            {number(path.gradient)}
          </dd>
        </div>
        <div>
          <dt>Weight of this path</dt>
          <dd data-testid="path-weight" data-value={exact(path.weight)} title={exact(path.weight)}>
            {weighed(path)}
          </dd>
        </div>
        <div>
          <dt>Share of the gradient</dt>
          <dd data-testid="path-share" data-value={exact(path.share)} title={exact(path.share)}>
            {path.gradient === 0 ? "none: it is 0" : portion(path)}
          </dd>
        </div>
        <div>
          <dt>Steps</dt>
          <dd>{count(path.steps.length)}</dd>
        </div>
      </dl>
      <p class="product">
        <span class="mono">{factors(path.steps)}</span> = <strong>{weighed(path)}</strong>
        <span class="faint">
          {" "}
          the product of the derivatives along it
          {path.gradient !== 0 &&
            ` is ${portion(path)} of ${number(path.gradient)}, to which all paths of the element add up`}
          .{" "}
          {rule === "greedy"
            ? "Each step goes where the largest contribution came from."
            : "No path of this element weighs more."}
        </span>
      </p>
    </>
  );
}

/** A product of so many small numbers that no float holds it is told by its power of ten. */
function weighed(path: Path): string {
  const lost = path.weight === 0 && Number.isFinite(path.log);
  return lost ? `about ${power(Math.round(path.log))}` : number(path.weight);
}

const portion = (path: Path): string =>
  path.weight === 0 && Number.isFinite(path.log) ? "almost none" : percent(path.share);

/** A product in few words: factors 1 are left out, and the middle of many. */
export function factors(steps: readonly Step[]): string {
  const all = steps.filter((s) => s.derivative !== 1).map((s) => s.derivative);
  const ones = steps.length - all.length;
  const text = all.map((d) => (d < 0 ? `(${number(d)})` : number(d)));
  const shown =
    text.length > FACTORS
      ? [...text.slice(0, 3), `… ${text.length - 5} more …`, ...text.slice(-2)]
      : text;
  if (ones === 1) shown.push("1");
  else if (ones > 1) shown.push(`1${superscript(ones)}`);
  return shown.join(" · ");
}

const superscript = (n: number): string =>
  [...String(n)].map((d) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[Number(d)]).join("");

function Strip({ view, path }: { view: View; path: Path }) {
  const { trace, go } = view;
  const [all, setAll] = useState(false);
  const way = modules(trace, path.steps);
  const cut = !all && way.length > STRIP;
  const half = STRIP / 2;
  const chip = (m: number, n: number) => {
    const name = trace.modules[m]!.name;
    return (
      <li key={`${n}`}>
        <button
          type="button"
          class="stop"
          title={`${short(name, 400)} · ${short(trace.modules[m]!.kind, 60)}: show in graph`}
          onClick={() => go({ tab: "graph", module: m })}
        >
          <bdi>{short(name, 36)}</bdi>
        </button>
      </li>
    );
  };
  return (
    <ol class="strip" aria-label="Modules on the path" data-testid="strip">
      <li>
        <span class="stop end">
          <bdi>{short(path.leaf.name.split(".").at(-1) ?? "", 36)}</bdi>
        </span>
      </li>
      {(cut ? way.slice(0, half) : way).map(chip)}
      {cut && (
        <li>
          <button type="button" class="stop more" onClick={() => setAll(true)}>
            {counted(way.length - STRIP, "more module")}
          </button>
        </li>
      )}
      {cut && way.slice(-half).map((m, n) => chip(m, half + n + 1))}
      <li>
        <span class="stop end">loss</span>
      </li>
    </ol>
  );
}

function Table({ trace, path }: { trace: Trace; path: Path }) {
  const [more, setMore] = useState(0);
  const [fold, setFold] = useState(false);
  const start = path.steps[0]?.vertex;
  useEffect(() => setMore(0), [start]);
  const views = path.steps.filter((s) => s.view).length;
  const kept = path.steps
    .map((step, n) => ({ step, n }))
    .filter(({ step }) => !(fold && step.view));
  const half = MANY / 2;
  const between = kept.length - MANY - more;
  const cut = between > 0;
  const last = path.steps.length - 1;
  const row = ({ step, n }: { step: Step; n: number }) => (
    <Row key={n} n={n} step={step} last={n === last} leaf={path.leaf} />
  );
  return (
    <>
      {views > 0 && (
        <label class="check">
          <input
            type="checkbox"
            checked={fold}
            onChange={(event) => setFold(event.currentTarget.checked)}
          />
          Hide {counted(views, "step")} that only {views === 1 ? "moves" : "move"} elements
        </label>
      )}
      <table class="steps" role="table" aria-label={`Steps of the path, ${trace.rule}`}>
        <thead role="rowgroup">
          <tr role="row">
            <th role="columnheader" scope="col">
              Operator and module
            </th>
            <th role="columnheader" scope="col">
              Shape and element
            </th>
            <th role="columnheader" scope="col" class="num" title="of the next step's element by this one">
              Derivative
            </th>
            <th role="columnheader" scope="col" class="num" title="of the loss by this element">
              Gradient
            </th>
            <th role="columnheader" scope="col" title="of the gradient here, the part that came this way">
              Share
            </th>
          </tr>
        </thead>
        <tbody role="rowgroup">
          {(cut ? kept.slice(0, half + more) : kept).map(row)}
          {cut && (
            <tr role="row" class="between">
              <td role="cell" colSpan={5}>
                <button type="button" class="button" data-testid="all-steps" onClick={() => setMore(more + MORE)}>
                  {between > MORE
                    ? `Show ${count(MORE)} of the ${count(between)} steps between`
                    : `Show the ${counted(between, "step")} between`}
                </button>
              </td>
            </tr>
          )}
          {cut && kept.slice(-half).map(row)}
        </tbody>
      </table>
    </>
  );
}

function Row({ n, step, last, leaf: { name, parameter } }: {
  n: number;
  step: Step;
  last: boolean;
  leaf: Leaf;
}) {
  const where = n === 0 ? (parameter ? "the parameter" : "the input") : step.place;
  return (
    <tr
      role="row"
      class={`${n === 0 ? "first" : ""} ${last ? "last" : ""} ${step.view ? "view" : ""}`}
      data-testid="step"
      data-operator={step.operator}
      data-module={step.place}
      data-call={step.call}
      data-element={step.index.join(",")}
      data-derivative={exact(step.derivative)}
      data-gradient={exact(step.gradient)}
      data-share={exact(step.share)}
    >
      <td role="cell" class="what">
        <bdi class="mono" title={n === 0 ? short(name, 400) : undefined}>
          {short(n === 0 ? name : step.operator, 60)}
        </bdi>
        <span class="faint" title={where.length > 60 ? short(where, 400) : undefined}>
          <bdi>{short(where, 60)}</bdi>
          {step.call > 0 && ` (call ${step.call})`}
          {last && `${where ? " · " : ""}loss`}
        </span>
      </td>
      <td role="cell" class="where">
        <span>{shape(step.shape)}</span> <span class="mono">{element(step.index)}</span>
      </td>
      <td role="cell" class="num" data-label="Derivative" title={exact(step.derivative)}>
        {number(step.derivative)}
      </td>
      <td role="cell" class="num" data-label="Gradient" title={exact(step.gradient)}>
        {number(step.gradient)}
      </td>
      <td role="cell" class="share" data-label="Share" title={exact(step.share)}>
        <Bar share={step.share} />
        <span class="num">{percent(step.share)}</span>
      </td>
    </tr>
  );
}
