"""The values of a program's steps, all of them kept, or recomputed stretch by stretch.

Paths are followed from the leaves to the root, against the order in which values are computed.
Where not all values fit in memory, those that are alive between two stretches of the program are
kept from a first pass, and what lies within a stretch is computed again when somebody asks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Generic, Protocol, TypeVar

import torch

from gradtrace.ir.program import Program, Step

V = TypeVar("V")
V_co = TypeVar("V_co", covariant=True)


class Values(Protocol[V_co]):
    """What is known of a program's values; ``in`` says whether it is at hand."""

    def __getitem__(self, value: int) -> V_co:
        """What is known of a value."""

    def __contains__(self, value: object, /) -> bool:
        """Whether it takes no work to know it."""


class RecomputedValues(Generic[V]):
    """Values of a program by ``compute(step, values so far)``, in about ``budget`` bytes.

    A stretch is as many steps as have values of half the budget; what is alive between stretches
    is as in any backward pass.
    """

    def __init__(
        self,
        program: Program,
        root: V,
        compute: Callable[[Step, dict[int, V]], V],
        budget: int,
    ) -> None:
        self.compute = compute
        self.steps = [*program.steps()]
        self.last = program.last_uses
        self.where, self.starts = _cut(self.steps, budget // 2)
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
            self.here = self._stretch(self.where[value])
        return self.here[value]

    def _first_pass(self) -> None:
        for number, end in enumerate(self.starts[1:]):
            found = self._stretch(number)
            self.kept.update((v, x) for v, x in found.items() if self.last.get(v, -1) >= end)

    def _stretch(self, number: int) -> dict[int, V]:
        """All values of a stretch."""
        start, end = self.starts[number : number + 2]
        known, found = _Both(self.kept), {}
        with torch.no_grad():
            for step in self.steps[start:end]:
                if step.out not in self.kept:
                    known[step.out] = found[step.out] = self.compute(step, known)
        return found


class _Both(dict[int, V]):
    """Values of a stretch, and behind them those that were kept."""

    def __init__(self, kept: Mapping[int, V]) -> None:
        super().__init__()
        self.kept = kept

    def __missing__(self, value: int) -> V:
        return self.kept[value]


def _cut(steps: list[Step], size: int) -> tuple[dict[int, int], list[int]]:
    """The stretch that each value is in, and where the stretches begin (and the last one ends)."""
    where, starts, taken = {}, [0], 0
    for n, step in enumerate(steps):
        taken += prod(step.shape) * step.dtype.itemsize
        if taken > size and n > starts[-1]:
            starts.append(n)
            taken = prod(step.shape) * step.dtype.itemsize
        where[step.out] = len(starts) - 1
    return where, [*starts, len(steps)]
