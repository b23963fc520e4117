"""Does the time of back-propagation grow linearly with depth, in every way to do it?

Expectation: yes (Figure 1.2 of the chapter, for its own engine and PyTorch's), with spikes that do
not smooth out, of unknown cause.

Method: networks of 1 to 1,000 layers of 20 tanh units, 10 in, 15 out, one sample, squared error.
PyTorch's backward, our engine by each schedule (Kahn's also without garbage collection, which could
cause spikes), and an influence trace are timed in turns, depths in random order. Lines go through
the best time of each depth; the power of the depth is that of the best times from 25 layers on, for
each seed. A spike is a depth whose time is over 20% above the line between its neighbours. Weights
are orthogonal: PyTorch's default lets the gradient vanish within 200 layers.

Limits: chains of small layers on one sample, where what is paid for each operator outweighs
arithmetic; times of one machine and one thread.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import log
from pathlib import Path
from random import Random
from statistics import fmean
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import gradtrace as gt
from experiments import lab

ALONE = True  # it measures time
SETTINGS = {
    "full": {"layers": [1, *range(25, 1001, 25)], "rounds": 9, "seeds": 3},
    "quick": {"layers": [1, 25, 50, 100, 200, 300], "rounds": 3, "seeds": 2},
    "small": {"layers": [1, 25, 50], "rounds": 2, "seeds": 1},
}
SCHEDULES = ("kahn", "creation", "recursive")
WAYS = ("PyTorch", *SCHEDULES, "kahn, no gc", "influence")
DEEP, SPIKE = 25, 0.2
COLUMNS = ("way", "µs a layer", "R²", "power of depth", "slope over PyTorch's")


def cells(settings: lab.Cell) -> list[lab.Cell]:
    """A network of each depth for each seed, in an order of its own."""
    depths, rounds = settings["layers"], settings["rounds"]
    orders = [(seed, Random(seed).sample(depths, len(depths))) for seed in range(settings["seeds"])]
    return [{"layers": n, "rounds": rounds, "seed": seed} for seed, some in orders for n in some]


def network(layers: int, seed: int) -> tuple[nn.Sequential, Tensor, Tensor]:
    """So many layers of 20 units and one of 15, all tanh; an input and a target."""
    torch.manual_seed(seed)
    parts: list[nn.Module] = []
    for a, b in pairwise([10, *[20] * layers, 15]):
        affine = nn.Linear(a, b)
        nn.init.orthogonal_(affine.weight)
        nn.init.zeros_(affine.bias)
        parts += [affine, nn.Tanh()]
    return nn.Sequential(*parts), torch.randn(1, 10), torch.randn(1, 15)


def measure(cell: lab.Cell) -> lab.Row:
    """How far gradients are from PyTorch's, and the seconds of each way, round by round."""
    model, x, y = network(cell["layers"], cell["seed"])
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1_000 + 4 * cell["layers"])
    try:
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(cell["rounds"]):
            for way in WAYS:
                seconds[way].append(_timed(way, model, x, y))
        return {"differences": _differences(model, x, y), "seconds": seconds}
    finally:
        sys.setrecursionlimit(limit)


def _timed(way: str, model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The seconds of one pass; the forward pass is not counted."""
    watch = gt.watch(model)
    with watch if way == "influence" else torch.enable_grad():
        loss = mse_loss(model(x), y)
    names = dict(model.named_parameters())
    schedule = way if way in SCHEDULES else "kahn"
    ways: dict[str, Callable[[], object]] = {
        "PyTorch": lambda: torch.autograd.grad(loss, [*names.values()]),
        "influence": lambda: watch.trace(loss).influence(),
    }
    run = ways.get(way, lambda: gt.backward(loss, names=names, schedule=schedule))
    if way == "kahn, no gc":
        gc.disable()
    began = perf_counter()
    run()
    took = perf_counter() - began
    gc.enable()
    return took


def _differences(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
    """The largest difference from PyTorch's gradient, relative to it, by schedule."""
    names, loss = dict(model.named_parameters()), mse_loss(model(x), y)
    theirs = torch.autograd.grad(loss, [*names.values()], retain_graph=True)
    found = {}
    for schedule in SCHEDULES:
        ours = gt.backward(loss, names=names, schedule=schedule)
        off = [(ours[name] - g).abs().max() / g.abs().max() for name, g in zip(names, theirs)]
        found[schedule] = float(max(off))
    return found


def kept(row: lab.Row) -> list[lab.Row]:
    """A row of docs/experiments is as those of today."""
    return [row]


def by_depth(rows: Sequence[lab.Row], way: str, of: Callable[[Any], float]) -> dict[int, float]:
    """``of`` the seconds of each depth, those of all seeds together."""
    depths = sorted({row["layers"] for row in rows})
    return {n: of([t for r in rows if r["layers"] == n for t in r["seconds"][way]]) for n in depths}


def powers(rows: Sequence[lab.Row], way: str) -> list[float]:
    """The power of the depth that the best times grow with, for each seed."""
    found = []
    for seed in sorted({row["seed"] for row in rows}):
        best = by_depth([row for row in rows if row["seed"] == seed], way, min)
        deep = {log(n): log(seconds) for n, seconds in best.items() if n >= DEEP}
        found.append(lab.line([*deep], [*deep.values()])[0])
    return found


def spikes(times: dict[int, float]) -> int:
    """The depths whose time is far above the line between their neighbours."""
    found, points = 0, [*times.items()]
    for (a, left), (n, here), (b, right) in zip(points, points[1:], points[2:]):
        found += here > (1 + SPIKE) * (left + (right - left) * (n - a) / (b - a))
    return found


def tables(rows: Sequence[lab.Row]) -> list[lab.Table]:
    """Lines through the best times, and spikes."""
    best = {way: by_depth(rows, way, min) for way in WAYS}
    fits = {way: lab.line([*best[way]], [*best[way].values()]) for way in WAYS}
    found = [
        (way, slope * 1e6, r2, lab.spoken(powers(rows, way)), slope / fits["PyTorch"][0])
        for way, (slope, r2) in fits.items()
    ]
    off = max(max(row["differences"].values()) for row in rows)
    title = f"Lines through the best times (gradients are at most {off:.1e} from PyTorch's)"
    means = {way: by_depth(rows, way, fmean) for way in WAYS}
    told = [(way, spikes(means[way]), spikes(best[way])) for way in WAYS]
    inner = max(len(best["PyTorch"]) - 2, 0)
    return [
        (title, COLUMNS, found),
        (f"Spikes, of {inner} depths", ("way", "of mean times", "of best times"), told),
    ]


def figure(rows: Sequence[lab.Row], path: Path) -> None:
    """The best times over depth."""
    curves = {}
    for way in WAYS:
        best = by_depth(rows, way, min)
        curves[way] = [*best], [1e3 * seconds for seconds in best.values()]
    lab.lines(path, "Back-propagation over depth, best times", "layers", "milliseconds", curves)
