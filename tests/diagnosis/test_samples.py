"""Samples and numbers by which a part of the loss leaves the graph, while another trains on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from silent_cases import Net, data
from torch import Tensor, nn
from torch import distributions as D
from torch.nn import functional as F

import gradtrace as gt
from gradtrace.diagnosis.read_numbers import ReadNumbers


class Coder(nn.Module):
    """A variational autoencoder, or an agent with a critic."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 8)
        self.mu, self.scale = nn.Linear(8, 3), nn.Linear(8, 3)
        self.dec, self.critic = nn.Linear(3, 4), nn.Linear(7, 1)

    def drawn_from(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x).tanh()
        return self.mu(h), F.softplus(self.scale(h))


Drawn = Callable[[Coder, Tensor, Tensor, Tensor], Tensor]


def reconstruction(model: Coder, z: Tensor, x: Tensor) -> Tensor:
    return F.mse_loss(model.dec(z), x) + model.critic(torch.cat((z, x), 1)).mean()


def scored(model: Coder, z: Tensor, x: Tensor, logs: Tensor) -> Tensor:
    reward = model.critic(torch.cat((z, x), 1)).squeeze(1)
    return (reward.detach() * logs.sum(1)).mean() + reward.square().mean() + model.dec(z).mean()


def off(draw: Callable[[], Tensor]) -> Tensor:
    with torch.no_grad():
        return draw()


SAMPLES: dict[str, tuple[Drawn, str]] = {
    "Normal": (lambda m, x, a, b: reconstruction(m, D.Normal(a, b).sample(), x), "Normal.sample()"),
    "Independent": (
        lambda m, x, a, b: reconstruction(m, D.Independent(D.Laplace(a, b), 1).sample(), x),
        "Independent.sample()",
    ),
    "several": (
        lambda m, x, a, b: F.mse_loss(m.dec(D.Normal(a, b).sample((2,))).mean(0), x),
        "Normal.sample()",
    ),
    "Gamma": (
        lambda m, x, a, b: reconstruction(m, D.Gamma(a.exp(), b).sample(), x),
        "Gamma.sample()",
    ),
    "normal": (lambda m, x, a, b: reconstruction(m, torch.normal(a, b), x), "torch.normal()"),
    "beside features": (
        lambda m, x, a, b: m.critic(torch.cat((D.Normal(a, b).sample(), a, x[:, :1]), 1)).mean(),
        "Normal.sample()",
    ),
    "rsample": (lambda m, x, a, b: reconstruction(m, D.Normal(a, b).rsample(), x), ""),
    "noise": (lambda m, x, a, b: reconstruction(m, a + b * torch.randn_like(b), x), ""),
    "score function": (
        lambda m, x, a, b: scored(m, z := D.Normal(a, b).sample(), x, D.Normal(a, b).log_prob(z)),
        "",
    ),
    "score by hand": (
        lambda m, x, a, b: scored(m, z := torch.normal(a, b), x, -((z - a) / b).square()),
        "",
    ),
    "meant": (lambda m, x, a, b: reconstruction(m, off(D.Normal(a, b).sample), x), ""),
    "of the prior": (
        lambda m, x, a, b: reconstruction(m, D.Normal(0 * x[:, 1:], 1).sample(), x),
        "",
    ),
    "detached": (lambda m, x, a, b: reconstruction(m, D.Normal(a.detach(), 1).sample(), x), ""),
    "a target": (lambda m, x, a, b: F.mse_loss(m.dec(a), D.Normal(a, b).sample().mean() + x), ""),
}


def one_hot(places: Tensor) -> Tensor:
    return F.one_hot(places.squeeze(-1), 3).float()


def words(model: Coder, x: Tensor, a: Tensor) -> Tensor:
    """As a generator that is trained by labels; what reads its words is trained apart."""
    labels = F.cross_entropy(a[x[:, 0] > -9], torch.arange(len(a)) % 3)
    return labels + reconstruction(model, one_hot(a.softmax(-1).multinomial(1)), x)


DISCRETE: dict[str, tuple[Drawn, str]] = {
    "categorical": (
        lambda m, x, a, b: reconstruction(m, D.OneHotCategorical(logits=a).sample(), x),
        "OneHotCategorical.sample()",
    ),
    "bernoulli": (
        lambda m, x, a, b: reconstruction(m, torch.bernoulli(a.sigmoid()), x),
        "torch.bernoulli()",
    ),
    "in place": (
        lambda m, x, a, b: reconstruction(m, (a.sigmoid() > torch.rand(6, 3)).float(), x),
        "a comparison with torch.rand()",
    ),
    "multinomial": (
        lambda m, x, a, b: reconstruction(m, one_hot(a.softmax(-1).multinomial(1)), x),
        "torch.multinomial()",
    ),
    "entropy": (
        lambda m, x, a, b: (
            reconstruction(m, D.Bernoulli(logits=a).sample(), x)
            - D.Bernoulli(logits=a).entropy().mean()
        ),
        "Bernoulli.sample()",
    ),
    "straight-through": (
        lambda m, x, a, b: reconstruction(m, torch.bernoulli(p := a.sigmoid()) + p - p.detach(), x),
        "",
    ),
    "score function": (
        lambda m, x, a, b: scored(
            m, z := torch.bernoulli(p := a.sigmoid()), x, z * p.log() + (1 - z) * (1 - p).log()
        ),
        "",
    ),
    "labels": (lambda m, x, a, b: words(m, x, a), ""),
    "detached": (
        lambda m, x, a, b: reconstruction(m, torch.bernoulli(a.sigmoid()).detach(), x),
        "",
    ),
    "meant": (lambda m, x, a, b: reconstruction(m, off(lambda: torch.bernoulli(b)), x), ""),
    "dropped": (lambda m, x, a, b: reconstruction(m, a * (torch.rand(6, 3) < 0.8), x), ""),
    "Gibbs": (lambda m, x, a, b: m.mu(m.trunk(x + m.critic.bias * one_hot_like(a, x))).mean(), ""),
}


def one_hot_like(a: Tensor, x: Tensor) -> Tensor:
    return F.pad(torch.bernoulli(a.sigmoid()), (0, 1))


@pytest.mark.parametrize("name", [*SAMPLES, *(f"discrete {name}" for name in DISCRETE)])
def test_a_sample_that_another_term_hides(name: str) -> None:
    torch.manual_seed(0)
    model, (x, _) = Coder(), data(6)
    discrete = name.startswith("discrete ")
    loss_of, said = DISCRETE[name.removeprefix("discrete ")] if discrete else SAMPLES[name]
    with gt.watch(model, diagnose=True) as watch:
        a, b = model.drawn_from(x)
        loss = loss_of(model, x, a, b.tanh()) + 0.1 * (a.square() + b - b.log()).mean()
    found = [each for each in watch.diagnose(loss).findings if each.kind == "sample"]
    assert [each.title for each in found] == [f"a sample cuts the gradient off: {said}"] * bool(
        said
    )
    for each in found:
        assert each.severity == "warning"
        assert ("p - p.detach()" if discrete else "rsample()") in each.advice
        assert "mu.weight" in each.parameters and "dec.weight" not in each.parameters
        assert "lambda m, x, a, b" in each.line or "reconstruction(" in each.line


READ: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "float": lambda loss, extra: loss + 0.1 * float(extra.sum()),
    "item": lambda loss, extra: loss + extra.mean().item() / 3,
    "sum": lambda loss, extra: loss + sum(each.item() for each in extra[:, 0]),
    "mean": lambda loss, extra: loss - 0.25 * sum(float(x) for x in extra[:, 0]) / len(extra),
    "product": lambda loss, extra: loss * (1e-3 * extra.square().mean().item()),
}


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize("name", READ)
def test_a_term_that_is_read_into_python(name: str) -> None:
    torch.manual_seed(0)
    model, (x, y) = nn.ModuleDict({"net": Net(), "aux": nn.Linear(4, 2)}), data()
    with gt.watch(model, diagnose=True) as watch:
        loss = READ[name](F.cross_entropy(model["net"](x), y), model["aux"](x))
    (found,) = watch.diagnose(loss).findings
    assert found.title.startswith("no gradient: aux.weight, aux.bias (output detached)"), found
    assert "reads its numbers into Python" in found.evidence and "lambda loss" in found.line


def test_a_number_that_is_logged_is_not_taken_for_one_that_is_used() -> None:
    torch.manual_seed(0)
    model, (x, y) = nn.ModuleDict({"net": Net(), "aux": nn.Linear(4, 2)}), data()
    with gt.watch(model, diagnose=True) as watch:
        logged = model["aux"](x).mean().item()
        loss = 0.37 * F.cross_entropy(model["net"](x), y)
    (found,) = watch.diagnose(loss).findings
    assert logged and "never reaches the loss" in found.title


def test_numbers_that_anybody_may_have_written_are_nobodys() -> None:
    read = ReadNumbers()
    for number in (0.25, 0.5, 0.0, float("nan"), float("inf"), 1e-3):
        read.add(number, 1, "line")
    assert not any(read.values(each) for each in (0.75, 0.125, 1e-4, 0.0, 3.0, float("-inf")))
    read.add(0.7318, 2, "line")
    assert read.values(0.3 * 0.7318) == [2] and not read.values(0.3)
