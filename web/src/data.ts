/** From the string in the page to a Report: decoded, and checked before anything trusts it. */
import type { Attribution, Column, Kind, Report, Trace } from "./types";

/** Why there is no report to show. Each has a page of its own (failure.tsx). */
export type Reason = "empty" | "damaged" | "newer" | "browser";

export class Unreadable extends Error {
  constructor(
    readonly reason: Reason,
    detail: string,
  ) {
    super(detail);
  }
}

const SCHEMA = 1;

export async function decode(text: string): Promise<Report> {
  const packed = text.trim();
  if (packed === "" || packed.startsWith("<!--")) throw new Unreadable("empty", "no data");
  if (typeof DecompressionStream === "undefined")
    throw new Unreadable("browser", "DecompressionStream is missing");
  const buffer = await gunzip(unbase(packed));
  return unpack(buffer);
}

function unbase(text: string): Uint8Array<ArrayBuffer> {
  let binary: string;
  try {
    binary = atob(text);
  } catch {
    throw new Unreadable("damaged", "the data is not base64");
  }
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

async function gunzip(bytes: Uint8Array<ArrayBuffer>): Promise<ArrayBuffer> {
  try {
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return await new Response(stream).arrayBuffer();
  } catch {
    throw new Unreadable("damaged", "the data does not decompress");
  }
}

/** The container: length, JSON, zeros up to a multiple of 8, blob. */
export function unpack(buffer: ArrayBuffer): Report {
  if (buffer.byteLength < 4) throw new Unreadable("damaged", "the data is too short");
  const length = new DataView(buffer).getUint32(0, true);
  if (4 + length > buffer.byteLength) throw new Unreadable("damaged", "the data is cut off");
  let raw: unknown;
  try {
    raw = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(new Uint8Array(buffer, 4, length)));
  } catch {
    throw new Unreadable("damaged", "the data's text is not JSON");
  }
  if (typeof raw !== "object" || raw === null) throw new Unreadable("damaged", "the data is no object");
  const schema = (raw as { schema?: unknown }).schema;
  if (typeof schema === "number" && schema > SCHEMA)
    throw new Unreadable("newer", `schema ${schema}, this page reads ${SCHEMA}`);
  if (schema !== SCHEMA) throw new Unreadable("damaged", "the data names no schema");
  const report = columns(raw, buffer, Math.ceil((4 + length) / 8) * 8) as Report;
  verify(report);
  return report;
}

const kinds: Record<Kind, { new (b: ArrayBuffer, o: number, n: number): Column; BYTES_PER_ELEMENT: number }> = {
  f4: Float32Array,
  f8: Float64Array,
  i4: Int32Array,
  u1: Uint8Array,
};

/** The JSON with typed arrays in place of what stands for them. */
function columns(value: unknown, buffer: ArrayBuffer, base: number): unknown {
  if (Array.isArray(value)) {
    if (typeof value[0] === "object")
      for (let i = 0; i < value.length; i++) value[i] = columns(value[i], buffer, base);
    return value;
  }
  if (typeof value !== "object" || value === null) return value;
  const record = value as Record<string, unknown>;
  if (typeof record.$ === "string") return column(record, buffer, base);
  for (const key of Object.keys(record)) record[key] = columns(record[key], buffer, base);
  return record;
}

function column(record: Record<string, unknown>, buffer: ArrayBuffer, base: number): Column {
  const { $: kind, o: offset, n: count } = record;
  const type = Object.hasOwn(kinds, kind as string) ? kinds[kind as Kind] : undefined;
  if (!type || !Number.isInteger(offset) || !Number.isInteger(count))
    throw new Unreadable("damaged", "an array is not described");
  const begin = base + (offset as number);
  const end = begin + (count as number) * type.BYTES_PER_ELEMENT;
  if ((offset as number) < 0 || (offset as number) % 8 || (count as number) < 0 || end > buffer.byteLength)
    throw new Unreadable("damaged", "an array lies outside the data");
  return new type(buffer, begin, count as number);
}

function demand(holds: boolean, what: string): void {
  if (!holds) throw new Unreadable("damaged", what);
}

/** A number that JSON could not hold arrives as a word. */
function number(value: unknown, what: string): number {
  if (typeof value === "number") return value;
  if (value === "nan") return NaN;
  if (value === "inf") return Infinity;
  if (value === "-inf") return -Infinity;
  throw new Unreadable("damaged", `${what} is no number`);
}

/** All that later code relies on: lengths that agree, indices that point at something. */
export function verify(report: Report): void {
  demand(typeof report.title === "string", "the title is no text");
  demand(Array.isArray(report.made) && Array.isArray(report.traces), "a list is missing");
  demand(report.traces.length <= 1, "more than one trace");
  try {
    report.traces.forEach(trace);
    training(report);
    if (report.attribution) attribution(report.attribution);
  } catch (error) {
    // A missing part shows as a TypeError where it is first used.
    if (error instanceof Unreadable) throw error;
    throw new Unreadable("damaged", "a part of the data is missing");
  }
}

function within(column: Column | number[], low: number, high: number, what: string): void {
  for (let i = 0; i < column.length; i++) {
    const value = column[i]!;
    if (!(value >= low && value < high)) throw new Unreadable("damaged", `${what} points outside`);
  }
}

function same(length: number, columns: Column[], what: string): void {
  for (const each of columns) demand(ArrayBuffer.isView(each) && each.length === length, `${what}: lengths differ`);
}

function trace(trace: Trace): void {
  const { modules, operators: ops, edges, leaves, forest, words, shapes } = trace;
  demand(modules.length > 0, "there is no model");
  modules.forEach((module, at) => {
    demand(typeof module.name === "string" && typeof module.kind === "string", "a module has no name");
    demand(at === 0 ? module.parent === -1 : module.parent >= 0 && module.parent < at, "a module has no parent");
    demand(module.like >= 0 && module.like <= at, "a module is like none");
  });
  const count = ops.name.length;
  same(count, [ops.module, ops.call, ops.shape, ops.leaf, ops.view, ops.mass], "operators");
  within(ops.name, 0, words.length, "an operator's name");
  within(ops.module, 0, modules.length, "an operator's module");
  within(ops.shape, 0, shapes.length, "an operator's shape");
  within(ops.leaf, -1, leaves.length, "an operator's leaf");
  same(edges.consumer.length, [edges.producer, edges.position, edges.mass, edges.share], "edges");
  within(edges.consumer, 0, count, "an edge's consumer");
  within(edges.producer, 0, count, "an edge's producer");
  const vertices = forest.operator.length;
  same(
    vertices,
    [forest.word, forest.shape, forest.element, forest.derivative, forest.gradient, forest.share, forest.next],
    "paths",
  );
  within(forest.operator, 0, count, "a path's operator");
  within(forest.word, 0, words.length, "a path's name");
  within(forest.shape, 0, shapes.length, "a path's shape");
  within(forest.next, -1, vertices, "a path's next step");
  for (const leaf of leaves) {
    leaf.norm = number(leaf.norm, "a norm");
    leaf.largest = number(leaf.largest, "a gradient");
    demand(leaf.operator >= 0 && leaf.operator < count, "a leaf's operator points outside");
    demand(leaf.module >= 0 && leaf.module < modules.length, "a leaf's module points outside");
    same(leaf.element.length, [leaf.gradient, leaf.start], "a leaf's elements");
    within(leaf.element, 0, leaf.elements, "a leaf's element");
    within(leaf.start, -2, vertices, "an element's path");
  }
  for (const route of trace.routes) {
    route.share = number(route.share, "a share");
    route.weighted = number(route.weighted, "a share");
    within(route.operators, 0, count, "a route's operator");
    within(route.modules, 0, modules.length, "a route's module");
    within(route.starts, 0, vertices, "a route's path");
  }
  for (const table of Object.values(trace.tables)) {
    const { name, module, share, weighted, error, through, eligible, unreached, own } = table;
    same(name.length, [module, share, weighted, error, through, eligible, unreached, own, table.series], "influence");
    within(module, -1, modules.length, "a component's module");
  }
  for (const fork of trace.choices ?? []) {
    demand(typeof fork.name === "string" && Array.isArray(fork.branches), "a fork has no branches");
    within([fork.module, ...fork.branches.map((branch) => branch.module)], -1, modules.length, "a fork's module");
    for (const branch of fork.branches) {
      for (const key of ["elements", "share", "weighted", "error"] as const)
        branch[key] = number(branch[key], "a branch's share");
    }
  }
  if (trace.diagnosis) {
    const { findings, remarks } = trace.diagnosis;
    demand(Array.isArray(findings) && Array.isArray(remarks), "a diagnosis has no findings");
    within(findings.map((finding) => finding.module), -1, modules.length, "a finding's module");
    for (const each of findings) {
      demand(["error", "warning", "note"].includes(each.severity), "a finding has no severity");
      demand(typeof each.title === "string" && typeof each.place === "string", "a finding has no title");
    }
  }
  for (const key of ["median", "lower", "upper", "opposite", "cancelled"] as const)
    if (trace.coverage) trace.coverage[key] = number(trace.coverage[key], "a part of the gradient");
  const flow = trace.flow;
  same(flow.depth.length, [flow.norm, flow.rms, flow.zeros], "the profile");
  for (const row of flow.rows) {
    demand(row.module >= 0 && row.module < modules.length, "a row's module points outside");
    row.norm = number(row.norm, "a norm");
    if (row.gain !== null) row.gain = number(row.gain, "a gain");
    if (row.own !== null) row.own = number(row.own, "a norm");
  }
}

function attribution(graph: Attribution): void {
  const { nodes, edges } = graph;
  demand(nodes.length > 0, "an attribution graph has no nodes");
  for (const key of ["value", "total", "defect"] as const) graph[key] = number(graph[key], "a score");
  for (const node of nodes) {
    demand(typeof node.label === "string" && typeof node.name === "string", "a node has no name");
    demand(Number.isInteger(node.rank) && node.rank >= 0, "a node has no rank");
  }
  for (const edge of edges) {
    within([edge.source, edge.target], 0, nodes.length, "an edge of the attribution graph");
    demand(nodes[edge.source]!.rank < nodes[edge.target]!.rank, "an edge leads back");
  }
  for (const part of [...nodes, ...edges]) {
    part.score = number(part.score, "a score");
    part.influence = number(part.influence, "an influence");
  }
}

function training({ training, timing }: Report): void {
  if (training) {
    training.cost = number(training.cost, "a cost");
    const { step, loss, components, share, weighted } = training;
    same(step.length, [loss, ...share, ...weighted], "training");
    demand(share.length === components.length && weighted.length === components.length, "training: lengths differ");
  }
  if (timing) {
    for (const key of ["slope", "low", "high"] as const) timing[key] = number(timing[key], "a slope");
    same(timing.step.length, [timing.seconds], "timing");
  }
}
