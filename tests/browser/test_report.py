"""The report in a real browser: what a reader does, without a network."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import gradtrace as gt
from gradtrace.paths.paths import Path as Found

from . import pages
from .conftest import DESK, PHONE, Opener, Visit

TABS = ("overview", "graph", "paths")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="session")
def network(folder: Path) -> pages.Made:
    return pages.network(folder)


@pytest.fixture(scope="session")
def hostile(folder: Path) -> pages.Made:
    return pages.hostile(folder)


@pytest.fixture(scope="session")
def attributed(folder: Path) -> tuple[Path, Any]:
    return pages.attributed(folder)


@pytest.fixture(scope="session")
def broken(folder: Path) -> tuple[Path, Any]:
    return pages.broken(folder)


@pytest.fixture(scope="session")
def run(folder: Path) -> Path:
    return pages.run(folder)


def element(path: Found) -> str:
    return ",".join(map(str, path.index))


def shown(visit: Visit) -> list[dict[str, str]]:
    """The steps of the path that is on the page."""
    steps: list[dict[str, str]] = visit.page.get_by_test_id("step").evaluate_all(
        "rows => rows.map(row => ({...row.dataset}))"
    )
    return steps


def is_at(visit: Visit, index: tuple[int, ...]) -> bool:
    """Whether the page shows the path of this element."""
    steps = shown(visit)
    return bool(steps) and steps[0]["element"] == ",".join(map(str, index))


def same(steps: list[dict[str, str]], path: Found) -> None:
    """The page shows this path, to the last digit."""
    assert len(steps) == len(path.steps)
    for row, step in zip(steps, path.steps):
        assert row["element"] == ",".join(map(str, step.index))
        assert row["module"] == step.module
        assert float(row["derivative"]) == step.derivative
        assert float(row["gradient"]) == step.gradient
        assert math.isclose(float(row["share"]), step.share, rel_tol=1e-6)


def pick(visit: Visit, name: str, index: str) -> None:
    """Choose an element as a reader would: by the leaf's name and its index."""
    visit.page.get_by_test_id("picker").fill(name)
    visit.page.locator(f"[data-testid=leaf][data-name='{name}']").click()
    box = visit.page.get_by_test_id("index")
    box.fill(index)
    box.press("Enter")


WIDE, NARROW = (1400, 900), (420, 900)
WINDOWS = pytest.mark.parametrize(
    ("size", "dark"),
    [(WIDE, False), (WIDE, True), (NARROW, False), (NARROW, True)],
    ids=["wide-light", "wide-dark", "narrow-light", "narrow-dark"],
)


def accessible(visit: Visit, size: tuple[int, int]) -> None:
    """The page has no fault that axe knows, and is not wider than its window."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    found = axe.Axe().run(visit.page).response["violations"]
    assert [(v["id"], [n["html"][:200] for n in v["nodes"][:3]]) for v in found] == []
    assert visit.width() <= size[0]


# Opening -----------------------------------------------------------------------------------------


def test_it_opens_on_what_the_trace_says(network: pages.Made, look: Opener) -> None:
    visit = look(network.file)
    page = visit.go()
    assert "a network" in page.title()
    assert page.get_by_test_id("findings").inner_text().strip()
    shares = network.trace.influence()
    for row in page.get_by_test_id("influence").all():
        name, value = row.get_attribute("data-name"), row.get_attribute("data-value")
        assert name is not None and value is not None
        assert float(value) == pytest.approx(shares[name].share, abs=1e-12)
    assert page.get_by_test_id("route").count() > 0
    divided = network.trace.influence("forks").shares
    for fork in page.get_by_test_id("fork").all():
        for branch in fork.get_by_test_id("branch").all():
            share = float(branch.get_attribute("data-value") or "nan")
            name = f"{fork.get_attribute('data-name')}/{branch.get_attribute('data-name')}"
            assert share == pytest.approx(divided[name], abs=1e-12)
    visit.shot("overview")


@pytest.mark.parametrize("tab", TABS)
@pytest.mark.parametrize(
    ("size", "dark"),
    [
        pytest.param(DESK, False, id="light-desk"),
        pytest.param(PHONE, True, id="dark-phone"),
        pytest.param(DESK, True, id="dark-desk", marks=pytest.mark.thorough),
        pytest.param(PHONE, False, id="light-phone", marks=pytest.mark.thorough),
    ],
)
def test_every_tab_is_accessible(
    tab: str, size: tuple[int, int], dark: bool, network: pages.Made, look: Opener
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    visit = look(network.file, size, dark)
    page = visit.go(f"tab={tab}")
    if tab == "paths":
        pick(visit, "first.weight", "1, 2")
    visit.shot(f"{tab}-{'phone' if size == PHONE else 'desk'}-{'dark' if dark else 'light'}")
    found = axe.Axe().run(page).response["violations"]
    told = [(v["id"], [n["html"][:200] for n in v["nodes"][:3]]) for v in found]
    assert told == []


def test_a_phone_shows_all_without_scrolling_sideways(network: pages.Made, look: Opener) -> None:
    visit = look(network.file, PHONE)
    visit.go()
    for tab in TABS:
        visit.tab(tab)
        assert visit.width() <= PHONE[0], tab
    visit.tab("graph")
    visit.page.locator(".drawer-button").click()
    visit.page.locator("#module-0").wait_for()
    assert visit.width() <= PHONE[0]


def test_search_and_the_measure_of_the_tree_can_be_clicked_on_a_narrow_page(
    network: pages.Made, look: Opener
) -> None:
    visit = look(network.file, NARROW)
    page = visit.go()
    for tab in TABS:
        visit.tab(tab)
        search = page.get_by_role("combobox", name="Search")
        search.click()
        search.fill("wide")
        page.locator("#found-0").click()
        visit.until(lambda: page.locator("#found-0").count() == 0)
        page.locator(".drawer-button").click()
        for name in ("|Gradient|", "Elements"):
            button = page.get_by_role("button", name=name, exact=True)
            button.click()
            visit.until(lambda button=button: button.get_attribute("aria-pressed") == "true")
        page.keyboard.press("Escape")
        assert visit.width() <= NARROW[0]


def test_a_place_can_be_sent_to_others(network: pages.Made, look: Opener) -> None:
    """All of the reader's place is in the address; back and forward work."""
    visit = look(network.file)
    page = visit.go()
    visit.tab("paths")
    pick(visit, "first.weight", "1, 2")
    visit.until(lambda: is_at(visit, (1, 2)))
    there, address = shown(visit), page.evaluate("location.hash")
    page.go_back()
    visit.until(lambda: shown(visit) != there)
    page.go_forward()
    visit.until(lambda: shown(visit) == there)
    other = look(network.file)
    other.go(address.removeprefix("#"))
    other.page.get_by_test_id("step").first.wait_for()
    assert shown(other) == there


# The diagnosis -----------------------------------------------------------------------------------


def test_it_leads_with_what_is_wrong(broken: tuple[Path, Any], look: Opener) -> None:
    file, diagnosis = broken
    visit = look(file)
    page = visit.go()
    assert "2 errors" in page.get_by_test_id("lead").locator("h2").inner_text()
    found = page.get_by_test_id("finding").all()
    assert len(found) == len(diagnosis.findings) > 0
    for row, wanted in zip(found, diagnosis.findings):
        said = row.inner_text()
        assert row.get_attribute("data-module") == wanted.module
        for words in (wanted.title[1:], wanted.evidence, wanted.advice):
            assert words in said
        assert row.get_by_test_id("line").count() == bool(wanted.line)
    assert "self.memory(x).detach()" in found[0].get_by_test_id("line").inner_text()
    visit.shot("diagnosis")


def test_a_finding_leads_to_its_module(broken: tuple[Path, Any], look: Opener) -> None:
    file, _ = broken
    visit = look(file)
    page = visit.go()
    assert page.locator(".tree .mark").count() == 2
    page.locator("[data-testid=finding][data-module=memory] button").press("Enter")
    card = page.get_by_test_id("module")
    card.wait_for()
    assert "It is not in the graph" in card.inner_text() and "detached" in card.inner_text()
    assert page.locator("#tab-graph").get_attribute("aria-selected") == "true"
    assert page.locator("#module-" + page.url.partition("module=")[2]).get_attribute(
        "aria-selected"
    )


@WINDOWS
def test_a_diagnosis_is_accessible(
    size: tuple[int, int], dark: bool, broken: tuple[Path, Any], look: Opener
) -> None:
    visit = look(broken[0], size, dark)
    for place in ("", "tab=graph&module=1")[: 2 if dark == (size == NARROW) else 1]:
        visit.go(place)
        accessible(visit, size)


# The attribution graph ---------------------------------------------------------------------------


def box(page: Any, name: str) -> Any:
    return page.locator(f"[data-testid=box][data-name='{name}']")


def test_a_graph_shows_its_scores(attributed: tuple[Path, Any], look: Opener) -> None:
    file, graph = attributed
    visit = look(file)
    page = visit.go("tab=attribution&keep=100")
    assert page.get_by_test_id("box").count() == len(graph["nodes"])
    shown = [float(each.get_attribute("data-score")) for each in page.get_by_test_id("link").all()]
    assert sorted(shown) == sorted(edge["score"] for edge in graph["edges"])
    most = max(map(abs, shown))
    for link in page.get_by_test_id("link").all():
        score, width = (float(link.get_attribute(key)) for key in ("data-score", "stroke-width"))
        assert width == pytest.approx(max(1, 9 * abs(score) / most))
        assert ("minus" in link.get_attribute("class")) == (score < 0)
        assert "score" in link.locator("title").text_content()
    left, right = (box(page, name).bounding_box()["x"] for name in ("words[0,0]", "output"))
    assert left < right
    visit.shot("attribution")


def test_a_box_shows_its_routes(attributed: tuple[Path, Any], look: Opener) -> None:
    file, graph = attributed
    visit = look(file)
    page = visit.go("tab=attribution&keep=100")
    box(page, "words[0,1]").click()
    listed = page.get_by_test_id("chosen")
    listed.wait_for()
    mine = [edge for edge in graph["edges"] if edge["source"] == "words[0,1]"]
    assert listed.locator("tbody tr").count() == min(8, len(mine))
    assert page.locator("[data-testid=link].dim").count() > 0
    assert "node=" in page.evaluate("location.hash")
    page.get_by_text("Show all routes").click()
    visit.until(lambda: page.locator("[data-testid=link].dim").count() == 0)


def test_the_graph_works_with_keys_alone(attributed: tuple[Path, Any], look: Opener) -> None:
    visit = look(attributed[0])
    page = visit.go("tab=attribution&keep=100")
    many = page.get_by_test_id("link").count()
    slider = page.get_by_test_id("keep")
    slider.focus()
    for _ in range(40):
        page.keyboard.press("ArrowLeft")
    visit.until(lambda: 0 < page.get_by_test_id("link").count() < many)
    assert slider.get_attribute("aria-valuetext") == "60% of the stored influence"
    page.keyboard.press("Tab")
    assert "attribution-canvas" in page.evaluate("document.activeElement.getAttribute('class')")
    page.keyboard.press("Tab")
    first = page.evaluate("document.activeElement.getAttribute('data-name')")
    page.keyboard.press("ArrowRight")
    second = page.evaluate("document.activeElement.getAttribute('data-name')")
    assert first and second and first != second
    page.keyboard.press("Enter")
    assert box(page, second).get_attribute("aria-pressed") == "true"
    page.keyboard.press("Escape")
    assert box(page, second).get_attribute("aria-pressed") == "false"


@WINDOWS
def test_the_attribution_tab_is_accessible(
    size: tuple[int, int], dark: bool, attributed: tuple[Path, Any], look: Opener
) -> None:
    visit = look(attributed[0], size, dark)
    page = visit.go("tab=attribution&keep=100&node=1")
    accessible(visit, size)
    assert "What moves one number" in page.get_by_test_id("about").inner_text()


@pytest.mark.parametrize("wide", [1700, WIDE[0], NARROW[0]])
def test_a_wide_graph_shrinks_or_scrolls_inside_its_box(
    wide: int, folder: Path, look: Opener
) -> None:
    file, graph = pages.attributed(folder, layers=2)
    visit = look(file, (wide, 900))
    page = visit.go("tab=attribution&keep=100")
    columns = len({node["rank"] for node in graph["nodes"]})
    assert columns > 7 and visit.width() <= wide
    canvas, drawn = page.locator(".attribution-canvas"), page.locator(".attribution-canvas > svg")
    inside, whole = (canvas.evaluate(f"each => each.{key}Width") for key in ("client", "scroll"))
    scale = drawn.bounding_box()["width"] / float(drawn.get_attribute("width") or "nan")
    assert 0.75 <= round(scale, 3) <= 1
    if wide == 1700:
        assert whole <= inside and scale < 1
    else:
        assert whole > inside and (wide == WIDE[0] or scale == 1)
    box(page, "output").click()  # which scrolls there
    page.get_by_test_id("chosen").wait_for()
    at = box(page, "output").bounding_box()
    edges = canvas.bounding_box()
    assert edges["x"] <= at["x"] and at["x"] + at["width"] <= edges["x"] + edges["width"] + 1
    assert visit.width() <= wide


# Words -------------------------------------------------------------------------------------------


@WINDOWS
def test_words_have_their_meaning_on_hover_and_in_the_help(
    size: tuple[int, int], dark: bool, network: pages.Made, look: Opener
) -> None:
    visit = look(network.file, size, dark)
    page = visit.go()
    page.get_by_label("Help", exact=True).click()
    entries = page.locator("dialog .meanings > div")
    assert entries.count() > 10
    told = {row.locator("dd").inner_text() for row in entries.all()}
    assert entries.first.is_visible()
    accessible(visit, size)
    page.keyboard.press("Escape")
    for tab in TABS:
        visit.tab(tab)
        words = page.locator("abbr.term")
        assert words.count() > 0, tab
        assert {word.get_attribute("title") for word in words.all()} <= told
        if tab == "overview":
            page.locator("abbr.term:visible").first.hover()


# The graph and the tree --------------------------------------------------------------------------


def nodes(visit: Visit) -> int:
    return visit.page.locator(".canvas [data-node]").count()


def test_modules_open_and_close(network: pages.Made, look: Opener) -> None:
    visit = look(network.file)
    page = visit.go("tab=graph")
    before = nodes(visit)
    page.get_by_text("×4").first.wait_for()  # equal blocks are folded
    page.keyboard.press("Escape")
    box = page.locator(".canvas [data-node]", has_text="×4").first
    box.click()
    visit.ready()
    visit.until(lambda: nodes(visit) > before)
    visit.shot("graph-open")


def test_search_reaches_inside_closed_modules(network: pages.Made, look: Opener) -> None:
    visit = look(network.file)
    page = visit.go("tab=graph")
    inside = page.locator(".canvas [data-node]", has_text="Tanh")
    assert inside.count() == 0
    page.keyboard.press("/")
    page.keyboard.type("blocks.3.inner.1")
    page.locator("#found-0").wait_for()
    page.keyboard.press("Enter")
    visit.ready()
    page.locator(".canvas .chosen").first.wait_for()
    assert inside.count() > 0


def test_search_finds_parameters(network: pages.Made, look: Opener) -> None:
    visit = look(network.file)
    page = visit.go()
    page.keyboard.press("/")
    page.keyboard.type("blocks.3.inner.2.weight")
    page.locator("#found-0").wait_for()
    page.keyboard.press("Enter")
    page.get_by_test_id("step").first.wait_for()
    index = tuple(map(int, shown(visit)[0]["element"].split(",")))
    same(shown(visit), network.trace.path("blocks.3.inner.2.weight", index))


def test_a_long_graph_draws_only_what_is_seen(folder: Path, look: Opener) -> None:
    made = pages.long(folder)
    assert made.file.stat().st_size < 5_000_000
    visit = look(made.file)
    page = visit.go("tab=graph")
    assert 0 < nodes(visit) <= 1500
    for _ in range(6):
        page.keyboard.press("-")
    visit.ready()
    assert nodes(visit) <= 1500


# Paths -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "index"),
    [("first.weight", (1, 2)), ("first.bias", (5,)), ("blocks.2.inner.0.weight", (11, 3))],
)
def test_an_element_shows_the_path_of_the_trace(
    name: str, index: tuple[int, ...], network: pages.Made, look: Opener
) -> None:
    visit = look(network.file)
    visit.go("tab=paths")
    pick(visit, name, ", ".join(map(str, index)))
    path = network.trace.path(name, index)
    visit.until(lambda: is_at(visit, index))
    same(shown(visit), path)
    weight = visit.page.get_by_test_id("path-weight").get_attribute("data-value")
    gradient = visit.page.get_by_test_id("path-gradient").get_attribute("data-value")
    assert weight is not None and gradient is not None
    assert float(gradient) == path.gradient
    assert float(weight) == pytest.approx(path.weight, rel=1e-12)


def test_an_element_is_chosen_from_the_largest(network: pages.Made, look: Opener) -> None:
    visit = look(network.file)
    page = visit.go("tab=paths")
    pick(visit, "first.weight", "0, 0")
    grad = network.trace.gradients["first.weight"]
    order = grad.abs().reshape(-1).argsort(descending=True, stable=True)
    index = divmod(int(order[3]), grad.shape[1])
    page.get_by_test_id("largest").nth(3).click()
    visit.until(lambda: is_at(visit, index))
    same(shown(visit), network.trace.path("first.weight", index))


def test_what_was_not_followed_says_how_to_find_it(network: pages.Made, look: Opener) -> None:
    """A large weight has paths of some elements; others are named with their Python."""
    visit = look(network.file)
    page = visit.go("tab=paths")
    leaf = network.trace.gradients["gate.weight"]
    missing = None
    for flat in range(leaf.numel()):
        index = divmod(flat, leaf.shape[1])
        pick(visit, "gate.weight", f"{index[0]}, {index[1]}")
        skipped = page.get_by_test_id("not-followed").filter(
            has_text=f"of [{index[0]}, {index[1]}] is"
        )
        visit.until(lambda: skipped.count() or is_at(visit, index))  # noqa: B023  # called here
        if skipped.count():
            missing = index
            break
    assert missing is not None
    python = page.get_by_test_id("python").inner_text()
    assert f"{missing[0]}, {missing[1]}" in python and "gate.weight" in python
    found = eval(python, {"trace": network.trace})  # what it tells the reader to do works
    assert found.index == missing
    page.get_by_test_id("largest").nth(2).click()
    page.get_by_test_id("step").first.wait_for()
    row = shown(visit)[0]
    same(
        shown(visit), network.trace.path("gate.weight", tuple(map(int, row["element"].split(","))))
    )


WRONG = {
    "9, 9": "Dimension 0 goes from 0 to 5; 9 is outside.",
    "1, -5": "Dimension 1 goes from 0 to 3; -5 is outside.",
    "1": "An element of 6×4 has 2 numbers; there is 1 here.",
    "1, 2, 3": "An element of 6×4 has 2 numbers; there are 3 here.",
    "a, b": "“a” is not a whole number.",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_index_is_told(wrong: str, network: pages.Made, look: Opener) -> None:
    """In these words, and what was shown stays; the next that is right takes them away."""
    visit = look(network.file)
    page = visit.go("tab=paths")
    box, error = page.get_by_test_id("index"), page.get_by_test_id("index-error")
    pick(visit, "first.weight", "1, 2")
    visit.until(lambda: is_at(visit, (1, 2)))
    assert error.inner_text() == "" and box.get_attribute("aria-invalid") == "false"
    place, steps = page.url, shown(visit)
    box.fill(wrong)
    box.press("Enter")
    visit.until(lambda: error.inner_text())
    assert error.inner_text() == WRONG[wrong]
    assert box.get_attribute("aria-invalid") == "true" and box.input_value() == wrong
    assert page.url == place and shown(visit) == steps
    box.fill("4, 0")
    box.press("Enter")
    visit.until(lambda: is_at(visit, (4, 0)))
    visit.until(lambda: error.inner_text() == "")
    same(shown(visit), network.trace.path("first.weight", (4, 0)))


def test_an_element_without_a_path_says_why(folder: Path, look: Opener) -> None:
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    file = folder / "dead.html"
    trace = gt.trace(x.relu().sum(), names={"x": x})
    trace.report(file)
    visit = look(file)
    page = visit.go("tab=paths")
    pick(visit, "x", "1")
    none = page.get_by_test_id("no-path")
    none.wait_for()
    title, why = none.inner_text().split("\n", 1)
    assert title == "Element [1] has no path"
    assert " ".join(why.split()) == (
        "Every contribution to its gradient is 0, so there is no way to show. An activation that "
        "is off, a mask, an embedding row that no token used or a factor of 0 does this."
    )
    assert page.get_by_test_id("step").count() == page.get_by_test_id("not-followed").count() == 0
    assert page.get_by_test_id("index-error").inner_text() == ""
    pick(visit, "x", "0")  # the other has one
    page.get_by_test_id("step").first.wait_for()
    assert none.count() == 0
    same(shown(visit), trace.path("x", 0))


def test_a_route_is_lit_in_the_graph(network: pages.Made, look: Opener) -> None:
    visit = look(network.file)
    page = visit.go()
    page.get_by_test_id("route").first.click()
    page.locator(".canvas .lit").first.wait_for()
    visit.ready()
    assert "route=0" in page.evaluate("location.hash")
    visit.shot("route")


# Keyboard only -----------------------------------------------------------------------------------


def test_all_of_it_works_with_the_keyboard_alone(network: pages.Made, look: Opener) -> None:
    """From opening the page to the path of an element, without a mouse."""
    visit = look(network.file)
    page = visit.go()
    for _ in range(40):  # to the tabs
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id").startswith("tab-"):
            break
    assert page.evaluate("document.activeElement.id") == "tab-overview"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    visit.ready()
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.dataset.testid") == "picker":
            break
    page.keyboard.type("first.weight")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.dataset.testid") == "index":
            break
    assert page.evaluate("document.activeElement.dataset.testid") == "index"
    page.keyboard.press("Control+a")
    page.keyboard.type("1, 1")
    page.keyboard.press("Enter")
    visit.until(lambda: is_at(visit, (1, 1)))
    same(shown(visit), network.trace.path("first.weight", (1, 1)))


def test_the_tree_follows_the_arrow_keys(network: pages.Made, look: Opener) -> None:
    visit = look(network.file)
    page = visit.go()
    page.locator("[role=tree]").first.wait_for()
    page.locator("#module-0").click()
    before = page.locator("[role=treeitem]").count()
    for _ in range(3):
        page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowLeft")  # closes it
    visit.until(lambda: page.locator("[role=treeitem]").count() < before)
    page.keyboard.press("ArrowRight")
    visit.until(lambda: page.locator("[role=treeitem]").count() == before)


# Training ----------------------------------------------------------------------------------------


def test_a_run_shows_influence_over_training(run: Path, look: Opener) -> None:
    visit = look(run)
    page = visit.go("tab=training")
    assert page.get_by_test_id("component").count() > 0
    assert page.get_by_test_id("verdict").inner_text().strip()
    visit.shot("training")
    slider = page.get_by_role("slider").first
    slider.focus()
    before = slider.get_attribute("aria-valuetext")
    page.keyboard.press("ArrowRight")
    visit.until(lambda: slider.get_attribute("aria-valuetext") != before)


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_the_page_of_a_run_is_accessible(size: tuple[int, int], run: Path, look: Opener) -> None:
    visit = look(run, size)
    visit.go("tab=training")
    visit.shot(f"training-{'phone' if size == PHONE else 'desk'}-light")
    accessible(visit, size)


# What should do no harm --------------------------------------------------------------------------


def test_hostile_names_are_text(hostile: pages.Made, look: Opener) -> None:
    for size in (DESK, PHONE):
        visit = look(hostile.file, size)
        page = visit.go()
        for tab in TABS:
            visit.tab(tab)
            assert visit.width() <= size[0], tab
        if size == DESK:
            visit.shot("hostile")
            page.keyboard.press("/")
            page.keyboard.type("</script>")
            page.locator("#found-0").wait_for()
            page.keyboard.press("Escape")
        assert page.evaluate("window.hacked") is None
        assert page.locator("img[src=x]").count() == 0
        assert page.locator("script").count() <= 3


DAMAGED = (
    "This report is damaged",
    "Its data cannot be read. The file may have been cut off on its way, or changed by a program "
    "that rewrites HTML.",
    "Copy the file again, or write it anew from the trace.",
)
EMPTY = (
    "There is no report in this file",
    "This is the page that gradtrace fills with data; nobody has filled this copy.",
    'Write a report with trace.report("report.html").',
)


@pytest.mark.parametrize(
    ("damage", "words", "reason"),
    [
        ("cut", DAMAGED, "the data does not decompress"),
        ("changed", DAMAGED, "the data is not base64"),
        ("empty", EMPTY, "no data"),
    ],
)
def test_a_damaged_file_says_so(
    damage: str,
    words: tuple[str, ...],
    reason: str,
    network: pages.Made,
    folder: Path,
    look: Opener,
) -> None:
    """In these words, and shows nothing beside them."""
    text = network.file.read_text("utf-8")
    start = text.index('type="application/octet-stream">') + len('type="application/octet-stream">')
    end = text.index("</script>", start)
    data = {"cut": text[start : start + 1000], "changed": f"?{text[start:end]}", "empty": ""}
    file = folder / f"{damage}.html"
    file.write_text(text[:start] + data[damage] + text[end:], "utf-8")
    visit = look(file)
    page = visit.page
    page.goto(file.as_uri())
    page.locator(".failure").wait_for()
    told = [page.locator(".failure h1"), *page.locator(".failure p").all()]
    assert [each.inner_text() for each in told] == [words[0], "∂", *words[1:], f"Reason: {reason}."]
    assert page.locator("#panel, [role=tab], [data-testid]").count() == 0
    visit.shot(f"failure-{damage}")


def test_a_notebook_shows_it_in_a_frame(folder: Path, look: Opener) -> None:
    torch.manual_seed(0)
    trace = pages.traced(pages.Network(1), torch.randn(3, 4))
    file = folder / "notebook.html"
    html = trace._repr_html_()
    assert html.lstrip().startswith("<iframe")
    file.write_text(f"<!doctype html><meta charset=utf-8><title>a notebook</title>{html}", "utf-8")
    visit = look(file)
    visit.page.goto(file.as_uri())
    frame = visit.page.frame_locator("iframe")
    frame.locator("#tab-paths").click()
    frame.get_by_test_id("picker").wait_for()
    visit.shot("notebook")
