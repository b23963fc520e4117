/** From numbers to places on an axis, and the numbers to write beside it. */

export interface Scale {
  /** Where a number lies, from 0 to 1; NaN where it cannot be shown. */
  place: (value: number) => number;
  ticks: number[];
  log: boolean;
}

/** About `wanted` round numbers (1, 2, 5 times a power of ten) from low to high. */
export function nice(low: number, high: number, wanted = 5): number[] {
  if (!(high > low) || !Number.isFinite(high - low)) return Number.isFinite(low) ? [low] : [];
  const raw = (high - low) / Math.max(1, wanted);
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

export function linear(low: number, high: number, wanted = 5): Scale {
  if (low === high) {
    const by = Math.abs(low) * 0.5 || 1;
    return linear(low - by, high + by, wanted);
  }
  const ticks = nice(low, high, wanted);
  return { place: (x) => (x - low) / (high - low), ticks, log: false };
}

/** Numbers above 0; all others have no place. */
export function logarithmic(low: number, high: number, wanted = 5): Scale {
  // Whole decades at both ends, so that there are always two numbers to read.
  const from = Math.floor(Math.log10(low) + 1e-9);
  const to = Math.max(from + 1, Math.ceil(Math.log10(high) - 1e-9));
  const ticks = decades(Number(`1e${from}`), Number(`1e${to}`), wanted);
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
