/** A share as a small bar; its number stands beside it, never in it alone. */

export function Bar({ share, error, class: name = "" }: {
  share: number;
  error?: number;
  class?: string;
}) {
  const size = Number.isFinite(share) ? Math.min(1, Math.abs(share)) : 0;
  const spread = error !== undefined && Number.isFinite(error) ? error : 0;
  const left = Math.max(0, size - spread);
  const right = Math.min(1, size + spread);
  return (
    <span class={`share-bar ${share < 0 ? "against" : ""} ${name}`} aria-hidden="true">
      <span class="filled" style={{ width: `${100 * size}%` }} />
      {spread > 0 && (
        <span class="error" style={{ left: `${100 * left}%`, width: `${100 * (right - left)}%` }} />
      )}
    </span>
  );
}

/** A difference as a bar to the left or right of the middle. */
export function Tilt({ by, most }: { by: number; most: number }) {
  const size = Number.isFinite(by) && most > 0 ? Math.min(1, Math.abs(by) / most) / 2 : 0;
  const style = by < 0 ? { right: "50%", width: `${100 * size}%` } : { left: "50%", width: `${100 * size}%` };
  return (
    <span class={`tilt ${by < 0 ? "down" : "up"}`} aria-hidden="true">
      <span class="filled" style={style} />
    </span>
  );
}
