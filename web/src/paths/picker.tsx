/** Parameters by name: a field to type in, and the list of those that fit. */
import { useEffect, useRef, useState } from "preact/hooks";
import { Dotted } from "../dotted";
import { brief, count, counted, number, shape, short } from "../format";
import type { Leaf, Trace } from "../types";
import { filtered } from "./pick";

const MOST = 150; // drawn at once

export function Picker({ trace, leaf, pick }: {
  trace: Trace;
  leaf: number;
  pick: (leaf: number) => void;
}) {
  const [query, setQuery] = useState("");
  const [active, setActive] = useState<number | null>(null);
  const list = useRef<HTMLUListElement>(null);
  const found = filtered(trace.leaves, query);
  // The one that is picked is always among those drawn.
  const shown = found.slice(0, MOST);
  if (query === "" && !shown.includes(leaf) && found.includes(leaf)) shown.unshift(leaf);
  const at = active === null ? null : Math.min(active, shown.length - 1);

  useEffect(() => {
    const box = list.current;
    const option = box?.querySelector<HTMLElement>(at === null ? '[aria-selected="true"]' : ".active");
    if (!box || !option) return;
    // Only the list scrolls, never the page.
    const [top, bottom] = [option.offsetTop, option.offsetTop + option.offsetHeight];
    if (top < box.scrollTop) box.scrollTop = top;
    else if (bottom > box.scrollTop + box.clientHeight) box.scrollTop = bottom - box.clientHeight;
  }, [at, leaf]);

  const keyed = (event: KeyboardEvent): void => {
    const now = at ?? shown.indexOf(leaf);
    const moves: Record<string, number> = { ArrowDown: now + 1, ArrowUp: now - 1 };
    if (event.target === list.current) Object.assign(moves, { Home: 0, End: shown.length - 1 });
    if (event.key === "Enter" && shown.length) {
      event.preventDefault();
      pick(shown[at ?? 0]!);
      setActive(null);
    }
    const to = moves[event.key];
    if (to === undefined) return;
    event.preventDefault();
    setActive(Math.max(0, Math.min(shown.length - 1, to)));
  };
  const option = at === null || shown.length === 0 ? undefined : `leaf-${shown[at]}`;
  return (
    <div class="picker">
      <input
        type="search"
        data-testid="picker"
        list={undefined}
        role="combobox"
        aria-expanded="true"
        aria-controls="leaves"
        aria-autocomplete="list"
        aria-activedescendant={option}
        aria-label="Parameter"
        placeholder={`Filter ${counted(trace.leaves.length, "parameter")}`}
        autocomplete="off"
        spellcheck={false}
        value={query}
        onInput={(event) => {
          setQuery(event.currentTarget.value);
          setActive(event.currentTarget.value ? 0 : null);
        }}
        onKeyDown={keyed}
      />
      {shown.length === 0 ? (
        <p class="void" id="leaves">
          No parameter’s name holds “{short(query, 30)}”.
        </p>
      ) : (
        <ul
          id="leaves"
          ref={list}
          role="listbox"
          tabIndex={0}
          aria-label="Parameters"
          aria-activedescendant={option}
          onKeyDown={keyed}
        >
          {shown.map((number_, n) => (
            <Option
              key={number_}
              id={number_}
              leaf={trace.leaves[number_]!}
              selected={number_ === leaf}
              active={n === at}
              pick={() => {
                setActive(null);
                pick(number_);
              }}
            />
          ))}
        </ul>
      )}
      {found.length > MOST && (
        <p class="faint">{count(found.length - MOST)} more; type to find them.</p>
      )}
    </div>
  );
}

function Option({ id, leaf, selected, active, pick }: {
  id: number;
  leaf: Leaf;
  selected: boolean;
  active: boolean;
  pick: () => void;
}) {
  const others = leaf.names.filter((name) => name !== leaf.name);
  return (
    <li
      id={`leaf-${id}`}
      role="option"
      data-testid="leaf"
      data-name={leaf.name}
      aria-selected={selected}
      class={active ? "active" : ""}
      onClick={pick}
      title={short([leaf.name, ...others].join(" = "), 400)}
    >
      <Dotted name={leaf.name} most={60} />
      <span class="faint">
        {shape(leaf.shape)} · {brief(leaf.elements)} · ‖g‖ {number(leaf.norm, 2)}
        {leaf.parameter ? "" : " · input"}
      </span>
      {others.length > 0 && (
        <span class="faint">
          tied: <bdi>{others.slice(0, 2).map((name) => short(name, 40)).join(", ")}</bdi>
          {others.length > 2 ? ` and ${count(others.length - 2)} more` : ""}
        </span>
      )}
    </li>
  );
}
