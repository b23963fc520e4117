"""What may grow while a program runs, read now and then: objects, memory, pauses, the machine."""

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
WORK = range(2_000)
PACE = 2
"""Gauges are read at least whenever there are so many times as many steps as at the last reading,
"""

MOST = 0.1
"""... unless readings have then taken so much of the time: in a short loop they would."""


@dataclass(frozen=True)
class MeterKind:
    """What a gauge tells, and when its growth is worth a word.

    It is if it grows by ``floor`` a step and by a share of ``least`` in all. An ``exact`` count
    that is higher at each reading grows, however few they are. ``advice`` says what may be behind
    it.
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

    Numbers lie in arrays: these must not be more of what is counted.
    """

    kind: MeterKind
    steps: array[int] = field(default_factory=lambda: array("q"), init=False)
    values: array[float] = field(default_factory=lambda: array("d"), init=False)

    def note(self, step: int, value: float) -> None:
        """Take down a value, the first of its step."""
        if not self.steps or self.steps[-1] != step:
            self.steps.append(step)
            self.values.append(value)


@dataclass
class Gauge(Readings):
    """Something that can be read again and again; it paces itself.

    A reading that took c seconds is followed by none for c / ``share`` seconds, so that all of them
    take that share of the time at most.
    """

    read: Callable[[int], float | None]
    share: float
    due: float = 0.0
    spent: float = 0.0

    def look(self, step: int) -> None:
        """Read it."""
        begun = perf_counter()
        value = self.read(step)
        if value is not None:
            self.note(step, value)
        done = perf_counter()
        self.spent += done - begun
        self.due = done + (done - begun) / self.share if self.share else inf


class Pauses:
    """How long the garbage collector took, in all."""

    def __init__(self) -> None:
        self.total = 0.0
        self._begun = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        """What ``gc.callbacks`` calls."""
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
    """What a total has gone up by, a step, since it was last asked for."""

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
    """Every tensor that the garbage collector knows of, and of how many objects it knows."""
    objects: list[Any] = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, Tensor)}
    return [it for it in objects if type(it) in kinds], len(objects)


def bytes_of(some: list[Tensor]) -> int:
    """What these tensors hold on to; memory that several share counts once."""
    found = {}
    for tensor in some:
        try:
            storage = tensor.untyped_storage()
            found[storage.data_ptr() or id(tensor)] = storage.nbytes()
        except (RuntimeError, ValueError):  # sparse, functional, not yet initialised and such
            continue
    return sum(found.values())


def resident() -> int | None:
    """Bytes of this process in memory, where the system tells."""
    try:
        return int(STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def cuda() -> int | None:
    """Bytes that tensors take on all GPUs, if any is in use."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return sum(torch.cuda.memory_allocated(at) for at in range(torch.cuda.device_count()))


def work() -> float:
    """Seconds that a piece of work takes which is always the same."""
    begun = perf_counter()
    sum(WORK)
    return perf_counter() - begun
