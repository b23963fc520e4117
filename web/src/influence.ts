/** Influence of modules by their number, and of how many elements it is a share; NaN where none was measured. */
import type { Trace } from "./types";
import type { State } from "./view";

type Column = State["by"] | "eligible";

const cache = new WeakMap<Trace, Record<Column, Float64Array>>();

export function influence(trace: Trace, by: Column): Float64Array {
  let found = cache.get(trace);
  if (!found) {
    const column = () => new Float64Array(trace.modules.length).fill(NaN);
    found = { share: column(), weighted: column(), eligible: column() };
    const table = trace.tables[""];
    table?.module.forEach((module, row) => {
      if (module < 0) return;
      found!.share[module] = table.share[row]!;
      found!.weighted[module] = table.weighted[row]!;
      found!.eligible[module] = table.eligible[row]!;
    });
    cache.set(trace, found);
  }
  return found[by];
}
