"""Figure 1.2: facts that hold on any machine, and what is said of times that are made up."""

from __future__ import annotations

from random import Random
from typing import Any

import degenerate
import pytest
import torch

from gradtrace.experiments import layers
from gradtrace.experiments.harness.findings import Findings, Row
from gradtrace.experiments.layers import INFLUENCE, PYTORCH, SCHEDULES, STILL, WAYS

SMALL = {"layers": [1, 2, 5, 12], "rounds": 1}


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return [Row(cell, layers.measure(cell, print)) for cell in layers.cells(SMALL, 2)]


@pytest.fixture(scope="module")
def found(rows: list[Row]) -> Findings:
    return layers.conclude(rows)


def test_cells_are_every_depth_for_every_seed() -> None:
    cells = layers.cells(SMALL, 2)
    every = [(seed, n) for seed in (0, 1) for n in sorted(SMALL["layers"])]
    assert sorted((c["seed"], c["layers"]) for c in cells) == every
    # neither by depth nor alike: a machine that is slow for a while would bend the curve
    first, second = ([c["layers"] for c in cells if c["seed"] == seed] for seed in (0, 1))
    assert first != second and sorted(first) not in (first, second)
    assert cells == layers.cells(SMALL, 2)


def test_the_scalar_graph_is_exactly_linear_in_depth(rows: list[Row], found: Findings) -> None:
    assert found.facts["exactly_linear"]
    sizes = {r.cell["layers"]: r.result["vertices"] + r.result["edges"] for r in rows}
    # a layer's product has 20·20 scalars and pairs for weight and input, its sum and tanh the rest
    assert (sizes[12] - sizes[5]) == 7 * (sizes[2] - sizes[1])
    assert layers._growth(rows) == sizes[2] - sizes[1]


def test_a_graph_that_is_not_linear_is_told() -> None:
    assert layers._exact([1, 2, 5], [3, 5, 11])
    assert not layers._exact([1, 2, 5], [3, 5, 12])
    assert not layers._exact([1, 2, 5], [3, 6, 11])


def test_every_schedule_gives_pytorchs_gradient(rows: list[Row], found: Findings) -> None:
    assert all(set(row.result["differences"]) == set(SCHEDULES) for row in rows)
    assert found.facts["largest_difference"] < 1e-5
    assert found.facts["smallest_gradient"] > 1e-3  # zeros would agree with anything


def test_gradients_of_a_thousand_layers_are_not_zero() -> None:
    model, x, y = layers.network(1000, seed=0)
    loss = torch.nn.functional.mse_loss(model(x), y)
    (gradient,) = torch.autograd.grad(loss, [model[0].weight])
    assert float(gradient.norm()) > 1e-4


def test_networks_have_the_chapters_sizes_and_a_seed() -> None:
    before = torch.get_rng_state()
    model, x, y = layers.network(3, seed=5)
    shapes = [tuple(p.shape) for name, p in model.named_parameters() if "weight" in name]
    assert shapes == [(20, 10), (20, 20), (20, 20), (15, 20)]
    assert (x.shape, y.shape) == ((1, 10), (1, 15))
    again, other = layers.network(3, seed=5)[0], layers.network(3, seed=6)[0]
    assert torch.equal(model[0].weight, again[0].weight)
    assert not torch.equal(model[0].weight, other[0].weight)
    assert torch.equal(torch.get_rng_state(), before)


def test_recursion_is_refused_where_the_stack_ends_and_timed_all_the_same() -> None:
    deep = layers.measure({"layers": 500, "seed": 0, "rounds": 1}, print)
    assert deep["refused"] and len(deep["seconds"]["recursive"]) == 1
    assert deep["differences"]["recursive"] < 1e-5


def test_any_order_of_rows_gives_the_same(rows: list[Row], found: Findings) -> None:
    assert layers.conclude(rows[::-1]) == found


# Times that are made up ---------------------------------------------------------------------------


def made_up(bump: dict[str, dict[int, float]], refused: int = 10**9) -> Findings:
    """PyTorch takes 1 µs a layer, the k-th of the other ways k + 1; ``bump`` multiplies means."""
    depths = [1, *range(100, 1001, 100)]
    rows = []
    for n in depths:
        seconds = {}
        for k, way in enumerate(WAYS, 1):
            factor = bump.get(way, {}).get(n, 1.0)
            seconds[way] = [n * k * 1e-6, n * k * 1e-6 * (2 * factor - 1)]
        result: dict[str, Any] = {
            "operators": n,
            "vertices": 2 * n,
            "edges": 3 * n,
            "gradient": 1.0,
            "differences": dict.fromkeys(SCHEDULES, 0.0),
            "refused": n >= refused,
            "seconds": seconds,
        }
        rows.append(Row({"layers": n, "seed": 0, "rounds": 2}, result))
    return layers.conclude(rows)


def test_lines_are_called_lines() -> None:
    found = made_up({})
    assert "Time is linear in depth, from 25 to 1,000 layers" in found.sentence
    assert "not linear" not in found.sentence and "We see no spikes" in found.sentence
    assert found.facts["ratio"][INFLUENCE] == pytest.approx(len(WAYS))
    assert "A layer takes PyTorch 1 µs" in found.sentence


def test_recursion_is_told_with_its_depth() -> None:
    assert "too small for recursion from 500 layers on" in made_up({}, refused=500).sentence
    assert "recursion from" not in made_up({}).sentence


@pytest.mark.parametrize(
    ("bump", "words"),
    [
        ({"kahn": {200: 1.5, 500: 1.5, 800: 1.5}}, "points to the collector"),
        ({"kahn": {200: 1.5}}, "comes and goes"),
        ({"kahn": {200: 1.5, 500: 1.5, 800: 1.5}, STILL: {300: 1.5}}, "comes and goes"),
        ({PYTORCH: {200: 1.5}}, "0 of 9 [0%, 30%] of Kahn's mean times and 1 of 9 [2%"),
    ],
)
def test_spikes_are_told(bump: dict[str, dict[int, float]], words: str) -> None:
    sentence = made_up(bump).sentence
    assert "We see spikes" in sentence and words in sentence


MADE = {
    **dict.fromkeys(("operators", "vertices", "edges"), 1),
    "gradient": 1.0,
    "refused": False,
    "differences": dict.fromkeys(SCHEDULES, 0.0),
}
"""A result but for its times."""


def test_a_curve_is_not_called_a_line() -> None:
    found = made_up({})
    rows = [
        Row(
            {"layers": n, "seed": 0, "rounds": 1},
            {**MADE, "seconds": {way: [1e-9 * n**3 + 1e-9] for way in WAYS}},
        )
        for n in (1, 10, 100, 300, 1000)
    ]
    bent = layers.conclude(rows)
    assert "Time is not linear here" in bent.sentence != found.sentence


@pytest.mark.parametrize(("power", "linear"), [(1.0, True), (1.3, False), (0.8, False)])
def test_a_machine_of_changing_speed_makes_no_curve(power: float, linear: bool) -> None:
    """Times that are off by up to a fifth grow as they do."""
    noise = Random(0)

    def slow(depth: int) -> float:
        return 1e-4 * depth**power * noise.uniform(1, 1.2)

    rows = [
        Row(cell, {**MADE, "seconds": {way: [slow(cell["layers"])] for way in WAYS}})
        for cell in layers.cells(layers.FULL, 3)
    ]
    found = layers.conclude(rows)
    assert ("not linear" in found.sentence) != linear
    assert ("grows in proportion to" in layers.headline(found.facts)) == linear


@degenerate.every
def test_degenerate_measurements_are_concluded_from(rows: list[Row], kind: str) -> None:
    degenerate.concludes(layers, rows, kind)
