// @vitest-environment happy-dom
import { render } from "preact";
import { act } from "preact/test-utils";
import { afterEach, expect, test } from "vitest";
import { Attribution, atFirst, placed, strongest, through } from "../src/attribution";
import { verify } from "../src/data";
import { fresh, fromHash, tabs, toHash } from "../src/state";
import type { Attribution as Graph, Report } from "../src/types";
import { bare, random, small } from "./sample";

/** Two inputs, two heads, a module that only one head reaches, the output. */
function graph(): Graph {
  const node = (name: string, kind: string, rank: number, score: number) => ({ name, kind, label: name, rank, score, influence: Math.abs(score) });
  const edge = (source: number, target: number, score: number) => ({ source, target, score, influence: Math.abs(score) });
  return {
    value: 2, total: 0.4, rule: "gradient", points: 0, defect: 0, whole: [9, 20], kept: [0.9, 0.95],
    nodes: [
      node("a", "input", 0, 0.9), node("b", "input", 0, -0.5),
      node("one", "head", 1, 0.7), node("two", "head", 1, -0.3),
      node("mlp", "module", 2, 0.2), node("output", "output", 3, 0.4),
    ],
    edges: [edge(0, 2, 0.9), edge(2, 5, 0.7), edge(1, 3, -0.5), edge(3, 5, -0.3), edge(2, 4, 0.2), edge(4, 5, 0.1)],
  };
}

const many = (): Graph => {
  const draw = random(3);
  const one = graph();
  const nodes = Array.from({ length: 61 }, (_, n) => ({ ...one.nodes[0]!, name: `n${n}`, rank: Math.floor(n / 10), kind: n < 10 ? "input" : n === 60 ? "output" : "head" }));
  const edges = nodes.flatMap((from, source) => nodes.flatMap((to, target) => (from.rank + 1 === to.rank || (from.rank < to.rank && draw() < 0.1) ? [{ source, target, score: draw() - 0.5, influence: draw() }] : [])));
  return { ...one, nodes, edges: edges.sort((a, b) => b.influence - a.influence) };
};

afterEach(() => {
  for (const box of [...document.body.children]) {
    act(() => render(null, box));
    box.remove();
  }
});

function show(data: Report) {
  const box = document.createElement("div");
  document.body.append(box);
  let state = fromHash("#tab=attribution", data);
  const go = (patch: object): void => {
    state = { ...state, ...patch };
    draw();
  };
  const draw = (): void => void act(() => render(<Attribution report={data} trace={bare()} state={state} go={go} />, box));
  draw();
  const all = (id: string): HTMLElement[] => [...box.querySelectorAll<HTMLElement>(`[data-testid="${id}"]`)];
  return { box, all, state: () => state };
}

const report = (of = graph()): Report => ({ ...small(), attribution: of });

test("the strongest lines are kept, and none ends in the middle", () => {
  const whole = graph();
  expect(strongest(whole, 1)).toEqual(whole.edges);
  expect(strongest(whole, 0.5).map((edge) => [edge.source, edge.target])).toEqual([[0, 2], [2, 5]]);
  expect(strongest(whole, 0.85).map((edge) => [edge.source, edge.target])).toEqual([[0, 2], [2, 5], [1, 3], [3, 5]]);
  expect(strongest(whole, 0).map((edge) => [edge.source, edge.target])).toEqual([[0, 2], [2, 5]]);
});

test("at first there is no more than a reader takes in", () => {
  expect(atFirst(graph())).toBe(100);
  const large = many();
  expect(strongest(large, atFirst(large) / 100).length).toBeLessThanOrEqual(60);
});

test("routes through a node are all that lead to it and all that lead on", () => {
  const { edges } = graph();
  expect([...through(edges, 4)].map((edge) => [edge.source, edge.target])).toEqual([[0, 2], [2, 4], [4, 5]]);
  expect(through(edges, 5).size).toBe(6);
});

test("boxes lie in the columns of their ranks, none covers another or a line that passes", () => {
  for (const whole of [graph(), many()]) {
    const { nodes, bends } = placed(whole, whole.edges);
    const list = [...nodes.values()];
    for (const a of list)
      for (const b of list) {
        if (a.column === b.column && a !== b) expect(Math.abs(a.y - b.y)).toBeGreaterThanOrEqual(30);
        expect(Math.sign(a.column - b.column)).toBe(Math.sign(whole.nodes[a.node]!.rank - whole.nodes[b.node]!.rank));
      }
    for (const [edge, heights] of bends)
      heights.forEach((height, n) => {
        const column = nodes.get(edge.source)!.column + n + 1;
        for (const box of list) if (box.column === column) expect(height < box.y || height > box.y + 30).toBe(true);
      });
  }
});

test("a click lights the routes through a box, and lists its numbers", () => {
  const { box, all, state } = show(report());
  expect(all("box").length).toBe(6);
  expect(all("link").map((link) => Number(link.dataset.score)).sort()).toEqual(graph().edges.map((edge) => edge.score).sort());
  const width = (at: number): number => Number(all("link").find((link) => Number(link.dataset.score) === at)!.getAttribute("stroke-width"));
  expect(width(0.9) / width(-0.5)).toBeCloseTo(0.9 / 0.5);
  expect(box.querySelectorAll(".link.minus").length).toBe(2 + 1); // and the legend's
  act(() => void all("box").find((each) => each.dataset.name === "mlp")!.dispatchEvent(new MouseEvent("click", { bubbles: true })));
  expect(state().node).toBe(4);
  expect(box.querySelectorAll(".link.dim").length).toBe(3);
  expect(all("chosen")[0]!.textContent).toContain("0.2");
});

test("keys move between boxes and choose one", () => {
  const { all, state } = show(report());
  const at = (name: string) => all("box").find((each) => each.dataset.name === name)!;
  const press = (name: string, key: string) => act(() => void at(name).dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true })));
  press("a", "ArrowRight");
  expect((document.activeElement as HTMLElement).dataset.name).toBe("one");
  press("one", "Enter");
  expect(state().node).toBe(2);
  expect(at("one").getAttribute("aria-pressed")).toBe("true");
  press("one", "Escape");
  expect(state().node).toBeNull();
});

test("the slider shows fewer lines, and the address has it", () => {
  const data = report();
  const { all, state } = show(data);
  const slider = all("keep")[0] as HTMLInputElement;
  act(() => {
    slider.value = "50";
    slider.dispatchEvent(new Event("input", { bubbles: true }));
  });
  expect(all("link").length).toBe(2);
  expect(fromHash(toHash(state(), data), data)).toMatchObject({ tab: "attribution", keep: 50 });
});

test("there is a tab only if there is a graph", () => {
  expect(tabs(small())).not.toContain("attribution");
  expect(tabs(report())).toContain("attribution");
  expect(fresh({ ...report(), traces: [] }).tab).toBe("attribution");
  expect(fromHash("#node=99&keep=1000", report())).toMatchObject({ node: null, keep: null });
});

test.each<[string, (of: Graph) => void]>([
  ["an edge out of range", (of) => (of.edges[0]!.target = 9)],
  ["an edge that leads back", (of) => ([of.edges[0]!.source, of.edges[0]!.target] = [2, 0])],
  ["a score that is text", (of) => (of.nodes[0]!.score = "much" as unknown as number)],
  ["no nodes", (of) => (of.nodes = [])],
])("a broken graph is refused: %s", (_, harm) => {
  const broken = report();
  harm(broken.attribution!);
  expect(() => verify(broken)).toThrow(expect.objectContaining({ reason: "damaged" }));
});
