"""Pass that decides, from the memory that is free, how a plan holds its values."""

from __future__ import annotations

from gradtrace.ir import memory
from gradtrace.ir.passes.edge_sizes import single_contributions, sized_values
from gradtrace.ir.passes.provenance import ProvenanceBounds
from gradtrace.ir.passes.schedule import partial_sums
from gradtrace.ir.plan import Storage
from gradtrace.ir.program import Program
from gradtrace.kernels import Backend


def choose_storage(
    program: Program,
    backend: Backend,
    kept: bool,
    budget: int | None,
    what: str,
    remedy: str,
    edges: ProvenanceBounds | None = None,
) -> Storage:
    """How to hold the values of a streaming pass over a program, within ``budget`` bytes (None: the
    free memory). ``kept``: the pass uses the gradients that recording kept. ``edges``: of a pass by
    the rule ``edge``, which holds sizes too.

    Raises TooLarge if it does not fit into memory; ``what`` and ``remedy`` are for the message.
    """
    free = memory.available(backend)
    room = free if budget is None else budget
    if budget is None and memory.ample(program, backend, room, edges is not None):
        return Storage(batch_bytes=memory.LEAF_BATCH_MAX_BYTES)
    sized = set[int]() if edges is None else _sized(program, edges)
    needed = memory.streaming(program, kept, sized=sized)
    compact = memory.short(needed, backend, room)
    if compact:
        needed = memory.streaming(program, kept, compact, sized)
    if compact or budget is not None:  # else memory is ample
        memory.see(needed, backend, what, remedy, free)
    # if memory is not short, at least ``needed`` bytes are left for pending leaves
    return Storage(compact, 0 if compact else min(memory.LEAF_BATCH_MAX_BYTES, needed))


def _sized(program: Program, bounds: ProvenanceBounds) -> set[int]:
    """The values that the rule ``edge`` holds with a size."""
    return sized_values(program, single_contributions(program), partial_sums(program), bounds)
