"""Linear regression and ridge: descent against the closed form.

A line: ``Loss(a, b) = 1/n Σ (yᵢ - (a + b xᵢ))²``, of gradient 0 where Gauss's equations hold::

    n·a + (Σx)·b = Σy        (Σx)·a + (Σx²)·b = Σxy

Ridge: ``Loss(w) = 1/n ‖t - Xw‖² + λ‖w‖²`` is least at ``w = (XᵀX + nλ)⁻¹ Xᵀt``. With L the
largest curvature, μ the least and κ = L/μ, k steps leave at most ``(1 - μ/L)ᵏ`` of the distance at
the rate 1/L, and ``((κ-1)/(κ+1))ᵏ`` at the best rate 2/(L+μ).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice, pairwise
from math import isfinite
from statistics import mean
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
from gradtrace.experiments.harness.statistics import geometric, with_interval
from gradtrace.experiments.lecture import program
from gradtrace.experiments.lecture.descent import Point, descend, gradient, marks
from gradtrace.experiments.lecture.optimisers import Descent, constant

SHOWN = 6


def cells(settings: Mapping[str, Any], seeds: int) -> list[Cell]:
    """A line for each seed; ridge for each seed and λ."""
    lines = [{"kind": "line", "samples": settings["samples"], "seed": s} for s in range(seeds)]
    ridges = [
        {"kind": kind, "samples": settings["samples"], "penalty": penalty, "seed": s}
        for kind in ("ridge", "program")
        for penalty in settings["penalties"]
        for s in range(seeds)
    ]
    return [cell | {"steps": settings["steps"]} for cell in (*lines, *ridges)]


def measure(cell: Cell, tick: Tick) -> Result:
    """Descend, and compare."""
    generator = torch.Generator().manual_seed(cell["seed"])
    if cell["kind"] == "program":
        return _program(cell)
    if cell["kind"] == "line":
        x = 2 + torch.randn(cell["samples"], dtype=torch.float64, generator=generator)
        noise = torch.randn(cell["samples"], dtype=torch.float64, generator=generator)
        return _line(x, 1 - 0.5 * x + 0.3 * noise, cell["steps"])
    matrix, target = _wide(cell["samples"], generator)
    return _ridge(matrix, target, cell["penalty"], cell["steps"])


def _line(x: Tensor, y: Tensor, steps: int) -> Result:
    """``y = a + b·x`` by Gauss's two equations and by descent."""
    n, sx, sy = float(len(x)), x.sum(), y.sum()
    gauss = torch.stack([torch.stack([x.new_tensor(n), sx]), torch.stack([sx, x @ x])])
    a, b = torch.linalg.solve(gauss, torch.stack([sy, x @ y]))
    best = {"a": a, "b": b}
    curvature = torch.linalg.eigvalsh(2 * gauss / n)

    def loss(point: Point, _: int = 0) -> Tensor:
        return (y - (point["a"] + point["b"] * x)).square().mean()

    start = {"a": x.new_tensor(0.0), "b": x.new_tensor(0.0)}
    ways = islice(descend(loss, start, Descent(constant(1 / float(curvature[-1])))), steps + 1)
    distances = [_distance(point, best) for point in ways]
    _, slope = gradient(loss, best)
    return {
        "a": float(a),
        "b": float(b),
        "slope": max(abs(float(g)) for g in slope.values()),
        "steps": [0, *marks(steps)],
        "distances": [distances[i] for i in (0, *marks(steps))],
        "kept": 1 - float(curvature[0] / curvature[-1]),
        "end": distances[-1],
    }


def _distance(point: Point, best: Point) -> float:
    return float(torch.stack([(point[name] - best[name]).norm() for name in best]).norm())


def _wide(number: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """More features than a small sample can tell apart: where a penalty pays.

    The first half is to learn from, the second to test on.
    """
    features = number // 2 - 2
    matrix = torch.randn(number, features, dtype=torch.float64, generator=generator)
    truth = torch.randn(features, dtype=torch.float64, generator=generator) / features**0.5
    noise = torch.randn(number, dtype=torch.float64, generator=generator)
    return matrix, matrix @ truth + noise


def _ridge(matrix: Tensor, target: Tensor, penalty: float, steps: int) -> Result:
    """``1/n ‖t - Xw‖² + λ‖w‖²`` by its closed form and by descent."""
    half = len(matrix) // 2
    x, t = matrix[:half], target[:half]
    square = x.T @ x / half + penalty * torch.eye(x.shape[1], dtype=x.dtype)
    best = torch.linalg.solve(square, x.T @ t / half)
    curvature = 2 * torch.linalg.eigvalsh(square)

    def loss(point: Point, _: int = 0) -> Tensor:
        w = point["w"]
        return (t - x @ w).square().mean() + penalty * w.square().sum()

    rule = Descent(constant(2 / float(curvature[-1] + curvature[0])))
    *_, end = islice(descend(loss, {"w": torch.zeros_like(best)}, rule), steps + 1)
    condition = float(curvature[-1] / curvature[0])
    return {
        "norm": float(best.norm()),
        "test": float((target[half:] - matrix[half:] @ best).square().mean()),
        "train": float((t - x @ best).square().mean()),
        "distance": float((end["w"] - best).norm() / best.norm()),
        "bound": ((condition - 1) / (condition + 1)) ** steps,
        "condition": condition,
    }


def _program(cell: Cell) -> Result:
    """The lecture's own example: ``1/N Σ (t - R(w; p, q))² + λ‖w‖²``, from the true weights on."""
    data, penalty = program.samples(cell["samples"], cell["seed"]), float(cell["penalty"])

    def loss(w: Point, _: int = 0) -> Tensor:
        return program.errors(w, data) + penalty * torch.stack(list(w.values())).square().sum()

    rule = Descent(constant(1 / (1 + 2 * penalty)))
    *_, end = islice(descend(loss, program.weights(program.TRUTH), rule), cell["steps"] + 1)
    return {
        "norm": float(program.stacked(end).norm()),
        "train": float(program.errors(end, data)),
    }


def conclude(rows: Sequence[Row]) -> Findings:
    """How near descent came, and what the penalty did."""
    lines = [row.result for row in rows if row.cell["kind"] == "line"]
    sentence = ""
    plots: tuple[Plot, ...] = ()
    facts: dict[str, Any] = {}
    if lines:
        sentence, plots, facts = _lines(lines)
    ridges = [row for row in rows if row.cell["kind"] != "line"]
    if not ridges:
        return Findings(sentence, plots=plots, facts=facts)
    said, table, more = _ridges(ridges)
    return Findings(f"{sentence} {said}".strip(), (table,), plots, {**facts, **more})


def _lines(lines: Sequence[Result]) -> tuple[str, tuple[Plot, ...], dict[str, Any]]:
    facts = {
        "slope": max(r["slope"] for r in lines),
        "distance": max(r["end"] / (r["distances"][0] or 1.0) for r in lines),
        "bounded": all(
            d <= r["distances"][0] * r["kept"] ** i * (1 + 1e-6) + 1e-12
            for r in lines
            for i, d in zip(r["steps"], r["distances"])
        ),
    }
    sentence = (
        f"Linear regression: {lines[0]['steps'][-1]} steps of descent leave at most "
        f"{facts['distance']:.0e} of the distance to Gauss's solution, "
        + ("as" if facts["bounded"] else "NOT as")
        + " theory bounds it."
    )
    series = [
        Series(f"seed {n}", r["steps"][1:], [max(d, 1e-17) for d in r["distances"][1:]])
        for n, r in enumerate(lines[:SHOWN])
    ]
    bound = [lines[0]["distances"][0] * lines[0]["kept"] ** i for i in lines[0]["steps"][1:]]
    series.append(Series("bound of seed 0", lines[0]["steps"][1:], bound, style="dashed"))
    plot = Plot(
        "regression",
        "Descent on a line: distance to Gauss's solution",
        "steps",
        "distance",
        tuple(series),
        log_y=True,
    )
    return sentence, (plot,), facts


def _ridges(rows: Sequence[Row]) -> tuple[str, Table, dict[str, Any]]:
    penalties = sorted({row.cell["penalty"] for row in rows})

    def of(kind: str, penalty: float, key: str) -> list[float]:
        chosen = [r for r in rows if (r.cell["kind"], r.cell["penalty"]) == (kind, penalty)]
        return [r.result[key] for r in sorted(chosen, key=lambda r: r.cell["seed"])]

    table = Table(
        "Ridge: mean over seeds",
        ("λ", "‖w‖", "train error", "test error", "off closed form", "‖w‖ of R", "error of R"),
        tuple(
            (
                penalty,
                mean(of("ridge", penalty, "norm")),
                mean(of("ridge", penalty, "train")),
                mean(of("ridge", penalty, "test")),
                max(of("ridge", penalty, "distance")),
                mean(of("program", penalty, "norm")),
                mean(of("program", penalty, "train")),
            )
            for penalty in penalties
        ),
        "linear model with almost as many features as samples; R is the lecture's program; "
        "'off closed form' is ‖w - ŵ‖/‖ŵ‖ after the last step, the most over seeds",
    )
    off = max((x for p in penalties for x in of("ridge", p, "distance") if p), default=0.0)
    tests = {p: mean(of("ridge", p, "test")) for p in penalties}
    best = min(penalties, key=tests.__getitem__)
    facts = {
        "ridge_off": off,
        "ridge_within": all(
            d <= b + 1e-9
            for p in penalties
            for d, b in zip(of("ridge", p, "distance"), of("ridge", p, "bound"))
        ),
        "shrinks": all(_falls(of, kind, penalties) for kind in ("ridge", "program")),
        "best_penalty": best,
        "saved": _saved(of("ridge", penalties[0], "test"), of("ridge", best, "test")),
    }
    said = (
        f"Ridge: descent is within {off:.0e} of the closed form, "
        + ("as near as" if facts["ridge_within"] else "NOT as near as")
        + " theory says, and weights "
        + ("shrink" if facts["shrinks"] else "do NOT always shrink")
        + f" as the penalty λ grows; of {len(penalties)} the error on unseen samples is least at "
        + f"λ = {best:g}, {with_interval(facts['saved'], '.3g')} times less than at λ = "
        + f"{penalties[0]:g}{'' if (facts['saved'][1] or 0) > 1 else ', which may be chance'}."
    )
    return said, table, facts


def _saved(without: Sequence[float], penalised: Sequence[float]) -> list[float | None]:
    """How many times less the error is, of the same seed, with its interval over seeds."""
    found = geometric([a / b for a, b in zip(without, penalised) if b])
    return [x if isfinite(x) else None for x in found]


def _falls(of: Any, kind: str, penalties: Sequence[float]) -> bool:
    norms = [of(kind, penalty, "norm") for penalty in penalties]
    return all(b <= a + 1e-9 for one, two in pairwise(norms) for a, b in zip(one, two))
