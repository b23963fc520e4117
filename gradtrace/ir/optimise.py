"""From a recorded program to a plan: the passes, in the order they run.

Passes over programs serve every request. ``optimise`` then makes the plan of one request: it
analyses provenance (``passes.provenance``), finds values that only a leaf is made of
(``passes.tails``) and sums of sums (``passes.nested_sums``), and lowers the steps to instructions
(``passes.schedule``).
"""

from __future__ import annotations

from collections.abc import Callable

from gradtrace.ir.passes.drop_constants import drop_constants
from gradtrace.ir.passes.fuse_moves import fuse_moves
from gradtrace.ir.passes.merge_routes import merge_routes
from gradtrace.ir.passes.schedule import Request, Schedule
from gradtrace.ir.plan import NO_LIMIT, Plan, Storage
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


def optimise(program: Program, request: Request, storage: Storage = NO_LIMIT) -> Plan:
    """The plan of a request; ``storage`` is what memory allows (``passes.storage``)."""
    schedule = Schedule(program, request, storage.compact)
    instructions = schedule.instructions()
    return Plan(request.rule, program.root, instructions, request.gradients, storage)
