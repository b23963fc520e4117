"""How many scalar edges a backward program stands for: counted, never built."""

from __future__ import annotations

from math import prod

from gradtrace.maps.base import Count
from gradtrace.program import Block, Program


def count_edges(program: Program) -> int:
    """|E'|: the pairs of scalars that the operators connect, over all operators."""
    return sum(block_edges(block) for block in program.blocks)


def block_edges(block: Block) -> int:
    """How many routes lead from the cotangents of one operator to those of its arguments."""
    counts: dict[int, Count] = dict.fromkeys(block.takes.values(), 1)
    shapes = {}
    for step in block.steps:
        total: Count = 0
        for term in step.terms:
            total = total + term.map.routes(counts[term.value])
        counts[step.out] = total
        shapes[step.out] = step.shape
    edges = 0
    for value in block.gives.values():
        count = counts[value]
        edges += count * prod(shapes[value]) if isinstance(count, int) else int(count.sum())
    return edges
