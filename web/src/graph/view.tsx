/** The graph: gradient comes down from the loss. Boxes open and close; a path can be followed. */
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { count, percent } from "../format";
import { influence } from "../influence";
import type { View } from "../view";
import { opening, reveal } from "./boxes";
import { centre, fit, inside, overlap, seen, steer, zoom, type Camera, type Rect } from "./camera";
import { Term } from "../terms";
import { Detail } from "./detail";
import { draw, jobs, type Drawing, type Placed } from "./draw";
import { plan } from "./engine";
import { fold, picked } from "./fold";
import { breadth, describe, Sheet, visible, type Lit } from "./sheet";

/** Where the reader was looking, for when he comes back to this tab. */
const looks = new WeakMap<object, Camera>();

export function Graph(view: View) {
  const { trace, state, go } = view;
  const scene = useMemo(() => fold(trace, state.open, state.views), [trace, state.open, state.views]);
  const drawing = useDrawing(view, scene);
  const rows = useMemo(() => picked(trace, state), [trace, state.route, state.leaf, state.element]);
  const lit = useMemo(() => (drawing && rows.length ? light(drawing, rows) : null), [drawing, rows]);
  const [focus, setFocus] = useState<number | null>(null);
  const frame = useRef<HTMLDivElement>(null);
  const world = useRef<SVGGElement>(null);
  const camera = useRef<Camera>(looks.get(trace) ?? { x: 0, y: 0, k: 1 });
  const [window_, setWindow] = useState<{ region: Rect; small: boolean } | null>(null);
  const anchor = useRef<{ node: number; x: number; y: number } | null>(null);

  const measure = () => {
    const element = frame.current; // gone, if the reader has left the tab meanwhile
    return { width: element?.clientWidth || 1, height: element?.clientHeight || 1 };
  };
  /** Moves at once; what is drawn changes only when the reader nears its border. */
  const look = (next: Camera) => {
    camera.current = next;
    if (drawing) looks.set(trace, next);
    world.current?.setAttribute("transform", `translate(${next.x},${next.y}) scale(${next.k})`);
    const { width, height } = measure();
    const now = seen(next, width, height);
    const small = next.k < 0.3;
    setWindow((old) => {
      if (old && old.small === small && inside(now, old.region) && now.right - now.left > (old.region.right - old.region.left) / 4)
        return old;
      const [w, h] = [(now.right - now.left) / 2, (now.bottom - now.top) / 2];
      return { small, region: { left: now.left - w, right: now.right + w, top: now.top - h, bottom: now.bottom + h } };
    });
  };
  const whole = (): Rect => ({ left: 0, top: 0, right: drawing!.width, bottom: drawing!.height });
  const all = () => {
    const { width, height } = measure();
    look(fit(whole(), width, height, 0.02));
  };
  const closer = (factor: number) => {
    const { width, height } = measure();
    look(zoom(camera.current, factor, width / 2, height / 2));
  };
  const show = (node: number) => {
    const one = drawing?.at.get(node);
    if (!one) return;
    const { width, height } = measure();
    const place = rect(one);
    if (!inside(place, seen(camera.current, width, height)) || camera.current.k < 0.3)
      look(centre(camera.current, place, width, height));
  };

  const looking = useRef(look);
  looking.current = look; // listeners outlive a rendering

  // A new drawing: what was clicked stays where it was; at first the loss is on top.
  useLayoutEffect(() => {
    if (!drawing) return;
    const { width, height } = measure();
    const held = anchor.current && drawing.at.get(anchor.current.node);
    if (held) {
      const { k } = camera.current;
      look({ k, x: anchor.current!.x - held.x * k, y: anchor.current!.y - held.y * k });
    } else if (!looks.has(trace) || !overlap(whole(), seen(camera.current, width, height))) {
      look(fit(whole(), width, height));
    } else {
      look(camera.current);
    }
    anchor.current = null;
  }, [drawing]);

  const { lines, left } = useMemo(
    () => (drawing && window_ ? visible(drawing, window_.region, lit) : { lines: [], left: 0 }),
    [drawing, window_, lit],
  );
  const chosen = drawing ? target(drawing, state.operator, state.module) : null;
  // A choice made elsewhere (tree, search, address) is brought into sight.
  useEffect(() => {
    if (chosen !== null && !lit) show(chosen);
  }, [chosen, drawing]);
  useEffect(() => {
    if (!lit || !drawing) return;
    const places = [...lit.nodes].map((node) => drawing.at.get(node)).filter((one) => one !== undefined);
    if (!places.length) return;
    const { width, height } = measure();
    look(fit(union(places), width, height));
  }, [lit]);
  useEffect(() => {
    const element = frame.current!;
    const stop = steer(element, { get: () => camera.current, set: (next) => looking.current(next) });
    const watch = new ResizeObserver(() => looking.current(camera.current));
    watch.observe(element);
    return () => {
      stop();
      watch.disconnect();
    };
  }, [trace]);

  const activate = (node: number) => {
    setFocus(node);
    const one = drawing!.at.get(node);
    if (node < scene.base) {
      if (one) {
        const { x, y, k } = camera.current;
        anchor.current = { node, x: one.x * k + x, y: one.y * k + y };
      }
      const open = state.open.includes(node) ? state.open.filter((each) => each !== node) : reveal(trace, [...state.open, node], node);
      go({ open, operator: null, module: node < scene.all.modules ? node : state.module });
      return;
    }
    const row = node - scene.base;
    const leaf = trace.operators.leaf[row]!;
    if (leaf >= 0) go({ tab: "paths", leaf, element: null, route: null });
    else go({ operator: state.operator === row ? null : row });
  };
  const press = (event: KeyboardEvent) => {
    if (!drawing || event.altKey || event.ctrlKey || event.metaKey) return;
    const step = (dx: number, dy: number) => {
      const next = neighbour(drawing, focus ?? scene.base, dx, dy, focus === null);
      setFocus(next);
      show(next);
    };
    const acts: Record<string, () => void> = {
      ArrowUp: () => step(0, -1),
      ArrowDown: () => step(0, 1),
      ArrowLeft: () => step(-1, 0),
      ArrowRight: () => step(1, 0),
      Enter: () => focus !== null && activate(focus),
      " ": () => focus !== null && activate(focus),
      "+": () => closer(1.25),
      "=": () => closer(1.25),
      "-": () => closer(0.8),
      "0": all,
      Home: () => {
        setFocus(scene.node(0));
        show(scene.node(0));
      },
      Backspace: () => {
        const box = focus === null ? -1 : scene.outer(focus);
        if (box > 0) activate(box);
      },
    };
    const act = acts[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  };

  const shares = influence(trace, state.by);
  const views = useMemo(() => trace.operators.view.reduce((sum, view) => sum + view, 0), [trace]);
  return (
    <section class="graph" aria-label="Graph">
      <div
        ref={frame}
        class="canvas"
        data-export
        tabIndex={0}
        role="application"
        aria-roledescription="graph"
        aria-label="Graph of operators. Arrow keys move, Enter opens or closes, plus and minus zoom."
        aria-activedescendant={focus === null ? undefined : `node-${focus}`}
        aria-busy={drawing?.scene !== scene}
        onKeyDown={press}
        onClick={(event) => {
          const hit = (event.target as Element).closest("[data-node]");
          if (hit && drawing) activate(Number(hit.getAttribute("data-node")));
        }}
      >
        <svg width="100%" height="100%">
          <defs>
            {["tip", "tip-lit"].map((id) => (
              <marker key={id} id={id} viewBox="0 0 8 8" refX="2" refY="4" markerWidth="8" markerHeight="8" markerUnits="userSpaceOnUse" orient="auto">
                <path d="M0 0.5L7.5 4L0 7.5z" />
              </marker>
            ))}
          </defs>
          <g ref={world}>
            {drawing && window_ && (
              <Sheet trace={trace} drawing={drawing} {...window_} lines={lines} lit={lit} focus={focus} chosen={chosen} influence={shares} />
            )}
          </g>
        </svg>
        {!drawing && <p class="wait">Laying out the graph…</p>}
      </div>
      <Legend left={left} />
      <p class="unseen" role="status">
        {drawing && focus !== null ? describe(trace, drawing, focus, shares) : ""}
      </p>
      <div class="tools" role="toolbar" aria-label="Graph">
        <button aria-label="Zoom in" title="Zoom in (+)" onClick={() => closer(1.25)}>
          +
        </button>
        <button aria-label="Zoom out" title="Zoom out (−)" onClick={() => closer(0.8)}>
          −
        </button>
        <button title="Show all of it (0)" onClick={all} disabled={!drawing}>
          Fit
        </button>
        <button title="Open and close boxes as at the beginning" onClick={() => go({ open: opening(trace) })}>
          Reset
        </button>
        {views > 0 && (
          <label title="Show operators that only move elements: views, transposes, expansions">
            <input type="checkbox" checked={state.views} onChange={() => go({ views: !state.views })} />
            <span>
              Views <span class="soft">{count(views)}</span>
            </span>
          </label>
        )}
      </div>
      {rows.length > 0 && (
        <p class="chip">
          <span>
            {state.route !== null ? `Route ${count(state.route + 1)}, ${percent(trace.routes[state.route]!.share)} of paths` : "Path of the picked element"}
          </span>
          <button class="icon" aria-label="Stop highlighting" onClick={() => go({ route: null, element: null })}>
            ×
          </button>
        </p>
      )}
      <Detail {...view} />
    </section>
  );
}

/** The drawing of a scene, when its layout has come; until then the one before. */
function useDrawing(view: View, scene: ReturnType<typeof fold>): Drawing | null {
  const [drawing, set] = useState<{ of: object; drawing: Drawing } | null>(null);
  useEffect(() => {
    const asked = jobs(view.trace, scene);
    return plan(asked, (plans) => set({ of: view.trace, drawing: draw(scene, asked, plans) })) as () => void;
  }, [scene]);
  return drawing && drawing.of === view.trace ? drawing.drawing : null;
}

function light(drawing: Drawing, rows: number[]): Lit {
  const { scene } = drawing;
  const lit: Lit = { nodes: new Set(), lines: new Set() };
  rows.forEach((row, at) => {
    const node = scene.node(row);
    lit.nodes.add(node);
    for (let up = scene.outer(node); up > 0; up = scene.all.parent[up]!) lit.nodes.add(up);
    const next = rows[at + 1];
    if (next !== undefined) for (const line of scene.way(next, row)) lit.lines.add(line);
  });
  return lit;
}

function target(drawing: Drawing, operator: number | null, module: number | null): number | null {
  const { scene, at } = drawing;
  if (operator !== null) return scene.node(operator);
  if (module === null || module === 0) return null;
  for (let box: number = module; box > 0; box = scene.all.parent[box]!) if (at.has(box)) return box;
  return null;
}

const rect = (one: Placed): Rect => ({ left: one.x, top: one.y, right: one.x + one.width, bottom: one.y + one.height });

function union(places: Placed[]): Rect {
  const all = places.map(rect);
  return {
    left: Math.min(...all.map((each) => each.left)),
    top: Math.min(...all.map((each) => each.top)),
    right: Math.max(...all.map((each) => each.right)),
    bottom: Math.max(...all.map((each) => each.bottom)),
  };
}

/** The nearest node in a direction; what lies straight ahead counts as nearer. */
function neighbour(drawing: Drawing, from: number, dx: number, dy: number, stay: boolean): number {
  const start = drawing.at.get(from) ?? drawing.placed[0]!;
  if (stay) return start.node;
  const point = (one: Placed) => ({ x: one.x + one.width / 2, y: one.open ? one.y + 10 : one.y + one.height / 2 });
  const here = point(start);
  let best = start.node;
  let least = Infinity;
  for (const one of drawing.placed) {
    const there = point(one);
    const ahead = (there.x - here.x) * dx + (there.y - here.y) * dy;
    if (ahead < 4 || one.node === start.node) continue;
    const aside = Math.abs((there.x - here.x) * dy) + Math.abs((there.y - here.y) * dx);
    const far = ahead + 2.5 * aside;
    if (far < least) [least, best] = [far, one.node];
  }
  return best;
}

function Legend({ left }: { left: number }) {
  return (
    <div class="legend">
      <span>
        Line: share of <Term of="Σ |gradient|" /> at its lower end
      </span>
      <svg width="232" height="20" aria-hidden="true">
        {[0.01, 0.25, 0.5, 1].map((share, at) => (
          <g key={share} transform={`translate(${at * 57},0)`}>
            <path class="line" d="M2 10h14" stroke-width={breadth(share)} />
            <text x={20} y={14}>
              {percent(share).replace(".0%", "%")}
            </text>
          </g>
        ))}
      </svg>
      {left > 0 && <span>{count(left)} weaker lines are not drawn</span>}
    </div>
  );
}

