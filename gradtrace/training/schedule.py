"""The numbers of a run's steps, and which of them are traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, isnan
from typing import Any

from gradtrace.distributed.rank_exchange import RankExchange
from gradtrace.distributed.tuning import MESSAGE_SECONDS
from gradtrace.errors import caution
from gradtrace.training import tuning
from gradtrace.training.gathering import Gathering
from gradtrace.training.overhead_budget import Budget
from gradtrace.training.tuning import MAX_RUN_STEPS


class StepTimes:
    """How long steps took, until they are written; ``write(first, seconds)`` writes them."""

    def __init__(self, write: Callable[[int, Sequence[float | None]], object] | None) -> None:
        self._write = write
        self._seconds: list[float | None] = []
        self._first = 0

    def add(self, step: int, seconds: float | None) -> None:
        """Add a step; None if it does not count."""
        if self._first + len(self._seconds) != step:
            self.flush()
            self._first = step
        self._seconds.append(seconds)
        if len(self._seconds) >= tuning.FLUSH_STEPS:
            self.flush()

    def __len__(self) -> int:
        return len(self._seconds)

    def flush(self) -> None:
        """Write all that are not written."""
        if self._write is not None:
            self._write(self._first, self._seconds)
        self._first += len(self._seconds)
        self._seconds = []


class StepClock:
    """Records how long steps took: of many at a time, of which only the beginning was noted, or
    (``most`` is 0) of each at once, as where other processes listen.
    """

    def __init__(self, budget: Budget, times: StepTimes, schedule: Schedule, most: int) -> None:
        self.began: list[tuple[int | None, float]] = []  # the step before, and when one began
        self._budget, self._times, self._schedule, self._most = budget, times, schedule, most

    @property
    def room(self) -> int:
        """How many more steps are only noted."""
        return self._most - len(self.began)

    def tick(self, now: float, clean: bool) -> float | None:
        """Record how long the previous step took; ``now`` is when this one began."""
        self.count()
        return self._add(self._schedule.last, self._budget.tick(now, clean))

    def count(self) -> None:
        """Record how long the steps took of which only the beginning was noted."""
        if self.began:
            for last, now in self.began:
                self._add(last, self._budget.tick(now))
            self.began.clear()

    def _add(self, last: int | None, took: float | None) -> float | None:
        if last is not None:
            self._times.add(self._schedule.base + last, took)
        return took


class Schedule:
    """Counts steps from 0, and traces one in ``every``, or the first after it that is affordable.

    ``base`` is the number of step 0 in the run. Of several processes, rank 0 decides some steps
    ahead on the next trace, so that the others receive its step in time.
    """

    def __init__(self, every: int, accumulate: int, budget: Budget, exchange: RankExchange) -> None:
        self.every, self.accumulate, self.base = every, accumulate, 0
        self.at = 0  # the current step
        self.micro = 0  # its current backward pass
        self.last: int | None = None  # the step of the last backward pass
        self.due = 0  # the next step to trace
        self.traces, self.traced_at = 0, 0  # how many there were, and the step of the last
        self._budget, self._exchange = budget, exchange
        self._numbered = False  # whether steps have numbers of their own, given to ``jump``
        self._lead = 0  # how many steps ahead the next trace is decided
        self._announced = self._warned = self._disconnected = False

    @property
    def number(self) -> int:
        """The number of the current step in the run."""
        return self.base + self.at

    def jump(self, number: int) -> bool:
        """Go to the step of this number; whether it is another one."""
        self._numbered = True
        at = number - self.base
        if at == self.at:
            return False
        self.at, self.micro = at, int(at == self.last)
        return True

    def advance(self) -> bool:
        """Advance to the next backward pass; False if that is surely not to be traced."""
        self.micro += 1
        if self.micro >= self.accumulate:
            self.micro = 0
            self.at += 1
        return not self.micro and self.at >= self.due - self._lead

    @property
    def idle(self) -> int:
        """How many steps of one backward pass each are surely not traced; 0 if they have more."""
        return self.due - self._lead - 1 - self.at if self.accumulate == 1 else 0

    def decide(self) -> bool:
        """Whether the current backward pass is to be traced."""
        if self.micro or self.at < self.due - self._lead:
            return False
        if self.traces and self._budget.share is not None and self._exchange.first:
            self._defer()
        return self.at >= self.due

    def _defer(self) -> None:
        """Defer the next trace until it is affordable, and send its step to the other processes."""
        wait = self._budget.wait()
        if wait > self._lead or not self._lead:
            self.due = max(self.due, self.at + wait)
            late = self.at >= self.traced_at + self.every
            if wait and late and not self._warned and not isnan(self._budget.typical):
                self._warned = True
                missed = self.base + self.traced_at + self.every
                caution(self._budget.deferral_message(self.every, missed))
        elif not self._announced:
            self.due = max(self.due, self.at + self._lead)
            self._announced = True
            self._exchange.send({"due": self.due + self._offset})

    def traced(self) -> None:
        """Note that the current step is traced, and when the next one is due."""
        self.traces += 1
        self.traced_at = self.at
        self.due = self.at + self.every
        self._announced = False
        if self._exchange.world == 1 or self._budget.share is None:
            return
        if not self._exchange.first:
            self.due = MAX_RUN_STEPS  # until rank 0 sends the step
            return
        each = self._budget.typical
        self._lead = 2 if isnan(each) else 1 + ceil(MESSAGE_SECONDS / (each or 1))

    @property
    def skipped(self) -> int:
        """How many steps were due since the last trace and not traced, for lack of budget."""
        if self._budget.share is None or not self.traces:
            return 0
        return max(0, (self.at - 1 - self.traced_at) // self.every)

    def note_skipped(self, gathering: Gathering | None) -> None:
        """Write how many steps were due since the last trace and not traced, on rank 0."""
        if gathering is not None and self._budget.share is not None and self.skipped:
            traced = self.base + self.traced_at
            gathering.writer.skipped(traced, self.skipped, self.every, self._budget.share)

    # Messages ------------------------------------------------------------------------------------

    @property
    def _offset(self) -> int:
        """What is added to steps in messages: these count from 0 unless steps have numbers."""
        return self.base if self._numbered else 0

    def message(self, field: str, number: int | None = None) -> dict[str, Any]:
        """A message with a step in a field, for rank 0: that of ``number``, or the current one."""
        absolute = {"absolute": True} if self._numbered else {}
        at = self.at if number is None else number - self.base
        return {field: at + self._offset, **absolute}

    def listen(self, gathering: Gathering | None) -> None:
        """Take the messages of other processes; warn once if they cannot be reached."""
        others, budget = self._exchange, self._budget
        if others.failed and not self._disconnected:
            self._disconnected = True
            caution(
                f"process {others.rank} cannot reach the others any more ({others.failed}); "
                "training goes on, and what they find is not added up"
            )
        if not others.inbox:
            return
        if gathering is not None:
            begun = budget.clock()
            gathering.pump()
            budget.spend(budget.clock() - begun)
            return
        for _, message in others.received():
            if "first" in message and not self._numbered:
                self.base = message["first"]
            if "due" in message:
                # A step that has passed is traced now: processes may be at different steps.
                self.due = max(self.at, message["due"] - self._offset)
