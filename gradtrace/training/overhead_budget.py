"""The overhead budget: which share of a training loop's time tracing may take."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import ceil, inf, nan
from statistics import median
from time import perf_counter

RECENT_STEPS = 101
"""The typical step time is the median of this many recent steps."""

MAX_SLOWDOWN_STEPS = 10
"""The slow-down of a watched step is counted up to this many typical steps; anything longer has
another cause, such as an evaluation."""


class Budget:
    """Measures a training loop and its tracing overhead, and says when a trace is affordable.

    ``spent`` is the seconds that traces took, ``total`` the seconds since the first step began, and
    ``training = total - spent``. A trace is expected to take as long as the last one; it is
    affordable once ``spent + last <= share * training``. The first trace is always taken.
    """

    def __init__(self, share: float | None, clock: Callable[[], float] = perf_counter) -> None:
        self.share, self.clock = share, clock
        self.spent = 0.0
        self.last = 0.0
        self.recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._begun: float | None = None
        self._steps = 0  # finished steps
        self._open: float | None = None  # since when time is being spent
        self._own = 0.0  # seconds spent since the last step began

    # Steps ---------------------------------------------------------------------------------------

    def tick(self, now: float, before: float | None, clean: bool = True) -> float | None:
        """Begin a step at time ``now``; the seconds that the previous one took, without tracing.

        ``before`` is when the previous step began. None if there was none, or if it was not
        ``clean``: something other than a training step happened in it.
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
        """The median seconds of recent steps; NaN before any was measured."""
        return median(self.recent) if self.recent else nan

    def slowed(self, seconds: float | None) -> float:
        """An estimate of the seconds that being watched added to a step that took ``seconds``."""
        if seconds is None or len(self.recent) < 3:
            return 0.0
        return min(max(0.0, seconds - self.typical), MAX_SLOWDOWN_STEPS * self.typical)

    # Spending ------------------------------------------------------------------------------------

    def spend(self, seconds: float, within: bool = True) -> None:
        """Count seconds as overhead.

        ``within``: they fall between two ticks, so the next tick has to subtract them.
        """
        self.spent += seconds
        if within:
            self._own += seconds

    @property
    def total(self) -> float:
        """Seconds since the first step began."""
        return 0.0 if self._begun is None else self.clock() - self._begun

    @property
    def training(self) -> float:
        """Seconds since the first step began, without overhead."""
        return max(0.0, self.total - self.spent)

    @property
    def used(self) -> float:
        """Overhead as a share of training time; NaN before the first step has ended."""
        return self.ratio if self._steps and self.training else nan

    @property
    def ratio(self) -> float:
        """Like ``used``, but at any time; infinite while there was overhead and no training."""
        training = self.training
        return self.spent / training if training else (inf if self.spent else nan)

    def wait(self, cost: float | None = None) -> int:
        """In how many steps a trace of ``cost`` seconds (default: of the last) is affordable."""
        if self.share is None:
            return 0
        cost = self.last if cost is None else cost
        missing = (self.spent + cost) / self.share - self.training if self.share else inf
        each = self.typical
        if missing <= 0:
            return 0
        if each != each:
            return 1  # no step was timed yet: ask again at the next one
        return ceil(missing / each) if missing < each * MAX_RUN_STEPS else MAX_RUN_STEPS


def deferral_message(budget: Budget, every: int, step: int) -> str:
    """Why a step that was due is not traced, and what would change that."""
    share = budget.share or 1.0
    rate = (
        max(1, ceil(budget.last / (share * budget.typical)))
        if budget.typical > 0
        else MAX_RUN_STEPS
    )
    often = (
        f"so about one in {rate:,} is affordable" if rate < MAX_RUN_STEPS else "which is too little"
    )
    return (
        f"step {step:,} was due (every={every:,}) and is not traced yet: a trace takes "
        f"{budget.last:.2g} s, a step {budget.typical:.2g} s, and traces may take {share:g} of "
        f"training time (budget={share:g}), {often}. budget=None traces every {every:,} steps; a "
        "larger budget= traces more often"
    )


MAX_RUN_STEPS = 1 << 40
"""More steps than any run has, for "never"."""
