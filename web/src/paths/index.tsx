import type { View } from "../view";

export function Paths(_: View) {
  return <p class="empty">Nothing here yet.</p>;
}
