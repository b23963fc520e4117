/** What is known of the operator or module that the reader has chosen. */
import { Brief, findingsOf } from "../diagnosis";
import { count, counted, number, percent, shape, short } from "../format";
import { Term } from "../terms";
import type { Leaf } from "../types";
import type { View } from "../view";
import { inGraph, plain, revealRow } from "./boxes";
import { consumers, producers } from "./fold";

const MANY = 6;

export function Detail(view: View) {
  const { state } = view;
  if (state.operator !== null) return <Operator {...view} row={state.operator} />;
  if (state.module === null) return null;
  return <Module {...view} at={state.module} />;
}

function Module({ trace, state, go, at }: View & { at: number }) {
  const module = trace.modules[at]!;
  const table = trace.tables[""];
  const row = table ? table.module.indexOf(at) : -1;
  const inside = (leaf: Leaf): boolean => {
    for (let up = leaf.module; up >= 0; up = trace.modules[up]!.parent) if (up === at) return leaf.parameter;
    return false;
  };
  const mine = trace.leaves.filter(inside);
  const zero = mine.reduce((sum, leaf) => sum + leaf.zero, 0);
  const verdict = trace.flow.rows.find((each) => each.module === at)?.verdict;
  const forks = (trace.choices ?? []).flatMap((fork) =>
    fork.branches.filter((branch) => branch.module === at && branch[state.by] >= 0).map((branch) => ({ fork, branch })),
  );
  const findings = findingsOf(trace, at);
  const here = inGraph(trace, at);
  return (
    <aside class="detail" aria-label="Chosen module" data-testid="module">
      <Head title={module.name || "the model"} close={() => go({ module: null })} />
      <dl>
        <Fact name="Class">{short(module.kind, 60)}</Fact>
        {here && <Fact name="Calls">{count(module.calls)}</Fact>}
        <Fact name="Parameters">{count(module.parameters)}</Fact>
        {mine.length > 0 ? (
          <>
            <Fact name="‖gradient‖ of them">{number(Math.hypot(...mine.map((leaf) => leaf.norm)))}</Fact>
            <Fact name={<Term of="unreached">Unreached</Term>}>{counted(zero, "element")}</Fact>
          </>
        ) : (
          module.parameters > 0 && <Fact name="Gradient">none comes to them</Fact>
        )}
        {table && row >= 0 && (
          <>
            <Fact name={<Term of="share">Share of paths</Term>}>
              {table.series?.[row] ? <Term of="in series" /> : percent(table.share[row]!)}
              {table.error[row]! >= 0 && <span class="soft"> ± {percent(table.error[row]!)}</span>}
            </Fact>
            <Fact name={<Term of="by |gradient|">By |gradient|</Term>}>{percent(table.weighted[row]!)}</Fact>
            <Fact name="Paths through it">
              {count(table.through[row]!)} of {count(table.eligible[row]!)} <Term of="eligible" />
            </Fact>
          </>
        )}
        {verdict && <Fact name="Flow">{verdict}</Fact>}
      </dl>
      {!here && <p class="soft">It is not in the graph: no gradient passes it.</p>}
      {findings.length > 0 && (
        <>
          <h3>Diagnosis</h3>
          <Brief findings={findings} />
        </>
      )}
      {forks.length > 0 && (
        <>
          <h3>
            As a branch of <Term of="fork">forks</Term>
          </h3>
          <ul>
            {forks.slice(0, MANY).map(({ fork, branch }) => (
              <li key={fork.name}>
                <span>{short(fork.name, 32)}</span>
                <span class="figure" title="of the elements that could take more than one branch there">
                  {percent(branch[state.by])} <small class="soft">there</small>
                </span>
              </li>
            ))}
          </ul>
        </>
      )}
      {state.tab !== "graph" && here && (
        <button class="link" onClick={() => go({ tab: "graph", module: at })}>
          Show in the graph
        </button>
      )}
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

function Fact({ name, children }: { name: preact.ComponentChildren; children: preact.ComponentChildren }) {
  return (
    <div>
      <dt>{name}</dt>
      <dd>{children}</dd>
    </div>
  );
}
