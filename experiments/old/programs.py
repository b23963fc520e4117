"""The lecture's parameterised programs, fitted from scratch on our engine.

Question: Do gradients as sums over paths, from our own engine, fit the programs of the lecture
    ("Gradient Computation in Abstract Neural Networks"), of Lee's slides ("Backpropagation") and of
    the note ("Training Neural Networks"), and does what these say about descent hold: closed forms,
    batches, step sizes, optimisers, initialisation, losses, paths?

Expectation: Descent meets the closed forms of linear regression and ridge. Small batches learn
    earlier and end noisier. Step sizes that meet Robbins and Monro's conditions converge and others
    need not. Momentum, AdaGrad and AdamW need fewer updates in a valley. Xavier's initialisation
    keeps gradient up under tanh and He's under ReLU. Cross entropy and KL have one gradient. Listed
    paths add up to the gradient under sharing, skips, loops and conditionals.

Method: One part for each claim, in ``gradtrace.experiments.lecture``; each compares with a closed
    form, an exact expectation or a derivative by hand. All gradients are ``gradtrace.backward``'s,
    and the optimisers are written out. Float64.

Seeds: Each part draws its data, starts and batches from generators seeded by the cell; the worked
    examples and the chains of diamonds have no randomness. Rows are one part's setting and a seed.

Limits: Programs are tiny, so that closed forms and derivatives by hand exist; nothing is said of
    large networks. What is exact has no interval; shares of random starts and noise of batches are
    of few seeds. The lecture's remarks on batch normalisation, parallel execution and
    initialisation from priors are in ``variations``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from gradtrace.experiments.harness.findings import Cell, Findings, Result, Row, Seeds, Tick
from gradtrace.experiments.harness.parts import ResultPart, all_cells, all_findings
from gradtrace.experiments.lecture import (
    batches,
    classes,
    closed,
    races,
    rates,
    starts,
    structures,
    worked,
)

PARTS = cast(
    dict[str, ResultPart],
    {
        "worked": worked,
        "structures": structures,
        "closed": closed,
        "batches": batches,
        "rates": rates,
        "races": races,
        "starts": starts,
        "classes": classes,
    },
)

QUICK: dict[str, Any] = {
    "worked": {"tolerance": 1e-9},
    "structures": {"updates": 150, "samples": 16, "longest": 20},
    "closed": {"samples": 40, "steps": 300, "penalties": [0.0, 0.01, 0.1, 1.0, 10.0]},
    "batches": {
        "samples": 256,
        "batches": [1, 64],
        "runs": 16,
        "rate": 0.5,
        "updates": 768,
        "starts": 64,
    },
    "rates": {"steps": 500, "runs": 200, "curvatures": [2.0, 1.0, 0.2], "samples": 256},
    "races": {
        "updates": 250,
        "rates": [0.03, 0.3, 1.0, 3.0, 10.0],
        "condition": 100.0,
        "samples": 256,
    },
    "starts": {"depth": 30, "width": 128},
    "classes": {"samples": 200, "updates": 300},
}
FULL: dict[str, Any] = {
    "worked": {"tolerance": 1e-9},
    "structures": {"updates": 1000, "samples": 32, "longest": 30},
    "closed": {"samples": 40, "steps": 3000, "penalties": [0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 10.0]},
    "batches": {
        "samples": 256,
        "batches": [1, 4, 16, 64],
        "runs": 32,
        "rate": 0.5,
        "updates": 4096,
        "starts": 256,
    },
    "rates": {"steps": 5000, "runs": 400, "curvatures": [2.0, 1.0, 0.2], "samples": 256},
    "races": {
        "updates": 1000,
        "rates": [0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0],
        "condition": 100.0,
        "samples": 256,
    },
    "starts": {"depth": 50, "width": 256},
    "classes": {"samples": 500, "updates": 2000},
}
SEEDS = Seeds(quick=1, full=5)
TIMED = False
FIGURE = "paths"
TABLE = "Programs: sum over paths, derivative by hand, and fit"


def cells(settings: Mapping[str, Any], seeds: int) -> list[Cell]:
    """Those of all parts that have settings."""
    return all_cells(PARTS, settings, seeds)


def measure(cell: Cell, tick: Tick) -> Result:
    """Hand it to its part."""
    tick(" ".join(str(x) for x in cell.values() if isinstance(x, str)))
    return PARTS[cell["part"]].measure(cell, tick)


def headline(facts: Mapping[str, Any]) -> str:
    """The answer in a sentence; nothing of it is drawn."""
    parts = []
    if worked := facts.get("worked"):
        right = worked["values"] - len(worked["wrong"])
        parts.append(
            f"{right:g} of {worked['values']:g} worked examples of the lecture, the slides and the "
            "note come out as printed"
        )
    if summed := facts.get("structures"):
        parts.append(
            "added up path by path, the gradient of a program is that of back-propagation, to "
            f"{summed['summed']:.0e}"
        )
    text = "; ".join(parts) or "what was asked for has no worked example"
    return f"{text[:1].upper()}{text[1:]}."


def conclude(rows: Sequence[Row]) -> Findings:
    """All parts' findings, one after another."""
    return all_findings(PARTS, rows)
