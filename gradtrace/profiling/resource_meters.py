"""Meters of what may grow while a program runs: objects, memory, GC pauses, machine speed."""

from __future__ import annotations

import gc
import os
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

STATM = Path("/proc/self/statm")
WORK_RANGE = range(2_000)
READ_STEPS_FACTOR = 2
"""Gauges are read at least whenever the number of steps has grown by this factor, ..."""

MAX_READING_SHARE = 0.1
"""... unless readings have taken this share of the time, as they would in a short loop."""


@dataclass(frozen=True)
class MeterKind:
    """What a gauge measures, and how much growth is reported.

    Growth is reported if it is at least ``floor`` a step and a share of ``least`` in total. An
    ``exact`` count that is higher at each reading grows, however few readings there are.
    ``advice`` names likely causes.
    """

    name: str
    unit: str  # "", "bytes" or "s"
    floor: float
    least: float
    advice: str
    exact: bool = False


TENSORS = MeterKind(
    "live tensors",
    "",
    0.01,
    0.0,
    "a list that keeps losses or outputs? keep loss.item() or output.detach() in their place",
    exact=True,
)
STORAGE = MeterKind(
    "bytes in live tensors",
    "bytes",
    1.0,
    0.001,
    "results that are kept from step to step?",
    exact=True,
)
GRAPH = MeterKind(
    "operators in the graph",
    "",
    0.01,
    0.0,
    "a state or a sum of losses that is carried over? detach() it, so that a step's graph ends",
    exact=True,
)
OBJECTS = MeterKind(
    "live Python objects",
    "",
    0.5,
    0.002,
    "lists, dictionaries, hooks or closures that only get more?",
    exact=True,
)
RESIDENT = MeterKind(
    "resident memory",
    "bytes",
    100.0,
    0.01,
    "graphs that are kept alive (losses in a list, retain_graph=True), or a cache?",
)
CUDA = MeterKind(
    "CUDA memory",
    "bytes",
    1.0,
    0.001,
    "losses or outputs that are kept, and their graphs with them?",
)
COLLECTOR = MeterKind(
    "garbage collection a step",
    "s",
    1e-10,
    0.05,
    "the collector looks through all objects that live: what makes them more?",
)
LOADING = MeterKind(
    "loading a step",
    "s",
    1e-10,
    0.05,
    "the loader itself becomes slower; it is not in the time of a step",
)
MACHINE = MeterKind(
    "a fixed piece of work",
    "s",
    0.0,
    0.03,
    "the machine itself becomes slower: other processes, or heat",
)


@dataclass
class Readings:
    """Values of one kind with the steps at which they were read.

    They are stored in arrays, so as not to add to the number of Python objects that is measured.
    """

    kind: MeterKind
    steps: array[int] = field(default_factory=lambda: array("q"), init=False)
    values: array[float] = field(default_factory=lambda: array("d"), init=False)

    def note(self, step: int, value: float) -> None:
        """Record a value, unless there is one for this step."""
        if not self.steps or self.steps[-1] != step:
            self.steps.append(step)
            self.values.append(value)


@dataclass
class Gauge(Readings):
    """A meter that limits how often it is read.

    After a reading that took c seconds, none is due for c / ``share`` seconds, so that all readings
    take at most that share of the time.
    """

    read: Callable[[int], float | None]
    share: float
    due: float = 0.0
    spent: float = 0.0

    def take(self, step: int) -> None:
        """Take a reading, and set when the next one is due."""
        begun = perf_counter()
        value = self.read(step)
        if value is not None:
            self.note(step, value)
        done = perf_counter()
        self.spent += done - begun
        self.due = done + (done - begun) / self.share if self.share else inf


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

    def __init__(self, total: Callable[[], float]) -> None:
        self._total, self._step, self._last = total, 0, total()

    def __call__(self, step: int) -> float | None:
        """``(total - last total) / (step - last step)``."""
        steps, now = step - self._step, self._total()
        if not steps:
            return None
        rate = (now - self._last) / steps
        self._step, self._last = step, now
        return rate


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


def resident() -> int | None:
    """Resident bytes of this process; None if the system does not report them."""
    try:
        return int(STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def cuda() -> int | None:
    """Bytes allocated on all GPUs; None if CUDA is not in use."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return sum(torch.cuda.memory_allocated(at) for at in range(torch.cuda.device_count()))


def work() -> float:
    """Seconds that a fixed piece of work takes, to measure the machine's speed."""
    begun = perf_counter()
    sum(WORK_RANGE)
    return perf_counter() - begun
