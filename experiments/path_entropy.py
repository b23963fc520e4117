"""Over how many paths does gradient spread, as a network gets wider?

Question: Du et al. (2023) trained perceptrons of 4 to 128 hidden units on data of which only the
first feature matters, and measured the entropy of the paths from that feature to the loss: 2.31,
2.83, 3.75, 4.47, 5.10, 5.79 nats. It grows with width, and from 16 units on the relevant feature
has more than the irrelevant ones. Is that so again, and are these the numbers?

Expectation: entropy is at most the logarithm of the number of paths, which grows with width, so
entropy has room to grow; whether training fills it is open. Their 2.31 for 4 units is more than
log 8, the most that 4 units and 2 scores allow if the loss is one operator: they count more. With
10,000 points and 20 epochs, as we had it first, means were up to 0.21 nats off; theirs are those of
20,000 points and one epoch of 500 updates, and a pilot of six seeds so run was within 0.11.

Method: their task (four features, uniform in 0..1, label 1 if the first is over ½; 20,000 points,
80% to train, one epoch: 500 updates) and their network (linear, leaky ReLU, linear, two scores;
normal initialisation of variance 2 / (in + out); Adam 0.001, batches of 32). The entropy of
|weight| over all paths from each input feature of held-out points to the point's cross entropy, by
``semirings.ENTROPY``, before and after training, with ``COUNT`` for the bound. The loss is written
in three ways, equal in value and gradient: ``fused``, log-softmax one operator, with 2 paths from
each hidden unit; ``opened``, by ``gt.watch(model, open=["log_softmax"])``, with 3; and ``shifted``,
as their library has it, ``log Σ exp(s - max s) + max s - s[label]``, with 6. At operator
granularity the network is a chain and only the loss forks: 1, 2 and 4 paths at any width.
A mean agrees with theirs if it is within 0.15 nats.

Seeds: one for data, initialisation and order of training; intervals are a bootstrap over seeds.

Limits: One task and one kind of network. Published means are known to two digits, without
intervals, so that nothing finer than 0.15 nats can be compared; the number of epochs and points was
found by trying which fit. Entropy is of a formula, and changes with how it is written.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

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
from gradtrace.experiments.harness.statistics import Interval, average, bootstrap, with_interval
from gradtrace.semirings import COUNT, ENTROPY, Value

QUICK = {"widths": [4, 16, 64], "points": 3000, "epochs": [0, 1], "samples": 64}
FULL = {"widths": [4, 8, 16, 32, 64, 128], "points": 20_000, "epochs": [0, 1], "samples": 320}
SEEDS = Seeds(quick=2, full=20)
TIMED = False
FIGURE = "entropy-shifted"

FEATURES, BATCH, RATE = 4, 32, 0.001
PATHS = {"fused": 2, "opened": 3, "shifted": 6}  # from a hidden unit to the loss, by its writing
ENOUGH = 5  # seeds, to say that one feature is above another
THEIR_LOSS = "shifted"
NEAR = 0.15  # nats
THEIRS = {4: 2.31, 8: 2.83, 16: 3.75, 32: 4.47, 64: 5.10, 128: 5.79}


def points(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Features, and whether the first is over a half."""
    x = torch.rand(count, FEATURES, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] > 0.5).long()


class Networks(nn.Module):
    """Networks of two layers, one a seed, side by side: (seed, point, 4) -> (seed, point, 2).

    Weights are normal of variance 2 / (in + out), biases of variance 1 / out. No network sees the
    points of another, and a sum of their losses has the gradients of each.
    """

    def __init__(self, width: int, seeds: Sequence[int]) -> None:
        super().__init__()
        drawn = [_drawn(width, torch.Generator().manual_seed(seed)) for seed in seeds]
        self.first, self.first_bias, self.second, self.second_bias = (
            nn.Parameter(torch.stack(each)) for each in zip(*drawn)
        )
        self.bend = nn.LeakyReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Two scores a point."""
        hidden = self.bend(torch.baddbmm(self.first_bias, x, self.first))
        return torch.baddbmm(self.second_bias, hidden, self.second)


def _drawn(width: int, generator: torch.Generator) -> list[Tensor]:
    """The weights and biases of both layers of a network."""

    def normal(*shape: int, std: float) -> Tensor:
        return torch.randn(*shape, generator=generator) * std

    found = []
    for rows, columns in ((FEATURES, width), (width, 2)):
        found.append(normal(rows, columns, std=math.sqrt(2 / (rows + columns))))
        found.append(normal(1, columns, std=1 / math.sqrt(columns)))
    return found


def epoch(
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    x: Tensor,
    labels: Tensor,
    orders: Sequence[torch.Generator],
) -> None:
    """Once over all points, in an order of each network's own."""
    which = torch.arange(len(orders))[:, None]
    order = torch.stack([torch.randperm(x.shape[1], generator=each) for each in orders])
    for batch in torch.split(order, BATCH, 1):
        scores, right = model(x[which, batch]), labels[which, batch]
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), right.flatten())
        optimiser.zero_grad()
        torch.autograd.backward(loss * len(orders))  # a mean over each network's batch
        optimiser.step()


# Measuring ----------------------------------------------------------------------------------------


def losses(model: nn.Module, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The sum of the points' cross entropies, written in three ways.

    Each feature of a point has paths to its own point's loss only, so all are measured at once.
    """
    found = {}
    right = labels.flatten()
    for name, pieces in (("fused", ()), ("opened", ("log_softmax",))):
        with gt.watch(model, open=pieces):
            scores = model(x).flatten(0, 1)
            found[name] = nn.functional.cross_entropy(scores, right, reduction="sum")
    found["shifted"] = shifted(right, scores, scores, scores, scores)
    return found


def shifted(labels: Tensor, right: Tensor, powers: Tensor, least: Tensor, top: Tensor) -> Tensor:
    """``log Σ exp(s - max s) + max s - s[label]``, each use of the scores an argument."""
    exps = (powers - least.max(1, keepdim=True).values).exp()
    return (exps.sum(1).log() + top.max(1).values - right.gather(1, labels[:, None])[:, 0]).sum()


def spread(model: Networks, x: Tensor, labels: Tensor) -> list[Result]:
    """For each network the mean entropy by feature, of all losses and of operators; and whether
    bounds hold.

    In float64: what a sure network leaves of the gradient, 1 - p, would be mostly rounding.
    """
    model, x = copy.deepcopy(model).double(), x.double().requires_grad_()
    width = model.first.shape[2]
    found: list[Result] = [
        {"bounded": True, "counted": True, "operator": each} for each in operators(model, x, labels)
    ]
    for name, loss in losses(model, x, labels).items():
        entropy = ENTROPY.entropy(cast(Value, gt.backward(loss, ENTROPY, names={"x": x})["x"]))
        count = gt.backward(loss, COUNT, names={"x": x})["x"]
        for each, one, paths in zip(found, entropy, count):
            each[name] = one.mean(0).tolist()
            # A path whose weight is too small for a float is not counted.
            each["bounded"] &= bool((one <= paths.log() + 1e-9).all())
            each["counted"] &= bool((paths <= PATHS[name] * width).all())
    return found


def operators(model: Networks, x: Tensor, labels: Tensor) -> list[list[float]]:
    """By network and feature, the entropy of the four paths of operators that the shifted loss has.

    The scores are four leaves of the loss, one a path; each gradient goes on to x by itself.
    """
    scores = model(x).flatten(0, 1)
    leaves = [scores.detach().clone().requires_grad_() for _ in range(4)]
    handed = gt.backward(shifted(labels.flatten(), *leaves), names=dict(zip("abcd", leaves)))
    sizes = [gt.backward(scores, names={"x": x}, cotangent=handed[k])["x"].abs() for k in "abcd"]
    total = torch.stack(sizes)
    shares = total / total.sum(0)
    found: list[list[float]] = (-torch.xlogy(shares, shares)).sum(0).mean(1).tolist()
    return found


def cells(settings: Mapping[str, Any], seeds: int) -> list[Cell]:
    """The networks of a width, trained side by side."""
    rest = {name: settings[name] for name in ("points", "epochs", "samples")}
    return [{"seeds": seeds, "width": width, **rest} for width in settings["widths"]]


def measure(cell: Cell, tick: Tick) -> Result:
    """Train networks, and measure held-out points after some epochs: for each ``{epochs: ...}``."""
    count, seeds = cell["points"], range(cell["seeds"])
    x, labels = (torch.stack(each) for each in zip(*(points(count, seed) for seed in seeds)))
    train, rest = slice(0, 8 * count // 10), slice(8 * count // 10, count)
    some = slice(rest.start, rest.start + cell["samples"])
    found: list[Result] = [{} for _ in seeds]
    model = Networks(cell["width"], seeds)
    optimiser = torch.optim.Adam(model.parameters(), lr=RATE, fused=True)
    orders = [torch.Generator().manual_seed(1000 + seed) for seed in seeds]
    for number in range(max(cell["epochs"]) + 1):
        tick(f"width {cell['width']}, epoch {number}")
        if number:
            epoch(model, optimiser, x[:, train], labels[:, train], orders)
        if number in cell["epochs"]:
            right = (model(x[:, rest]).argmax(2) == labels[:, rest]).double().mean(1).tolist()
            measured = spread(model, x[:, some], labels[:, some])
            for each, accuracy, one in zip(found, right, measured):
                each[str(number)] = {"accuracy": accuracy, **one}
    return {"networks": found}


# Concluding ---------------------------------------------------------------------------------------


def headline(facts: Mapping[str, Any]) -> str:
    """The answer in two sentences."""
    found, apart = facts["trained"], facts["apart"]
    high = max(found, key=int)
    words = "more paths" if facts["grows trained"] else "not always more paths"
    near = sum(abs(each) <= NEAR for each in apart.values())
    off = facts.get("farthest")
    far = f" (the farthest off by {with_interval(off)})" if off else ""
    return (
        f"Trained as Du et al. did, networks give {near} of their {len(apart)} mean entropies "
        f"within {NEAR} nats{far}. In wider networks gradient is spread over {words} "
        f"({with_interval(found[high])} nats with {high} hidden units)."
    )


def conclude(rows: Sequence[Row]) -> Findings:
    """Entropy over width, trained and not, against theirs and against the bound."""
    found = Found(sorted(rows, key=lambda row: int(row.cell["width"])))
    checks = {
        name: all(
            each[name]
            for row in rows
            for network in row.result["networks"]
            for each in network.values()
        )
        for name in ("bounded", "counted")
    }
    entropies = {
        loss: {str(w): found.entropy(w, found.last, loss).value for w in found.widths}
        for loss in PATHS
    }
    known = {
        **checks,
        "grows untrained": all(found.grows(found.epochs[0], loss) for loss in PATHS),
        "grows trained": all(found.grows(found.last, loss) for loss in PATHS),
        "entropy": entropies,
        "trained": {str(w): list(found.entropy(w, found.last, THEIR_LOSS)) for w in found.widths},
        "above": {str(w): found.above(w, found.last, THEIR_LOSS) for w in found.widths},
        "operator": max(found.operator(w, e).value for w in found.widths for e in found.epochs),
        "apart": {str(w): found.apart(w).value for w in found.widths if w in THEIRS},
        "farthest": _farthest(found),
    }
    return Findings(
        sentence(found),
        (*(table(found, loss) for loss in reversed(PATHS)), training(found)),
        plots(found),
        known,
    )


class Found:
    """The rows by width, and what is asked of them."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.by: dict[int, list[Result]] = {}
        for row in rows:
            self.by.setdefault(row.cell["width"], []).extend(row.result["networks"])
        self.widths = sorted(self.by)
        self.epochs = sorted({int(e) for results in self.by.values() for r in results for e in r})
        self.last = self.epochs[-1]
        self.seeds = min(map(len, self.by.values()))

    def entropy(self, width: int, epochs: int, loss: str) -> Interval:
        """Of the relevant feature."""
        return self._over(width, epochs, lambda at: float(at[loss][0]))

    def others(self, width: int, epochs: int, loss: str) -> Interval:
        """Of the irrelevant features, their mean."""
        return self._over(width, epochs, lambda at: sum(at[loss][1:]) / (FEATURES - 1))

    def lead(self, width: int, epochs: int, loss: str) -> Interval:
        """By how much the relevant feature is above the others; seeds are compared each by each."""
        return self._over(
            width, epochs, lambda at: at[loss][0] - sum(at[loss][1:]) / (FEATURES - 1)
        )

    def apart(self, width: int) -> Interval:
        """By how much the relevant feature is above the published mean."""
        return self._over(width, self.last, lambda at: at[THEIR_LOSS][0] - THEIRS[width])

    def accuracy(self, width: int, epochs: int) -> float:
        """On held-out points."""
        return average(float(result[str(epochs)]["accuracy"]) for result in self.by[width])

    def operator(self, width: int, epochs: int) -> Interval:
        """Of the relevant feature's four paths of operators."""
        return self._over(width, epochs, lambda at: float(at["operator"][0]))

    def above(self, width: int, epochs: int, loss: str) -> int:
        """1: the relevant feature is above, -1: below, 0: cannot be told."""
        return self.lead(width, epochs, loss).sign if len(self.by[width]) >= ENOUGH else 0

    def grows(self, epochs: int, loss: str) -> bool:
        """Whether each width has more entropy than the one before it."""
        values = [self.entropy(width, epochs, loss).value for width in self.widths]
        return all(a < b for a, b in pairwise(values))

    def rise(self, epochs: int, loss: str) -> Interval:
        """From the narrowest network to the widest, of each seed."""
        ends = (self.by[width] for width in (self.widths[0], self.widths[-1]))
        pairs = [[result[str(epochs)][loss][0] for result in both] for both in zip(*ends)]
        return _over_seeds([high - low for low, high in pairs])

    def _over(self, width: int, epochs: int, ask: Callable[[Result], float]) -> Interval:
        return _over_seeds([ask(result[str(epochs)]) for result in self.by[width]])


def _over_seeds(values: Sequence[float]) -> Interval:
    """The mean with its interval; of one seed, nothing is known but its value."""
    found = bootstrap(values, average, rounds=1000)
    return found if len(values) > 1 else Interval(found.value, found.value, found.value)


def said(found: Interval) -> str:
    """A number, with its interval if there is one."""
    return f"{found.value:.2f}" if found.low == found.high else str(found)


def sentence(found: Found) -> str:
    """What was found, in words."""
    start, end = found.epochs[0], found.last
    low, high = found.widths[0], found.widths[-1]
    trend = "grows with every step of width" if found.grows(end, THEIR_LOSS) else "mostly grows"
    rise = {e: said(found.rise(e, THEIR_LOSS)) for e in (start, end)}
    kinds = ", ".join(f"{said(found.entropy(low, end, loss))} ({loss})" for loss in PATHS)
    return (
        f"With the loss written as theirs, path entropy {trend} after training. "
        f"{distances(found)} "
        f"From {low} to {high} units the bound, log(6·width), rises by "
        f"{math.log(high / low):.2f} nats, the entropy of trained networks by {rise[end]}, and "
        f"that of untrained ones by {rise[start]}. The same networks with the same gradients "
        f"have, at width {low}, {kinds} nats by how the loss is written: entropy is of the "
        f"formula, not of the function alone. Between whole operators there are "
        f"four paths at any width, of {said(found.operator(low, end))} nats at {low} units and "
        f"{said(found.operator(high, end))} at {high}. {compared(found)}"
    )


def distances(found: Found) -> str:
    """How far the means are from the published ones, and what it means in plain words."""
    apart = {w: found.apart(w) for w in found.widths if w in THEIRS}
    if not apart:
        return ""
    near = sum(abs(each.value) <= NEAR for each in apart.values())
    sure = sum(each.low >= -NEAR and each.high <= NEAR for each in apart.values())
    most = max(apart, key=lambda w: abs(apart[w].value))
    return (
        f"{near} of {len(apart)} means are within {NEAR} nats of theirs, {sure} with their whole "
        f"interval; the farthest, at {most} units, by {said(apart[most])}. In plain words: trained "
        f"as the authors did, networks give "
        f"{'the published numbers' if near == len(apart) else 'not all of the published numbers'}."
    )


def _farthest(found: Found) -> list[float | None]:
    """The mean that is farthest from the published one: by how much, with its interval."""
    apart = [found.apart(w) for w in found.widths if w in THEIRS]
    most = max(apart, key=lambda each: abs(each.value), default=None)
    return [x if math.isfinite(x) else None for x in most] if most else []


def compared(found: Found) -> str:
    """Whether the relevant feature is above the others, and from which width on."""
    words = {1: "above", -1: "below", 0: "not surely apart from"}
    signs = {w: found.above(w, found.last, THEIR_LOSS) for w in found.widths}
    groups = {
        words[sign]: [str(w) for w in found.widths if signs[w] == sign] for sign in (1, -1, 0)
    }
    said = "; ".join(
        f"{word} the irrelevant ones at {', '.join(ws)}" for word, ws in groups.items() if ws
    )
    return (
        f"The relevant feature lies {said} hidden units; that Du et al. had it above from 16 on is "
        f"{verdict([signs[w] for w in found.widths if w >= 16])}."
    )


def verdict(signs: Sequence[int]) -> str:
    """What signs say of a claim that all are 1."""
    if signs and all(sign == 1 for sign in signs):
        return "confirmed"
    return "contradicted" if any(sign == -1 for sign in signs) else "not confirmed"


def table(found: Found, loss: str) -> Table:
    """Trained and not, relevant and not, by width, for a loss."""

    def line(width: int) -> tuple[str | float | int | None, ...]:
        return (
            width,
            THEIRS.get(width) if loss == THEIR_LOSS else None,
            said(found.entropy(width, found.epochs[0], loss)),
            said(found.entropy(width, found.last, loss)),
            said(found.others(width, found.last, loss)),
            said(found.lead(width, found.last, loss)),
            said(found.apart(width)) if loss == THEIR_LOSS and width in THEIRS else None,
            math.log(PATHS[loss] * width),
        )

    names = ("hidden", "Du et al.", "untrained", "trained", "irrelevant", "lead", "apart", "bound")
    return Table(
        f"Path entropy of the relevant feature, in nats ({loss} loss)",
        names,
        tuple(line(width) for width in found.widths),
        f"95% intervals, a bootstrap over {found.seeds} seeds. Irrelevant: the other features, "
        "trained; lead: the relevant one over these; apart: from the published mean.",
    )


def training(found: Found) -> Table:
    """Over training: accuracy, entropy as theirs, and that of paths of operators."""
    rows = tuple(
        (
            w,
            e,
            found.accuracy(w, e),
            said(found.entropy(w, e, THEIR_LOSS)),
            said(found.operator(w, e)),
        )
        for w in found.widths
        for e in found.epochs
    )
    names = ("hidden", "epochs", "accuracy", "entropy of elements", "entropy of operators")
    return Table(f"Over training ({THEIR_LOSS} loss)", names, rows)


def plots(found: Found) -> tuple[Plot, ...]:
    """Entropy over width: one figure for each way to write the loss."""
    known = [w for w in found.widths if w in THEIRS]
    theirs = Series("Du et al.", known, [THEIRS[w] for w in known], style="points")

    def line(label: str, values: Sequence[Interval]) -> Series:
        y, low, high = zip(*values)
        return Series(label, found.widths, y, low, high)

    def plot(loss: str) -> Plot:
        given = (theirs,) if loss == THEIR_LOSS else ()
        bound = [math.log(PATHS[loss] * w) for w in found.widths]
        series = (
            line("untrained", [found.entropy(w, found.epochs[0], loss) for w in found.widths]),
            line("trained", [found.entropy(w, found.last, loss) for w in found.widths]),
            line("irrelevant", [found.others(w, found.last, loss) for w in found.widths]),
            Series("bound", found.widths, bound, style="dashed"),
        )
        title = f"Path entropy of the relevant feature ({loss} loss)"
        return Plot(f"entropy-{loss}", title, "hidden units", "nats", (*given, *series), log_x=True)

    return tuple(plot(loss) for loss in reversed(PATHS))
