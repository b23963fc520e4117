"""Descent, momentum, Nesterov, AdaGrad, Adam and AdamW: how many updates to the optimum?

Two problems: a valley (a quadratic whose curvatures spread over a factor κ), and R(P,Q) on all its
samples. On the valley, descent with its best rate 2/(L+μ) keeps ``(κ-1)/(κ+1)`` of the distance a
step, and the heavy ball ``(√κ-1)/(√κ+1)`` with ``α = 4/(√L+√μ)²`` and ``β`` the square of that. The
other optimisers have no such best rate, and all are tried with each of a few.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
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
from gradtrace.experiments.harness.statistics import Interval, student, with_interval
from gradtrace.experiments.lecture import program
from gradtrace.experiments.lecture.batches import OFFSET
from gradtrace.experiments.lecture.descent import Loss, Point, Rule, descend, minimum
from gradtrace.experiments.lecture.optimisers import AdaGrad, AdamW, Descent, Momentum, constant
from gradtrace.experiments.rivals import listed

RULES: dict[str, Callable[[float], Rule]] = {
    "descent": lambda rate: Descent(constant(rate)),
    "momentum": lambda rate: Momentum(rate),
    "Nesterov": lambda rate: Momentum(rate, nesterov=True),
    "AdaGrad": lambda rate: AdaGrad(rate),
    "Adam": lambda rate: AdamW(rate, decay=0.0),
    "AdamW": lambda rate: AdamW(rate),
}
TUNED = ("descent, best rate", "heavy ball, best rate")
"""With the rates that theory has for a quadratic."""

GOAL = 1e-4
"""The share of the excess loss at the start that counts as arrived."""

AXES = 10


def cells(settings: Mapping[str, Any], seeds: int) -> list[Cell]:
    """One for each problem, optimiser and seed."""
    shared = {key: settings[key] for key in ("updates", "rates", "condition", "samples")}
    names = [("valley", name) for name in (*TUNED, *RULES)] + [("R(P,Q)", name) for name in RULES]
    return [
        {"problem": problem, "rule": name, "seed": seed} | shared
        for problem, name in names
        for seed in range(seeds)
    ]


def measure(cell: Cell, tick: Tick) -> Result:
    """Try each rate; keep the best."""
    loss, start, least = _valley(cell) if cell["problem"] == "valley" else _program(cell)
    top = float(loss(start)) - least
    tries: list[tuple[float, float, float, list[float]]] = []
    for rate, rule in _rules(cell):
        excess: list[float] = []
        for point in islice(descend(lambda w, _: loss(w), start, rule), cell["updates"] + 1):
            excess.append((float(loss(point)) - least) / top)
            if not excess[-1] < 1e6:  # gone for ever, NaN included
                break
        first = next((i for i, e in enumerate(excess) if e <= GOAL), math.inf)
        tries.append((first, min(excess), rate, excess))
    arrived, _, rate, excess = min(tries, key=lambda one: one[:3])
    return {
        "rate": rate,
        "updates": None if math.isinf(arrived) else arrived,
        "end": excess[-1] if len(excess) > cell["updates"] else None,
        "excess": [min(e, 1e6) for e in excess],
    }


def _rules(cell: Cell) -> list[tuple[float, Rule]]:
    if cell["rule"] not in TUNED:
        return [(rate, RULES[cell["rule"]](rate)) for rate in cell["rates"]]
    large, small = 1.0, 1 / cell["condition"]
    if cell["rule"] == TUNED[0]:
        rate = 2 / (large + small)
        return [(rate, Descent(constant(rate)))]
    root = math.sqrt(cell["condition"])
    rate = 4 / (math.sqrt(large) + math.sqrt(small)) ** 2
    return [(rate, Momentum(rate, ((root - 1) / (root + 1)) ** 2))]


def _valley(cell: Cell) -> tuple[Loss, Point, float]:
    """``½ (x - b)ᵀ A (x - b)`` in a random basis, with curvatures from 1/κ to 1."""
    generator = torch.Generator().manual_seed(cell["seed"])
    square = torch.randn(AXES, AXES, dtype=torch.float64, generator=generator)
    basis = torch.linalg.qr(square)[0]
    powers = torch.linspace(0, -math.log10(cell["condition"]), AXES, dtype=torch.float64)
    matrix = basis @ torch.diag(10**powers) @ basis.T
    bottom = basis @ torch.ones(AXES, dtype=torch.float64)  # as far off along each axis

    def loss(point: Point) -> Tensor:
        x = point["x"] - bottom
        return torch.dot(x, matrix @ x) / 2

    return loss, {"x": torch.zeros(AXES, dtype=torch.float64)}, 0.0


def _program(cell: Cell) -> tuple[Loss, Point, float]:
    data = program.samples(cell["samples"], cell["seed"])
    truth, loss = program.weights(program.TRUTH), program.loss(data)
    least = float(loss(minimum(loss, truth)))
    start = program.weights(program.stacked(truth) + torch.tensor(OFFSET).double())
    return loss, start, least


# What came out -----------------------------------------------------------------------------------


def conclude(rows: Sequence[Row]) -> Findings:
    """How many updates each took."""
    if not rows:
        return Findings("")
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.cell["problem"], row.cell["rule"]), []).append(row)
    order = (*TUNED, *RULES)
    keys = sorted(groups, key=lambda key: (key[0], order.index(key[1])))
    facts = _facts(groups)
    table = Table(
        f"Optimisers: updates to {GOAL:g} of the excess loss at the start",
        ("problem", "optimiser", "rate", "updates", "arrived", "excess at the end"),
        tuple((*key, *_line(groups[key])) for key in keys),
        f"mean over seeds, the best of the rates {rows[0].cell['rates']}, chosen by this very "
        f"count, or that of theory; κ of the valley is {rows[0].cell['condition']:g}; Adam is "
        f"AdamW without weight decay{_on_steps(facts)}",
    )
    plots = tuple(_plot(problem, groups) for problem in dict.fromkeys(key[0] for key in keys))
    return Findings(_sentence(table, facts), (table,), plots, facts)


def _updates(rows: Sequence[Row]) -> Interval:
    """Updates of the runs that arrived, with the interval over seeds."""
    return student([r.result["updates"] for r in rows if r.result["updates"] is not None])


def _is_alike(rows: Sequence[Row], others: Sequence[Row]) -> bool:
    """Whether two optimisers cannot be told apart by their updates, seed by seed."""
    ours, theirs = (
        {row.cell["seed"]: row.result["updates"] for row in some} for some in (rows, others)
    )
    pairs = [(ours[seed], theirs[seed]) for seed in ours if seed in theirs]
    found = student([a - b for a, b in pairs if a is not None and b is not None])
    return found.low <= 0 <= found.high


def _line(rows: Sequence[Row]) -> tuple[str | float | None, ...]:
    counts = [row.result["updates"] for row in rows if row.result["updates"] is not None]
    ends = [row.result["end"] for row in rows if row.result["end"] is not None]
    rates = sorted({row.result["rate"] for row in rows})
    return (
        ", ".join(f"{rate:.3g}" for rate in rates),
        with_interval(_updates(rows), ".1f") if counts else None,
        f"{len(counts)} of {len(rows)}",
        mean(ends) if ends else None,
    )


def _facts(groups: Mapping[tuple[str, str], Sequence[Row]]) -> dict[str, Any]:
    """Updates by problem and rule (None unless all arrived), and the factor a step by theory."""
    updates = {}
    for (problem, rule), rows in groups.items():
        counts = [row.result["updates"] for row in rows]
        known = [c for c in counts if c is not None]
        updates[f"{problem}: {rule}"] = mean(known) if len(known) == len(counts) else None
    facts: dict[str, Any] = {"updates": dict(sorted(updates.items())), "edge": _edge(groups)}
    facts["intervals"] = {
        f"{problem}: {rule}": [x if math.isfinite(x) else None for x in _updates(rows)]
        for (problem, rule), rows in groups.items()
    }
    facts["alike"] = {
        f"{problem}: {rule}": [
            other
            for name, other in groups
            if name == problem and other != rule and _is_alike(rows, groups[name, other])
        ]
        for (problem, rule), rows in groups.items()
    }
    for name, root in zip(TUNED, (1, 2)):
        for row in groups.get(("valley", name), ()):
            k = row.cell["condition"] ** (1 / root)
            kept = _kept(row.result["excess"])
            if kept is not None:
                facts.setdefault("kept", {}).setdefault(name, []).append(kept)
                facts.setdefault("theory", {})[name] = (k - 1) / (k + 1)
    return facts


def _kept(excess: Sequence[float]) -> float | None:
    """The share of the distance that a step keeps, over the later half of what is no rounding."""
    last = max((i for i, e in enumerate(excess) if 1e-20 < e < math.inf), default=0)
    half = last // 2
    if not last or not 0 < excess[half] < math.inf:
        return None
    return float((excess[last] / excess[half]) ** (0.5 / (last - half)))


def _edge(groups: Mapping[tuple[str, str], Sequence[Row]]) -> list[str]:
    """Those whose best rate was the least or the largest tried: a wider grid may serve better."""
    return sorted(
        f"{problem}: {rule}"
        for (problem, rule), rows in groups.items()
        if rule not in TUNED
        for rates in [sorted(rows[0].cell["rates"])]
        if any(row.result["rate"] in (rates[0], rates[-1]) for row in rows)
    )


def _sentence(table: Table, facts: Mapping[str, Any]) -> str:
    said = []
    for problem in dict.fromkeys(row[0] for row in table.rows):
        counts = {
            key.split(": ")[1]: value
            for key, value in facts["updates"].items()
            if key.startswith(f"{problem}: ")
        }
        arrived = sorted((v, k) for k, v in counts.items() if v is not None)
        missing = [k for k, v in counts.items() if v is None]
        place = "In the valley" if problem == "valley" else f"On {problem}"
        first, last = (arrived[0][1], arrived[-1][1]) if arrived else ("–", "–")
        few, many = (
            with_interval(facts["intervals"].get(f"{problem}: {rule}", [0, None, None]), ".0f")
            for rule in (first, last)
        )
        fewer, more = (
            f" (not surely {word} than {listed(others)})" if others else ""
            for word, others in (
                ("fewer", facts["alike"].get(f"{problem}: {first}")),
                ("more", facts["alike"].get(f"{problem}: {last}")),
            )
        )
        text = (
            f"{place} {first} needs the fewest updates, {few}{fewer}, and {last} the most, "
            f"{many}{more}"
        )
        if missing:
            text += f" (not reached in each run by {', '.join(missing)})"
        said.append(text + ".")
    if facts["edge"]:
        said.append(f"Best at the least or largest rate tried: {', '.join(facts['edge'])}.")
    return "Optimisers: " + " ".join(said)


def _on_steps(facts: Mapping[str, Any]) -> str:
    """What a step keeps of the distance, beside theory."""
    kept = [
        f"{with_interval(student(facts['kept'][name]), '.3f')} for {name} (theory {wanted:.3f})"
        for name, wanted in facts.get("theory", {}).items()
    ]
    return f"; a step in the valley keeps of the distance {' and '.join(kept)}" if kept else ""


def _plot(problem: str, groups: Mapping[tuple[str, str], Sequence[Row]]) -> Plot:
    series = []
    for name in (*TUNED, *RULES):
        for row in groups.get((problem, name), ())[:1]:
            excess = [max(e, 1e-17) for e in row.result["excess"]]
            series.append(Series(name, list(range(len(excess))), excess))
    return Plot(
        "optimisers-" + ("valley" if problem == "valley" else "program"),
        f"Optimisers on {'a valley' if problem == 'valley' else problem}, one seed, best rate",
        "updates",
        "excess loss ÷ that at the start",
        tuple(series),
        log_y=True,
    )
