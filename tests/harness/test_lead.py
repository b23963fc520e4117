"""The page of every experiment: answer, figure, table, findings, method, limits, in this order."""

from __future__ import annotations

import copy
import json
import re
import textwrap
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from gradtrace.experiments.harness import page, results
from gradtrace.experiments.harness.loading import about
from gradtrace.experiments.harness.table import EXPERIMENTS

DOCS = Path(__file__).parents[2] / "docs" / "experiments"
PAGES = sorted(path.stem for path in DOCS.glob("*.json"))


def stored(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((DOCS / f"{name}.json").read_text())
    return data


def module_of(data: dict[str, Any]) -> Any:
    return import_module(EXPERIMENTS[data["experiment"]])


def test_there_are_pages() -> None:
    assert len({stored(name)["experiment"] for name in PAGES}) >= 11


@pytest.mark.parametrize("name", PAGES)
def test_the_sentence_is_made_of_the_results(name: str) -> None:
    data = stored(name)
    wanted = results.lead(module_of(data), data)
    assert {key: data[key] for key in wanted} == wanted
    assert len(results.sentences(data["headline"])) <= 2
    assert data["headline"].endswith(".") and 40 < len(data["headline"]) < 320
    assert numbers(data["headline"]) <= 7  # a layman reads it
    assert data["figure"] in [plot["name"] for plot in data["plots"]]
    assert data["figure"] == getattr(module_of(data), "FIGURE", data["figure"])


@pytest.mark.parametrize("name", PAGES)
def test_a_page_tells_the_method_and_limits_of_the_module(name: str) -> None:
    data = stored(name)
    assert data["about"] == about(module_of(data), name) and "limits" in data["about"]


def numbers(text: str) -> int:
    """How many there are; one with its interval is one."""
    return len(re.findall(r"(?<![\w.])[-+]?\d[\d,.]*", re.sub(r"\[[^\]]*\]", "", text)))


WITH_ROWS = [name for name in PAGES if (DOCS / f"{name}.rows.jsonl.gz").exists()]


@pytest.mark.parametrize("name", WITH_ROWS)
def test_no_finding_is_a_wall_of_numbers(name: str) -> None:
    """What has many numbers is a table."""
    for point in results.sentences(stored(name)["sentence"]):
        assert numbers(point) <= 10 and len(point) < 480, point


NUMBERED = re.compile(r"[Ss]ource \d|\(0\d\d\)")


@pytest.mark.parametrize("name", sorted(EXPERIMENTS))
def test_sources_are_cited_by_title(name: str) -> None:
    """As docs/sources.md has them, which is where readers look."""
    module = import_module(EXPERIMENTS[name])
    assert not NUMBERED.search(module.__doc__ or "")
    for page_of in PAGES:
        data = stored(page_of)
        if data["experiment"] == name:
            assert not NUMBERED.search((DOCS / f"{page_of}.md").read_text())


TOLD = [name for name in PAGES if hasattr(module_of(stored(name)), "headline")]


@pytest.mark.parametrize("name", TOLD)
def test_other_results_make_another_sentence(name: str) -> None:
    """No verdict is written down beforehand: with all numbers changed, so is what is said."""
    data = stored(name)
    assert module_of(data).headline(_changed(data["facts"])) != data["headline"]


def _changed(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value / 2
    if isinstance(value, dict):
        return {key: _changed(each) for key, each in value.items()}
    return [_changed(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_its_parts_in_order(name: str) -> None:
    data = stored(name)
    text = (DOCS / f"{name}.md").read_text()
    lines = [line for line in text.split("\n") if line]
    assert lines[1] == "> " + page._quiet(data["headline"])
    figure = re.fullmatch(r"!\[.+\]\((\S+\.png)\)", lines[2])
    assert figure and (DOCS / figure[1]).exists() and text.count(figure[1]) == 1
    assert lines[3] == f"## {page._quiet(data['table'])}" and lines[4].startswith("| ")
    titles = [line for line in lines if line.startswith("## ")][1:]
    first = ["## In full", "## Method", "## Limits"]
    assert titles == [*first, "## How it was run"]
    assert len(lines) <= 66 and text.count("\n|") <= 24  # two screens, one table
    further = DOCS / "more" / f"{name}.md"
    rest = further.read_text() if further.exists() else ""
    assert rest.count("](../") == 1 + rest.count("![") if rest else True
    for table in data["tables"]:
        title = f"## {page._quiet(table['title'])}"
        assert (title in lines) + (title in rest.split("\n")) == 1
    assert "\\*" not in text  # nobody meant to write an asterisk


@pytest.mark.parametrize("name", PAGES)
def test_a_page_of_its_own_has_them_too(name: str) -> None:
    data = stored(name)
    whole = page.alone(data, {plot["name"]: b"png" for plot in data["plots"]})
    title = next(plot["title"] for plot in data["plots"] if plot["name"] == data["figure"])
    parts = ('<p class="found">', f'alt="{page.escape(title)}"', f"<h3>{_html(data['table'])}</h3>",
             "In full", "Question", "<h2>Limits", "How it was run")  # fmt: skip
    places = [whole.index(part) for part in parts]
    assert places == sorted(places)


def _html(text: str) -> str:
    return page._inline(text)


def test_the_list_has_the_sentences() -> None:
    text = (DOCS / "index.md").read_text()
    assert text == page.index(
        sorted(map(stored, PAGES), key=lambda data: text.index(f"]({results.name(data)}.md)"))
    )
    lines = [line for part in text.split("\n") for line in textwrap.wrap(part, 100) or [""]]
    assert len(lines) <= 80  # two screens


def test_results_of_older_versions_and_of_others_lead_with_what_they_have() -> None:
    data = copy.deepcopy(stored("layers"))
    for part in ("headline", "figure", "table"):
        del data[part]
    lines = page.markdown(data, {plot["name"]: "a.png" for plot in data["plots"]}).split("\n")
    assert lines[2] == "> " + page._quiet(results.sentences(data["sentence"])[0])
    assert lines[4].startswith("![")
    bare = data | {
        "plots": [],
        "tables": [],
        "drawings": {},
        "sentence": "Nothing was measured. So be it.",
    }
    assert results.lead(import_module(EXPERIMENTS["layers"]), bare) == {
        "headline": "Nothing was measured.",
        "figure": "",
        "table": "",
    }


def test_the_readme_says_of_validity_what_the_list_says() -> None:
    """Word by word: the one honest line is that of planted-competition."""
    listed = next(
        line.partition("): ")[2]
        for line in (DOCS / "index.md").read_text().split("\n")
        if line.startswith("- [planted-competition]")
    )
    told = " ".join((DOCS.parents[1] / "README.md").read_text().split())
    assert re.sub(r"\\(.)", r"\1", listed) in told
