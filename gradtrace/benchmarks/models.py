"""Whole models: tracing over the backward pass, recording included."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import gradtrace
from gradtrace.benchmarks.cases import FULL, SMALL, Case, Problem
from gradtrace.benchmarks.results import ResultColumn, Section, Setting, say
from gradtrace.experiments.harness.interleaved_timing import Way, Ways, interleaved
from gradtrace.semirings import MAX

VITERBI = 3.0
"""What Viterbi values alone may take, over ``loss.backward()``."""

BACKWARD, GRAD = "loss.backward()", "torch.autograd.grad, watched"
INFLUENCE, VALUES = "influence", "Viterbi values"


def chosen(setting: Setting) -> Iterator[Case]:
    """The models that can be built here."""
    for case in SMALL if setting.quick else FULL:
        if not case.needs or setting.has(case.needs, case.name):
            yield case


def plain(problem: Problem) -> Way:
    """``loss.backward()`` as a user runs it, on a model that is not watched."""

    def prepare() -> Callable[[], object]:
        problem.model.zero_grad(set_to_none=True)
        return problem.loss().backward

    return prepare


def watched(problem: Problem, run: Callable[[gradtrace.watch, Tensor], object]) -> Way:
    """Something done with the loss of a watched forward pass."""

    def prepare() -> Callable[[], object]:
        problem.model.zero_grad(set_to_none=True)
        with gradtrace.watch(problem.model) as watch:
            loss = problem.loss()
        return lambda: run(watch, loss)

    return prepare


def autograd(problem: Problem) -> Way:
    """PyTorch's own pass over a watched graph."""
    parameters = list(problem.model.parameters())
    return watched(problem, lambda _, loss: torch.autograd.grad(loss, parameters))


def influence(problem: Problem) -> Way:
    """A whole greedy influence trace."""
    return watched(problem, lambda watch, loss: watch.trace(loss).influence())


def values(problem: Problem) -> Way:
    """The greatest path of every element, without saying which."""
    return watched(problem, lambda watch, loss: watch.backward(loss, MAX))


def _ways(case: Case, problem: Problem) -> Ways:
    found = {
        BACKWARD: plain(problem),
        GRAD: autograd(problem),
        INFLUENCE: influence(problem),
        VALUES: values(problem),
    }
    if case.paths:
        found[_sampled(case)] = watched(
            problem, lambda watch, loss: watch.trace(loss).paths(sample=case.paths)
        )
        found |= samples(problem, case.paths)
    return found


def samples(problem: Problem, elements: int) -> dict[str, Way]:
    """Influence of sampled elements, and of sampled rows of large weights."""
    return {
        f"influence(sample={elements:_})": watched(
            problem, lambda watch, loss: watch.trace(loss).influence(sample=elements)
        ),
        "influence(leaf_rows=1/16)": watched(
            problem, lambda watch, loss: watch.trace(loss).influence(leaf_rows=1 / 16)
        ),
    }


def _sampled(case: Case) -> str:
    return f"{case.paths:,} sampled paths"


def _limits(case: Case) -> dict[str, float | None]:
    return {
        INFLUENCE: case.trace,
        VALUES: VITERBI if case.trace else None,
        _sampled(case): case.sample,
        f"influence(sample={case.paths:_})": case.sample,
    }


def models(setting: Setting) -> Section:
    """Influence, Viterbi values and sampled paths of whole models."""
    section = Section(
        "Whole models, over `loss.backward()`",
        [
            ResultColumn("model"),
            ResultColumn("way"),
            ResultColumn("seconds", ".4f"),
            ResultColumn("ratio", ".2f"),
            ResultColumn("median of rounds", ".2f"),
            ResultColumn("target", ".1f", limits="ratio"),
            ResultColumn("rounds", "d"),
        ],
    )
    for case in chosen(setting):
        _model(case, setting, section)
    section.note(
        "Recording is included, the forward pass is in none of them. `loss.backward()` runs on the "
        "plain model, after `zero_grad(set_to_none=True)`; weights are random, batch norm and "
        "dropout as in `eval()`."
    )
    return section


def _model(case: Case, setting: Setting, section: Section) -> None:
    say(f"  {case.name} ...")
    timed = interleaved(_ways(case, case.make()), setting.turns(20))
    limits = _limits(case)
    for way in timed.seconds:
        section.add(
            case.name,
            way,
            timed.best(way),
            timed.ratio(way),
            timed.typical(way),
            limits.get(way),
            timed.rounds,
        )
