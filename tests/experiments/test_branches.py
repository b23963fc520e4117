"""Figure 1.3: what does not depend on how fast the machine is."""

from __future__ import annotations

import random
from typing import Any
from xml.etree import ElementTree

import degenerate
import pytest

from gradtrace.experiments import branches
from gradtrace.experiments.harness.findings import Findings, Row

SETTINGS = {"stacks": [2, 3], "each": 2, "rounds": 1, "counted": 3_000, "drawn": 3}


def quietly(_: str) -> None:
    pass


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return [Row(cell, branches.measure(cell, quietly)) for cell in branches.cells(SETTINGS, 5)]


@pytest.fixture(scope="module")
def findings(rows: list[Row]) -> Findings:
    return branches.conclude(rows)


def test_what_is_measured() -> None:
    cells = branches.cells(SETTINGS, 5)
    assert cells == branches.cells(SETTINGS, 5)
    assert sum(cell["kind"] == "network" for cell in cells) == 5 + 4
    assert len({str(cell) for cell in cells}) == len(cells)


def test_gradients_are_those_of_autograd(findings: Findings) -> None:
    assert findings.facts["networks"] == 9
    assert findings.facts["largest_difference"] < 1e-6


def test_counts_follow_from_the_widths(findings: Findings, rows: list[Row]) -> None:
    assert findings.facts["counts_follow_from_widths"]
    wrong = [Row(r.cell, {**r.result, "edges": 1}) if "edges" in r.result else r for r in rows]
    assert not branches.conclude(wrong).facts["counts_follow_from_widths"]


def test_layers_are_expanded_as_often_as_they_should(findings: Findings) -> None:
    chances = [level["probability"] for level in findings.facts["procedure"]]
    assert chances == [0.95, 0.475, 0.2375, 0.11875]
    assert all(abs(level["errors"]) < 4 for level in findings.facts["procedure"])


def test_a_network_is_drawn(findings: Findings) -> None:
    ((title, svg),) = findings.drawings.items()
    assert "(199, 252)" in title
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    assert (svg.count(">Tanh<"), svg.count(">Cat<")) == (3, 1)


def test_rows_may_come_in_any_order(findings: Findings, rows: list[Row]) -> None:
    mixed = random.Random(0).sample(rows, len(rows))
    assert branches.conclude(mixed) == findings


# What is said of times ---------------------------------------------------------------------------


def made(time: Any) -> list[Row]:
    """Rows of times that are a function of size and of operators."""
    found = []
    for layers in (1, 2):
        for seed in range(12):
            size, operators = 100 + 37 * (seed * 5 % 12), 10 + seed
            result = {
                "vertices": size,
                "edges": size,
                "operators": operators,
                "parameters": 1,
                "by_hand": [size, size],
                "difference": 0.0,
                "seconds": dict.fromkeys(branches.WAYS, time(2 * size, operators)),
            }
            cell = {"kind": "network", "seed": seed, "layers": layers, "rounds": 1}
            found.append(Row(cell, result))
    return found


def test_times_that_follow_the_size_are_called_linear() -> None:
    findings = branches.conclude(made(lambda size, _: 1e-3 + 1e-9 * size))
    assert findings.sentence.count("all times are lines") == 2 and "not" not in findings.sentence
    slopes = [row[3] for row in findings.tables[0].rows]
    assert slopes == pytest.approx([1.0] * 8)
    assert all(r2 == pytest.approx(1) for r2 in findings.facts["r2"].values())


def test_times_that_follow_the_operators_are_not() -> None:
    findings = branches.conclude(made(lambda _, operators: 1e-3 * operators))
    assert "no way's R² reaches 0.99" in findings.sentence
    assert "The number of operators explains more" in findings.sentence
    assert "linear" not in findings.sentence


def test_some_may_be_linear() -> None:
    rows = made(lambda size, _: 1e-9 * size)
    for row in rows:
        row.result["seconds"]["tracing"] = 1e-3 * row.result["operators"]
    sentence = branches.conclude(rows).sentence
    one = "1.000 [1.000, 1.000]"
    assert (
        f"PyTorch, own engine and recording are linear (R² of 0.99 or more: {one}, {one} and "
        f"{one}), tracing is not."
    ) in sentence


@degenerate.every
def test_degenerate_measurements_are_concluded_from(rows: list[Row], kind: str) -> None:
    degenerate.concludes(branches, rows, kind)
