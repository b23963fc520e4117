"""Memory in a loop of traces: each returns it all, without Python's collector."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import thorough
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import gradtrace as gt
from gradtrace.traced import Trace
from gradtrace.tracing.kept_plans import forget

WARM = 3
"""Traces after which plans, recordings and tables of constants are kept."""


class Deep(nn.Module):
    """Four operators a layer: a residual network, the layers of which share no weights."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


@pytest.fixture(autouse=True)
def uncollected() -> Iterator[None]:
    forget()
    gc.collect()
    gc.freeze()  # only what is made from here on is counted
    gc.disable()
    yield
    gc.enable()
    forget()


def alive() -> tuple[int, int]:
    """The tensors that Python has, and the bytes of their memory."""
    found = (x for x in gc.get_objects() if isinstance(x, Tensor))
    tensors = [x for x in found if not isinstance(x, FakeTensor)]  # PyTorch keeps some for good
    storages = {s.data_ptr(): s.nbytes() for s in (x.untyped_storage() for x in tensors)}
    return len(tensors), sum(storages.values())


ASKED: dict[str, Callable[[Trace], object]] = {
    "influence": lambda trace: trace.influence(),
    "a sample": lambda trace: trace.influence(sample=20),
    "flow": lambda trace: trace.norms(),
    "path": lambda trace: trace.path("layers.0.weight", (1, 2)),
    "decompose": lambda trace: trace.decompose(["layers.1"]).shares,
}


def looped(layers: int, rounds: int, ask: Callable[[Trace], object]) -> list[tuple[int, int]]:
    """What is alive after each trace."""
    torch.manual_seed(0)
    model, x = Deep(layers), torch.randn(2, 6)
    found = []
    for _ in range(rounds):
        with gt.watch(model) as watch:
            loss = model(x).square().mean()
        ask(watch.trace(loss))
        del watch, loss
        found.append(alive())
    return found


@pytest.mark.parametrize("name", ASKED)
def test_a_loop_of_traces_holds_no_more_than_one(name: str) -> None:
    found = looped(thorough.few(30, 300), WARM + 4, ASKED[name])
    assert set(found[WARM:]) == {found[WARM]}


@pytest.mark.thorough
def test_a_hundred_traces_of_5000_operators() -> None:
    found = looped(1_250, 100, ASKED["influence"])
    assert set(found[WARM:]) == {found[WARM]}
