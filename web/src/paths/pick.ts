/** Which element of a leaf is meant, and whether its path is in the report. */
import { count, element, ravel, shape, unravel } from "../format";
import type { Leaf, Trace } from "../types";

export type Typed = { element: number } | { error: string };

/** "3, 17", "[3 17]" or "(3, 17)" as an element; negative ones count from the end, as in Python. */
export function parse(text: string, sizes: readonly number[]): Typed {
  const inside = text.trim().replace(/^[[(]\s*/, "").replace(/\s*,?\s*[\])]$/, "");
  const parts = inside === "" ? [] : inside.split(/\s*[,;×]\s*|\s+/).filter((p) => p !== "");
  const wrong = parts.find((p) => !/^[+\-−]?\d+$/.test(p));
  if (wrong !== undefined) return { error: `“${wrong.slice(0, 20)}” is not a whole number.` };
  if (parts.length !== sizes.length) {
    const wanted = sizes.length === 1 ? "1 number" : `${sizes.length} numbers`;
    return {
      error: sizes.length
        ? `An element of ${shape(sizes)} has ${wanted}; there ${parts.length === 1 ? "is" : "are"} ${parts.length} here.`
        : "This is a single number: leave the index empty.",
    };
  }
  const index: number[] = [];
  for (const [n, part] of parts.entries()) {
    const size = sizes[n] ?? 0;
    const typed = Number(part.replace("−", "-"));
    const at = typed < 0 ? typed + size : typed;
    if (at < 0 || at >= size) {
      return { error: `Dimension ${n} goes from 0 to ${count(size - 1)}; ${typed} is outside.` };
    }
    index.push(at);
  }
  return { element: ravel(index, sizes) };
}

export type Found =
  | { kind: "path"; start: number }
  | { kind: "none" } // every contribution to it is 0
  | { kind: "skipped" }; // its path is not in this report

/** By leaf, and by element, the vertex its path starts at; -1: it has none. */
const memory = new WeakMap<Trace, Map<Leaf, Map<number, number>>>();

/** What is known of all leaves: of their largest elements, and of sampled ones, which start anywhere. */
function known(trace: Trace, leaf: Leaf): Map<number, number> {
  let all = memory.get(trace);
  if (!all) {
    all = new Map(trace.leaves.map((each) => [each, new Map()]));
    const { operator, element } = trace.forest;
    for (let v = 0; v < operator.length; v++) {
      const at = trace.operators.leaf[operator[v]!]!;
      if (at >= 0 && element[v]! >= 0) all.get(trace.leaves[at]!)!.set(element[v]!, v);
    }
    for (const [each, starts] of all)
      each.element.forEach((flat, n) => each.start[n] === -1 && starts.set(flat, -1));
    memory.set(trace, all);
  }
  return all.get(leaf) ?? new Map();
}

export function find(trace: Trace, leaf: Leaf, wanted: number): Found {
  const start = known(trace, leaf).get(wanted);
  if (start === undefined) return { kind: "skipped" };
  return start < 0 ? { kind: "none" } : { kind: "path", start };
}

/** How many elements of a leaf have a path here. */
export function followed(trace: Trace, leaf: Leaf): number {
  let total = 0;
  for (const start of known(trace, leaf).values()) if (start >= 0) total++;
  return total;
}

/** What to show first: the element with the largest |gradient| that has a path. */
export const strongest = (leaf: Leaf): number | null => leaf.element[leaf.start.findIndex((start) => start >= 0)] ?? null;

export const indexOf = (leaf: Leaf, flat: number): string => element(unravel(flat, leaf.shape));

/** Leaves whose names hold all the words, parameters first. */
export function filtered(leaves: readonly Leaf[], query: string): number[] {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const fits = (leaf: Leaf): boolean =>
    words.every((word) => leaf.names.some((name) => name.toLowerCase().includes(word)));
  const found = leaves.map((_, n) => n).filter((n) => fits(leaves[n]!));
  return [
    ...found.filter((n) => leaves[n]!.parameter),
    ...found.filter((n) => !leaves[n]!.parameter),
  ];
}
