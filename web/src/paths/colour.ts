/** Gradients as colours that people who see fewer of them can tell apart too. */
import type { HeatMap } from "../types";

export type Mode = "sign" | "size";

export interface Range {
  low: number; // |gradients| up to here look alike...
  high: number; // ...and this is the largest
  zeros: boolean;
  odd: boolean; // some are not finite
  cut: boolean; // some lie below low
}

const DECADES = 6;

/** What |gradients| the scale spans: six powers of ten at most, from the largest down. */
export function range(map: HeatMap): Range {
  let [low, high] = [Infinity, 0];
  let [zeros, odd] = [false, false];
  for (const value of map.gradient) {
    const size = Math.abs(value);
    if (!Number.isFinite(size)) odd = true;
    else if (size === 0) zeros = true;
    else {
      low = Math.min(low, size);
      high = Math.max(high, size);
    }
  }
  if (high === 0) return { low: 0, high: 0, zeros, odd, cut: false };
  const least = high * 10 ** -DECADES;
  return { low: Math.max(low, least), high, zeros, odd, cut: low < least };
}

/** How strong a gradient looks, from 0 to 1 on a log scale. */
export function strength(value: number, { low, high }: Range): number {
  const size = Math.abs(value);
  if (size === 0 || high === 0) return 0;
  if (high === low) return 1;
  const t = Math.log(size / low) / Math.log(high / low);
  return Math.max(0, Math.min(1, t));
}

export type Colour = [number, number, number];

export interface Palette {
  size: Colour[]; // from faint to strong
  plus: Colour[];
  minus: Colour[];
  zero: Colour;
  odd: Colour;
}

export function parsed(text: string): Colour {
  const hex = /^#([0-9a-f]{6})$/i.exec(text.trim());
  if (!hex) return [128, 128, 128];
  const n = parseInt(hex[1]!, 16);
  return [n >> 16, (n >> 8) & 255, n & 255];
}

/** Between the colours of a ramp. */
export function mixed(ramp: Colour[], t: number): Colour {
  const at = t * (ramp.length - 1);
  const n = Math.min(ramp.length - 2, Math.floor(at));
  if (n < 0) return ramp[0] ?? [128, 128, 128];
  const part = at - n;
  const [a, b] = [ramp[n]!, ramp[n + 1]!];
  return [0, 1, 2].map((c) => Math.round(a[c]! + part * (b[c]! - a[c]!))) as Colour;
}

export function colour(value: number, range: Range, mode: Mode, palette: Palette): Colour {
  if (!Number.isFinite(value)) return palette.odd;
  if (value === 0) return palette.zero;
  const t = strength(value, range);
  if (mode === "size") return mixed(palette.size, t);
  return mixed(value > 0 ? palette.plus : palette.minus, t);
}

export const css = ([r, g, b]: Colour): string => `rgb(${r} ${g} ${b})`;

/** The palette of the page's theme. */
export function palette(at: Element): Palette {
  const style = getComputedStyle(at);
  const named = (name: string): Colour => parsed(style.getPropertyValue(name));
  const ramp = (name: string): Colour[] => [1, 2, 3].map((n) => named(`--heat-${name}-${n}`));
  return {
    size: ramp("plus"),
    plus: ramp("plus"),
    minus: ramp("minus"),
    zero: named("--heat-zero"),
    odd: named("--heat-odd"),
  };
}
