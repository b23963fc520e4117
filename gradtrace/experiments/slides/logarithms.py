"""Means and lines in logarithms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean


def exponent(pairs: Sequence[tuple[float, float]]) -> float | None:
    """The exponent s of ``y ~ xˢ`` by least squares; None of fewer than three points."""
    if len(pairs) < 3:
        return None
    x, y = ([math.log(value) for value in values] for values in zip(*pairs))
    middle = fmean(x)
    return sum((a - middle) * b for a, b in zip(x, y)) / sum((a - middle) ** 2 for a in x)


def geometric(values: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(fmean(math.log(value) for value in values))
