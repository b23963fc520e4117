/** The shell: header, module tree, tabs. It holds the state and hands it to everything. */
import { useCallback, useEffect, useMemo, useRef, useState } from "preact/hooks";
import { Attribution } from "./attribution";
import { short } from "./format";
import { along } from "./graph/boxes";
import { picked } from "./graph/fold";
import { Graph } from "./graph/view";
import { Keys } from "./keys";
import { Overview } from "./overview";
import { Paths } from "./paths";
import { Search } from "./search";
import { fromHash, nothing, tabs, write } from "./state";
import { About } from "./terms";
import { Theme } from "./theme";
import { Training } from "./training";
import { Tree } from "./tree";
import type { Report } from "./types";
import type { State, Tab, View } from "./view";

const panels: Record<Tab, (view: View) => preact.JSX.Element | null> = {
  overview: Overview,
  graph: Graph,
  paths: Paths,
  attribution: Attribution,
  training: Training,
};

const titles: Record<Tab, string> = {
  overview: "Overview",
  graph: "Graph",
  paths: "Paths",
  attribution: "Attribution",
  training: "Training",
};

/** Where a move leads. A newly picked path opens the boxes it runs through, and only those. */
export function moved(before: State, patch: Partial<State>, report: Report): State {
  const after = { ...before, ...patch };
  const element = patch.element !== undefined && patch.element !== null;
  const route = patch.route !== undefined && patch.route !== null;
  if (element && !route) after.route = null;
  const trace = report.traces[0];
  if (trace && (element || route) && patch.open === undefined) {
    const rows = picked(trace, after);
    if (rows.length) after.open = along(trace, rows);
  }
  return after;
}

export function App({ report }: { report: Report }) {
  const [state, set] = useState<State>(() => fromHash(location.hash, report));
  const [drawer, setDrawer] = useState(false);
  const [help, setHelp] = useState(false);
  const now = useRef(state);
  const go = useCallback(
    (patch: Partial<State>) => {
      const before = now.current;
      now.current = moved(before, patch, report);
      write(before, now.current, report);
      set(now.current);
    },
    [report],
  );
  useEffect(() => {
    const read = () => {
      now.current = fromHash(location.hash, report);
      set(now.current);
    };
    addEventListener("popstate", read);
    return () => removeEventListener("popstate", read);
  }, [report]);
  const list = useMemo(() => tabs(report), [report]);
  useEffect(() => {
    const press = (event: KeyboardEvent) => {
      const typing = event.target instanceof HTMLElement && event.target.matches("input, textarea, select");
      if (help || typing || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "?") setHelp(true);
      else if (event.key === "Escape" && drawer) setDrawer(false);
      else if (/^[1-5]$/.test(event.key) && list[Number(event.key) - 1]) go({ tab: list[Number(event.key) - 1]! });
      else return;
      event.preventDefault();
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, [list, go, help, drawer]);

  const view: View = { report, trace: report.traces[0] ?? nothing, state, go };
  const Panel = panels[state.tab];
  const some = report.traces.length > 0;
  return (
    <div class={`page${some ? "" : " alone"}`}>
      <a class="skip" href="#panel" onClick={(event) => (event.preventDefault(), document.getElementById("panel")?.focus())}>
        Skip to the content
      </a>
      <header class="top">
        {some && (
          <button class="drawer-button" aria-expanded={drawer} aria-controls="modules" onClick={() => setDrawer(!drawer)}>
            <svg width="18" height="18" aria-hidden="true">
              <path d="M2 4.5h14M5 9h11M8 13.5h8" />
            </svg>
            <span class="unseen">Modules</span>
          </button>
        )}
        <h1 title={report.title.slice(0, 500)}>
          <bdi>{short(report.title, 80) || "Report"}</bdi>
        </h1>
        {some && <Search {...view} />}
        <div class="actions">
          <Theme />
          <button class="icon" aria-label="Help" title="What the words mean, and the keyboard (?)" onClick={() => setHelp(true)}>
            ?
          </button>
        </div>
      </header>
      <Tabs list={list} tab={state.tab} go={go} />
      {some && (
        <aside id="modules" class={drawer ? "side open" : "side"} aria-label="Module tree">
          <Tree {...view} done={() => setDrawer(false)} />
        </aside>
      )}
      {drawer && <div class="shade" onClick={() => setDrawer(false)} />}
      <main class={`stage ${state.tab}`}>
        {(some || state.tab === "attribution") && <About tab={state.tab} />}
        <div id="panel" role="tabpanel" aria-labelledby={`tab-${state.tab}`} tabIndex={-1}>
          {some || state.tab === "training" || state.tab === "attribution" ? <Panel {...view} /> : <Nothing />}
        </div>
      </main>
      {help && <Keys close={() => setHelp(false)} />}
    </div>
  );
}

function Tabs({ list, tab, go }: { list: Tab[]; tab: Tab; go: View["go"] }) {
  const press = (event: KeyboardEvent) => {
    const at = list.indexOf(tab);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: list.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const next = list[(to + list.length) % list.length]!;
    go({ tab: next });
    document.getElementById(`tab-${next}`)?.focus();
  };
  return (
    <nav class="tabs">
      <div role="tablist" aria-label="Views" onKeyDown={press}>
        {list.map((each) => (
          <button
            key={each}
            id={`tab-${each}`}
            role="tab"
            aria-selected={each === tab}
            aria-controls="panel"
            tabIndex={each === tab ? 0 : -1}
            onClick={() => go({ tab: each })}
          >
            {titles[each]}
          </button>
        ))}
      </div>
    </nav>
  );
}

function Nothing() {
  return (
    <div class="empty">
      <h2>Nothing was traced</h2>
      <p>This report holds neither a trace nor training. Write one with trace.report("report.html").</p>
    </div>
  );
}
