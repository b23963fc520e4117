"""The size of the scalar graph behind a loss, |E'|, counted from the maps of its program."""

from __future__ import annotations

from math import prod

import programs
import torch
from torch import Tensor

from gradtrace.ir.program import HOOKS, Block, MapTable
from gradtrace.linops import Identity, Index
from gradtrace.linops.base import Count
from gradtrace.types import Shape


def scalar_edges(loss: Tensor) -> int:
    """How many pairs of scalars operators connect, without building the pairs."""
    program = programs.program(loss)
    device = program.seed.device
    return sum(block_edges(block, program.maps, device) for block in program.blocks)


def block_edges(block: Block, maps: MapTable, device: torch.device) -> int:
    """How many pairs of scalars one operator connects. For a decomposed operator, the sum over its
    steps.
    """
    if block.operator == HOOKS:
        return 0
    if block.opened:
        steps = [map_ for step in block.steps for map_ in maps.of(step)]
        real = [step for step in steps if not isinstance(step, (Identity, Index))]
        return sum(_total(step.routes(1, device), step.out_shape) for step in real)
    counts: dict[int, Count] = dict.fromkeys(block.takes.values(), 1)
    shapes = {}
    for step in block.steps:
        total: Count = 0
        for term in step.terms:
            total = total + maps[term.map].routes(counts[term.value], device)
        counts[step.out] = total
        shapes[step.out] = step.shape
    return sum(_total(counts[value], shapes[value]) for value in block.gives.values())


def _total(count: Count, shape: Shape) -> int:
    return count * prod(shape) if isinstance(count, int) else int(count.sum())
