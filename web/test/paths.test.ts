import { describe, expect, test } from "vitest";
import { filtered, find, followed, parse, strongest } from "../src/paths/pick";
import { example, named, relative } from "../src/paths/routes";
import { factors } from "../src/paths/steps";
import { along, modules, path, python, quoted } from "../src/paths/walk";
import type { Trace } from "../src/types";
import { HOSTILE, large, startOf, trace } from "./sample";

const all = (net: Trace) =>
  net.leaves.flatMap((leaf) =>
    [...leaf.start].filter((start) => start >= 0).map((start) => path(net, leaf, start)),
  );

describe("walking", () => {
  const net = trace();
  test("shares multiply to the share of the whole", () => {
    for (const one of all(net)) {
      const shares = one.steps.reduce((product, step) => product * step.share, 1);
      expect(shares).toBeCloseTo(one.share, 5);
      expect(one.weight).toBeCloseTo(one.share * one.gradient, 12);
    }
  });
  test("the leaf's own derivative counts, and long paths are told by a power of ten", () => {
    const long = large(1000, 4).traces[0]!;
    const one = path(long, long.leaves.at(-1)!, long.leaves.at(-1)!.start[0]!);
    expect(one.steps[0]!.derivative).not.toBe(1);
    const shares = one.steps.reduce((product, step) => product * step.share, 1);
    expect(one.weight / (shares * one.gradient)).toBeCloseTo(1, 4);
    expect(10 ** one.log).toBeCloseTo(Math.abs(one.weight), 12);
  });
  test("the first step is the leaf's element, the last the loss", () => {
    for (const one of all(net)) {
      expect(one.steps[0]).toMatchObject({ operator: "leaf", place: "", shape: one.leaf.shape });
      expect(one.steps.at(-1)).toMatchObject({ operator: "MeanBackward0", index: [], gradient: 1 });
    }
  });
  test("modules, each once in a row", () => {
    const one = path(net, net.leaves[2]!, startOf(net.leaves[2]!, 5));
    expect(modules(net, one.steps).map((m) => net.modules[m]!.name)).toEqual(["encoder.0", "encoder.1", "head"]);
  });
  test("a gradient of 0 with a path has no share", () => {
    const odd = trace();
    const start = odd.leaves[0]!.start[0]!;
    odd.forest.gradient[start] = 0;
    expect(path(odd, odd.leaves[0]!, start).share).toBeNaN();
  });
  test("a damaged forest does not hang the page", () => {
    const odd = trace();
    odd.forest.next[0] = 1;
    odd.forest.next[1] = 0;
    expect(along(odd, 0).length).toBeLessThanOrEqual(odd.forest.next.length + 1);
    expect(along(odd, -1)).toEqual([]);
  });
  test("products in few words", () => {
    const steps = [2, 1, -0.5, 1, 1].map((derivative) => ({ derivative }) as never);
    expect(factors(steps)).toBe("2 · (−0.500) · 1³");
    const many = Array.from({ length: 20 }, () => ({ derivative: 2 }) as never);
    expect(factors(many)).toBe("2 · 2 · 2 · … 15 more … · 2 · 2");
  });
});

describe("picking", () => {
  test.each([
    ["3, 17", 3 * 20 + 17],
    ["[3,17]", 77],
    ["(3, 17)", 77],
    [" 3 17 ", 77],
    ["-1, −1", 99],
    ["(3, 17,)", 77],
  ])("%s", (text, flat) => {
    expect(parse(text, [5, 20])).toEqual({ element: flat });
  });
  test.each([
    ["3", /2 numbers; there is 1/],
    ["3, 20", /Dimension 1 goes from 0 to 19; 20 is outside/],
    ["-6, 0", /Dimension 0/],
    ["3, x", /“x” is not a whole number/],
    ["1.5, 2", /not a whole number/],
    ["", /there are 0/],
    ["9".repeat(400) + ", 0", /outside/],
  ])("%s is refused", (text, why) => {
    expect(parse(text, [5, 20])).toMatchObject({ error: expect.stringMatching(why) });
  });
  test("of a single number the index is empty", () => {
    expect(parse("", [])).toEqual({ element: 0 });
    expect(parse("()", [])).toEqual({ element: 0 });
    expect(parse("0", [])).toHaveProperty("error");
  });

  test("followed, without a path, not followed", () => {
    const net = trace({ skip: 5 });
    const leaf = net.leaves[2]!;
    expect(find(net, leaf, 5)).toEqual({ kind: "path", start: startOf(leaf, 5) });
    expect(find(net, leaf, 31)).toEqual({ kind: "none" });
    expect(find(net, leaf, 4)).toEqual({ kind: "skipped" });
    expect(followed(net, leaf)).toBe([...leaf.start].filter((s) => s >= 0).length);
  });
  test("sampled elements are found though they are not among the largest", () => {
    const net = large(200, 4).traces[0]!;
    const leaf = net.leaves[0]!;
    const vertex = leaf.start[0]!;
    net.forest.element[vertex] = 123; // as if the element were another
    leaf.start[0] = -2;
    expect(find(net, leaf, 123)).toEqual({ kind: "path", start: vertex });
  });
  test("the strongest has a path", () => {
    const net = trace();
    const leaf = net.leaves[2]!;
    leaf.start[0] = -1;
    expect(strongest(leaf)).toBe(leaf.element[1]);
  });
  test("every word must be in a name", () => {
    const { leaves } = trace();
    expect(filtered(leaves, "weight ENC").map((n) => leaves[n]!.name)).toEqual(["encoder.0.weight"]);
    expect(filtered(leaves, "zzz")).toEqual([]);
  });
});

describe("a line of Python", () => {
  const leaf = trace().leaves[0]!;
  test("indices are tuples", () => {
    expect(python(leaf, [3, 17])).toBe('trace.path("head.weight", (3, 17))');
    expect(python(leaf, [3])).toBe('trace.path("head.weight", (3,))');
    expect(python(leaf, [])).toBe('trace.path("head.weight")');
  });
  test("hostile names cannot leave the string", () => {
    expect(quoted('a"b\\')).toBe('"a\\"b\\\\"');
    expect(quoted("a\nb\u202e")).toBe('"a\\nb\\u202e"');
    expect(quoted(HOSTILE)).toContain("\\U0001f98a");
  });
});

describe("routes", () => {
  const net = trace();
  test("names and an element that goes this way", () => {
    expect(named(net, net.routes[0]!)).toEqual(["encoder.0", "encoder.1", "head"]);
    const { leaf, element } = example(net, net.routes[0]!)!;
    const found = find(net, net.leaves[leaf]!, element!);
    if (found.kind !== "path") throw new Error("it has a path");
    const way = path(net, net.leaves[leaf]!, found.start).steps.slice(1).map((step) => step.row);
    expect(way).toEqual(net.routes[0]!.operators);
  });
  test("siblings lose what they share", () => {
    expect(relative(["h.0.mlp.fc", "h.0.mlp.act", "h.0", "h.1", "out"])).toEqual(["h.0.mlp.fc", ".act", "h.0", ".1", "out"]);
    expect(relative(["a", "b"])).toEqual(["a", "b"]);
  });
  test("of long ways the middle is left out", () => {
    const big = large(400, 4).traces[0]!;
    expect(named(big, big.routes.at(-1)!, 5).length).toBe(5);
  });
});
