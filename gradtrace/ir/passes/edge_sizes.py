"""Pass that finds which values need the size of their largest single contribution: rule ``edge``.

``edge`` compares the users of a value by their largest single contribution ``|w · g|``, where
``greedy`` compares what each user hands back, which is their sum. The two are the same but where an
operator sums. From its sum on to its end an operator's values carry the size of the largest
contribution beside their sum; the next operator starts again with its gradients.
"""

from __future__ import annotations

from typing import NamedTuple

from gradtrace.ir.passes.provenance import ProvenanceBounds
from gradtrace.ir.program import Block, MapTable, Program, Step
from gradtrace.linops import tiling


class SingleContributions(NamedTuple):
    """Where the largest single contribution is not |value|.

    ``summed``: the values that their operator has summed. ``inner``: (out, value) for every term of
    an operator's steps that hands on the single contributions of a summed value; sums of sums are
    not among them, they are found as a whole (``nested_sums``). ``merges``: sums over users.
    """

    summed: set[int]
    inner: set[tuple[int, int]]
    merges: set[int]

    def carries(self, out: int, value: int) -> bool:
        """Whether ``out`` is made of the single contributions to ``value``, not of their sum."""
        return (out in self.merges and value in self.summed) or (out, value) in self.inner


NO_SIZES = SingleContributions(set(), set(), set())
"""Where sizes of single contributions are not asked for."""


def single_contributions(program: Program) -> SingleContributions:
    """The summed values of all operators. In a decomposed block each step is an operator."""
    found = SingleContributions(set(), set(), set())
    for block in program.blocks:
        _add_block(block, program.maps, found)
        found.merges.update(step.out for step in block.merges)
    return found


def _add_block(block: Block, maps: MapTable, found: SingleContributions) -> None:
    sums: dict[int, int] = {}  # the most sums on any route to each value of this block
    for step in block.steps:
        most = sum_depth(step, maps, {} if block.opened else sums)
        sums[step.out] = most
        if not most:
            continue
        found.summed.add(step.out)
        if most == 1 and not block.opened:
            found.inner.update((step.out, v) for _, v in step.terms if sums.get(v))


def sum_depth(step: Step, maps: MapTable, sums: dict[int, int]) -> int:
    """The most sums on any route to a step's output, given those to the values before it."""
    most = 0
    for at, value in step.terms:
        here = sums.get(value, 0) + (not maps[at].single_source)
        most = here if here > most else most
    if len(step.terms) > 1 and tiling(maps.of(step)) is None:
        most += 1
    return most


def sized_values(
    program: Program,
    found: SingleContributions,
    partial: set[int],
    bounds: ProvenanceBounds,
) -> set[int]:
    """The values whose largest single contribution is computed.

    Those that a sum over users compares, unless all its terms have the same provenance; and those
    that are scaled or concatenated after a sum, since there a value of 0 does not tell whether its
    contributions cancel or are 0. ``partial`` are the sums over some users of a value.
    """
    sized: set[int] = set()
    summed, within, _ = found
    for block in reversed(program.blocks):
        for step in reversed(block.merges):
            if step.out in sized or not bounds.is_uniform(step.out):
                sized.update(v for _, v in step.terms if v in summed or v in partial)
        for step in reversed(block.steps):
            inner = [v for _, v in step.terms if (step.out, v) in within]
            if inner and (
                step.out in sized
                or len(step.terms) > 1
                or not program.maps[step.terms[0].map].is_gather
            ):
                sized.update(inner)
    return sized
