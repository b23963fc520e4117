import { describe, expect, test } from "vitest";
import { thin } from "../src/charts/chart";
import { decades, extent, linear, logarithmic, nearest, nice } from "../src/charts/scale";
import { ranked, says, telling, unreached } from "../src/overview";
import { order, rate, toggled, trendline } from "../src/training";
import { bare, timing, trace } from "./sample";

describe("ticks", () => {
  test.each([
    [0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]],
    [0, 5900, [0, 1000, 2000, 3000, 4000, 5000]],
    [-3, 3, [-3, -2, -1, 0, 1, 2, 3]],
    [0.012, 0.013, [0.012, 0.0122, 0.0124, 0.0126, 0.0128, 0.013]],
  ])("%s to %s", (low, high, ticks) => {
    expect(nice(low, high)).toEqual(ticks);
  });
  test("whole numbers stay whole", () => {
    expect(nice(0, 4, 15, 1)).toEqual([0, 1, 2, 3, 4]);
  });
  test("degenerate ranges have ticks and end", () => {
    expect(nice(3, 3)).toEqual([3]);
    expect(nice(NaN, 1)).toEqual([]);
    expect(nice(0, Infinity)).toEqual([0]);
    expect(linear(5, 5).place(5)).toBe(0.5);
    expect(linear(0, 0).place(0)).toBe(0.5);
  });
  test("powers of ten", () => {
    expect(decades(1e-6, 1, 4)).toEqual([1e-6, 1e-4, 1e-2, 1]);
    expect(logarithmic(1e-6, 1).ticks.length).toBeGreaterThan(2);
    const narrow = logarithmic(0.3, 0.9);
    expect(narrow.ticks).toEqual([0.2, 0.5, 1]);
    expect(narrow.place(0.2)).toBeCloseTo(0);
    expect(narrow.place(1)).toBeCloseTo(1);
    expect(narrow.place(0)).toBeNaN();
    expect(logarithmic(1, 1).ticks).toEqual([1, 2]);
    expect(logarithmic(1e-300, 1e300).ticks.length).toBeLessThan(8);
  });
  test("what is not finite does not count", () => {
    expect(extent([[NaN, 2, Infinity], [-1]])).toEqual([-1, 2]);
    expect(extent([[0, 2, 3]], 0)).toEqual([2, 3]);
    expect(extent([[NaN]])).toBeNull();
  });
  test("the nearest of ascending numbers", () => {
    expect(nearest([0, 10, 20], 14)).toBe(1);
    expect(nearest([0, 10, 20], 99)).toBe(2);
    expect(nearest([0, 10, 20], -5)).toBe(0);
    expect(nearest([7], 0)).toBe(0);
    expect(nearest([], 0)).toBe(-1);
  });
});

test("of many points the extremes stay", () => {
  const values = Array.from({ length: 100_000 }, (_, n) => Math.sin(n / 500));
  values[54_321] = 9;
  const kept = thin(values, 1000);
  expect(kept.length).toBeLessThanOrEqual(1000);
  expect(kept).toContain(54_321);
  expect(kept).toEqual([...kept].sort((a, b) => a - b));
});

describe("overview", () => {
  test("ranked by what is asked for, without the model itself", () => {
    const net = trace();
    const table = net.tables[""]!;
    table.share.set([0.1, NaN, 0.9, 0.5]);
    expect(ranked(table, "share").map((one) => one.name)).toEqual(["encoder.1", "head", "encoder"]);
    expect(ranked(undefined, "share")).toEqual([]);
  });
  test("a module that only repeats its child is left out", () => {
    const net = trace();
    const names = telling(net, ranked(net.tables[""], "share")).map((one) => one.name);
    expect(names).toEqual(["head", "encoder.0", "encoder.1"]);
  });
  test("parameters without gradient", () => {
    const net = trace();
    net.leaves[1]!.zero = net.leaves[1]!.elements;
    const { whole, part } = unreached(net);
    expect(whole.map((leaf) => leaf.name)).toEqual(["head.bias"]);
    expect(part.length).toBe(3);
  });
  test("one sentence", () => {
    expect(says(bare())).toContain("no parameter");
    const net = trace();
    for (const leaf of net.leaves) Object.assign(leaf, { parameter: false, zero: 0 });
    expect(says(net)).toBe("Gradient reaches every one of 67 elements in 4 inputs.");
    net.leaves[0]!.parameter = true;
    expect(says(net)).toContain("in the 1 parameter that the loss depends on and 3 inputs.");
  });
});

describe("training", () => {
  test("the greatest first, what is unknown last", () => {
    expect(order([[0.1, 0.1], [NaN, NaN], [0.2, NaN], [0.1, 0.1]])).toEqual([2, 0, 3, 1]);
    expect(order([[1, 1], [0.2, 0.3], [NaN, NaN], [1, 0.9], [NaN, 1]])).toEqual([3, 1, 0, 4, 2]); // in series: after the others
  });
  test("lines keep their colours", () => {
    const lines = toggled([0, 1, 2], 1);
    expect(lines).toEqual([0, null, 2]);
    expect(toggled(lines, 7)).toEqual([0, 7, 2]);
    expect(toggled([0, 1], 5)).toEqual([0, 1]);
    expect(toggled([null, 1], 5)).toEqual([5, 1]);
  });
  test("half of the times lie above the trend", () => {
    const times = timing(301);
    const line = trendline(times, times.slope);
    const above = times.seconds.filter((s, n) => s > line[n]!).length;
    expect(above).toBe(150);
    expect(line[10]! - line[0]!).toBeCloseTo(10 * times.slope);
  });
  test("slopes with units", () => {
    expect(rate(timing())).toBe("+2 ms in 1\u202f000 steps, interval +1.40 ms to +2.80 ms");
    expect(rate({ ...timing(), slope: 0.5, low: NaN, high: NaN })).toBe("+500 ms a step");
  });
});
