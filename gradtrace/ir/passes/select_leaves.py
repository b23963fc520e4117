"""Pass that leaves out what only other leaves are made of, for measures of some leaves alone."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from gradtrace.ir.program import Block, Program, Step


def select_leaves(program: Program, values: Collection[int]) -> Program:
    """The program of the leaves with these values: the steps that lead to them, no others.

    Blocks keep their numbers, so that components of the whole program are components of this one;
    a block that leads to none of the leaves is empty. Constants are shared with the whole program.
    """
    needed = set(values)
    blocks: list[Block] = []
    for block in reversed(program.blocks):
        merges = _leading(block.merges, needed)
        steps = _leading(block.steps, needed)
        blocks.append(
            replace(
                block,
                takes={slot: value for slot, value in block.takes.items() if value in needed},
                steps=tuple(steps),
                gives={at: value for at, value in block.gives.items() if value in needed},
                merges=tuple(merges),
                note=block.note if steps else "",
            )
        )
    leaves = [leaf for leaf in program.leaves if leaf.value in set(values)]
    constants = replace(program.constants, leaves=leaves)
    return Program(program.root, program.size, tuple(blocks[::-1]), constants)


def _leading(steps: Sequence[Step], needed: set[int]) -> list[Step]:
    """The steps whose results are needed; what they read is needed too."""
    found: list[Step] = []
    for step in reversed(steps):
        if step.out in needed:
            found.append(step)
            needed.update([value for _, value in step.terms])
    return found[::-1]
