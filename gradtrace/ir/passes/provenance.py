"""Pass that finds which components every path, and any path, from a value to the root visits.

Bits are those of ``ComponentBits``. Where a value's *must* and *may* bits are the same, all its
elements have the same provenance: nothing need be compared to know it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_
from typing import NamedTuple

from gradtrace.ir.program import Program, Step


@dataclass(eq=False)
class ComponentBits:
    """Which bits a path gets. Bit 0, which every path has, says that there is one.

    ``block``: for visiting a block. ``position``: for reaching an argument of a block, by (block,
    argument). ``slices``: for the slices of a labelled tensor, (dimension, bits of each slice).
    """

    block: dict[int, int]
    position: dict[tuple[int, int], int]
    slices: dict[int, tuple[int, list[int]]]


NO_COMPONENTS = ComponentBits({}, {}, {})
"""No components: bit 0 alone, whether there is a path."""


class ProvenanceBounds(NamedTuple):
    """By value: the bits that all routes of operators to the root give, and those that any does."""

    must: dict[int, int]
    may: dict[int, int]

    def is_uniform(self, value: int) -> bool:
        """Whether all paths from the value have the same provenance."""
        return self.must[value] == self.may[value]


def analyse_provenance(program: Program, components: ComponentBits) -> ProvenanceBounds:
    """Propagate bits from the root to the leaves, over the structure of the program alone."""
    must, may = {program.root: 1}, {program.root: 1}
    entered, slices, position = components.block, components.slices, components.position
    for number, block in enumerate(program.blocks):
        every = some = entered.get(number, 0)
        if number in slices:
            kinds = slices[number][1]
            every, some = every | reduce(and_, kinds), some | reduce(or_, kinds)
        for value in block.takes.values() if some else ():
            must[value] |= every
            may[value] |= some
        propagate(block.steps, must, may)
        for at, value in block.gives.items() if position else ():
            if (number, at) in position:
                must[value] |= position[number, at]
                may[value] |= position[number, at]
        if block.merges:
            propagate(block.merges, must, may)
    return ProvenanceBounds(must, may)


def propagate(steps: Iterable[Step], must: dict[int, int], may: dict[int, int]) -> None:
    """The bounds of sums: those of any of their terms."""
    for out, terms, _, _ in steps:
        every, some = -1, 0
        for _, value in terms:
            every &= must[value]
            some |= may[value]
        must[out], may[out] = every, some
