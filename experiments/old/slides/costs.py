"""The cost of a gradient of d parameters: evaluations of the loss, and seconds.

Forward differences take d + 1 evaluations, central ones 2d, and back-propagation one, with one
backward pass. Evaluations are counted; seconds are for the plot, and of this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

import gradtrace as gt
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
from gradtrace.experiments.slides.formulas import Weights
from gradtrace.experiments.slides.gradients import ORDER, analytic, best_step, numerical
from gradtrace.experiments.slides.logarithms import exponent

ROUNDS = 5
WAYS = {
    "forward": "forward differences",
    "central": "central differences",
    "analytic": "one backward pass",
    "check": "gt.check",
}


def cells(settings: Mapping[str, Any], seeds: int) -> list[Cell]:
    """One for each d."""
    return [{"size": size, "seed": 0} for size in settings["sizes"]]


def measure(cell: Cell, tick: Tick) -> Result:
    """Evaluations and seconds for d parameters."""
    generator = torch.Generator().manual_seed(cell["seed"])
    at, x = torch.randn(2, cell["size"], dtype=torch.float64, generator=generator)
    calls = 0

    def function(w: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return torch.tanh(w * x).square().mean()

    def timed(work: Callable[[], object], rounds: int = 1) -> tuple[int, float]:
        """Evaluations, and the median of seconds."""
        nonlocal calls
        calls, times = 0, []
        for _ in range(rounds):
            start = perf_counter()
            work()
            times.append(perf_counter() - start)
        return calls // rounds, median(times)

    gt.check(lambda m: m.w.sum(), Weights(at[:2]))  # what it imports is not its cost
    found: Result = {}
    for scheme in ORDER:
        step = best_step(scheme, "float64")
        found[scheme] = timed(partial(numerical, function, at, step, scheme))
    found["analytic"] = timed(lambda: analytic(function, at), ROUNDS)
    model, said = Weights(at), []
    found["check"] = timed(lambda: said.append(gt.check(lambda m: function(m.w), model)))
    return found | {"ok": said[0].ok}


# What came out -----------------------------------------------------------------------------------


def conclude(rows: Sequence[Row]) -> Findings:
    """Whether the counts are as they should be."""
    costs = dict(sorted((int(row.cell["size"]), row.result) for row in rows))
    facts = _counts(costs)
    return Findings(_sentence(costs, facts), (_table(costs),), tuple(_plots(costs)), facts)


def _counts(costs: Mapping[int, Result]) -> dict[str, Any]:
    """Evaluations, which no machine changes; and how times grow, which it does."""
    times = {
        way: exponent([(d, cost[way][1]) for d, cost in costs.items() if d >= 100])
        for way in ("forward", "analytic")
    }
    return {
        "forward": all(cost["forward"][0] == d + 1 for d, cost in costs.items()),
        "central": all(cost["central"][0] == 2 * d for d, cost in costs.items()),
        "one": all(cost["analytic"][0] == 1 for cost in costs.values()),
        "check": {str(d): cost["check"][0] for d, cost in costs.items()},
        "check_ok": all(cost["ok"] for cost in costs.values()),
        "growth": times,
    }


def _sentence(costs: Mapping[int, Result], facts: Mapping[str, Any]) -> str:
    size, last = list(costs.items())[-1]
    seconds = [f"{told(last[way][1], '.2g')} s" for way in ("forward", "central", "analytic")]
    held = facts["forward"] and facts["central"] and facts["one"]
    text = (
        f"Cost: {'for each d' if held else 'NOT always'} d + 1 evaluations forward, 2d central, "
        f"and one with a backward pass; at d = {size:,} that took "
        f"{', '.join(seconds[:2])} and {seconds[2]}. By sampling gt.check needed "
        f"{last['check'][0]:,} evaluations there: the slides' 'at least d + 1' is the price of "
        "all derivatives, not of a check."
    )
    return text if last["check"][0] < size else text.partition(" By sampling")[0]


def _table(costs: Mapping[int, Result]) -> Table:
    return Table(
        "Cost of a gradient",
        ("d", *(f"{way}, {unit}" for way in WAYS for unit in ("evaluations", "s"))),
        tuple((d, *(x for way in WAYS for x in cost[way])) for d, cost in costs.items()),
        "analytic: one evaluation and one gradtrace.backward; check: gt.check, which samples",
    )


def _plots(costs: Mapping[int, Result]) -> list[Plot]:
    return [
        Plot(
            f"cost-{name}",
            f"Cost of a gradient: {name}",
            "parameters d",
            name,
            tuple(
                Series(text, list(costs), [cost[way][at] for cost in costs.values()])
                for way, text in WAYS.items()
            ),
            log_x=True,
            log_y=True,
        )
        for at, name in enumerate(("evaluations", "seconds"))
    ]
