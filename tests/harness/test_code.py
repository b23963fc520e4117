"""Which edits make rows stale: those of what measures, and not those of what makes the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradtrace.experiments.harness.code import _found, code
from gradtrace.experiments.harness.loading import ExperimentSource
from gradtrace.experiments.harness.table import EXPERIMENTS

WHOLE = """
import part
from other import taken

PARTS = {"part": part}


def measure(cell, tick):
    return PARTS[cell["part"]].measure(cell, tick) | {"more": part.asked(), "n": taken()}


def conclude(rows):
    return part.conclude(rows)
"""
PART = """
from math import cos
from other import first, second

FIGURE = "drawn"
SIZE = 3
WORDS = "in words"


def measure(cell, tick):
    return {"y": both(first()) + SIZE}


def both(x):
    return cos(x)


def asked():
    return 17


def conclude(rows):
    return both(2) + told() + second() + asked()


def headline(facts):
    return WORDS


def told():
    return [WORDS, SIZE]
"""
OTHER = """
def first():
    return 1


def second():
    return 2


def taken():
    return 3
"""
EDITS = {
    "measure": ("part", "first()) + SIZE", "first()) - SIZE", True),
    "a constant of both": ("part", "SIZE = 3", "SIZE = 4", True),
    "a function of both": ("part", "return cos(x)", "return cos(2 * x)", True),
    "a function that others ask for": ("part", "return 17", "return 18", True),
    "a new name that may be asked for": ("part", "SIZE = 3", "SIZE = 3\nRULES = {}", True),
    "what measure imports": ("other", "return 1", "return 11", True),
    "what the experiment imports": ("other", "return 3", "return 33", True),
    "conclude": ("part", "both(2) + told()", "told()", False),
    "headline": ("part", "return WORDS", "return WORDS * 2", False),
    "the figure": ("part", '"drawn"', '"other"', False),
    "a text of the page": ("part", '"in words"', '"in other words"', False),
    "a function of the page": ("part", "return [WORDS, SIZE]", "return [SIZE]", False),
    "what conclude imports": ("other", "return 2", "return 22", False),
    "an import that conclude needs": ("part", "import cos", "import cos, sin", False),
    "the experiment's own conclude": ("whole", "return part.conclude(rows)", "return 0", False),
}


@pytest.mark.parametrize("what", EDITS)
def test_rows_depend_on_what_measures_them(tmp_path: Path, what: str) -> None:
    texts = {"whole": WHOLE, "part": PART, "other": OTHER}
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    source = ExperimentSource.of(tmp_path / "whole.py")
    before = code(source)
    name, old, new, stale = EDITS[what]
    if what == "an import that conclude needs":
        texts["part"] = texts["part"].replace("both(2)", "sin(2)")
    assert old in texts[name]
    (tmp_path / f"{name}.py").write_text(texts[name].replace(old, new))
    assert (code(source) != before) == stale


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_no_experiment_measures_by_the_code_of_its_page(name: str) -> None:
    found = _found(ExperimentSource(name, EXPERIMENTS[name]))
    assert any(wanted == "measure" for _, wanted in found)
    for (module, wanted), text in found.items():
        if wanted != "ResultPart":  # which says what parts have, in annotations alone
            for tells in ("conclude", "headline"):
                assert f"FunctionDef(name='{tells}'" not in text, module
