"""Pass that finds residual branches: arguments of sums that do work on what the other one skips.

In ``x + f(x)`` the branch is ``f(x)``. A sum is residual if the values behind one argument, moved
and added only, are also reached from the other argument, by operators of any kind.
"""

from __future__ import annotations

from gradtrace.ir.program import Block, Program

RESIDUAL_SUMS = ("AddBackward0", "SubBackward0")
"""Operators that join a branch with what it skips."""


def residual_branches(program: Program) -> set[tuple[int, int]]:
    """The arguments, by (block, position), that are branches of residual sums."""
    search, found = _Search(program), set[tuple[int, int]]()
    for number, block in enumerate(program.blocks):
        if block.operator not in RESIDUAL_SUMS or len(block.gives) != 2:
            continue
        (first, a), (second, b) = sorted(block.gives.items())
        behind = [search.sources(value) for value in (a, b)]
        works = [search.reaches(number, a, behind[1]), search.reaches(number, b, behind[0])]
        if works[0] != works[1]:
            found.add((number, first if works[0] else second))
    return found


class _Search:
    """Follows values from blocks towards the leaves."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.wholes = program.wholes()
        self.takers = {v: block for block in program.blocks for v in block.takes.values()}
        self.made = {step.out: n for n, step in enumerate(program.steps())}
        self.starts: list[int] = []
        total = 0
        for block in program.blocks:
            self.starts.append(total)
            total += len(block.steps) + len(block.merges)

    def sources(self, value: int) -> set[int]:
        """The values that an argument is, moved or added, or else the argument itself; those that
        have other users are not followed further.
        """
        found, stack = set[int](), [value]
        while stack:
            here = stack.pop()
            whole = self.wholes.get(here, here)
            block = self.takers.get(whole)
            if whole != here or block is None or not self._moves(block):
                found.add(whole)
            else:
                stack += block.gives.values()
        return found

    def _moves(self, block: Block) -> bool:
        """Whether a block only moves elements, or adds."""
        maps = self.program.maps
        moved = all(map_.is_gather for step in block.steps for map_ in maps.of(step))
        return bool(block.gives) and (moved or block.operator in RESIDUAL_SUMS)

    def reaches(self, number: int, value: int, wanted: set[int]) -> bool:
        """Whether one of the wanted values is made from this one, after its block."""
        reached = {value}
        last = max(self.made.get(each, -1) for each in wanted)
        for step in self.program.steps()[self.starts[number] : last + 1]:
            if any(term.value in reached for term in step.terms):
                reached.add(step.out)
        return not wanted.isdisjoint(reached - {value})
