"""What keeps a model from learning beside its gradient, and what a diagnosis does not look at."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from healthy_cases import CASES as HEALTHY
from silent_cases import Net, Step, data
from torch import Tensor, nn
from torch.nn import functional as F

import gradtrace as gt
from gradtrace.diagnosis import Diagnosis


def diagnosed(model: nn.Module, step: Step, **options: Any) -> Diagnosis:
    torch.manual_seed(0)
    with gt.watch(model) as watch:
        loss = step()
    return watch.diagnose(loss, **options)


def net() -> tuple[nn.Module, Step]:
    model = Net(torch.tanh)
    x, y = data()
    return model, lambda: F.cross_entropy(model(x), y)


def test_parameters_that_no_optimiser_has() -> None:
    model, step = net()
    enc = torch.optim.SGD(model.enc.parameters(), 0.1)
    (found,) = diagnosed(model, step, optimizer=enc).findings
    assert (found.kind, found.severity, found.module) == ("optimiser", "error", "head")
    assert found.parameters == ("head.weight", "head.bias")
    head = torch.optim.Adam(model.head.parameters())
    assert diagnosed(model, step, optimizer=[enc, head]).healthy
    other = torch.optim.SGD(net()[0].parameters(), 0.1)
    (found,) = diagnosed(model, step, optimizer=other).findings
    assert len(found.parameters) == 4 and "4 tensors that are not of this model" in found.evidence


def test_a_learning_rate_of_0_unless_a_scheduler_began_with_it() -> None:
    model, step = net()
    (found,) = diagnosed(model, step, optimizer=torch.optim.SGD(model.parameters(), 0.0)).findings
    assert (found.kind, found.severity) == ("learning rate", "error")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: n / 10)
    warm = diagnosed(model, step, optimizer=optimizer)
    assert warm.healthy and [each.kind for each in warm.findings] == ["learning rate"]


def test_gradients_that_are_left_over() -> None:
    model, step = net()
    step().backward()
    assert not diagnosed(model, step).findings  # of this very loss
    for parameter in model.parameters():
        parameter.grad.mul_(2.0**16)  # a GradScaler's
    assert not diagnosed(model, step).findings
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 1e-2  # of the step before
    assert not diagnosed(model, step).findings
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 10
    (found,) = diagnosed(model, step).findings
    assert (found.kind, found.severity) == ("left over", "note") and "zero_grad" in found.advice


def test_evaluation_mode_is_noted_where_it_matters() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))
    x, y = data()
    assert not diagnosed(model, lambda: F.cross_entropy(model(x), y)).findings
    model.eval()
    found = diagnosed(model, lambda: F.cross_entropy(model(x), y))
    assert found.healthy and [each.kind for each in found.findings] == ["mode"]
    plain, step = net()
    plain.eval()
    assert not diagnosed(plain, step).findings


def test_it_says_what_is_frozen_and_what_it_did_not_look_at() -> None:
    model, step = net()
    model.enc.requires_grad_(False)
    said = " ".join(str(diagnosed(model, step)).split())
    assert "Frozen (requires_grad=False), so it does not learn: enc.weight, enc.bias; 30 of" in said
    assert "gradient at 2 parameters. Not looked at: the optimiser (none was given" in said
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    said = " ".join(str(diagnosed(model, step, optimizer=optimizer)).split())
    assert "2 parameters, and the optimiser. Not looked at: whether labels" in said
    with gt.watch(model, diagnose=False) as watch:
        loss = step()
    assert "the values of the forward pass" in " ".join(str(watch.diagnose(loss)).split())
    model.head.weight.requires_grad_(False)
    model.head.bias.requires_grad_(False)
    assert "Not looked at" not in str(diagnosed(model, step))  # there is enough to do


def test_what_a_reentrant_checkpoint_hides_is_said() -> None:
    found = diagnosed(*HEALTHY["reentrant_checkpoint_with_an_input_that_requires_grad"]())
    assert found.healthy and "vanish or explode was not measured: a reentrant" in str(found)


def test_a_loss_outside_the_watch_is_told_only_where_something_is_sought() -> None:
    model, _ = net()
    x, y = data()
    for cut, said in ((False, False), (True, True)):
        with gt.watch(model) as watch:
            h = model.enc(x)
            scores = model.head(h.detach() if cut else h)
        found = watch.diagnose(F.cross_entropy(scores, y))
        assert ("computed outside of the watch" in str(found)) is said


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "softmax twice": (lambda z, y: F.cross_entropy(z.softmax(-1), y), "warning"),
    "sigmoid twice": (
        lambda z, y: F.binary_cross_entropy_with_logits(z[:, 0].sigmoid(), (y > 0).float()),
        "warning",
    ),
    "sigmoid twice, bounded": (
        lambda z, y: F.binary_cross_entropy_with_logits(
            z[:, 0].sigmoid().clamp(1e-6, 1 - 1e-6), (y > 0).float()
        ),
        "warning",
    ),
    "no logarithm": (lambda z, y: F.nll_loss(z.softmax(-1).clone(), y), "error"),
    "divergence of probabilities": (
        lambda z, y: F.kl_div(z.softmax(-1), z.detach().softmax(-1), reduction="batchmean"),
        "error",
    ),
    "scores for log-probabilities": (lambda z, y: F.nll_loss(z * 9, y), "warning"),
    "divergence of scores": (
        lambda z, y: F.kl_div(z * 9, z.detach().softmax(-1), reduction="batchmean"),
        "warning",
    ),
    "broadcast in a loss": (
        lambda z, y: F.poisson_nll_loss(z[:, :1], y.float()),
        "warning",
    ),
    "broadcast rewards": (lambda z, y: -(z.log_softmax(-1)[:, :1] * y).mean(), "warning"),
    "broadcast": (lambda z, y: (z[:, :1] - y.float()).square().mean(), "warning"),
    "broadcast distance": (lambda z, y: torch.dist(z[:, :1], y.float()), "warning"),
    "broadcast images": (
        lambda z, y: (z.reshape(-1, 3, 1).mT - torch.ones(len(y), 3)).square().mean(),
        "warning",
    ),
    "pairs of rows": (lambda z, y: (z[:, None] - torch.ones(len(y), 3)).square().mean(), ""),
    "one channel": (lambda z, y: F.mse_loss(z[:, None], torch.ones(len(y), 1, 3)), ""),
    "broadcast twice": (
        lambda z, y: -(y * (p := z[:, :1].sigmoid()).log() + (1 - y) * (1 - p).log()).mean(),
        "warning",
    ),
    "logits": (lambda z, y: F.cross_entropy(z, z.detach().softmax(-1)), ""),
    "log_softmax": (lambda z, y: F.nll_loss(z.log_softmax(-1), y), ""),
    "log of a softmax": (lambda z, y: F.nll_loss(z.softmax(-1).log(), y), ""),
    "rewards": (lambda z, y: -(z.log_softmax(-1)[:, 0] * y).mean(), ""),
    "one shape": (lambda z, y: F.mse_loss(z[:, 0], y.float()), ""),
    "all pairs": (lambda z, y: (z[:, :1] - z[:, 0]).square().mean() + z.square().mean(), ""),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_are_given_what_they_do_not_expect(name: str) -> None:
    model = Net(torch.tanh)
    x, y = data()
    loss, severity = LOSSES[name]
    found = diagnosed(model, lambda: loss(model(x), y))
    assert [each.severity for each in found.findings if each.kind == "loss"] == [severity] * bool(
        severity
    ), str(found)
    if severity:
        assert "LOSSES" not in found.findings[0].line and "lambda z, y" in found.findings[0].line


ELSEWHERE = nn.Linear(6, 3)


class Lists(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first = kind, nn.Linear(4, 6)
        self.scale = torch.ones(6, requires_grad=True)
        self.scales = [nn.Parameter(torch.ones(6))]

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.kind == "anew":
            return nn.Linear(6, 3)(h)  # HERE
        if self.kind == "elsewhere":
            return ELSEWHERE(h)  # HERE
        return h * (self.scale if self.kind == "tensor" else self.scales[0])


@pytest.mark.parametrize(
    ("kind", "title", "advice"),
    [
        ("tensor", "not registered: scale$", "nn.Parameter"),
        ("list", r"not registered: scales\[0\]$", "nn.ParameterList"),
        ("anew", "parameters are made anew in the forward pass", "__init__"),
        ("elsewhere", "parameters are used in the model that are not its own", "__init__"),
    ],
)
def test_parameters_that_the_model_does_not_list(kind: str, title: str, advice: str) -> None:
    model, (x, y) = Lists(kind), data()
    (found,) = diagnosed(model, lambda: F.cross_entropy(model(x), y)).findings
    assert found.kind == "unregistered" and re.match(title, found.title), found
    assert advice in found.advice and ("# HERE" in found.line) == (kind in ("anew", "elsewhere"))


def test_parameters_of_others_that_an_optimiser_has() -> None:
    """Such as adapters that hooks apply; and those that are used outside of the model's calls."""
    model, (x, y) = Lists("elsewhere"), data()
    optimizer = torch.optim.SGD([*model.parameters(), *ELSEWHERE.parameters()], 0.1)
    found = diagnosed(model, lambda: F.cross_entropy(model(x), y), optimizer=optimizer)
    assert not [each for each in found.findings if each.kind == "unregistered"]
    inner = model.first
    assert diagnosed(inner, lambda: F.cross_entropy(ELSEWHERE(inner(x)), y)).healthy


def test_units_that_stay_alike() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    for layer in (model[0], model[2]):
        nn.init.constant_(layer.weight, 0.1)
        nn.init.zeros_(layer.bias)
    x, y = data()
    (found,) = diagnosed(model, lambda: F.cross_entropy(model(x), y)).findings
    assert (found.kind, found.parameters) == ("symmetry", ("0.weight",))


def test_words_that_occur_and_get_no_gradient_are_told_from_those_that_do_not() -> None:
    model = nn.Sequential(nn.Embedding(9, 6, padding_idx=0), nn.Linear(6, 3))
    words = torch.tensor([[1, 2, 5, 0], [3, 4, 6, 0]])

    def step() -> Tensor:
        return F.cross_entropy(model(words)[:, 0], torch.tensor([0, 1]))  # of the first alone

    found = diagnosed(model, step)
    assert found.unused_rows == {"0.weight": (2, 9)}
    assert "occur in this batch and get no gradient: 0.weight 4 of 7" in str(found)
