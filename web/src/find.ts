/** Finds modules, leaves and operators by words in their names, wherever they are hidden. */
import { plain } from "./graph/boxes";
import type { Trace } from "./types";

export interface Found {
  type: "module" | "leaf" | "operator";
  at: number; // into modules, leaves, operators
  name: string;
  place: string; // class, shape or module
}

export interface Results {
  found: Found[];
  more: number; // that are not listed
}

const EACH = { module: 8, leaf: 8, operator: 14 };

/** Every word of the query must be in the name, whatever its case; for operators at least one in their own. */
export function find(trace: Trace, query: string): Results {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean).slice(0, 20);
  if (!words.length) return { found: [], more: 0 };
  const found: Found[] = [];
  let more = 0;
  const keep = (list: { one: () => Found; name: string }[], most: number) => {
    const rank = (name: string) => (name === query.toLowerCase() ? 0 : name.endsWith(words[0]!) ? 1 : name.startsWith(words[0]!) ? 2 : 3);
    list.sort((a, b) => rank(a.name) - rank(b.name)); // stable: else in the model's order
    found.push(...list.slice(0, most).map(({ one }) => one()));
    more += Math.max(0, list.length - most);
  };
  const has = (text: string) => words.every((word) => text.includes(word));

  const names = trace.modules.map((module) => module.name.toLowerCase());
  const modules = trace.modules.flatMap((module, at) =>
    at && has(`${names[at]} ${module.kind.toLowerCase()}`)
      ? [{ name: names[at]!, one: (): Found => ({ type: "module", at, name: module.name, place: module.kind }) }]
      : [],
  );
  keep(modules, EACH.module);

  const leaves = trace.leaves.flatMap((leaf, at) => {
    const name = leaf.names.find((each) => has(each.toLowerCase())) ?? (has(leaf.name.toLowerCase()) ? leaf.name : null);
    return name === null
      ? []
      : [{ name: name.toLowerCase(), one: (): Found => ({ type: "leaf", at, name, place: leaf.shape.join("×") || "scalar" }) }];
  });
  keep(leaves, EACH.leaf);

  // Which words are in an operator's own name, and which in its module's, as bits.
  const bits = (text: string) => words.reduce((sum, word, n) => sum | (text.includes(word) ? 1 << n : 0), 0);
  const own = trace.words.map((word) => bits(`${word} ${plain(word)}`.toLowerCase()));
  const outer = names.map(bits);
  const wanted = (1 << words.length) - 1;
  const { name, module, leaf } = trace.operators;
  const operators: { name: string; one: () => Found }[] = [];
  for (let row = 0; row < name.length; row++) {
    const mine = own[name[row]!]!;
    if (leaf[row]! >= 0 || !mine || (mine | outer[module[row]!]!) !== wanted) continue;
    const word = plain(trace.words[name[row]!]!);
    operators.push({
      name: word.toLowerCase(),
      one: () => ({ type: "operator", at: row, name: word, place: trace.modules[module[row]!]!.name }),
    });
  }
  keep(operators, EACH.operator);
  return { found, more };
}
