"""Path entropy: its bound, and what it counts."""

from __future__ import annotations

import math
from typing import Any

import degenerate
import pytest
import torch

import gradtrace as gt
from gradtrace.experiments import path_entropy as experiment
from gradtrace.experiments.harness.findings import Row
from gradtrace.semirings import COUNT

SMALL = {"widths": [4, 32, 256], "points": 400, "epochs": [0, 1], "samples": 16}


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return [
        Row(cell, experiment.measure(cell, lambda _: None)) for cell in experiment.cells(SMALL, 2)
    ]


def test_entropy_is_at_most_the_logarithm_of_the_count(rows: list[Row]) -> None:
    for row in rows:
        for found in (each for one in row.result["networks"] for each in one.values()):
            assert found["bounded"] and found["counted"]
            for loss, paths in experiment.PATHS.items():
                bound = math.log(paths * row.cell["width"])
                assert all(0 < entropy < bound + 1e-9 for entropy in found[loss])
            assert all(0 <= entropy <= math.log(4) for entropy in found["operator"])


def test_entropy_of_untrained_networks_grows_with_width(rows: list[Row]) -> None:
    """From one width to the next there are eight times as many paths."""
    found = experiment.conclude(rows)
    assert found.facts["grows untrained"] and found.facts["bounded"] and found.facts["counted"]


@pytest.mark.parametrize("width", [1, 5])
def test_ways_to_write_the_loss(width: int) -> None:
    """Equal in value and gradient, but not in the number of paths."""
    x, labels = experiment.points(8, 0)
    x, labels = x[None], labels[None]
    model = experiment.Networks(width, [1])
    x.requires_grad_()
    losses = experiment.losses(model, x, labels)
    (true,) = torch.autograd.grad(losses["fused"], x, retain_graph=True)
    for name, loss in losses.items():
        torch.testing.assert_close(loss, losses["fused"])
        gradient = gt.backward(loss, names={"x": x})["x"]
        torch.testing.assert_close(gradient, true, rtol=1e-4, atol=1e-6)
        count = gt.backward(loss, COUNT, names={"x": x})["x"]
        assert bool((count == experiment.PATHS[name] * width).all())


def test_entropy_by_hand() -> None:
    """One hidden unit that is on: both scores have the same |gradient|, so the two paths weigh as
    the two outgoing weights do.
    """
    model = experiment.Networks(1, [0])
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), (1.0, 1.0, [[3.0, 1.0]], 0.0)):
            parameter.copy_(torch.tensor(value))
    (found,) = experiment.spread(model, torch.ones(1, 2, 4), torch.tensor([[0, 1]]))
    right = -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
    assert found["fused"] == pytest.approx([right] * 4, abs=1e-9)


def test_a_cell_is_measured_the_same_again(rows: list[Row]) -> None:
    state = torch.get_rng_state()
    assert experiment.measure(rows[-1].cell, lambda _: None) == rows[-1].result
    assert torch.equal(state, torch.get_rng_state())


def test_conclusions(rows: list[Row]) -> None:
    found = experiment.conclude(rows)
    assert experiment.conclude(rows[::-1]) == found
    assert "4 to 256 units" in found.sentence and "is not confirmed" in found.sentence
    # Six seeds with the relevant feature above, and with it below.
    for sign, word in ((1, "above"), (-1, "below")):
        shift = {loss: [float(sign), 0.0, 0.0, 0.0] for loss in experiment.PATHS}
        said = experiment.conclude(_changed(rows, shift, times=3)).sentence
        assert f"lies {word} the irrelevant ones at 4, 32, 256 hidden units" in said
        assert ("is confirmed" if sign > 0 else "is contradicted") in said


def _changed(rows: list[Row], shift: dict[str, list[float]], times: int = 1) -> list[Row]:
    """The rows with other entropies, each network several times."""

    def networks(row: Row) -> list[dict[str, Any]]:
        return [
            {epochs: {**found, **shift} for epochs, found in one.items()}
            for one in row.result["networks"] * times
        ]

    return [Row(row.cell, {"networks": networks(row)}) for row in rows]


def test_networks_side_by_side_are_networks() -> None:
    """One that is trained beside another is as alone, and is measured alike."""
    cell = {"width": 4, "points": 400, "epochs": [0, 1], "samples": 16}
    alone, both = (experiment.measure({**cell, "seeds": n}, lambda _: None) for n in (1, 2))
    for epochs, found in alone["networks"][0].items():
        for name, value in found.items():
            assert both["networks"][0][epochs][name] == pytest.approx(value, rel=1e-4), name


def test_distances_from_the_published_means(rows: list[Row]) -> None:
    """Two widths of theirs are among these; one mean is moved onto the published one."""
    found = experiment.conclude(rows)
    assert set(found.facts["apart"]) == {"4", "32"} and "of 2 means are within" in found.sentence
    exact = [
        each
        for row in rows
        for each in _changed(
            [row], {"shifted": [experiment.THEIRS.get(row.cell["width"], 0.0)] * 4}
        )
    ]
    found = experiment.conclude(exact)
    assert found.facts["apart"] == {"4": 0.0, "32": 0.0}
    assert "2 of 2 means are within 0.15 nats of theirs, 2 with their whole" in found.sentence
    assert "networks give the published numbers" in found.sentence
    assert "2 of their 2 mean entropies" in experiment.headline(found.facts)


@degenerate.every
def test_degenerate_measurements_are_concluded_from(rows: list[Row], kind: str) -> None:
    degenerate.concludes(experiment, rows, kind)
