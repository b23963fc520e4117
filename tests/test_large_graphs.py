"""Large graphs: no recursion, nothing left behind."""

from __future__ import annotations

import json
from pathlib import Path

import fresh
import programs
import pytest
import torch
from thorough import few
from torch import Tensor

import gradtrace
from gradtrace.ir import interpreter

MANY = few(10_000, 100_000)
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
def test_many_operators(make, slope: float, schedule: str) -> None:
    loss, leaf = make(MANY)
    found = gradtrace.backward(loss, names={"x": leaf}, schedule=schedule)
    assert found["x"].tolist() == [slope, slope]


@pytest.mark.parametrize(("make", "slope"), [(chain, -1.0), (branches, -float(MANY))])
def test_many_operators_recorded(make, slope: float) -> None:
    loss, leaf = make(MANY)
    found = interpreter.run(programs.program(loss), gradtrace.semirings.SUM)
    assert found[leaf].tolist() == [slope, slope]


def test_graph_of_many_operators() -> None:
    loss, leaf = chain(MANY)
    graph = gradtrace.graph(loss, names={"x": leaf})
    assert len(graph) == MANY + 1


FREE = """
import sys, threading, torch, gradtrace, programs
from test_large_graphs import chain

def walked(what):
    loss, leaf = chain(int(sys.argv[1]))
    what(loss)

def freed():
    loss, leaf = chain(int(sys.argv[1]))
    loss = loss * torch.ones(()).requires_grad_().exp()
    loss.backward(retain_graph=False)
    try:
        gradtrace.backward(loss)
    except gradtrace.errors.FreedGraph:
        print("done")

threading.stack_size(1 << 20)
for what in (gradtrace.backward, programs.program, gradtrace.graph):
    thread = threading.Thread(target=walked, args=(what,))
    thread.start()
    thread.join()
thread = threading.Thread(target=freed)
thread.start()
thread.join()
"""


def test_a_deep_graph_that_was_walked_can_be_freed() -> None:
    """Nodes that Python has seen free one another by recursion, unless we see to it."""
    done = fresh.python("-c", FREE, str(MANY), cwd=Path(__file__).parent, check=True)
    assert done.stdout == "done\n"


LEFT = """
import gc, json, sys
import torch, gradtrace, programs
from gradtrace.ir import interpreter
from test_large_graphs import branches, chain

def tensors():
    gc.collect()
    return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())

def walked(loss):
    gradtrace.backward(loss)

def recorded(loss):
    interpreter.run(programs.program(loss), gradtrace.semirings.SUM)

def refused(loss):
    try:
        gradtrace.backward(loss)
    except gradtrace.errors.FreedGraph as error:
        assert "retain_graph" in str(error)
    else:
        raise AssertionError("the graph is freed")

def freed(_):
    loss, leaf = chain(300)
    loss = loss * leaf.exp().sum()  # what exp saves is gone after backward
    loss.backward()
    leaf.grad = None
    return loss, leaf

found = {}
for make, act in ((chain, walked), (branches, walked), (chain, recorded), (branches, recorded),
                  (freed, refused)):
    loss, leaf = make(300)
    counts = []
    gc.collect()
    gc.freeze()  # what is there already is not looked through again and again
    for _ in range(int(sys.argv[1])):
        act(loss)
        counts.append((tensors(), len(gc.get_objects())))
    gc.unfreeze()
    assert leaf.grad is None
    found[f"{act.__name__} {make.__name__}"] = counts
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def left() -> dict[str, list[list[int]]]:
    """How many tensors and objects there are after each pass, in a process in which no other test
    left threads or garbage behind.
    """
    done = fresh.python("-c", LEFT, str(ROUNDS), cwd=Path(__file__).parent, check=True)
    found: dict[str, list[list[int]]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    "what",
    [
        *("walked chain", "walked branches", "recorded chain", "recorded branches"),
        "refused freed",
    ],
)
def test_nothing_is_left_behind(left: dict[str, list[list[int]]], what: str) -> None:
    counts = left[what]
    assert len(counts) == ROUNDS
    assert counts[-1] == counts[2], "objects pile up"
