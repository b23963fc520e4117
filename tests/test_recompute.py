"""Values that are computed again, stretch by stretch: the same paths in less memory."""

from __future__ import annotations

from collections.abc import Iterable

import programs
import pytest
import torch
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.ir import memory
from gradtrace.ir.interpreter import gradient_of
from gradtrace.ir.program import MapTable, Step
from gradtrace.ir.recompute import RecomputedValues
from gradtrace.paths.paths import Path
from gradtrace.traced import Trace


class Skips(nn.Module):
    """Layers with a way past each, so that values live long."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        first = x
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x * first


def traced(rule: str, layers: int = 12) -> Trace:
    torch.manual_seed(1)
    model, x = Skips(layers), torch.randn(3, 8)
    with gt.watch(model) as watch:
        loss = model(x).square().sum()
    return watch.trace(loss, rule=rule)


def same(some: Iterable[Path], others: Iterable[Path]) -> None:
    """The same steps; numbers are summed in another order, maybe."""
    for mine, other in zip(some, others, strict=True):
        assert mine.index == other.index
        assert [(s.operator, s.index) for s in mine.steps] == [
            (s.operator, s.index) for s in other.steps
        ]
        assert mine.weight == pytest.approx(other.weight, rel=1e-5)
        assert mine.gradient == pytest.approx(other.gradient, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("budget", [1, 1_000, 4_000])
@pytest.mark.parametrize("rule", ["greedy", "edge", "viterbi"])
def test_paths_are_the_same(rule: str, budget: int) -> None:
    whole, bounded = traced(rule), traced(rule)
    bounded.budget = budget
    bounded.program.kept.clear()
    same(bounded.paths(sample=50), whole.paths(sample=50))
    assert bounded.builder(0).follower.budget == budget // 2
    name = "layers.0.weight"
    same(bounded.paths(name, k=5), whole.paths(name, k=5))
    same([bounded.path(name, (1, 2))], [whole.path(name, (1, 2))])


def test_all_is_kept_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = traced("viterbi")
    beside = memory.semiring_temporaries(trace.program)
    needed = memory.whole(trace.program, kept=False) + beside
    monkeypatch.setattr(memory, "available", lambda device: needed)
    assert trace.builder(0).follower.budget is None
    other = traced("viterbi")
    monkeypatch.setattr(memory, "available", lambda device: needed - 1)
    assert other.builder(0).follower.budget == (needed - 1) // 2


def test_memory_is_bounded() -> None:
    """A chain of 100 tensors of 4,000 bytes: of any depth, a stretch and one value a boundary."""
    x = torch.ones(1000, requires_grad=True)
    y = x
    for _ in range(100):
        y = y.tanh()
    program = programs.program(y.sum(), names={"x": x})
    values = RecomputedValues(program, program.seed, gradient_of, 80_000)
    most = 0
    for step in reversed(list(program.steps())):
        assert values[step.out].shape == step.shape
        held = {id(t): t.nbytes for t in (*values.kept.values(), *values.here.values())}
        most = max(most, sum(held.values()))
    assert len(values.starts) == 12  # ten steps a stretch
    assert most <= (12 + 10) * 4_000


def test_a_value_is_computed_twice_at_most_in_one_sweep() -> None:
    program = traced("greedy").program
    calls: dict[int, int] = {}

    def counted(step: Step, maps: MapTable, values: dict[int, Tensor]) -> Tensor:
        calls[step.out] = calls.get(step.out, 0) + 1
        return gradient_of(step, maps, values)

    values = RecomputedValues(program, program.seed, counted, 4_000)
    for step in reversed(list(program.steps())):
        _ = values[step.out]
    assert max(calls.values()) <= 2
