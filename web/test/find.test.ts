import { expect, test } from "vitest";
import { find } from "../src/find";
import { fold } from "../src/graph/fold";
import { way } from "../src/search";
import { fresh } from "../src/state";
import type { View } from "../src/view";
import { scan, transformer } from "./models";
import { HOSTILE, hostile, report } from "./sample";

const view = (of = report([transformer(12)])): View => ({ report: of, trace: of.traces[0]!, state: fresh(of), go: () => undefined });

test("finds modules, parameters and operators, whatever their case", () => {
  const { found } = find(transformer(12), "H.7.ATTN");
  expect(found[0]).toMatchObject({ type: "module", name: "h.7.attn" });
  expect(found.map((one) => one.type)).toContain("leaf");
  const operators = find(transformer(12), "softmax").found;
  expect(operators[0]).toMatchObject({ type: "operator", name: "Softmax", place: "h.11.attn" });
});

test("all words must be in the name; for operators some in the module's", () => {
  const { found, more } = find(transformer(12), "gelu h.3.");
  expect(found).toHaveLength(1);
  expect(more).toBe(0);
  expect(found[0]).toMatchObject({ type: "operator", place: "h.3.mlp" });
});

test("says how many are not listed", () => {
  const { found, more } = find(transformer(80), "mm");
  expect(found.length + more).toBe(80 * 4 + 1);
});

test("nothing is found for nothing", () => {
  expect(find(transformer(2), "   ")).toEqual({ found: [], more: 0 });
  expect(find(transformer(2), "nowhere").found).toEqual([]);
});

test("what is inside closed boxes is found, and its way opens them", () => {
  const here = view();
  const trace = here.trace;
  const closed = fold(trace, here.state.open, false);
  const one = find(trace, "h.7.attn.k").found.find((each) => each.type === "module")!;
  const seen = (open: number[]) => [...fold(trace, open, false).levels.values()].flatMap((level) => level.nodes);
  expect(seen(here.state.open)).not.toContain(one.at);
  expect(seen(way(here, one).open!)).toContain(one.at);

  const operator = find(trace, "gelu h.3.").found[0]!;
  const patch = way(here, operator);
  expect(patch).toMatchObject({ tab: "graph", operator: operator.at });
  expect(seen(patch.open!)).toContain(closed.base + operator.at);

  const leaf = find(trace, "h.7.mlp.weight").found.find((each) => each.type === "leaf")!;
  expect(way(here, leaf)).toMatchObject({ tab: "paths", leaf: leaf.at });
});

test("a folded view is shown when it is searched for", () => {
  const here = view();
  const one = find(here.trace, "transpose").found[0]!;
  expect(way(here, one).views).toBe(true);
});

test("hostile names are found as text", () => {
  const { found } = find(hostile().traces[0]!, "onerror");
  expect(found.some((one) => one.name === HOSTILE)).toBe(true);
  expect(find(hostile().traces[0]!, "(.*[").found).toEqual([]);
});

test("a large graph is searched at once", () => {
  const { found, more } = find(scan(), "mul");
  expect(found.length + more).toBe(24 * 64 * 5);
});
