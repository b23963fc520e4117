import type { View } from "./view";

export function Compare(_: View) {
  return <p class="empty">Nothing here yet.</p>;
}
