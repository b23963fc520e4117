"""Batch normalisation and valleys: "reshape optimization landscape to avoid valleys".

A linear model of features that spread over a factor √κ has a loss whose curvatures spread over κ: a
valley. Normalised over the batch, ``x̂ = (x - mean) / √(var + ε)`` with weights γ and a bias β, its
curvatures are those of the features' correlations instead. So a valley along the axes of features
should vanish, and one that is turned against them need not. Descent at the best rate α = 2/(L+μ)
leaves ``Σ λᵢ eᵢ² (1 - αλᵢ)²ᵏ`` of the loss after k updates, λ the curvatures and e the start's
distance along them, which tells the number of updates exactly.

A network of one hidden layer of tanh units has no such formula: it is trained at the best of
several rates, with and without normalised sums before tanh.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from gradtrace.experiments.harness.findings import (
    Cell,
    Findings,
    Plot,
    Result,
    Row,
    Series,
    Table,
    Tick,
)
from gradtrace.experiments.harness.statistics import (
    Interval,
    geometric,
    out_of,
    student,
    with_interval,
)
from gradtrace.experiments.lecture.descent import Loss, Point, descend, gradient
from gradtrace.experiments.lecture.optimisers import Descent, constant

VALLEYS = {"axes": "valley along the features", "turned": "valley across the features"}
NETWORK = "network"
WORDS = {**VALLEYS, NETWORK: "network of tanh units"}
FEATURES, HIDDEN = 6, 8
GOAL, ENOUGH = 1e-4, 0.1
"""The share of the first loss that counts as arrived: of linear models, and of the network."""

SMALL = 1e-8


def cells(settings: Mapping[str, Any], seeds: int) -> list[Cell]:
    """One for each problem, with and without normalisation, and seed."""
    return [
        {"problem": problem, "normalised": normalised, "seed": seed, **settings}
        for problem in WORDS
        for normalised in (False, True)
        for seed in range(seeds)
    ]


def measure(cell: Cell, tick: Tick) -> Result:
    """Curvatures, and the updates that descent needs."""
    x, t, generator = _data(cell)
    if cell["problem"] == NETWORK:
        return _network(cell, x, t, generator)
    loss = _linear(normalised(x) if cell["normalised"] else x, t)
    start = {
        "gamma": torch.zeros(FEATURES, dtype=torch.float64),
        "beta": torch.zeros((), dtype=torch.float64),
    }
    values, vectors, off = _curvatures(loss, start)
    rate = 2 / float(values[0] + values[-1])
    curve = _curve(loss, start, rate, cell["updates"], GOAL)
    return {
        "condition": float(values[-1] / values[0]),
        "largest": float(values[-1]),
        "rate": rate,
        "updates": len(curve) - 1 if curve[-1] <= GOAL else None,
        "expected": _expected(values, vectors.T @ off, rate),
        "curve": curve,
    }


def _data(cell: Cell) -> tuple[Tensor, Tensor, torch.Generator]:
    """Features with curvatures from 1 to 1/κ, off their means, and targets that need all alike."""
    generator = torch.Generator().manual_seed(cell["seed"])
    z = torch.randn(cell["samples"], FEATURES, dtype=torch.float64, generator=generator)
    z = z - z.mean(0)
    square = torch.randn(FEATURES, FEATURES, dtype=torch.float64, generator=generator)
    powers = torch.linspace(0, -math.log10(cell["condition"]) / 2, FEATURES, dtype=torch.float64)
    x = z * 10**powers
    if cell["problem"] == "turned":
        x = x @ torch.linalg.qr(square)[0].T
    t = z.sum(1)
    return x, (torch.tanh(t) if cell["problem"] == NETWORK else t), generator


def normalised(x: Tensor) -> Tensor:
    """``(x - mean) / √(var + ε)`` over the batch."""
    return (x - x.mean(0)) / (x.var(0, correction=0) + SMALL).sqrt()


def _linear(x: Tensor, t: Tensor) -> Loss:
    return lambda w: (t - x @ w["gamma"] - w["beta"]).square().mean() / 2


def _curvatures(loss: Loss, start: Point) -> tuple[Tensor, Tensor, Tensor]:
    """Eigenvalues and vectors of the Hessian, from differences of our gradient (exact for a
    quadratic), and how far the start is off the minimum.
    """

    def slope(x: Tensor) -> Tensor:
        _, found = gradient(loss, {"gamma": x[:-1], "beta": x[-1]})
        return torch.cat([found["gamma"], found["beta"].reshape(1)])

    at = torch.cat([start["gamma"], start["beta"].reshape(1)])
    here = slope(at)
    rows = [slope(at + step) - here for step in torch.eye(len(at), dtype=torch.float64)]
    hessian = torch.stack(rows)
    hessian = (hessian + hessian.T) / 2
    values, vectors = torch.linalg.eigh(hessian)
    return values, vectors, torch.linalg.solve(hessian, here)


def _expected(values: Tensor, off: Tensor, rate: float, most: int = 10**6) -> int | None:
    """The updates until ``Σ λ e² (1 - αλ)²ᵏ`` is GOAL of its first value."""
    parts = values * off**2
    shares = parts / parts.sum()
    kept = (1 - rate * values) ** 2
    low, high = 0, most
    if float((shares * kept**most).sum()) > GOAL:
        return None
    while low < high:
        middle = (low + high) // 2
        if float((shares * kept**middle).sum()) <= GOAL:
            high = middle
        else:
            low = middle + 1
    return low


def _curve(loss: Loss, start: Point, rate: float, updates: int, goal: float) -> list[float]:
    """The loss as a share of the first, until the goal."""
    first, found = float(loss(start)), []
    for point in islice(descend(lambda w, _: loss(w), start, Descent(constant(rate))), updates + 1):
        found.append(float(loss(point)) / first)
        if found[-1] <= goal or not found[-1] < 1e3:
            break
    return found


def _network(cell: Cell, x: Tensor, t: Tensor, generator: torch.Generator) -> Result:
    """The best of the rates."""
    first = torch.randn(FEATURES, HIDDEN, dtype=torch.float64, generator=generator)
    last = torch.randn(HIDDEN, dtype=torch.float64, generator=generator)
    start = {
        "first": first / FEATURES**0.5,
        "gamma": torch.ones(HIDDEN, dtype=torch.float64),
        "beta": torch.zeros(HIDDEN, dtype=torch.float64),
        "last": last / HIDDEN**0.5,
        "bias": torch.zeros((), dtype=torch.float64),
    }

    def loss(w: Point) -> Tensor:
        sums = x @ w["first"]
        sums = normalised(sums) if cell["normalised"] else sums
        hidden = torch.tanh(sums * w["gamma"] + w["beta"])
        return (t - hidden @ w["last"] - w["bias"]).square().mean() / 2

    tries = []
    for rate in cell["rates"]:
        curve = _curve(loss, start, rate, cell["updates"], ENOUGH)
        arrived = len(curve) - 1 if curve[-1] <= ENOUGH else math.inf
        last_loss = curve[-1] if math.isfinite(curve[-1]) else math.inf
        tries.append((arrived, last_loss, rate, curve))
    arrived, _, rate, curve = min(tries, key=lambda one: one[:3])
    return {
        "rate": rate,
        "updates": None if math.isinf(arrived) else int(arrived),
        "curve": [min(value, 1e3) for value in curve],
    }


# What came out -----------------------------------------------------------------------------------


def conclude(rows: Sequence[Row]) -> Findings:
    """Whether normalisation takes valleys away, and what that saves."""
    if not rows:
        return Findings("")
    groups: dict[tuple[str, bool], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.cell["problem"], row.cell["normalised"]), []).append(row)
    facts = _facts(groups)
    keys = [(p, n) for p in WORDS for n in (False, True) if (p, n) in groups]
    table = Table(
        "Batch normalisation: curvatures and updates of descent",
        ("problem", "normalised", "κ", "updates", "by formula", "arrived"),
        tuple(_line(key, groups[key]) for key in keys),
        "geometric means over seeds, 95% intervals; linear models at the best rate, to "
        f"{GOAL:g} of the first loss; the network at the best of the rates "
        f"{rows[0].cell['rates']}, to {ENOUGH:g} of it",
    )
    return Findings(_sentence(facts, rows[0].cell["condition"]), (table,), _plots(groups), facts)


def _mean(values: Sequence[float | None]) -> Interval:
    """The geometric mean of those that are known, with its interval over seeds."""
    return geometric([x for x in values if x is not None and math.isfinite(x)])


def _line(key: tuple[str, bool], rows: Sequence[Row]) -> tuple[str | float | None, ...]:
    results = [row.result for row in rows]
    arrived = sum(r["updates"] is not None for r in results)
    means = {n: _mean([r.get(n) for r in results]) for n in ("condition", "updates", "expected")}
    return (
        WORDS[key[0]],
        "yes" if key[1] else "no",
        *(with_interval(x, ".4g") if math.isfinite(x.value) else None for x in means.values()),
        out_of(arrived, len(results)),
    )


def _facts(groups: Mapping[tuple[str, bool], Sequence[Row]]) -> dict[str, Any]:
    facts: dict[str, Any] = {"saved": {}, "condition": {}, "off_formula": 0, "arrived": {}}
    network = [row for key, some in groups.items() if key[0] == NETWORK for row in some]
    edge = sum(row.result["rate"] in _ends(row.cell["rates"]) for row in network)
    facts["edge"] = [edge, len(network)]
    for problem in WORDS:
        plain, normal = (
            {row.cell["seed"]: row.result for row in groups.get((problem, n), ())}
            for n in (False, True)
        )
        logs = [
            _log_ratio(plain[s]["updates"], normal[s]["updates"]) for s in plain.keys() & normal
        ]
        facts["saved"][problem] = list(_exp(student([x for x in logs if x is not None])))
        for name, some in (("plain", plain), ("normalised", normal)):
            counts = [r["updates"] is not None for r in some.values()]
            facts["arrived"][f"{problem}, {name}"] = [sum(counts), len(counts)]
            if problem != NETWORK:
                found = [r["condition"] for r in some.values() if math.isfinite(r["condition"])]
                facts["condition"][f"{problem}, {name}"] = list(_mean(found))
    facts["off_formula"] = max(
        (abs(row.result["updates"] - row.result["expected"]) for key, some in groups.items()
         if key[0] != NETWORK for row in some
         if None not in (row.result["updates"], row.result["expected"])),
        default=0,
    )  # fmt: skip
    return {key: _json(value) for key, value in facts.items()}


def _ends(rates: Sequence[float]) -> tuple[float, float]:
    return min(rates), max(rates)


def _log_ratio(a: int | None, b: int | None) -> float | None:
    return math.log(a / b) if a and b else None


def _exp(interval: Interval) -> Interval:
    return Interval(*(math.exp(x) if x < 700 else math.inf for x in interval))


def _json(value: Any) -> Any:
    """None for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: _json(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_json(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _needs(saved: Sequence[float | None]) -> str:
    """``needs 40 [17, 95] times fewer updates``."""
    value, low, high = saved
    if value is None:
        return "does not always arrive, so that updates cannot be compared"
    known = f" [{low:.2g}, {high:.2g}]" if low is not None and high is not None else ""
    return f"needs {value:.2g}{known} times fewer updates"


def _sentence(facts: Mapping[str, Any], condition: float) -> str:
    said, saved = [], facts["saved"]
    for problem, word in VALLEYS.items():
        found = [facts["condition"].get(f"{problem}, {n}") for n in ("plain", "normalised")]
        if all(each is not None and each[0] is not None for each in found):
            before, after = (with_interval(each, ".3g") for each in found)
            k = f"a {word} has κ = {before} and normalised {after}"
            said.append(f"{k}, and {_needs(saved[problem])}")
    least, most = saved["axes"][1], saved["turned"][2]
    sure = least is not None and most is not None and least > most
    so = "it takes away valleys along what it normalises rather than valleys as such"
    gain = saved[NETWORK][1]
    clear = "" if gain is not None and gain > 1 else ": no clear gain"
    return (
        f"Batch normalisation, curvatures spread over {condition:g}: {'; '.join(said)} (as the "
        f"formula says, to {facts['off_formula']} updates). A network of tanh units on features of "
        f"the first kind {_needs(saved[NETWORK])}, each at its best rate (the least or the "
        f"largest tried in {facts['edge'][0]} of {facts['edge'][1]} runs){clear}. "
        + (f"So {so}." if sure else f"Whether {so} cannot be told.")
    )


def _plots(groups: Mapping[tuple[str, bool], Sequence[Row]]) -> tuple[Plot, ...]:
    series = []
    for (problem, normal), rows in sorted(groups.items()):
        curve = [max(x, 1e-17) for x in rows[0].result["curve"]]
        name = f"{WORDS[problem]}{', normalised' if normal else ''}"
        style = "dashed" if normal else "line"
        series.append(Series(name, list(range(len(curve))), curve, style=style))
    title = "Batch normalisation: descent, one seed"
    return (Plot("valleys", title, "updates", "loss ÷ that at the start", tuple(series), log_x=True,
                 log_y=True),)  # fmt: skip
