import type { Trace } from "../types";

export function opening(_: Trace): number[] {
  return [];
}
