"""Over how many paths does gradient spread, as a network gets wider?

Du et al. (2023) trained perceptrons of 4 to 128 hidden units on data of which only the first
feature matters, and had 2.31 to 5.79 nats as the mean entropy of the paths from it to the loss.

Expectation: entropy is at most the logarithm of the number of paths, so it may grow with width; the
relevant feature has more than the others from 16 units on, as they found.

Method: their task (four features, uniform in 0..1; the label says whether the first is over ½),
network (linear, leaky ReLU, linear, two scores) and training (Adam 0.001, batches of 32, one epoch
of 16,000 points). The entropy of |weight| over all paths from each feature of held-out points to
the point's cross entropy, by ``semirings.ENTROPY``. The loss is written in two ways of equal value
and gradient: ``fused``, log-softmax one operator, with 2 paths from each hidden unit; and
``shifted``, as their library has it, ``log Σ exp(s - max s) + max s - s[label]``, with 6.

Limits: one task, one kind of network; published means are known to two digits. Entropy is of a
formula, and changes with how it is written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import gradtrace as gt
from experiments import lab

SETTINGS = {
    "full": {"widths": [4, 8, 16, 32, 64, 128], "points": 20_000, "samples": 320, "seeds": 20},
    "quick": {"widths": [4, 16, 64], "points": 20_000, "samples": 64, "seeds": 3},
    "small": {"widths": [4, 8], "points": 1_000, "samples": 16, "seeds": 2},
}
THEIRS = {4: 2.31, 8: 2.83, 16: 3.75, 32: 4.47, 64: 5.10, 128: 5.79}
COLUMNS = ("hidden", "Du et al.", "untrained", "trained", "apart", "irrelevant", "lead", "bound")


def cells(settings: lab.Cell) -> list[lab.Cell]:
    """A network for each width and seed."""
    rest = {name: settings[name] for name in ("points", "samples")}
    widths, seeds = settings["widths"], range(settings["seeds"])
    return [{"width": width, "seed": seed, **rest} for width in widths for seed in seeds]


def network(width: int, seed: int) -> nn.Sequential:
    """Weights are normal of variance 2 / (in + out), biases of variance 1 / out."""
    random = torch.Generator().manual_seed(seed)
    layers = nn.Linear(4, width), nn.Linear(width, 2)
    for layer in layers:
        rows, columns = layer.in_features, layer.out_features
        weight = torch.randn(rows, columns, generator=random) * math.sqrt(2 / (rows + columns))
        layer.weight.data = weight.T.contiguous()
        layer.bias.data = torch.randn(columns, generator=random) / math.sqrt(columns)
    return nn.Sequential(layers[0], nn.LeakyReLU(), layers[1])


def measure(cell: lab.Cell) -> lab.Row:
    """Train a network for an epoch, and measure held-out points before and after."""
    count, seed = cell["points"], cell["seed"]
    x = torch.rand(count, 4, generator=torch.Generator().manual_seed(seed))
    y, cut = (x[:, 0] > 0.5).long(), 8 * count // 10
    model, some = network(cell["width"], seed), slice(cut, cut + cell["samples"])
    random = torch.Generator().manual_seed(1000 + seed)
    order = torch.randperm(cut, generator=random)

    def loss_of(batch: Tensor) -> Tensor:
        return cross_entropy(model(x[batch]), y[batch])

    before = spread(model, x[some], y[some])
    losses = (partial(loss_of, order[n : n + 32]) for n in range(0, cut, 32))
    lab.train(model, torch.optim.Adam(model.parameters(), lr=0.001), losses)
    accuracy = float((model(x[cut:]).argmax(1) == y[cut:]).double().mean())
    return {"untrained": before, "trained": spread(model, x[some], y[some]), "accuracy": accuracy}


def spread(model: nn.Sequential, x: Tensor, y: Tensor) -> dict[str, list[float]]:
    """The mean entropy of the paths from each feature, in nats, by how the loss is written."""
    model.double()
    found = {}
    for name, loss_of in {"fused": fused, "shifted": shifted}.items():
        points = x.double().requires_grad_()
        loss = loss_of(model(points), y)
        value: Any = gt.backward(loss, gt.semirings.ENTROPY, names={"x": points})["x"]
        found[name] = gt.semirings.ENTROPY.entropy(value).mean(0).tolist()
    model.float()
    return found


def fused(scores: Tensor, y: Tensor) -> Tensor:
    """The cross entropy as PyTorch has it."""
    return cross_entropy(scores, y, reduction="sum")


def shifted(scores: Tensor, y: Tensor) -> Tensor:
    """The cross entropy as theirs: ``log Σ exp(s - max s) + max s - s[y]``."""
    top = scores.max(1, keepdim=True).values
    total = (scores - top).exp().sum(1).log()
    return (total + scores.max(1).values - scores.gather(1, y[:, None])[:, 0]).sum()


def kept(row: lab.Row) -> list[lab.Row]:
    """A row of docs/experiments has the networks of all seeds, by epoch."""
    width = row["width"]
    return [
        {"width": width, "seed": seed, "untrained": net["0"], "trained": net["1"]}
        for seed, net in enumerate(row["networks"])
    ]


def entropies(rows: Sequence[lab.Row], width: int, when: str, loss: str) -> list[list[float]]:
    """The entropy of the paths from each feature, by network."""
    return [row[when][loss] for row in rows if row["width"] == width]


def _row(rows: Sequence[lab.Row], width: int, loss: str) -> list[object]:
    """One width: the relevant feature untrained and trained, its distance from the published mean,
    the other features, and the lead over them.
    """
    before, after = (entropies(rows, width, when, loss) for when in ("untrained", "trained"))
    first, others = [net[0] for net in after], [sum(net[1:]) / 3 for net in after]
    lead = [a - b for a, b in zip(first, others)]
    apart = [a - THEIRS[width] for a in first]
    numbers = [net[0] for net in before], first, apart, others, lead
    paths = 6 if loss == "shifted" else 2
    return [width, THEIRS[width], *map(lab.spoken, numbers), math.log(paths * width)]


def tables(rows: Sequence[lab.Row]) -> list[lab.Table]:
    """Entropy over width, against theirs and the bound."""
    widths = sorted({row["width"] for row in rows})
    found: list[lab.Table] = []
    for loss in ("shifted", "fused"):
        mine = [_row(rows, width, loss) for width in widths]
        found.append((f"Path entropy of the relevant feature, {loss} loss, in nats", COLUMNS, mine))
    return found


def figure(rows: Sequence[lab.Row], path: Path) -> None:
    """Mean entropies over width."""
    widths = sorted({row["width"] for row in rows})
    curves = {"Du et al.": ([*THEIRS], [*THEIRS.values()])}
    for loss in ("shifted", "fused"):
        means = [
            lab.interval([n[0] for n in entropies(rows, w, "trained", loss)])[0] for w in widths
        ]
        curves[f"{loss}, trained"] = widths, means
    what = "Path entropy of the relevant feature"
    lab.lines(path, what, "hidden units", "nats", curves, xscale="log")
