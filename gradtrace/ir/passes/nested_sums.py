"""Find operators whose formula is a sum of sums, where a rule would select more than once.

The rules that go by gradients (greedy, edge) connect an element of an argument to one element of an
output: the one with the largest |derivative · gradient|, over all outputs. Where an operator's
formula is a single sum, that is its largest term. Where it is a sum of sums (each output summed,
then both added), the largest partial sum may consist of small contributions. There the largest
single contribution is computed besides the gradient: this is MAX started at |gradient| of the
outputs, which is exact because two elements of one operator are connected by one weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gradtrace.ir.program import Block, MapTable, Step
from gradtrace.linops import tiling


class NestedSum(NamedTuple):
    """The part of a block that computes sums of sums: its steps, in order; the values that they
    read from outside; the results that are sums of sums; and the values that no other result of the
    block depends on.
    """

    steps: tuple[Step, ...]
    takes: frozenset[int]
    gives: frozenset[int]
    alone: frozenset[int]


def nested(block: Block, maps: MapTable) -> NestedSum | None:
    """The part of a block in which contributions pass through more than one sum; None if there is
    none. In a decomposed block each step is an operator that selects by itself, so it has none.
    """
    steps = block.steps
    if block.opened or not steps or (len(steps) == 1 and len(steps[0].terms) == 1):
        return None
    sums: dict[int, int] = {}  # the most sums on any route to each value
    deepest = 0
    for out, terms, _, _ in steps:
        most = 0
        for at, value in terms:
            here = sums.get(value, 0) + (not maps[at].single_source)
            most = here if here > most else most
        if len(terms) > 1 and tiling([maps[at] for at, _ in terms]) is None:
            most += 1
        sums[out] = most
        deepest = most if most > deepest else deepest
    if deepest < 2:
        return None
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


def _cone(steps: Sequence[Step], values: Iterable[int]) -> set[int]:
    """These values and all values that they depend on."""
    found = set(values)
    for step in reversed(steps):
        if step.out in found:
            found.update(term.value for term in step.terms)
    return found
