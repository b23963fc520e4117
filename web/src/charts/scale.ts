/** From numbers to places on an axis, and the numbers to write beside it. */

export interface Scale {
  /** Where a number lies, from 0 to 1; NaN where it cannot be shown. */
  place: (value: number) => number;
  ticks: number[];
  log: boolean;
}

/** About `wanted` round numbers (1, 2, 5 times a power of ten), at least so far apart. */
export function nice(low: number, high: number, wanted = 5, least = 0): number[] {
  if (!(high > low) || !Number.isFinite(high - low)) return Number.isFinite(low) ? [low] : [];
  const raw = Math.max(least, (high - low) / Math.max(1, wanted));
  const base = 10 ** Math.floor(Math.log10(raw));
  const step = base * (raw / base > 7.07 ? 10 : raw / base > 3.16 ? 5 : raw / base > 1.41 ? 2 : 1);
  const found: number[] = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high * (1 + 1e-12) + step * 1e-9; n++) {
    found.push(Number((n * step).toPrecision(12)));
    if (found.length > 100) break;
  }
  return found;
}

/** Powers of ten from low to high, thinned out to about `wanted`. */
export function decades(low: number, high: number, wanted = 5): number[] {
  const first = Math.ceil(Math.log10(low) - 1e-9);
  const last = Math.floor(Math.log10(high) + 1e-9);
  const every = Math.max(1, Math.ceil((last - first + 1) / Math.max(1, wanted)));
  const found: number[] = [];
  for (let n = first; n <= last; n += every) found.push(Number(`1e${n}`));
  return found;
}

/** The next of 1, 2, 5 times a power of ten, below or above. */
function round(value: number, to: (n: number) => number): number {
  const power = Math.floor(Math.log10(value) + 1e-12);
  const base = Number(`1e${power}`);
  const part = value / base;
  const parts = [1, 2, 5, 10];
  const fits =
    to === Math.floor
      ? parts.filter((p) => p <= part * (1 + 1e-9)).at(-1)
      : parts.find((p) => p >= part * (1 - 1e-9));
  return Number(((fits ?? 1) * base).toPrecision(12));
}

/** One, two and five times powers of ten, where there are too few powers. */
function between(low: number, high: number, few: number[]): number[] {
  const found: number[] = [];
  for (let n = Math.floor(Math.log10(low) + 1e-9); n <= Math.ceil(Math.log10(high)); n++) {
    for (const part of [1, 2, 5]) found.push(Number(`${part}e${n}`));
  }
  const inside = found.filter((x) => x >= low * (1 - 1e-9) && x <= high * (1 + 1e-9));
  return inside.length > 1 ? inside : few;
}

/** The least and the greatest of finite numbers; null without any. */
export function extent(series: Iterable<ArrayLike<number>>, above = -Infinity): [number, number] | null {
  let [low, high] = [Infinity, -Infinity];
  for (const values of series) {
    for (let n = 0; n < values.length; n++) {
      const x = values[n]!;
      if (!Number.isFinite(x) || x <= above) continue;
      if (x < low) low = x;
      if (x > high) high = x;
    }
  }
  return low <= high ? [low, high] : null;
}

export function linear(low: number, high: number, wanted = 5, least = 0): Scale {
  if (low === high) {
    const by = Math.abs(low) * 0.5 || 1;
    return linear(low - by, high + by, wanted, least);
  }
  const ticks = nice(low, high, wanted, least);
  return { place: (x) => (x - low) / (high - low), ticks, log: false };
}

/** Numbers above 0; all others have no place. */
export function logarithmic(low: number, high: number, wanted = 5): Scale {
  // Round numbers at both ends, so that there are always two to read.
  const first = round(low, Math.floor);
  const last = Math.max(round(high, Math.ceil), 2 * first);
  const [from, to] = [Math.log10(first), Math.log10(last)];
  const few = decades(first, last, wanted);
  const ticks = few.length > 2 ? few : between(first, last, few);
  const place = (x: number): number => (x > 0 ? (Math.log10(x) - from) / (to - from) : NaN);
  return { place, ticks, log: true };
}

/** Which of ascending numbers is nearest. */
export function nearest(values: ArrayLike<number>, wanted: number): number {
  let [low, high] = [0, values.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (values[middle]! <= wanted) low = middle;
    else high = middle;
  }
  if (high < 0) return -1;
  return Math.abs(values[high]! - wanted) < Math.abs(values[low]! - wanted) ? high : low;
}
