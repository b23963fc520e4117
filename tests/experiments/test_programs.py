"""The lecture's programs: optimisers against torch's, and what no noise can turn round."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import islice
from typing import Any

import degenerate
import pytest
import torch

from gradtrace.experiments import programs
from gradtrace.experiments.harness.findings import Findings, Row
from gradtrace.experiments.lecture import program, rates, starts
from gradtrace.experiments.lecture.descent import Rule, descend, gradient, marks, minimum
from gradtrace.experiments.lecture.optimisers import (
    AdaGrad,
    AdamW,
    Descent,
    Momentum,
    constant,
    power,
)

SMALL: dict[str, Any] = {
    "worked": {"tolerance": 1e-9},
    "structures": {"updates": 60, "samples": 8, "longest": 12},
    "closed": {"samples": 24, "steps": 100, "penalties": [0.0, 0.1, 1.0]},
    "batches": {
        "samples": 64,
        "batches": [1, 16],
        "runs": 16,
        "rate": 0.5,
        "updates": 256,
        "starts": 16,
    },
    "rates": {"steps": 200, "runs": 100, "curvatures": [2.0, 1.0], "samples": 64},
    "races": {"updates": 60, "rates": [0.3], "condition": 25.0, "samples": 64},
    "starts": {"depth": 20, "width": 64},
    "classes": {"samples": 60, "updates": 150},
}


def rows_of(settings: dict[str, Any], seeds: int = 1) -> list[Row]:
    rows = []
    for cell in programs.cells(settings, seeds):
        result = programs.measure(cell, lambda text: None)
        rows.append(Row(cell, json.loads(json.dumps(result, allow_nan=False))))
    return rows


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return rows_of(SMALL)


@pytest.fixture(scope="module")
def found(rows: list[Row]) -> Findings:
    return programs.conclude(rows)


# Optimisers --------------------------------------------------------------------------------------

PAIRS: dict[str, tuple[Rule, Callable[[list[torch.Tensor]], torch.optim.Optimizer]]] = {
    "descent": (Descent(constant(0.1)), lambda p: torch.optim.SGD(p, 0.1)),
    "momentum": (Momentum(0.1, 0.8), lambda p: torch.optim.SGD(p, 0.1, 0.8)),
    "Nesterov": (
        Momentum(0.1, 0.8, nesterov=True),
        lambda p: torch.optim.SGD(p, 0.1, 0.8, nesterov=True),
    ),
    "AdaGrad": (AdaGrad(0.2), lambda p: torch.optim.Adagrad(p, 0.2)),
    "AdamW": (AdamW(0.1, decay=0.3), lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.3)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_optimisers_are_those_of_torch(name: str) -> None:
    rule, make = PAIRS[name]
    data = program.samples(16, 0)
    start = program.weights((0.3, 0.5, -0.7))
    ours = list(islice(descend(lambda w, _: program.errors(w, data), start, rule), 21))
    theirs = {key: x.clone().requires_grad_() for key, x in start.items()}
    optimiser = make(list(theirs.values()))
    for _ in range(20):
        optimiser.zero_grad()
        program.errors(theirs, data).backward()
        optimiser.step()
    for key, x in theirs.items():
        torch.testing.assert_close(ours[-1][key], x.detach(), rtol=1e-10, atol=1e-12)
    assert all(torch.equal(ours[0][key], start[key]) for key in start)


def test_schedules() -> None:
    assert [power(1)(i) for i in range(3)] == [1, 1 / 2, 1 / 3]
    assert power(2, 100)(100) == 0.25
    assert marks(1000, 1) == [1, 10, 100, 1000]


def test_minimum_has_no_slope() -> None:
    data = program.samples(64, 3)
    best = minimum(program.loss(data), program.weights(program.TRUTH))
    value, slope = gradient(program.loss(data), best)
    assert max(abs(float(g)) for g in slope.values()) < 1e-10
    assert value <= float(program.errors(program.weights(program.TRUTH), data))


# Parts -------------------------------------------------------------------------------------------


def test_worked_examples(found: Findings) -> None:
    assert found.facts["worked"]["wrong"] == []
    assert found.facts["worked"]["numbers"] == 8


def test_paths_add_up(found: Findings) -> None:
    facts = found.facts["structures"]
    assert facts["summed"] < 1e-12
    assert facts["hand"] < 1e-12
    assert facts["counts"]
    assert facts["paths"]["R(P,Q)"] == {"w0": 2, "w1": 1, "w2": 1}
    assert facts["paths"]["sharing"] == {"w0": 2, "w": 2}
    assert facts["paths"]["skips"] == {"w0": 8, "w1": 4, "w2": 2, "w3": 1}
    assert facts["paths"]["loop"]["w"] == 5
    assert sorted(facts["paths"]["conditional"].values()) == [0, 1]
    assert facts["fitted"] < 0.2
    assert facts["beside"] == pytest.approx(facts["branch"], rel=1e-12)
    assert abs(facts["across"]) > 100


def test_paths_double_and_edges_do_not(found: Findings) -> None:
    facts = found.facts["structures"]["diamonds"]
    assert facts["doubles"]
    assert len(facts["edges_a_layer"]) == 1
    assert facts["listed"] == [2**n for n in range(1, 11)]
    assert facts["off"] < 1e-12


def test_closed_forms(found: Findings) -> None:
    facts = found.facts["closed"]
    assert facts["slope"] < 1e-12
    assert facts["bounded"]
    assert facts["ridge_within"]
    assert facts["shrinks"]


def test_batches(found: Findings) -> None:
    facts = found.facts["batches"]
    assert facts["noise_falls"]
    assert facts["batch_noise"] < 1e-25
    assert facts["small_learns_first"]
    assert facts["large_ends_lower"]
    assert facts["reached"] + facts["stuck"] <= facts["starts"] == 16


def test_rates(found: Findings) -> None:
    facts = found.facts["rates"]
    assert facts["off_mean"] < 1e-12  # 1/i is the running mean
    assert facts["off_formula"] < 1e-9
    assert all(0.3 < ratio < 3 for ratio in facts["chi"])  # 100 runs: seven deviations and more
    assert facts["quiet"]["2 constant 1"] == 3.0  # 3, -3, 3, ...: the lecture's example
    assert facts["quiet"]["2 1/i²"] > 0.1
    assert facts["slopes"]["parabola 2 1/i"] < -0.2 < facts["slopes"]["parabola 2 1/i²"]
    assert facts["ends"]["parabola 2 1/i"] < facts["ends"]["parabola 2 constant 0.1"]


def test_expected_distance_of_one_over_i() -> None:
    """The mean of n targets has the variance 1/n."""
    assert rates.expected("1/i", 1.0, 100, 1.0)[-1] == pytest.approx(0.1, rel=1e-12)


def test_races(found: Findings) -> None:
    facts = found.facts["races"]
    for name, wanted in facts["theory"].items():
        assert facts["kept"][name] == pytest.approx([wanted], abs=0.05)
    ball, plain = facts["theory"]["heavy ball, best rate"], facts["theory"]["descent, best rate"]
    assert ball == pytest.approx(4 / 6) and plain == pytest.approx(24 / 26)
    updates = facts["updates"]
    assert updates["valley: heavy ball, best rate"] < updates["valley: descent, best rate"]


def test_starts(found: Findings) -> None:
    factors = found.facts["starts"]["factors"]
    for name, one in factors.items():
        for measured in one["measured"]:
            assert abs(math.log(measured / one["theory"])) < 19 * 0.05, name
    assert factors["ReLU He"]["theory"] == pytest.approx(1)
    assert factors["ReLU Xavier"]["theory"] == pytest.approx(2**-9.5)
    assert factors["ReLU small"]["verdicts"] == factors["tanh small"]["verdicts"] == ["vanishing"]
    assert factors["ReLU He"]["verdicts"] == factors["tanh Xavier"]["verdicts"] == ["neither"]


def test_theory_of_small_tanh_is_that_of_a_linear_network() -> None:
    assert starts.gains("tanh", 1e-6, 3) == pytest.approx([1e-3] * 3, rel=1e-4)


def test_entropy(found: Findings) -> None:
    facts = found.facts["classes"]
    assert max(facts[key] for key in ("sum", "p_minus_t", "same")) < 1e-12
    assert facts["frequencies"] < 1e-3
    assert facts["off_entropy"] < 1e-5
    assert facts["gains"] > 0
    assert facts["wrong_cross"] < -0.99
    assert -1e-3 < facts["wrong_square"] < 0


# The whole ---------------------------------------------------------------------------------------


def test_any_order_gives_the_same(rows: list[Row], found: Findings) -> None:
    assert programs.conclude(rows[::-1]) == found
    assert json.loads(json.dumps(found.facts, allow_nan=False))
    assert "NOT" not in found.sentence


def test_a_part_alone_and_twice_gives_the_same(rows: list[Row]) -> None:
    """A cell says all that is needed, and the caller's random numbers are left alone."""
    before = torch.get_rng_state()
    some = {key: SMALL[key] for key in ("classes", "starts")}
    again = rows_of(some)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(row in rows for row in again)
    assert programs.conclude(again).facts.keys() == set(some)


def test_settings_are_alike() -> None:
    assert programs.QUICK.keys() == programs.FULL.keys() == set(programs.PARTS)
    cells = programs.cells(programs.FULL, programs.SEEDS.full)
    assert len({json.dumps(cell, sort_keys=True) for cell in cells}) == len(cells)


@degenerate.every
def test_degenerate_measurements_are_concluded_from(rows: list[Row], kind: str) -> None:
    degenerate.concludes(programs, rows, kind)
