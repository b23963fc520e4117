"""Operator granularity: whole tensors, by hand and by norms of retained gradients."""

from __future__ import annotations

from math import isnan

import pytest
import torch
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.errors import GradtraceError, TooLarge


def leaf(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def operators(loss: Tensor, x: Tensor, rule: str = "greedy") -> list[str]:
    found = gt.trace(loss, granularity="operator", rule=rule, names={"x": x})
    return found.path("x").operators


def test_the_user_that_hands_back_the_most_is_followed() -> None:
    x = leaf(1.0, 2.0)
    loss = (3 * x).sum() + (x * x).sum()  # hands back 3 + 3, and 1 + 2 twice
    assert operators(loss, x)[0] == "MulBackward0"
    path = gt.trace(loss, granularity="operator", names={"x": x}).path("x")
    first = path.steps[0]
    assert first.gradient == 3 + 2 * 1 + 3 + 2 * 2
    assert first.share == 6 / 12
    assert first.index == () and isnan(path.weight)
    assert path.operators == ["MulBackward0", "SumBackward0", "AddBackward0"]


def test_sizes_add_up_though_elements_cancel() -> None:
    x = leaf(1.0, 1.0)
    sign = torch.tensor([5.0, -5.0], dtype=torch.float64)
    loss = (x * sign).sum() + x.exp().sum()  # |5| + |-5| beats e + e
    assert operators(loss, x) == ["MulBackward0", "SumBackward0", "AddBackward0"]


def test_ties_go_to_the_first_user() -> None:
    x = leaf(1.0)
    a, b = x.sin(), x.sin()
    loss = (a + b * 1.0).sum()
    greedy = gt.trace(loss, granularity="operator", names={"x": x}).path("x")
    assert greedy.steps[0].share == 0.5


def test_greedy_and_viterbi_differ() -> None:
    """Here z hands 2 + 2 back to y by greedy, 2 by viterbi; the sine beside it 3·cos 0 = 3."""
    x = leaf(0.0)
    y = x * 1.0
    z = y.tanh()
    loss = (2 * z).sum() + (2 * z).sum() + (3 * y.sin()).sum()
    assert operators(loss, x)[:2] == ["MulBackward0", "TanhBackward0"]
    assert operators(loss, x, "viterbi")[:2] == ["MulBackward0", "SinBackward0"]


def test_an_operator_with_several_outputs_is_entered_by_the_larger() -> None:
    x = leaf(3.0, 1.0, 2.0)
    values, _ = x.sort()
    low, high = values.split([1, 2])
    loss = low.sum() * 10 + high.sum()
    path = gt.trace(loss, granularity="operator", names={"x": x}).path("x")
    assert "SplitWithSizesBackward0" in path.operators
    assert path.steps[-1].operator == "AddBackward0"
    step = next(s for s in path.steps if s.operator == "SplitWithSizesBackward0")
    assert step.shape == (1,)  # by way of low


def test_a_leaf_without_gradient_has_no_path() -> None:
    x = leaf(1.0)
    trace = gt.trace((x * 0).sum(), granularity="operator", names={"x": x})
    with pytest.raises(GradtraceError, match="no path"):
        trace.path("x")
    assert trace.influence()["MulBackward0"].unreached == 1


def test_influence_counts_all_reached_elements_of_a_leaf() -> None:
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(self.a(x))
            return h + 10 * self.b(h)

    model = Model()
    with gt.watch(model) as watch:
        loss = model(torch.randn(2, 3)).square().sum()
    trace = watch.trace(loss, granularity="operator")
    table = trace.influence()
    reached = sum(int((trace.gradients[f"a.{n}"] != 0).sum()) for n in ("weight", "bias"))
    assert int(table["b"].count.t) == int(table["b"].count.e) == reached
    with gt.watch(model) as watch:
        losses = model(torch.randn(4, 3)).square().sum(1)
    pairs = watch.trace(losses, granularity="operator")
    assert pairs.influence("operators").pairs == 4


def test_what_needs_elements_is_refused() -> None:
    x = leaf(1.0, 2.0)
    trace = gt.trace(gt.label(x * x, 0, "slice").sum(), granularity="operator", names={"x": x})
    with pytest.raises(GradtraceError, match="as a whole"):
        trace.path("x", 0)
    with pytest.raises(GradtraceError, match="one path"):
        trace.paths("x")
    with pytest.raises(GradtraceError, match="granularity='scalar'"):
        trace.influence("labels")


def test_operators_too_large_for_a_matrix_are_followed_as_a_whole() -> None:
    torch.manual_seed(0)

    class Mix(torch.autograd.Function):
        """Hides from the recorder what it does, by numpy."""

        @staticmethod
        def forward(ctx, x, matrix):  # type: ignore[no-untyped-def]
            ctx.matrix = matrix
            return torch.from_numpy(matrix.numpy() @ x.detach().numpy())

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            return torch.from_numpy(ctx.matrix.numpy().T @ grad.numpy()), None

    x = torch.randn(40, dtype=torch.float64, requires_grad=True)
    matrix = torch.randn(40, 40, dtype=torch.float64)
    loss = Mix.apply(x, matrix).square().sum()
    with pytest.raises((TooLarge, GradtraceError)):
        gt.trace(loss, dense_limit=100)
    trace = gt.trace(loss, dense_limit=100, granularity="operator", names={"x": x})
    assert trace.path("x").operators == ["MixBackward", "PowBackward0", "SumBackward0"]
    torch.testing.assert_close(trace.gradients["x"], torch.autograd.grad(loss, x)[0])
    assert trace.influence().shares["MixBackward"] == 1.0


def test_functions_that_are_not_linear_are_refused_all_the_same() -> None:
    class Crooked(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x.clone()

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            return torch.from_numpy(grad.numpy() ** 2)

    x = torch.randn(40, dtype=torch.float64, requires_grad=True)
    with pytest.raises(gt.errors.NotLinear):
        gt.trace((Crooked.apply(x) * 2).sum(), dense_limit=10, granularity="operator")
