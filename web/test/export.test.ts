import { describe, expect, test } from "vitest";
import { fileName, json, pathCsv, pathData, pathName, wholeData } from "../src/export";
import { path } from "../src/paths/walk";
import { HOSTILE, pair, trace } from "./sample";

const net = trace();
const leaf = net.leaves[2]!;
const one = path(net, leaf, leaf.map!.start[5]!);

describe("file names", () => {
  test.each([
    ["My model", "My-model.svg"],
    ["../../etc/passwd", "etc-passwd.svg"],
    ["a/b\\c:d*e?f\"g<h>i|j", "a-b-c-d-e-f-g-h-i-j.svg"],
    ["", "gradtrace.svg"],
    ["...", "gradtrace.svg"],
    ["🦊", "gradtrace.svg"],
    ["con", "con-.svg"],
    ["héad", "head.svg"],
    ["层", "层.svg"],
    [".hidden", "hidden.svg"],
  ])("%s", (text, name) => {
    expect(fileName(text, "svg")).toBe(name);
  });
  test("hostile and long ones", () => {
    const name = fileName(HOSTILE, "json");
    expect(name).toMatch(/^[\p{L}\p{N}._-]+\.json$/u);
    expect(fileName("x".repeat(10_000), "csv").length).toBe(64);
  });
});

describe("a path", () => {
  test("as JSON, with Python's names", () => {
    const read = JSON.parse(json(pathData(net, one))) as {
      weight: number;
      steps: { derivative: number; gradient: number }[];
    };
    expect(read).toMatchObject({
      name: "encoder.0.weight",
      index: [1, 1],
      rule: "greedy",
      modules: ["encoder.0", "encoder.1", "head"],
    });
    expect(read.steps.reduce((product, step) => product * step.derivative, 1)).toBe(read.weight);
    expect(read.steps.length).toBe(7);
  });
  test("as CSV, all digits", () => {
    const rows = pathCsv(one).trim().split("\r\n").map((row) => row.split(","));
    expect(rows[0]).toEqual("step,operator,module,call,shape,index,derivative,gradient,share".split(","));
    expect(rows[1]!.slice(0, 6)).toEqual(["0", "encoder.0.weight", "", "0", "8×4", "1 1"]);
    expect(rows.slice(1).map((row) => Number(row[6]))).toEqual(one.steps.map((step) => step.derivative));
    expect(rows.slice(1).map((row) => Number(row[7]))).toEqual(one.steps.map((step) => step.gradient));
  });
  test("fields cannot break out, nor run in a spreadsheet", () => {
    const odd = { ...one, leaf: { ...leaf, name: '=cmd("x"),\n2' } };
    expect(pathCsv(odd).split("\r\n")[1]).toBe(`0,"'=cmd(""x""),\n2",,0,8×4,1 1,${one.steps[0]!.derivative},${one.steps[0]!.gradient},${one.steps[0]!.share}`);
  });
  test.each(["=1", "+1", "-1", "@sum", "\tx"])("%j is marked as text, numbers are not", (name) => {
    const odd = { ...one, leaf: { ...leaf, name }, steps: [{ ...one.steps[0]!, derivative: -2 }] };
    expect(pathCsv(odd).split("\r\n")[1]).toContain(`0,'${name},,0,8×4,1 1,-2,`);
  });
  test("what is not a number stays JSON", () => {
    const coarse = trace({ granularity: "operator" });
    const whole = path(coarse, coarse.leaves[0]!, coarse.leaves[0]!.map!.start[0]!);
    expect(JSON.parse(json(pathData(coarse, whole)))).toMatchObject({ weight: "nan", index: [] });
    expect(pathCsv(whole)).toContain(",nan,");
    expect(pathName(whole)).toBe("path-head.weight");
  });
});

test("the whole data, columns as lists", () => {
  const read = JSON.parse(wholeData(pair())) as { traces: { forest: { next: number[] } }[] };
  expect(read.traces.length).toBe(2);
  expect(read.traces[0]!.forest.next).toContain(-1);
});
