"""What is left of the lecture's remarks: batch norm and valleys, parallel dataflow, priors.

Question: Do three remarks of the lecture ("Gradient Computation in Abstract Neural Networks")
    hold: batch normalisation reshapes the landscape "to avoid valleys"; nodes may run "in any
    topological order" or in parallel, "when inputs are available"; initialisation "can also exploit
    prior (domain knowledge)"?

Expectation: Normalisation takes away a valley along the features, and not one that is turned
    against them. All orders give the same bits forwards, not always backwards; workers help as far
    as the longest path lets them. A prior stays in the answer where samples are fewer than weights,
    for better and worse, and elsewhere decides which minimum is found.

Method: One part for each, in ``gradtrace.experiments.lecture``, compared with a closed form: the
    number of updates from curvatures, bounds of Brent and Graham on steps, ``1 - n/d`` of a start's
    squared error. All gradients are ``gradtrace.backward``'s. Float64. Intervals are Student's, at
    95%, over seeds. The network's target is tanh of a sum of features; it was the sine at first,
    which no network of the first quick run learned, with or without normalisation.

Seeds: Data, starts, orders and random programs are drawn from generators seeded by the cell.

Limits: Problems are small, and chosen so that a closed form tells what should come out; a deep
    network need not behave so. Steps of workers are counted, not timed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from gradtrace.experiments.harness.findings import Cell, Findings, Result, Row, Seeds, Tick
from gradtrace.experiments.harness.parts import ResultPart, all_cells, all_findings
from gradtrace.experiments.harness.statistics import with_interval
from gradtrace.experiments.lecture import dataflow, priors, valleys

PARTS = cast(dict[str, ResultPart], {"valleys": valleys, "dataflow": dataflow, "priors": priors})

QUICK: dict[str, Any] = {
    "valleys": {"samples": 64, "condition": 100.0, "updates": 300, "rates": [0.3, 1.0]},
    "dataflow": {"nodes": 31, "orders": 40, "threads": 4, "runs": 3},
    "priors": {"samples": [5, 10, 40], "steps": 300, "updates": 150, "starts": 32},
}
FULL: dict[str, Any] = {
    "valleys": {
        "samples": 200,
        "condition": 100.0,
        "updates": 500,
        "rates": [0.1, 0.3, 1.0, 3.0],
    },
    "dataflow": {"nodes": 63, "orders": 200, "threads": 4, "runs": 20},
    "priors": {"samples": [5, 10, 14, 40], "steps": 2500, "updates": 600, "starts": 128},
}
SEEDS = Seeds(quick=2, full=8)
TIMED = False
FIGURE = "valleys"


def cells(settings: Mapping[str, Any], seeds: int) -> list[Cell]:
    """Those of all parts that have settings."""
    return all_cells(PARTS, settings, seeds)


def measure(cell: Cell, tick: Tick) -> Result:
    """Hand it to its part."""
    tick(" ".join(str(x) for x in cell.values() if isinstance(x, str)))
    return PARTS[cell["part"]].measure(cell, tick)


def headline(facts: Mapping[str, Any]) -> str:
    """The answer in a sentence."""
    parts = []
    if found := facts.get("valleys"):
        along, across = (found["saved"][name] for name in ("axes", "turned"))
        if along[0] and across[0]:
            parts.append(
                f"batch normalisation needs {with_interval(along, '.0f')} times fewer updates if "
                f"features differ in size, {with_interval(across, '.1f')} times if these are mixed"
            )
    if found := facts.get("dataflow"):
        same = "no value" if not found["different"] else "values"
        parts.append(f"the order of execution changes {same}")
    if found := facts.get("priors", {}).get("arrived"):
        blind, near = found["nothing known"], found["near the truth"]
        if blind[0] is not None:
            parts.append(
                f"a blind start finds the best minimum in {with_interval(blind, percent=True)} of "
                f"runs, one near the truth in {with_interval(near, percent=True)}"
            )
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:] or 'Nothing was measured'}."


def conclude(rows: Sequence[Row]) -> Findings:
    """All parts' findings, one after another."""
    return all_findings(PARTS, rows)
