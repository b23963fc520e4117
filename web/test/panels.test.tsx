// @vitest-environment happy-dom
import { render } from "preact";
import { act } from "preact/test-utils";
import { afterEach, describe, expect, test } from "vitest";
import { Overview } from "../src/overview";
import { Paths } from "../src/paths";
import { find } from "../src/paths/pick";
import { path } from "../src/paths/walk";
import { Training } from "../src/training";
import type { Finding, Report } from "../src/types";
import type { State, View } from "../src/view";
import { bare, finding, hostile, HOSTILE, large, report, small, timing, training } from "./sample";

const start: State = {
  tab: "paths",
  open: [],
  module: null,
  operator: null,
  leaf: null,
  element: null,
  route: null,
  by: "share",
  views: false,
  query: "",
  node: null,
  keep: null,
};

/** A panel in a page that remembers where it was sent. */
function show(Panel: (view: View) => preact.ComponentChild, data: Report, at: Partial<State> = {}) {
  const box = document.createElement("div");
  document.body.append(box);
  let state: State = { ...start, ...at };
  const draw = (): void => {
    const view: View = { report: data, trace: data.traces[0] ?? bare(), state, go };
    act(() => render(<Panel {...view} />, box));
  };
  const go = (patch: Partial<State>): void => {
    state = { ...state, ...patch };
    draw();
  };
  draw();
  const all = (id: string): HTMLElement[] => [...box.querySelectorAll<HTMLElement>(`[data-testid="${id}"]`)];
  return { box, all, one: (id: string) => all(id)[0]!, state: () => state };
}

const click = (at: HTMLElement): void => void act(() => at.click());
const type = (at: HTMLElement, text: string): void =>
  void act(() => {
    (at as HTMLInputElement).value = text;
    at.dispatchEvent(new Event("input", { bubbles: true }));
  });
const press = (at: HTMLElement, key: string): void =>
  void act(() => void at.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true })));

afterEach(() => {
  for (const box of [...document.body.children]) {
    act(() => render(null, box));
    box.remove();
  }
});

describe("paths", () => {
  test("steps carry the numbers of the path in full", () => {
    const data = small();
    const net = data.traces[0]!;
    const { all, one } = show(Paths, data, { leaf: 2, element: 5 });
    const found = find(net, net.leaves[2]!, 5);
    const wanted = path(net, net.leaves[2]!, found.kind === "path" ? found.start : -1);
    const rows = all("step");
    expect(rows.map((row) => Number(row.dataset.derivative))).toEqual(wanted.steps.map((s) => s.derivative));
    expect(rows.map((row) => Number(row.dataset.gradient))).toEqual(wanted.steps.map((s) => s.gradient));
    expect(rows.map((row) => row.dataset.operator)).toEqual([
      "leaf",
      "TBackward0",
      "AddmmBackward0",
      "ReluBackward0",
      "AddmmBackward0",
      "PowBackward0",
      "MeanBackward0",
    ]);
    expect(Number(one("path-weight").dataset.value)).toBe(wanted.weight);
  });

  test("an index is typed, a wrong one is told", () => {
    const { one, state, all } = show(Paths, small(), { leaf: 2, element: 0 });
    const form = one("index").closest("form")!;
    type(one("index"), "3, 2");
    act(() => form.requestSubmit());
    expect(state().element).toBe(14);
    expect(all("step")[0]!.dataset.element).toBe("3,2");
    type(one("index"), "8, 0");
    act(() => form.requestSubmit());
    expect(one("index-error").textContent).toContain("0 to 7");
    expect(state().element).toBe(14);
  });

  test("a parameter is found by name with the keyboard", () => {
    const { one, all, state } = show(Paths, small());
    type(one("picker"), "0.bi");
    expect(all("leaf").map((leaf) => leaf.dataset.name)).toEqual(["encoder.0.bias"]);
    expect(one("leaf").textContent).toContain("tied: tied.bias");
    press(one("picker"), "Enter");
    expect(state().leaf).toBe(3);
  });

  test("a tied parameter is found by its other name, and listed once", () => {
    const { one, all } = show(Paths, small());
    type(one("picker"), "tied");
    expect(all("leaf").map((leaf) => leaf.dataset.name)).toEqual(["encoder.0.bias"]);
  });

  test("an element that was not followed comes with a line of Python", () => {
    const { one } = show(Paths, small({ skip: 5 }), { leaf: 2, element: 4 });
    expect(one("python").textContent).toBe('trace.path("encoder.0.weight", (1, 0))');
    click(one("largest"));
    expect(one("path")).toBeTruthy();
  });

  test("an element without a path says why", () => {
    const { one } = show(Paths, small(), { leaf: 2, element: 31 });
    expect(one("no-path").textContent).toContain("Every contribution to its gradient is 0");
  });

  test("a route leads to the graph, its example to a path", () => {
    const { all, state } = show(Paths, small());
    click(all("route-example")[1]!);
    expect(state()).toMatchObject({ tab: "paths", route: 1 });
    click(all("route")[1]!);
    expect(state()).toMatchObject({ tab: "graph", route: 1 });
  });

  test("of long paths the middle waits", () => {
    const data = large(1000, 4);
    const last = data.traces[0]!.leaves.length - 1;
    const { all, one } = show(Paths, data, { leaf: last });
    expect(all("step").length).toBe(120);
    click(one("all-steps"));
    expect(all("step").length).toBe(620);
    const ends = all("step").map((row) => row.dataset.operator);
    expect([ends[0], ends.at(-1)]).toEqual(["leaf", "MeanBackward0"]);
  });

  test("no parameters, no elements", () => {
    expect(show(Paths, report([bare()])).box.textContent).toContain("No parameters");
    const data = small();
    Object.assign(data.traces[0]!.leaves[0]!, { element: new Int32Array(), gradient: new Float64Array(), start: new Int32Array(), elements: 0, shape: [0, 8], zero: 0 });
    expect(show(Paths, data, { leaf: 0 }).box.textContent).toContain("no elements (0×8)");
  });
});

describe("overview", () => {
  test("it says how much is reached, what is dead, what is influential", () => {
    const { box, all, one, state } = show(Overview, small());
    expect(box.querySelector("h2")!.textContent).toBe("Gradient reaches 88.1% of 67 elements in 4 parameters.");
    expect(one("findings").textContent).toContain("passes nothing on");
    expect(all("influence")[0]!.dataset.name).toBe("head");
    expect(one("unreached").textContent).toContain("4 of 32");
    click(all("influence")[0]!.querySelector("button")!);
    expect(state()).toMatchObject({ tab: "graph", module: 4 });
  });

  test("long names break at their dots", () => {
    const name = show(Paths, small()).all("leaf").find((each) => each.dataset.name === "head.bias")!;
    expect(name.querySelector("bdi")!.textContent).toBe("head.bias");
    expect(name.querySelectorAll("wbr").length).toBe(1);
  });

  test("it leads with a diagnosis, worst first, each with its module", () => {
    const data = small();
    const note: Finding = { ...finding(), severity: "note", module: -1, place: "", line: "" };
    data.traces[0]!.diagnosis = { findings: [finding(), note], remarks: ["the rest is fine"] };
    const { box, all, one, state } = show(Overview, data);
    expect(box.querySelector("h2")!.textContent).toBe("Something is wrong: 1 error.");
    expect(all("finding").map((each) => each.querySelector(".severity")!.textContent)).toEqual(["Error", "Note"]);
    expect(all("line").map((each) => each.textContent)).toEqual(["net.py:3: return x.detach()"]);
    expect(one("lead").textContent).toContain("What to do: leave it out.");
    expect(one("lead").textContent).toContain("the rest is fine");
    expect(all("finding")[1]!.querySelector("button")).toBeNull();
    click(all("finding")[0]!.querySelector("button")!);
    expect(state()).toMatchObject({ tab: "graph", module: 4 });
    expect(one("module").textContent).toContain("output detached");
  });

  test("a diagnosis that found nothing says so", () => {
    const data = small();
    data.traces[0]!.diagnosis = { findings: [], remarks: [] };
    expect(show(Overview, data).box.querySelector("h2")!.textContent).toBe("The diagnosis found nothing wrong.");
  });

  test("it leads with findings and choices, says what is in series and what the words mean", () => {
    const data = small();
    const mine = data.traces[0]!;
    const branch = (name: string, share: number, module = -1) => ({
      name, module, elements: 8 * share, share, weighted: 1 - share, error: NaN,
    });
    mine.choices = [
      { name: "body.add", module: 1, branches: [branch("skip", 0.25), branch("body", 0.75, 1)] },
      { name: "never", module: -1, branches: [branch("a", 0), branch("b", 0)] },
    ];
    const table = mine.tables[""]!;
    table.series = Uint8Array.from(table.name, (name) => (name === "head" ? 1 : 0));
    mine.coverage = { median: 0.2, lower: 0, upper: 1, opposite: 0, cancelled: 0, elements: 9, words: ["A path carries 20%"] };
    const { box, all, one, state } = show(Overview, data);
    const heads = [...box.querySelectorAll("h2")].map((each) => each.textContent);
    expect(heads.slice(1, 3)).toEqual(["Findings", "Where gradient had a choice"]);
    expect([...box.querySelectorAll("abbr")].every((each) => each.title.length > 20)).toBe(true);
    expect([...box.querySelectorAll("abbr")].map((each) => each.textContent)).toContain("fork");
    expect(all("fork").map((each) => each.dataset.name)).toEqual(["body.add"]);
    expect(all("branch").map((each) => each.dataset.name)).toEqual(["body", "skip"]);
    expect(one("branch").textContent).toContain("75");
    expect(one("series").textContent).toContain("head");
    expect(all("influence").map((each) => each.dataset.name)).not.toContain("head");
    expect(one("coverage").textContent).toBe("A path carries 20%");
    for (const word of ["greedy", "edge", "viterbi", "share", "eligible", "coverage"])
      expect(one("terms").textContent).toContain(word);
    expect(box.textContent).not.toContain("carried the most");
    click(one("branch").querySelector("button")!);
    expect(state()).toMatchObject({ tab: "graph", module: 1 });
  });

  test("a chosen module is shown with what is known of it", () => {
    const data = small();
    const mine = data.traces[0]!;
    mine.choices = [
      { name: "body.add", module: 1, branches: [{ name: "body", module: 1, elements: 6, share: 0.75, weighted: 0.25, error: NaN }] },
    ];
    const { all, one, state } = show(Overview, data, { module: 1 });
    const text = one("module").textContent!;
    expect(text).toContain(mine.modules[1]!.kind);
    expect(text).toContain("body.add75");
    expect(text).toContain("Unreached");
    click(one("module").querySelector("header button")!);
    expect(state().module).toBe(null);
    expect(all("module")).toEqual([]);
  });

  test("too many forks are not listed", () => {
    const { one } = show(Overview, small());
    expect(one("choices").textContent).toContain("too many places");
  });

  test("an empty trace is no error", () => {
    const { box } = show(Overview, report([bare()]));
    expect(box.textContent).toContain("reaches no parameter");
    expect(box.textContent).toContain("no modules to rank");
  });
});

describe("training", () => {
  const data = report([], { training: training(), timing: timing() });

  test("eight lines at first; others can be picked when there is room", () => {
    const { all, box } = show(Training, data);
    const boxes = (): HTMLInputElement[] => all("component") as HTMLInputElement[];
    expect(boxes().filter((one) => one.checked).length).toBe(8);
    expect(boxes().filter((one) => one.disabled).length).toBe(6);
    click(boxes()[0]!);
    expect(boxes().filter((one) => one.disabled).length).toBe(0);
    expect(box.querySelectorAll(".curves li").length).toBe(7 + 1 + 3);
  });

  test("the arrow keys read values, the table has them all", () => {
    const { box } = show(Training, data);
    const slider = box.querySelector<HTMLElement>('[role="slider"]')!;
    press(slider, "End");
    expect(slider.getAttribute("aria-valuetext")).toContain("step 5\u202f900");
    expect(slider.getAttribute("aria-valuetext")).toContain("loss 0.");
  });

  test("running, cost, verdict", () => {
    const { one } = show(Training, data);
    expect(one("training-status").textContent).toContain("Training goes on, or was stopped");
    expect(one("training-status").textContent).toContain("2.1% of training time");
    expect(one("verdict").textContent).toContain("Slows down");
  });

  test("nothing yet, nothing known", () => {
    const empty = { ...training(0, 0), cost: NaN, running: true };
    const short = { ...timing(0), grows: null, slope: NaN, low: NaN, high: NaN };
    const { box } = show(Training, report([], { training: empty, timing: short }));
    expect(box.textContent).toContain("No step has been traced yet");
    expect(box.textContent).toContain("not known");
    expect(box.textContent).toContain("Cannot tell");
    expect(show(Training, small()).box.textContent).toContain("No training here");
  });

  test("one step is a point", () => {
    const { box } = show(Training, report([], { training: training(1, 2) }));
    expect(box.querySelectorAll(".chart circle").length).toBe(3);
  });
});

test("hostile names are text", () => {
  const data = hostile();
  data.training = { ...training(5, 3), components: [HOSTILE, "x".repeat(10_000), "a"] };
  data.timing = { ...timing(), verdict: HOSTILE };
  for (const Panel of [Overview, Paths, Training]) {
    const { box } = show(Panel, data);
    expect(box.querySelector("script, img")).toBeNull();
    expect(box.textContent).toContain("</script><script>");
    expect(box.textContent!.length).toBeLessThan(20_000);
  }
});
