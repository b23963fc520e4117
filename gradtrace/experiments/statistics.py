"""How sure a number is: rank correlations, trends, and intervals, on numpy alone.

Every function is a formula of a textbook; the tests hold them against scipy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import atanh, erfc, isnan, nan, sqrt, tanh
from statistics import NormalDist
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Numbers = Sequence[float] | Floats
T = TypeVar("T")


class Interval(NamedTuple):
    """An estimate, and the interval that holds the true value in ``level`` of all repetitions."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if isnan(self.value):
            return "–"
        known = np.isfinite(self.low) and np.isfinite(self.high)
        return f"{self.value:.2f} " + (f"[{self.low:.2f}, {self.high:.2f}]" if known else "[?]")

    @property
    def sign(self) -> int:
        """1 or -1 if the whole interval lies on that side of 0; 0 if it cannot be told."""
        return int(self.low > 0) - int(self.high < 0)


class Trend(NamedTuple):
    """The Mann-Kendall test of a series: does it go up or down?"""

    s: int
    z: float
    p: float


# Ranks --------------------------------------------------------------------------------------------


def ranks(values: Numbers) -> Floats:
    """The rank of every value, from 1; equal values share the mean of theirs.

    >>> ranks([3.0, 1.0, 3.0]).tolist()
    [2.5, 1.0, 2.5]
    """
    _, places, counts = np.unique(_floats(values), return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    mean: Floats = (last - (counts - 1) / 2)[places]
    return mean


def spearman(x: Numbers, y: Numbers) -> float:
    """Spearman's ρ: the correlation of the ranks; nan if one of the two is constant.

    >>> spearman([1, 2, 3], [10, 20, 300])
    1.0
    """
    a, b = ranks(x), ranks(y)
    _same(a, b)
    a, b = a - a.mean(), b - b.mean()
    norm = sqrt(float(a @ a) * float(b @ b))
    return _clipped(float(a @ b) / norm) if norm else nan


def kendall(x: Numbers, y: Numbers) -> float:
    """Kendall's τ_b: ``(concordant - discordant) / √((pairs - ties in x)(pairs - ties in y))``.

    >>> kendall([1, 2, 3], [1, 3, 2])
    0.3333333333333333
    """
    a, b = _floats(x), _floats(y)
    _same(a, b)
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
    width = _z(level) * sqrt((1 + rho * rho / 2) / (n - 3))
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

    Each round draws as many clusters as there are, with replacement, and takes the statistic of
    them. What lies in one cluster stays together, so it need not be independent. Draws whose
    statistic is nan are left out; with fewer than two clusters nothing can be told.

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
    """Which clusters each round draws: (rounds, clusters)."""
    return np.random.default_rng(seed).integers(clusters, size=(rounds, clusters))


def percentiles(value: float, found: Floats, level: float = 0.95) -> Interval:
    """The middle ``level`` of what the rounds found, nan left out."""
    found = found[~np.isnan(found)]
    if not len(found):
        return Interval(value, -np.inf, np.inf)
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, float(low), float(high))


# Trends -------------------------------------------------------------------------------------------


def theil_sen(x: Numbers, y: Numbers, level: float = 0.95) -> Interval:
    """The Theil-Sen slope: the median of ``(y[j] - y[i]) / (x[j] - x[i])`` over pairs of x apart.

    The interval is Sen's: the slopes that lie ``z·σ/2`` places from the middle, σ² being the
    variance of Kendall's S. Up to 29% of the points may be wild. It takes memory for all pairs.

    >>> theil_sen([0, 1, 2, 3, 4, 5], [1, 3, 5, 100, 9, 11]).value
    2.0
    """
    a, b = _floats(x), _floats(y)
    _same(a, b)
    slopes = _slopes(a, b)
    if not len(slopes):
        return Interval(nan, -np.inf, np.inf)
    width = _z(level) * sqrt(_variance(len(a), _groups(a), _groups(b)))
    upper = min(round((len(slopes) + width) / 2), len(slopes) - 1)
    lower = max(round((len(slopes) - width) / 2) - 1, 0)
    return Interval(float(np.median(slopes)), float(slopes[lower]), float(slopes[upper]))


def mann_kendall(y: Numbers) -> Trend:
    """Mann and Kendall's test: ``S = Σ_{i<j} sign(y[j] - y[i])``, 0 if there is no trend.

    ``z = (S - sign S) / √var S`` with the variance corrected for ties, and the two-sided p of the
    normal distribution. It takes the points as independent; with neighbours that are alike, p is
    too small, and means of blocks should be tested in their place.

    >>> mann_kendall([1, 2, 3, 4, 5]).s
    10
    """
    a = _floats(y)
    s = sum(int(np.sign(a[i + 1 :] - a[i]).sum()) for i in range(len(a)))
    variance = _variance(len(a), _groups(a), np.ones(len(a), dtype=np.int64))
    z = float(s - np.sign(s)) / sqrt(variance) if variance else 0.0
    return Trend(s, z, erfc(abs(z) / sqrt(2)))


def _slopes(x: Floats, y: Floats) -> Floats:
    order = np.argsort(x, kind="stable")
    x, y = x[order], y[order]
    parts = []
    for i in range(len(x) - 1):
        dx = x[i + 1 :] - x[i]
        parts.append((y[i + 1 :] - y[i])[dx > 0] / dx[dx > 0])
    return np.sort(np.concatenate(parts)) if parts else np.empty(0)


def _variance(n: int, *tied: npt.NDArray[Any]) -> float:
    """Of Kendall's S: ``(n(n-1)(2n+5) - Σ t(t-1)(2t+5)) / 18``, over groups of t equal ones."""
    total = n * (n - 1) * (2 * n + 5)
    return float(total - sum(int((t * (t - 1) * (2 * t + 5)).sum()) for t in tied)) / 18


def _groups(values: Floats) -> npt.NDArray[Any]:
    """How many there are of every value."""
    counts: npt.NDArray[Any] = np.unique(values, return_counts=True)[1]
    return counts


def _tied(values: Floats) -> float:
    """How many pairs of equal values there are."""
    counts = _groups(values)
    return float((counts * (counts - 1) / 2).sum())


def _floats(values: Numbers) -> Floats:
    result: Floats = np.asarray(values, dtype=np.float64)
    if result.ndim != 1 or np.isnan(result).any():
        raise ValueError("statistics are of one row of numbers, none of them nan")
    return result


def _same(a: Floats, b: Floats) -> None:
    if len(a) != len(b):
        raise ValueError(f"as many of the one as of the other are needed: {len(a)} and {len(b)}")


def _clipped(rho: float) -> float:
    return max(-1.0, min(1.0, rho))  # rounding may pass 1 by a bit


def _z(level: float) -> float:
    return NormalDist().inv_cdf((1 + level) / 2)
