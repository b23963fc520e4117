"""Operators inside which greedy would have to choose more than once.

An element of an argument points to one element of an output: the one with the largest |derivative ·
gradient|, whichever output that belongs to. Where an operator's formula is a single sum, that is
its largest term. Where sums are made of sums (each output summed up, and then both added), the
largest partial sum may be made of small contributions. There the size of the largest single
contribution is found beside the gradient: that is MAX, begun at |gradient| of the outputs, since
two elements of one operator are joined by one weight.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from gradtrace.ir.program import Block, Step
from gradtrace.linops import tiling


class NestedSum(NamedTuple):
    """The part of a block that sums up sums: its steps, in order; the values of the block that they
    take; what they hand on; and the values that nothing else in the block is made of.
    """

    steps: tuple[Step, ...]
    takes: frozenset[int]
    gives: frozenset[int]
    alone: frozenset[int]


def nested(block: Block) -> NestedSum | None:
    """The part of a block in which contributions are summed up more than once on their way; None if
    there is none. The parts of a block that was taken apart are operators, and choose each.
    """
    steps = block.steps
    if block.opened or not steps or (len(steps) == 1 and len(steps[0].terms) == 1):
        return None
    sums: dict[int, int] = {}  # how many sums lie on the way to each value, at most
    for out, terms, _, _ in steps:
        most = 0
        for map_, value in terms:
            most = max(most, sums.get(value, 0) + (not map_.single_source))
        if len(terms) > 1 and tiling([map_ for map_, _ in terms]) is None:
            most += 1
        sums[out] = most
    gives = frozenset(value for value in block.gives.values() if sums.get(value, 0) > 1)
    if not gives:
        return None
    cone = _cone(steps, gives)
    others = _cone(steps, (value for value in block.gives.values() if value not in gives))
    made = {step.out for step in steps}
    return NestedSum(
        tuple(step for step in steps if step.out in cone),
        frozenset(cone - made),
        gives,
        frozenset((cone & made) - others),
    )


def _cone(steps: list[Step], values: Iterable[int]) -> set[int]:
    """These values and all that they are made of."""
    found = set(values)
    for step in reversed(steps):
        if step.out in found:
            found.update(term.value for term in step.terms)
    return found
