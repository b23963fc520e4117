"""Collects the results of all processes at the traced steps of a run and writes them to its file.

Rank 0 writes. A step is written when all processes have sent their result, or when the next step is
traced. A result that arrives later is written as a further line of its step, which replaces the
earlier line. After ``close`` the thread of ``shards`` goes on writing what other processes send,
until all of them have ended or the program does.
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

MAX_INCOMPLETE_STEPS = 256
"""The most incomplete steps kept in memory; results of older steps are dropped."""

GRACE_SECONDS = 2.0
"""Seconds that the end of a run waits for other processes' results of the last steps."""


class Gathering:
    """The file of a run, and the results of steps that are still missing from some process."""

    def __init__(self, writer: Writer, loggers: Loggers, others: RankExchange) -> None:
        self.writer, self.loggers, self.shards = writer, loggers, others
        self.base = 0  # the number on this process of the other processes' step 0
        self._lock = threading.RLock()
        self._open: dict[
            int, dict[int, str | StepResult]
        ] = {}  # by step and rank; as JSON text, which takes less memory
        self._written: set[int] = set()  # open steps that have a line in the file
        self._unwritten: set[int] = set()  # open steps with a result that is not in the file
        self._ended: set[int] = {0} if others.world > 1 else set()
        self._dropped_up_to = -1  # steps up to this one are no longer kept
        self._after_late_results: Callable[[], object] | None = None
        self._end: tuple[str, float] = ("", math.nan)
        self._steps = 0
        self._wrote_after_close = False  # whether a result was written after ``close``
        self.closed = self.over = False

    # Results -------------------------------------------------------------------------------------

    def add_own(self, step: int, result: StepResult) -> StepRecord:
        """Add the result of this process (rank 0), and return it as a record by itself."""
        with self._lock:
            self._write_pending(step)  # others may have sent results of this step and of later ones
            self._put(step, 0, result)
            if step in self._written or self._complete(step):
                self._write(step)
            self._set_polling()
            return merged(step, {0: result}, 1)

    def pump(self) -> None:
        """Take the messages that other processes have sent."""
        with self._lock:
            for rank, message in self.shards.received():
                self._take(rank, message)
            self._set_polling()
        if self.closed and self.all_ended:
            self.finalise()

    @property
    def all_ended(self) -> bool:
        """Whether no further message can arrive: all processes ended, or the connection failed."""
        return self.shards.world == 1 or len(self._ended) == self.shards.world or self._disconnected

    @property
    def _disconnected(self) -> bool:
        return self.shards.thread is None or bool(self.shards.thread.failed)

    def _take(self, rank: int, message: Message) -> None:
        if "end" in message:
            self._ended.add(rank)
            self._steps = max(self._steps, self._numbered(message["end"], message))
            for step in [step for step in self._open if self._complete(step)]:
                self._write(step)
        if "result" in message:
            step = self._numbered(message["step"], message)
            self._put(step, rank, json.dumps(message["result"]))
            if step in self._written or self.closed or self._complete(step):
                self._write(step)

    def _numbered(self, step: int, message: Message) -> int:
        """A step's number on this process: others count from 0 unless they send absolute ones."""
        return step if message.get("absolute") else step + self.base

    def _put(self, step: int, rank: int, result: str | StepResult) -> None:
        if step <= self._dropped_up_to:
            return
        self._open.setdefault(step, {})[rank] = result
        self._unwritten.add(step)
        while len(self._open) > MAX_INCOMPLETE_STEPS:
            oldest = min(self._open)
            if oldest in self._unwritten:
                self._write(oldest)
            self._forget(oldest)
            self._dropped_up_to = max(self._dropped_up_to, oldest)

    def _complete(self, step: int) -> bool:
        """Whether all processes that have not ended have sent their result of a step."""
        known = self._open.get(step, {})
        others = (rank for rank in range(1, self.shards.world) if rank not in self._ended)
        return all(rank in known for rank in others) and (0 in known or self.closed)

    def _write_pending(self, before: float = math.inf) -> None:
        """Write the unwritten results of steps below ``before``, complete or not."""
        for step in sorted(step for step in self._unwritten if step < before):
            self._write(step)

    def _write(self, step: int) -> None:
        results = {
            rank: result
            if isinstance(result, StepResult)
            else StepResult.from_dict(json.loads(result))
            for rank, result in self._open.get(step, {}).items()
        }
        if not results:
            return
        record = merged(step, results, self.shards.world)
        self.writer.record(record)
        if self.loggers and step not in self._written:
            self.loggers.log(step, history.scalars(record))
        self._written.add(step)
        self._unwritten.discard(step)
        self._steps = max(self._steps, step + 1)
        self._wrote_after_close = self.closed
        if self._complete(step):
            self._forget(step)
        else:
            self._open[step] = {
                rank: result if isinstance(result, str) else json.dumps(result.to_dict())
                for rank, result in self._open[step].items()
            }

    def _forget(self, step: int) -> None:
        self._open.pop(step, None)
        self._written.discard(step)
        self._unwritten.discard(step)

    def _set_polling(self) -> None:
        """Poll the store often while results are missing for steps that were traced here."""
        thread = self.shards.thread
        if thread is not None:
            waiting = any(0 in ranks for ranks in self._open.values())
            thread.eager = waiting or self.closed

    # The file ------------------------------------------------------------------------------------

    def times(self, first: int, seconds: list[float | None]) -> None:
        """Write how long consecutive steps took, in seconds, from step ``first`` on."""
        with self._lock:
            self.writer.times(first, seconds)

    def skipped(self, step: int, count: int, every: int, budget: float) -> None:
        """Write how many steps were due after ``step`` and not traced."""
        with self._lock:
            self.writer.skipped(step, count, every, budget)

    def read(self) -> History:
        """The history of all results received so far."""
        with self._lock:
            self.pump()
            self._write_pending()
            return self.writer.read()

    def close(self, steps: int, error: str, share: float, late: Callable[[], object]) -> None:
        """Write the end line. Results that arrive later are appended; ``late`` is called after."""
        if not error and not self.all_ended:
            rank_exchange.wait(self._nothing_awaited, GRACE_SECONDS)
        with self._lock:
            self._steps, self._end = max(self._steps, steps), (error, share)
            self._write_pending()
            self.closed = True
            self.writer.end(self._steps, error, share)
        if self.all_ended:
            self.finalise()
        elif self.shards.thread is not None:
            self._after_late_results = late
            LINGERING.append(self)
            self.shards.thread.deliver = self.pump
            self.shards.thread.eager = True

    def _nothing_awaited(self) -> bool:
        self.pump()
        return not any(0 in ranks for ranks in self._open.values()) or self.all_ended

    def finalise(self) -> None:
        """Write what has arrived, and close the file and the connection."""
        with self._lock:
            if self.over:
                return
            self.over = True
            self._write_pending()
            if self._wrote_after_close:
                self.writer.end(self._steps, *self._end)
                if self._after_late_results is not None:
                    self._after_late_results()
            self.writer.close()
            self._after_late_results = None
            if self in LINGERING:
                LINGERING.remove(self)
        self.shards.close()


LINGERING: list[Gathering] = []
"""Runs closed on this process for which other processes may still send results."""


def release(path: Path) -> None:
    """Close a file that another run of this process is about to write to."""
    for one in list(LINGERING):
        if one.writer.path == path:
            one.finalise()


def end_all(seconds: float) -> None:
    """At program exit: wait up to ``seconds`` for other processes' results, then close all runs."""
    rank_exchange.wait(lambda: all(one.all_ended for one in LINGERING), seconds)
    for one in list(LINGERING):
        one.pump()
        one.finalise()
