/** What every part of the page is given: the data, where the reader is, and the way to move. */
import type { Report, Trace } from "./types";

export type Tab = "overview" | "graph" | "paths" | "attribution" | "training";

/** Where the reader is. All of it is in the URL's hash, so that a place can be sent to others. */
export interface State {
  tab: Tab;
  open: number[]; // boxes opened in the graph: modules, and folds of equal ones (graph/boxes.ts)
  module: number | null; // selected
  operator: number | null; // whose details the graph shows
  leaf: number | null; // picked, with...
  element: number | null; // ...its element, a flat index
  route: number | null; // highlighted
  by: "share" | "weighted"; // how influence is shown
  views: boolean; // whether the graph shows operators that only move elements
  query: string; // what is searched for
  node: number | null; // selected in the attribution graph
  keep: number | null; // how much of its influence is shown, in percent; null: what fits a screen
}

export interface View {
  report: Report;
  trace: Trace;
  state: State;
  go: (patch: Partial<State>) => void;
}
