"""Collects the results of all processes at the traced steps of a run and writes them to its file.

Rank 0 writes. A step is written when all processes have sent their result, or when the next step is
traced. A result that arrives later is written as a further line of its step, which replaces the
earlier line. After ``close`` the thread of ``others`` goes on writing what other processes send,
until all of them have ended or the program does.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gradtrace.distributed.rank_exchange import Message, RankExchange
from gradtrace.runs.history import History, StepIncident, StepRecord
from gradtrace.runs.step_results import StepResult, merged
from gradtrace.runs.writer import Writer
from gradtrace.training.loggers import Loggers

MAX_INCOMPLETE_STEPS = 256
"""The most incomplete steps kept in memory; results of older steps are dropped."""

GRACE_SECONDS = 2.0
"""Seconds that the end of a run waits for other processes' results of the last steps."""

POLL_SECONDS = 0.01
"""Seconds between two looks at what has arrived, while such an end waits."""


@dataclass
class OpenStep:
    """The results of a step by rank; JSON text, which takes less memory, if it waits for others."""

    results: dict[int, str | StepResult] = field(default_factory=dict)
    in_file: bool = False
    unwritten: bool = False  # whether a result is not in the file


class Gathering:
    """The file of a run, and the results of steps that are still missing from some process."""

    def __init__(self, writer: Writer, loggers: Loggers, others: RankExchange) -> None:
        self.writer, self.loggers, self.others = writer, loggers, others
        self.base = 0  # the number on this process of the other processes' step 0
        self.closed = self.over = False
        self._lock = threading.RLock()
        self._open: dict[int, OpenStep] = {}
        self._ended = {0}
        self._dropped_up_to = -1  # steps up to this one are no longer kept
        self._after_late_results: Callable[[], object] | None = None
        self._end: tuple[str, float] = ("", math.nan)
        self._steps = 0
        self._wrote_after_close = False

    # Results -------------------------------------------------------------------------------------

    def add_own(self, step: int, result: StepResult) -> StepRecord:
        """Add the result of this process (rank 0), and return it as a record by itself."""
        with self._lock:
            self._write_pending(step)  # others may have sent results of this step and of later ones
            self._put(step, 0, result)
            return merged(step, {0: result}, 1)

    def pump(self) -> None:
        """Take the messages that other processes have sent."""
        with self._lock:
            for rank, message in self.others.received():
                self._take(rank, message)
        if self.closed and self.all_ended:
            self.finalise()

    @property
    def all_ended(self) -> bool:
        """Whether no further message can arrive: all processes ended, or the connection failed."""
        return len(self._ended) == self.others.world or bool(self.others.failed)

    def _take(self, rank: int, message: Message) -> None:
        if "end" in message:
            self._steps = max(self._steps, self._numbered(message["end"], message))
        if "end" in message or "gone" in message:
            self._ended.add(rank)
            for step in [step for step in self._open if self._complete(step)]:
                self._write(step)
        if "incident" in message:
            step = self._numbered(message["step"], message)
            self.note(StepIncident(**{**message["incident"], "step": step}))
        elif "result" in message:
            step = self._numbered(message["step"], message)
            self._put(step, rank, json.dumps(message["result"]))

    def note(self, found: StepIncident) -> None:
        """Write that a trigger fired, on this process or another."""
        with self._lock:
            self.writer.incident(found)
            self._wrote_after_close |= self.closed

    def _numbered(self, step: int, message: Message) -> int:
        """A step's number on this process: others count from 0 unless they send absolute ones."""
        return step if message.get("absolute") else step + self.base

    def _put(self, step: int, rank: int, result: str | StepResult) -> None:
        if step <= self._dropped_up_to:
            return
        found = self._open.setdefault(step, OpenStep())
        found.results[rank] = result
        found.unwritten = True
        if found.in_file or self.closed or self._complete(step):
            self._write(step)
        while len(self._open) > MAX_INCOMPLETE_STEPS:
            self._dropped_up_to = min(self._open)
            self._write(self._dropped_up_to)
            self._open.pop(self._dropped_up_to, None)

    def _complete(self, step: int) -> bool:
        """Whether all processes that have not ended have sent their result of a step."""
        known = self._open[step].results.keys()
        running = set(range(1, self.others.world)) - self._ended
        return known >= running and (0 in known or self.closed)

    def _write_pending(self, before: float = math.inf) -> None:
        """Write the unwritten results of steps below ``before``, complete or not."""
        for step in sorted(n for n, found in self._open.items() if found.unwritten and n < before):
            self._write(step)

    def _write(self, step: int) -> None:
        """Write the results of a step that are not written; forget it if it is complete."""
        found = self._open[step]
        if found.unwritten:
            record = merged(
                step, {n: _result(each) for n, each in found.results.items()}, self.others.world
            )
            self.writer.record(record)
            if self.loggers and not found.in_file:
                self.loggers.log(record)
            found.in_file, found.unwritten = True, False
            self._steps = max(self._steps, step + 1)
            self._wrote_after_close |= self.closed
        if self._complete(step):
            del self._open[step]
        else:
            found.results = {n: _text(each) for n, each in found.results.items()}

    # The file ------------------------------------------------------------------------------------

    def read(self) -> History:
        """The history of all results received so far."""
        with self._lock:
            self.pump()
            self._write_pending()
            return self.writer.read()

    def close(self, steps: int, error: str, share: float, late: Callable[[], object]) -> None:
        """Write the end line. Results that arrive later are appended; ``late`` is called after."""
        if not error and not self.all_ended:
            wait(self._nothing_awaited, GRACE_SECONDS)
        with self._lock:
            self._steps, self._end = max(self._steps, steps), (error, share)
            self._write_pending()
            self.closed = True
            self.writer.end(self._steps, error, share)
        if self.all_ended:
            self.finalise()
        else:
            self._after_late_results = late
            LINGERING.append(self)
            self.others.notify = self.pump
            self.pump()  # what has arrived meanwhile

    def _nothing_awaited(self) -> bool:
        self.pump()
        return self.all_ended or not any(0 in found.results for found in self._open.values())

    def finalise(self) -> None:
        """Write what has arrived, and close the file and the connection; called again, write what
        could not be written before.
        """
        with self._lock:
            over, self.over = self.over, True
            if not over:
                self._write_late()
            lingers = not self.writer.close()
            if lingers and self not in LINGERING:
                LINGERING.append(self)
            elif not lingers and self in LINGERING:
                LINGERING.remove(self)
        if not over:
            self.others.close(GRACE_SECONDS)

    def _write_late(self) -> None:
        """Write what has arrived since ``close``, and end the run again."""
        self._write_pending()
        if self._wrote_after_close:
            self.writer.end(self._steps, *self._end)
            if self._after_late_results is not None:
                self._after_late_results()
        self._after_late_results = self.others.notify = None


LINGERING: list[Gathering] = []
"""Runs closed on this process for which other processes may still send results, or of which lines
are not on disk.
"""


def release(path: Path) -> None:
    """Close a file that another run of this process is about to write to."""
    for one in list(LINGERING):
        if one.writer.path == path:
            one.finalise()
            one.writer.abandon()  # also if its lines still cannot be written
            if one in LINGERING:
                LINGERING.remove(one)


def end_all(seconds: float) -> None:
    """At program exit: wait up to ``seconds`` for other processes' results, then close all runs."""
    wait(lambda: all(one.all_ended for one in LINGERING), seconds)
    for one in list(LINGERING):
        one.pump()
        one.finalise()


def wait(until: Callable[[], bool], seconds: float) -> None:
    """Poll ``until`` for at most ``seconds``."""
    last = time.monotonic() + seconds
    while not until() and time.monotonic() < last:
        time.sleep(POLL_SECONDS)


def _result(found: str | StepResult) -> StepResult:
    return StepResult.from_dict(json.loads(found)) if isinstance(found, str) else found


def _text(found: str | StepResult) -> str:
    return found if isinstance(found, str) else json.dumps(found.to_dict())
