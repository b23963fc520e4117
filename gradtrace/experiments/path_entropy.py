"""Over how many paths does gradient spread, as a network gets wider?

Question: Du et al. (2023) trained perceptrons of 4 to 128 hidden units on data of which only the
first feature matters, and measured the entropy of the paths from that feature to the loss: 2.31,
2.83, 3.75, 4.47, 5.10, 5.79 nats; it grows with width, and from 16 units on the relevant feature has
more than the irrelevant ones. Is that so again?

Expectation: entropy is at most the logarithm of the number of paths, which grows with width, so
entropy has room to grow; whether training fills it is open. Their 2.31 for 4 units is more than
log 8, the most that 4 units and 2 scores allow if the loss is one operator: they must count more.

Method: their task (four features, uniform in 0..1, label 1 if the first is over ½; 10,000 points,
70% to train) and their network (linear, leaky ReLU, linear, two scores; normal initialisation of
variance 2 / (in + out); Adam 0.001, batches of 32). The entropy of |weight| over all paths from each
input feature of held-out points to the point's cross entropy, by ``gradtrace.semirings.ENTROPY``,
before, during and after training, with ``COUNT`` for the bound. The loss is written in two ways:
``fused``, where log-softmax is one operator, with 2 paths from each hidden unit; and ``composed``,
``logsumexp(scores) - score``, as theirs, with 3: the right score counts twice. At operator
granularity the whole network is a chain and only the composed loss forks: two paths at any width.

Seeds: one for data, initialisation and order of training; intervals are a bootstrap over seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.experiments.findings import (
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
from gradtrace.experiments.statistics import Interval, bootstrap
from gradtrace.semirings import COUNT, ENTROPY

QUICK = {"widths": [4, 16, 64], "points": 3000, "epochs": [0, 1, 4], "samples": 64}
FULL = {
    "widths": [4, 8, 16, 32, 64, 128],
    "points": 10_000,
    "epochs": [0, 1, 5, 20],
    "samples": 500,
}
SEEDS = Seeds(quick=2, full=20)
TIMED = False

FEATURES, BATCH, RATE = 4, 32, 0.001
LOSSES = ("fused", "composed")
PATHS = {"fused": 2, "composed": 3}  # from a hidden unit to the loss
THEIRS = {4: 2.31, 8: 2.83, 16: 3.75, 32: 4.47, 64: 5.10, 128: 5.79}


def points(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Features, and whether the first is over a half."""
    x = torch.rand(count, FEATURES, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] > 0.5).long()


def network(width: int) -> nn.Sequential:
    """Two layers; weights normal of variance 2 / (in + out), biases of variance 1 / out."""
    model = nn.Sequential(nn.Linear(FEATURES, width), nn.LeakyReLU(), nn.Linear(width, 2))
    for layer in (model[0], model[2]):
        nn.init.xavier_normal_(layer.weight)
        nn.init.normal_(layer.bias, std=1 / math.sqrt(layer.out_features))
    return model


def epoch(model: nn.Module, optimiser: torch.optim.Optimizer, x: Tensor, labels: Tensor) -> None:
    """Once over all points, in random order."""
    for batch in torch.split(torch.randperm(len(x)), BATCH):
        loss = nn.functional.cross_entropy(model(x[batch]), labels[batch])
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        optimiser.step()


# Measuring ----------------------------------------------------------------------------------------


def losses(scores: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The sum of the points' cross entropies, written in two ways.

    Each feature of a point has paths to its own point's loss only, so all are measured at once.
    """
    right = scores.gather(1, labels[:, None])[:, 0]
    return {
        "fused": nn.functional.cross_entropy(scores, labels, reduction="sum"),
        "composed": (scores.logsumexp(1) - right).sum(),
    }


def spread(model: nn.Sequential, x: Tensor, labels: Tensor) -> Result:
    """The mean entropy by feature, of both losses and of operators; and whether bounds hold."""
    x = x.clone().requires_grad_()
    width = int(model[0].out_features)
    found: Result = {"bounded": True, "counted": True, "operator": operators(model, x, labels)}
    for name, loss in losses(model(x), labels).items():
        entropy = ENTROPY.entropy(gt.backward(loss, ENTROPY, names={"x": x})["x"])
        count = gt.backward(loss, COUNT, names={"x": x})["x"]
        found[name] = entropy.double().mean(0).tolist()
        # Rounding in float32; and a path whose weight is too small for a float is not counted.
        found["bounded"] &= bool((entropy <= count.log() + 1e-4).all())
        found["counted"] &= bool((count <= PATHS[name] * width).all())
    return found


def operators(model: nn.Sequential, x: Tensor, labels: Tensor) -> list[float]:
    """Entropy by feature of the two paths of operators that the composed loss has."""
    scores = model(x)
    parts = scores.logsumexp(1).sum(), scores.gather(1, labels[:, None]).sum()
    sizes = torch.stack([gt.backward(part, names={"x": x})["x"].abs() for part in parts]).double()
    shares = sizes / sizes.sum(0)
    return [float(each) for each in -torch.xlogy(shares, shares).sum(0).mean(0)]


def cells(settings: Mapping[str, Any], seeds: int) -> list[Cell]:
    """A network for each seed and width."""
    rest = {name: settings[name] for name in ("points", "epochs", "samples")}
    widths = settings["widths"]
    return [{"seed": seed, "width": width, **rest} for seed in range(seeds) for width in widths]


def measure(cell: Cell, tick: Tick) -> Result:
    """Train a network, and measure held-out points after some epochs: ``{epochs: ...}``."""
    count = cell["points"]
    x, labels = points(count, cell["seed"])
    train, rest = slice(0, 7 * count // 10), slice(7 * count // 10, count)
    some = slice(rest.start, rest.start + cell["samples"])
    found: Result = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(cell["seed"])
        model = network(cell["width"])
        optimiser = torch.optim.Adam(model.parameters(), lr=RATE)
        for number in range(max(cell["epochs"]) + 1):
            tick(f"width {cell['width']}, epoch {number}")
            if number:
                epoch(model, optimiser, x[train], labels[train])
            if number in cell["epochs"]:
                right = model(x[rest]).argmax(1) == labels[rest]
                measured = spread(model, x[some], labels[some])
                found[str(number)] = {"accuracy": float(right.double().mean()), **measured}
    return found


# Concluding ---------------------------------------------------------------------------------------


def conclude(rows: Sequence[Row]) -> Findings:
    """Entropy over width, trained and not, against theirs and against the bound."""
    found = Found(sorted(rows, key=lambda row: (row.cell["width"], row.cell["seed"])))
    checks = {
        name: all(each[name] for row in rows for each in row.result.values())
        for name in ("bounded", "counted")
    }
    entropies = {
        loss: {w: {e: found.entropy(w, e, loss).value for e in found.epochs} for w in found.widths}
        for loss in LOSSES
    }
    known = {
        **checks,
        "grows untrained": found.grows(0, "fused") and found.grows(0, "composed"),
        "grows trained": found.grows(found.last, "composed"),
        "entropy": entropies,
        "above": {w: found.above(w, found.last, "composed") for w in found.widths},
        "operator": max(found.operator(w, e) for w in found.widths for e in found.epochs),
    }
    return Findings(sentence(found), (table(found), training(found)), plots(found), known)


class Found:
    """The rows by width, and what is asked of them."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.by: dict[int, list[Result]] = {}
        for row in rows:
            self.by.setdefault(row.cell["width"], []).append(row.result)
        self.widths = sorted(self.by)
        self.epochs = sorted({int(e) for results in self.by.values() for r in results for e in r})
        self.last = self.epochs[-1]

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

    def accuracy(self, width: int, epochs: int) -> float:
        """On held-out points."""
        return self._over(width, epochs, lambda at: float(at["accuracy"])).value

    def operator(self, width: int, epochs: int) -> float:
        """Of the relevant feature's two paths of operators."""
        return self._over(width, epochs, lambda at: float(at["operator"][0])).value

    def above(self, width: int, epochs: int, loss: str) -> int:
        """1: the relevant feature is above, -1: below, 0: cannot be told."""
        return self.lead(width, epochs, loss).sign if len(self.by[width]) > 1 else 0

    def grows(self, epochs: int, loss: str) -> bool:
        """Whether each width has more entropy than the one before it."""
        values = [self.entropy(width, epochs, loss).value for width in self.widths]
        return all(a < b for a, b in zip(values, values[1:]))

    def _over(self, width: int, epochs: int, ask: Callable[[Result], float]) -> Interval:
        values = [ask(result[str(epochs)]) for result in self.by[width]]
        found = bootstrap(values, lambda some: sum(some) / len(some), rounds=1000)
        return found if len(values) > 1 else Interval(found.value, found.value, found.value)


def sentence(found: Found) -> str:
    """What was found, in words."""
    first, last = found.widths[0], found.widths[-1]
    shown = ", ".join(
        f"{w}: {found.entropy(w, found.last, 'composed').value:.2f}"
        + (f" ({THEIRS[w]:.2f})" if w in THEIRS else "")
        for w in found.widths
    )
    trend = "grows with width" if found.grows(found.last, "composed") else "does not always grow"
    untrained = "also before" if found.grows(0, "composed") else "not always before"
    fused = found.entropy(first, found.last, "fused").value
    return (
        f"Path entropy {trend} after training, and {untrained}: with a composed loss as theirs, by "
        f"hidden units {shown} nats (in brackets Du et al.). The bound is log(3·width), from "
        f"{math.log(3 * first):.2f} to {math.log(3 * last):.2f}; at width {last} the untrained network "
        f"has {found.entropy(last, 0, 'composed').value:.2f} of it already, so most of the growth is "
        f"that of the bound. With the loss as one operator the bound is log(2·width) and entropy "
        f"{fused:.2f} at width {first}: what a path is, not the function, makes up the difference. "
        f"Between whole operators there are two paths at any width, of at most 0.69 nats. "
        f"{compared(found)}"
    )


def compared(found: Found) -> str:
    """Whether the relevant feature is above the others, and from which width on."""
    words = {1: "above", -1: "below", 0: "not told apart from"}
    signs = {w: found.above(w, found.last, "composed") for w in found.widths}
    groups = {
        words[sign]: [str(w) for w in found.widths if signs[w] == sign] for sign in (1, -1, 0)
    }
    said = "; ".join(
        f"{word} the irrelevant ones at {', '.join(ws)}" for word, ws in groups.items() if ws
    )
    claim = all(signs[w] == 1 for w in found.widths if w >= 16)
    verdict = "as Du et al. found" if claim else "unlike Du et al., who had it above from 16 on"
    return f"The trained networks have the relevant feature {said} hidden units, {verdict}."


def table(found: Found) -> Table:
    """Trained and not, relevant and not, by width."""

    def line(width: int) -> tuple[str | float | int | None, ...]:
        last = found.last
        kinds = [
            str(found.entropy(width, 0, "composed")),
            str(found.entropy(width, last, "composed")),
            str(found.others(width, last, "composed")),
            math.log(PATHS["composed"] * width),
            str(found.entropy(width, 0, "fused")),
            str(found.entropy(width, last, "fused")),
            str(found.others(width, last, "fused")),
            math.log(PATHS["fused"] * width),
            found.operator(width, last),
        ]
        return (width, THEIRS.get(width), *kinds)

    names = ("untrained", "trained", "irrelevant, trained", "bound")
    return Table(
        "Path entropy of the relevant feature, in nats",
        (
            "hidden",
            "Du et al.",
            *(f"{name} ({loss})" for loss in ("composed", "fused") for name in names),
            "operators",
        ),
        tuple(line(width) for width in found.widths),
        "95% intervals over seeds. Theirs is a composed loss.",
    )


def training(found: Found) -> Table:
    """Over training: accuracy, and entropy of the composed loss."""
    rows = tuple(
        (w, e, found.accuracy(w, e), str(found.entropy(w, e, "composed")))
        for w in found.widths
        for e in found.epochs
    )
    return Table("Over training", ("hidden", "epochs", "accuracy", "entropy (composed)"), rows)


def plots(found: Found) -> tuple[Plot, ...]:
    """Entropy over width: one figure for each way to write the loss."""
    known = [w for w in found.widths if w in THEIRS]
    theirs = Series("Du et al.", known, [THEIRS[w] for w in known], style="points")

    def line(label: str, values: Sequence[Interval]) -> Series:
        y, low, high = zip(*values)
        return Series(label, found.widths, y, low, high)

    def plot(loss: str) -> Plot:
        bound = [math.log(PATHS[loss] * w) for w in found.widths]
        series = (
            line("untrained", [found.entropy(w, 0, loss) for w in found.widths]),
            line("trained", [found.entropy(w, found.last, loss) for w in found.widths]),
            line("irrelevant", [found.others(w, found.last, loss) for w in found.widths]),
            Series("bound", found.widths, bound, style="dashed"),
        )
        title = f"Path entropy of the relevant feature ({loss} loss)"
        return Plot(f"entropy-{loss}", title, "hidden units", "nats", (theirs, *series), log_x=True)

    return plot("composed"), plot("fused")
