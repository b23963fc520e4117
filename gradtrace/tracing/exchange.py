"""Values of which each rank traced its own part, put together on all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from gradtrace.ir.plan import Form, Sizing
from gradtrace.kernels import Backend
from gradtrace.linops.across_ranks import RankGather
from gradtrace.semirings.base import shifted, wide
from gradtrace.tracing.edge_rule import unsized, with_size
from gradtrace.tracing.provenance import COMPACT_ABOVE_ENTRIES, ProvenanceTable, compact
from gradtrace.tracing.traced_value import TracedValue, materialise


def exchanged(
    map_: RankGather,
    state: TracedValue,
    known: Tensor | None,
    form: Form,
    absolute: bool,
    backend: Backend,
) -> TracedValue:
    """The whole of a value, of this rank's part of it and those of the others.

    Ranks number provenance sets each by themselves. So their tables are put one after the other, in
    the order of ranks, and ids are shifted before they are gathered. The result is the same on all
    ranks. ``known`` is its gradient, if recording kept it.
    """
    if form.size >= Sizing.CARRIED:
        state = with_size(state, backend)
    else:
        state = materialise(state if state.size is None else unsized(state, backend), backend)
    assert state.value is not None
    layout, rows = map_.layout, state.provenance.sets()[1:]
    said = layout.told((state.exponent, state.ids is None, rows))
    exponent = max(power for power, _, _ in said)
    value = known
    if value is None:
        value = layout.gather(shifted(state.value, state.exponent - exponent))
    size = None
    if form.size is not Sizing.NONE:
        size = layout.gather(wide(state.compared).abs())
    if all(uniform and sets == rows for _, uniform, sets in said):
        return TracedValue(value, exponent, None, state.provenance, (), size)
    ids = state.with_provenance(backend).ids
    assert ids is not None
    table = ProvenanceTable(tuple(said[0][2]))
    shift = 0
    for rank, (_, _, sets) in enumerate(said[1:], 1):
        table, start = table.joined(ProvenanceTable(tuple(sets)))
        shift = start if rank == layout.rank else shift
    both = layout.gather(torch.add(ids, ids != 0, alpha=shift) if shift else ids)
    if absolute or len(table.rows) > COMPACT_ABOVE_ENTRIES:
        both = both * ((value if size is None else size) != 0)
        return TracedValue(value, exponent, *compact(both, table, backend), (), size)
    return TracedValue(value, exponent, both, table, (), size, None, True)
