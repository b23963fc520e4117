"""Gradients that vanish, explode, or leave terms, branches and experts with next to nothing."""

from __future__ import annotations

import pytest
import torch
from balance_cases import CASES

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
