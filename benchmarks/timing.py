"""Interleaved timing: every way once, then every way again, and the best of each."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Ways = Mapping[str, Callable[[], object]]


@dataclass(frozen=True)
class Timed:
    """The best time of each way, in seconds; the first is what the others are compared with."""

    seconds: dict[str, float]

    @property
    def baseline(self) -> float:
        """What PyTorch takes."""
        return next(iter(self.seconds.values()))

    def ratio(self, way: str) -> float:
        """How many times PyTorch's time a way takes."""
        return self.seconds[way] / self.baseline


def interleaved(make: Callable[[], Ways], rounds: int) -> Timed:
    """Time each way on what ``make`` prepares anew for every round."""
    best: dict[str, float] = {}
    for _ in range(rounds):
        for name, way in make().items():
            gc.collect()
            start = time.perf_counter()
            result = way()
            taken = time.perf_counter() - start
            del result
            best[name] = min(taken, best.get(name, taken))
    return Timed(best)


def linear_fit(x: list[float], y: list[float]) -> tuple[float, float]:
    """Slope and R² of the least-squares line."""
    n = len(x)
    mean_x, mean_y = sum(x) / n, sum(y) / n
    spread = sum((a - mean_x) ** 2 for a in x)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y)) / spread
    rest = sum((b - mean_y - slope * (a - mean_x)) ** 2 for a, b in zip(x, y))
    return slope, 1 - rest / sum((b - mean_y) ** 2 for b in y)
