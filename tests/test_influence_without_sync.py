"""Influence as it is measured on a GPU: nobody looks at what is not there yet; nothing changes."""

from __future__ import annotations

import pytest
import torch
from random_transformers import Problem, gpt2

import gradtrace as gt
from gradtrace.table import Table
from gradtrace.tracing.kept_plans import forget
from tests.backends import imitate_gpu
from tests.waits import Waits

pytest.importorskip("transformers")


def problem(layers: int) -> Problem:
    torch.manual_seed(0)
    return gpt2(8, vocab_size=30, n_embd=12, n_layer=layers, n_head=2, n_positions=8)


def measured(given: Problem, rule: str = "greedy") -> Table:
    with gt.watch(given.model) as watch:
        loss = given.loss()
    return watch.trace(loss, rule=rule).influence()


@pytest.mark.parametrize("rule", ["greedy", "edge", "viterbi"])
def test_nothing_changes(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem(2)
    before = measured(given, rule)
    imitate_gpu(monkeypatch)
    assert measured(given, rule) == before


def test_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem(2)
    given.model.bfloat16()
    before = measured(given)
    imitate_gpu(monkeypatch)
    assert measured(given) == before


def test_waits_do_not_grow_with_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer has twelve leaves and some seventy steps."""
    forget()  # the third loss of a plan is executed with fewer
    imitate_gpu(monkeypatch)
    counts = []
    for layers in (2, 4):
        given = problem(layers)
        with gt.watch(given.model) as watch:
            loss = given.loss()
        trace = watch.trace(loss)
        with Waits() as waits:
            trace.influence()
        counts.append(waits.count)
    assert counts[1] - counts[0] <= 4, counts
    assert counts[0] <= 40, counts
