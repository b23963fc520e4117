"""Confidence intervals by resampling, and the trends of ``profiling``, for experiments.

Rows are published, and whoever computes tables from them again must find the same digits. The last
bits of a sum depend on the version of Python, on the processor and on the order of its terms; they
decide where values tie, or where a value lies on the border of two roundings (0.075). So sums are
exact (``average``), and what is told is first rounded to 12 digits (``steady``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import exp, floor, fsum, inf, isfinite, isnan, log, log10, nan, sqrt
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from gradtrace.profiling.trend_tests import (
    Floats,
    Interval,
    Trend,
    medians,
    pooled,
    ranks,
    theil_sen,
)
from gradtrace.profiling.tuning import CONFIDENCE_LEVEL

__all__ = [
    "Floats",
    "Interval",
    "Trend",
    "average",
    "bootstrap",
    "geometric",
    "medians",
    "out_of",
    "percentiles",
    "pooled",
    "ranks",
    "resample",
    "steady",
    "student",
    "student_quantile",
    "theil_sen",
    "wilson",
    "with_interval",
]
T = TypeVar("T")
DIGITS = 12


def steady(value: float, size: float = 0.0) -> float:
    """To 12 digits of itself, or of a larger number that it was computed from.

    >>> steady(0.1 + 0.2), steady(0.3 - 0.1 - 0.2, 0.3), steady(inf)
    (0.3, -0.0, inf)
    """
    size = max(abs(value), size)
    known = isfinite(value) and isfinite(size) and size
    return round(float(value), DIGITS - 1 - floor(log10(size))) if known else float(value)


def average(values: Iterable[float]) -> float:
    """The mean, of an exact sum, to 12 digits: equal means compare as equal; nan if there is none.

    >>> average([0.1, 0.7, 0.7]) == average([0.2, 0.6, 0.7]), average([inf, -inf])
    (True, nan)
    """
    found = [float(value) for value in values]
    try:
        return steady(fsum(found) / len(found), max(map(abs, found)))
    except (ValueError, OverflowError, ZeroDivisionError):  # of infinities of both signs, or none
        return nan


def with_interval(found: Sequence[float | None], form: str = ".2f", percent: bool = False) -> str:
    """A value, low and high end as text, as far as they are known; what facts have for an interval.

    >>> with_interval([0.75, 0.671, 0.823]), with_interval([0.7934, 0.7361, 0.8507], percent=True)
    ('0.75 [0.67, 0.82]', '79% [74, 85]')
    >>> with_interval([0.75, None, None]), with_interval([None, None, None])
    ('0.75', 'unknown')
    """
    times, form, unit = (100, ".0f", "%") if percent else (1, form, "")
    value, *ends = (
        None if x is None or not isfinite(x) else format(x * times, form) for x in found
    )
    if value is None:
        return "unknown"
    known = [end for end in ends if end is not None]
    return f"{value}{unit}" + (f" [{', '.join(known)}]" if len(known) == 2 else "")


def wilson(part: int, total: int) -> Interval:
    """A share that was counted, with Wilson's interval; of nothing, none is known.

    >>> wilson(18, 20)
    Interval(value=0.9, low=0.69..., high=0.97...)
    """
    if not total:
        return Interval(nan, -inf, inf)
    z, share = 1.96, part / total
    middle = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z * sqrt(share * (1 - share) / total + z * z / (4 * total**2)) / (1 + z * z / total)
    return Interval(*map(steady, (share, max(middle - half, 0.0), min(middle + half, 1.0))))


def out_of(part: int, total: int) -> str:
    """A count out of what was drawn, with Wilson's interval of its share.

    >>> out_of(18, 20), out_of(0, 39), out_of(0, 0)
    ('18 of 20 [70%, 97%]', '0 of 39 [0%, 9%]', '0 of 0')
    """
    _, low, high = wilson(part, total)
    return f"{part} of {total}" + (f" [{low:.0%}, {high:.0%}]" if total else "")


def bootstrap(
    clusters: Sequence[T],
    statistic: Callable[[Sequence[T]], float],
    *,
    rounds: int = 2000,
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
        return Interval(value, -inf, inf)
    draws = resample(len(clusters), rounds, seed)
    return percentiles(value, np.array([statistic([clusters[i] for i in draw]) for draw in draws]))


def resample(clusters: int, rounds: int = 2000, seed: int = 0) -> npt.NDArray[np.int64]:
    """The indices of the clusters that each round draws: (rounds, clusters)."""
    return np.random.default_rng(seed).integers(clusters, size=(rounds, clusters))


def percentiles(value: float, found: Floats) -> Interval:
    """The central 95% of the rounds' statistics; non-finite ones are left out."""
    found = found[np.isfinite(found)]
    if not len(found):
        return Interval(value, -inf, inf)
    ends = np.quantile(found, [(1 - CONFIDENCE_LEVEL) / 2, (1 + CONFIDENCE_LEVEL) / 2])
    size = float(np.abs(found).max())
    return Interval(*(steady(float(x), size) for x in (value, *ends)))


def student(values: Sequence[float], tests: int = 1) -> Interval:
    """The mean of a few independent values, with Student's interval.

    The bootstrap's is too narrow for a handful. With ``tests`` it is Bonferroni's: 95% for so many
    intervals together. Values that are not finite are left out; of fewer than two the interval is
    infinite.

    >>> student([1.0, 2.0, 3.0])
    Interval(value=2.0, low=-0.48..., high=4.48...)
    """
    size = max((abs(value) for value in values if isfinite(value)), default=0.0)
    return Interval(*(steady(x, size) for x in _student(values, tests)))


def geometric(values: Sequence[float]) -> Interval:
    """The geometric mean of a few independent values, with Student's interval of their logarithms;
    values that have none are left out.

    >>> geometric([1.0, 10.0, 100.0])
    Interval(value=10.0, low=0.03..., high=3048.8...)
    """
    found = _student([log(value) for value in values if value > 0])
    return Interval(*(steady(exp(min(x, 709.0))) for x in found))


def _student(values: Sequence[float], tests: int = 1) -> Interval:
    found = np.array([value for value in values if isfinite(value)])
    if not len(found):
        return Interval(nan, -inf, inf)
    value = fsum(found) / len(found)
    if len(found) < 2:
        return Interval(value, -inf, inf)
    half = student_quantile(1 - (1 - CONFIDENCE_LEVEL) / (2 * tests), len(found) - 1)
    half *= float(found.std(ddof=1)) / len(found) ** 0.5
    return Interval(value, value - half, value + half)


def student_quantile(share: float, freedom: int) -> float:
    """The quantile of Student's distribution: by ``t = √n tan θ`` its density is cosⁿ⁻¹ θ."""
    angle = np.linspace(-np.pi / 2, np.pi / 2, 100_001)
    density = np.cos(angle) ** (freedom - 1)
    sums = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return float(freedom**0.5 * np.tan(np.interp(share, sums / sums[-1], angle)))
