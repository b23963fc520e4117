"""How much of a loop's time may go into watching it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import ceil, inf, nan
from statistics import median
from time import perf_counter

RECENT = 101
"""So many steps tell how long one takes."""

MOST = 10
"""The slow-down of a watched step counts up to so many steps; more is something else, such as an
evaluation."""


class Budget:
    """Measures a loop and what watching it takes, and says when the next look can be afforded.

    ``spent`` are the seconds that looks took; ``total`` those since the first step; training is the
    rest. A look that is expected to take as long as the last one is affordable once
    ``spent + last <= share * training``. The first look is always taken.
    """

    def __init__(self, share: float | None, clock: Callable[[], float] = perf_counter) -> None:
        self.share, self.clock = share, clock
        self.spent = 0.0
        self.last = 0.0
        self.recent: deque[float] = deque(maxlen=RECENT)
        self._begun: float | None = None
        self._steps = 0  # that have come to their end
        self._open: float | None = None  # since when time is being spent
        self._own = 0.0  # spent since the last step began

    # Steps ---------------------------------------------------------------------------------------

    def tick(self, now: float, before: float | None, clean: bool = True) -> float | None:
        """A step begins; how long the one before took, without what was spent in it. None if there
        was none, or if something else than a step happened in it, so that it is not ``clean``.
        """
        own, self._own = self._own, 0.0
        if self._begun is None:
            self._begun = now
        else:
            self._steps += 1
        if before is None or not clean:
            return None
        seconds = max(0.0, now - before - own)
        self.recent.append(seconds)
        return seconds

    @property
    def typical(self) -> float:
        """Seconds that a step takes; NaN if nobody knows."""
        return median(self.recent) if self.recent else nan

    def slowed(self, seconds: float | None) -> float:
        """What being watched added to a step that took so long, as far as one can tell."""
        if seconds is None or len(self.recent) < 3:
            return 0.0
        return min(max(0.0, seconds - self.typical), MOST * self.typical)

    # Spending ------------------------------------------------------------------------------------

    def spend(self, seconds: float, within: bool = True) -> None:
        """So much went into watching; ``within`` the time between two ticks, not yet taken off."""
        self.spent += seconds
        if within:
            self._own += seconds

    @property
    def total(self) -> float:
        """Seconds since the first step began."""
        return 0.0 if self._begun is None else self.clock() - self._begun

    @property
    def training(self) -> float:
        """Seconds since then that were not spent."""
        return max(0.0, self.total - self.spent)

    @property
    def used(self) -> float:
        """The share of training time that was spent; NaN if no time of training has passed."""
        return self.ratio if self._steps and self.training else nan

    @property
    def ratio(self) -> float:
        """The same at any time; infinite in the first step, if there was no training time yet."""
        training = self.training
        return self.spent / training if training else (inf if self.spent else nan)

    def wait(self, cost: float | None = None) -> int:
        """In how many steps a look that takes ``cost`` (or as long as the last) is affordable."""
        if self.share is None:
            return 0
        cost = self.last if cost is None else cost
        missing = (self.spent + cost) / self.share - self.training if self.share else inf
        each = self.typical
        if missing <= 0:
            return 0
        if each != each:
            return 1  # too early to tell: look again
        return ceil(missing / each) if missing < each * LATER else LATER


def told(budget: Budget, every: int, step: int) -> str:
    """Why a step that was due is not traced, and what would change that."""
    share = budget.share or 1.0
    rate = max(1, ceil(budget.last / (share * budget.typical))) if budget.typical > 0 else LATER
    often = f"so about one in {rate:,} is affordable" if rate < LATER else "which is too little"
    return (
        f"step {step:,} was due (every={every:,}) and is not traced yet: a trace takes "
        f"{budget.last:.2g} s, a step {budget.typical:.2g} s, and traces may take {share:g} of "
        f"training time (budget={share:g}), {often}. budget=None traces every {every:,} steps; a "
        "larger budget= traces more often"
    )


LATER = 1 << 40
"""More steps than any run has."""
