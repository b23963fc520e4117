"""Chains of movements within an operator, folded into one before anything runs.

Only what changes no bit is folded: movements, of which ``b(a(x))`` is one. Two scales are not one:
``v · (w · x)`` and ``(v · w) · x`` are rounded differently, and so may choose differently. Nor is
anything folded across operators: what lies between them is a vertex, at which paths stop and which
components own. It would not show either: all movements of a whole model are views of its values.
"""

from __future__ import annotations

from collections import Counter
from typing import TypeAlias

from torch import Tensor

from gradtrace.ir.program import Block, Step, Term
from gradtrace.linops import Identity, Index

Move: TypeAlias = Identity | Index


def fold(block: Block) -> None:
    """Fold the chains of a block; values that others use, or that it hands on, stay."""
    uses = Counter(term.value for step in block.steps for term in step.terms)
    uses.update(block.gives.values())
    made: dict[int, Step] = {}
    for step in block.steps:
        before = made.get(step.terms[0].value)
        if before is not None and uses[before.out] == 1 and (both := _folded(before, step)):
            del made[before.out]
            step = both
        made[step.out] = step
    block.steps[:] = made.values()


def _folded(before: Step, step: Step) -> Step | None:
    """One step in place of two, if both only move elements, and neither rounds them."""
    if len(before.terms) > 1 or len(step.terms) > 1 or before.dtype != step.dtype:
        return None
    (first, value), (second, _) = before.terms[0], step.terms[0]
    if not isinstance(first, Move) or not isinstance(second, Move):
        return None
    return step._replace(terms=(Term(composed(first, second), value),))


def composed(first: Move, second: Move) -> Move:
    """One movement after the other, as one.

    >>> import torch
    >>> flip = Index(lambda x: x.flip(0), (3,), (3,))
    >>> composed(flip, Identity((3,), (3, 1))).apply(torch.arange(3)).tolist()
    [[2], [1], [0]]
    """
    if isinstance(first, Identity) and isinstance(second, Identity):
        return Identity(first.in_shape, second.out_shape)
    fills = any(map_.fills for map_ in (first, second) if isinstance(map_, Index))
    apart = all(map_.injective for map_ in (first, second) if isinstance(map_, Index))
    between = first.out_shape

    def move(x: Tensor) -> Tensor:
        return second.apply(first.apply(x).reshape(between))

    # Unless both are known to take no element twice: of what one repeats, the other may drop all
    # but one, so find out when asked.
    return Index(move, first.in_shape, second.out_shape, fills, True if apart else None)
