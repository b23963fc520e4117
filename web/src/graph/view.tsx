import type { View } from "../view";

export function Graph(_: View) {
  return <p class="empty">Nothing here yet.</p>;
}
