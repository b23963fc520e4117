"""Pass that finds plans which need not be executed: of networks without branches.

Where every value is uniform, the provenance of a leaf is known beforehand: all components between
it and the loss. Only its gradient is left to be counted.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch

from gradtrace.ir.plan import AddBits, Apply, Emit, Encoding, Plan

Chain = tuple[int, ...]  # maps by index, the first that is applied first


class Contribution(NamedTuple):
    """``moves(map(before(value)))``: maps by index, the value by number. ``before`` are diagonal
    maps and gathers.
    """

    value: int
    before: Chain
    map: int
    moves: Chain = ()


class UniformLeaf(NamedTuple):
    """A leaf all of whose paths have the provenance ``bits``. An element that is 0 has a path all
    the same if the products behind it cancel, those of ``part``; None: it is one product.
    """

    value: int
    bits: int
    part: Contribution | None


def uniform_leaves(
    plan: Plan, known: Collection[int], dtype: torch.dtype
) -> tuple[UniformLeaf, ...] | None:
    """The leaves of a plan by the rule ``greedy``, in order; None if they cannot be counted without
    executing it. ``known`` are the values whose gradients recording has computed, ``dtype`` is that
    of the loss.

    No map chooses an element that is 0, so whether such an element has a path matters for a leaf
    alone: of other values it need not be found out.
    """
    wide = dtype in (torch.float32, torch.float64)  # a product in half precision may underflow
    if plan.rule != "greedy" or not plan.gradients or not wide:
        return None
    values, leaves = _UniformValues(plan.root, known, dtype), list[UniformLeaf]()
    for op in plan.instructions:
        if isinstance(op, AddBits):
            if op.value in values.bits:
                values.bits[op.value] |= op.bits
        elif isinstance(op, Emit):
            if op.value not in known and op.value not in values.waiting:
                return None
            leaves.append(UniformLeaf(op.value, values.bits[op.value], values.parts.get(op.value)))
        elif not isinstance(op, Apply) or not values.follow(op):
            return None
    return tuple(leaves)


class _UniformValues:
    """What is known of the values of a plan, step by step."""

    def __init__(self, root: int, known: Collection[int], dtype: torch.dtype) -> None:
        self.known, self.dtype = known, dtype
        self.bits = {root: 0}
        self.sources: dict[int, tuple[int, Chain]] = {root: (root, ())}  # (known value, maps)
        self.parts: dict[int, Contribution] = {}
        self.waiting: set[int] = set()  # not computed before the leaf is counted

    def follow(self, op: Apply) -> bool:
        """Follow a step of one term; False if its result need not be uniform, or would have to be
        computed.
        """
        (out, ((at, value),), _, _), (encoding, dtype, deferred, *_), free = op
        moved, summed = encoding is Encoding.MOVED, encoding is Encoding.UNIFORM
        if dtype is not self.dtype or not (moved or summed or encoding is Encoding.SCALED):
            return False
        if moved and value in self.parts:
            part = self.parts[value]
            self.parts[out] = part._replace(moves=(*part.moves, at))
        if value in self.waiting:
            if not moved:
                return False
            self.waiting.add(out)
        else:
            source, before = self.sources[value]
            if summed:
                self.parts[out] = Contribution(source, before, at)
            if out in self.known:
                self.sources[out] = out, ()
            elif not summed:
                self.sources[out] = source, (*before, at)
            elif not deferred:
                return False
            if deferred:
                self.waiting.add(out)
        self.bits[out] = self.bits[value]
        for each in free:
            self.bits.pop(each, None)
        return True
