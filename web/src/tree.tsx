/** The module tree with influence, after the tree pattern of WAI-ARIA. Only rows in sight are made. */
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { seriesOf } from "./choices";
import { marks } from "./diagnosis";
import { brief, count, percent, short } from "./format";
import { reveal } from "./graph/boxes";
import { influence } from "./influence";
import { Term } from "./terms";
import type { Module, Trace } from "./types";
import type { View } from "./view";

const ROW = 30;
const FIRST = 40; // rows that are open at first, at most

interface Node {
  module: number;
  level: number;
  place: number; // among its siblings, from 1
  siblings: number;
  parent: number; // row of its parent in the list
  leaf: boolean;
}

function families(modules: Module[]): number[][] {
  const children: number[][] = modules.map(() => []);
  modules.forEach((module, at) => {
    if (module.parent >= 0) children[module.parent]!.push(at);
  });
  return children;
}

/** The rows to see, from the top. */
export function rows(children: number[][], open: ReadonlySet<number>): Node[] {
  const found: Node[] = [];
  const stack: Node[] = [{ module: 0, level: 1, place: 1, siblings: 1, parent: -1, leaf: !children[0]!.length }];
  for (let node = stack.pop(); node; node = stack.pop()) {
    const at = found.push(node) - 1;
    if (!open.has(node.module)) continue;
    const inside = children[node.module]!;
    for (let n = inside.length - 1; n >= 0; n--) {
      const module = inside[n]!;
      stack.push({ module, level: node.level + 1, place: n + 1, siblings: inside.length, parent: at, leaf: !children[module]!.length });
    }
  }
  return found;
}

/** Whole levels, while they are few. */
function unfolded(children: number[][]): Set<number> {
  const open = new Set([0]);
  let total = 1 + children[0]!.length;
  for (let level = children[0]!; level.length; level = level.flatMap((module) => children[module]!)) {
    total += level.reduce((sum, module) => sum + children[module]!.length, 0);
    if (total > FIRST) break;
    for (const module of level) open.add(module);
  }
  return open;
}

function last(trace: Trace, module: number): string {
  const { name, parent } = trace.modules[module]!;
  if (module === 0) return name || "model";
  const up = trace.modules[parent]!.name;
  return (up && name.startsWith(`${up}.`) ? name.slice(up.length + 1) : name) || "(no name)";
}

/** Of what a share is one, in words: each module has elements of its own that could pass it. */
function whole(eligible: number, by: View["state"]["by"]): string {
  const elements = `the ${count(eligible)} elements outside the module that have a path and some way through it`;
  return by === "share" ? elements : `the |gradient| of ${elements}`;
}

export function Tree(view: View & { done?: () => void }) {
  const { trace, state, go } = view;
  const children = useMemo(() => families(trace.modules), [trace]);
  const [open, setOpen] = useState(() => unfolded(children));
  const [at, setAt] = useState(0); // the module that has the keyboard
  const list = useMemo(() => rows(children, open), [children, open]);
  const box = useRef<HTMLDivElement>(null);
  const [span, setSpan] = useState({ top: 0, height: 900 });
  const shares = influence(trace, state.by);
  const eligible = influence(trace, "eligible");
  const series = useMemo(() => seriesOf(trace), [trace]);
  const found = useMemo(() => marks(trace), [trace]);

  useEffect(() => setOpen(unfolded(children)), [children]);
  useLayoutEffect(() => {
    const element = box.current!;
    const read = () => setSpan({ top: element.scrollTop, height: element.clientHeight });
    const watch = new ResizeObserver(read);
    watch.observe(element);
    element.addEventListener("scroll", read, { passive: true });
    return () => {
      watch.disconnect();
      element.removeEventListener("scroll", read);
    };
  }, []);
  // What is selected anywhere is seen here.
  useEffect(() => {
    if (state.module === null) return;
    const next = new Set(open);
    for (let up = trace.modules[state.module]?.parent ?? -1; up >= 0; up = trace.modules[up]!.parent) next.add(up);
    if (next.size !== open.size) setOpen(next);
    setAt(state.module);
  }, [state.module, trace]);
  const row = Math.max(0, list.findIndex((node) => node.module === at));
  useEffect(() => {
    const element = box.current!;
    if (row * ROW < element.scrollTop) element.scrollTop = row * ROW;
    else if ((row + 1) * ROW > element.scrollTop + element.clientHeight)
      element.scrollTop = (row + 1) * ROW - element.clientHeight;
  }, [row, list]);

  const toggle = (module: number, wanted = !open.has(module)) => {
    const next = new Set(open);
    if (wanted) next.add(module);
    else next.delete(module);
    setOpen(next);
  };
  const choose = (module: number) => {
    setAt(module);
    go({ module: state.module === module ? null : module, operator: null, open: reveal(trace, state.open, module) });
    view.done?.();
  };
  const press = (event: KeyboardEvent) => {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const node = list[row]!;
    const move = (to: number) => setAt(list[Math.min(Math.max(to, 0), list.length - 1)]!.module);
    const page = Math.max(1, Math.floor(span.height / ROW) - 1);
    const acts: Record<string, () => void> = {
      ArrowDown: () => move(row + 1),
      ArrowUp: () => move(row - 1),
      PageDown: () => move(row + page),
      PageUp: () => move(row - page),
      Home: () => move(0),
      End: () => move(list.length - 1),
      ArrowRight: () => (node.leaf ? undefined : open.has(node.module) ? move(row + 1) : toggle(node.module, true)),
      ArrowLeft: () => (!node.leaf && open.has(node.module) ? toggle(node.module, false) : node.parent >= 0 && move(node.parent)),
      Enter: () => choose(node.module),
      " ": () => choose(node.module),
      "*": () => setOpen(new Set([...open, ...(node.parent < 0 ? [0] : children[list[node.parent]!.module]!)])),
    };
    const act = acts[event.key];
    if (act) act();
    else if (/^[\p{L}\p{N}_]$/u.test(event.key)) jump(event.key.toLowerCase());
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  /** To the next row whose name begins with this letter. */
  const jump = (letter: string) => {
    for (let step = 1; step <= list.length; step++) {
      const node = list[(row + step) % list.length]!;
      if (last(trace, node.module).toLowerCase().startsWith(letter)) return setAt(node.module);
    }
  };

  const from = Math.max(0, Math.floor(span.top / ROW) - 8);
  const to = Math.min(list.length, Math.ceil((span.top + span.height) / ROW) + 8);
  return (
    <div class="tree">
      <div class="tree-head">
        <h2>Modules</h2>
        <div class="switch" role="group" aria-label="Influence">
          {(["share", "weighted"] as const).map((by) => (
            <button
              key={by}
              aria-pressed={state.by === by}
              title={by === "share" ? "Share of elements whose path runs through the module" : "The same, each element weighted by its |gradient|"}
              onClick={() => go({ by })}
            >
              {by === "share" ? "Elements" : "|Gradient|"}
            </button>
          ))}
        </div>
      </div>
      <p class="tree-label">
        <Term of={state.by === "share" ? "share" : "by |gradient|"}>
          paths through it, of elements outside it{state.by === "share" ? "" : ", by |gradient|"}
        </Term>
      </p>
      <div
        ref={box}
        class="tree-rows"
        role="tree"
        tabIndex={0}
        aria-label="Modules"
        aria-activedescendant={row >= from && row < to ? `module-${list[row]!.module}` : undefined}
        onKeyDown={press}
      >
        <div role="presentation" style={{ height: `${list.length * ROW}px`, position: "relative" }}>
          {list.slice(from, to).map((node, n) => {
            const { module, level, leaf } = node;
            const share = shares[module]!;
            const name = last(trace, module);
            return (
              <div
                key={module}
                id={`module-${module}`}
                class={`tree-row${module === list[row]!.module ? " at" : ""}`}
                role="treeitem"
                aria-level={level}
                aria-posinset={node.place}
                aria-setsize={node.siblings}
                aria-expanded={leaf ? undefined : open.has(module)}
                aria-selected={state.module === module}
                style={{ top: `${(from + n) * ROW}px`, paddingLeft: `${6 + 14 * Math.min(level - 1, 8)}px` }}
                title={short(trace.modules[module]!.name, 300) || "the model"}
                onClick={() => choose(module)}
              >
                <span
                  class={`twist${leaf ? " none" : open.has(module) ? " open" : ""}`}
                  aria-hidden="true"
                  onClick={(event) => {
                    if (leaf) return;
                    event.stopPropagation();
                    toggle(module);
                  }}
                />
                <span class="tree-name">
                  <bdi>{short(name, 60)}</bdi> <span class="soft">{short(trace.modules[module]!.kind, 40)}</span>
                  {found.has(module) && (
                    <span class="mark" role="img" aria-label={`${found.get(module)} found here`}>
                      !
                    </span>
                  )}
                </span>
                {series.has(module) ? (
                  <span class="figure soft" title="every path that could pass it does: 100% by definition">
                    in series
                  </span>
                ) : share >= 0 ? (
                  <>
                    <span class="meter" aria-hidden="true">
                      <span style={{ width: `${100 * Math.min(1, share)}%` }} />
                    </span>
                    <span class="figure" title={`${percent(share)} of ${whole(eligible[module]!, state.by)}`}>
                      {percent(share)} <small class="soft">of {brief(eligible[module]!)}</small>
                    </span>
                  </>
                ) : (
                  <span class="figure soft">{module ? "–" : ""}</span>
                )}
              </div>
            );
          })}
        </div>
      </div>
    </div>
  );
}
