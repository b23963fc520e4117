/** What is known of the operator or module that the reader has chosen. */
import { count, counted, number, percent, shape, short } from "../format";
import type { View } from "../view";
import { plain, revealRow } from "./boxes";
import { consumers, producers } from "./fold";

const MANY = 6;

export function Detail(view: View) {
  const { trace, state, go } = view;
  if (state.operator !== null) return <Operator {...view} row={state.operator} />;
  if (state.module === null) return null;
  const module = trace.modules[state.module]!;
  const table = trace.tables[""];
  const at = table ? table.module.indexOf(state.module) : -1;
  return (
    <aside class="detail" aria-label="Chosen module">
      <Head title={module.name || "the model"} close={() => go({ module: null })} />
      <dl>
        <Fact name="Class">{short(module.kind, 60)}</Fact>
        <Fact name="Calls">{count(module.calls)}</Fact>
        <Fact name="Parameters">{count(module.parameters)}</Fact>
        {table && at >= 0 && (
          <>
            <Fact name="Influence">
              {percent(table.share[at]!)}
              {table.error[at]! >= 0 && <span class="soft"> ± {percent(table.error[at]!)}</span>}
            </Fact>
            <Fact name="By |gradient|">{percent(table.weighted[at]!)}</Fact>
            <Fact name="Paths through it">
              {count(table.through[at]!)} of {count(table.eligible[at]!)}
            </Fact>
          </>
        )}
      </dl>
    </aside>
  );
}

function Operator({ trace, state, go, row }: View & { row: number }) {
  const { operators, edges } = trace;
  const module = trace.modules[operators.module[row]!]!;
  const name = (at: number): string => {
    const leaf = trace.leaves[operators.leaf[at]!];
    return leaf ? leaf.name : plain(trace.words[operators.name[at]!]!);
  };
  const visit = (at: number) =>
    go({ operator: at, open: revealRow(trace, state.open, at), views: state.views || operators.view[at] === 1 });
  const list = (ends: ReturnType<typeof consumers>, other: Int32Array) => {
    const found: number[] = [];
    ends.each(row, (edge) => found.push(edge));
    return found.sort((a, b) => edges.mass[b]! - edges.mass[a]!).map((edge) => ({ edge, at: other[edge]! }));
  };
  const above = list(consumers(trace), edges.consumer);
  const below = list(producers(trace), edges.producer);
  const rows = (items: { edge: number; at: number }[], share: boolean) => (
    <ul>
      {items.slice(0, MANY).map(({ edge, at }) => (
        <li key={edge}>
          <button class="link" onClick={() => visit(at)}>
            {short(name(at), 32)}
          </button>
          {share && (
            <span class="meter" aria-hidden="true">
              <span style={{ width: `${100 * Math.min(1, edges.share[edge]! || 0)}%` }} />
            </span>
          )}
          <span class="figure">{share ? percent(edges.share[edge]!) : number(edges.mass[edge]!)}</span>
        </li>
      ))}
      {items.length > MANY && <li class="soft">and {counted(items.length - MANY, "more", "more")}</li>}
    </ul>
  );
  return (
    <aside class="detail" aria-label="Chosen operator">
      <Head title={row === 0 ? `Loss: ${name(row)}` : name(row)} close={() => go({ operator: null })} />
      <dl>
        <Fact name="Module">{short(module.name, 60) || "outside any"}</Fact>
        {module.calls > 1 && <Fact name="Call">{`${count(operators.call[row]! + 1)} of ${count(module.calls)}`}</Fact>}
        <Fact name="Shape">{shape(trace.shapes[operators.shape[row]!]!)}</Fact>
        <Fact name="Σ |gradient|">{number(operators.mass[row]!)}</Fact>
      </dl>
      {above.length > 0 && (
        <>
          <h3>Gradient comes from</h3>
          {rows(above, true)}
        </>
      )}
      {below.length > 0 && (
        <>
          <h3>
            and goes to <span class="soft">Σ |gradient|</span>
          </h3>
          {rows(below, false)}
        </>
      )}
    </aside>
  );
}

function Head({ title, close }: { title: string; close: () => void }) {
  return (
    <header>
      <h2 title={title.slice(0, 500)}>
        {short(title, 60)
          .split(".")
          .flatMap((part, at) => (at ? [".", <wbr key={at} />, part] : [part]))}
      </h2>
      <button class="icon" aria-label="Close details" onClick={close}>
        ×
      </button>
    </header>
  );
}

function Fact({ name, children }: { name: string; children: preact.ComponentChildren }) {
  return (
    <div>
      <dt>{name}</dt>
      <dd>{children}</dd>
    </div>
  );
}
