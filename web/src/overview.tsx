import type { View } from "./view";

export function Overview(_: View) {
  return <p class="empty">Nothing here yet.</p>;
}
