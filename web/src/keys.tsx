/** Help on the words and the keyboard, on `?`. */
import { useEffect, useRef } from "preact/hooks";
import { TermList } from "./terms";

const keys: [string, [string, string][]][] = [
  [
    "Keyboard, everywhere",
    [
      ["/", "search"],
      ["1 – 5", "go to a tab"],
      ["?", "this help"],
      ["Esc", "close what is open"],
    ],
  ],
  [
    "Module tree",
    [
      ["↑ ↓", "move"],
      ["→ ←", "open, close"],
      ["Enter", "select"],
      ["*", "open all siblings"],
    ],
  ],
  [
    "Graph",
    [
      ["↑ ↓ ← →", "move between boxes"],
      ["Enter", "open or close a box, see an operator, go to a parameter’s paths"],
      ["Backspace", "close the box around"],
      ["+ − 0", "zoom in, out, show all"],
      ["Home", "go to the loss"],
      ["Ctrl + wheel", "zoom; the wheel alone moves"],
    ],
  ],
  [
    "Attribution",
    [
      ["↑ ↓ ← →", "move between boxes"],
      ["Enter", "show the routes through a box, or all again"],
      ["Escape", "show all again"],
    ],
  ],
];

export function Keys({ close }: { close: () => void }) {
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    const element = dialog.current!;
    if (!element.open) element.showModal?.();
  }, []);
  return (
    <dialog
      ref={dialog}
      class="keys"
      aria-labelledby="keys-title"
      onClose={close}
      onClick={(event) => event.target === event.currentTarget && event.currentTarget.close()}
    >
      <div>
        <header>
          <h2 id="keys-title">Help</h2>
          <button class="icon" aria-label="Close help" onClick={() => dialog.current?.close()}>
            ×
          </button>
        </header>
        <section>
          <h3>What the words mean</h3>
          <TermList />
        </section>
        {keys.map(([title, list]) => (
          <section key={title}>
            <h3>{title}</h3>
            <dl>
              {list.map(([key, text]) => (
                <div key={key}>
                  <dt>
                    <kbd>{key}</kbd>
                  </dt>
                  <dd>{text}</dd>
                </div>
              ))}
            </dl>
          </section>
        ))}
      </div>
    </dialog>
  );
}
