"""The values of a program's steps, recomputed segment by segment (checkpointing).

Paths are followed from the leaves to the root, against the order in which values are computed.
Where not all values fit in memory, a first pass keeps the values that are live at the boundary of
two segments of the program; those within a segment are recomputed when one of them is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Generic, Protocol, TypeVar

import torch

from gradtrace.ir.program import MapTable, Program, Step

V = TypeVar("V")
V_co = TypeVar("V_co", covariant=True)


class Values(Protocol[V_co]):
    """A program's values by number."""

    def __getitem__(self, value: int) -> V_co:
        """A value, recomputed if necessary."""

    def __contains__(self, value: object, /) -> bool:
        """Whether a value is in memory, so that reading it recomputes nothing."""


class RecomputedValues(Generic[V]):
    """Values of a program by ``compute(step, maps, values so far)``, in about ``budget`` bytes.

    A segment is as many steps as have values of half the budget. The values kept at its boundaries
    are those that are live there in any backward pass. ``here`` are the values of the segment that
    was read last.
    """

    def __init__(
        self,
        program: Program,
        root: V,
        compute: Callable[[Step, MapTable, dict[int, V]], V],
        budget: int,
    ) -> None:
        self.compute = compute
        self.maps = program.maps
        self.steps = [*program.steps()]
        self.last = program.last_uses
        self.segment_of, self.starts = _segments(self.steps, budget // 2)
        self.kept: dict[int, V] = {program.root: root}
        self.here: dict[int, V] = {}
        self._first_pass()

    def __contains__(self, value: object) -> bool:
        return value in self.kept or value in self.here

    def __getitem__(self, value: int) -> V:
        if value in self.kept:
            return self.kept[value]
        if value not in self.here:
            self.here = {}
            self.here = self._segment(self.segment_of[value])
        return self.here[value]

    def _first_pass(self) -> None:
        for number, end in enumerate(self.starts[1:]):
            found = self._segment(number)
            self.kept.update((v, x) for v, x in found.items() if self.last.get(v, -1) >= end)

    def _segment(self, number: int) -> dict[int, V]:
        """Compute all values of a segment."""
        start, end = self.starts[number : number + 2]
        known, found = _Overlay(self.kept), {}
        with torch.no_grad():
            for step in self.steps[start:end]:
                if step.out not in self.kept:
                    known[step.out] = found[step.out] = self.compute(step, self.maps, known)
        return found


class _Overlay(dict[int, V]):
    """Values of a segment; others are looked up among those that were kept."""

    def __init__(self, kept: Mapping[int, V]) -> None:
        super().__init__()
        self.kept = kept

    def __missing__(self, value: int) -> V:
        return self.kept[value]


def _segments(steps: list[Step], size: int) -> tuple[dict[int, int], list[int]]:
    """Cut steps into segments of at most ``size`` bytes: the segment of each value, and the first
    step of each segment, followed by the number of steps.
    """
    where, starts, taken = {}, [0], 0
    for n, step in enumerate(steps):
        taken += prod(step.shape) * step.dtype.itemsize
        if taken > size and n > starts[-1]:
            starts.append(n)
            taken = prod(step.shape) * step.dtype.itemsize
        where[step.out] = len(starts) - 1
    return where, [*starts, len(steps)]
