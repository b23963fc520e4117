"""Measurements that a clock, a memory gauge or a training gone wrong may bring: all equal, all 0,
some 0, not finite. Whatever they are, an experiment concludes, and says nothing that is no word.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest

from gradtrace.experiments.harness import results
from gradtrace.experiments.harness.findings import Experiment, Row

KINDS: dict[str, Callable[[float, int], float]] = {
    "equal": lambda value, place: 0.005859375,  # 6 KiB of a MiB: what a process's pages come to
    "zero": lambda value, place: 0.0,
    "zero at times": lambda value, place: value if place % 3 else 0.0,
    "nan": lambda value, place: math.nan,
    "nan at times": lambda value, place: value if place % 7 else math.nan,
    "infinite": lambda value, place: math.inf,
}
"""What becomes of a measured number, and of the how manyth."""

every = pytest.mark.parametrize("kind", KINDS)


def spoilt(rows: Sequence[Row], kind: str) -> list[Row]:
    """The rows with each float of their results replaced; whole numbers are counts, and stay."""
    places = count()

    def of(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: of(one) for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [of(one) for one in value]
        return KINDS[kind](value, next(places)) if isinstance(value, float) else value

    return [Row(row.cell, of(row.result)) for row in rows]


def concludes(experiment: Experiment, rows: Sequence[Row], kind: str) -> None:
    """From spoilt rows, and from the first of them alone."""
    for some in (spoilt(rows, kind), spoilt(rows[:1], kind)):
        findings = experiment.conclude(some)
        results.found(findings, "spoilt")  # that it is JSON, with rows as wide as their tables
        assert findings.sentence or len(some) == 1
        if kind in ("equal", "zero") or experiment.TIMED:
            assert not re.search(r"\b(nan|inf)\b", findings.sentence), findings.sentence
