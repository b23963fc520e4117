"""The error of differences over the step h: a U.

A difference of order p (forward 1, central 2) is off by ``c·hᵖ`` as the function is curved and by
``ε/h`` as its values are rounded; the sum is least at ``h ~ ε^(1/(p+1))``. The error here is
``‖found - true‖ / ‖true‖``; what is true is the slides' formula for ``sin(5·exp(x))``, and for a
network our gradient in float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
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
from gradtrace.experiments.harness.interleaved_timing import told
from gradtrace.experiments.harness.statistics import Interval, out_of, with_interval
from gradtrace.experiments.harness.statistics import geometric as interval
from gradtrace.experiments.slides.gradients import (
    EPSILON,
    ORDER,
    Function,
    analytic,
    best_step,
    least_error,
    network,
    numerical,
    slope,
    wave,
)
from gradtrace.experiments.slides.logarithms import exponent, geometric

DECADES = {"float32": 9, "float64": 17}
"""How far h goes down: until it drowns in the numbers it is added to."""

POINTS = 20


def cells(settings: Mapping[str, Any], seeds: int) -> list[Cell]:
    """A curve for each function, precision, scheme and seed."""
    return [
        {"of": of, "type": kind, "scheme": scheme, "seed": seed}
        | {key: settings[key] for key in ("per_decade", "width")}
        for of in ("wave", "network")
        for kind in EPSILON
        for scheme in ORDER
        for seed in range(seeds)
    ]


def measure(cell: Cell, tick: Tick) -> Result:
    """The error over h, and that of our own gradient in this precision."""
    kind: torch.dtype = getattr(torch, cell["type"])
    function: Function = wave
    if cell["of"] == "wave":
        generator = torch.Generator().manual_seed(cell["seed"])
        points = 2 * torch.rand(POINTS, generator=generator) - 1
        at = points.to(kind)
        true = slope(at.double())
    else:
        function, at = network(cell["width"], cell["seed"], kind)
        true = analytic(*network(cell["width"], cell["seed"], torch.float64))

    def error(found: Tensor) -> float:
        return float((found.double() - true).norm() / true.norm())

    number = DECADES[cell["type"]] * cell["per_decade"]
    steps = [10 ** (-k / cell["per_decade"]) for k in range(number + 1)]
    return {
        "steps": steps,
        "errors": [error(numerical(function, at, step, cell["scheme"])) for step in steps],
        "analytic": error(analytic(function, at)),
    }


# What came out -----------------------------------------------------------------------------------


def conclude(rows: Sequence[Row]) -> Findings:
    """Where the curves are least, and how their arms rise."""
    curves: dict[tuple[str, str, str], list[Result]] = {}
    for row in rows:
        key = (row.cell["of"], row.cell["type"], row.cell["scheme"])
        curves.setdefault(key, []).append(row.result)
    found = _bottoms(curves)
    return Findings(_sentence(found), (_table(found),), tuple(_plots(curves)), found)


def _bottoms(curves: Mapping[tuple[str, str, str], Sequence[Result]]) -> dict[str, Any]:
    """Where each curve is least, how its arms rise, and what theory says; means over seeds."""
    found = {}
    for key, results in sorted(curves.items()):
        of, kind, scheme = key
        least = [min(zip(r["errors"], r["steps"])) for r in results]
        arms = [_arms(r, step) for r, (_, step) in zip(results, least)]
        own = max(r["analytic"] for r in results)
        found[" ".join(key)] = {
            "steps": [step for _, step in least],
            "errors": [error for error, _ in least],
            "step": geometric([step for _, step in least]),
            "theory": best_step(scheme, kind),
            "error": geometric([error for error, _ in least]),
            "error_theory": least_error(scheme, kind),
            "truncation": _mean([right for right, _ in arms]),
            "rounding": _mean([left for _, left in arms]),
            "u": sum(min(r["errors"][0], r["errors"][-1]) > 10 * min(r["errors"]) for r in results),
            "curves": len(results),
            # the network's own gradient in float64 is what errors are measured by
            "analytic": None if (of, kind) == ("network", "float64") else own,
        }
    return found


def _arms(result: Result, best: float) -> tuple[float | None, float | None]:
    """The slopes of log error over log h, to the right of the least point and to its left."""
    pairs = list(zip(result["steps"], result["errors"]))
    right = [(h, e) for h, e in pairs if h > 3 * best and 0 < e < 0.05]
    left = [(h, e) for h, e in pairs if h < best / 10 and 0 < e < 0.5]
    return exponent(right), exponent(left)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def over_seeds(curves: Mapping[str, Any], ends: str, key: str) -> Interval:
    """The geometric mean over the functions of a precision and scheme (``"float64 central"``), with
    its interval over seeds; of where a curve is least (``"steps"``), or how low (``"errors"``).
    """
    functions = [one[key] for name, one in curves.items() if name.endswith(ends)]
    return interval([geometric(values) for values in zip(*functions)])


def _sentence(curves: Mapping[str, Any]) -> str:
    said = []
    for kind in EPSILON:
        for scheme in ORDER:
            some = [one for key, one in curves.items() if key.endswith(f"{kind} {scheme}")]
            if some:
                step, error = (
                    with_interval(over_seeds(curves, f"{kind} {scheme}", key), ".0e")
                    for key in ("steps", "errors")
                )
                said.append(
                    f"{scheme.capitalize()} differences in {kind} are best at h = {step} (theory "
                    f"{some[0]['theory']:.0e}), with an error of {error} "
                    f"({some[0]['error_theory']:.0e})."
                )
    exact = [one["analytic"] for key, one in curves.items() if key.startswith("wave float64")]
    if exact:
        said.append(f"Our gradient misses the slides' formula by {told(max(exact), '.0e')}.")
    return " ".join([f"{bowls(curves)} are U-shaped.", *said])


def bowls(curves: Mapping[str, Any]) -> str:
    """``40 of 40 [91%, 100%] curves``: how many are U-shaped, of all functions and seeds."""
    found, total = (sum(one[key] for one in curves.values()) for key in ("u", "curves"))
    return f"{out_of(found, total)} curves"


def _table(curves: Mapping[str, Any]) -> Table:
    keys = ("step", "theory", "error", "error_theory", "truncation", "rounding", "analytic")
    return Table(
        "Differences: where the error is least",
        (
            "function",
            "precision",
            "scheme",
            "best h",
            "theory",
            "error",
            "theory of it",
            "right arm",
            "left arm",
            "our gradient",
        ),
        tuple((*name.split(), *(one[key] for key in keys)) for name, one in curves.items()),
        "arms: exponents of h (theory 1 or 2 to the right, -1 to the left); best h and error are "
        "geometric means over seeds; theory has no constants of the function in it",
    )


def _plots(curves: Mapping[tuple[str, str, str], Sequence[Result]]) -> list[Plot]:
    plots = []
    for of in dict.fromkeys(key[0] for key in sorted(curves)):
        series = []
        for (name, kind, scheme), results in sorted(curves.items()):
            if name != of:
                continue
            errors = [
                geometric([max(e, 1e-17) for e in one])
                for one in zip(*(r["errors"] for r in results))
            ]
            series.append(Series(f"{scheme}, {kind}", results[0]["steps"], errors))
        ways = [(scheme, kind) for name, kind, scheme in sorted(curves) if name == of]
        best = [best_step(*way) for way in ways]
        series.append(Series("by theory", best, [least_error(*w) for w in ways], style="points"))
        title = "sin(5·exp(x))" if of == "wave" else "a network's loss"
        plots.append(
            Plot(
                f"differences-{of}",
                f"Error of differences over the step: {title}",
                "step h",
                "relative error",
                tuple(series),
                log_x=True,
                log_y=True,
            )
        )
    return plots
