"""What is left of the lecture: batch norm and valleys, parallel dataflow, priors."""

from __future__ import annotations

import json
import re
from typing import Any

import degenerate
import pytest
import torch

from gradtrace.experiments import variations
from gradtrace.experiments.harness.findings import Findings, Row
from gradtrace.experiments.lecture import dataflow, valleys

SMALL: dict[str, Any] = {
    "valleys": {"samples": 32, "condition": 25.0, "updates": 120, "rates": [1.0]},
    "dataflow": {"nodes": 15, "orders": 40, "threads": 2, "runs": 2},
    "priors": {"samples": [5, 40], "steps": 150, "updates": 60, "starts": 16},
}


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    found = []
    for cell in variations.cells(SMALL, 2):
        result = variations.measure(cell, lambda text: None)
        found.append(Row(cell, json.loads(json.dumps(result, allow_nan=False))))
    return found


@pytest.fixture(scope="module")
def found(rows: list[Row]) -> Findings:
    return variations.conclude(rows)


def test_normalisation_takes_a_valley_along_features_away(found: Findings) -> None:
    facts = found.facts["valleys"]
    assert facts["off_formula"] == 0
    assert all(low < value < high for value, low, high in facts["condition"].values())
    assert len(re.findall(r"has κ = \S+ \[\S+, \S+\] and normalised \S+ \[", found.sentence)) == 2
    condition = {name: value for name, (value, *_) in facts["condition"].items()}
    assert condition["axes, plain"] == pytest.approx(condition["turned, plain"], rel=1e-6)
    assert condition["axes, normalised"] < 6 < condition["turned, normalised"]
    assert facts["saved"]["axes"][0] > 3 > facts["saved"]["turned"][0]
    assert facts["arrived"]["axes, plain"] == facts["arrived"]["turned, normalised"] == [2, 2]


def test_normalised_features_have_mean_0_and_variance_1() -> None:
    x = 3 + 7 * torch.randn(50, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    done = valleys.normalised(x)
    torch.testing.assert_close(done.mean(0), torch.zeros(2).double(), atol=1e-12, rtol=0)
    torch.testing.assert_close(done.square().mean(0), torch.ones(2).double(), atol=1e-6, rtol=0)


def test_any_order_gives_the_same_values(found: Findings) -> None:
    facts = found.facts["dataflow"]
    assert facts["different"] == 0
    assert facts["bounded"]
    assert facts["orders_of_example"] == facts["orders_by_hand"] == 6
    assert facts["apart"] < 1e-14
    assert facts["apart_of_two"] == 0
    value, low, high = facts["parallel"]["drawn"]
    assert low <= value <= high and f"drawn {value:.1f} [" in found.sentence
    known = {name: each for name, (each, *ends) in facts["parallel"].items() if ends == [None] * 2}
    assert known == {"R(P,Q)": 7 / 5, "chain": 1, "tree": 15 / 4}


def test_steps_of_workers_by_hand() -> None:
    example = dataflow.running_example()
    assert [dataflow.steps(example, p) for p in (1, 2, 3)] == [7, 5, 5]
    assert [dataflow.steps(dataflow.tree(15), p) for p in (1, 2, 4, 8)] == [15, 8, 5, 4]
    assert dataflow.longest(dataflow.chain(9)) == 9


def test_a_node_does_not_run_before_its_inputs() -> None:
    given = {f"x{i}": torch.ones(1) for i in range(4)}
    with pytest.raises(KeyError):
        dataflow.in_order(dataflow.running_example(), ["b", "a"], given)


def test_what_no_sample_sees_stays_of_the_start(found: Findings) -> None:
    facts = found.facts["priors"]
    assert facts["exact"] < 1e-5
    assert facts["converged"][0] >= 2
    assert 0.5 < facts["left"]["5"][0] < 0.95  # 0.75 is expected
    assert facts["left"]["40"][0] < 1e-4
    few = {start: found[0] for start, found in facts["ends"]["5"].items()}
    assert few["prior"] < few["zeros"] < few["wrong prior"]
    assert few["wrong prior"] == pytest.approx(2 * few["zeros"], rel=1e-4)


def test_starts_near_the_truth_arrive(found: Findings) -> None:
    facts = found.facts["priors"]["arrived"]
    assert facts["near the truth"][0] > facts["nothing known"][0] >= facts["signs wrong"][0]


def test_any_order_of_rows_gives_the_same(rows: list[Row], found: Findings) -> None:
    assert variations.conclude(rows[::-1]) == found
    assert json.loads(json.dumps(found.facts, allow_nan=False))
    assert "NOT" not in found.sentence and "DIFFER" not in found.sentence
    assert "if features differ in size" in variations.headline(found.facts)
    assert variations.headline({}) == "Nothing was measured."


def test_the_callers_random_numbers_are_left_alone() -> None:
    before = torch.get_rng_state()
    for cell in variations.cells({"dataflow": SMALL["dataflow"]}, 1):
        variations.measure(cell, lambda text: None)
    assert torch.equal(torch.get_rng_state(), before)


@degenerate.every
def test_degenerate_measurements_are_concluded_from(rows: list[Row], kind: str) -> None:
    degenerate.concludes(variations, rows, kind)
    variations.headline(variations.conclude(degenerate.spoilt(rows, kind)).facts)
