"""The leaves of a program with their provenance, by a plan made for it alone."""

from __future__ import annotations

from collections.abc import Iterator

from gradtrace.ir.optimise import optimise
from gradtrace.ir.passes.provenance import NO_COMPONENTS, ComponentBits, ProvenanceBounds
from gradtrace.ir.passes.schedule import Request
from gradtrace.ir.plan import NO_LIMIT, Storage
from gradtrace.ir.program import Program
from gradtrace.kernels import backend_of
from gradtrace.tracing.executor import TracedLeaf, execute
from gradtrace.tracing.traced_value import TracedValue, materialise


def traced_leaves(
    program: Program,
    rule: str,
    components: ComponentBits = NO_COMPONENTS,
    storage: Storage = NO_LIMIT,
    bounds: ProvenanceBounds | None = None,
) -> Iterator[TracedLeaf]:
    """The leaves of one loss, in the order they are complete."""
    request = Request(rule, components, gradients=rule != "viterbi", bounds=bounds)
    plan = optimise(program, request, storage)
    return execute(plan, program.constants, backend_of(program.seed))


def with_ids(state: TracedValue) -> TracedValue:
    """With the value, and a provenance id for each element."""
    backend = backend_of(
        next(x for x in (state.value, *(p.x for p in state.parts)) if x is not None)
    )
    return materialise(state, backend).with_provenance(backend)


def bits_at(state: TracedValue, index: tuple[int, ...]) -> int:
    """The provenance set of one element; 0 if it has no path."""
    found = with_ids(state)
    assert found.ids is not None
    return state.provenance.sets()[int(found.ids[index])]
