import type { View } from "./view";

export function Training(_: View) {
  return <p class="empty">Nothing here yet.</p>;
}
