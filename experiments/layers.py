"""Question: Does the time of back-propagation grow linearly with depth, in every way to do it?

Expectation: Yes (Figure 1.2 of the chapter, for its own engine and for PyTorch's); recording and
tracing visit the same scalar graph, so they should be linear too. The chapter's curves have spikes
that do not smooth out, of unknown cause.

Method: Networks of 1 to 1,000 layers of 20 tanh units, 10 in, 15 out, one sample, squared error.
PyTorch's backward, our engine by each schedule, recording and an influence trace are timed in
turns, depths in random order. Lines are fitted to the best time at each depth, and powers of the
depth to those of 25 layers or more, for each seed; time is called linear if the whole interval of
the power is within 0.1 of 1. A spike is a depth whose mean time is over 20% above the line between
its neighbours. Kahn's schedule is timed once more without Python's garbage collector, which could
be the cause. Weights are orthogonal: PyTorch's default lets the gradient vanish within 200 layers,
and to compare zeros with zeros would prove nothing.

Seeds: Of weights, input and target; times of all seeds are taken together.

Limits: Networks are chains of small layers on one sample, where what is paid for each operator
outweighs arithmetic; on wide layers the ratios to PyTorch's time are others (docs/benchmarks.md).
Times are of one machine and one thread, and seeds are few. Linear was first what has an R² of 0.99;
on a machine of changing speed that fails without any bend, so powers took its place after times had
been seen.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from math import inf, isfinite, nan
from random import Random
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import gradtrace as gt
from gradtrace.experiments.harness.findings import (
    Cell,
    Findings,
    Plot,
    Result,
    Row,
    Seeds,
    Series,
    Table,
    Tick,
)
from gradtrace.experiments.harness.interleaved_timing import (
    Fit,
    Way,
    interleaved,
    linear_fit,
    power_fit,
    quotient,
)
from gradtrace.experiments.harness.statistics import Interval, out_of, student, with_interval

QUICK = {"layers": [1, 10, 30, 100, 200, 300], "rounds": 3}
FULL = {"layers": [1, *range(25, 1001, 25)], "rounds": 9}
SEEDS = Seeds(quick=1, full=3)
TIMED = True
FIGURE = "times"

INPUTS, UNITS, OUTPUTS = 10, 20, 15
SCHEDULES = ("kahn", "creation", "recursive")
PYTORCH, STILL, RECORDING, INFLUENCE = "PyTorch", "kahn, no gc", "recording", "influence"
WAYS = (PYTORCH, *SCHEDULES, STILL, RECORDING, INFLUENCE)
LINEAR = 0.1
"""How far from 1 the power of the depth may be that is called linear."""

DEEP = 25
"""Layers from which on the power is fitted: below, what a pass takes once counts as well."""

SPIKE = 0.2
"""How far above its neighbours' line a mean time is called a spike."""

ENOUGH = 3
"""Spikes of which it can be said what they come from."""

STACK = 1_000
"""Python's own limit of recursion, at which the recursive schedule is tried once."""

CALLS = 4
"""Calls of the recursive schedule that a layer may take, generously."""


def cells(settings: Mapping[str, Any], seeds: int) -> list[Cell]:
    """A network of each depth for each seed, in an order of its own: a machine that is slow for a
    while must not look like a depth that is.
    """
    depths = list(settings["layers"])
    return [
        {"layers": n, "seed": seed, "rounds": settings["rounds"]}
        for seed in range(seeds)
        for n in Random(seed).sample(depths, len(depths))
    ]


def network(layers: int, seed: int) -> tuple[nn.Sequential, Tensor, Tensor]:
    """So many layers of 20 units and one of 15, all tanh; an input and a target."""
    random = torch.Generator().manual_seed(seed)
    parts: list[nn.Module] = []
    for a, b in pairwise([INPUTS, *[UNITS] * layers, OUTPUTS]):
        affine = nn.Linear(a, b, device="meta").to_empty(device="cpu")  # draws no numbers itself
        nn.init.orthogonal_(affine.weight, generator=random)
        nn.init.zeros_(affine.bias)
        parts += [affine, nn.Tanh()]
    x = torch.randn(1, INPUTS, generator=random)
    return nn.Sequential(*parts), x, torch.randn(1, OUTPUTS, generator=random)


# One network --------------------------------------------------------------------------------------


def measure(cell: Cell, tick: Tick) -> Result:
    """Sizes of the graph, differences of gradients, and times in seconds, round by round."""
    model, x, y = network(cell["layers"], cell["seed"])
    names = dict(model.named_parameters())

    def loss() -> Tensor:
        return mse_loss(model(x), y)

    tick(f"{cell['layers']} layers")
    graph = gt.graph(loss(), names=names)
    refused = _refused(loss(), names)
    with _deep(cell["layers"]):
        differences = _differences(loss(), names)
        ways = _ways(model, names, loss)
        times = interleaved(ways, cell["rounds"], patience=inf, collect=False).seconds
    return {
        "operators": len(graph),
        "vertices": graph.scalar_vertices,
        "edges": graph.scalar_edges,
        "gradient": float(torch.autograd.grad(loss(), names["0.weight"])[0].norm()),
        "differences": differences,
        "refused": refused,
        "seconds": times,
    }


def _ways(
    model: nn.Module, names: Mapping[str, Tensor], loss: Callable[[], Tensor]
) -> dict[str, Way]:
    """Each runs the network forward, which is not timed, and hands over the pass."""

    def pytorch() -> Callable[[], object]:
        model.zero_grad(set_to_none=True)
        return loss().backward

    def ours(schedule: str) -> Way:
        def prepare() -> Callable[[], object]:
            made = loss()
            return lambda: gt.backward(made, names=names, schedule=schedule)

        return prepare

    def still() -> Callable[[], object]:
        run = ours("kahn")()

        def timed() -> object:
            gc.disable()
            try:
                return run()
            finally:
                gc.enable()

        return timed

    def recording() -> Callable[[], object]:
        made = loss()
        return lambda: gt.program(made, names=names)

    def influence() -> Callable[[], object]:
        with gt.watch(model) as watch:
            made = loss()
        return lambda: watch.trace(made).influence()

    own = {schedule: ours(schedule) for schedule in SCHEDULES}
    return {PYTORCH: pytorch, **own, STILL: still, RECORDING: recording, INFLUENCE: influence}


def _differences(loss: Tensor, names: Mapping[str, Tensor]) -> dict[str, float]:
    """For each schedule, the largest ``|ours - PyTorch's| / max |PyTorch's|`` of a parameter."""
    theirs = torch.autograd.grad(loss, list(names.values()), retain_graph=True)
    found = {}
    for schedule in SCHEDULES:
        ours = gt.backward(loss, names=names, schedule=schedule)
        pairs = zip((ours[name] for name in names), theirs)
        found[schedule] = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    return found


def _refused(loss: Tensor, names: Mapping[str, Tensor]) -> bool:
    """Whether the recursive schedule is too deep for the stack that Python allows by default."""
    with _limit(STACK):
        try:
            gt.backward(loss, names=names, schedule="recursive")
        except gt.errors.TooDeep:
            return True
    return False


@contextmanager
def _deep(layers: int) -> Iterator[None]:
    """Room on the stack for the recursive schedule."""
    with _limit(STACK + CALLS * layers):
        yield


@contextmanager
def _limit(calls: int) -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(calls)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


# All of them --------------------------------------------------------------------------------------


def headline(facts: Mapping[str, Any]) -> str:
    """The answer in a sentence."""
    powers = facts["power"]
    known = [each[0] for each in powers.values() if each[0] is not None]
    if not known:
        return "How the time of a backward pass grows with depth cannot be told from these times."
    linear = all(_is_linear(each) for each in powers.values())
    grows = "grows in proportion to" if linear else "does not grow in plain proportion to"
    ends = [x for each in powers.values() for x in each if x is not None and isfinite(x)]
    least, most = (f"{each(ends):.2f}" for each in (min, max))
    return (
        f"The time of a backward pass {grows} the number of layers, whichever engine does it "
        f"(its power: within {least} to {most}); an influence trace takes "
        f"{with_interval(facts['ratio_by_seed'][INFLUENCE], '.1f')} times as long as PyTorch's "
        "pass."
    )


def _is_linear(power: Sequence[float | None]) -> bool:
    """Whether a power, with its interval where there is one, is near 1."""
    known = [x for x in power if x is not None and isfinite(x)]
    return power[0] is not None and bool(known) and all(abs(x - 1) <= LINEAR for x in known)


def conclude(rows: Sequence[Row]) -> Findings:
    """Lines through the times, and what they say."""
    depths = sorted({row.cell["layers"] for row in rows})
    sizes = _sizes(rows)
    times = {way: [_pooled(rows, n, way) for n in depths] for way in WAYS}
    best = {way: [min(found) for found in times[way]] for way in WAYS}
    means = {way: [mean(found) for found in times[way]] for way in WAYS}
    fits = {way: linear_fit(depths, best[way]) for way in WAYS}
    ratios = {way: quotient(fits[way].slope, fits[PYTORCH].slope) for way in WAYS}
    refused = [row.cell["layers"] for row in rows if row.result["refused"]]
    facts = {
        "exactly_linear": _exact(depths, [sizes[n] for n in depths]),
        "largest_difference": max(max(row.result["differences"].values()) for row in rows),
        "smallest_gradient": min(row.result["gradient"] for row in rows),
        "r2": {way: fit.r2 for way, fit in fits.items()},
        "ratio": ratios,
        "ratio_by_seed": {way: list(_ratio(rows, way)) for way in WAYS},
        "power": {way: list(_power(rows, way)) for way in WAYS},
        "spikes": {way: _spikes(depths, means[way]) for way in WAYS},
        "spikes_of_best": {way: _spikes(depths, best[way]) for way in WAYS},
        "refused_from": min(refused, default=None),
    }
    return Findings(
        _sentence(depths, facts, fits),
        (_lines_table(times, fits, facts), _depths_table(rows, depths, best)),
        (_curves(depths, best), _means(depths, means)),
        facts,
    )


def _sizes(rows: Sequence[Row]) -> dict[int, int]:
    """|V'| + |E'| by depth."""
    return {r.cell["layers"]: r.result["vertices"] + r.result["edges"] for r in rows}


def _ratio(rows: Sequence[Row], way: str) -> Interval:
    """A way's slope over PyTorch's, with Student's interval over seeds."""
    found = []
    for seed in sorted({row.cell["seed"] for row in rows}):
        some = [row for row in rows if row.cell["seed"] == seed]
        depths = [row.cell["layers"] for row in some]
        slopes = [
            linear_fit(depths, [min(row.result["seconds"][each]) for row in some]).slope
            for each in (way, PYTORCH)
        ]
        found.append(quotient(*slopes))
    return student(found)


def _power(rows: Sequence[Row], way: str) -> Interval:
    """The power of the depth as which a way's best times grow, with its interval over seeds."""
    found = []
    for seed in sorted({row.cell["seed"] for row in rows}):
        best = [
            (row.cell["layers"], min(row.result["seconds"][way]))
            for row in rows
            if row.cell["seed"] == seed and row.cell["layers"] >= DEEP
        ]
        best = [(n, seconds) for n, seconds in best if 0 < seconds < inf]
        found.append(power_fit(*zip(*best)).slope if len(best) > 1 else nan)
    return student(found)


def _pooled(rows: Sequence[Row], layers: int, way: str) -> list[float]:
    found = [row.result["seconds"][way] for row in rows if row.cell["layers"] == layers]
    return sorted(seconds for part in found for seconds in part)


def _exact(x: Sequence[int], y: Sequence[int]) -> bool:
    """Whether whole numbers lie on one line, without a rest."""
    return all((b - y[0]) * (x[-1] - x[0]) == (y[-1] - y[0]) * (a - x[0]) for a, b in zip(x, y))


def _spikes(x: Sequence[int], y: Sequence[float]) -> dict[str, float]:
    """``{depth: how far above}`` of means over ``1 + SPIKE`` times their neighbours' line."""
    found = {}
    for k in range(1, len(x) - 1):
        part = (x[k] - x[k - 1]) / (x[k + 1] - x[k - 1])
        above = quotient(y[k], y[k - 1] + part * (y[k + 1] - y[k - 1])) - 1
        if above > SPIKE:
            found[str(x[k])] = above
    return found


def _sentence(depths: Sequence[int], facts: Mapping[str, Any], fits: Mapping[str, Fit]) -> str:
    powers = {way: each for way, each in facts["power"].items() if isfinite(each[0])}
    straight = [way for way, each in powers.items() if _is_linear(each)]
    bent = [way for way in powers if way not in straight]
    told = [] if powers else ["How time grows with depth cannot be told"]
    if straight:
        told.append(
            f"Time is linear in depth, from {DEEP} to {depths[-1]:,} layers, for "
            f"{', '.join(straight)}"
        )
    if bent:
        listed = ", ".join(f"{way} (power {with_interval(powers[way])})" for way in bent)
        told.append(f"{'not' if straight else 'Time is not'} linear here for {listed}")
    return (
        f"{'; '.join(told)}. {_of_a_layer(fits[PYTORCH].slope, facts['ratio_by_seed'])} "
        f"{_stack(facts['refused_from'])}{_about_spikes(len(depths), facts)}"
    )


def _of_a_layer(seconds: float, found: Mapping[str, Sequence[float]]) -> str:
    """What PyTorch takes, and how many times that the others do, with intervals over seeds."""
    if not all(map(isfinite, (seconds, *(each[0] for each in found.values())))):
        return "What a layer takes cannot be told."
    ratio = {way: with_interval(each, ".2f") for way, each in found.items()}
    return (
        f"A layer takes PyTorch {seconds * 1e6:.0f} µs, our engine {ratio['kahn']} times that "
        f"by Kahn's schedule, {ratio['creation']} in creation order and "
        f"{ratio['recursive']} by recursion, recording {ratio[RECORDING]} and an influence "
        f"trace {ratio[INFLUENCE]} (95% intervals over seeds)."
    )


def _stack(depth: int | None) -> str:
    if depth is None:
        return ""
    return (
        f"As the chapter warns, Python's stack is too small for recursion from {depth:,} layers "
        "on; its limit was raised for these times. "
    )


def _about_spikes(depths: int, facts: Mapping[str, Any]) -> str:
    """What can be said of the chapter's spikes, for the mean times that it shows."""
    inner, means = max(depths - 2, 0), facts["spikes"]
    ours, theirs, still = (len(means[way]) for way in ("kahn", PYTORCH, STILL))
    if not inner:
        return "A spike has neighbours: it takes three depths to see one."
    if not ours and not theirs:
        none = out_of(0, inner)
        return f"We see no spikes: of inner depths {none} have a mean 20% above its neighbours."
    best = len(facts["spikes_of_best"]["kahn"])
    told = (
        f"We see spikes: {out_of(ours, inner)} of Kahn's mean times and {out_of(theirs, inner)} "
        "of PyTorch's, of depths that have neighbours, are over 20% above these. Of Kahn's best "
        f"times {out_of(best, inner)} are, of its mean times without garbage collection "
        f"{out_of(still, inner)}"
    )
    if still == 0 and ours >= ENOUGH:
        return f"{told}, which points to the collector as the cause."
    if best == 0:
        return f"{told}: what makes them comes and goes, so it is not the depth itself."
    return f"{told}: their cause remains unclear."


# Tables and figures -------------------------------------------------------------------------------


def _lines_table(
    times: Mapping[str, list[list[float]]], fits: Mapping[str, Fit], facts: Mapping[str, Any]
) -> Table:
    rows = []
    for way in WAYS:
        pairs = zip(times[way], times[PYTORCH])
        typical = [quotient(median(a), median(b)) for a, b in pairs]
        rows.append(
            (
                way,
                fits[way].slope * 1e6,
                fits[way].r2,
                with_interval(facts["power"][way]),
                facts["ratio"][way],
                quotient(min(times[way][-1]), min(times[PYTORCH][-1])),
                typical[-1],
                len(facts["spikes"][way]),
                len(facts["spikes_of_best"][way]),
            )
        )
    return Table(
        "Lines through the best times",
        (
            *("way", "µs a layer", "R²", "power of depth", "slope over PyTorch's"),
            *(
                "best over PyTorch's, deepest",
                "median over PyTorch's, deepest",
                "spikes of means",
                "of best times",
            ),
        ),
        tuple(rows),
    )


def _depths_table(
    rows: Sequence[Row], depths: Sequence[int], best: Mapping[str, list[float]]
) -> Table:
    by_depth = {row.cell["layers"]: row.result for row in rows}
    return Table(
        "Best times, in milliseconds",
        ("layers", "operators", "|V'|", "|E'|", *WAYS),
        tuple(
            (
                n,
                by_depth[n]["operators"],
                by_depth[n]["vertices"],
                by_depth[n]["edges"],
                *(best[way][k] * 1e3 for way in WAYS),
            )
            for k, n in enumerate(depths)
        ),
        f"|V'| + |E'| grows by {_growth(rows):,} scalars with each layer, exactly.",
    )


def _growth(rows: Sequence[Row]) -> int:
    sizes = sorted(_sizes(rows).items())
    (a, small), (b, large) = sizes[0], sizes[-1]
    return (large - small) // (b - a) if b > a else 0


def _curves(depths: Sequence[int], best: Mapping[str, list[float]]) -> Plot:
    series = tuple(
        Series(way, list(depths), [t * 1e3 for t in best[way]]) for way in WAYS if way != STILL
    )
    title = "Back-propagation over depth (Figure 1.2), best times"
    return Plot("times", title, "layers", "milliseconds", series)


def _means(depths: Sequence[int], means: Mapping[str, list[float]]) -> Plot:
    shown = (PYTORCH, "kahn", STILL)
    series = tuple(Series(way, list(depths), [t * 1e3 for t in means[way]]) for way in shown)
    return Plot("means", "Mean times: are there spikes?", "layers", "milliseconds", series)
