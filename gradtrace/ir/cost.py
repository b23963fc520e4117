"""Count the scalar edges of a backward program without building them."""

from __future__ import annotations

from math import prod

import torch

from gradtrace.ir.program import HOOKS, Block, MapTable, Program
from gradtrace.linops import Identity, Index, Map
from gradtrace.linops.base import Count
from gradtrace.types import Shape


def count_edges(program: Program) -> int:
    """|E'|: the number of pairs of scalars that an operator connects, summed over operators."""
    device = program.seed.device
    return sum(block_edges(block, program.maps, device) for block in program.blocks)


def block_edges(block: Block, maps: MapTable, device: torch.device) -> int:
    """How many pairs of scalars one operator connects. For a decomposed operator, the sum over its
    steps. ``device`` is that of the program's values.
    """
    if block.operator == HOOKS:
        return 0
    if block.opened:
        steps = [map_ for step in block.steps for map_ in maps.of(step)]
        return sum(
            _total(step.routes(1, device), step.out_shape)
            for step in steps
            if not _is_relayout(step)
        )
    counts: dict[int, Count] = dict.fromkeys(block.takes.values(), 1)
    shapes = {}
    for step in block.steps:
        total: Count = 0
        for term in step.terms:
            total = total + maps[term.map].routes(counts[term.value], device)
        counts[step.out] = total
        shapes[step.out] = step.shape
    return sum(_total(counts[value], shapes[value]) for value in block.gives.values())


def _is_relayout(step: Map) -> bool:
    """Whether a map only moves or reshapes elements, so that it adds no edges of its own."""
    return isinstance(step, (Identity, Index))


def _total(count: Count, shape: Shape) -> int:
    return count * prod(shape) if isinstance(count, int) else int(count.sum())
