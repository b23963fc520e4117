"""Large graphs: no recursion, nothing left behind."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
import torch
from torch import Tensor

import gradtrace
from gradtrace import engine
from gradtrace.errors import FreedGraph

MANY = 100_000
ROUNDS = 12
"""How often a pass is run again: what each leaves behind, were it one object, is seen in fewer."""


def chain(operators: int) -> tuple[Tensor, Tensor]:
    leaf = torch.ones(2, requires_grad=True)
    x = leaf
    for _ in range(operators - 1):
        x = x.neg()
    return x.sum(), leaf


def branches(operators: int) -> tuple[Tensor, Tensor]:
    leaf = torch.ones(2, requires_grad=True)
    return torch.stack([leaf.neg() for _ in range(operators)]).sum(), leaf


@pytest.mark.parametrize("schedule", ["kahn", "creation"])
@pytest.mark.parametrize(("make", "slope"), [(chain, -1.0), (branches, -float(MANY))])
def test_100_000_operators(make, slope: float, schedule: str) -> None:
    loss, leaf = make(MANY)
    found = gradtrace.backward(loss, names={"x": leaf}, schedule=schedule)
    assert found["x"].tolist() == [slope, slope]


@pytest.mark.parametrize(("make", "slope"), [(chain, -1.0), (branches, -float(MANY))])
def test_100_000_operators_recorded(make, slope: float) -> None:
    loss, leaf = make(MANY)
    found = engine.run(gradtrace.program(loss), gradtrace.SUM)
    assert found[leaf].tolist() == [slope, slope]


def test_graph_of_100_000_operators() -> None:
    loss, leaf = chain(MANY)
    graph = gradtrace.graph(loss, names={"x": leaf})
    assert len(graph) == MANY + 1
    assert graph.scalar_vertices == 2 * MANY + 1
    assert graph.scalar_edges == 2 * MANY


FREE = """
import torch, gradtrace
from test_scale import chain
for what in (gradtrace.backward, gradtrace.program, gradtrace.graph):
    loss, leaf = chain(100_000)
    what(loss)
    del loss, leaf
loss, leaf = chain(100_000)
loss = loss * torch.ones(()).requires_grad_().exp()
loss.backward(retain_graph=False)
try:
    gradtrace.backward(loss)
except gradtrace.errors.FreedGraph:
    pass
del loss
print("done")
"""


def test_a_deep_graph_that_was_walked_can_be_freed() -> None:
    """Nodes that Python has seen free one another by recursion, unless we see to it."""
    here = __file__.rsplit("/", 1)[0]
    done = subprocess.run(
        [sys.executable, "-c", FREE], cwd=here, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"


def _tensors() -> int:
    gc.collect()
    return sum(issubclass(type(x), Tensor) for x in gc.get_objects())


@pytest.mark.parametrize("make", [chain, branches])
@pytest.mark.parametrize("recorded", [False, True])
def test_nothing_is_left_behind(make, recorded: bool) -> None:
    loss, leaf = make(3_000)
    counts = []
    gc.freeze()  # what is there already is not looked through again and again
    try:
        for _ in range(ROUNDS):
            if recorded:
                engine.run(gradtrace.program(loss), gradtrace.SUM)
            else:
                gradtrace.backward(loss)
            counts.append((_tensors(), len(gc.get_objects())))
    finally:
        gc.unfreeze()
    assert counts[-1] == counts[2], "objects pile up"
    assert leaf.grad is None


def test_an_error_in_a_deep_graph_leaves_nothing_behind() -> None:
    leaf = torch.ones(2, requires_grad=True)
    x = leaf.exp()
    for _ in range(5_000):
        x = x.neg()
    loss = x.sum()
    loss.backward()
    before = _tensors()
    for _ in range(3):
        with pytest.raises(FreedGraph, match="retain_graph"):
            gradtrace.backward(loss)
    assert _tensors() == before
