import { expect, test } from "vitest";
import { moved } from "../src/app";
import { fresh, fromHash, tabs, toHash } from "../src/state";
import type { State } from "../src/view";
import { bare, HOSTILE, large, report, small, timing, training } from "./sample";

test("a place survives the address", () => {
  const of = small();
  const state: State = {
    ...fresh(of),
    tab: "paths",
    open: [1, 2, 3, 7],
    module: 2,
    operator: 3,
    leaf: 1,
    element: 2,
    by: "weighted",
    views: true,
    query: `a&b=c#d ${HOSTILE}`,
  };
  expect(fromHash(toHash(state, of), of)).toEqual(state);
});

test("the beginning has no address", () => {
  const of = small();
  expect(toHash(fresh(of), of)).toBe("");
  expect(fromHash("", of)).toEqual(fresh(of));
});

test("nothing open is not the same as nothing said", () => {
  const of = small();
  const closed = { ...fresh(of), open: [] };
  expect(fresh(of).open).not.toEqual([]);
  expect(fromHash(toHash(closed, of), of).open).toEqual([]);
});

test.each([
  "#tab=nowhere&trace=9&module=-1&operator=1e9&leaf=x&element=3&route=999",
  "#open=1-999999999,a,-3,,5-2,99999999999999999999",
  "#%E0%A4%A&&&=&=&tab=",
  "#module=1.5&leaf=0x1&by=all&views=yes",
  `#${"q".repeat(100_000)}`,
  `#q=${"a".repeat(100_000)}`,
])("any address gives a state: %s", (hash) => {
  const of = small();
  const state = fromHash(hash, of);
  expect(tabs(of)).toContain(state.tab);
  for (const box of state.open) expect(box).toBeLessThan(2 * of.traces[0]!.modules.length);
  expect(state.query.length).toBeLessThanOrEqual(1000);
  expect(state).toMatchObject({ module: null, operator: null, leaf: null, element: null, route: null });
});

test("tabs are those with something in them", () => {
  expect(tabs(small())).toEqual(["overview", "graph", "paths"]);
  expect(tabs(report([], { training: training() }))).toEqual(["training"]);
  expect(tabs(report([bare()], { timing: timing() }))).toEqual(["overview", "graph", "paths", "training"]);
  expect(fresh(report([])).tab).toBe("overview");
});

test("a picked route opens the boxes on it, and an element takes its place", () => {
  const of = large(400);
  const state = moved(fresh(of), { route: 0 }, of);
  expect(state.open.length).toBeGreaterThan(3);
  const route = of.traces[0]!.routes[0]!;
  const inner = of.traces[0]!.operators.module[route.operators[0]!]!;
  expect(state.open).toContain(inner);
  expect(fromHash("#route=0", of).open).toEqual(state.open);
  const last = of.traces[0]!.leaves.length - 1;
  const next = moved(state, { leaf: last, element: of.traces[0]!.leaves[last]!.element[0]!, open: [1] }, of);
  expect(next).toMatchObject({ route: null, open: [1] }); // unless others are asked for
});
