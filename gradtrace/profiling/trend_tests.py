"""Robust slopes and tests for a trend in a series of numbers.

Measured times have spikes and are autocorrelated, since whatever slows one step slows the next as
well. So ``trend`` takes Theil-Sen slopes and the Mann-Kendall test of block medians, and inflates
the variance of both; ``pooled`` does so for several series at once. scipy's ``theilslopes`` and
``kendalltau`` can do neither, and ``gt.timing`` and a Monitor's report run without scipy; the tests
compare what is common.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import erfc, inf, isfinite, isnan, nan, sqrt
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gradtrace.profiling.tuning import (
    CONFIDENCE_LEVEL,
    MIN_TREND_POINTS,
    SHIFT_PAIR_SHARE,
    TREND_BLOCKS,
)

Floats = npt.NDArray[np.float64]
Numbers = Sequence[float] | Floats

CONFIDENCE_Z = NormalDist().inv_cdf((1 + CONFIDENCE_LEVEL) / 2)
"""±z standard deviations contain ``CONFIDENCE_LEVEL`` of a normal distribution."""


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
        return self.slope.sign if self.p < 1 - CONFIDENCE_LEVEL else 0

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


def theil_sen(x: Numbers, y: Numbers) -> Interval:
    """The Theil-Sen slope: the median of ``(y[j] - y[i]) / (x[j] - x[i])`` over pairs, x distinct.

    The interval is Sen's: the slopes that are ``z·σ/2`` ranks from the median, σ² being the
    variance of Kendall's S. Up to 29% of the points may be outliers. It takes memory for all pairs.

    >>> theil_sen([0, 1, 2, 3, 4, 5], [1, 3, 5, 100, 9, 11]).value
    2.0
    """
    a, b = _pair(x, y)
    return _median_slope(_slopes(a, b), _variance(len(a), a, b))


def mann_kendall(y: Numbers) -> Kendall:
    """Mann and Kendall's test: ``S = Σ_{i<j} sign(y[j] - y[i])``, 0 if there is no trend.

    ``z = (S - sign S) / √(var S)`` with the variance corrected for ties, and the two-sided p of the
    normal distribution. It assumes independent points; for autocorrelated ones p is too small: use
    ``trend``.

    >>> mann_kendall([1, 2, 3, 4, 5]).s
    10
    """
    a = floats(y)
    return _test(_signs(a), _variance(len(a), a))


def trend(y: Numbers, x: Numbers | None = None) -> Trend:
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
    a, b = _pair(range(len(y)) if x is None else x, y)
    if len(b) < MIN_TREND_POINTS:
        return _joint([])._replace(middle=float(np.median(b)) if len(b) else nan, points=len(b))
    a, b = medians(a), medians(b)
    return _joint([(a, b)])._replace(middle=float(np.median(b)))


def pooled(series: Sequence[Numbers]) -> Trend:
    """The common trend of several series of one kind, each as a share of its own median.

    The regional Kendall test: slopes are taken within each series and their median over all; S and
    its variance (inflated for each as in ``trend``) are summed, as the series are independent. x is
    the index in a series. A series whose median is 0 has no shares, and is left out.

    >>> found = pooled([[2.0 + 0.02 * i for i in range(50)], [40.0 + 0.4 * i for i in range(50)]])
    >>> found.sign, round(found.slope.value, 4)
    (1, 0.008)
    """
    parts = []
    for b in map(floats, series):
        if len(b) >= MIN_TREND_POINTS and (whole := float(np.median(b))):
            parts.append((medians(range(len(b))), medians(b) / whole))
    return _joint(parts)


def _joint(parts: Sequence[tuple[Floats, Floats]]) -> Trend:
    """The common trend of several pairs ``(x, y)`` of series, whose middle is taken as 1."""
    slopes, factors, s, variance = [np.empty(0)], [1.0], 0, 0.0
    for a, b in parts:
        slopes.append(_slopes(a, b))
        factors.append(inflation_of(b - _median_slope(slopes[-1]).value * a))
        s += _signs(b)
        variance += factors[-1] * _variance(len(b), b)
    slope = _median_slope(np.sort(np.concatenate(slopes)), variance)
    points = sum(len(b) for _, b in parts)
    return Trend(slope, _test(s, variance).p, 1.0, float(np.mean(factors[1:] or factors)), points)


def shift(y: Numbers) -> Shift | None:
    """The change point of a series, or None. ``trend`` does not detect a single jump.

    The block medians are split in two, with at least a quarter on each side, where the parts differ
    most: where the share of pairs with the later one larger is closest to 1 or 0. If that share is
    beyond ``SHIFT_PAIR_SHARE``, that is the change point. It is descriptive and no test: random
    walks have such points too.

    >>> shift([1.0] * 50 + [3.0] * 50)
    Shift(at=49.5, before=1.0, after=3.0)
    """
    if len(y) < MIN_TREND_POINTS:
        return None
    a, b = medians(range(len(y))), medians(y)
    least = max(len(b) // 4, MIN_TREND_POINTS // 2 - 1)
    over = np.sign(np.subtract.outer(b, b))  # 1 where row > column
    cuts = range(least, len(b) - least + 1)
    apart = {cut: float(over[cut:, :cut].mean()) for cut in cuts}  # -1 .. 1
    cut = max(cuts, key=lambda at: abs(apart[at]))
    if abs(apart[cut]) < 2 * SHIFT_PAIR_SHARE - 1:
        return None
    before, after = (float(np.median(part)) for part in (b[:cut], b[cut:]))
    return Shift(float(a[cut - 1] + a[cut]) / 2, before, after)


def medians(y: Numbers, blocks: int = TREND_BLOCKS) -> Floats:
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
    return min(factor, max(1.0, 0.9 * (surest / CONFIDENCE_Z) ** 2))


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
    """The sorted slopes between all pairs of points with different x."""
    dx, dy = _differences(x), _differences(y)
    return np.sort(dy[dx != 0] / dx[dx != 0])


def _differences(y: Floats) -> Floats:
    """``y[j] - y[i]`` of all pairs i < j."""
    later, earlier = np.tril_indices(len(y), -1)
    return y[later] - y[earlier]


def _median_slope(slopes: Floats, variance: float = 0.0) -> Interval:
    """The median of sorted slopes, and the slopes ``z √variance / 2`` ranks below and above it."""
    if not len(slopes):
        return Interval(nan, -inf, inf)
    width = CONFIDENCE_Z * sqrt(variance)
    upper = min(round((len(slopes) + width) / 2), len(slopes) - 1)
    lower = max(round((len(slopes) - width) / 2) - 1, 0)
    return Interval(float(np.median(slopes)), float(slopes[lower]), float(slopes[upper]))


def _signs(y: Floats) -> int:
    """Kendall's S: the number of pairs that rise, less the number that fall."""
    return int(np.sign(_differences(y)).sum())


def _variance(n: int, *series: Floats) -> float:
    """The variance of S: ``(n(n-1)(2n+5) - Σ t(t-1)(2t+5)) / 18``, t the sizes of ties."""

    def term(t: Any) -> Any:
        return t * (t - 1) * (2 * t + 5)

    ties = (np.unique(values, return_counts=True)[1] for values in series)
    return float(term(n) - sum(int(term(sizes).sum()) for sizes in ties)) / 18


def _test(s: int, variance: float) -> Kendall:
    z = float(s - np.sign(s)) / sqrt(variance) if variance else 0.0
    return Kendall(s, z, erfc(abs(z) / sqrt(2)))


def floats(values: Numbers) -> Floats:
    """A one-dimensional array of numbers; raises for anything else, and for NaN."""
    result: Floats = np.asarray(values, dtype=np.float64)
    if result.ndim != 1 or np.isnan(result).any():
        raise ValueError("statistics are of one row of numbers, none of them nan")
    return result


def _pair(x: Numbers, y: Numbers) -> tuple[Floats, Floats]:
    a, b = floats(x), floats(y)
    if len(a) != len(b):
        raise ValueError(f"as many of the one as of the other are needed: {len(a)} and {len(b)}")
    return a, b
