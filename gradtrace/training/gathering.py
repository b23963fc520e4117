"""What all processes found at the traced steps of a run, written down as it comes.

The first process writes. A step is written when all processes have told of it, or when the next one
is traced; what comes later is written as a further line of that step, which takes the place of the
first. After ``close`` the thread of ``shards`` goes on writing what others send, until all of them
have ended or the program does.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from pathlib import Path

from gradtrace.distributed import rank_exchange
from gradtrace.distributed.rank_exchange import Message, RankExchange
from gradtrace.runs import history
from gradtrace.runs.history import History, StepRecord, Writer
from gradtrace.runs.step_results import StepResult, merged
from gradtrace.training.loggers import Loggers

KEPT = 256
"""So many steps that are not complete are remembered; what is told of older ones is left out."""

GRACE = 2.0
"""Seconds that the end of a run waits for others to tell of the last steps."""


class Gathering:
    """The file of a run, and the looks of steps that some process has yet to tell of."""

    def __init__(self, writer: Writer, loggers: Loggers, others: RankExchange) -> None:
        self.writer, self.loggers, self.shards = writer, loggers, others
        self.base = 0  # what the others' step 0 is here
        self._lock = threading.RLock()
        self._open: dict[
            int, dict[int, str | StepResult]
        ] = {}  # by step and rank; as text to be small
        self._written: set[int] = set()  # of those that are open
        self._unsaid: set[int] = set()  # of those that are open, with a look that the file lacks
        self._ended: set[int] = {0} if others.world > 1 else set()
        self._gone = -1  # steps up to this are forgotten
        self._late: Callable[[], object] | None = None
        self._end: tuple[str, float] = ("", math.nan)
        self._steps = 0
        self._more = False  # whether something came after the end
        self.closed = self.over = False

    # Looks ---------------------------------------------------------------------------------------

    def own(self, step: int, look: StepResult) -> StepRecord:
        """What this process found."""
        with self._lock:
            self._settle(step)  # others may have told of later steps, and of this one
            self._put(step, 0, look)
            if step in self._written or self._complete(step):
                self._write(step)
            self._expect()
            return merged(step, {0: look}, 1)

    def pump(self) -> None:
        """Take what others have told."""
        with self._lock:
            for rank, message in self.shards.heard():
                self._take(rank, message)
            self._expect()
        if self.closed and self.all_ended:
            self.finalise()

    @property
    def all_ended(self) -> bool:
        """Whether no process has anything to tell any more."""
        return self.shards.world == 1 or len(self._ended) == self.shards.world or self._deaf

    @property
    def _deaf(self) -> bool:
        return self.shards.line is None or bool(self.shards.line.failed)

    def _take(self, rank: int, message: Message) -> None:
        if "end" in message:
            self._ended.add(rank)
            self._steps = max(self._steps, self._numbered(message["end"], message))
            for step in [step for step in self._open if self._complete(step)]:
                self._write(step)
        if "look" in message:
            step = self._numbered(message["step"], message)
            self._put(step, rank, json.dumps(message["look"]))
            if step in self._written or self.closed or self._complete(step):
                self._write(step)

    def _numbered(self, step: int, message: Message) -> int:
        """A step's number here: others count from 0 unless they were told numbers."""
        return step if message.get("absolute") else step + self.base

    def _put(self, step: int, rank: int, look: str | StepResult) -> None:
        if step <= self._gone:
            return
        self._open.setdefault(step, {})[rank] = look
        self._unsaid.add(step)
        while len(self._open) > KEPT:
            oldest = min(self._open)
            if oldest in self._unsaid:
                self._write(oldest)
            self._forget(oldest)
            self._gone = max(self._gone, oldest)

    def _complete(self, step: int) -> bool:
        """Whether all processes that have not ended have told of a step."""
        there = self._open.get(step, {})
        others = (rank for rank in range(1, self.shards.world) if rank not in self._ended)
        return all(rank in there for rank in others) and (0 in there or self.closed)

    def _settle(self, before: float = math.inf) -> None:
        """Write what is known of steps, complete or not."""
        for step in sorted(step for step in self._unsaid if step < before):
            self._write(step)

    def _write(self, step: int) -> None:
        looks = {
            rank: look if isinstance(look, StepResult) else StepResult.from_dict(json.loads(look))
            for rank, look in self._open.get(step, {}).items()
        }
        if not looks:
            return
        record = merged(step, looks, self.shards.world)
        self.writer.record(record)
        if self.loggers and step not in self._written:
            self.loggers.log(step, history.scalars(record))
        self._written.add(step)
        self._unsaid.discard(step)
        self._steps = max(self._steps, step + 1)
        self._more = self.closed
        if self._complete(step):
            self._forget(step)
        else:
            self._open[step] = {
                rank: look if isinstance(look, str) else json.dumps(look.to_dict())
                for rank, look in self._open[step].items()
            }

    def _forget(self, step: int) -> None:
        self._open.pop(step, None)
        self._written.discard(step)
        self._unsaid.discard(step)

    def _expect(self) -> None:
        """Look at the store often while others are to tell of steps that were traced here."""
        line = self.shards.line
        if line is not None:
            waiting = any(0 in ranks for ranks in self._open.values())
            line.eager = waiting or self.closed

    # The file ------------------------------------------------------------------------------------

    def times(self, first: int, seconds: list[float | None]) -> None:
        """Write how long steps took."""
        with self._lock:
            self.writer.times(first, seconds)

    def skipped(self, step: int, count: int, every: int, budget: float) -> None:
        """Write how many steps were due and not traced."""
        with self._lock:
            self.writer.skipped(step, count, every, budget)

    def read(self) -> History:
        """All that is known by now."""
        with self._lock:
            self.pump()
            self._settle()
            return self.writer.read()

    def close(self, steps: int, error: str, share: float, late: Callable[[], object]) -> None:
        """Write the end mark. What others tell later is added; ``late`` is called after that."""
        if not error and not self.all_ended:
            rank_exchange.wait(self._quiet, GRACE)
        with self._lock:
            self._steps, self._end = max(self._steps, steps), (error, share)
            self._settle()
            self.closed = True
            self.writer.end(self._steps, error, share)
        if self.all_ended:
            self.finalise()
        elif self.shards.line is not None:
            self._late = late
            LINGERING.append(self)
            self.shards.line.deliver = self.pump
            self.shards.line.eager = True

    def _quiet(self) -> bool:
        self.pump()
        return not any(0 in ranks for ranks in self._open.values()) or self.all_ended

    def finalise(self) -> None:
        """Write what has come, and let go of the file."""
        with self._lock:
            if self.over:
                return
            self.over = True
            self._settle()
            if self._more:
                self.writer.end(self._steps, *self._end)
                if self._late is not None:
                    self._late()
            self.writer.close()
            self._late = None
            if self in LINGERING:
                LINGERING.remove(self)
        self.shards.close()


LINGERING: list[Gathering] = []
"""Runs that have ended here, and of which other processes may have more to tell."""


def release(path: Path) -> None:
    """Let go of a file that another run of this process is about to write to."""
    for one in list(LINGERING):
        if one.writer.path == path:
            one.finalise()


def end_all(seconds: float) -> None:
    """At the end of the program: take what others tell within so many seconds."""
    rank_exchange.wait(lambda: all(one.all_ended for one in LINGERING), seconds)
    for one in list(LINGERING):
        one.pump()
        one.finalise()
