/** Numbers, shapes and names as a reader wants to see them. */

const THIN = "\u202f"; // narrow, and no line is broken at it
const MINUS = "−";
const RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹";

/** A number that JSON may have had to spell: "nan", "inf", "-inf". Nothing is not a number. */
export function real(value: number | string | null | undefined): number {
  if (typeof value === "number") return value;
  if (value === "inf") return Infinity;
  if (value === "-inf") return -Infinity;
  return NaN;
}

function unusual(value: number): string | null {
  if (Number.isNaN(value)) return "not a number";
  if (value === Infinity) return "infinite";
  if (value === -Infinity) return "minus infinite";
  return null;
}

const signed = (text: string): string => text.replace("-", MINUS);

function grouped(digits: string): string {
  const [whole = "", part] = digits.split(".");
  const cut = whole.replace(/\B(?=(\d{3})+(?!\d))/g, THIN);
  return part === undefined ? cut : `${cut}.${part}`;
}

export function power(exponent: number): string {
  const digits = [...String(Math.abs(exponent))].map((d) => RAISED[Number(d)]).join("");
  return `10${exponent < 0 ? "⁻" : ""}${digits}`;
}

/** Three digits that count: 0.0123, 12 300, −4.56×10⁻⁷. */
export function number(value: number | string | null, digits = 3): string {
  const x = real(value);
  const odd = unusual(x);
  if (odd) return odd;
  if (Number.isInteger(x) && Math.abs(x) < 1e6) return count(x);
  const text = x.toExponential(digits - 1);
  const [mantissa = "", exponent = "0"] = text.split("e");
  const power_ = Number(exponent);
  if (power_ < -3 || power_ > 5) return `${signed(mantissa)}×${power(power_)}`;
  // Digits before the point are all written: to round them would save no room.
  const places = Math.max(0, digits - 1 - power_);
  return signed(grouped((places ? Number(text) : x).toFixed(places)));
}

/** All of it, for those who copy it. */
export function exact(value: number): string {
  return Object.is(value, -0) ? "0" : String(value);
}

export function count(value: number): string {
  const odd = unusual(value);
  if (odd) return odd;
  return signed(grouped(String(Math.round(value))));
}

/** "1 path", "2 paths". */
export function counted(value: number, one: string, many = `${one}s`): string {
  return `${count(value)} ${value === 1 ? one : many}`;
}

const PREFIXES: [number, string][] = [
  [1e12, "T"],
  [1e9, "G"],
  [1e6, "M"],
  [1e3, "k"],
];

/** A large count in few characters: 2.36 M. */
export function brief(value: number): string {
  const odd = unusual(value);
  if (odd) return odd;
  for (const [factor, prefix] of PREFIXES) {
    if (Math.abs(value) >= 0.9995 * factor) {
      const text = (value / factor).toPrecision(3);
      return `${signed(Number(text) >= 1000 ? text : String(Number(text)))}${THIN}${prefix}`;
    }
  }
  return count(value);
}

/** A share of 1 as per cent: 43.2%, never 0% or 100% for what is not, and "none" if there is none. */
export function percent(value: number | string | null): string {
  const x = real(value);
  if (Number.isNaN(x)) return "none";
  const odd = unusual(x);
  if (odd) return odd;
  const size = Math.abs(x);
  const sign = x < 0 ? MINUS : "";
  if (size === 0) return "0%";
  if (size === 1) return `${sign}100%`;
  if (size < 5e-5) return `${sign}<${THIN}0.01%`;
  if (size < 0.00995) return `${sign}${(100 * size).toFixed(2)}%`;
  if (size < 1 && size >= 0.9995) return `${sign}>${THIN}99.9%`;
  if (size < 10) return `${sign}${(100 * size).toFixed(1)}%`;
  if (size < 1e4) return `${sign}${grouped((100 * size).toFixed(0))}%`;
  return `${number(100 * x)}%`;
}

/** A difference of two shares: +3.1 points. */
export function points(value: number): string {
  const odd = unusual(value);
  if (odd) return odd;
  const text = (100 * Math.abs(value)).toFixed(Math.abs(value) < 0.00095 ? 2 : 1);
  if (Number(text) === 0) return value === 0 ? "0" : `${value > 0 ? "+" : MINUS}<${THIN}0.01`;
  return `${value > 0 ? "+" : MINUS}${text}`;
}

export function shape(sizes: readonly number[]): string {
  return sizes.length ? sizes.join("×") : "scalar";
}

export function element(index: readonly number[]): string {
  return `[${index.join(", ")}]`;
}

/** The index of an element's number; of no elements, none. */
export function unravel(flat: number, sizes: readonly number[]): number[] {
  const found: number[] = [];
  let rest = flat;
  for (let n = sizes.length - 1; n >= 0; n--) {
    const size = sizes[n] || 1;
    found.unshift(rest % size);
    rest = Math.floor(rest / size);
  }
  return found;
}

export function ravel(index: readonly number[], sizes: readonly number[]): number {
  return sizes.reduce((flat, size, n) => flat * size + (index[n] ?? 0), 0);
}

const UNITS: [number, string][] = [
  [1, "s"],
  [1e-3, "ms"],
  [1e-6, "µs"],
  [1e-9, "ns"],
];

export function duration(seconds: number | string | null): string {
  const x = real(seconds);
  const odd = unusual(x);
  if (odd) return odd;
  const sign = x < 0 ? MINUS : "";
  const size = Math.abs(x);
  if (size === 0) return "0 s";
  if (size >= 3600) {
    const minutes = Math.round(size / 60);
    return `${sign}${count(Math.floor(minutes / 60))} h ${minutes % 60} min`;
  }
  if (size >= 100) {
    const whole = Math.round(size);
    return `${sign}${Math.floor(whole / 60)} min ${whole % 60} s`;
  }
  for (const [factor, unit] of UNITS) {
    if (size >= 0.9995 * factor) return `${sign}${number(size / factor)} ${unit}`;
  }
  return `${sign}${number(size / 1e-9)} ns`;
}

/** A name that fits: the middle is left out. Characters are kept whole. */
export function short(text: string, most = 48): string {
  if (text.length <= most) return text;
  const cut = text.length > 4 * most ? text.slice(0, 2 * most) + text.slice(-2 * most) : text;
  const parts = [...cut];
  if (parts.length <= most) return text;
  const tail = Math.floor((most - 1) / 2);
  return `${parts.slice(0, most - 1 - tail).join("")}…${parts.slice(-tail).join("")}`;
}

/** What a module is called: the model itself has no name. */
export function moduleName(name: string): string {
  return name || "the model itself";
}
