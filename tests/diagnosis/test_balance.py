"""Gradients that vanish, explode, or leave terms, branches and experts with next to nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from balance_cases import CASES
from silent_cases import Net
from torch import Tensor, nn
from torch.nn import functional as F

import gradtrace as gt


@pytest.mark.parametrize("name", CASES)
def test_the_finding_is_named(name: str) -> None:
    torch.manual_seed(0)
    wanted = CASES[name]
    model, step = wanted.make()
    with gt.watch(model, diagnose=True) as watch:
        loss = step()
    found = watch.diagnose(loss)
    of_kind = [finding for finding in found.findings if finding.kind == wanted.kind]
    assert of_kind and not found.healthy, str(found)
    assert of_kind[0].module.startswith(wanted.module), str(found)
    assert of_kind[0].advice
    if wanted.line:
        assert "# HERE" in of_kind[0].line, str(found)


@pytest.mark.parametrize(
    ("name", "said", "advice"),
    [
        ("sigmoids_in_a_deep_net", "vanishing gradient, from '32' to '", "skip connections"),
        ("recurrence_that_forgets", "vanishing gradient, at 'rnn'", "LSTM"),
        ("data_that_is_not_normalised", "most of the gradient is 0, at '0'", "normalise"),
        ("relus_that_seldom_open", "most of the gradient is 0, at '2'", "leaky"),
    ],
)
def test_the_title_says_from_where_to_where_and_the_advice_fits(
    name: str, said: str, advice: str
) -> None:
    torch.manual_seed(0)
    model, step = CASES[name].make()
    with gt.watch(model) as watch:
        loss = step()
    found = watch.diagnose(loss).findings[0]
    assert found.title.startswith(said) and advice in found.advice, str(found)
    assert ("ReLU" in found.evidence) == (name == "relus_that_seldom_open")


KL = nn.KLDivLoss(reduction="batchmean", log_target=True)


@pytest.mark.parametrize(
    ("term", "severity", "said"),
    [
        (lambda out: F.mse_loss(out, out.detach()), "note", "which is its minimum"),
        (lambda out: (lambda d: d * d)(out - out.detach()).mean(), "note", "its minimum"),
        (lambda out: KL(out, out.detach()), "note", "its minimum"),
        (lambda out: (out.square() * torch.zeros(3)).sum(), "warning", "is 0, that of"),
        (lambda out: 0 * out.square().sum(), "warning", "It is multiplied by 0."),
    ],
)
def test_a_term_at_its_minimum_is_a_note(
    term: Callable[[Tensor], Tensor], severity: str, said: str
) -> None:
    """As of two networks that begin alike; one that is masked or weighs nothing is not."""
    torch.manual_seed(0)
    model, x = Net(), torch.randn(5, 4)
    with gt.watch(model) as watch:
        out = model(x).log_softmax(-1)
        loss = out[:, 0].mean() + term(out)
    (found,) = watch.diagnose(loss).findings
    assert (found.kind, found.severity) == ("loss term", severity), found
    assert said in found.evidence and found.advice


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs positions of instructions")
def test_terms_on_one_line_are_told_apart() -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(5, 4)
    with gt.watch(model) as watch:
        out = model(x)
        size, sum_ = out.square().mean(), out.sum()
        loss = 1e7 * size + 1e-2 * sum_
    (found,) = watch.diagnose(loss).findings
    assert found.title == "a term of the loss is drowned: 1e-2 * sum_"
    assert "that of 1e7 * size is" in found.evidence


def test_a_branch_has_its_line_and_the_module_around_it() -> None:
    torch.manual_seed(0)
    model, step = CASES["branch_with_a_tiny_scale"].make()
    with gt.watch(model) as watch:
        loss = step()
    (found,) = watch.diagnose(loss).findings
    assert found.module == "branch" and "1e-7 * self.branch(h)" in found.line


def test_what_underflows_is_not_told_as_mostly_dead() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    with gt.watch(model, diagnose=True) as watch:
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(torch.randn(8, 8))
        loss = out.float().square().mean() * 1e-6
    (found,) = watch.diagnose(loss).findings
    assert found.kind == "underflow" and "GradScaler" in found.advice


def test_what_runs_outside_of_modules_is_no_branch() -> None:
    model = Net(torch.relu)
    x = torch.randn(5, 4)
    with gt.watch(model, diagnose=True) as watch:
        weights = sum(each.square().sum() for each in model.parameters())
        loss = F.cross_entropy(model(x), torch.arange(5) % 3) + 1e6 * weights
    branches = [each for each in watch.diagnose(loss).findings if each.kind == "branch"]
    assert [each.title.rpartition(": ")[2] for each in branches] == ["enc"]
