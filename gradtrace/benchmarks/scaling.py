"""The chapter's two scaling experiments: is the time linear in the size of the graph?"""

from __future__ import annotations

from dataclasses import replace

import gradtrace
from gradtrace.benchmarks.cases import Problem, branched, deep
from gradtrace.benchmarks.models import BACKWARD, INFLUENCE, influence, plain
from gradtrace.benchmarks.results import Curve, Figure, ResultColumn, Section, Setting
from gradtrace.experiments.harness.interleaved_timing import Timed, interleaved, linear_fit

LIMIT = 12.0
"""What an influence trace of a small network may take, over ``loss.backward()``."""

LINEAR = 0.99
"""The least R² that is called linear."""

LAYERS = (1, 3, 10, 30, 100, 300, 1000)
SEEDS = range(20)
EXPANDED = (1, 2, 4, 8, 16, 32, 64)


def depth(setting: Setting) -> Section:
    """Figure 1.2's networks, over their depth."""
    section = Section(
        "20-unit tanh networks over their depth (Figure 1.2)",
        [
            ResultColumn("layers", ",d"),
            ResultColumn("loss.backward(), ms", ".2f"),
            ResultColumn("influence, ms", ".2f"),
            ResultColumn("influence", ".2f"),
            ResultColumn("median of rounds", ".2f"),
            ResultColumn("target", ".0f", limits="influence"),
            ResultColumn("rounds", "d"),
        ],
    )
    layers = LAYERS[:2] if setting.quick else LAYERS
    ours, theirs = [], []
    for n in layers:
        timed = _timed(deep(n), setting.turns(10))
        theirs.append(timed.baseline * 1e3)
        ours.append(timed.best(INFLUENCE) * 1e3)
        section.add(
            n,
            theirs[-1],
            ours[-1],
            timed.ratio(INFLUENCE),
            timed.typical(INFLUENCE),
            setting.limit(LIMIT),
            timed.rounds,
        )
    x = [float(n) for n in layers]
    section.note(_linear(INFLUENCE, x, ours, 1e3, "µs a layer"))
    section.note(_linear(BACKWARD, x, theirs, 1e3, "µs a layer"))
    section.figures.append(
        _figure("depth", "Deep 20-unit networks (Figure 1.2)", "layers", (x, ours, theirs))
    )
    return section


def size(setting: Setting) -> Section:
    """Figure 1.3's random networks, over the size of their scalar graphs."""
    section = Section(
        "Random branching networks over their size (Figure 1.3)",
        [
            ResultColumn("expanded layers", "d"),
            ResultColumn("networks", "d"),
            ResultColumn("|V'| + |E'|, from", ",d"),
            ResultColumn("to", ",d"),
            ResultColumn("influence, ms, from", ".2f"),
            ResultColumn("to ", ".2f"),
            ResultColumn("ratio, worst", ".2f"),
            ResultColumn("target", ".0f", limits="ratio, worst"),
            ResultColumn("R²", ".4f"),
        ],
    )
    small = [(seed, 1) for seed in (SEEDS[:2] if setting.quick else SEEDS)]
    large = [(100 + n, n) for n in (EXPANDED[:2] if setting.quick else EXPANDED)]
    for name, title, networks in (
        ("size-one", "One expanded layer (Figure 1.3)", small),
        ("size", "Expanded layers after each other", large),
    ):
        found = [_measured(branched(*network), setting) for network in networks]
        _summary(section, max(n for _, n in networks), found, setting.limit(LIMIT))
        columns = ([x for x, _ in found], *_milliseconds(found))
        figure = _figure(name, title, "|V'| + |E'|, scalars", columns)
        section.figures.append(replace(figure, joined=False, log=networks is large))
    section.note(
        "A layer becomes two layers side by side with probability 0.95, halved at each level, else "
        "10 to 500 tanh units. [The chapter](sources.md) has one such layer (first row), so that "
        "no network has more than a few operators; the second row puts up to 64 of them after each "
        "other."
    )
    section.note(
        f"R² is that of the line through influence times; {LINEAR} and more counts as linear."
    )
    return section


def _summary(
    section: Section, layers: int, found: list[tuple[float, Timed]], limit: float | None
) -> None:
    sizes, (ours, _) = [x for x, _ in found], _milliseconds(found)
    section.add(
        layers,
        len(found),
        int(min(sizes)),
        int(max(sizes)),
        min(ours),
        max(ours),
        max(timed.ratio(INFLUENCE) for _, timed in found),
        limit,
        linear_fit(sizes, ours).r2,
    )


def _milliseconds(found: list[tuple[float, Timed]]) -> tuple[list[float], list[float]]:
    ours = [timed.best(INFLUENCE) * 1e3 for _, timed in found]
    return ours, [timed.baseline * 1e3 for _, timed in found]


def _measured(problem: Problem, setting: Setting) -> tuple[float, Timed]:
    """|V'| + |E'| and the times."""
    with gradtrace.watch(problem.model) as watch:
        graph = watch.graph(problem.loss())
    return float(graph.scalar_vertices + graph.scalar_edges), _timed(problem, setting.turns(5))


def _timed(problem: Problem, rounds: int) -> Timed:
    """Without Viterbi values: those of a thousand layers are outside the range of floats."""
    return interleaved({BACKWARD: plain(problem), INFLUENCE: influence(problem)}, rounds)


def _linear(name: str, x: list[float], y: list[float], scale: float, unit: str) -> str:
    """What the line through the points says, in words."""
    fit = linear_fit(x, y)
    verdict = "linear" if fit.r2 >= LINEAR else "not linear"
    return f"{name}: {fit.slope * scale:.1f} {unit}, R² = {fit.r2:.5f} ({verdict})."


def _figure(
    name: str, title: str, x: str, columns: tuple[list[float], list[float], list[float]]
) -> Figure:
    """Our times and PyTorch's over x, and the most that ours should be."""
    at, ours, theirs = (list(c) for c in zip(*sorted(zip(*columns))))
    return Figure(
        name,
        title,
        x,
        "milliseconds",
        [
            Curve("influence trace", at, ours),
            Curve("loss.backward()", at, theirs),
            Curve(f"{LIMIT:.0f} × loss.backward()", at, [LIMIT * t for t in theirs], limit=True),
        ],
    )
