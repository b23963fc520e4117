"""The gradient by our own pass, recording, and graphs of many operators."""

from __future__ import annotations

import gc
from functools import partial

import torch

import gradtrace
from gradtrace.benchmarks.cases import Problem, branches, chain, deep, gpt2
from gradtrace.benchmarks.models import watched
from gradtrace.benchmarks.results import Curve, Figure, ResultColumn, Section, Setting
from gradtrace.benchmarks.scaling import LAYERS
from gradtrace.experiments.harness.interleaved_timing import Ways, interleaved, linear_fit
from gradtrace.experiments.harness.peak_memory import resident

SIZES = (1_000, 3_000, 10_000, 30_000, 100_000)
GRAPHS = {"chain": chain, "branches": branches}

GRAD, OURS, CREATION, RECORD = "torch.autograd.grad", "backward", "creation order", "recording"


def _ways(problem: Problem) -> Ways:
    """PyTorch's backward pass and ours, on a watched graph that each gets anew."""
    parameters = list(problem.model.parameters())
    retain = partial(torch.autograd.grad, inputs=parameters, retain_graph=True)  # as ours does
    return {
        GRAD: watched(problem, lambda _, loss: retain(loss)),
        OURS: watched(problem, lambda watch, loss: watch.backward(loss)),
        CREATION: watched(problem, lambda watch, loss: watch.backward(loss, schedule="creation")),
        RECORD: watched(problem, lambda watch, loss: watch.program(loss)),
    }


def gradient(setting: Setting) -> Section:
    """Our backward pass and recording, over PyTorch's on the same graph."""
    section = Section(
        "The gradient alone, and recording, over `torch.autograd.grad`",
        [
            ResultColumn("graph"),
            ResultColumn("torch.autograd.grad, ms", ".2f"),
            *(ResultColumn(way, ".2f") for way in (OURS, CREATION, RECORD)),
            ResultColumn("rounds", "d"),
        ],
    )
    layers = LAYERS[:2] if setting.quick else LAYERS
    times = []
    for n in layers:
        times.append(_row(section, f"tanh network, {n:,} layers", deep(n), setting.turns(10)))
    fit = linear_fit(layers, times)
    section.note(f"backward of tanh networks: {fit.slope * 1e6:.0f} µs a layer, R² = {fit.r2:.5f}.")
    if not setting.quick and setting.has("transformers", "the gradient of a GPT-2-sized model"):
        _row(section, "GPT-2 size, 128 tokens", gpt2(128), setting.turns(8))
    return section


def _row(section: Section, name: str, problem: Problem, rounds: int) -> float:
    timed = interleaved(_ways(problem), rounds)
    ratios = [timed.ratio(way) for way in (OURS, CREATION, RECORD)]
    section.add(name, timed.baseline * 1e3, *ratios, timed.rounds)
    return timed.best(OURS)


def large_graphs(setting: Setting) -> Section:
    """Chains and branches of up to 100,000 operators."""
    section = Section(
        "The gradient of graphs of up to 100,000 operators",
        [
            ResultColumn("operators", ",d"),
            ResultColumn("chain, ms", ".1f"),
            ResultColumn("branches, ms", ".1f"),
        ],
    )
    sizes = SIZES[:2] if setting.quick else SIZES
    times: dict[str, list[float]] = {name: [] for name in GRAPHS}
    for size in sizes:
        for name in GRAPHS:
            times[name].append(_seconds(name, size, setting.turns(3)) * 1e3)
        section.add(size, *(found[-1] for found in times.values()))
    x = [float(size) for size in sizes]
    for name, found in times.items():
        fit = linear_fit(x, found)
        section.note(f"{name}: {fit.slope * 1e3:.2f} µs an operator, R² = {fit.r2:.5f}.")
    curves = [Curve(name, x, found) for name, found in times.items()]
    title = "Our backward pass over many operators"
    section.figures.append(Figure("operators", title, "operators", "milliseconds", curves))
    return section


def _seconds(name: str, size: int, rounds: int) -> float:
    loss, leaf = GRAPHS[name](size)
    ways: Ways = {name: lambda: lambda: gradtrace.backward(loss, names={"x": leaf})}
    return interleaved(ways, rounds).baseline


def repeated(setting: Setting) -> Section:
    """Resident memory while the largest graphs are walked over and over."""
    size, passes = (1_000, 3) if setting.quick else (SIZES[-1], setting.rounds or 100)
    section = Section(
        f"Memory over repeated passes, {size:,} operators",
        [
            ResultColumn("graph"),
            ResultColumn("before, MiB", ".0f"),
            ResultColumn("after the first pass", ".0f"),
            ResultColumn("after the last", ".0f"),
            ResultColumn("passes", "d"),
        ],
    )
    for name, make in GRAPHS.items():
        loss, leaf = make(size)
        seen = [_settled()]
        for done in range(1, passes + 1):
            gradtrace.backward(loss, names={"x": leaf})
            if done in (1, passes):
                seen.append(_settled())
        section.add(name, seen[0], seen[1], seen[-1], passes)
    return section


def _settled() -> float:
    """Resident memory without garbage."""
    gc.collect()
    return resident()
