"""Means and lines in logarithms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean


def exponent(pairs: Sequence[tuple[float, float]]) -> float | None:
    """The exponent s of ``y ~ xˢ`` by least squares; None of fewer than three points.

    Points with a 0 have no logarithms, and do not count.
    """
    known = [(x, y) for x, y in pairs if 0 < x < math.inf and 0 < y < math.inf]
    if len(known) < 3:
        return None
    x, y = ([math.log(value) for value in values] for values in zip(*known))
    middle = fmean(x)
    spread = math.fsum((a - middle) ** 2 for a in x)
    return math.fsum((a - middle) * b for a, b in zip(x, y)) / spread if spread else None


def geometric(values: Sequence[float]) -> float:
    """The geometric mean, 0 if one of them is."""
    return math.exp(fmean(map(math.log, values))) if all(values) else 0.0
