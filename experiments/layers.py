"""Does the time of back-propagation grow linearly with depth, in every way to do it?

Expectation: yes (Figure 1.2 of the chapter, for its own engine and PyTorch's), with spikes that do
not smooth out, of unknown cause; values of inputs and targets do not matter, and samples packed
into one batch take less time than one by one.

Method: networks of 1 to 1,000 layers of 20 tanh units, 10 in, 15 out, one sample, squared error.
PyTorch's backward, our engine by each schedule (Kahn's also without garbage collection, which could
cause spikes), and an influence trace are timed in turns, depths in random order. Lines go through
the best time of each depth; the power of the depth is that of the best times from 25 layers on, for
each seed. A spike is a depth whose time is over 20% above the line between its neighbours. Weights
are orthogonal: PyTorch's default lets the gradient vanish within 200 layers. At one depth, inputs
and targets are random, zero, or tiny (1e-40, subnormal in float32), and 20 samples go one by one
and in one batch.

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
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import gradtrace as gt
from experiments import lab

ALONE = True  # it measures time
SETTINGS = {
    "full": {"layers": [1, *range(25, 1001, 25)], "rounds": 9, "seeds": 3, "inputs": 8},
    "quick": {"layers": [1, 25, 50, 100, 200, 300], "rounds": 2, "seeds": 2, "inputs": 2},
    "small": {"layers": [1, 25, 50], "rounds": 1, "seeds": 1, "inputs": 1},
}
ROWS = ("layers", "layers-inputs")
SOME = ("PyTorch", "kahn", "influence")
SCHEDULES = ("kahn", "creation", "recursive")
WAYS = ("PyTorch", *SCHEDULES, "kahn, no gc", "influence")
DEEP, SPIKE, PACKED = 25, 0.2, 20
COLUMNS = ("way", "µs a layer", "R²", "power of depth", "over PyTorch's", "spikes", "of best times")
GIVEN = ("way", "zero", "tiny", "20 one by one", "20 in one batch")


def cells(settings: lab.Cell) -> list[lab.Cell]:
    """A network of each depth for each seed, in an order of its own; and other inputs."""
    depths, rounds = settings["layers"], settings["rounds"]
    orders = [(seed, Random(seed).sample(depths, len(depths))) for seed in range(settings["seeds"])]
    found = [{"layers": n, "rounds": rounds, "seed": seed} for seed, some in orders for n in some]
    seeds = range(settings["inputs"])
    return found + [{"inputs": 25, "rounds": 3 * rounds, "seed": seed} for seed in seeds]


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
    if "inputs" in cell:
        return inputs(cell)
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


def inputs(cell: lab.Cell) -> lab.Row:
    """The processor's seconds of a pass by way and kind of input, in turns."""
    model, x, y = network(cell["inputs"], cell["seed"])
    many = torch.randn(PACKED, 10), torch.randn(PACKED, 15)
    given = {"random": (x, y), "zero": (0 * x, 0 * y), "tiny": (1e-40 * x, 1e-40 * y)}
    kinds = {name: [pair] for name, pair in given.items()}
    kinds |= {GIVEN[3]: [*zip(*(each[:, None] for each in many))], GIVEN[4]: [many]}
    seconds = {way: {kind: list[float]() for kind in kinds} for way in SOME}
    for _ in range(cell["rounds"]):
        for way in SOME:
            for kind, pairs in kinds.items():
                took = sum(_timed(way, model, a, b, process_time) for a, b in pairs)
                seconds[way][kind].append(took)
    return {"seconds": seconds}


def _timed(
    way: str, model: nn.Module, x: Tensor, y: Tensor, clock: Callable[[], float] = perf_counter
) -> float:
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
    began = clock()
    run()
    took = clock() - began
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


def _line(rows: Sequence[lab.Row], way: str) -> list[object]:
    best, means = by_depth(rows, way, min), by_depth(rows, way, fmean)
    (slope, r2), theirs = (
        lab.line([*x], [*x.values()]) for x in (best, by_depth(rows, "PyTorch", min))
    )
    power = lab.spoken(powers(rows, way))
    return [way, slope * 1e6, r2, power, slope / theirs[0], spikes(means), spikes(best)]


def _given(rows: Sequence[lab.Row], way: str) -> list[object]:
    """Best times over those of a random sample, by kind of input."""
    best = [{kind: min(some) for kind, some in row["seconds"][way].items()} for row in rows]
    return [
        way,
        *(lab.spoken([each[kind] / each["random"] for each in best]) for kind in GIVEN[1:]),
    ]


def tables(rows: Sequence[lab.Row]) -> list[lab.Table]:
    """Lines through the best times, with spikes; and times of other inputs."""
    deep, given = ([row for row in rows if ("inputs" in row) == kind] for kind in (False, True))
    off = max(max(row["differences"].values()) for row in deep)
    title = f"Lines through the best times (gradients are at most {off:.1e} from PyTorch's)"
    times = "Best times over those of one random sample, 25 layers"
    return [
        (title, COLUMNS, [_line(deep, way) for way in WAYS]),
        (times, GIVEN, [_given(given, way) for way in SOME]),
    ]


def figure(rows: Sequence[lab.Row], path: Path) -> None:
    """The best times over depth."""
    curves, rows = {}, [row for row in rows if "layers" in row]
    for way in WAYS:
        best = by_depth(rows, way, min)
        curves[way] = [*best], [1e3 * seconds for seconds in best.values()]
    lab.lines(path, "Back-propagation over depth, best times", "layers", "milliseconds", curves)
