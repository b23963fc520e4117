"""Pass that drops the maps no step refers to, so that the tensors they hold are freed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from gradtrace.ir.program import MapTable, Program, Step, Term


def drop_constants(program: Program) -> Program:
    """The program with the maps that its steps use, numbered anew; the same if all are used."""
    steps = program.steps()
    used = sorted({at for step in steps for at, _ in step.terms})
    if len(used) == len(program.maps):
        return program
    number = {at: n for n, at in enumerate(used)}

    def renumbered(some: Iterable[Step]) -> tuple[Step, ...]:
        return tuple(
            step._replace(terms=tuple([Term(number[at], value) for at, value in step.terms]))
            for step in some
        )

    blocks = [
        replace(block, steps=renumbered(block.steps), merges=renumbered(block.merges))
        for block in program.blocks
    ]
    maps = MapTable(program.maps[at] for at in used)
    return replace(program, blocks=tuple(blocks), constants=replace(program.constants, maps=maps))
