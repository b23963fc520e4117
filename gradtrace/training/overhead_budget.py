"""The overhead budget: which share of a training loop's time tracing may take."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import ceil, inf, nan
from statistics import median
from time import perf_counter

from gradtrace.training.tuning import MAX_RUN_STEPS, MAX_SLOWDOWN_STEPS, RECENT_STEPS


class Budget:
    """Measures a training loop and its tracing overhead, and says when a trace is affordable.

    ``spent`` is the seconds that traces took, ``total`` the seconds since the first step began, and
    ``training = total - spent``. A trace is expected to take as long as the last one; it is
    affordable once ``spent + last <= share * training``. The first trace is always taken.
    """

    def __init__(self, share: float | None, clock: Callable[[], float] = perf_counter) -> None:
        self.share, self.clock = share, clock
        self.spent = self.last = 0.0
        self.recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._begun: float | None = None  # when the first step began
        self._ticked: float | None = None  # when this step began
        self._own = 0.0  # seconds spent since then
        self._ended = False  # whether a step has ended

    def tick(self, now: float, clean: bool = True) -> float | None:
        """Begin a step at time ``now``; the seconds that the previous one took, without tracing.

        None if there was none, or if it was not ``clean``: something other than a training step
        happened in it.
        """
        before, own = self._ticked, self._own
        self._ticked, self._own = now, 0.0
        if before is None:
            self._begun = now
            return None
        self._ended = True
        if not clean:
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
    def ratio(self) -> float:
        """Overhead over training time; infinite while there was overhead and no training."""
        training = self.training
        return self.spent / training if training else (inf if self.spent else nan)

    @property
    def used(self) -> float:
        """The same; NaN before the first step has ended."""
        return self.ratio if self._ended and self.training else nan

    def wait(self, cost: float | None = None) -> int:
        """In how many steps a trace of ``cost`` seconds (default: of the last) is affordable."""
        if self.share is None:
            return 0
        missing = (self.spent + (self.last if cost is None else cost)) / self.share - self.training
        if missing <= 0:
            return 0
        if not self.recent:
            return 1  # no step was timed yet: ask again at the next one
        each = self.typical
        return ceil(missing / each) if missing < each * MAX_RUN_STEPS else MAX_RUN_STEPS

    def deferral_message(self, every: int, step: int) -> str:
        """Why a step that was due is not traced, and what would change that."""
        share, each, rate = self.share or 1.0, self.typical, MAX_RUN_STEPS
        if each > 0:
            rate = max(1, ceil(self.last / (share * each)))
        affordable = f"so about one in {rate:,} is affordable"
        return (
            f"step {step:,} was due (every={every:,}) and is not traced yet: a trace takes "
            f"{self.last:.2g} s, a step {each:.2g} s, and traces may take {100 * share:g}% of "
            f"training time (budget={share:g}), "
            f"{affordable if rate < MAX_RUN_STEPS else 'which is too little'}. "
            f"budget=None traces every {every:,} steps; a larger budget= traces more often"
        )
