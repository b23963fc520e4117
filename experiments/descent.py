"""Does what a lecture says of gradient descent hold, on problems where the answer is known?

Expectation: steps as Robbins and Monro's converge; momentum saves updates; small batches cost less,
learn earlier, end noisier; sorted data does harm; descent may rest elsewhere than at the best; and
first weights decide what gradient is left at depth.

Method: the lecture's program R(P,Q) of three weights, ``sigmoid(w1·b)·sin(w2·b)`` with ``b =
tanh(w0·p + q)``, on 256 samples; a parabola ``c/2·(x - ξ)²`` with a new target ξ a step; a
quadratic valley in a random basis (κ = 100); stacks of layers; two layers of 256 units, to time an
update. Optimisers are PyTorch's, at the best of their rates; gradients ``gt.backward``'s.

Limits: small problems, chosen because they are understood.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice, pairwise, takewhile
from pathlib import Path
from statistics import fmean
from time import process_time
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam

import gradtrace as gt
from experiments import lab

ALONE = True  # it measures time
ROWS = ("programs", "descent-orders", "descent-time")
Loss: TypeAlias = Callable[[Tensor], Tensor]
RATES = [0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0]
SETTINGS: dict[str, dict[str, Any]] = {
    "full": {"seeds": 5, "steps": 5000, "updates": 4096, "rates": RATES, "depth": 50, "timed": 15},
    "quick": {"seeds": 1, "steps": 500, "updates": 512, "rates": RATES[4:], "depth": 9, "timed": 5},
    "small": {"seeds": 1, "steps": 30, "updates": 16, "rates": [1.0], "depth": 5, "timed": 2},
}
SAMPLES, SIZES, RUNS, STARTS = 256, (1, 4, 16, 64, 256), 32, 256
TRUTH = torch.tensor([0.8, 1.5, -1.2], dtype=torch.float64)
START = (TRUTH + torch.tensor([0.6, -0.8, 0.6]))[:, None, None]  # of all runs; (3, runs, 1)
GOAL, CLOSE, REST, EXACT = 1e-4, 1e-3, 1e-3, 1e-12  # share of the first excess; excess; slope
CURVATURES, KAPPA, WIDTH, MANY = (2.0, 1.0, 0.2), 100.0, 256, (1, 16, 256, 4096)
STEPS = {"1/i": 1.0, "1/√i": 0.5, "1/i²": 2.0, "constant 1": 0.0}  # the power of i
RULES: dict[str, Any] = {
    "descent": SGD,
    "momentum": partial(SGD, momentum=0.9),
    "Nesterov": partial(SGD, momentum=0.9, nesterov=True),
    "AdaGrad": Adagrad,
    "Adam": Adam,
}
SCALES = {"small": 0.25, "Xavier": 1.0, "He": 2.0, "large": 4.0}  # n · Var W
SHAPES = {"tanh": nn.Tanh, "ReLU": nn.ReLU}
ORDERS = ("shuffled", "drawn", "fixed", "sorted")
VALLEYS, PLACES = ("R(P,Q)", "valley"), ("R(P,Q)", "network")


def cells(settings: lab.Cell) -> list[lab.Cell]:
    """All parts for each seed."""
    parts: dict[str, list[dict[str, Any]]] = {
        "rates": [{"rate": rate, "curvature": c} for rate in STEPS for c in CURVATURES],
        "races": [{"rule": rule, "problem": problem} for rule in RULES for problem in VALLEYS],
        "batches": [{"kind": "starts"}],
        "starts": [{"start": start, "shape": shape} for start in SCALES for shape in SHAPES],
        "orders": [{"order": order, "size": n} for order in ORDERS for n in SIZES],
        "time": [{"problem": place, "size": n} for place in PLACES for n in MANY],
    }
    every = [{"part": part, **one} for part, some in parts.items() for one in some]
    return [{**one, **settings, "seed": n} for one in every for n in range(settings["seeds"])]


def measure(cell: lab.Cell) -> lab.Row:
    """One cell, by its part."""
    parts = {"rates": rates, "races": race, "batches": ends, "starts": depth, "orders": fit}
    return (parts | {"time": update})[cell["part"]](
        cell, torch.Generator().manual_seed(cell["seed"])
    )


def slope(loss: Loss, x: Tensor) -> Tensor:
    """The gradient at a point."""
    x = x.detach().requires_grad_()
    return gt.backward(loss(x), names={"x": x})["x"]


def descend(loss: Loss, start: Tensor, rates: Sequence[float], by: Any = SGD) -> Iterator[Tensor]:
    """The start, and the points after a step of each rate."""
    x = start.clone()
    optimizer = by([x], lr=1.0)
    yield start
    for rate in rates:
        x.grad = slope(loss, x)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        yield x.clone()


def samples(random: torch.Generator, number: int = SAMPLES) -> Tensor:
    """Inputs p and q, and targets: R(P,Q) of the true weights, with noise."""
    p, q, off = torch.randn(3, number, dtype=torch.float64, generator=random)
    return torch.stack([p, q, program(TRUTH, p, q) + 0.1 * off])


def program(w: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """``R(P, Q)``."""
    b = torch.tanh(w[0] * p + q)
    return torch.sigmoid(w[1] * b) * torch.sin(w[2] * b)


def errors(w: Tensor, data: Tensor) -> Tensor:
    """The mean square; with weights (3, n, 1) and data (3, batch) or (3, n, batch), of n runs."""
    return (data[2] - program(w, data[0], data[1])).square().mean(-1)


def least(data: Tensor) -> float:
    """The least loss near the true weights, by Newton's method: curvatures from differences."""
    w, step = TRUTH, 1e-5 * torch.eye(3, dtype=torch.float64)
    for _ in range(9):
        around = torch.cat([w[:, None] + step, w[:, None] - step, w[:, None]], 1)
        g = slope(lambda each: errors(each, data).sum(), around[..., None])[..., 0]
        w = w - torch.linalg.solve((g[:, :3] - g[:, 3:6]) / 2e-5, g[:, 6])
    return float(errors(w, data))


def marks(steps: int) -> list[int]:
    """Numbers of steps to look at, twelve per factor of ten."""
    return sorted({steps, *(n for k in range(99) if (n := round(10 ** (k / 12))) < steps)})


def rates(cell: lab.Cell, random: torch.Generator) -> lab.Row:
    """Distances of 400 runs from a parabola's minimum, and of one without noise in the end."""
    steps, p = cell["steps"], STEPS[cell["rate"]]
    targets = torch.randn(steps, 401, dtype=torch.float64, generator=random)
    targets[:, -1] = 0
    turns, start = iter(targets), torch.full((401,), 3.0, dtype=torch.float64)
    half, schedule = cell["curvature"] / 2, [i**-p for i in range(1, steps + 1)]
    points = [*descend(lambda x: half * (x - next(turns)).square().sum(), start, schedule)]
    noisy = [float(points[i][:-1].square().mean().sqrt()) for i in marks(steps)]
    return {"steps": marks(steps), "noisy": noisy, "quiet": abs(float(points[-1][-1]))}


def race(cell: lab.Cell, random: torch.Generator) -> lab.Row:
    """The fewest updates to the goal, by the best of the rates."""
    loss: Loss
    if cell["problem"] == "valley":
        basis = torch.linalg.qr(torch.randn(10, 10, dtype=torch.float64, generator=random))[0]
        curves = torch.logspace(0, -math.log10(KAPPA), 10, dtype=torch.float64)
        start, bottom, floor = torch.zeros_like(curves), basis.sum(1), 0.0
        loss = lambda x: (curves * ((x - bottom) @ basis).square()).sum() / 2  # noqa: E731
    else:
        data, start = samples(random), START[:, 0, 0]
        loss, floor = partial(errors, data=data), least(data)
    goal, found = floor + GOAL * (float(loss(start)) - floor), list[int]()
    for rate in cell["rates"]:
        walk = descend(loss, start, [rate] * min(cell["updates"], 1_000), RULES[cell["rule"]])
        losses = takewhile(lambda each: each < 1e9, (float(loss(x)) for x in walk))
        found += islice((i for i, each in enumerate(losses) if each <= goal), 1)
    return {"updates": min(found, default=None)}


def ends(cell: lab.Cell, random: torch.Generator) -> lab.Row:
    """How many random starts reach the best minimum, and how many rest elsewhere."""
    data = samples(random)
    start = 2 * torch.randn(3, STARTS, 1, dtype=torch.float64, generator=random)
    *_, last, end = descend(lambda w: errors(w, data).sum(), start, [1.0] * cell["updates"])
    far, rest = errors(end, data) >= least(data) + CLOSE, (end - last).norm(dim=0)[:, 0] < REST
    return {"reached": int((~far).sum()), "stuck": int((far & rest).sum())}


def fit(cell: lab.Cell, random: torch.Generator) -> lab.Row:
    """Excess loss of R(P,Q) after updates by batches, and its mean over the last quarter."""
    data, steps = samples(random), cell["updates"] // 4
    given = batches(cell["order"], cell["size"], data, random)
    walk = descend(lambda w: errors(w, next(given)).sum(), START.repeat(1, RUNS, 1), [0.5] * steps)
    found, floor = [float(errors(w, data).mean()) for w in walk], least(data)
    late = max(fmean(found[-max(steps // 4, 1) :]) - floor, EXACT)
    excess = [found[i] - floor for i in marks(steps)]
    return {"updates": marks(steps), "excess": excess, "floor": late}


def batches(order: str, size: int, data: Tensor, random: torch.Generator) -> Iterator[Tensor]:
    """Batches (3, runs, size), without end: each run goes through all data in its own order."""
    keys = first = torch.rand(RUNS, SAMPLES, generator=random)
    while True:
        index = {"sorted": data[2].expand_as(keys), "fixed": first}.get(order, keys).argsort(-1)
        if order == "drawn":
            index = (keys * SAMPLES).long()
        yield from (data[:, index[:, at : at + size]] for at in range(0, SAMPLES, size))
        keys = torch.rand(RUNS, SAMPLES, generator=random)


def depth(cell: lab.Cell, random: torch.Generator) -> lab.Row:
    """The gradient's norm at each linear layer, from the last to the first."""
    net = nn.Sequential()
    for _ in range(cell["depth"]):
        affine = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
        nn.init.normal_(affine.weight, 0.0, (SCALES[cell["start"]] / WIDTH) ** 0.5, random)
        net.extend([affine, SHAPES[cell["shape"]]()])
    x, v = torch.randn(2, 16, WIDTH, dtype=torch.float64, generator=random)
    with gt.watch(net) as watch:
        loss = (net(x) * v).sum()
    norms = watch.trace(loss).norms()
    return {"norms": [norms[str(i)].norm for i in reversed(range(0, len(net), 2))]}


def update(cell: lab.Cell, random: torch.Generator) -> lab.Row:
    """The processor's seconds of updates: loss, gradient and step."""
    loss: Loss = partial(errors, data=samples(random, cell["size"]))
    start = START[:, 0, 0]
    if cell["problem"] == "network":
        x, t = torch.randn(2, cell["size"], WIDTH, generator=random)
        start = torch.randn(2, WIDTH, WIDTH, generator=random) / 16
        loss = lambda w: (torch.tanh(x @ w[0]) @ w[1] - t).square().mean()  # noqa: E731
    began = [process_time() for _ in descend(loss, start, [0.01] * cell["timed"])]
    return {"seconds": [b - a for a, b in pairwise(began)][1:]}


def kept(row: lab.Row) -> list[lab.Row]:
    """Of the lecture's rows those of descent; its batches were measured anew, with orders."""
    if row.get("kind") == "parabola":
        return [{**row, "quiet": row["quiet"][-1]}]
    mine = row.get("kind") == "starts" or row["part"] in ("races", "starts", "orders", "time")
    return [row] if mine else []


def some(rows: Sequence[lab.Row], part: str, **wanted: object) -> list[lab.Row]:
    """The rows of a part that have these values."""
    return [r for r in rows if r["part"] == part and all(r[k] == v for k, v in wanted.items())]


def ratio(values: Sequence[float], form: str = ".2g") -> str:
    """The geometric mean, and its interval."""
    value, low, high = lab.interval([math.log(value) for value in values])
    return lab.said((math.exp(value), math.exp(low), math.exp(high)), form)


def exponent(row: lab.Row) -> float:
    """The s of ``distance ~ iˢ`` over the last factor of ten."""
    steps, apart = row["steps"], row["noisy"]
    at = min(range(len(steps) - 1), key=lambda k: abs(math.log(steps[k] * 10 / steps[-1])))
    return math.log(apart[-1] / apart[at]) / math.log(steps[-1] / steps[at])


def _rate(rows: Sequence[lab.Row], name: str) -> list[object]:
    each = [some(rows, "rates", rate=name, curvature=c) for c in CURVATURES]
    meets = ("yes" if holds else "no" for holds in (STEPS[name] <= 1, STEPS[name] > 0.5))
    return [name, *meets, *(lab.spoken([*map(exponent, one)]) for one in each), each[0][0]["quiet"]]


def _race(rows: Sequence[lab.Row], rule: str) -> list[object]:
    each = [[r["updates"] for r in some(rows, "races", rule=rule, problem=p)] for p in VALLEYS]
    return [rule, *("–" if None in n else lab.said(lab.interval(n), ".0f") for n in each)]


def _batch(rows: Sequence[lab.Row], size: int) -> list[object]:
    by = {order: some(rows, "orders", order=order, size=size) for order in ORDERS}
    mine, others = by["shuffled"], [[*zip(by[order], by["shuffled"])] for order in ORDERS[1:]]
    once = [r["excess"][sum(i * size <= SAMPLES for i in r["updates"]) - 1] for r in mine]
    orders = [ratio([a["floor"] / b["floor"] for a, b in one]) for one in others]
    return [size, ratio(once), ratio([r["floor"] for r in mine]), *orders]


def _time(rows: Sequence[lab.Row], size: int) -> list[object]:
    timed = (some(rows, "time", problem=place, size=size) for place in PLACES)
    return [size, *(ratio([1e6 * min(r["seconds"]) for r in one], ".0f") for one in timed)]


def _start(rows: Sequence[lab.Row], start: str) -> list[object]:
    each = (some(rows, "starts", start=start, shape=shape) for shape in SHAPES)
    left = ([r["norms"][-1] / r["norms"][0] for r in one] for one in each)
    return [start, SCALES[start], *map(ratio, left)]


def tables(rows: Sequence[lab.Row]) -> list[lab.Table]:
    """Step sizes, optimisers, batches, random starts, first weights."""
    bowls = "α", "Σα = ∞", "Σα² < ∞", *(f"c = {c:g}" for c in CURVATURES), "x² ends at"
    batch = "B", "one pass", "end", *ORDERS[1:]
    ended = [[r[k] / STARTS for r in some(rows, "batches")] for k in ("reached", "stuck")]
    return [
        ("Step sizes: power of i in the distance", bowls, [_rate(rows, x) for x in STEPS]),
        ("Optimisers: updates to the goal", ("", *VALLEYS), [_race(rows, x) for x in RULES]),
        ("Batches: excess, and of orders over shuffled", batch, [_batch(rows, x) for x in SIZES]),
        ("Microseconds of an update", ("B", *PLACES), [_time(rows, x) for x in MANY]),
        ("Random starts", ("reach the best", "rest elsewhere"), [[*map(lab.spoken, ended)]]),
        ("Gradient left", ("start", "n·Var W", *SHAPES), [_start(rows, x) for x in SCALES]),
    ]


def figure(rows: Sequence[lab.Row], path: Path) -> None:
    """Excess loss over samples seen, the mean over seeds."""
    curves = {}
    for size in SIZES:
        runs = some(rows, "orders", order="shuffled", size=size)
        means = [max(fmean(each), 1e-17) for each in zip(*(r["excess"] for r in runs))]
        curves[f"B = {size}"] = [size * i for i in runs[0]["updates"]], means
    axes = {"xscale": "log", "yscale": "log"}
    lab.lines(path, "R(P,Q) by size of batch", "samples seen", "excess loss", curves, **axes)
