/** Influence of modules by their number; NaN where none was measured. */
import type { Trace } from "./types";
import type { State } from "./view";

const cache = new WeakMap<Trace, Record<State["by"], Float64Array>>();

export function influence(trace: Trace, by: State["by"]): Float64Array {
  let found = cache.get(trace);
  if (!found) {
    const column = () => new Float64Array(trace.modules.length).fill(NaN);
    found = { share: column(), weighted: column() };
    const table = trace.tables[""];
    table?.module.forEach((module, row) => {
      if (module < 0) return;
      found!.share[module] = table.share[row]!;
      found!.weighted[module] = table.weighted[row]!;
    });
    cache.set(trace, found);
  }
  return found[by];
}
