"""Masses with high powers, where the paths of a component's own leaves outweigh all others."""

from __future__ import annotations

from math import inf

import pytest
import torch
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.measures import mass
from gradtrace.semirings.additive import LogAbs
from gradtrace.traced import Trace
from gradtrace.tracing.every_path import every_path


class Rivals(nn.Module):
    """An LSTM and a GRU side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(50, 8), nn.Linear(8, 50)
        self.lstm, self.gru = nn.LSTM(8, 8), nn.GRU(8, 8)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        found: Tensor = self.out(self.lstm(x)[0] + self.gru(x)[0])
        return found


class Cells(nn.Module):
    """Two cells, called step by step: paths come back to them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.one, self.two = nn.Embedding(9, 2), nn.GRUCell(2, 2), nn.RNNCell(2, 2)

    def forward(self, words: Tensor) -> Tensor:
        state = torch.zeros(1, 2)
        for word in words:
            x = self.embed(word).unsqueeze(0)
            state = 0.5 * (self.one(x, state) + self.two(x, state))
        return state


def traced(model: nn.Module, rule: str = "greedy", words: int = 7) -> Trace:
    torch.manual_seed(3)
    model = type(model)().double()
    given = torch.randint(9, (words,))
    torch.set_default_dtype(torch.float64)
    try:
        with gt.watch(model) as watch:
            loss = model(given).square().mean()
    finally:
        torch.set_default_dtype(torch.float32)
    return watch.trace(loss, rule=rule)


@pytest.mark.parametrize("p", [1, 2, 8, 16, 17, 64, 300])
def test_branches_add_up(p: float) -> None:
    shares = traced(Rivals()).mass(["lstm", "gru"], p=p).shares
    assert sum(shares.values()) == pytest.approx(1, abs=1e-12)


def test_the_limit_is_the_heaviest_path() -> None:
    trace = traced(Rivals(), "viterbi")
    heaviest = trace.paths("embed.weight", k=1)[0]
    (winner,) = {"lstm", "gru"} & set(heaviest.modules)
    shares = trace.mass(["lstm", "gru"], p=300).shares
    assert shares[winner] > 1 - 1e-6


@pytest.mark.parametrize("p", [1, 3, 40])
def test_paths_that_come_back(p: float) -> None:
    """All paths, one by one."""
    trace = traced(Cells(), words=2)
    found = trace.mass(["one", "two"], p=p)
    assert found.shares.keys() == {"one", "two"}
    paths = every_path(trace, limit=200_000)
    for name in ("one", "two"):
        mine = [path for path in paths if not path.name.startswith(name)]
        through = sum(abs(path.weight) ** p for path in mine if name in path.modules)
        every = sum(abs(path.weight) ** p for path in mine)
        assert 0 < through < every
        assert found.shares[name] == pytest.approx(through / every, rel=1e-9)


@pytest.mark.parametrize("p", [1, 2.5, 8])
def test_logarithms_say_the_same(p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for model in (Rivals(), Cells()):
        trace = traced(model)
        wanted = trace.mass(p=p)
        monkeypatch.setattr(mass, "LOGARITHMS_FROM", 0)
        found = trace.mass(p=p)
        monkeypatch.undo()
        for mine, theirs in zip(found, wanted):
            assert mine.mass == pytest.approx(theirs.mass, rel=1e-9)
            assert mine.eligible == pytest.approx(theirs.eligible, rel=1e-9)


def test_a_semiring_of_logarithms() -> None:
    gt.testing.check_semiring(LogAbs(p=3.0))
    x = torch.tensor([[3.0, -inf, 1.0]], dtype=torch.float64)
    assert LogAbs().fold((x,), 1)[0].item() == pytest.approx(3.3219280948873623)  # log₂ 10
    assert LogAbs().fold((x[:, :0],), 1)[0].item() == -inf
