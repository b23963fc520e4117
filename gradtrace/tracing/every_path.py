"""All paths of a small graph, one by one."""

from __future__ import annotations

from gradtrace.errors import TooLarge
from gradtrace.ir import interpreter
from gradtrace.paths.paths import Path, Paths
from gradtrace.semirings import Count
from gradtrace.tracing.traced_program import TracedProgram


def every_path(traced: TracedProgram, limit: int = 10_000, zeros: bool = False) -> Paths:
    """All paths from every leaf element to the (first) loss; more than ``limit`` raise an error."""
    builder = traced.builder(0)
    too_many = TooLarge(
        f"there are more than {limit:,} paths; raise limit, or take a smaller graph. "
        "gradtrace.backward(loss, gradtrace.semirings.COUNT) tells how many there are"
    )
    counts = interpreter.run(traced.program, Count(log=True)).values()  # before listing any
    if sum(2.0 ** min(float(n), 999.0) for c in counts for n in c.reshape(-1)) > limit:
        raise too_many
    found: list[Path] = []
    for leaf in traced.leaves.values():
        for element in range(leaf.tensor.numel()):
            for edges in builder.follower.every(leaf.value, element, zeros):
                if len(found) == limit:
                    raise too_many
                found.append(builder.path(leaf.value, element, edges))
    return Paths(tuple(found), "All paths")
