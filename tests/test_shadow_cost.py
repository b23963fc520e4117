"""The program in C++ of the experiment shadow_cost: gradients and counts, never times."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

import gradtrace as gt
from experiments import shadow_cost

SIZES = {"rows": shadow_cost.CPP, "seed": 0, "hidden": 7, "optimise": "-O1"}
pytestmark = [
    pytest.mark.xdist_group("shadow_cost"),  # compiled once
    pytest.mark.skipif(not shadow_cost.COMPILER, reason="needs a C++ compiler"),
]


@pytest.mark.parametrize("way", shadow_cost.PROGRAMS)
def test_its_gradient_is_ours(way: str) -> None:
    """One step on one batch, without dropout: what was subtracted is the rate × our gradient."""
    cell = {**SIZES, "program": way, "samples": 12, "batch": 12, "epochs": 1}
    (x, y), start = shadow_cost.pictures(cell), [*shadow_cost.parameters(cell)]
    told = shadow_cost.program(cell, [x, y, *start], dropout=0.0)
    names = {str(at): p.requires_grad_() for at, p in enumerate(start)}
    hidden = ((x @ start[0] + start[1]).relu() @ start[2] + start[3]).relu()
    loss = cross_entropy(hidden @ start[4] + start[5], y)
    found = gt.backward(loss, names=names)
    assert told["loss"] == pytest.approx([loss.item()], rel=1e-5)
    before = torch.cat([p.detach().flatten() for p in start])
    ours = torch.cat([found[name].flatten() for name in names])
    end = torch.tensor(told["parameters"])
    torch.testing.assert_close(before - end, shadow_cost.RATE * ours, rtol=1e-3, atol=1e-6)


def test_only_cycles_keep_objects_and_all_train_alike() -> None:
    settings = {"samples": 40, "batch": 10, "epochs": 4}
    cells = [{**SIZES, **settings, "program": way} for way in shadow_cost.PROGRAMS]
    freed, late, cycles = (shadow_cost.measure(cell) for cell in cells)
    assert freed["objects"] == late["objects"] == [6] * 4  # the parameters
    assert cycles["objects"] == [6 + 17 * 4 * epoch for epoch in range(1, 5)]
    assert freed["loss"] == late["loss"] == cycles["loss"]
    assert freed["loss"][-1] < freed["loss"][0]  # it learns
