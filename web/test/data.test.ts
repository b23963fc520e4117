import { expect, test, vi } from "vitest";
import { decode, unpack, verify } from "../src/data";
import type { Diagnosis, Finding, Report } from "../src/types";
import { bare, encode, hostile, HOSTILE, large, pack, report, finding, small, timing, training } from "./sample";

const buffer = (of: Report): ArrayBuffer => pack(of).buffer as ArrayBuffer;

test("what was written is read", async () => {
  const written = small();
  const read = await decode(await encode(written));
  expect(read).toEqual(written);
  expect(read.traces[0]!.operators.mass).toBeInstanceOf(Float64Array);
});

test.each([
  ["none", report([])],
  ["one without parameters", report([bare()])],
  ["training", report([], { training: training(), timing: timing() })],
  ["hostile names", hostile()],
  ["a large one", large(200, 8)],
])("reports are read: %s", async (_, written) => {
  expect(await decode(await encode(written))).toEqual(written);
});

test("numbers that JSON cannot hold come back", () => {
  const written = report([], { training: { ...training(3), cost: NaN }, timing: { ...timing(3), high: Infinity } });
  const read = unpack(buffer(written));
  expect(read.training!.cost).toBeNaN();
  expect(read.timing!.high).toBe(Infinity);
});

test("names that look like such numbers stay names", () => {
  const written = small({ head: "nan", name: "-inf" });
  const read = unpack(buffer(written));
  expect(read.traces[0]!.modules[4]!.name).toBe("nan");
  expect(read.traces[0]!.name).toBe("-inf");
});

test("hostile text is text", async () => {
  const read = await decode(await encode(hostile()));
  expect(read.title).toBe(HOSTILE);
  expect(await encode(hostile())).toMatch(/^[A-Za-z0-9+/=]*$/);
});

test("an unfilled template says so", async () => {
  await expect(decode("<!--gradtrace-data-->")).rejects.toMatchObject({ reason: "empty" });
  await expect(decode("  ")).rejects.toMatchObject({ reason: "empty" });
});

test("cut or changed data is refused", async () => {
  const whole = await encode(small());
  const cut = whole.slice(0, 4 * Math.floor(whole.length / 8));
  for (const text of ["%%%", "AAAA", cut, btoa("plain text"), `${whole.slice(0, 400)}AAAA${whole.slice(404)}`])
    await expect(decode(text)).rejects.toMatchObject({ reason: "damaged" });
});

test("a newer schema is named as such", () => {
  const newer = { ...small(), schema: 2 } as unknown as Report;
  expect(() => unpack(buffer(newer))).toThrow(expect.objectContaining({ reason: "newer" }));
});

test("without a decompressor the browser is to blame", async () => {
  vi.stubGlobal("DecompressionStream", undefined);
  await expect(decode("AAAA")).rejects.toMatchObject({ reason: "browser" });
  vi.unstubAllGlobals();
});

const wrong = (part: Partial<Finding>): Diagnosis => ({ findings: [{ ...finding(), ...part }], remarks: [] });

test.each<[string, (of: Report) => void]>([
  ["a column is short", (of) => (of.traces[0]!.operators.module = new Int32Array(3))],
  ["a module out of range", (of) => (of.traces[0]!.operators.module[1] = 99)],
  ["an edge out of range", (of) => (of.traces[0]!.edges.producer[0] = -1)],
  ["a path out of range", (of) => (of.traces[0]!.forest.next[0] = 1e6)],
  ["a child before its parent", (of) => (of.traces[0]!.modules[1]!.parent = 3)],
  ["an element out of range", (of) => (of.traces[0]!.leaves[0]!.element[0] = 99)],
  ["a part is missing", (of) => delete (of.traces[0] as Partial<Report["traces"][0]>).flow],
  ["a norm that is text", (of) => (of.traces[0]!.leaves[0]!.norm = "large" as unknown as number)],
  ["a finding out of range", (of) => (of.traces[0]!.diagnosis = wrong({ module: 99 }))],
  ["a finding of no severity", (of) => (of.traces[0]!.diagnosis = wrong({ severity: "dire" as "error" }))],
  ["no model", (of) => (of.traces[0]!.modules = [])],
])("broken data is refused: %s", (_, harm) => {
  const broken = small();
  harm(broken);
  expect(() => verify(broken)).toThrow(expect.objectContaining({ reason: "damaged" }));
});

test("arrays outside the data are refused", () => {
  const text = JSON.stringify({ schema: 1, title: "x", made: { $: "f8", o: 8000, n: 4 } });
  const bytes = new Uint8Array(Math.ceil((4 + text.length) / 8) * 8 + 8);
  new DataView(bytes.buffer).setUint32(0, text.length, true);
  bytes.set(new TextEncoder().encode(text), 4);
  expect(() => unpack(bytes.buffer)).toThrow("outside");
});
