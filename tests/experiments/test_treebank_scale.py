"""The language model of the chapter's example: what is counted."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import degenerate
import pytest
import torch

from gradtrace.experiments import treebank_scale as scale
from gradtrace.experiments.harness.findings import Findings, Row

SETTINGS = {"words": 40, "units": 7, "steps": [2, 3, 7], "rounds": 1}


def here(name: str, *arguments: Any) -> dict[str, float]:
    """In this process, to save time; ``test_resident`` has the new process."""
    assert name == "gradtrace.experiments.treebank_scale:peaks"
    return scale.peaks(*arguments)


@pytest.fixture(scope="module")
def rows() -> Iterator[list[Row]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scale, "apart", here)
        yield [Row(cell, scale.measure(cell, lambda _: None)) for cell in scale.cells(SETTINGS, 2)]


@pytest.fixture(scope="module")
def findings(rows: list[Row]) -> Findings:
    return scale.conclude(rows)


def test_parameters_of_the_chapters_model_are_ten_times_what_it_says(findings: Findings) -> None:
    readings = findings.facts["parameters"]
    words, units = 10_000, 1_000
    elman = words * units + units * units + units + units * words + words
    assert readings["Elman's network, one-hot input"] == elman == 21_011_000
    lstm = 2 * words * 100 + words + 8 * 100 * 100 + 8 * 100
    assert readings["embedding of 100 and nn.LSTM with 100 units, not 1,000"] == lstm
    shared = "the same, output weight shared with the embedding"
    assert readings["embedding of 1,000 and nn.RNN"] - readings[shared] == words * units
    assert "21.0 million parameters" in findings.sentence
    assert "a slip by a factor of ten" in findings.sentence


def test_edges_are_exactly_linear_and_those_of_the_formula(findings: Findings) -> None:
    for fact in ("edges_linear", "vertices_linear", "edges_by_hand", "losses_equal"):
        assert findings.facts[fact] is True, fact
    assert "exactly linear in n and those of the formula" in findings.sentence


@pytest.mark.parametrize("change", [1, -1])
def test_one_edge_more_or_less_would_be_seen(rows: list[Row], change: int) -> None:
    first = next(row for row in rows if row.cell.get("steps") == 2)
    wrong = Row(first.cell, {**first.result, "edges": first.result["edges"] + change})
    facts = scale.conclude([wrong if row is first else row for row in rows]).facts
    assert not facts["edges_linear"] and not facts["edges_by_hand"]


def test_the_chapters_edges_are_those_with_products_as_vertices(findings: Findings) -> None:
    fused, opened, products = findings.facts["edges_of_a_step"].values()
    assert fused - opened == 10_000**2 - 3 * 10_000
    assert products - opened == 11_000_000
    assert "estimate, 30 million, fits with products as vertices." in findings.sentence


def test_cross_entropy_taken_apart_is_the_same() -> None:
    scores, ids = torch.randn(3, 5), torch.tensor([4, 0, 1])
    torch.testing.assert_close(
        scale.entropy(scores, ids), torch.nn.functional.cross_entropy(scores, ids)
    )


def test_a_cell_gives_the_same_counts_again(rows: list[Row]) -> None:
    state = torch.get_rng_state()
    first = next(row for row in rows if row.cell.get("steps") == 2)
    again = scale._counts(scale._problem(40, 7, 2, first.cell["seed"]))
    assert all(first.result[key] == value for key, value in again.items())
    assert torch.equal(torch.get_rng_state(), state)


def test_rows_may_come_in_any_order(findings: Findings, rows: list[Row]) -> None:
    assert scale.conclude(random.Random(0).sample(rows, len(rows))) == findings


# Words -------------------------------------------------------------------------------------------


def test_parameters_that_are_near_are_called_so() -> None:
    assert "near the chapter's 2.1 million." in scale._on_parameters({"a": 2_000_000})
    assert "slip" not in scale._on_parameters({"a": 5_000_000})
    assert "no other reading comes near it" in scale._on_parameters({"a": 5_000_000})


def test_costs_that_are_no_line_are_not_called_linear(rows: list[Row]) -> None:
    def paid(power: int) -> str:
        found = []
        for row in rows:
            if row.cell["kind"] == "sequence":
                cost = float(row.cell["steps"]) ** power
                seconds = dict.fromkeys(scale.WAYS, cost)
                memory = dict.fromkeys(row.result["memory"], cost)
                row = Row(row.cell, {**row.result, "seconds": seconds, "memory": memory})
            found.append(row)
        return scale.conclude(found).sentence

    assert paid(1).count("R² 1.000, linear") == 2
    assert paid(4).count("not a plain line") == 2


@degenerate.every
def test_degenerate_measurements_are_concluded_from(rows: list[Row], kind: str) -> None:
    degenerate.concludes(scale, rows, kind)
