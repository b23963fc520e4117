/** The ways that most sampled paths take. */
import { Bar } from "../charts/bar";
import { count, counted, percent, short } from "../format";
import type { Route, Trace } from "../types";
import type { View } from "../view";
import { indexOf } from "./pick";

/** Names of a way, with the middle left out where it is long. */
export function named(trace: Trace, route: Route, most = 7): string[] {
  const all = route.modules.length
    ? route.modules.map((m) => trace.modules[m]?.name || "outside modules")
    : route.operators.map((o) => trace.words[trace.operators.name[o] ?? 0] ?? "");
  if (all.length <= most) return all;
  const head = Math.ceil((most - 1) / 2);
  const tail = most - 1 - head;
  const between = all.length - head - tail;
  return [...all.slice(0, head), `… ${count(between)} more …`, ...all.slice(-tail)];
}

/** Names as they are shown: of a sibling of the one before, only the last part. */
export function relative(names: readonly string[]): string[] {
  const split = (name: string): number => name.lastIndexOf(".");
  return names.map((name, n) => {
    const before = names[n - 1];
    const at = split(name);
    const same = before !== undefined && at > 0 && name.slice(0, at) === before.slice(0, split(before));
    return same ? name.slice(at) : name;
  });
}

/** A leaf and element that goes this way. */
export function example(trace: Trace, route: Route): { leaf: number; element: number | null } | null {
  const vertex = route.starts[0];
  if (vertex === undefined) return null;
  const leaf = trace.operators.leaf[trace.forest.operator[vertex] ?? 0] ?? -1;
  const element = trace.forest.element[vertex] ?? -1;
  return leaf < 0 ? null : { leaf, element: element < 0 ? null : element };
}

export function Routes({ view, most, names = 7 }: { view: View; most: number; names?: number }) {
  const { trace, state, go } = view;
  const { by } = state;
  const { paths, drawn, elements } = trace.sample;
  if (!trace.routes.length) {
    return (
      <p class="void" data-testid="no-routes">
        {drawn === 0
          ? "No elements were drawn, so there are no routes to list."
          : `None of ${counted(drawn, "drawn element")} has a path: gradient reaches none of them.`}
      </p>
    );
  }
  const shown = trace.routes.slice(0, most);
  const rest = trace.routes.length - shown.length;
  return (
    <>
      <p class="faint">
        {by === "share" ? "Share of" : "Share of |gradient| of"} {counted(paths, "path")}
        {drawn < elements
          ? `, from ${count(drawn)} elements drawn at random of ${count(elements)}.`
          : ", from all elements."}
      </p>
      <ol class="routes">
        {shown.map((route, n) => {
          const way = named(trace, route, names);
          const start = example(trace, route);
          const share = by === "share" ? route.share : route.weighted;
          return (
            <li key={n} class={state.route === n ? "on" : ""}>
              <button
                type="button"
                class="route"
                data-testid="route"
                data-route={n}
                aria-pressed={state.route === n}
                onClick={() => go({ route: n, tab: "graph" })}
              >
                <span class="route-share">
                  <span class="num">{percent(share)}</span>
                  <Bar share={share} />
                </span>
                <span class="route-way">
                  {relative(way).map((name, i) => (
                    <>
                      {i > 0 && <span class="arrow"> → </span>}
                      <bdi title={short(way[i]!, 400)}>{short(name, 40)}</bdi>
                    </>
                  ))}
                  <span class="arrow"> → </span>loss
                </span>
              </button>
              {start && (
                <button
                  type="button"
                  class="plain-link"
                  data-testid="route-example"
                  onClick={() => go({ tab: "paths", route: n, ...start })}
                >
                  such as <bdi>{short(trace.leaves[start.leaf]!.name, 40)}</bdi>
                  {start.element !== null && ` ${indexOf(trace.leaves[start.leaf]!, start.element)}`}
                </button>
              )}
            </li>
          );
        })}
      </ol>
      {rest > 0 && <p class="faint">{counted(rest, "rarer route")} not listed here.</p>}
    </>
  );
}
