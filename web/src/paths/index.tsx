/** The explorer: a parameter, one of its elements, and the way its gradient came. */
import { useEffect, useLayoutEffect, useState } from "preact/hooks";
import { count, counted, element as spelt, number, percent, shape, short, unravel } from "../format";
import type { Leaf, Trace } from "../types";
import type { View } from "../view";
import { filtered, find, followed, indexOf, parse, strongest } from "./pick";
import { Picker } from "./picker";
import { Routes } from "./routes";
import { Steps } from "./steps";
import { path, python } from "./walk";

const ROUTES = 8;
const LARGEST = 12;

/** What is looked at: what the reader picked, or else the parameter with the largest gradient. */
export function looked(view: View): { leaf: number; element: number | null } {
  const { trace, state } = view;
  const leaf = state.leaf !== null && trace.leaves[state.leaf] ? state.leaf : first(trace);
  const at = trace.leaves[leaf];
  if (!at) return { leaf, element: null };
  const mine = state.leaf === leaf ? state.element : null;
  const element = mine !== null && mine >= 0 && mine < at.elements ? mine : strongest(at);
  return { leaf, element: element ?? (at.elements > 0 ? 0 : null) };
}

function first(trace: Trace): number {
  let best = filtered(trace.leaves, "")[0] ?? 0;
  const matrix = trace.leaves.some((leaf) => leaf.parameter && leaf.shape.length > 1);
  let most = -1;
  for (const [n, leaf] of trace.leaves.entries()) {
    if (!leaf.parameter || (matrix && leaf.shape.length < 2) || !(leaf.largest > most)) continue;
    [best, most] = [n, leaf.largest];
  }
  return best;
}

export function Paths(view: View) {
  const { trace, go } = view;
  const { leaf: chosen, element } = looked(view);
  const leaf = trace.leaves[chosen];
  if (!leaf) {
    return (
      <div class="sheet paths" data-testid="paths">
        <div class="nothing">
          <h2>No parameters</h2>
          <p>
            Nothing that this loss depends on requires a gradient, so there is no element to start
            from. Check <code>requires_grad</code> of the model’s parameters, and that the forward
            pass was not run under <code>torch.no_grad()</code>.
          </p>
        </div>
      </div>
    );
  }
  const pick = (n: number): void => go({ leaf: n, element: null });
  return (
    <div class="sheet paths" data-testid="paths">
      <div class="grid">
        <section class="card pick">
          <h2>Parameter</h2>
          <Picker trace={trace} leaf={chosen} pick={pick} />
        </section>
        <div class="paths-main">
          <section class="card" data-testid="leaf-card" data-leaf={leaf.name}>
            <Head leaf={leaf} trace={trace} />
            {element === null ? (
              <p class="void">This tensor has no elements ({shape(leaf.shape)}).</p>
            ) : (
              <>
                <Index
                  leaf={leaf}
                  element={element}
                  show={(flat) => go({ leaf: chosen, element: flat })}
                  best={strongest(leaf)}
                />
                <Largest leaf={leaf} element={element} show={(flat) => go({ leaf: chosen, element: flat })} />
              </>
            )}
          </section>
          {element !== null && (
            <section class="card">
              <Result view={view} leaf={leaf} element={element} />
            </section>
          )}
        </div>
        <section class="card ways">
          <h2>Top routes</h2>
          <Routes view={view} most={ROUTES} names={4} />
        </section>
      </div>
    </div>
  );
}

function Head({ leaf, trace }: { leaf: Leaf; trace: Trace }) {
  const others = leaf.names.filter((name) => name !== leaf.name);
  const owner = trace.modules[leaf.module];
  return (
    <>
      <h2 class="leaf-name">
        <bdi class="mono" title={short(leaf.name, 400)}>
          {short(leaf.name, 80)}
        </bdi>
      </h2>
      <p class="soft">
        {leaf.shape.length > 1 ? `${shape(leaf.shape)} = ` : ""}
        {leaf.shape.length ? counted(leaf.elements, "element") : "A single number"}
        {owner?.kind && leaf.parameter ? ` of ${short(owner.kind, 40)}` : ""}
        {leaf.parameter ? "" : ", an input"}. Gradient: norm {number(leaf.norm)}, largest{" "}
        {number(leaf.largest)}
        {leaf.zero > 0
          ? `, exactly 0 at ${counted(leaf.zero, "element")} (${percent(leaf.zero / leaf.elements)})`
          : ", nowhere 0"}
        .
      </p>
      {others.length > 0 && (
        <p class="soft">
          Tied: the same tensor is also called{" "}
          {others.slice(0, 6).map((name, n) => (
            <>
              {n > 0 && ", "}
              <bdi class="mono">{short(name, 60)}</bdi>
            </>
          ))}
          {others.length > 6 && ` and ${count(others.length - 6)} more`}. It is counted once.
        </p>
      )}
    </>
  );
}

function Index({ leaf, element, show, best }: {
  leaf: Leaf;
  element: number;
  show: (element: number) => void;
  best: number | null;
}) {
  const spell = (flat: number): string => unravel(flat, leaf.shape).join(", ");
  const [text, setText] = useState(spell(element));
  const [error, setError] = useState("");
  // At once: an effect that comes after the next frame would undo what was typed by then.
  useLayoutEffect(() => {
    setText(spell(element));
    setError("");
  }, [element, leaf]);
  const submit = (event: Event): void => {
    event.preventDefault();
    const typed = parse(text, leaf.shape);
    if ("error" in typed) setError(typed.error);
    else {
      setError("");
      setText(spell(typed.element));
      show(typed.element);
    }
  };
  return (
    <form class="index" onSubmit={submit} noValidate>
      <label>
        <span>Element</span>
        <input
          data-testid="index"
          value={text}
          inputMode="text"
          autocomplete="off"
          spellcheck={false}
          aria-invalid={error !== ""}
          aria-describedby="index-error"
          placeholder={leaf.shape.map((size) => `0–${size - 1}`).join(", ")}
          onInput={(event) => setText(event.currentTarget.value)}
        />
      </label>
      <button type="submit" class="button" data-testid="index-show">
        Show
      </button>
      {best !== null && best !== element && (
        <button type="button" class="plain-link" data-testid="strongest" onClick={() => show(best)}>
          Largest gradient
        </button>
      )}
      <p id="index-error" class="error" role="alert" data-testid="index-error">
        {error}
      </p>
    </form>
  );
}

/** The elements of the largest gradients, to choose from. */
function Largest({ leaf, element, show }: { leaf: Leaf; element: number; show: (element: number) => void }) {
  const shown = [...leaf.element.keys()].filter((n) => leaf.start[n]! >= 0).slice(0, LARGEST);
  return (
    <ol class="largest" aria-label="Elements of the largest gradients">
      {shown.map((n) => (
        <li key={n}>
          <button
            type="button"
            class="stop"
            data-testid="largest"
            aria-pressed={leaf.element[n] === element}
            onClick={() => show(leaf.element[n]!)}
          >
            <span class="mono">{indexOf(leaf, leaf.element[n]!)}</span> {number(leaf.gradient[n]!)}
          </button>
        </li>
      ))}
    </ol>
  );
}

function Result({ view, leaf, element }: { view: View; leaf: Leaf; element: number }) {
  const { trace } = view;
  const found = find(trace, leaf, element);
  if (found.kind === "path") return <Steps view={view} path={path(trace, leaf, found.start)} />;
  const index = unravel(element, leaf.shape);
  if (found.kind === "none") {
    return (
      <div class="nothing" data-testid="no-path">
        <h3>Element {spelt(index)} has no path</h3>
        <p>
          Every contribution to its gradient is 0, so there is no way to show. An activation that is
          off, a mask, an embedding row that no token used or a factor of 0 does this.
        </p>
      </div>
    );
  }
  const held = followed(trace, leaf);
  return (
    <div class="nothing" data-testid="not-followed">
      <h3>The path of {spelt(index)} is not in this report</h3>
      <p>
        A report holds the paths of some elements: {count(held)} of {count(leaf.elements)} of{" "}
        <bdi class="mono">{short(leaf.name, 60)}</bdi>. This line of Python finds this one:
      </p>
      <Code text={python(leaf, index)} />
    </div>
  );
}

function Code({ text }: { text: string }) {
  const [done, setDone] = useState(false);
  useEffect(() => setDone(false), [text]);
  // A page that was opened as a file, or in a frame, may not be allowed to.
  const copy = (): void => {
    void navigator.clipboard?.writeText(text).then(
      () => setDone(true),
      () => undefined,
    );
  };
  return (
    <div class="code">
      <code data-testid="python">{text}</code>
      <button type="button" class="plain-link" onClick={copy}>
        {done ? "Copied" : "Copy"}
      </button>
    </div>
  );
}
