/** Where the reader is, as the hash of the URL: `#tab=graph&module=3&open=0,4`. */
import { along, boxes, opening } from "./graph/boxes";
import { picked } from "./graph/fold";
import type { Report, Trace } from "./types";
import type { State, Tab } from "./view";

/** The tabs that this report has something for. */
export function tabs(report: Report): Tab[] {
  const list: Tab[] = [];
  if (report.traces.length) list.push("overview", "graph", "paths");
  if (report.attribution) list.push("attribution");
  if (report.training || report.timing) list.push("training");
  return list.length ? list : ["overview"];
}

export function fresh(report: Report): State {
  const shown = report.traces[0];
  return {
    tab: tabs(report)[0]!,
    open: shown ? boxesAtFirst(shown) : [],
    module: null,
    operator: null,
    leaf: null,
    element: null,
    route: null,
    by: "share",
    views: false,
    query: "",
    node: null,
    keep: null,
  };
}

const first = new WeakMap<Trace, number[]>();

function boxesAtFirst(trace: Trace): number[] {
  let found = first.get(trace);
  if (!found) first.set(trace, (found = opening(trace)));
  return found;
}

/** The boxes that are open unless the reader says otherwise: those of a picked path, if there is one. */
function preset(state: State, report: Report): number[] {
  const trace = report.traces[0];
  if (!trace) return [];
  const rows = picked(trace, state);
  return rows.length ? along(trace, rows) : boxesAtFirst(trace);
}

/** Only what differs from the beginning is written, so that short places have short addresses. */
export function toHash(state: State, report: Report): string {
  const start = fresh(report);
  const out = new URLSearchParams();
  if (state.tab !== start.tab) out.set("tab", state.tab);
  const open = join(state.open);
  if (open !== join(preset(state, report))) out.set("open", open);
  for (const key of ["module", "operator", "leaf", "element", "route", "node", "keep"] as const) {
    const value = state[key];
    if (value !== null) out.set(key, String(value));
  }
  if (state.by !== start.by) out.set("by", state.by);
  if (state.views) out.set("views", "1");
  if (state.query) out.set("q", state.query);
  const text = out.toString().replaceAll("%2C", ",");
  return text ? `#${text}` : "";
}

/** Any text gives a state: what is unknown or out of range is left as at the beginning. */
export function fromHash(hash: string, report: Report): State {
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  const state = fresh(report);
  const shown = report.traces[0];
  const tab = tabs(report).find((each) => each === given.get("tab"));
  if (tab) state.tab = tab;
  if (given.get("by") === "weighted") state.by = "weighted";
  state.views = given.get("views") === "1";
  state.query = (given.get("q") ?? "").slice(0, 1000);
  state.node = index(given.get("node"), report.attribution?.nodes.length ?? 0);
  state.keep = index(given.get("keep"), 101);
  if (!shown) return state;
  state.module = index(given.get("module"), shown.modules.length);
  state.operator = index(given.get("operator"), shown.operators.name.length);
  state.leaf = index(given.get("leaf"), shown.leaves.length);
  state.route = index(given.get("route"), shown.routes.length);
  const leaf = state.leaf === null ? undefined : shown.leaves[state.leaf];
  if (leaf) state.element = index(given.get("element"), leaf.elements);
  const open = given.get("open");
  state.open = open === null ? preset(state, report) : split(open, boxes(shown).parent.length);
  return state;
}

function index(text: string | null, count: number): number | null {
  if (text === null || !/^\d{1,15}$/.test(text)) return null;
  const value = Number(text);
  return value < count ? value : null;
}

/** Sorted numbers with runs joined: 1,4-9. */
function join(numbers: number[]): string {
  const sorted = [...new Set(numbers)].sort((a, b) => a - b);
  const parts: string[] = [];
  for (let i = 0; i < sorted.length; ) {
    let j = i;
    while (sorted[j + 1] === sorted[j]! + 1) j++;
    parts.push(i === j ? `${sorted[i]}` : `${sorted[i]}-${sorted[j]}`);
    i = j + 1;
  }
  return parts.join(",");
}

function split(text: string, count: number): number[] {
  const found = new Set<number>();
  for (const part of text.split(",")) {
    const match = /^(\d{1,9})(?:-(\d{1,9}))?$/.exec(part);
    if (!match) continue;
    const last = Math.min(Number(match[2] ?? match[1]), count - 1);
    for (let i = Number(match[1]); i <= last; i++) found.add(i);
  }
  return [...found].sort((a, b) => a - b);
}

/** Steps that a reader would go back over; the rest only rewrites the address. */
const steps: (keyof State)[] = ["tab", "module", "operator", "leaf", "element", "route", "node"];

/** Writes the address where that is allowed; in a sandboxed frame the state is in memory only. */
export function write(before: State, after: State, report: Report): void {
  const hash = toHash(after, report);
  try {
    const address = hash || location.href.split("#")[0]!;
    if (steps.some((key) => before[key] !== after[key])) history.pushState(null, "", address);
    else history.replaceState(null, "", address);
  } catch {
    // Browsers refuse in about:srcdoc and when addresses change too often.
  }
}

export const nothing: Trace = {
  name: "",
  rule: "greedy",
  notes: [],
  words: [],
  shapes: [],
  modules: [{ name: "", kind: "", parent: -1, calls: 0, parameters: 0, like: 0 }],
  operators: {
    name: new Int32Array(),
    module: new Int32Array(),
    call: new Int32Array(),
    shape: new Int32Array(),
    leaf: new Int32Array(),
    view: new Uint8Array(),
    mass: new Float64Array(),
  },
  edges: {
    consumer: new Int32Array(),
    producer: new Int32Array(),
    position: new Int32Array(),
    mass: new Float64Array(),
    share: new Float32Array(),
  },
  leaves: [],
  forest: {
    operator: new Int32Array(),
    word: new Int32Array(),
    shape: new Int32Array(),
    element: new Int32Array(),
    derivative: new Float64Array(),
    gradient: new Float64Array(),
    share: new Float32Array(),
    next: new Int32Array(),
  },
  routes: [],
  sample: { paths: 0, drawn: 0, elements: 0, seed: 0 },
  coverage: null,
  choices: null,
  diagnosis: null,
  tables: {},
  flow: {
    findings: [],
    depth: new Int32Array(),
    norm: new Float64Array(),
    rms: new Float64Array(),
    zeros: new Float64Array(),
    operator: [],
    module: [],
    rows: [],
  },
};
