"""Does a network need the side of a diamond with more influence more than the other side?

Expectation: yes, as the chapter (1.3) expects: the more influential, the dearer to lose.

Method: random networks (``nets``; two expanded layers of 4 to 32 units a layer, and as many of 12
units everywhere, where many sides are of equal size) learn what a random teacher makes of normal
inputs. At six steps the losses of single samples are traced by both rules; influence is the share
of the paths of inputs and of parameters before a side. The network is then trained anew without
each side, its output 0 from the first step on, with the same weights and batches. The cost is the
samples until the loss is 90% of the way, in logarithms, from the whole network's first to the
lowest of the first half of its training; or all, if it never is. Of the two sides of each diamond,
a score is right if it puts first the one that is dearer to lose, and half right if both are equal.
Baselines need no tracing. Intervals draw networks.

Limits: small networks, one teacher each. A larger side does more and has more paths, so influence
and size tell much the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from itertools import pairwise
from math import isnan, log2
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any, NamedTuple, TypeAlias

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
BASELINES = "gradient norm", "size"
MEASURES = *RULES.values(), *BASELINES
Curve: TypeAlias = Sequence[Sequence[float]]
Values: TypeAlias = Mapping[str, Mapping[str, float]]  # of scores, by component


def cells(settings: lab.Cell) -> list[lab.Cell]:
    """An architecture for each kind and seed; with it come all its ablations."""
    shared = {name: value for name, value in settings.items() if name not in ("widths", "seeds")}
    kinds, seeds = settings["widths"].items(), range(settings["seeds"])
    return [{"kind": k, "width": w, "seed": seed, **shared} for k, w in kinds for seed in seeds]


def measure(cell: lab.Cell) -> lab.Row:
    """Train a network, and again without each side."""
    model = nets.Branching(cell["seed"], cell["layers"], tuple(cell["width"]))
    sides = model.sides().items()
    without = {name: learnt(cell, deepcopy(model), part)["curve"] for name, part in sides}
    return {**learnt(cell, model), "without": without}


def learnt(cell: lab.Cell, model: nets.Branching, removed: str | None = None) -> lab.Row:
    """Train with a side removed; or with none, and measure it. The teacher has normal weights, so
    that ``tanh(V·tanh(W·x + b))`` is far from linear.
    """
    random, hidden = partial(nets.source, "branches", cell["kind"], cell["seed"]), cell["teacher"]
    draw = partial(torch.randn, generator=random("teacher"))
    w, v = draw(hidden, nets.ENDS) / nets.ENDS**0.5, draw(nets.ENDS, hidden) * 2 / hidden**0.5
    b = draw(hidden)

    def losses(count: int, source: Generator, held: bool = False) -> Tensor:
        x = torch.randn(count, nets.ENDS, generator=source, requires_grad=True)
        error: Tensor = model(x) - ((x.detach() @ w.T + b).tanh() @ v.T).tanh()
        return error.square().mean(-1)

    with gt.ablate(model, removed) if removed else nullcontext():
        return trained(model, cell, {} if removed else model.sides(), random, losses)


def kept(row: lab.Row) -> list[lab.Row]:
    """A row of docs/experiments is as those of today."""
    return [row]


def networks(rows: Sequence[lab.Row]) -> list[Network]:
    """Those that have a diamond, with the two sides of each."""
    found = []
    for row in (row for row in rows if row["without"]):
        left = [name.removesuffix("left") for name in row["without"] if name.endswith("left")]
        pairs = [(f"{name}left", f"{name}right") for name in left]
        found.append(compared(row, row["without"], pairs))
    return found


def tables(rows: Sequence[lab.Row]) -> list[lab.Table]:
    """Diamonds in order, and differences to the baselines."""
    found = networks(rows)
    sizes = [(each, each.scores["size"]) for each in found]
    same = [n._replace(pairs=[(a, b) for a, b in n.pairs if x[a] == x[b]]) for n, x in sizes]
    many, equal = (f"{sum(len(n.pairs) for n in some)} diamonds" for some in (found, same))
    columns = ["score", many, *(f"less {each}" for each in BASELINES), f"{equal} of equal sides"]
    right = [
        [m, told(found, m), *(better(found, m, each) for each in BASELINES), told(same, m)]
        for m in MEASURES
    ]
    return [(f"Which side costs more samples: % right, {len(found)} networks", columns, right)]


def better(found: Sequence[Network], *measures: str) -> str:
    """By how many points the first measure is in order more often than the second."""
    both = torch.cat([in_order(found, measure) for measure in measures], 1)
    by = lab.resampled(both, lambda draws: percent(draws[..., :2]) - percent(draws[..., 2:]))
    return lab.said(by, "+.1f")


def figure(rows: Sequence[lab.Row], path: Path) -> None:
    """The loss over training without either side, the geometric mean of diamonds."""
    found: dict[str, list[list[float]]] = {"nothing": [], "more": [], "less": []}
    for row, scores, _, pairs in networks(rows):
        for pair in pairs:
            less, more = sorted(pair, key=scores[RULES["viterbi"]].__getitem__)
            three = row["curve"], row["without"][more], row["without"][less]
            for some, curve in zip(found.values(), three):
                some.append([loss for _, loss in curve])
    at = [count for count, _ in rows[0]["curve"]]
    means = {name: (at, [*map(geometric_mean, zip(*some))]) for name, some in found.items()}
    what = "Loss without the side of more or less influence (viterbi)"
    lab.lines(path, what, "samples", "loss", means, yscale="log")


# What competition shares -------------------------------------------------------------------------


def trained(
    model: nn.Module, cell: lab.Cell, parts: Mapping[str, str], random: Any, losses: Any
) -> lab.Row:
    """Train by Adam: the held-out loss over samples, and scores of parts at a few steps."""
    curve, looks, steps = list[tuple[int, float]](), list[lab.Row](), cell["steps"]
    asked = [round(steps * n / (cell["traced"] - 1)) for n in range(cell["traced"])]
    optimizer = torch.optim.Adam(model.parameters(), lr=cell["rate"])
    batches = random("batches")
    for step in range(steps + 1):
        if step % cell["every"] == 0 or step == steps:
            with torch.no_grad():
                held = losses(cell["evaluated"], random("evaluation"), held=True).mean()
            curve.append((step * cell["batch"], float(held)))
        if parts and step in asked:
            each = partial(losses, cell["pairs"], random("traced", step))
            looks.append({"step": step, **scores(model, parts, each)})
        if step < steps:
            lab.train(model, optimizer, [lambda: losses(cell["batch"], batches).mean()])
    return {"curve": curve, "scores": looks}


def scores(model: nn.Module, parts: Mapping[str, str], losses: Callable[[], Tensor]) -> Values:
    """What every measure says of parts, by the losses of a few samples."""
    found: dict[str, dict[str, float]] = {measure: {} for measure in MEASURES}
    with gt.watch(model) as watch:
        each = losses()
    for rule, measure in RULES.items():
        shares = watch.trace(each, rule=rule).influence(dict(parts)).shares
        found[measure] = {name: 0.0 if isnan(x) else x for name, x in shares.items()}
    for name, part in parts.items():
        own = [*model.get_submodule(part).parameters()]
        grown = torch.autograd.grad(each.mean(), own, retain_graph=True)
        found["gradient norm"][name] = float(torch.cat([g.flatten() for g in grown]).norm())
        found["size"][name] = sum(weight.numel() for weight in own)
    return found


class Network(NamedTuple):
    """A row, its mean scores over training, and what it costs to remove parts."""

    row: lab.Row
    scores: Values
    costs: Mapping[str, float]
    pairs: Sequence[tuple[str, str]]


def compared(row: lab.Row, without: Mapping[str, Curve], pairs: Any) -> Network:
    """Costs are log₂ of the ratio of samples, without a part and with all."""
    looks, whole = row["scores"], row["curve"]
    scores = {m: {n: fmean(look[m][n] for look in looks) for n in looks[0][m]} for m in MEASURES}
    lowest = min(loss for at, loss in whole if at <= whole[-1][0] / 2)
    target = whole[0][1] ** 0.1 * lowest**0.9
    costs = {n: log2(samples(c, target) / samples(whole, target)) for n, c in without.items()}
    return Network(row, scores, costs, pairs)


def samples(curve: Curve, target: float) -> float:
    """Where a curve first is as low as the target, on the line between two points; or its end."""
    for (a, high), (b, low) in pairwise(curve):
        if low <= target:
            return float(max(a + (high - target) / (high - low) * (b - a), 1))
    return curve[-1][0]


def in_order(networks: Sequence[Network], measure: str) -> Tensor:
    """Of each network: of how many pairs the score is right, and how many differ in cost."""
    found = []
    for each in networks:
        score, dear = each.scores[measure], each.costs
        both = [(score[a] - score[b], dear[a] - dear[b]) for a, b in each.pairs]
        right = [0.5 if s == 0 else float((s > 0) == (c > 0)) for s, c in both if c]
        found.append((sum(right), len(right)))
    return torch.tensor(found, dtype=torch.float64)


def percent(draws: Tensor) -> Tensor:
    """Of pairs that are right, for each draw of networks."""
    return 100 * draws[..., 0].sum(1) / draws[..., 1].sum(1)


def told(networks: Sequence[Network], measure: str, form: str = ".1f") -> str:
    """Their percentage, and its interval."""
    return lab.said(lab.resampled(in_order(networks, measure), percent), form)
