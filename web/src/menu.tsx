/** The menu of exports: a button, and what can be saved from where the reader is. */
import { useEffect, useRef, useState } from "preact/hooks";
import { fileName, json, pathCsv, pathData, pathName, save, wholeData } from "./export";
import { looked } from "./paths";
import { find } from "./paths/pick";
import { path, type Path } from "./paths/walk";
import { picture, png, svgText } from "./picture";
import type { View } from "./view";

interface Item {
  id: string;
  label: string;
  more: string;
  run: () => void | Promise<void>;
}

/** The path that is shown, if one is. */
export function current(view: View): Path | null {
  if (view.state.tab !== "paths") return null;
  const { leaf, element } = looked(view);
  const at = view.trace.leaves[leaf];
  if (!at || element === null) return null;
  const found = find(view.trace, at, element);
  return found.kind === "path" ? path(view.trace, at, found.start) : null;
}

/** What is drawn: the panel, or where there is none (the graph) the whole of main. */
const stage = (): Element =>
  document.querySelector("[data-export]") ?? document.querySelector(".sheet") ?? document.querySelector("main") ?? document.body;

function items(view: View): Item[] {
  const name = `${view.report.title}-${view.state.tab}`;
  const found: Item[] = [
    {
      id: "svg",
      label: "This view as SVG",
      more: "drawing",
      run: () => save(svgText(picture(stage())), fileName(name, "svg"), "image/svg+xml"),
    },
    {
      id: "png",
      label: "This view as PNG",
      more: "picture",
      run: async () => save(await png(picture(stage())), fileName(name, "png"), "image/png"),
    },
  ];
  const here = current(view);
  if (here) {
    const of = pathName(here);
    found.push(
      {
        id: "path-json",
        label: "This path as JSON",
        more: `${here.steps.length} steps`,
        run: () => save(json(pathData(view.trace, here)), fileName(of, "json"), "application/json"),
      },
      {
        id: "path-csv",
        label: "This path as CSV",
        more: `${here.steps.length} steps`,
        run: () => save(pathCsv(here), fileName(of, "csv"), "text/csv"),
      },
    );
  }
  found.push({
    id: "json",
    label: "All data as JSON",
    more: "the whole report",
    run: () => save(wholeData(view.report), fileName(view.report.title, "json"), "application/json"),
  });
  return found;
}

export function ExportMenu(view: View) {
  const [open, setOpen] = useState(false);
  const [failed, setFailed] = useState("");
  const box = useRef<HTMLDivElement>(null);
  const button = useRef<HTMLButtonElement>(null);
  useEffect(() => {
    if (!open) return;
    box.current?.querySelector<HTMLElement>('[role="menuitem"]')?.focus();
    const away = (event: Event): void => {
      if (event.target instanceof Node && !box.current?.contains(event.target)) setOpen(false);
    };
    addEventListener("pointerdown", away);
    return () => removeEventListener("pointerdown", away);
  }, [open]);

  const close = (): void => {
    setOpen(false);
    button.current?.focus();
  };
  const keyed = (event: KeyboardEvent): void => {
    const all = [...(box.current?.querySelectorAll<HTMLElement>('[role="menuitem"]') ?? [])];
    const at = all.findIndex((item) => item === document.activeElement);
    const moves: Record<string, number> = {
      ArrowDown: (at + 1) % all.length,
      ArrowUp: (at - 1 + all.length) % all.length,
      Home: 0,
      End: all.length - 1,
    };
    if (event.key === "Escape") {
      event.stopPropagation();
      close();
    }
    if (event.key === "Tab") setOpen(false);
    const to = moves[event.key];
    if (to === undefined) return;
    event.preventDefault();
    all[to]?.focus();
  };
  const run = async (item: Item): Promise<void> => {
    close();
    setFailed("");
    try {
      // The menu is gone before the view is drawn.
      await new Promise((done) => requestAnimationFrame(() => done(null)));
      await item.run();
    } catch {
      setFailed("That could not be saved. This browser does not allow it here.");
    }
  };
  return (
    <div class="menu" ref={box}>
      <button
        ref={button}
        type="button"
        class="menu-button"
        data-testid="export"
        aria-haspopup="menu"
        aria-expanded={open}
        onClick={() => setOpen(!open)}
      >
        Export
      </button>
      {open && (
        <div class="menu-list" role="menu" aria-label="Export" onKeyDown={keyed}>
          {items(view).map((item) => (
            <button
              key={item.id}
              type="button"
              role="menuitem"
              tabIndex={-1}
              data-testid={`export-${item.id}`}
              onClick={() => void run(item)}
            >
              {item.label} <span>{item.more}</span>
            </button>
          ))}
        </div>
      )}
      <p role="alert" class="menu-failed">
        {failed}
      </p>
    </div>
  );
}
