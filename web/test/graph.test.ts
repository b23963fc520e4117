import { describe, expect, test } from "vitest";
import { along, around, boxes, brief, kind, opening, plain, reveal, revealRow } from "../src/graph/boxes";
import { draw, jobs, type Drawing } from "../src/graph/draw";
import { fold, IN, OUT, picked, type Scene } from "../src/graph/fold";
import { arranged } from "../src/graph/layered";
import { layout, ranked, type Arrange } from "../src/graph/layout";
import { fresh } from "../src/state";
import type { Trace } from "../src/types";
import { Draft, scan, shared, transformer } from "./models";
import { bare, hostile, large, small } from "./sample";

const everything = (trace: Trace): number[] => {
  const all = boxes(trace);
  return Array.from(all.parent.keys()).filter((box) => box > 0 && all.parent[box]! >= 0 && all.size[box]! > 0);
};

function drawn(trace: Trace, open: number[], arrange: Arrange, views = false): Drawing {
  const scene = fold(trace, open, views);
  const asked = jobs(trace, scene);
  return draw(scene, asked, layout(asked, arrange));
}

const shown = (scene: Scene): Set<number> => new Set([...scene.levels.values()].flatMap((level) => level.nodes));

describe("boxes", () => {
  test("equal blocks are one fold, and their list is it", () => {
    const trace = transformer(12);
    const all = boxes(trace);
    const list = trace.modules.findIndex((module) => module.name === "h");
    expect(all.repeats[list]).toBe(12);
    expect(brief(trace, list)).toBe("h");
    expect(kind(trace, list)).toBe("Block");
  });

  test("beside others the fold is a box of its own", () => {
    const draft = new Draft();
    const first = draft.module("0");
    for (const name of ["1", "2", "3"]) draft.module(name, 0, first);
    const loss = draft.operator("Mean", 0, []);
    for (let module = 1; module <= 4; module++) draft.operator("Mul", module, [loss]);
    const trace = draft.trace();
    const all = boxes(trace);
    const fold = all.modules + first;
    expect(all.inside[0]).toEqual([fold]);
    expect(all.inside[fold]).toEqual([1, 2, 3, 4]);
    expect(brief(trace, fold)).toBe("0 – 3");
    expect(around(all, 2)).toEqual([fold]);
  });

  test("query, key and value are alike but not folded", () => {
    const trace = transformer(2);
    const all = boxes(trace);
    const attention = trace.modules.findIndex((module) => module.name === "h.0.attn");
    expect(all.inside[attention]!.map((box) => brief(trace, box))).toEqual(["q", "k", "v"]);
  });

  test("the rounds of a loop are folded; views only where they are shown", () => {
    const trace = scan(2, 64);
    const all = boxes(trace);
    const mixer = trace.modules.findIndex((module) => module.name === "layers.1.mixer");
    const open = [...around(all, mixer), mixer];
    const names = (views: boolean) =>
      fold(trace, open, views)
        .levels.get(mixer)!
        .nodes.filter((node) => node < all.parent.length)
        .map((box) => `${brief(trace, box)} ${all.repeats[box]}`);
    expect(names(false).every((name) => name.startsWith("Mul"))).toBe(true);
    expect(names(true).some((name) => name.startsWith("Select"))).toBe(true);
    expect(fold(trace, open, false).levels.get(mixer)!.nodes.length).toBeLessThan(20);
    const loop = fold(trace, open, false).levels.get(mixer)!.nodes.find((node) => node >= 2 * all.modules)!;
    const inner = fold(trace, [...open, loop], false).levels.get(loop)!;
    expect(inner.nodes).toHaveLength(all.repeats[loop]!);
  });

  test("small modules are shown as they are", () => {
    for (const trace of [transformer(12), small().traces[0]!])
      expect(boxes(trace).parent.length).toBe(2 * trace.modules.length);
  });

  test.each([transformer(12), transformer(80), scan(24, 64), large(2000).traces[0]!, small().traces[0]!, bare()])(
    "opens with what fits a screen",
    (trace) => {
      const scene = fold(trace, opening(trace), false);
      expect(shown(scene).size).toBeLessThanOrEqual(60);
      expect(shown(scene).size).toBeGreaterThan(0);
    },
  );

  test("what is revealed is seen", () => {
    const trace = transformer(12);
    const module = trace.modules.findIndex((each) => each.name === "h.7.attn.k");
    expect(shown(fold(trace, [], false)).has(module)).toBe(false);
    expect(shown(fold(trace, reveal(trace, [], module), false)).has(module)).toBe(true);
    const row = trace.operators.module.indexOf(module);
    const scene = fold(trace, revealRow(trace, [], row), false);
    expect(shown(scene).has(scene.base + row)).toBe(true);
  });

  test("a path opens its own boxes only", () => {
    const trace = transformer(12);
    const module = trace.modules.findIndex((each) => each.name === "h.7.mlp");
    const open = along(trace, [trace.operators.module.indexOf(module)]);
    expect(open.map((box) => trace.modules[box]!.name)).toEqual(["h", "h.7", "h.7.mlp"]);
  });
});

describe("folding", () => {
  test("every operator is shown once, by itself or by its box", () => {
    const trace = transformer(4);
    for (const open of [[], opening(trace), everything(trace)]) {
      const scene = fold(trace, open, true);
      const nodes = [...scene.levels.values()].flatMap((level) => level.nodes);
      const each = new Set(nodes);
      expect(each.size).toBe(nodes.length);
      for (let row = 0; row < trace.operators.name.length; row++) expect(each.has(scene.node(row))).toBe(true);
    }
  });

  test("views are folded into what made their value, and shown if asked for", () => {
    const trace = small().traces[0]!;
    const open = everything(trace);
    const folded = fold(trace, open, false);
    const view = trace.operators.view.indexOf(1);
    const maker = trace.edges.producer[trace.edges.consumer.indexOf(view)]!;
    expect(shown(folded).has(folded.base + view)).toBe(false);
    expect(folded.node(view)).toBe(folded.base + maker);
    expect(shown(fold(trace, open, true)).has(folded.base + view)).toBe(true);
  });

  test("gradient is neither lost nor made at any border", () => {
    for (const trace of [transformer(5), shared(), small().traces[0]!])
      for (const views of [true, false])
        for (const open of [[], opening(trace), everything(trace)]) {
          const scene = fold(trace, open, views);
          for (const [box, level] of scene.levels) {
            if (!box) continue;
            const around = scene.levels.get(scene.all.parent[box]!)!;
            const sum = (list: { mass: number }[]) => list.reduce((total, line) => total + line.mass, 0);
            expect(sum(level.lines.filter((line) => line.from === IN))).toBeCloseTo(sum(around.lines.filter((line) => line.to === box)));
            expect(sum(level.lines.filter((line) => line.to === OUT))).toBeCloseTo(sum(around.lines.filter((line) => line.from === box)));
          }
        }
  });

  test("shares of what reaches a node add up to one", () => {
    const scene = fold(transformer(3), everything(transformer(3)), false);
    for (const level of scene.levels.values()) {
      const sums = new Map<number, number>();
      for (const line of level.lines) sums.set(line.to, (sums.get(line.to) ?? 0) + line.share);
      for (const sum of sums.values()) expect(sum).toBeCloseTo(1);
    }
  });

  test("gradients that are not finite do not spread", () => {
    const trace = small().traces[0]!;
    trace.edges.mass.fill(NaN);
    trace.edges.mass[0] = Infinity;
    for (const level of fold(trace, opening(trace), false).levels.values())
      for (const line of level.lines) expect(line.share).toBe(0);
  });

  test("the way of a path is made of lines that are drawn", () => {
    const trace = small().traces[0]!;
    const leaf = trace.leaves.findIndex((each) => each.start.some((start) => start >= 0));
    const { start, element } = trace.leaves[leaf]!;
    const first = start.findIndex((each) => each >= 0);
    const rows = picked(trace, { ...fresh(small()), leaf, element: element[first]! });
    expect(rows[0]).toBe(trace.leaves[leaf]!.operator);
    expect(rows[rows.length - 1]).toBe(0);
    for (const open of [[], everything(trace)]) {
      const drawing = drawn(trace, open, arranged);
      const keys = new Set(drawing.strokes.map((stroke) => stroke.key));
      const ways = rows.slice(1).flatMap((row, at) => drawing.scene.way(row, rows[at]!));
      expect(ways.length).toBeGreaterThan(0);
      for (const way of ways) expect(keys).toContain(way);
    }
  });

  test("elements without a path have none", () => {
    const trace = small().traces[0]!;
    expect(picked(trace, { route: null, leaf: 0, element: null })).toEqual([]);
    expect(picked(trace, { route: null, leaf: 0, element: 1e9 })).toEqual([]);
    expect(picked(trace, { route: 999, leaf: null, element: null })).toEqual([]);
  });
});

describe("layout", () => {
  const kinds: [string, Trace][] = [
    ["a perceptron", small().traces[0]!],
    ["a transformer", transformer(3)],
    ["a scan", scan(2, 12)],
    ["a shared cell", shared()],
    ["hostile names", hostile().traces[0]!],
    ["one operator", bare()],
  ];
  const ways: [string, Arrange][] = [
    ["dagre", arranged],
    ["ranks", ranked],
  ];
  describe.each(kinds)("of %s", (_, trace) => {
    test.each(ways)("by %s: no node covers another, all are inside their box", (_, arrange) => {
      for (const open of [[], opening(trace), everything(trace)]) {
        const drawing = drawn(trace, open, arrange, true);
        let [covered, outside] = [0, 0];
        for (const level of drawing.scene.levels.values()) {
          const places = level.nodes.map((node) => drawing.at.get(node)!);
          const box = drawing.at.get(level.box);
          places.forEach((a, n) => {
            for (const b of places.slice(n + 1)) {
              const apart = a.x + a.width <= b.x || b.x + b.width <= a.x || a.y + a.height <= b.y || b.y + b.height <= a.y;
              if (!apart) covered++;
            }
            const within = !box || (a.x >= box.x && a.y >= box.y && a.x + a.width <= box.x + box.width && a.y + a.height <= box.y + box.height);
            if (!within || !Number.isFinite(a.x + a.y)) outside++;
          });
        }
        expect({ covered, outside }).toEqual({ covered: 0, outside: 0 });
        expect(drawing.strokes.filter((stroke) => /NaN|Infinity|undefined/.test(stroke.path))).toEqual([]);
      }
    });

    test.each(ways)("by %s: lines go on where they cross the border of an open box", (_, arrange) => {
      const drawing = drawn(trace, everything(trace), arrange, true);
      const ends = (path: string): [string, string] => {
        const numbers = path.match(/-?[\d.]+/g)!;
        return [numbers[1]!, numbers[numbers.length - 1]!];
      };
      for (const stroke of drawing.strokes) {
        const [start, end] = ends(stroke.path);
        const box = drawing.at.get(stroke.box);
        if (stroke.from === IN) expect(Number(start)).toBeCloseTo(box!.y, 0);
        if (stroke.to === OUT) expect(Number(end)).toBeCloseTo(box!.y + box!.height, 0);
        if (stroke.from === IN || stroke.to === OUT) continue;
        const to = drawing.at.get(stroke.to)!;
        if (to.open && !stroke.tip) expect(Number(end)).toBeCloseTo(to.y, 0);
      }
    });

    test.each(ways)("by %s: gradient comes down from the loss", (_, arrange) => {
      const drawing = drawn(trace, opening(trace), arrange);
      const loss = drawing.at.get(drawing.scene.node(0))!;
      for (const one of drawing.placed) if (one.depth === 0) expect(one.y).toBeGreaterThanOrEqual(loss.y);
    });
  });

  test("a chain of 30,000 operators in one module is laid out, without dagre", () => {
    const draft = new Draft();
    let last = draft.operator("Mean", 0, []);
    for (let n = 0; n < 30_000; n++) last = draft.operator("Mul", 0, [last]);
    const trace = draft.trace();
    expect(drawn(trace, [], arranged).placed.length).toBeLessThan(5); // as a loop
    const drawing = drawn(trace, everything(trace), arranged);
    const [top, bottom] = [0, 30_000].map((row) => drawing.at.get(drawing.scene.base + row)!);
    expect(bottom!.y).toBeGreaterThan(top!.y);
  });

  test("names of operators lose what says nothing", () => {
    expect(plain("AddmmBackward0")).toBe("Addmm");
    expect(plain("Backward0")).toBe("Backward0");
    expect(plain("matmul")).toBe("matmul");
  });
});
