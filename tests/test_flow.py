"""Gradient along depth: norms against autograd's own, verdicts on nets whose fate is known."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest
import torch
from architectures import ARCHITECTURES
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import gradtrace
from gradtrace import flow as module
from gradtrace.errors import NotScalar, UnknownName
from gradtrace.flow import Flow, Wiring, flow_of, measure, sizes
from gradtrace.program import Program

WIDTH = 32
Loss = Callable[[nn.Module], Tensor]


def flow(model: nn.Module, loss_of: Loss) -> Flow:
    with gradtrace.watch(model) as watch:
        loss = loss_of(model)
    trace = watch.trace(loss, nonfinite="allow")
    return flow_of(trace.program, trace.names, trace.modules)


def plain(loss: Tensor, seed: Tensor | None = None) -> Flow:
    """Without a model."""
    program = gradtrace.program(loss)
    names = {leaf.value: f"leaf{n}" for n, leaf in enumerate(program.leaves)}
    return flow_of(program, names, {}, seed)


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(16, WIDTH), torch.randint(3, (16,))


def classified(model: nn.Module) -> Tensor:
    x, y = batch()
    return cross_entropy(model(x), y)


def deep(act: Callable[[], nn.Module], init: Callable[[Tensor], object], layers: int = 30) -> nn.Module:
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(WIDTH, WIDTH), act()]
        init(parts[-2].weight)  # type: ignore[arg-type]
    return nn.Sequential(*parts, nn.Linear(WIDTH, 3))


def normal(std: float) -> Callable[[Tensor], object]:
    return lambda weight: nn.init.normal_(weight, 0, std)


def words(found: Flow) -> dict[str, str]:
    return {row.module: row.verdict for row in found.rows if row.verdict}


class Residual(nn.Module):
    def __init__(self, layers: int = 30, gate: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU())
            for _ in range(layers)
        )
        self.out = nn.Linear(WIDTH, 3)
        self.gate = gate

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.gate * block(x)
        y: Tensor = self.out(x)
        return y


class Reader(nn.Module):
    """Reads a sequence and speaks at its end."""

    def __init__(self, kind: type[nn.Module], **options: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 8)
        self.rnn = kind(8, WIDTH, **options)
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.rnn(self.embed(x))
        y: Tensor = self.out(states[-1])
        return y


def read(steps: int) -> Loss:
    torch.manual_seed(2)
    x, y = torch.randint(20, (steps, 4)), torch.randint(3, (4,))
    return lambda model: cross_entropy(model(x), y)


# Verdicts ----------------------------------------------------------------------------------------


def test_small_weights_vanish() -> None:
    found = flow(deep(nn.Tanh, normal(0.05)), classified)
    assert found.verdict.startswith("Vanishing: the gradient falls from 0.")
    assert "He for ReLU, Xavier for tanh" in found.verdict
    assert found["0"].verdict == found["1"].verdict == "vanishing"
    assert found["60"].verdict == found["58"].verdict == ""
    assert found["0"].norm < found["60"].norm / 1e9


def test_the_numbers_of_the_verdict_are_those_of_the_profile() -> None:
    found = flow(deep(nn.Tanh, normal(0.05)), classified)
    body = found.profile[2:]  # the loss function is not the model's
    assert [level.module for level in body[:2]] == ["60", "59"]
    top, end = sorted(level.norm for level in body[:3])[1], sorted(x.norm for x in body[-7:])[3]
    assert f"from {top:.2g} at '59' to {end:.2g} at '3'" in found.verdict
    assert f"a factor of {top / end:.2g} over 56 operators" in found.verdict
    assert f"about {(top / end) ** (1 / 56):.3g} an operator" in found.verdict


def test_large_weights_explode() -> None:
    found = flow(deep(nn.Identity, normal(0.5)), classified)
    assert found.verdict.startswith("Exploding: the gradient rises from 0.")
    assert "clip_grad_norm_" in found.verdict
    assert found["0"].verdict == "exploding" and found["60"].verdict == ""


@pytest.mark.parametrize(
    "model",
    [
        deep(nn.ReLU, nn.init.kaiming_normal_),
        deep(nn.Tanh, nn.init.xavier_normal_),
        Residual(),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3)),
    ],
    ids=["he", "xavier", "residual", "shallow"],
)
def test_healthy_nets_are_called_healthy(model: nn.Module) -> None:
    found = flow(model, classified)
    assert found.verdict.startswith("The gradient neither vanishes nor explodes: it ")
    assert len(found.findings) == 1 and words(found) == {}


@pytest.mark.parametrize("name", ["gpt2", "mamba", "resnet"])
def test_real_architectures_are_healthy(name: str) -> None:
    found = flow(*ARCHITECTURES[name]())
    assert found.verdict.startswith("The gradient neither vanishes nor explodes")
    assert words(found) == {}


def test_a_rise_or_fall_below_the_factor_is_none() -> None:
    x = torch.ones(3, requires_grad=True)

    def chain(factor: float, n: int = 10) -> Tensor:
        y = x
        for _ in range(n):
            y = y * factor
        return y.sum()

    # from the second of the first three to the second of the last three: seven products
    inside, outside = 10 ** (2.99 / 7), 10 ** (3.01 / 7)
    assert "neither" in plain(chain(inside)).verdict
    assert "neither" in plain(chain(1 / inside)).verdict
    assert plain(chain(outside)).verdict.startswith("Exploding")
    assert plain(chain(1 / outside)).verdict.startswith("Vanishing")


def test_one_odd_operator_does_not_decide() -> None:
    y = x = torch.ones(3, requires_grad=True)
    for n in range(20):
        y = y * (1e-6 if n == 0 else 1e6 if n == 1 else 1.0)
    found = plain(y.sum())
    assert found.profile[-1].norm == pytest.approx(1e6 * math.sqrt(3))
    assert "neither" in found.verdict
    assert x.grad is None


# Short graphs, and the loss function -------------------------------------------------------------


def test_one_operator() -> None:
    x = torch.tensor([3.0, 4.0], requires_grad=True)
    found = plain(x.sum())
    assert [tuple(level)[:4] for level in found.profile] == [(0, 1.0, "SumBackward0", "")]
    assert found.verdict == "The graph is 1 operator deep, too few to vanish or explode."
    (row,) = found.rows
    assert (row.norm, row.handed, row.gain, row.calls, row.verdict) == (1.0, None, None, 1, "")
    assert row.own == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize("make", [lambda x: x.relu(), lambda x: x.view(()), lambda x: 1 * x])
def test_the_loss_is_on_the_activation_side_even_if_it_is_a_view(
    make: Callable[[Tensor], Tensor],
) -> None:
    found = plain(make(torch.tensor(3.0, requires_grad=True)))
    assert len(found.profile) == 1 and "1 operator deep" in found.verdict


def test_two_operators_are_too_few() -> None:
    x = torch.tensor(3.0, requires_grad=True)
    found = plain((x * 1e-6).tanh())
    assert "The graph is 2 operators deep" in found.verdict


def test_numbers_alone_may_vanish_too() -> None:
    y = torch.tensor(0.3, requires_grad=True)
    for _ in range(30):
        y = (y * 0.5).tanh()
    assert plain(y).verdict.startswith("Vanishing: the gradient falls from 1 at depth 1 (")


def test_a_mean_over_many_is_no_fall() -> None:
    x = torch.ones(4_000_000, requires_grad=True)
    found = plain((x * 2).neg().neg().mean())
    assert found.profile[1].norm == pytest.approx(1 / 2000)
    assert "neither" in found.verdict


def test_a_loss_that_is_nearly_0_is_no_fall() -> None:
    model = deep(nn.Tanh, nn.init.xavier_normal_, 4)
    x, _ = batch()
    target = model(x).detach() + 1e-6
    found = flow(model, lambda m: mse_loss(m(x), target))
    assert found.profile[2].norm < found.profile[0].norm * 1e-5
    assert "neither" in found.verdict


def test_a_vector_of_losses_and_a_seed() -> None:
    x = torch.arange(1.0, 7.0).reshape(3, 2).requires_grad_()
    loss = x.pow(2).sum(1)
    seed = torch.tensor([0.0, 2.0, 0.0])
    found = plain(gradtrace_vector := loss, seed) if False else _seeded(loss, seed)
    assert found.profile[0].norm == 2.0
    assert found.profile[0].zeros == pytest.approx(2 / 3)
    assert found.rows[0].own == pytest.approx(math.hypot(2 * 2 * 3, 2 * 2 * 4))
    with pytest.raises(NotScalar, match="a weight for each element"):
        _seeded(loss, torch.ones(2))


def _seeded(loss: Tensor, seed: Tensor) -> Flow:
    program = gradtrace.program(loss, cotangent=torch.ones_like(loss))
    return flow_of(program, {leaf.value: "x" for leaf in program.leaves}, {}, seed)
