"""Numerical against analytic gradients.

Question: How near does a difference of losses come to the gradient, at which step h, and what does
    it cost beside one backward pass? Does ``gt.check`` find a wrong gradient?

Expectation: Lee's slides ("Backpropagation"): the numerical method is only approximate, h cannot
    go to 0 as precision is finite, and it takes at least d + 1 evaluations for d parameters; the
    analytic method is exact and fast, but has to be checked. In numbers: the error is U-shaped over
    h. A forward difference is off by c·h + ε/h, least at h ~ √ε with an error ~ √ε; a central one
    by c·h² + ε/h, least at h ~ ∛ε with ~ ε^(2/3). ε is 1.2e-7 in float32 and 2.2e-16 in float64.

Method: The slides' ``sin(5·exp(x))`` at 20 points, and the loss of a tanh network by all its
    parameters, in both precisions, for h from 1 down to below ε. The error is ‖found - true‖ /
    ‖true‖; what is true is the slides' formula, and for the network ``gradtrace.backward`` in
    float64. The arms of the U are fitted by lines in logarithms. Cost over d counts the evaluations
    of the loss, and takes times beside it. ``gt.check`` looks at a right formula, at a wrong one,
    and at two kinks.

Seeds: Weights, data and points come from generators seeded by the cell. Times are of this machine;
    nothing that is asserted depends on them.

Limits: Two smooth functions, at few points; where a function has kinks or is very steep the best
    step is another. Times of the published run are of a machine that had other work to do, and are
    longer than on an idle one; counts and errors do not depend on it. ``gt.check`` samples: it can
    miss a wrong element among many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from gradtrace.experiments.harness.findings import Cell, Findings, Result, Row, Seeds, Tick
from gradtrace.experiments.harness.parts import ResultPart, all_cells, all_findings
from gradtrace.experiments.harness.statistics import with_interval
from gradtrace.experiments.slides import costs, differences, formulas
from gradtrace.experiments.slides.differences import bowls, over_seeds

PARTS = cast(
    dict[str, ResultPart], {"differences": differences, "costs": costs, "formulas": formulas}
)
QUICK: dict[str, Any] = {
    "differences": {"per_decade": 4, "width": 6},
    "costs": {"sizes": [10, 100, 1000]},
    "formulas": {},
}
FULL: dict[str, Any] = {
    "differences": {"per_decade": 4, "width": 16},
    "costs": {"sizes": [10, 30, 100, 300, 1000, 3000, 10_000, 30_000]},
    "formulas": {},
}
SEEDS = Seeds(quick=1, full=5)
TIMED = True
FIGURE = "differences-network"


def cells(settings: Mapping[str, Any], seeds: int) -> list[Cell]:
    """Those of all parts that have settings."""
    return all_cells(PARTS, settings, seeds)


def measure(cell: Cell, tick: Tick) -> Result:
    """Hand it to its part."""
    tick(" ".join(str(x) for x in cell.values()))
    return PARTS[cell["part"]].measure(cell, tick)


def headline(facts: Mapping[str, Any]) -> str:
    """The answer in a sentence; evaluations do not depend on seeds."""
    curves, costs = facts.get("differences", {}), facts.get("costs", {})
    parts = []
    if curves:
        best = with_interval(over_seeds(curves, "float64 central", "steps"), ".0e")
        parts.append(
            f"a slope from a small step is most exact at one size of it ({best} in float64), less "
            f"at others ({bowls(curves)})"
        )
    if check := costs.get("check"):
        d = max(check, key=int)
        parts.append(f"gt.check takes {check[d]:,g} steps for {int(d):,} parameters")
    text = "; ".join(parts) or "formulas alone were checked"
    return f"{text[:1].upper()}{text[1:]}."


def conclude(rows: Sequence[Row]) -> Findings:
    """All parts' findings, one after another."""
    return all_findings(PARTS, rows)
