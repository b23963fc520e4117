/** Influence over training, what it cost to know, and whether steps slow down. */
import { useMemo, useState } from "preact/hooks";
import { Chart, type Pane, type Series, Swatch } from "./charts/chart";
import { count, counted, duration, moduleName, number, percent, short } from "./format";
import { By, Made } from "./overview";
import type { Timing, Training as Course } from "./types";
import type { View } from "./view";

const LINES = 8; // as many as can be told apart
const LIST = 300;

/** The mean of the numbers that are. */
function mean(values: ArrayLike<number>): number {
  let [sum, n] = [0, 0];
  for (let i = 0; i < values.length; i++) {
    if (Number.isNaN(values[i]!)) continue;
    sum += values[i]!;
    n++;
  }
  return n ? sum / n : NaN;
}

/** Components by their mean over training, the greatest first; after them those that every path passes at every step. */
export function order(columns: readonly ArrayLike<number>[]): number[] {
  const means = columns.map(mean).map((value) => (Number.isNaN(value) ? -2 : value === 1 ? -1 : value));
  return means.map((_, n) => n).sort((a, b) => means[b]! - means[a]! || a - b);
}

/** A component put into the first free line, or taken out; others keep their colours. */
export function toggled(lines: readonly (number | null)[], component: number): (number | null)[] {
  const at = lines.indexOf(component);
  if (at >= 0) return lines.map((one, n) => (n === at ? null : one));
  const free = lines.indexOf(null);
  return free < 0 ? [...lines] : lines.map((one, n) => (n === free ? component : one));
}

/** The line through a cloud of times: the slope is given, half of the points lie above. */
export function trendline({ step, seconds }: Timing, slope: number): Float64Array {
  const rests = [...seconds].map((s, n) => s - slope * step[n]!).filter(Number.isFinite);
  rests.sort((a, b) => a - b);
  const middle = rests.length ? (rests[(rests.length - 1) >> 1]! + rests[rests.length >> 1]!) / 2 : NaN;
  return Float64Array.from(step, (s) => middle + slope * s);
}

/** The trend and the two ends of its interval, as far as they are known. */
function fitted(timing: Timing): Series[] {
  const lines: [string, number, Series["form"]][] = [
    ["trend", timing.slope, "trend"],
    ["its interval", timing.low, "bound"],
    ["its interval", timing.high, "bound"],
  ];
  return lines
    .filter(([, slope]) => Number.isFinite(slope))
    .map(([name, slope, form]) => ({ name, values: trendline(timing, slope), colour: 0, form }));
}

export function Training({ report, state, go }: View) {
  const { training, timing } = report;
  if (!training && !timing) {
    return (
      <div class="sheet training" data-testid="training">
        <div class="nothing">
          <h2>No training here</h2>
          <p>Watch a training loop and this page shows influence over its steps:</p>
          <div class="code">
            <code>monitor = gt.Monitor(model, every=100)</code>
          </div>
        </div>
      </div>
    );
  }
  return (
    <div class="sheet training" data-testid="training">
      {training && <Influence training={training} by={state.by} go={go} />}
      {timing && <Pace timing={timing} />}
      <Made made={report.made} />
    </div>
  );
}

function Influence({ training, by, go }: { training: Course; by: "share" | "weighted"; go: View["go"] }) {
  const columns = training[by];
  const ranking = useMemo(() => order(columns), [columns]);
  const [chosen, setChosen] = useState<(number | null)[] | null>(null);
  const lines = chosen ?? Array.from({ length: LINES }, (_, n) => ranking[n] ?? null);
  const panes = useMemo((): Pane[] => {
    const series = lines.flatMap((component, colour) =>
      component === null || !columns[component]
        ? []
        : [{ name: moduleName(training.components[component]!), values: columns[component]!, colour }],
    );
    return [
      {
        label: by === "share" ? "influence, share of elements" : "influence, share of |gradient|",
        format: percent,
        tick: (value) => `${Math.round(100 * value)}%`,
        height: 260,
        from: 0,
        to: 1,
        series,
      },
      {
        label: "loss",
        format: (value) => number(value),
        height: 90,
        series: [{ name: "loss", values: training.loss, colour: 8, form: "line" }],
      },
    ];
  }, [training, by, lines.join()]);
  const n = training.step.length;
  return (
    <section class="card full">
      <div class="card-head">
        <h2>Influence over training</h2>
        <By by={by} go={go} />
      </div>
      <p class="status" data-testid="training-status">
        {training.running && (
          <span class="tag running">Training goes on, or was stopped before its end</span>
        )}
        <span>
          {n ? `${counted(n, "traced step")}, ${n > 1 ? `${count(training.step[0]!)} to ${count(training.step[n - 1]!)}` : `step ${count(training.step[0]!)}`}.` : "No step has been traced yet."}{" "}
          {Number.isNaN(training.cost)
            ? "What monitoring cost is not known."
            : `Monitoring took ${percent(training.cost)} of training time.`}
        </span>
      </p>
      {training.notes.length > 0 && (
        <ul class="notes">
          {training.notes.map((note) => (
            <li>
              <bdi>{short(note, 1000)}</bdi>
            </li>
          ))}
        </ul>
      )}
      {n > 0 && (
        <>
          <Chart title="Influence of components and loss, over steps" axis="step" x={training.step} panes={panes} />
          <Chooser
            training={training}
            by={by}
            ranking={ranking}
            lines={lines}
            toggle={(component) => setChosen(toggled(lines, component))}
            reset={chosen ? () => setChosen(null) : null}
          />
        </>
      )}
    </section>
  );
}

function Chooser({ training, by, ranking, lines, toggle, reset }: {
  training: Course;
  by: "share" | "weighted";
  ranking: number[];
  lines: (number | null)[];
  toggle: (component: number) => void;
  reset: (() => void) | null;
}) {
  const [query, setQuery] = useState("");
  const used = lines.filter((one) => one !== null).length;
  const last = training.step.length - 1;
  const words = query.toLowerCase().trim();
  const fits = ranking.filter((n) => training.components[n]!.toLowerCase().includes(words));
  if (!training.components.length) return null;
  return (
    <fieldset class="chooser">
      <legend>Components: {used} of at most {LINES}</legend>
      <div class="filters">
        <input
          type="search"
          aria-label="Filter components"
          data-testid="training-filter"
          placeholder={`Filter ${counted(training.components.length, "component")}`}
          value={query}
          onInput={(event) => setQuery(event.currentTarget.value)}
        />
        {reset && (
          <button type="button" class="plain-link" onClick={reset}>
            Back to the top {LINES}
          </button>
        )}
      </div>
      {fits.length === 0 && <p class="void">No component’s name holds “{short(query, 30)}”.</p>}
      <ul class="scroll">
        {fits.slice(0, LIST).map((component) => {
          const line = lines.indexOf(component);
          return (
            <li key={component}>
              <label>
                <input
                  type="checkbox"
                  data-testid="component"
                  data-name={training.components[component]}
                  checked={line >= 0}
                  disabled={line < 0 && used >= LINES}
                  onChange={() => toggle(component)}
                />
                {line >= 0 ? <Swatch colour={line} /> : <span class="swatch" />}
                <bdi title={short(training.components[component]!, 400)}>
                  {short(moduleName(training.components[component]!), 44)}
                </bdi>
                <span class="num">{percent(training[by][component]![last]!)}</span>
              </label>
            </li>
          );
        })}
      </ul>
      {fits.length > LIST && <p class="faint">{count(fits.length - LIST)} more; type to find them.</p>}
    </fieldset>
  );
}

/** A slope and its interval in words that fit its size: by step, or by a thousand. */
export function rate({ slope, low, high }: Timing): string {
  const many = Math.max(...[slope, low, high].filter(Number.isFinite).map(Math.abs)) < 1e-3;
  const spell = (value: number): string =>
    `${value > 0 ? "+" : ""}${duration(many ? 1000 * value : value)}`;
  const known = Number.isFinite(low) && Number.isFinite(high);
  return `${spell(slope)} ${many ? "in 1\u202f000 steps" : "a step"}${known ? `, interval ${spell(low)} to ${spell(high)}` : ""}`;
}

function Pace({ timing }: { timing: Timing }) {
  const panes = useMemo((): Pane[] => {
    const sorted = [...timing.seconds].filter(Number.isFinite).sort((a, b) => a - b);
    const middle = sorted[sorted.length >> 1] ?? 1;
    const spread = (sorted.at(-1) ?? 1) > 6 * middle; // a slow step must not hide the others
    return [
      {
        label: `time of a step${spread ? " (log scale)" : ""}`,
        format: duration,
        height: 200,
        log: spread,
        series: [
          { name: "a step", values: timing.seconds, colour: 8, form: "dots" },
          ...fitted(timing),
        ],
      },
    ];
  }, [timing]);
  const known = Number.isFinite(timing.slope);
  return (
    <section class="card full">
      <h2>Time per batch</h2>
      <p class="verdict" data-testid="verdict">
        {timing.grows !== false && (
          <span class={`tag ${timing.grows ? "alarm" : ""}`}>
            {timing.grows ? "Slows down" : "Cannot tell"}
          </span>
        )}{" "}
        <bdi>{short(timing.verdict, 1000)}</bdi>
      </p>
      {known && (
        <p class="soft">Trend {rate(timing)}.</p>
      )}
      {timing.step.length ? (
        <Chart title="Time of each step" axis="step" x={timing.step} panes={panes} />
      ) : (
        <p class="void">No step was timed.</p>
      )}
    </section>
  );
}
