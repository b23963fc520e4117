/** Which part of the sheet is seen: screen = sheet × k + (x, y). Moves by hand, wheel and pinch. */
export interface Camera {
  x: number;
  y: number;
  k: number;
}

export interface Rect {
  left: number;
  top: number;
  right: number;
  bottom: number;
}

export const NEAREST = 2.5;
export const FARTHEST = 0.02;

/** What the tools cover, above. */
const TOOLS = 52;
const LEGEND = 56; // ...and below

export const clamp = (k: number): number => Math.min(NEAREST, Math.max(FARTHEST, k));

/** Closer by a factor; the point of the sheet under (x, y) stays there. */
export function zoom(camera: Camera, factor: number, x: number, y: number): Camera {
  const k = clamp(camera.k * factor);
  const ratio = k / camera.k;
  return { k, x: x - (x - camera.x) * ratio, y: y - (y - camera.y) * ratio };
}

/** All of it if that can be read; else its top, and as much as can. */
export function fit(rect: Rect, width: number, height: number, least = 0.7, most = 1): Camera {
  const margin = Math.min(24, width / 20);
  const [w, h] = [rect.right - rect.left || 1, rect.bottom - rect.top || 1];
  const room = height - TOOLS - LEGEND;
  const whole = Math.min((width - 2 * margin) / w, room / h);
  const k = clamp(Math.min(most, Math.max(whole, least)));
  const spare = Math.max(0, Math.min((room - h * k) / 2, room / 8));
  return {
    k,
    x: width / 2 - ((rect.left + rect.right) / 2) * k,
    y: TOOLS + spare - rect.top * k,
  };
}

/** The same distance, with this in the middle. */
export function centre(camera: Camera, rect: Rect, width: number, height: number): Camera {
  const k = Math.max(camera.k, 0.6);
  const tall = (rect.bottom - rect.top) * k > height;
  return {
    k,
    x: width / 2 - ((rect.left + rect.right) / 2) * k,
    y: tall ? TOOLS - rect.top * k : height / 2 - ((rect.top + rect.bottom) / 2) * k,
  };
}

export const seen = (camera: Camera, width: number, height: number): Rect => ({
  left: -camera.x / camera.k,
  top: -camera.y / camera.k,
  right: (width - camera.x) / camera.k,
  bottom: (height - camera.y) / camera.k,
});

export const overlap = (a: Rect, b: Rect): boolean =>
  a.left < b.right && a.right > b.left && a.top < b.bottom && a.bottom > b.top;

export const inside = (a: Rect, b: Rect): boolean =>
  a.left >= b.left && a.right <= b.right && a.top >= b.top && a.bottom <= b.bottom;

interface Hand {
  get: () => Camera;
  set: (camera: Camera) => void;
}

/** Listens to pointers and the wheel. A press that moved is no click. Returns how to stop. */
export function steer(element: HTMLElement, hand: Hand): () => void {
  const fingers = new Map<number, { x: number; y: number }>();
  let moved = 0;
  const local = (event: { clientX: number; clientY: number }) => {
    const box = element.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };
  const spread = () => {
    const [a, b] = [...fingers.values()];
    if (!a || !b) return null;
    return { x: (a.x + b.x) / 2, y: (a.y + b.y) / 2, d: Math.hypot(a.x - b.x, a.y - b.y) || 1 };
  };
  const down = (event: PointerEvent) => {
    if (event.button > 0 && event.button !== 1) return;
    fingers.set(event.pointerId, local(event));
    if (fingers.size === 1) moved = 0;
  };
  const move = (event: PointerEvent) => {
    const old = fingers.get(event.pointerId);
    if (!old) return;
    const before = spread();
    const at = local(event);
    fingers.set(event.pointerId, at);
    const after = spread();
    const camera = hand.get();
    if (before && after) {
      moved = 100;
      const near = zoom(camera, after.d / before.d, before.x, before.y);
      hand.set({ ...near, x: near.x + after.x - before.x, y: near.y + after.y - before.y });
      return;
    }
    moved += Math.abs(at.x - old.x) + Math.abs(at.y - old.y);
    if (moved < 5) return;
    if (!element.hasPointerCapture(event.pointerId)) element.setPointerCapture(event.pointerId);
    element.classList.add("held");
    hand.set({ ...camera, x: camera.x + at.x - old.x, y: camera.y + at.y - old.y });
  };
  const up = (event: PointerEvent) => {
    fingers.delete(event.pointerId);
    element.classList.remove("held");
  };
  const click = (event: MouseEvent) => {
    if (moved >= 5) event.stopPropagation();
    moved = 0;
  };
  const wheel = (event: WheelEvent) => {
    event.preventDefault();
    const unit = event.deltaMode === 1 ? 16 : 1;
    const camera = hand.get();
    if (event.ctrlKey || event.metaKey) {
      const { x, y } = local(event);
      hand.set(zoom(camera, Math.exp((-event.deltaY * unit) / 240), x, y));
    } else {
      const [dx, dy] = event.shiftKey ? [event.deltaY, event.deltaX] : [event.deltaX, event.deltaY];
      hand.set({ ...camera, x: camera.x - dx * unit, y: camera.y - dy * unit });
    }
  };
  element.addEventListener("pointerdown", down);
  element.addEventListener("pointermove", move);
  element.addEventListener("pointerup", up);
  element.addEventListener("pointercancel", up);
  element.addEventListener("click", click, true);
  element.addEventListener("wheel", wheel, { passive: false });
  return () => {
    element.removeEventListener("pointerdown", down);
    element.removeEventListener("pointermove", move);
    element.removeEventListener("pointerup", up);
    element.removeEventListener("pointercancel", up);
    element.removeEventListener("click", click, true);
    element.removeEventListener("wheel", wheel);
  };
}
