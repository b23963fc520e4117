"""Does a network need the side of a diamond with more influence more than the other side?

Expectation: yes, as the chapter (1.3) expects of any components: the more influential, the dearer
to lose.

Method: random networks (``nets``; two expanded layers of 4 to 32 units a layer, and as many of 12
units everywhere, where many sides are of equal size) learn what a random teacher makes of normal
inputs. At six steps the losses of single samples are traced by both rules; influence is the share
of the paths of inputs and of parameters before a side. The network is then trained anew without
each side, its output 0 from the first step on, with the same weights and batches. Samples to target
are those until the loss is 90% of the way, in logarithms, from the whole network's first to the
lowest of the first half of its training; who never gets there counts as if at the end. Beside them:
the final loss, and that of the whole trained network at once without the side. Of the two sides of
each diamond, a score is right if the one it puts first is dearer to lose, and half right if it has
both equal; chance is 50%. Baselines need no tracing. Intervals draw networks.

Limits: small networks, one teacher each. A larger side does more and has more paths, so influence
and size tell much the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from math import exp, isnan, log, log2
from pathlib import Path
from random import Random
from statistics import fmean
from typing import NamedTuple, TypeAlias

import torch
from torch import Generator, Tensor, nn

import gradtrace as gt
from experiments import lab, nets

FULL = {"widths": {"random": [4, 32], "equal": [12, 12]}, "seeds": 50, "layers": 2, "teacher": 64}
FULL |= {"steps": 600, "batch": 32, "rate": 0.005, "every": 20, "evaluated": 512}
FULL |= {"traced": 6, "pairs": 16}
QUICK = {**FULL, "seeds": 2, "steps": 100, "every": 5, "traced": 3, "pairs": 4}
SMALL = {**QUICK, "seeds": 1, "steps": 6, "every": 2, "traced": 2}
SETTINGS = {"full": FULL, "quick": QUICK, "small": SMALL}
RULES = {rule: f"influence ({rule})" for rule in ("greedy", "viterbi")}
BASELINES = "gradient norm", "|weight × gradient|", "size"
MEASURES = *RULES.values(), *(f"{name}, weighted" for name in RULES.values()), *BASELINES
COSTS = {"samples": "samples to target", "final": "final loss", "zeroed": "loss at once"}
TIE = 1e-12  # means that differ by less are equal
Curve: TypeAlias = Sequence[Sequence[float]]
Values: TypeAlias = Mapping[str, Mapping[str, float]]
"""Scores or costs, by component."""


def cells(settings: lab.Cell) -> list[lab.Cell]:
    """An architecture for each kind and seed; with it come all its ablations."""
    shared = {name: value for name, value in settings.items() if name not in ("widths", "seeds")}
    kinds, seeds = settings["widths"].items(), range(settings["seeds"])
    return [{"kind": k, "width": w, "seed": seed, **shared} for k, w in kinds for seed in seeds]


def measure(cell: lab.Cell) -> lab.Row:
    """Train a network, and again without each side."""
    sides = nets.Branching(cell["seed"], cell["layers"], tuple(cell["width"])).sides()
    curves = {name: learnt(cell, part)["curve"] for name, part in sides.items()}
    return {**learnt(cell), "without": curves}


def learnt(cell: lab.Cell, removed: str | None = None) -> lab.Row:
    """Train with a side removed; or with none, and measure it."""
    model, goal = nets.Branching(cell["seed"], cell["layers"], tuple(cell["width"])), teacher(cell)
    random = partial(generator, "branches", cell["kind"], cell["seed"])
    batches, held = random("batches"), inputs(cell["evaluated"], random("evaluation"))

    def losses(x: Tensor) -> Tensor:
        error: Tensor = (model(x) - goal(x.detach())).square().mean(-1)
        return error

    def loss() -> Tensor:
        return losses(inputs(cell["batch"], batches)).mean()

    def traced(step: int) -> Tensor:
        return losses(inputs(cell["pairs"], random("traced", step)).requires_grad_())

    parts = {} if removed else model.sides()
    with gt.ablate(model, removed) if removed else nullcontext():
        return trained(model, cell, parts, loss, lambda: losses(held).mean(), traced)


def inputs(count: int, source: Generator) -> Tensor:
    """Normal ones."""
    return torch.randn(count, nets.ENDS, generator=source)


def teacher(cell: lab.Cell) -> Callable[[Tensor], Tensor]:
    """``tanh(V·tanh(W·x + b))`` with normal weights, so that it is far from linear."""
    hidden, source = cell["teacher"], generator("branches", cell["kind"], cell["seed"], "teacher")
    w = torch.randn(hidden, nets.ENDS, generator=source) / nets.ENDS**0.5
    v = torch.randn(nets.ENDS, hidden, generator=source) * 2 / hidden**0.5
    b = torch.randn(hidden, generator=source)
    return lambda x: ((x @ w.T + b).tanh() @ v.T).tanh()


# What competition shares -------------------------------------------------------------------------


def generator(*what: object) -> Generator:
    """For one use of random numbers."""
    return Generator().manual_seed(Random("/".join(map(str, what))).getrandbits(63))


def trained(
    model: nn.Module,
    cell: lab.Cell,
    parts: Mapping[str, str],
    loss: Callable[[], Tensor],
    held: Callable[[], Tensor],
    traced: Callable[[int], Tensor],
) -> lab.Row:
    """Train by Adam: the held-out loss over samples, scores of parts at a few steps, and the loss
    in the end with the output of each zero.
    """
    curve, looks, steps = list[tuple[int, float]](), list[lab.Row](), cell["steps"]
    asked = [round(steps * n / (cell["traced"] - 1)) for n in range(cell["traced"])]

    def each() -> Iterator[Callable[[], Tensor]]:
        for step in range(steps + 1):
            if step % cell["every"] == 0 or step == steps:
                with torch.no_grad():
                    curve.append((step * cell["batch"], float(held())))
            if parts and step in asked:
                looks.append({"step": step, **scores(model, parts, partial(traced, step))})
            if step < steps:
                yield loss

    lab.train(model, torch.optim.Adam(model.parameters(), lr=cell["rate"]), each())
    zeroed = {}
    for name, part in parts.items():
        with gt.ablate(model, part), torch.no_grad():
            zeroed[name] = float(held())
    return {"curve": curve, "scores": looks, "zeroed": zeroed}


def scores(model: nn.Module, parts: Mapping[str, str], losses: Callable[[], Tensor]) -> Values:
    """What every measure says of parts, by the losses of a few samples."""
    found: dict[str, dict[str, float]] = {measure: {} for measure in MEASURES}
    with gt.watch(model) as watch:
        each = losses()
    for rule, measure in RULES.items():
        for row in watch.trace(each, rule=rule).influence(dict(parts)):
            for name, share in ((measure, row.share), (f"{measure}, weighted", row.weighted)):
                found[name][row.name] = 0.0 if isnan(share) else share
    for name, part in parts.items():
        own = [*model.get_submodule(part).parameters()]
        grown = torch.autograd.grad(each.mean(), own, retain_graph=True)
        g, w = (torch.cat([x.detach().flatten() for x in some]) for some in (grown, own))
        for measure, value in zip(BASELINES, (g.norm(), (w * g).abs().sum(), len(g))):
            found[measure][name] = float(value)
    return found


class Network(NamedTuple):
    """A row, its mean scores over training, and what it costs to remove parts."""

    group: str
    row: lab.Row
    scores: Values
    costs: Values
    pairs: Sequence[tuple[str, str]]


def network(
    group: str, row: lab.Row, without: Mapping[str, Curve], pairs: Sequence[tuple[str, str]]
) -> Network:
    """A row with the curves of what was trained without parts."""
    looks, names = row["scores"], row["zeroed"]
    means = {m: {n: fmean(look[m][n] for look in looks) for n in names} for m in MEASURES}
    return Network(group, row, means, costs(row, without), pairs)


def costs(row: lab.Row, without: Mapping[str, Curve]) -> Values:
    """log₂ of the ratio of samples; and by how much the loss is higher."""
    whole, at_once = row["curve"], row["zeroed"].items()
    lowest = min(loss for at, loss in whole if at <= whole[-1][0] / 2)
    target = whole[0][1] ** 0.1 * lowest**0.9
    needed, end = samples(whole, target), last(whole)
    return {
        "samples": {n: log2(samples(curve, target) / needed) for n, curve in without.items()},
        "final": {n: last(curve) - end for n, curve in without.items()},
        "zeroed": {n: loss - whole[-1][1] for n, loss in at_once},
    }


def samples(curve: Curve, target: float) -> float:
    """Where a curve first is as low as the target, on the line between two points; or its end."""
    for (a, high), (b, low) in pairwise(curve):
        if low <= target:
            return float(max(a + (high - target) / (high - low) * (b - a), 1))
    return curve[-1][0]


def last(curve: Curve) -> float:
    """The mean of the last tenth of losses."""
    return fmean(loss for _, loss in curve[-max(1, len(curve) // 10) :])


def in_order(networks: Sequence[Network], measure: str, cost: str = "samples") -> Tensor:
    """Of each network: of how many pairs the score is right, and how many differ in cost."""
    found = []
    for each in networks:
        score, dear = each.scores[measure], each.costs[cost]
        both = [(score[a] - score[b], dear[a] - dear[b]) for a, b in each.pairs]
        right = [0.5 if abs(s) < TIE else float((s > 0) == (c > 0)) for s, c in both if c]
        found.append((sum(right), len(right)))
    return torch.tensor(found, dtype=torch.float64)


def percent(draws: Tensor) -> Tensor:
    """Of pairs that are right, for each draw of networks."""
    return 100 * draws[..., 0].sum(1) / draws[..., 1].sum(1)


# -------------------------------------------------------------------------------------------------


def kept(row: lab.Row) -> list[lab.Row]:
    """A row of docs/experiments is as those of today."""
    return [row]


def networks(rows: Sequence[lab.Row]) -> list[Network]:
    """Those that have a diamond, with the two sides of each."""
    found = []
    for row in (row for row in rows if row["without"]):
        left = [name.removesuffix("left") for name in row["without"] if name.endswith("left")]
        pairs = [(f"{name}left", f"{name}right") for name in left]
        found.append(network(row["kind"], row, row["without"], pairs))
    return found


def tables(rows: Sequence[lab.Row]) -> list[lab.Table]:
    """Pairs in order, and differences to the baselines."""
    found = networks(rows)
    sizes = [(each, each.scores["size"]) for each in found]
    same = [n._replace(pairs=[(a, b) for a, b in n.pairs if x[a] == x[b]]) for n, x in sizes]
    asked = [(found, cost) for cost in COSTS] + [(same, "samples")]
    right = []
    for m in MEASURES:
        told = [lab.resampled(in_order(some, m, cost), percent) for some, cost in asked]
        right.append((m.strip("|"), *(lab.said(each, ".1f") for each in told)))
    apart = [
        (COSTS[cost], rule, *(better(found, cost, m, baseline) for baseline in BASELINES))
        for cost in COSTS
        for rule, m in RULES.items()
    ]
    many = [f"{sum(len(n.pairs) for n in some)} diamonds" for some in (found, same)]
    columns = ("score", *COSTS.values(), f"samples, {many[1]} of equal sides")
    baselines = [baseline.strip("|") for baseline in BASELINES]
    return [
        (f"% of {many[0]} in order, {len(found)} networks", columns, right),
        ("Points by which influence is in order more often", ("cost", "rule", *baselines), apart),
    ]


def better(found: Sequence[Network], cost: str, *measures: str) -> str:
    """By how many points the first measure is in order more often than the second."""
    both = torch.cat([in_order(found, measure, cost) for measure in measures], 1)
    by = lab.resampled(both, lambda draws: percent(draws[..., :2]) - percent(draws[..., 2:]))
    return lab.said(by, "+.1f")


def figure(rows: Sequence[lab.Row], path: Path) -> None:
    """The loss over training without either side, the geometric mean of diamonds."""
    found: dict[str, list[list[float]]] = {"nothing": [], "more": [], "less": []}
    for each in networks(rows):
        row, score = each.row, each.scores[RULES["viterbi"]]
        for less, more in (sorted(pair, key=score.__getitem__) for pair in each.pairs):
            three = row["curve"], row["without"][more], row["without"][less]
            for some, curve in zip(found.values(), three):
                some.append([log(loss) for _, loss in curve])
    at = [count for count, _ in rows[0]["curve"]]
    means = {name: (at, [exp(fmean(x)) for x in zip(*some)]) for name, some in found.items()}
    what = "Loss without the side of more or less influence (viterbi)"
    lab.lines(path, what, "samples", "loss", means, yscale="log")
