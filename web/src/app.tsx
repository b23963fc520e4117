/** The shell: header, module tree, tabs. It holds the state and hands it to everything. */
import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { Compare } from "./compare";
import { Graph } from "./graph/view";
import { Overview } from "./overview";
import { Paths } from "./paths";
import { across, fromHash, nothing, tabs, write } from "./state";
import { Training } from "./training";
import type { Report } from "./types";
import type { State, Tab, View } from "./view";

const panels: Record<Tab, (view: View) => preact.JSX.Element | null> = {
  overview: Overview,
  graph: Graph,
  paths: Paths,
  compare: Compare,
  training: Training,
};

export function App({ report }: { report: Report }) {
  const [state, set] = useState<State>(() => fromHash(location.hash, report));
  const now = useRef(state);
  const go = useCallback(
    (patch: Partial<State>) => {
      const before = now.current;
      const moved = patch.trace !== undefined && patch.trace !== before.trace;
      const after = { ...(moved ? across(before, report, patch.trace!) : before), ...patch };
      now.current = after;
      write(before, after, report);
      set(after);
    },
    [report],
  );
  useEffect(() => {
    const read = () => {
      now.current = fromHash(location.hash, report);
      set(now.current);
    };
    addEventListener("popstate", read);
    addEventListener("hashchange", read);
    return () => {
      removeEventListener("popstate", read);
      removeEventListener("hashchange", read);
    };
  }, [report]);
  const view: View = { report, trace: report.traces[state.trace] ?? nothing, state, go };
  const Panel = panels[state.tab];
  return (
    <>
      <header class="top">
        <h1>{report.title}</h1>
        <nav>
          {tabs(report).map((tab) => (
            <button key={tab} aria-current={tab === state.tab ? "page" : undefined} onClick={() => go({ tab })}>
              {tab}
            </button>
          ))}
        </nav>
      </header>
      <main>
        <Panel {...view} />
      </main>
    </>
  );
}
