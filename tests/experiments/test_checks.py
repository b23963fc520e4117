"""Differences against gradients: shapes of curves and counts, never times."""

from __future__ import annotations

import json

import degenerate
import pytest
import torch

from gradtrace.experiments import checks
from gradtrace.experiments.harness.findings import Findings, Row
from gradtrace.experiments.slides.gradients import analytic, network, numerical, slope, wave
from gradtrace.experiments.slides.logarithms import exponent, geometric

SETTINGS = checks.QUICK | {"costs": {"sizes": [3, 10, 200]}}


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    found = []
    for cell in checks.cells(SETTINGS, 1):
        result = checks.measure(cell, lambda text: None)
        found.append(Row(cell, json.loads(json.dumps(result, allow_nan=False))))
    return found


@pytest.fixture(scope="module")
def found(rows: list[Row]) -> Findings:
    return checks.conclude(rows)


def test_gradients_are_those_of_torch() -> None:
    loss, at = network(5, 0, torch.float64)
    leaf = at.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(analytic(loss, at), wanted)
    torch.testing.assert_close(numerical(loss, at, 1e-5, "central"), wanted, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(numerical(loss, at, 1e-7, "forward"), wanted, rtol=1e-4, atol=1e-5)
    x = torch.linspace(-1, 1, 5, dtype=torch.float64)
    torch.testing.assert_close(analytic(wave, x), slope(x))


def test_curves_are_u_shaped(found: Findings) -> None:
    curves = found.facts["differences"]
    assert len(curves) == 8 and "8 of 8 [68%, 100%] curves are U-shaped" in found.sentence
    for name, one in curves.items():
        assert one["u"] == one["curves"] == 1, name
        assert 1 / 30 < one["step"] / one["theory"] < 30, name
        assert 1 / 30 < one["error"] / one["error_theory"] < 30, name
        order = 1 if name.endswith("forward") else 2
        assert one["truncation"] == pytest.approx(order, abs=0.3), name
        assert one["rounding"] == pytest.approx(-1, abs=0.3), name


def test_more_precision_and_more_order_are_better(found: Findings) -> None:
    error = {name: one["error"] for name, one in found.facts["differences"].items()}
    for of in ("wave", "network"):
        assert error[f"{of} float64 forward"] < error[f"{of} float32 central"]
        for kind in ("float32", "float64"):
            assert error[f"{of} {kind} central"] < error[f"{of} {kind} forward"]
    for name, one in found.facts["differences"].items():
        assert one["analytic"] is None or one["analytic"] < one["error"], name


def test_counts(found: Findings) -> None:
    facts = found.facts["costs"]
    assert facts["forward"] and facts["central"] and facts["one"] and facts["check_ok"]
    assert facts["check"]["200"] < 200


def test_check_finds_what_is_wrong(found: Findings) -> None:
    assert found.facts["formulas"] == {
        "even kink": ["ok"],  # a blind spot of central differences, which the sentence names
        "kink": ["kink"],
        "right": ["ok"],
        "wrong": ["wrong"],
    }
    assert "passes |x| at 0" in found.sentence


def test_any_order_gives_the_same(rows: list[Row], found: Findings) -> None:
    assert checks.conclude(rows[::-1]) == found
    assert "NOT" not in found.sentence


def test_settings_are_alike() -> None:
    assert checks.QUICK.keys() == checks.FULL.keys() == set(checks.PARTS)


def test_lines_in_logarithms() -> None:
    assert exponent([(1, 3), (10, 300), (100, 30000)]) == pytest.approx(2)
    assert exponent([(1, 1), (2, 2)]) is None
    assert geometric([1, 100]) == pytest.approx(10)


@degenerate.every
def test_degenerate_measurements_are_concluded_from(rows: list[Row], kind: str) -> None:
    degenerate.concludes(checks, rows, kind)
