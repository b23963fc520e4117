"""Pass that folds chains of gathers and reshapes within an operator into one map.

Only gathers are folded, because that keeps results bit-equal: ``b(a(x))`` is again a gather. Two
scales are not folded: ``v · (w · x)`` and ``(v · w) · x`` round differently, and so may select a
different element. Nothing is folded across operators: the value between two operators is a vertex
of paths and belongs to a component. Nor would that save time: the gathers of a model are views.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TypeAlias

from torch import Tensor

from gradtrace.ir.program import Block, MapTable, Program, Step
from gradtrace.linops import Identity, Index

Move: TypeAlias = Identity | Index


def fuse_moves(program: Program) -> Program:
    """The program with chains of gathers in recorded formulas replaced by one gather each."""
    maps = program.maps
    blocks = [
        _fused(block, maps)
        if block.composed and not block.opened and len(block.steps) > 1
        else block
        for block in program.blocks
    ]
    return replace(program, blocks=tuple(blocks))


def _fused(block: Block, maps: MapTable) -> Block:
    """Values with other uses, and those that the block gives to its arguments, are kept."""
    uses = Counter(term.value for step in block.steps for term in step.terms)
    uses.update(block.gives.values())
    made: dict[int, Step] = {}
    for step in block.steps:
        before = made.get(step.terms[0].value)
        if before is not None and uses[before.out] == 1 and (both := _folded(before, step, maps)):
            del made[before.out]
            step = both
        made[step.out] = step
    return block if len(made) == len(block.steps) else replace(block, steps=(*made.values(),))


def _folded(before: Step, step: Step, maps: MapTable) -> Step | None:
    """One step in place of two, if both only move elements and have the same dtype; else None."""
    if len(before.terms) > 1 or len(step.terms) > 1 or before.dtype != step.dtype:
        return None
    (first, value), (second, _) = before.terms[0], step.terms[0]
    one, other = maps[first], maps[second]
    if not isinstance(one, Move) or not isinstance(other, Move):
        return None
    return step._replace(terms=(maps.term(composed(one, other), value),))


def composed(first: Move, second: Move) -> Move:
    """``second ∘ first`` as one map.

    >>> import torch
    >>> flip = Index(lambda x: x.flip(0), (3,), (3,))
    >>> composed(flip, Identity((3,), (3, 1))).apply(torch.arange(3)).tolist()
    [[2], [1], [0]]
    """
    if isinstance(first, Identity) and isinstance(second, Identity):
        return Identity(first.in_shape, second.out_shape)
    fills = any(map_.fills for map_ in (first, second) if isinstance(map_, Index))
    injective = all(map_.injective for map_ in (first, second) if isinstance(map_, Index))
    middle_shape = first.out_shape

    def move(x: Tensor) -> Tensor:
        return second.apply(first.apply(x).reshape(middle_shape))

    # The composition may be injective even if ``first`` is not: ``second`` may drop all but one of
    # the copies. Unless both are known to be injective, this is determined on demand.
    return Index(move, first.in_shape, second.out_shape, fills, True if injective else None)
