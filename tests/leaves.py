"""The leaves of a program with their provenance, by a plan made for it alone."""

from __future__ import annotations

from collections.abc import Iterator

from gradtrace.ir.optimise import optimise
from gradtrace.ir.passes.provenance import NO_COMPONENTS, ComponentBits, ProvenanceBounds
from gradtrace.ir.passes.schedule import Request
from gradtrace.ir.plan import NO_LIMIT, Storage
from gradtrace.ir.program import Program
from gradtrace.tracing.executor import TracedLeaf, execute


def traced_leaves(
    program: Program,
    rule: str,
    components: ComponentBits = NO_COMPONENTS,
    storage: Storage = NO_LIMIT,
    bounds: ProvenanceBounds | None = None,
) -> Iterator[TracedLeaf]:
    """The leaves of one loss, in the order they are complete."""
    request = Request(rule, components, gradients=rule != "viterbi", bounds=bounds)
    return execute(optimise(program, request, storage), program.constants)
