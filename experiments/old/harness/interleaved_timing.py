"""Interleaved timing: rounds in which every variant (way) runs once; the best time of each."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from gradtrace.experiments.harness.statistics import steady

Way = Callable[[], Callable[[], object]]
"""A variant to time: prepares, which is not timed, and returns the function that is."""

Ways = Mapping[str, Way]

PATIENCE = 45.0
"""Seconds after which no further round begins."""

Clock = Callable[[Callable[[], object]], float]
"""Runs a function, and returns the seconds it took."""


def wall(run: Callable[[], object]) -> float:
    """Wall-clock seconds of a call; the result is freed after the clock is read."""
    start = time.perf_counter()
    result = run()
    taken = time.perf_counter() - start
    del result
    return taken


@dataclass(frozen=True)
class Timed:
    """The times of each way by round, in seconds; the first way is the baseline."""

    seconds: dict[str, list[float]]

    @property
    def rounds(self) -> int:
        """The number of rounds."""
        return len(self._base)

    @property
    def _base(self) -> list[float]:
        return next(iter(self.seconds.values()))

    @property
    def baseline(self) -> float:
        """The best time of the first way."""
        return min(self._base)

    def best(self, way: str) -> float:
        """The best time of a way."""
        return min(self.seconds[way])

    def ratio(self, way: str) -> float:
        """``best(way) / baseline``."""
        return quotient(self.best(way), self.baseline)

    def middle(self, way: str) -> float:
        """The median time of a way."""
        return median(self.seconds[way])

    def typical(self, way: str) -> float:
        """The median over rounds of the way's time over the baseline's in the same round."""
        return median(quotient(a, b) for a, b in zip(self.seconds[way], self._base))


def quotient(a: float, b: float) -> float:
    """``a / b``; NaN where b is 0: the clock was too coarse for a ratio.

    >>> quotient(3.0, 2.0), quotient(3.0, 0.0)
    (1.5, nan)
    """
    return a / b if b else math.nan


def told(value: float, form: str) -> str:
    """A measured number in a sentence; "?" if it is not finite.

    >>> told(1.25, ".1f"), told(math.nan, ".1f")
    ('1.2', '?')
    """
    return f"{steady(value):{form}}" if math.isfinite(value) else "?"


def interleaved(
    ways: Ways,
    rounds: int,
    *,
    patience: float = PATIENCE,
    collect: bool = True,
    clock: Clock = wall,
) -> Timed:
    """Time each way in turn, for ``rounds`` rounds, or until ``patience`` seconds have passed.

    Garbage is collected before each, unless ``collect`` is False: for functions of a few
    milliseconds, collecting would take longer than what is timed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    begun = time.perf_counter()
    for done in range(rounds):
        if done and time.perf_counter() - begun > patience:
            break
        for name, way in ways.items():
            seconds[name].append(_once(way, collect, clock))
    return Timed(seconds)


def _once(way: Way, collect: bool, clock: Clock) -> float:
    timed = way()
    if collect:
        gc.collect()
    return clock(timed)


@dataclass(frozen=True)
class Fit:
    """The least-squares line through points, ``y = intercept + slope·x``."""

    slope: float
    r2: float
    intercept: float = 0.0


def linear_fit(x: Sequence[float], y: Sequence[float]) -> Fit:
    """``R² = 1 - Σ (y - line)² / Σ (y - mean)²``; 1 where all y are equal, since the line is exact.

    Where all x are equal, or y is not finite, the line is not unique: slope and R² are NaN.

    >>> linear_fit([1, 2, 4], [5, 5, 5])
    Fit(slope=0.0, r2=1.0, intercept=5.0)
    """
    if not all(map(math.isfinite, (*x, *y))):
        return Fit(math.nan, math.nan, math.nan)
    mean_x, mean_y = math.fsum(x) / len(x), math.fsum(y) / len(y)
    spread = math.fsum((a - mean_x) ** 2 for a in x)
    if not spread:
        return Fit(math.nan, math.nan, mean_y)
    slope = math.fsum((a - mean_x) * (b - mean_y) for a, b in zip(x, y)) / spread
    rest = math.fsum((b - mean_y - slope * (a - mean_x)) ** 2 for a, b in zip(x, y))
    whole = math.fsum((b - mean_y) ** 2 for b in y)
    r2 = 1 - rest / whole if whole else 1.0
    return Fit(slope, r2, mean_y - slope * mean_x)


def power_fit(x: Sequence[float], y: Sequence[float]) -> Fit:
    """``y = c·xᵖ`` by least squares of logarithms: the slope is p, the intercept log c.

    >>> fit = power_fit([1, 2, 4], [3, 12, 48])
    >>> round(fit.slope, 9), round(fit.r2, 9)
    (2.0, 1.0)
    """
    return linear_fit([math.log(a) for a in x], [math.log(b) for b in y])
