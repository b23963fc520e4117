/** The search box: a combobox whose list names what was found; Enter goes there and opens the way. */
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { count, short } from "./format";
import { find, type Found } from "./find";
import { reveal, revealRow } from "./graph/boxes";
import type { State, View } from "./view";

const titles = { module: "Modules", leaf: "Parameters and inputs", operator: "Operators" };

/** Where to go for what was found: opened, so that it is seen. */
export function way({ trace, state }: View, { type, at }: Found): Partial<State> {
  if (type === "module") return { tab: "graph", module: at, operator: null, route: null, element: null, open: reveal(trace, state.open, at) };
  if (type === "leaf") return { tab: "paths", leaf: at, element: null, route: null };
  return {
    tab: "graph",
    operator: at,
    module: null,
    route: null,
    element: null,
    open: revealRow(trace, state.open, at),
    views: state.views || trace.operators.view[at] === 1,
  };
}

export function Search(view: View) {
  const { trace, state, go } = view;
  const [text, setText] = useState(state.query);
  const [open, setOpen] = useState(false);
  const [at, setAt] = useState(0);
  const input = useRef<HTMLInputElement>(null);
  const box = useRef<HTMLDivElement>(null);
  const { found, more } = useMemo(() => (open ? find(trace, text) : { found: [], more: 0 }), [trace, text, open]);

  useEffect(() => setText(state.query), [state.query]);
  useEffect(() => {
    if (text === state.query) return;
    const timer = setTimeout(() => go({ query: text }), 300);
    return () => clearTimeout(timer);
  }, [text]);
  useEffect(() => {
    const slash = (event: KeyboardEvent) => {
      const typing = event.target instanceof HTMLElement && event.target.matches("input, textarea, select");
      if (event.key !== "/" || typing || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      input.current?.focus();
      input.current?.select();
    };
    const away = (event: PointerEvent) => {
      if (!box.current?.contains(event.target as Node)) setOpen(false);
    };
    addEventListener("keydown", slash);
    addEventListener("pointerdown", away);
    return () => {
      removeEventListener("keydown", slash);
      removeEventListener("pointerdown", away);
    };
  }, []);
  useEffect(() => {
    document.getElementById(`found-${at}`)?.scrollIntoView?.({ block: "nearest" });
  }, [at]);

  const choose = (one: Found | undefined) => {
    if (!one) return;
    setOpen(false);
    go({ ...way(view, one), query: text });
    input.current?.blur();
  };
  const press = (event: KeyboardEvent) => {
    const moves: Record<string, number> = { ArrowDown: 1, ArrowUp: -1 };
    const move = moves[event.key];
    if (move !== undefined && found.length) setAt((at + move + found.length) % found.length);
    else if (move !== undefined) setOpen(true);
    else if (event.key === "Enter") choose(found[at]);
    else if (event.key === "Escape") {
      if (open && text) setOpen(false);
      else {
        setText("");
        input.current?.blur();
      }
    } else return;
    event.preventDefault();
    event.stopPropagation();
  };
  const shown = open && text.trim() !== "";
  return (
    <div class="search" ref={box}>
      <input
        ref={input}
        type="search"
        list={undefined}
        placeholder="Search"
        aria-label="Search modules, parameters and operators"
        role="combobox"
        aria-autocomplete="list"
        aria-expanded={shown}
        aria-controls="found"
        aria-activedescendant={shown && found.length ? `found-${at}` : undefined}
        autocomplete="off"
        spellcheck={false}
        value={text}
        onInput={(event) => {
          setText(event.currentTarget.value);
          setAt(0);
          setOpen(true);
        }}
        onFocus={() => setOpen(true)}
        onKeyDown={press}
      />
      <kbd aria-hidden="true">/</kbd>
      <div class="found" hidden={!shown}>
        <div id="found" role="listbox" aria-label="Found">
          {(["module", "leaf", "operator"] as const).map((type) => {
            const some = found.flatMap((one, n) => (one.type === type ? [{ one, n }] : []));
            return some.length ? (
              <div key={type} role="group" aria-label={titles[type]}>
                <p role="presentation">{titles[type]}</p>
                {some.map(({ one, n }) => (
                  <div
                    key={n}
                    id={`found-${n}`}
                    role="option"
                    aria-selected={n === at}
                    class="found-row"
                    onPointerMove={() => setAt(n)}
                    onClick={() => choose(one)}
                  >
                    <bdi>{short(one.name, 64)}</bdi>
                    <span class="soft">
                      <bdi>{short(one.place, 40)}</bdi>
                    </span>
                  </div>
                ))}
              </div>
            ) : null;
          })}
        </div>
        {shown && !found.length && <p class="soft">Nothing is called that.</p>}
        {more > 0 && <p class="soft">{count(more)} more: add a word of the module’s name.</p>}
      </div>
    </div>
  );
}
