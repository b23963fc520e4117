/** Files for a reader to keep: the view as a picture, the data, a path. All are made in the page. */
import { modules, type Path, title } from "./paths/walk";
import type { Report, Trace } from "./types";

/** A name that any system takes: letters, digits, and a few marks; never empty, never long. */
export function fileName(text: string, ending: string): string {
  const plain = text
    .normalize("NFKD")
    .replace(/[\p{M}\p{C}]/gu, "")
    .replace(/[^\p{L}\p{N}._-]+/gu, "-")
    .replace(/\.{2,}/g, ".")
    .replace(/^[-._]+|[-._]+$/g, "");
  const short = [...plain].slice(0, 60).join("").replace(/[-._]+$/, "");
  // Windows keeps these names for itself.
  const safe = /^(con|prn|aux|nul|com\d|lpt\d)$/i.test(short) ? `${short}-` : short;
  return `${safe || "gradtrace"}.${ending}`;
}

/** JSON with arrays of numbers as lists, and numbers that JSON lacks as words. */
export function json(value: unknown): string {
  const plain = (_: string, inner: unknown): unknown => {
    if (ArrayBuffer.isView(inner)) return Array.from(inner as unknown as ArrayLike<number>);
    if (typeof inner === "number" && !Number.isFinite(inner)) {
      return Number.isNaN(inner) ? "nan" : inner > 0 ? "inf" : "-inf";
    }
    return inner;
  };
  return JSON.stringify(value, plain, 1);
}

export const wholeData = (report: Report): string => json(report);

/** A path with the names that `trace.path` has in Python. */
export function pathData(trace: Trace, path: Path): Record<string, unknown> {
  return {
    name: path.leaf.name,
    index: path.index,
    gradient: path.gradient,
    weight: path.weight,
    share: path.share,
    rule: trace.rule,
    granularity: trace.granularity,
    modules: modules(trace, path.steps).map((m) => trace.modules[m]!.name),
    steps: path.steps.map((step) => ({
      operator: step.operator,
      module: step.place,
      call: step.call,
      shape: step.shape,
      index: step.index,
      derivative: step.derivative,
      gradient: step.gradient,
      share: step.share,
    })),
  };
}

/** A field of a CSV file. Text that a spreadsheet would run as a formula gets a mark before it. */
function field(value: string | number): string {
  if (typeof value === "number") return Number.isNaN(value) ? "nan" : String(value);
  const safe = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

export function pathCsv(path: Path): string {
  const head = ["step", "operator", "module", "call", "shape", "index", "derivative", "gradient", "share"];
  const rows = path.steps.map((step, n) => [
    n,
    n === 0 ? path.leaf.name : step.operator,
    step.place,
    step.call,
    step.shape.join("×"),
    step.index.join(" "),
    step.derivative,
    step.gradient,
    step.share,
  ]);
  return [head, ...rows].map((row) => row.map(field).join(",")).join("\r\n") + "\r\n";
}

export const pathName = (path: Path): string => `path-${title(path)}`;

/** Hands a file to the reader, also from a page that is itself a file. */
export function save(content: Blob | string, name: string, type: string): void {
  const blob = typeof content === "string" ? new Blob([content], { type }) : content;
  const url = URL.createObjectURL(blob);
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
