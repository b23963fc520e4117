"""Robust slopes and tests for a trend in a series of numbers, with numpy only.

``theil_sen`` and ``mann_kendall`` are the textbook methods; the tests compare them with scipy.
``trend`` adapts them to measured times, which have spikes and are autocorrelated, since whatever
slows one step slows the next as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import erfc, inf, isfinite, isnan, nan, sqrt
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Numbers = Sequence[float] | Floats

LEVEL = 0.95
BLOCKS = 32
MIN_POINTS = 10
"""Series with fewer numbers are too short to test for a trend."""

SHIFT_PAIR_SHARE = 0.95
"""Two parts of a series differ if the later number is larger (smaller) in this share of pairs."""


class Interval(NamedTuple):
    """An estimate and its confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if isnan(self.value):
            return "–"
        known = isfinite(self.low) and isfinite(self.high)
        return f"{self.value:.2f} " + (f"[{self.low:.2f}, {self.high:.2f}]" if known else "[?]")

    @property
    def sign(self) -> int:
        """1 or -1 if the whole interval is positive or negative; 0 if it contains 0."""
        return int(self.low > 0) - int(self.high < 0)


class Kendall(NamedTuple):
    """The Mann-Kendall test of a series for a monotonic trend."""

    s: int
    z: float
    p: float


class Trend(NamedTuple):
    """The trend of a series: its slope, the p-value of no trend, and the median (``middle``).

    ``inflation`` is the factor by which autocorrelation enlarges the variance of the test, and
    ``points`` the number of block medians that were used.
    """

    slope: Interval
    p: float
    middle: float
    inflation: float
    points: int

    @property
    def sign(self) -> int:
        """1 if it rises, -1 if it falls, 0 if neither is significant in both test and interval."""
        return self.slope.sign if self.p < 1 - LEVEL else 0

    def relative(self, steps: float = 1.0) -> Interval:
        """The change over ``steps`` as a share of the middle; NaN for a change if that is 0."""
        if not self.middle:
            return Interval(*(nan if value else 0.0 for value in self.slope))
        scale = steps / self.middle
        return Interval(*(value * scale for value in self.slope))


class Shift(NamedTuple):
    """A change point of a series: at ``at``, its median changes from ``before`` to ``after``."""

    at: float
    before: float
    after: float


# Slopes and tests ---------------------------------------------------------------------------------


def theil_sen(x: Numbers, y: Numbers, level: float = LEVEL, inflation: float = 1.0) -> Interval:
    """The Theil-Sen slope: the median of ``(y[j] - y[i]) / (x[j] - x[i])`` over pairs, x distinct.

    The interval is Sen's: the slopes that are ``z·σ/2`` ranks from the median, σ² being the
    variance of Kendall's S, times ``inflation``. Up to 29% of the points may be outliers. It takes
    memory for all pairs.

    >>> theil_sen([0, 1, 2, 3, 4, 5], [1, 3, 5, 100, 9, 11]).value
    2.0
    """
    a, b = floats(x), floats(y)
    same(a, b)
    slopes = _slopes(a, b)
    if not len(slopes):
        return Interval(nan, -inf, inf)
    spread = sqrt(inflation * _variance(len(a), groups(a), groups(b)))
    return _middle(slopes, quantile(level) * spread)


def mann_kendall(y: Numbers, inflation: float = 1.0) -> Kendall:
    """Mann and Kendall's test: ``S = Σ_{i<j} sign(y[j] - y[i])``, 0 if there is no trend.

    ``z = (S - sign S) / √(inflation · var S)`` with the variance corrected for ties, and the
    two-sided p of the normal distribution. Inflation 1 assumes independent points; for
    autocorrelated ones p is then too small: use ``trend``.

    >>> mann_kendall([1, 2, 3, 4, 5]).s
    10
    """
    a = floats(y)
    s = sum(int(np.sign(a[i + 1 :] - a[i]).sum()) for i in range(len(a)))
    variance = inflation * _variance(len(a), groups(a), np.ones(len(a), dtype=np.int64))
    z = float(s - np.sign(s)) / sqrt(variance) if variance else 0.0
    return Kendall(s, z, erfc(abs(z) / sqrt(2)))


def trend(y: Numbers, x: Numbers | None = None, blocks: int = BLOCKS) -> Trend:
    """The trend of a time series: Theil-Sen slope and Mann-Kendall test of block medians.

    The medians remove spikes and short-range autocorrelation. What remains of it inflates the
    variance, as if the blocks were autoregressive with their lag-1 correlation ρ:
    ``1 + 2 Σ_k (1 - k/n) ρ^k``. For some hundreds of steps of simulated noise this reports a trend
    where there is none in 1 to 8 of 100 cases, the uncorrected test in up to 60; for some tens of
    steps, and for random walks, in about 20.

    >>> found = trend([2.0 + 0.1 * i for i in range(100)])
    >>> round(found.slope.value, 3), found.sign
    (0.1, 1)
    """
    b = floats(y)
    a = np.arange(len(b), dtype=np.float64) if x is None else floats(x)
    same(a, b)
    if len(b) < MIN_POINTS:
        middle = float(np.median(b)) if len(b) else nan
        return Trend(Interval(nan, -inf, inf), 1.0, middle, 1.0, len(b))
    a, b = medians(a, blocks), medians(b, blocks)
    factor = inflation_of(b - theil_sen(a, b).value * a)
    slope = theil_sen(a, b, inflation=factor)
    test = mann_kendall(b, factor)
    return Trend(slope, test.p, float(np.median(b)), factor, len(b))


def pooled(series: Sequence[Numbers], blocks: int = BLOCKS) -> Trend:
    """The common trend of several series of one kind, each as a share of its own median.

    The regional Kendall test: slopes are taken within each series and their median over all; S and
    its variance (inflated for each as in ``trend``) are summed, as the series are independent. x is
    the index in a series. A series whose median is 0 has no shares, and is left out.

    >>> found = pooled([[2.0 + 0.02 * i for i in range(50)], [40.0 + 0.4 * i for i in range(50)]])
    >>> found.sign, round(found.slope.value, 4)
    (1, 0.008)
    """
    slopes, factors, s, variance, points = [], [], 0, 0.0, 0
    for numbers in series:
        b = floats(numbers)
        if len(b) < MIN_POINTS or not (whole := float(np.median(b))):
            continue
        a, b = medians(np.arange(len(b), dtype=np.float64), blocks), medians(b, blocks) / whole
        each = _slopes(a, b)
        factors.append(inflation_of(b - float(np.median(each)) * a))
        s += mann_kendall(b).s
        variance += factors[-1] * _variance(len(b), groups(b))
        points += len(b)
        slopes.append(each)
    if not slopes:
        return Trend(Interval(nan, -inf, inf), 1.0, 1.0, 1.0, 0)
    every = np.sort(np.concatenate(slopes))
    slope = _middle(every, quantile(LEVEL) * sqrt(variance))
    z = float(s - np.sign(s)) / sqrt(variance) if variance else 0.0
    return Trend(slope, erfc(abs(z) / sqrt(2)), 1.0, float(np.mean(factors)), points)


def shift(y: Numbers, x: Numbers | None = None, blocks: int = BLOCKS) -> Shift | None:
    """The change point of a series, or None. ``trend`` does not detect a single jump.

    The block medians are split in two, with at least a quarter on each side, where the parts differ
    most: where the share of pairs with the later one larger is closest to 1 or 0. If that share is
    beyond ``SHIFT_PAIR_SHARE``, that is the change point. It is descriptive and no test: random
    walks have such points too.

    >>> shift([1.0] * 50 + [3.0] * 50)
    Shift(at=49.5, before=1.0, after=3.0)
    """
    b = floats(y)
    a = np.arange(len(b), dtype=np.float64) if x is None else floats(x)
    same(a, b)
    if len(b) < MIN_POINTS:
        return None
    a, b = medians(a, blocks), medians(b, blocks)
    least = max(len(b) // 4, MIN_POINTS // 2 - 1)
    over = np.sign(np.subtract.outer(b, b))  # 1 where row > column
    cuts = range(least, len(b) - least + 1)
    apart = {cut: float(over[cut:, :cut].mean()) for cut in cuts}  # -1 .. 1
    cut = max(cuts, key=lambda at: abs(apart[at]))
    if abs(apart[cut]) < 2 * SHIFT_PAIR_SHARE - 1:
        return None
    before, after = (float(np.median(part)) for part in (b[:cut], b[cut:]))
    return Shift(float(a[cut - 1] + a[cut]) / 2, before, after)


def medians(y: Numbers, blocks: int = BLOCKS) -> Floats:
    """The medians of ``blocks`` consecutive blocks of nearly equal length; fewer if y is short.

    >>> medians([1, 2, 90, 4, 5, 6], 2).tolist()
    [2.0, 5.0]
    """
    a = floats(y)
    ends = np.linspace(0, len(a), min(blocks, len(a)) + 1).round().astype(int)
    return np.array([np.median(a[i:j]) for i, j in pairwise(ends)])


def inflation_of(rest: Numbers) -> float:
    """The factor by which autocorrelation inflates the variance of a trend's test.

    ρ is the lag-1 correlation of the ranks of the residuals of a trend; its bias in short series,
    ``E ρ̂ ≈ ρ - (2 + 4ρ)/n``, is corrected (Marriott and Pope, 1954). The factor is bounded so that
    a series which always rises still has a trend, though a random walk can look the same.
    """
    r = ranks(rest) - (len(rest) + 1) / 2
    n, whole = len(r), float(r @ r)
    if n < 5 or not whole:
        return 1.0
    rho = (n * float(r[1:] @ r[:-1]) / whole + 2) / (n - 4)
    rho = min(max(rho, 0.0), 1.0)
    lags = np.arange(1, n)
    factor = 1 + 2 * float(((1 - lags / n) * rho**lags).sum())
    surest = (n * (n - 1) / 2 - 1) / sqrt(_variance(n))
    return min(factor, max(1.0, 0.9 * (surest / quantile(LEVEL)) ** 2))


def ranks(values: Numbers) -> Floats:
    """The rank of every value, from 1; equal values get the mean of their ranks.

    >>> ranks([3.0, 1.0, 3.0]).tolist()
    [2.5, 1.0, 2.5]
    """
    _, places, counts = np.unique(floats(values), return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    mean: Floats = (last - (counts - 1) / 2)[places]
    return mean


# Parts --------------------------------------------------------------------------------------------


def _slopes(x: Floats, y: Floats) -> Floats:
    order = np.argsort(x, kind="stable")
    x, y = x[order], y[order]
    parts = []
    for i in range(len(x) - 1):
        dx = x[i + 1 :] - x[i]
        parts.append((y[i + 1 :] - y[i])[dx > 0] / dx[dx > 0])
    return np.sort(np.concatenate(parts)) if parts else np.empty(0)


def _middle(slopes: Floats, width: float) -> Interval:
    """The median of sorted slopes, and the slopes ``width / 2`` ranks below and above it."""
    upper = min(round((len(slopes) + width) / 2), len(slopes) - 1)
    lower = max(round((len(slopes) - width) / 2) - 1, 0)
    return Interval(float(np.median(slopes)), float(slopes[lower]), float(slopes[upper]))


def _variance(n: int, *tied: npt.NDArray[Any]) -> float:
    """The variance of Kendall's S: ``(n(n-1)(2n+5) - Σ t(t-1)(2t+5)) / 18``, t the tie sizes."""
    total = n * (n - 1) * (2 * n + 5)
    return float(total - sum(int((t * (t - 1) * (2 * t + 5)).sum()) for t in tied)) / 18


def groups(values: Floats) -> npt.NDArray[Any]:
    """The number of occurrences of every distinct value."""
    counts: npt.NDArray[Any] = np.unique(values, return_counts=True)[1]
    return counts


def floats(values: Numbers) -> Floats:
    """A one-dimensional array of numbers; raises for anything else, and for NaN."""
    result: Floats = np.asarray(values, dtype=np.float64)
    if result.ndim != 1 or np.isnan(result).any():
        raise ValueError("statistics are of one row of numbers, none of them nan")
    return result


def same(a: Floats, b: Floats) -> None:
    """Raise an error for arrays of different length."""
    if len(a) != len(b):
        raise ValueError(f"as many of the one as of the other are needed: {len(a)} and {len(b)}")


def quantile(level: float) -> float:
    """The z for which ±z standard deviations contain ``level`` of a normal distribution."""
    return NormalDist().inv_cdf((1 + level) / 2)
