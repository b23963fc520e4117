"""The passes over a program, in the order they run."""

from __future__ import annotations

from collections.abc import Callable

from gradtrace.ir.passes.drop_constants import drop_constants
from gradtrace.ir.passes.fuse_moves import fuse_moves
from gradtrace.ir.passes.merge_routes import merge_routes
from gradtrace.ir.program import Program

PROGRAM_PASSES: tuple[Callable[[Program], Program], ...] = (
    merge_routes,  # for correctness: one weight for a pair of elements
    fuse_moves,
    drop_constants,
)
"""Passes that every recorded program goes through, whatever is asked of it."""


def simplified(program: Program) -> Program:
    """A recorded program after all of ``PROGRAM_PASSES``."""
    for each in PROGRAM_PASSES:
        program = each(program)
    return program
