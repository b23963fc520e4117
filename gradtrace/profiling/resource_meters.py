"""Meters of what may grow while a program runs: objects, memory, GC pauses, machine speed."""

from __future__ import annotations

import gc
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from time import perf_counter
from typing import Any, Literal, NamedTuple

from torch import Tensor

from gradtrace.profiling import tuning

Read = Callable[..., float | tuple[float, ...] | None]


@dataclass(frozen=True)
class MeterKind:
    """What a gauge measures, and how much growth is reported.

    Growth is reported if it is at least ``floor`` a step and a share of ``least`` in total. An
    ``exact`` count that is higher at each reading grows, however few readings there are.
    """

    name: str
    unit: Literal["", "bytes", "s"]
    floor: float
    least: float
    exact: bool = False


TENSORS = MeterKind("live tensors", "", 0.01, 0.0, exact=True)
STORAGE = MeterKind("bytes in live tensors", "bytes", 1.0, 0.001, exact=True)
GRAPH = MeterKind("operators in the graph", "", 0.01, 0.0, exact=True)
OBJECTS = MeterKind("live Python objects", "", 0.5, 0.002, exact=True)
RESIDENT = MeterKind("resident memory", "bytes", 100.0, 0.01)
CUDA = MeterKind("CUDA memory", "bytes", 1.0, 0.001)
COLLECTOR = MeterKind("garbage collection a step", "s", 1e-10, 0.05)
LOADING = MeterKind("loading a step", "s", 1e-10, 0.05)
MACHINE = MeterKind("a fixed piece of work", "s", 0.0, 0.03)


class MeterSeries(NamedTuple):
    """The readings of one kind, and their steps."""

    kind: MeterKind
    steps: list[int]
    values: list[float]


class Gauge:
    """Reads one or more kinds at a time, and limits how often.

    After a reading that took c seconds, none is due for c / ``share`` seconds, so that all readings
    take at most that share of the time. ``read`` returns a number for each kind, or None.
    """

    def __init__(self, kinds: Sequence[MeterKind], read: Read, share: float) -> None:
        self._kinds, self._read, self._share = kinds, read, share
        self.due = self.spent = 0.0
        # Arrays, so as not to add to the number of Python objects that is measured.
        self._steps, self._values = array("q"), [array("d") for _ in kinds]

    def take(self, step: int, *args: object) -> None:
        """Take a reading, and set when the next one is due; a step has at most one."""
        begun = perf_counter()
        found = self._read(*args)
        if found is not None and (not self._steps or self._steps[-1] != step):
            self._steps.append(step)
            for series, value in zip(self._values, found if isinstance(found, tuple) else (found,)):
                series.append(value)
        done = perf_counter()
        self.spent += done - begun
        self.due = done + (done - begun) / self._share if self._share else inf

    def series(self) -> Iterator[MeterSeries]:
        """The readings of each kind, if there are any."""
        for kind, values in zip(self._kinds, self._values):
            if self._steps:
                yield MeterSeries(kind, list(self._steps), list(values))


class Pauses:
    """Total time of the garbage collector, in seconds."""

    def __init__(self) -> None:
        self.total = 0.0
        self._begun = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        """The callback in ``gc.callbacks``."""
        now = perf_counter()
        if phase == "start":
            self._begun = now
        elif self._begun:
            self.total += now - self._begun
            self._begun = 0.0

    def __enter__(self) -> Pauses:
        gc.callbacks.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._begun = 0.0
        gc.callbacks[:] = [other for other in gc.callbacks if other is not self]


class Rate:
    """The increase of a total per step since the last call."""

    def __init__(self, total: Callable[[], float], steps: Callable[[], int]) -> None:
        self._total, self._steps = total, steps
        self._before = (total(), steps())

    def __call__(self) -> float | None:
        """``(total - last total) / (steps - last steps)``."""
        now, before = (self._total(), self._steps()), self._before
        if now[1] == before[1]:
            return None
        self._before = now
        return (now[0] - before[0]) / (now[1] - before[1])


# Readings -----------------------------------------------------------------------------------------


def live() -> tuple[int, int, int]:
    """The number of live tensors, their bytes, and the number of live Python objects."""
    tensors, objects = scan()
    return len(tensors), bytes_of(tensors), objects


def scan() -> tuple[list[Tensor], int]:
    """All tensors tracked by the garbage collector, and the number of all tracked objects."""
    objects: list[Any] = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, Tensor)}
    return [it for it in objects if type(it) in kinds], len(objects)


def bytes_of(some: list[Tensor]) -> int:
    """Bytes of storage of some tensors; shared storage counts once."""
    found = {}
    for tensor in some:
        try:
            storage = tensor.untyped_storage()
            found[storage.data_ptr() or id(tensor)] = storage.nbytes()
        except (RuntimeError, ValueError):  # sparse, functional, not yet initialised and such
            continue
    return sum(found.values())


def work() -> float:
    """Seconds that a fixed piece of work takes, to measure the machine's speed."""
    begun = perf_counter()
    sum(range(tuning.WORK_ADDITIONS))
    return perf_counter() - begun
