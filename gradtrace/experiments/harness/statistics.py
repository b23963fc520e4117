"""Rank correlations, trends and confidence intervals, with numpy only.

Every function is a textbook formula; the tests compare them with scipy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import atanh, isnan, nan, sqrt, tanh
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from gradtrace.profiling.trend_tests import (
    Floats,
    Interval,
    Numbers,
    Trend,
    floats,
    groups,
    mann_kendall,
    medians,
    pooled,
    quantile,
    ranks,
    same,
    shift,
    theil_sen,
    trend,
)

__all__ = [
    "Floats",
    "Interval",
    "Trend",
    "bootstrap",
    "fisher",
    "kendall",
    "mann_kendall",
    "medians",
    "percentiles",
    "pooled",
    "ranks",
    "resample",
    "shift",
    "spearman",
    "theil_sen",
    "trend",
]
T = TypeVar("T")


# Ranks --------------------------------------------------------------------------------------------


def spearman(x: Numbers, y: Numbers) -> float:
    """Spearman's ρ: the correlation of the ranks; nan if one of the two is constant.

    >>> spearman([1, 2, 3], [10, 20, 300])
    1.0
    """
    a, b = ranks(x), ranks(y)
    same(a, b)
    a, b = a - a.mean(), b - b.mean()
    norm = sqrt(float(a @ a) * float(b @ b))
    return _clipped(float(a @ b) / norm) if norm else nan


def kendall(x: Numbers, y: Numbers) -> float:
    """Kendall's τ_b: ``(concordant - discordant) / √((pairs - ties in x)(pairs - ties in y))``.

    >>> kendall([1, 2, 3], [1, 3, 2])
    0.3333333333333333
    """
    a, b = floats(x), floats(y)
    same(a, b)
    s = sum(float(np.sign(a[i + 1 :] - a[i]) @ np.sign(b[i + 1 :] - b[i])) for i in range(len(a)))
    pairs = len(a) * (len(a) - 1) / 2
    norm = sqrt((pairs - _tied(a)) * (pairs - _tied(b)))
    return _clipped(s / norm) if norm else nan


# Intervals ----------------------------------------------------------------------------------------


def fisher(rho: float, n: int, level: float = 0.95) -> Interval:
    """The interval of Spearman's ρ over n independent points: ``tanh(atanh ρ ± z·σ)``.

    ``σ² = (1 + ρ²/2) / (n - 3)`` (Bonett and Wright, 2000), which suits ranks better than Fisher's
    own 1 / (n - 3). Points that come in groups are not independent: use ``bootstrap``.
    """
    if n < 4 or isnan(rho):
        return Interval(rho, -1.0, 1.0)
    if abs(rho) >= 1:
        return Interval(rho, rho, rho)
    width = quantile(level) * sqrt((1 + rho * rho / 2) / (n - 3))
    return Interval(rho, tanh(atanh(rho) - width), tanh(atanh(rho) + width))


def bootstrap(
    clusters: Sequence[T],
    statistic: Callable[[Sequence[T]], float],
    *,
    rounds: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """The percentile interval of a statistic over clusters that were drawn independently.

    Each round draws as many clusters as there are, with replacement, and computes their statistic.
    Clusters are drawn as a whole, so values in one need not be independent. Draws whose statistic
    is not finite are left out; with fewer than two clusters the interval is infinite.

    >>> mean = lambda clusters: sum(map(sum, clusters)) / sum(map(len, clusters))
    >>> bootstrap([[1, 2], [3, 4], [5, 6]], mean, seed=1)
    Interval(value=3.5, low=1.5, high=5.5)
    """
    value = statistic(clusters)
    if len(clusters) < 2 or isnan(value):
        return Interval(value, -np.inf, np.inf)
    draws = resample(len(clusters), rounds, seed)
    found = np.array([statistic([clusters[i] for i in draw]) for draw in draws])
    return percentiles(value, found, level)


def resample(clusters: int, rounds: int = 2000, seed: int = 0) -> npt.NDArray[np.int64]:
    """The indices of the clusters that each round draws: (rounds, clusters)."""
    return np.random.default_rng(seed).integers(clusters, size=(rounds, clusters))


def percentiles(value: float, found: Floats, level: float = 0.95) -> Interval:
    """The central ``level`` interval of the rounds' statistics; non-finite ones are left out."""
    found = found[np.isfinite(found)]
    if not len(found):
        return Interval(value, -np.inf, np.inf)
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, float(low), float(high))


# Parts --------------------------------------------------------------------------------------------


def _tied(values: Floats) -> float:
    """The number of pairs of equal values."""
    counts = groups(values)
    return float((counts * (counts - 1) / 2).sum())


def _clipped(rho: float) -> float:
    return max(-1.0, min(1.0, rho))  # rounding may slightly exceed 1
