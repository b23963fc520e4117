"""Step sizes: Robbins and Monro's conditions, and what happens without them.

The lecture: ``xᵢ₊₁ = xᵢ - αᵢ f'(xᵢ)`` converges if ``Σ αᵢ = ∞`` and ``Σ αᵢ² < ∞``; 1/i is "safe but
slow". On the parabola ``f = c/2 · (x - ξᵢ)²``, with a new target ``ξᵢ`` of mean 0 a step, what to
expect is known exactly (``x₀ = 3`` and c = 2 without noise are the lecture's own example)::

    E xᵢ₊₁² = (1 - αᵢc)² E xᵢ² + (αᵢc)² σ²

With c = 1 and 1/i, ``xₙ`` is the mean of n targets. On R(P,Q) there is no such formula: there the
distance to the best weights is measured, by stochastic descent with one sample a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from statistics import mean
from typing import Any, NamedTuple

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
from gradtrace.experiments.lecture.descent import Point, descend, marks, minimum
from gradtrace.experiments.lecture.optimisers import Descent, Schedule, constant, power

START = 3.0
"""The lecture's ``x₀``."""

TINY = 1e-17
"""The least distance that is drawn."""


class Kind(NamedTuple):
    """A sequence of rates, and whether it meets the two conditions."""

    schedule: Schedule
    infinite: bool  # Σα = ∞
    square: bool  # Σα² < ∞

    @property
    def safe(self) -> bool:
        """Whether Robbins and Monro promise convergence."""
        return self.infinite and self.square


KINDS = {
    "1/i": Kind(power(1), True, True),
    "1/i^0.75": Kind(power(0.75), True, True),
    "1/√i": Kind(power(0.5), True, False),
    "1/i²": Kind(power(2), False, True),
    "constant 0.1": Kind(constant(0.1), True, False),
    "constant 1": Kind(constant(1.0), True, False),
    "100/(100+i)": Kind(power(1, 100), True, True),
    "(100/(100+i))²": Kind(power(2, 100), False, True),
}


def cells(settings: Mapping[str, Any], seeds: int) -> list[Cell]:
    """The parabola for each curvature and schedule; R(P,Q) for each schedule."""
    shared = {key: settings[key] for key in ("steps", "runs")}
    bowls = [
        {"kind": "parabola", "curvature": c, "rate": rate}
        for c in settings["curvatures"]
        for rate in list(KINDS)[:6]
    ]
    fits = [{"kind": "program", "rate": rate, "samples": settings["samples"]} for rate in KINDS]
    return [x | shared | {"seed": seed} for x in (*bowls, *fits) for seed in range(seeds)]


def measure(cell: Cell, tick: Tick) -> Result:
    """Descend with a schedule, many runs at a time."""
    return _parabola(cell) if cell["kind"] == "parabola" else _program(cell)


def _parabola(cell: Cell) -> Result:
    """Distances to 0, with noise (root of the mean square over runs) and without."""
    generator = torch.Generator().manual_seed(cell["seed"])
    c, runs, steps = float(cell["curvature"]), cell["runs"], cell["steps"]
    targets = torch.randn(steps, runs + 1, dtype=torch.float64, generator=generator)
    targets[:, -1] = 0  # the last run has no noise

    def loss(point: Point, i: int) -> Tensor:
        return c / 2 * (point["x"] - targets[i]).square().sum()

    start = {"x": torch.full((runs + 1,), START, dtype=torch.float64)}
    points = descend(loss, start, Descent(KINDS[cell["rate"]].schedule))
    looked, noisy, quiet = marks(steps), [], []
    for i, point in enumerate(islice(points, steps + 1)):
        if i in looked:
            noisy.append(float(point["x"][:-1].square().mean().sqrt()))
            quiet.append(abs(float(point["x"][-1])))
    off = float((point["x"] - targets.mean(0)).abs().max())
    return {"steps": looked, "noisy": noisy, "quiet": quiet, "off_mean": off}


def expected(rate: str, c: float, steps: int, noise: float) -> list[float]:
    """``√E xᵢ²`` for i = 0, ..., ``steps``."""
    found, square = [START], START**2
    for i in range(steps):
        step = KINDS[rate].schedule(i) * c
        square = (1 - step) ** 2 * square + (step * noise) ** 2
        found.append(math.sqrt(square))
    return found


def _program(cell: Cell) -> Result:
    """``‖w - ŵ‖`` of R(P,Q) by stochastic descent: mean over runs."""
    data = program.samples(cell["samples"], cell["seed"])
    truth = program.weights(program.TRUTH)
    best = program.stacked(minimum(program.loss(data), truth))
    generator = torch.Generator().manual_seed(1000 + cell["seed"])
    shape = (cell["steps"], cell["runs"], 1)
    drawn = torch.randint(len(data.p), shape, generator=generator)
    start = program.weights(program.stacked(truth) + torch.tensor(OFFSET).double())
    points = descend(
        lambda w, i: program.errors(w, data.at(drawn[i])).sum(),
        program.copies(start, cell["runs"]),
        Descent(KINDS[cell["rate"]].schedule),
    )
    looked = marks(cell["steps"])
    return {
        "steps": looked,
        "noisy": [
            float((program.stacked(w) - best).norm(dim=-1).mean())
            for i, w in enumerate(islice(points, cell["steps"] + 1))
            if i in looked
        ],
    }


# What came out -----------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """One schedule on one problem: means over seeds."""

    kind: str
    rate: str
    curvature: float
    steps: list[int]
    noisy: list[float]
    quiet: list[float]  # none of R(P,Q)
    ratio: float  # of the noisy distance's square at the end to what is expected; 0: none is
    slopes: Interval  # the exponents of seeds

    @property
    def slope(self) -> float:
        """The exponent s of ``distance ~ iˢ`` over the last factor of ten, with noise."""
        return _slope(self.steps, self.noisy)

    @property
    def power(self) -> str:
        """``i^-0.50 [-0.52, -0.49]``: the mean exponent of seeds with its interval."""
        return f"i^{with_interval(self.slopes)}"


def _slope(steps: Sequence[int], values: Sequence[float]) -> float:
    at = min(range(len(steps)), key=lambda k: abs(math.log(steps[k] * 10 / steps[-1])))
    if not values[-1] or not values[at] or at == len(steps) - 1:
        return 0.0
    return math.log(values[-1] / values[at]) / math.log(steps[-1] / steps[at])


def _outcomes(rows: Sequence[Row]) -> list[Outcome]:
    groups: dict[tuple[str, float, str], list[Row]] = {}
    for row in rows:
        key = (row.cell["kind"], row.cell.get("curvature", 0.0), row.cell["rate"])
        groups.setdefault(key, []).append(row)
    order = list(KINDS)
    ranked = sorted(groups, key=lambda key: (key[0], -key[1], order.index(key[2])))
    return [_outcome(key, groups[key]) for key in ranked]


def _outcome(key: tuple[str, float, str], rows: Sequence[Row]) -> Outcome:
    kind, curvature, rate = key
    steps = rows[0].result["steps"]
    noisy = [
        math.sqrt(mean(x * x for x in values))
        for values in zip(*(row.result["noisy"] for row in rows))
    ]
    quiet, ratio = [], 0.0
    if kind == "parabola":
        quiet = rows[0].result["quiet"]  # the same for each seed
        ratio = (noisy[-1] / expected(rate, curvature, steps[-1], 1.0)[-1]) ** 2
    slopes = student([_slope(steps, row.result["noisy"]) for row in rows])
    return Outcome(kind, rate, curvature, steps, noisy, quiet, ratio, slopes)


def conclude(rows: Sequence[Row]) -> Findings:
    """Which schedules came nearer and nearer, and which did not."""
    if not rows:
        return Findings("")
    found = _outcomes(rows)
    facts = _facts(found, rows)
    return Findings(_sentence(found, facts), (_table(found),), _plots(found), facts)


def _facts(found: Sequence[Outcome], rows: Sequence[Row]) -> dict[str, Any]:
    bowls = [one for one in found if one.kind == "parabola"]
    runs = len({row.cell["seed"] for row in rows}) * rows[0].cell["runs"]
    means = [
        row.result["off_mean"]
        for row in rows
        if row.cell["kind"] == "parabola"
        and (row.cell["rate"], row.cell["curvature"]) == ("1/i", 1.0)
    ]
    exact = [
        abs(quiet - wanted[i])
        for one in bowls
        for wanted in [expected(one.rate, one.curvature, one.steps[-1], 0.0)]
        for i, quiet in zip(one.steps, one.quiet)
    ]
    return {
        "runs": runs,
        "chi": [one.ratio for one in bowls],
        "spread": 1.96 * math.sqrt(2 / runs),  # of a mean of squares of normal numbers
        "off_mean": max(means, default=0.0),
        "off_formula": max(exact, default=0.0),
        "slopes": {f"{one.kind} {one.curvature:g} {one.rate}": one.slope for one in found},
        "ends": {f"{one.kind} {one.curvature:g} {one.rate}": one.noisy[-1] for one in found},
        "quiet": {f"{one.curvature:g} {one.rate}": one.quiet[-1] for one in bowls},
    }


def _table(found: Sequence[Outcome]) -> Table:
    return Table(
        "Step sizes: distance to the optimum",
        ("problem", "αᵢ", "Σα = ∞", "Σα² < ∞", "with noise", "exponent", "÷ expected", "no noise"),
        tuple(
            (
                f"parabola, c = {one.curvature:g}" if one.quiet else "R(P,Q), B = 1",
                one.rate,
                "yes" if KINDS[one.rate].infinite else "no",
                "yes" if KINDS[one.rate].square else "no",
                one.noisy[-1],
                one.slope,
                math.sqrt(one.ratio) if one.quiet else None,
                one.quiet[-1] if one.quiet else None,
            )
            for one in found
        ),
        f"after {found[0].steps[-1]:,} steps; exponent: that of i in the distance, over the last "
        "factor of ten (0: it stays); ÷ expected: against the exact formula. " + _quiet(found),
    )


def _sentence(found: Sequence[Outcome], facts: Mapping[str, Any]) -> str:
    low, high = min(facts["chi"], default=1.0), max(facts["chi"], default=1.0)
    text = (
        f"Step sizes: over {facts['runs']} runs of a noisy parabola mean square distances are "
        f"{low:.2f} to {high:.2f} times the exact ones, where 95% of ratios lie within 1 ± "
        f"{facts['spread']:.2f}."
    )
    return " ".join([text, *filter(None, (_safe(found), _unsafe(found)))])


def _safe(found: Sequence[Outcome]) -> str:
    """On those that meet the conditions."""
    slopes = [one.slope for one in found if KINDS[one.rate].safe]
    ones = [one for one in found if one.rate == "1/i"]
    if not ones:
        return ""
    slow, fast = max(ones, key=lambda one: one.slope), min(ones, key=lambda one: one.slope)
    falling = sum(slope < 0 for slope in slopes)
    return (
        f"Where Robbins-Monro holds, {falling} of {len(slopes)} still come nearer: safe, but 1/i "
        f"falls as {fast.power} on {_problem(fast)} and as {slow.power} on {_problem(slow)}."
    )


def _unsafe(found: Sequence[Outcome]) -> str:
    """On 1/i², 1/√i and constants."""
    noisy = {name: [one for one in found if one.rate == name] for name in ("1/i²", "1/√i")}
    if not all(noisy.values()):
        return ""
    short = max(noisy["1/i²"], key=lambda one: abs(one.slope))
    slow = max(noisy["1/√i"], key=lambda one: one.slope)
    word = (
        "still converges on each: the conditions suffice, they are not necessary"
        if slow.slope < -0.1
        else "does not come nearer on each problem"
    )
    return (
        f"1/i², whose sum is finite, {'stops short' if abs(short.slope) < 0.1 else 'still moves'} "
        f"on each problem ({short.power} at most); 1/√i, whose squares do not sum up, {word} "
        f"({slow.power} at least)."
    )


def _quiet(found: Sequence[Outcome]) -> str:
    """On what the lecture says of y = x² without noise."""
    ends = {one.rate: one.quiet for one in found if one.quiet and one.curvature == 2.0}
    if not ends:
        return ""
    whole, tenth, hyper = ends["constant 1"][-1], ends["constant 0.1"][-1], ends["1/i"]
    return (
        f"The lecture's y = x² from 3, without noise: α = 1 is at distance {whole:g} for ever, "
        f"1/i is at {hyper[1]:g} after two steps, and constant 0.1, whose squares do "
        f"not sum up, ends at {tenth:.0e}: that condition is about noise."
    )


def _problem(one: Outcome) -> str:
    return f"the parabola of c = {one.curvature:g}" if one.quiet else "R(P,Q)"


def _plots(found: Sequence[Outcome]) -> tuple[Plot, ...]:
    problems = {(one.kind, one.curvature): one for one in found}
    plots = []
    for kind, curvature in problems:
        chosen = [one for one in found if (one.kind, one.curvature) == (kind, curvature)]
        series = [Series(one.rate, one.steps, [max(y, TINY) for y in one.noisy]) for one in chosen]
        name = f"rates-{kind}" + (f"-{curvature:g}" if curvature else "")
        title = f"Step sizes on {_problem(chosen[0])}, with noise"
        plots.append(Plot(name, title, "steps", "distance", tuple(series), log_x=True, log_y=True))
    return tuple(plots)
