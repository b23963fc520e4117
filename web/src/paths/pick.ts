/** Which element of a leaf is meant, and whether its path is in the report. */
import { count, element, ravel, shape, unravel } from "../format";
import type { HeatMap, Leaf, Trace } from "../types";

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
  | { kind: "skipped"; nearest: number | null }; // the element that was followed nearest to it

interface Known {
  /** By element, the vertex its path starts at; -1: it has none. */
  starts: Map<number, number>;
  whole: number | null; // the vertex of the whole leaf, at operator granularity
}

const memory = new WeakMap<Trace, Map<number, Known>>();

/** What is known of all leaves: cells of heat maps, and the sampled paths, which start anywhere. */
function known(trace: Trace, leaf: Leaf): Known {
  let all = memory.get(trace);
  if (!all) {
    all = new Map(trace.leaves.map((l) => [l.operator, { starts: new Map(), whole: null }]));
    const { operator, element } = trace.forest;
    for (let v = 0; v < operator.length; v++) {
      const at = all.get(operator[v]!);
      if (!at) continue;
      if (element[v]! < 0) at.whole = v;
      else at.starts.set(element[v]!, v);
    }
    for (const l of trace.leaves) {
      const at = all.get(l.operator);
      if (!at || !l.map) continue;
      for (let cell = 0; cell < l.map.element.length; cell++) {
        const start = l.map.start[cell]!;
        if (start === -1) at.starts.set(l.map.element[cell]!, -1);
        else if (start >= 0 && trace.granularity === "scalar") {
          at.starts.set(l.map.element[cell]!, start);
        }
      }
    }
    memory.set(trace, all);
  }
  return all.get(leaf.operator) ?? { starts: new Map(), whole: null };
}

export function find(trace: Trace, leaf: Leaf, wanted: number): Found {
  const { starts, whole } = known(trace, leaf);
  if (trace.granularity === "operator") {
    return whole === null ? { kind: "none" } : { kind: "path", start: whole };
  }
  const start = starts.get(wanted);
  if (start !== undefined) return start < 0 ? { kind: "none" } : { kind: "path", start };
  return { kind: "skipped", nearest: near(leaf, starts, wanted) };
}

/** The element with a path that is nearest as the map shows it. */
function near(leaf: Leaf, starts: Map<number, number>, wanted: number): number | null {
  const width = leaf.map?.width || 1;
  const place = (e: number): [number, number] => [Math.floor(e / width), e % width];
  const [row, column] = place(wanted);
  let best: number | null = null;
  let least = Infinity;
  for (const [e, start] of starts) {
    if (start < 0) continue;
    const [r, c] = place(e);
    const distance = (r - row) ** 2 + (c - column) ** 2;
    if (distance < least) [best, least] = [e, distance];
  }
  return best;
}

/** How many elements of a leaf have a path here. */
export function followed(trace: Trace, leaf: Leaf): number {
  let total = 0;
  for (const start of known(trace, leaf).starts.values()) if (start >= 0) total++;
  return total;
}

/** What to show first: the element with the largest |gradient| that has a path. */
export function strongest(leaf: Leaf): number | null {
  const map = leaf.map;
  if (!map) return null;
  let best: number | null = null;
  let most = -1;
  for (let cell = 0; cell < map.element.length; cell++) {
    if (map.start[cell]! < 0) continue;
    const size = Math.abs(map.gradient[cell]!);
    if (size > most) [best, most] = [map.element[cell]!, size];
  }
  return best;
}

/** The cell that shows an element, or in whose part of the matrix it lies. */
export function cellOf(map: HeatMap, wanted: number): number {
  if (!map.element.length) return -1;
  const row = cut(Math.floor(wanted / map.width), map.height, map.rows);
  const column = cut(wanted % map.width, map.width, map.columns);
  const cell = row * map.columns + column;
  if (map.element[cell] === wanted) return cell;
  const exact = map.element.indexOf(wanted);
  return exact >= 0 ? exact : cell;
}

/** Which of equal parts holds a place. */
const cut = (at: number, size: number, parts: number): number =>
  Math.min(parts - 1, Math.floor((at * parts) / size));

export const isWhole = (map: HeatMap): boolean =>
  map.rows === map.height && map.columns === map.width;

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
