/** The words of the page: one meaning each, on hover, in a card, and in the help. */
import type { Tab } from "./view";
import type { Trace } from "./types";

export const rules: Record<Trace["rule"], string> = {
  greedy: "at each value the operator that hands back most gradient, then its largest element",
  edge: "at each value the largest single contribution, over all operators that use it",
  viterbi: "the path with the largest product of derivatives",
};

const MEANING = {
  path: "a way from one element of a parameter to the loss; one is followed for each element, by the rule",
  greedy: rules.greedy + "; not the heaviest path",
  edge: rules.edge + "; not the heaviest path",
  viterbi: rules.viterbi + ": the heaviest path",
  eligible: "elements outside a module that have a path and some way through the module",
  share: "of the eligible elements, those whose path passes the module; a module inside another may have more, as other elements are outside it",
  "by |gradient|": "the same share, but each element counts as much as its |gradient|",
  fork: "an operator that joins branches (a sum, a concatenation, a product), or labelled slices",
  "in series": "every path that could pass the module does, so its share is 100% by definition",
  coverage: "what part of its element's gradient the path carries: its weight over the gradient, with its sign",
  route: "the modules that a path passes, in order; many paths share one",
  unreached: "elements whose gradient is exactly 0: nothing comes to them, or it cancels to 0",
  score: "gradient × input, with its sign: how much a part adds to the number, to first order; all of them add up to the total",
  influence: "of a box or line in the attribution graph: the share of the output that comes through it, sizes without signs",
  "Σ |gradient|": "the sizes of all elements of a gradient, added up",
};

export type Word = keyof typeof MEANING;

/** A word with its meaning on hover. */
export function Term({ of, children }: { of: Word; children?: preact.ComponentChildren }) {
  return (
    <abbr class="term" title={MEANING[of]}>
      {children ?? of}
    </abbr>
  );
}

export function TermList() {
  return (
    <dl class="meanings">
      {Object.entries(MEANING).map(([term, meaning]) => (
        <div>
          <dt>{term}</dt>
          <dd>{meaning}</dd>
        </div>
      ))}
    </dl>
  );
}

export function Terms() {
  return (
    <details class="card full terms" data-testid="terms">
      <summary>What the words mean</summary>
      <TermList />
    </details>
  );
}

/** What a tab shows, in a line. */
const ABOUT: Record<Tab, preact.ComponentChildren> = {
  overview: (
    <>
      For every element of the parameters (or inputs) one <Term of="path" /> was followed from the loss back to it. This
      page says what is wrong, where paths had a choice, and which way they went.
    </>
  ),
  graph: (
    <>
      The operators of the loss, the loss on top; gradient flows down. A wide line carries much of the gradient that
      reaches its lower end. Open a box with a click.
    </>
  ),
  paths: (
    <>
      Choose a parameter, then one of its elements: below is the <Term of="path" /> of that element, step by step from
      the parameter to the loss.
    </>
  ),
  attribution: (
    <>
      What moves one number of the model: from the inputs (left) through heads and modules to the output (right). A line is
      as wide as the <Term of="score" /> that goes along it. Click a box to see the routes through it.
    </>
  ),
  training: <>Influence, loss and time at the traced steps of a training run.</>,
};

export function About({ tab }: { tab: Tab }) {
  return (
    <p class="about" data-testid="about">
      {ABOUT[tab]}
    </p>
  );
}
