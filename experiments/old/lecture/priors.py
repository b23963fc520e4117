"""Initialisation from a prior: "can also exploit prior (domain knowledge)".

Two problems. A linear model of d weights and n samples: descent moves within the span of the
samples only, so with n < d it ends at ``w₀ + X⁺(t - X w₀)``, and of the start's error the part that
no sample sees stays for ever, ``1 - n/d`` of its square on average. What is known beforehand is
then part of the answer; with n ≥ d it only shortens the way. R(P,Q) has other minima and plateaus:
starts near the truth, starts of which only the signs are known, and starts that are wrong in all
signs are compared with starts drawn without knowledge, by the share that arrive at the best
minimum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from statistics import mean, median
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
from gradtrace.experiments.harness.statistics import student, with_interval
from gradtrace.experiments.lecture import program
from gradtrace.experiments.lecture.descent import Point, descend, minimum
from gradtrace.experiments.lecture.optimisers import Descent, constant

WIDTH = 20
STARTS = ("zeros", "random", "prior", "wrong prior")
"""Of the linear model: the prior is off by a third of the truth's size, the wrong one is -truth."""

OFF = 1 / 3
KINDS = ("nothing known", "signs known", "near the truth", "signs wrong")
SPREAD, NEAR = 2.0, 0.3
"""Standard deviations of weights that are drawn, and of those near the truth."""

GOAL, RATE = 1e-3, 0.5


def cells(settings: Mapping[str, Any], seeds: int) -> list[Cell]:
    """Linear models by number of samples, and the program; for each seed."""
    linear = [
        {"kind": "linear", "samples": n, "steps": settings["steps"], "seed": s}
        for n in settings["samples"]
        for s in range(seeds)
    ]
    shared = {key: settings[key] for key in ("updates", "starts")}
    return linear + [{"kind": "program", "seed": s, **shared} for s in range(seeds)]


def measure(cell: Cell, tick: Tick) -> Result:
    """One problem from all its starts."""
    return _linear(cell) if cell["kind"] == "linear" else _program(cell)


def _linear(cell: Cell) -> Result:
    """Distances to the truth, by start, and what algebra says of the end."""
    generator = torch.Generator().manual_seed(cell["seed"])

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    x, truth = normal(cell["samples"], WIDTH), normal(WIDTH)
    size = float(truth.norm()) / WIDTH**0.5
    points = (
        torch.zeros_like(truth),
        size * normal(WIDTH),
        truth + OFF * size * normal(WIDTH),
        -truth,
    )
    start, t = torch.stack(points, 1), (x @ truth)[:, None]
    values = torch.linalg.svdvals(x) ** 2
    rate = 1 / float(values[0])

    def loss(w: Point, _: int = 0) -> Tensor:
        return (t - x @ w["w"]).square().sum() / 2

    *_, end = islice(descend(loss, {"w": start}, Descent(constant(rate))), cell["steps"] + 1)
    exact = start + torch.linalg.pinv(x) @ (t - x @ start)

    def off(w: Tensor) -> list[float]:
        return [float(x) for x in (w - truth[:, None]).norm(dim=0) / truth.norm()]

    return {
        "before": off(start),
        "after": off(end["w"]),
        "exact": float((end["w"] - exact).norm() / exact.norm()),
        "bound": (1 - rate * float(values[min(cell["samples"], WIDTH) - 1])) ** cell["steps"],
    }


def _program(cell: Cell) -> Result:
    """Many starts of each kind at a time."""
    generator = torch.Generator().manual_seed(cell["seed"])
    data, number = program.samples(128, cell["seed"]), cell["starts"]
    truth = program.stacked(program.weights(program.TRUTH))
    least = float(program.errors(minimum(program.loss(data), program.weights(program.TRUTH)), data))
    points = SPREAD * torch.randn(len(KINDS), number, 3, dtype=torch.float64, generator=generator)
    points[1] = points[1].abs() * truth.sign()
    points[2] = truth + points[2] * NEAR / SPREAD
    points[3] = -points[3].abs() * truth.sign()
    start = {f"w{i}": w for i, w in enumerate(points.reshape(-1, 3, 1).unbind(1))}

    def loss(w: Point, _: int = 0) -> Tensor:
        return program.errors(w, data).sum()

    first = torch.full((len(KINDS) * number,), -1, dtype=torch.int64)
    walk = descend(loss, start, Descent(constant(RATE)))
    for i, point in enumerate(islice(walk, cell["updates"] + 1)):
        arrived = program.errors(point, data) - least < GOAL
        first[arrived & (first < 0)] = i
    return {"arrived": {k: one.tolist() for k, one in zip(KINDS, first.reshape(len(KINDS), -1))}}


# What came out -----------------------------------------------------------------------------------


def conclude(rows: Sequence[Row]) -> Findings:
    """What is left of a start, and who arrives."""
    linear = [row for row in rows if row.cell["kind"] == "linear"]
    programs = [row for row in rows if row.cell["kind"] == "program"]
    said, tables, plots = [], [], []
    facts: dict[str, Any] = {}
    if linear:
        facts |= _linear_facts(linear)
        said.append(_linear_sentence(facts))
        tables.append(_linear_table(linear))
        plots.append(_plot(linear))
    if programs:
        facts |= _program_facts(programs)
        said.append(_program_sentence(facts))
        tables.append(_program_table(facts, len(programs)))
    return Findings(" ".join(said), tuple(tables), tuple(plots), facts)


def _left(row: Row, start: int) -> float:
    """The share of the squared error of a start that is there at the end."""
    before = row.result["before"][start]
    return float((row.result["after"][start] / before) ** 2) if before else math.nan


def _linear_facts(rows: Sequence[Row]) -> dict[str, Any]:
    ends: dict[str, dict[str, list[float | None]]] = {}
    left: dict[str, list[float | None]] = {}
    for n in sorted({row.cell["samples"] for row in rows}):
        some = [row for row in rows if row.cell["samples"] == n]
        ends[str(n)] = {
            s: _known(student([r.result["after"][i] for r in some])) for i, s in enumerate(STARTS)
        }
        found = student([mean(_left(r, i) for i in range(len(STARTS))) for r in some])
        left[str(n)] = _known(found)
    below = [row for row in rows if row.result["bound"] < 1e-6]
    return {
        "ends": ends,
        "left": left,
        "exact": max((row.result["exact"] for row in below), default=None),
        "converged": [len(below), len(rows)],
    }


def _known(found: Sequence[float]) -> list[float | None]:
    return [x if math.isfinite(x) else None for x in found]


def _interval(values: Sequence[float | None]) -> str:
    value, low, high = values
    if value is None:
        return "?"
    return f"{value:.2f}" + (f" [{low:.2f}, {high:.2f}]" if None not in (low, high) else "")


def _linear_sentence(facts: Mapping[str, Any]) -> str:
    parts = []
    for n in sorted(facts["left"], key=int)[:2]:
        rest = max(0.0, 1 - int(n) / WIDTH)
        parts.append(f"{n} samples {_interval(facts['left'][n])} (expected {rest:.2f})")
    few = facts["ends"][min(facts["ends"], key=int)]
    exact = facts["exact"]
    algebra = f" as algebra says to {exact:.0e}," if exact is not None else ""
    return (
        f"Initialisation from a prior: of the squared error of a start descent leaves, for {WIDTH} "
        f"weights,{algebra} with {' and with '.join(parts)}. With the fewest samples the end is "
        "off by "
        + ", ".join(f"{_interval(found)} from {start}" for start, found in few.items())
        + " (of the truth's size): the start is part of the answer, for better and worse."
    )


def _linear_table(rows: Sequence[Row]) -> Table:
    lines = []
    for n in sorted({row.cell["samples"] for row in rows}):
        some = [row for row in rows if row.cell["samples"] == n]
        for i, start in enumerate(STARTS):
            left = student([_left(row, i) for row in some])
            lines.append(
                (
                    n,
                    start,
                    mean(row.result["before"][i] for row in some),
                    _interval(_known(student([row.result["after"][i] for row in some]))),
                    _interval(_known(left)),
                    max(0.0, 1 - n / WIDTH),
                )
            )
    columns = ("samples", "start", "error before", "error after", "square left", "1 - n/d")
    note = f"errors as shares of the truth's size; {WIDTH} weights; means over seeds, 95% intervals"
    return Table("Priors: what is left of the start's error", columns, tuple(lines), note)


def _program_facts(rows: Sequence[Row]) -> dict[str, Any]:
    shares, updates = {}, {}
    for kind in KINDS:
        each = [[i for i in row.result["arrived"][kind] if i >= 0] for row in rows]
        every = len(rows[0].result["arrived"][kind])
        found = student([len(one) / every for one in each])
        shares[kind] = _known(found)
        updates[kind] = _known(student([median(one) for one in each if one]))
    return {"arrived": shares, "updates": updates}


def _program_sentence(facts: Mapping[str, Any]) -> str:
    said = ", ".join(f"{kind} {_interval(facts['arrived'][kind])}" for kind in KINDS)
    nothing, signs = (facts["arrived"][kind] for kind in KINDS[:2])
    known = None not in (signs[1], nothing[2])
    helps = "help" if known and signs[1] > nothing[2] else "do not clearly help"
    counts = ", ".join(
        f"{kind} {with_interval(facts['updates'][kind], '.0f')}"
        for kind in KINDS
        if facts["updates"][kind][0] is not None
    )
    return (
        f"R(P,Q): the share of starts that reach the best minimum is {said}; median updates of "
        f"those that do: {counts}. So signs alone {helps}."
    )


def _program_table(facts: Mapping[str, Any], seeds: int) -> Table:
    lines = tuple(
        (k, _interval(facts["arrived"][k]), with_interval(facts["updates"][k], ".0f"))
        for k in KINDS
    )
    note = f"excess loss below {GOAL:g}; descent at {RATE:g}; 95% intervals over {seeds} seeds"
    columns = ("what is known", "share that arrives", "median updates")
    return Table("Priors: R(P,Q) from many starts", columns, lines, note)


def _plot(rows: Sequence[Row]) -> Plot:
    counts = sorted({row.cell["samples"] for row in rows})
    series = []
    for i, start in enumerate(STARTS):
        y = [mean(r.result["after"][i] for r in rows if r.cell["samples"] == n) for n in counts]
        series.append(Series(start, counts, y))
    title = f"Priors: where descent ends, {WIDTH} weights"
    return Plot("priors", title, "samples", "error ÷ truth's size", tuple(series))
