// @vitest-environment happy-dom
import { render } from "preact";
import { act } from "preact/test-utils";
import { beforeEach, expect, test } from "vitest";
import { App } from "../src/app";
import type { Reason } from "../src/data";
import { Failure } from "../src/failure";
import { brief } from "../src/format";
import { rows } from "../src/tree";
import type { Module, Report } from "../src/types";
import { transformer } from "./models";
import { hostile, HOSTILE, report, small, timing, training } from "./sample";

let box: HTMLElement;
beforeEach(() => {
  document.body.innerHTML = "";
  history.replaceState(null, "", location.href.split("#")[0]!);
  box = document.body.appendChild(document.createElement("div"));
});

const show = (of: Report) => act(() => render(<App report={of} />, box));
const press = (target: Element, key: string) =>
  act(() => void target.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true })));
const items = () => [...box.querySelectorAll('[role="treeitem"]')];
const tree = () => box.querySelector('[role="tree"]')!;
const current = () => document.getElementById(tree().getAttribute("aria-activedescendant")!)!;

test("the tree is walked, opened and closed with the keyboard", async () => {
  await show(small());
  expect(items().map((item) => item.getAttribute("aria-level"))).toEqual(["1", "2", "3", "3", "2"]);
  expect(current().id).toBe("module-0");
  await press(tree(), "ArrowDown");
  expect(current().id).toBe("module-1");
  await press(tree(), "ArrowLeft"); // closes
  expect(current().getAttribute("aria-expanded")).toBe("false");
  expect(items()).toHaveLength(3);
  await press(tree(), "ArrowRight"); // opens
  await press(tree(), "ArrowRight"); // goes in
  expect(current().id).toBe("module-2");
  await press(tree(), "ArrowLeft"); // goes out
  expect(current().id).toBe("module-1");
  await press(tree(), "End");
  expect(current().id).toBe("module-4");
  await press(tree(), "e"); // to the next that begins so
  expect(current().id).toBe("module-1");
  await press(tree(), "Enter");
  expect(current().getAttribute("aria-selected")).toBe("true");
  expect(location.hash).toContain("module=1");
});

test("a share in the tree says of how many elements it is one", async () => {
  const of = small();
  const table = of.traces[0]!.tables[""]!;
  await show(of);
  const shown = items().flatMap((item) => [...item.querySelectorAll(".meter + .figure")]);
  expect(shown.length).toBeGreaterThan(0);
  const texts = [...table.eligible].map((eligible) => `of ${brief(eligible)}`);
  for (const figure of shown) {
    expect(texts).toContain(figure.querySelector("small")!.textContent);
    expect(figure.getAttribute("title")).toMatch(/% of the [\d\s]+ elements outside the module/);
  }
});

test("of 20,000 modules only those in sight are made", async () => {
  const of = report([transformer(2)]);
  const modules: Module[] = of.traces[0]!.modules;
  const parent = modules.length - 1;
  for (let n = 0; n < 20_000; n++)
    modules.push({ name: `many.${n}`, kind: "Linear", parent: n % 2 ? parent : 0, calls: 1, parameters: 1, like: modules.length });
  await show(of);
  expect(items().length).toBeLessThan(100);
  await press(tree(), "End");
  expect(items().length).toBeLessThan(100);
});

test("rows know their place among siblings", () => {
  const list = rows([[1, 3], [2], [], []], new Set([0, 1]));
  expect(list.map(({ module, level, place, siblings, parent }) => [module, level, place, siblings, parent])).toEqual([
    [0, 1, 1, 1, -1],
    [1, 2, 1, 2, 0],
    [2, 3, 1, 1, 1],
    [3, 2, 2, 2, 0],
  ]);
});

test("tabs are gone to with arrows and numbers, and the address follows", async () => {
  await show(small());
  const tab = () => box.querySelector('[role="tab"][aria-selected="true"]')!;
  expect(tab().textContent).toBe("Overview");
  await press(tab(), "ArrowLeft");
  expect(tab().textContent).toBe("Paths");
  await press(document.body, "2");
  expect(tab().textContent).toBe("Graph");
  expect(location.hash).toBe("#tab=graph");
});

test("a report of training alone has one tab and no tree", async () => {
  await show(report([], { training: training(), timing: timing() }));
  expect([...box.querySelectorAll('[role="tab"]')].map((tab) => tab.textContent)).toEqual(["Training"]);
  expect(box.querySelector('[role="tree"]')).toBeNull();
});

test("a report of nothing says so", async () => {
  await show(report([]));
  expect(box.textContent).toContain("Nothing was traced");
});

test("search lists what is inside closed modules, and Enter goes there", async () => {
  await show(report([transformer(12)]));
  const input = box.querySelector<HTMLInputElement>('[role="combobox"]')!;
  await act(() => {
    input.focus();
    input.value = "h.7.attn.k";
    input.dispatchEvent(new Event("input", { bubbles: true }));
  });
  const options = [...box.querySelectorAll('[role="option"]')];
  expect(options[0]!.textContent).toContain("h.7.attn.k");
  expect(input.getAttribute("aria-activedescendant")).toBe(options[0]!.id);
  await press(input, "ArrowDown");
  expect(box.querySelector('[role="option"][aria-selected="true"]')!.id).toBe("found-1");
  await press(input, "ArrowUp");
  await press(input, "Enter");
  expect(location.hash).toMatch(/tab=graph.*module=/);
});

test("hostile names are shown as text", async () => {
  await show(hostile());
  expect(box.querySelector("h1")!.textContent).toContain("</script>");
  expect(box.querySelectorAll("script, img")).toHaveLength(0);
  expect(box.querySelector("h1")!.getAttribute("title")).toBe(HOSTILE);
});

test.each<[Reason, string]>([
  ["empty", "no report in this file"],
  ["damaged", "damaged"],
  ["newer", "newer"],
  ["browser", "too old"],
])("%s data has a page that says what to do", (reason, words) => {
  act(() => render(<Failure reason={reason} detail="the reason" />, box));
  expect(box.querySelector("h1")!.textContent).toContain(words);
  expect(box.textContent).toContain("Reason: the reason.");
});
