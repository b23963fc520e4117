import { describe, expect, test } from "vitest";
import {
  brief,
  count,
  counted,
  duration,
  element,
  number,
  percent,
  points,
  ravel,
  real,
  shape,
  short,
  unravel,
} from "../src/format";

test.each([
  [0, "0"],
  [-0, "0"],
  [1, "1"],
  [0.5, "0.500"],
  [-0.01234, "−0.0123"],
  [12345.6, "12\u202f346"],
  [123456, "123\u202f456"],
  [0.9999, "1.00"],
  [999999.9, "1.00×10⁶"],
  [1.5e-7, "1.50×10⁻⁷"],
  [-4.2e38, "−4.20×10³⁸"],
  [5e-324, "4.94×10⁻³²⁴"],
  [NaN, "not a number"],
  [Infinity, "infinite"],
  [-Infinity, "minus infinite"],
  ["nan", "not a number"],
  ["-inf", "minus infinite"],
  [null, "not a number"],
])("number %s", (value, text) => {
  expect(number(value)).toBe(text);
});

test.each([
  [0, "0%"],
  [1, "100%"],
  [-1, "−100%"],
  [0.4321, "43.2%"],
  [0.99999, ">\u202f99.9%"],
  [1e-9, "<\u202f0.01%"],
  [0.0012, "0.12%"],
  [1.5, "150.0%"],
  [-0.123, "−12.3%"],
  [310, "31\u202f000%"],
  [1e9, "1.00×10¹¹%"],
  [NaN, "none"],
  [null, "none"],
])("percent %s", (value, text) => {
  expect(percent(value)).toBe(text);
});

test("a share that is not all is never 100%, nor one that is something 0%", () => {
  for (const x of [0.9994, 0.9995, 0.99996, 1 - 1e-12]) expect(percent(x)).not.toMatch(/^100/);
  for (const x of [1e-12, 4e-5, 1e-4, 9e-3]) expect(percent(x)).not.toMatch(/^0(\.0+)?%/);
});

test.each([
  [0, "0 s"],
  [1.5e-9, "1.50 ns"],
  [0.0000123, "12.3 µs"],
  [0.012, "12 ms"],
  [0.9999, "1.00 s"],
  [59, "59 s"],
  [200, "3 min 20 s"],
  [119.7, "2 min 0 s"],
  [7260, "2 h 1 min"],
  [-0.002, "−2 ms"],
  [NaN, "not a number"],
])("duration %s", (value, text) => {
  expect(duration(value)).toBe(text);
});

describe("counts, shapes, elements", () => {
  test("counts", () => {
    expect(count(1234567)).toBe("1\u202f234\u202f567");
    expect(counted(1, "path")).toBe("1 path");
    expect(counted(0, "path")).toBe("0 paths");
    expect(brief(2359296)).toBe("2.36\u202fM");
    expect(brief(999)).toBe("999");
    expect(brief(999_999)).toBe("1\u202fM");
  });
  test("shapes and elements", () => {
    expect(shape([768, 3072])).toBe("768×3072");
    expect(shape([])).toBe("scalar");
    expect(element([3, 17])).toBe("[3, 17]");
    expect(unravel(17 + 20 * 3, [5, 20])).toEqual([3, 17]);
    expect(unravel(0, [])).toEqual([]);
    expect(ravel([1, 2, 3], [2, 3, 4])).toBe(23);
    for (const flat of [0, 7, 23]) expect(ravel(unravel(flat, [2, 3, 4]), [2, 3, 4])).toBe(flat);
  });
  test("differences", () => {
    expect(points(0.031)).toBe("+3.1");
    expect(points(-0.5)).toBe("−50.0");
    expect(points(0)).toBe("0");
    expect(points(0.0002)).toBe("+0.02");
  });
});

test("numbers that JSON spells", () => {
  expect(real("inf")).toBe(Infinity);
  expect(real(2)).toBe(2);
  expect(real("2")).toBeNaN();
});

test("long names lose their middle, never half a character", () => {
  expect(short("abc", 5)).toBe("abc");
  expect(short("abcdefghij", 5)).toBe("abc…ij".slice(0, 2) + "…ij");
  expect(short("🦊".repeat(50), 5)).toBe("🦊🦊…🦊🦊");
  expect([...short("x".repeat(10_000), 40)].length).toBe(40);
});
