"""When a loss is a spike: far above the recent ones, by a rule that a few outliers do not move."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import exp, inf, log, sqrt
from statistics import median
from typing import Any

from gradtrace.training.tuning import (
    LEAST_DEVIATION,
    LIMIT_STEPS,
    SIZE_STEPS,
    SPIKE_WARM_UP,
    SPIKE_WINDOW,
)

NORMAL = 1.4826
"""The standard deviation of a normal distribution over its median absolute deviation."""


class SpikeRule:
    """Compares each loss with the last 100, of which there must be 20.

    A loss is a spike above ``m + factor · s``, where m is the median of the recent losses and s =
    1.4826 times the median of ``|loss - m|``, at least 2.5% of ``|m|``, and above all of them. If
    none of them is negative the same must hold of their logarithms, since losses near 0 have long
    tails. In a batch that is smaller than the largest recent one (of every 16th), s is larger by
    the root of the ratio of their sizes.

    >>> rule = SpikeRule(8.0)
    >>> any(rule.exceeded(2 + 0.01 * (n % 7)) for n in range(50))
    False
    >>> rule.exceeded(3.0), rule.exceeded(2.05)
    ('the loss is 3, the median of the last 50 is 2.03 and the limit 2.479', '')
    """

    def __init__(self, factor: float, size_of: Callable[[Any], int] = int) -> None:
        self.factor, self._size_of = factor, size_of
        self._recent: deque[float] = deque(maxlen=SPIKE_WINDOW)
        self.add = self._recent.append
        self._sizes: deque[int] = deque(maxlen=-(-SPIKE_WINDOW // SIZE_STEPS))
        self._age = self._unsized = 0
        self.below = inf  # smaller losses are no spikes

    def exceeded(self, loss: float, batch: Any = 0) -> str:
        """What is to be said of a loss that is a spike; empty if it is none. ``size_of(batch)`` is
        how large its batch is (0: unknown).
        """
        self._age += 1
        if self._age >= LIMIT_STEPS or self.below == inf:
            self.below, self._age = self.limit(), 0
        said = ""
        if not self._unsized:
            self._sizes.append(self._size_of(batch))
            self._unsized = SIZE_STEPS
        self._unsized -= 1
        if loss > self.below:
            self.below, self._age = self.limit(self._size_of(batch)), LIMIT_STEPS
            if loss > self.below:
                middle, count = median(self._recent), len(self._recent)
                said = (
                    f"the loss is {loss:.4g}, the median of the last {count} is {middle:.4g} and "
                    f"the limit {self.below:.4g}"
                )
        self._recent.append(loss)
        return said

    @property
    def idle(self) -> int:
        """For how many losses below ``below`` it is enough that ``add`` is told of them."""
        if self.below == inf:
            return 0
        return min(LIMIT_STEPS - 1 - self._age, self._unsized)

    def skip(self, count: int) -> None:
        """Count losses of which ``add`` was told."""
        self._age += count
        self._unsized -= count

    def limit(self, size: int = 0) -> float:
        """Above which a loss of a batch of this size is a spike."""
        recent = self._recent
        if len(recent) < SPIKE_WARM_UP:
            return inf
        wider = self.factor * sqrt(max(1.0, max(self._sizes) / size)) if size else self.factor
        middle, deviation = _spread(list(recent))
        found = middle + wider * max(deviation, LEAST_DEVIATION * abs(middle))
        if min(recent) >= 0 and middle > 0:
            least = min(each for each in recent if each > 0)
            middle, deviation = _spread([log(max(each, least)) for each in recent])
            found = max(found, exp(min(700.0, middle + wider * max(deviation, LEAST_DEVIATION))))
        return max(found, *recent)


def _spread(numbers: list[float]) -> tuple[float, float]:
    """The median, and the standard deviation by the median distance from it."""
    middle = median(numbers)
    return middle, NORMAL * median([abs(each - middle) for each in numbers])
