"""The page of every experiment leads with one sentence, made of its results, and one figure."""

from __future__ import annotations

import copy
import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from gradtrace.experiments.harness import page, results
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
    assert results.first_sentence(data["headline"]) == data["headline"]  # one only
    assert data["headline"].endswith(".") and 40 < len(data["headline"]) < 320
    assert data["figure"] in [plot["name"] for plot in data["plots"]]
    assert data["figure"] == getattr(module_of(data), "FIGURE", data["figure"])


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
def test_pages_lead_with_both(name: str) -> None:
    data = stored(name)
    lines = [line for line in (DOCS / f"{name}.md").read_text().split("\n") if line]
    assert lines[1] == "> " + page._quiet(data["headline"])
    assert re.fullmatch(r"!\[.+\]\(\S+\.png\)", lines[2]) and lines[3] == "## In full"
    figure = re.search(r"\(([^()\s]+)\)$", lines[2])
    assert figure and (DOCS / figure[1]).exists()
    assert sum(figure[1] in line for line in lines) == 1
    assert page.markdown(data, {}).count(page._quiet(data["headline"])) >= 1
    whole = page.alone(data, {plot["name"]: b"png" for plot in data["plots"]})
    title = next(plot["title"] for plot in data["plots"] if plot["name"] == data["figure"])
    places = [
        whole.index(part)
        for part in ('<p class="found">', f'alt="{page.escape(title)}"', "In full", "Question")
    ]
    assert places == sorted(places)


def test_the_list_has_the_sentences() -> None:
    text = (DOCS / "index.md").read_text()
    assert text == page.index(
        sorted(map(stored, PAGES), key=lambda data: text.index(f"]({results.name(data)}.md)"))
    )


def test_results_of_older_versions_and_of_others_lead_with_what_they_have() -> None:
    data = copy.deepcopy(stored("layers"))
    del data["headline"], data["figure"]
    lines = page.markdown(data, {plot["name"]: "a.png" for plot in data["plots"]}).split("\n")
    assert lines[2] == "> " + page._quiet(results.first_sentence(data["sentence"]))
    assert lines[4].startswith("![")
    bare = data | {"plots": [], "drawings": {}, "sentence": "Nothing was measured. So be it."}
    assert results.lead(import_module(EXPERIMENTS["layers"]), bare) == {
        "headline": "Nothing was measured.",
        "figure": "",
    }
