"""The gradients of a recording: computed, deferred until they are asked for, or kept.

Recording runs the formulas of a backward pass, so it computes the gradients that others are made
of, and those of the leaves. The gradient of a large weight is deferred; what memory allows is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from gradtrace.autodiff import nodes
from gradtrace.autodiff.nodes import ACCUMULATE, Node
from gradtrace.ir.lazy_gradient import LazyGradient, LazyPart
from gradtrace.ir.program import Block, MapTable
from gradtrace.kernels import backend_of
from gradtrace.linops import Contract, Convolve, Map
from gradtrace.recording import placeholders
from gradtrace.recording.aten_rules import BatchedWeights, as_real
from gradtrace.recording.node_rules import Chain, Edge, same, summed

DEFER_MIN_ELEMENTS = 1 << 16
"""Only gradients of leaves with at least this many elements are computed lazily."""


SMALL = 64
"""How many times smaller than one that was not kept a gradient is to be dropped as well."""


class GradientCache:
    """Gradients by value number, in at most ``budget`` bytes; a shared storage counts once.

    Results of matrix products and convolutions are expensive to recompute, so half of the budget
    is reserved for them, and an eighth on top for summands, which are compared with each other.
    Where large gradients are not kept, small ones are not, either: each would lie where a large one
    was freed, whose memory the allocator could then not use again.
    """

    def __init__(self, budget: int, maps: MapTable) -> None:
        self.budget = budget
        self.maps = maps
        self.bytes_left = budget
        self.values: dict[int, Tensor] = {}
        self.storages: set[int] = set()
        self.refused = False  # whether a gradient was not kept for want of memory
        self.least = 0  # the bytes that a gradient must have to be kept

    def add(self, value: int, tensor: Tensor, expensive: Block | bool) -> None:
        """Keep a gradient, if the budget allows. ``expensive``: the block that made it, whether it
        is expensive to recompute; True for summands.
        """
        least = -(self.budget // 8) if expensive is True else 0
        if self.bytes_left <= least:
            self.refused = True
            return
        storage = tensor.untyped_storage()
        place = storage._cdata
        if place not in self.storages:
            size = storage.nbytes()
            left = self.bytes_left - size
            if left < self.budget // 2 or size < self.least:
                if isinstance(expensive, Block):
                    expensive = self._is_expensive(expensive)
                if left < least or not expensive:
                    self.refused, self.least = True, max(self.least, size // SMALL)
                    return
            self.bytes_left = left
            self.storages.add(place)
        self.values[value] = as_real(tensor) if tensor.is_complex() else tensor

    def spend(self, nbytes: int) -> bool:
        """Reserve memory for another use; False if less than half of the budget would be left."""
        enough = self.bytes_left - nbytes >= self.budget // 2 > 0
        if enough:
            self.bytes_left -= nbytes
        else:
            self.refused = True
        return enough

    def hold(self, value: int, tensor: Tensor) -> None:
        """Add a gradient that is kept alive elsewhere, whatever the budget."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.storages:
            self.storages.add(storage._cdata)
            self.bytes_left -= storage.nbytes()
        self.values[value] = as_real(tensor)

    def _is_expensive(self, block: Block) -> bool:
        """Whether a block contains a matrix product or a convolution."""
        maps = (map_ for step in block.steps for map_ in self.maps.of(step))
        return any(isinstance(map_, Contract | Convolve) for map_ in maps)


class GradientProducts:
    """Computes the matrix products of the backward pass, or avoids them.

    A product that is the gradient of a large leaf is deferred, if the tensors held for it have no
    more elements than the leaf. In a ``bare`` program products are never computed: placeholders of
    the same shape are returned.

    On a GPU products are computed at once while the gradient cache has memory for them: the GPU is
    idle during recording, and deferring would move the work to where Python waits for it.
    """

    def __init__(
        self, clear_since: int, bare: bool = False, cache: GradientCache | None = None
    ) -> None:
        self.clear_since = clear_since
        self.cache = cache
        self.bare = bare
        self.defers = not bare  # whether gradients of large leaves may be computed later
        self.deferred_outputs: dict[int, Tensor] = {}  # placeholders of deferred results, by id
        self.decisions: list[bool] = []  # whether each gradient that could be was deferred
        self.held: dict[int, int] = {}  # elements held for each leaf, by id
        self.ones: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self.batched_weights = BatchedWeights()
        self.changes_device = False  # whether the graph is over several devices

    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        edge: Edge,
        via_transpose: bool = False,
        grad: Tensor | None = None,
    ) -> Tensor:
        """``a @ b``, the cotangent that is passed along ``edge``; see ``Product``."""
        if self.bare:
            return placeholders.product(a, b)
        matrices = a.dim() == 2
        if grad is not None:
            rows = a.shape[0] if matrices else prod(a.shape[:-1])
            if rows * b.shape[-1] >= DEFER_MIN_ELEMENTS:
                out = self.defer(edge, (*a.shape[:-1], b.shape[-1]), grad)
                if out is not None:
                    return out
        multiply = torch.mm if matrices else torch.bmm  # matmul has more overhead
        return multiply(b.mT, a.mT).mT if via_transpose else multiply(a, b)

    def defer(self, edge: Edge, shape: Sequence[int], grad: Tensor) -> Tensor | None:
        """A placeholder for the gradient of a leaf if that is deferred, else None."""
        size = prod(shape)
        if not self.defers or size < DEFER_MIN_ELEMENTS or (leaf := self._leaf(edge[0])) is None:
            return None
        if not self._defers(leaf, size, grad):
            return None
        out = grad.new_zeros(()).expand(tuple(shape))
        self.deferred_outputs[id(out)] = out
        return out

    def _defers(self, leaf: Tensor, size: int, grad: Tensor) -> bool:
        """Whether the gradient of a leaf of this size, computed from ``grad``, is deferred."""
        held = self.held.get(id(leaf), 0) + grad.numel()
        spent = (
            self.cache is not None
            and backend_of(grad).synchronises
            and self.cache.spend(size * grad.itemsize)
        )
        defers = not spent and held <= size
        if defers:
            self.held[id(leaf)] = held
        self.decisions.append(defers)
        return defers

    def one(self, like: Tensor) -> Tensor:
        """A 0-d tensor 1 of the dtype and on the device of ``like``; cached."""
        kind = like.dtype, like.device
        found = self.ones.get(kind)
        if found is None:
            found = self.ones[kind] = torch.ones((), dtype=kind[0], device=kind[1])
        return found

    def _leaf(self, node: Node | None) -> Tensor | None:
        """The leaf whose gradient is the cotangent of this node, directly or through one view.

        None if there is no such leaf, or if hooks might read the gradient.
        """
        if node is not None and type(node) is not ACCUMULATE:
            if not nodes.reaches_leaf(node) or node._sequence_nr() < self.clear_since:
                return None
            node = nodes.edges_of(node)[0][0]
        if node is None or node.variable._backward_hooks:
            return None
        leaf: Tensor = node.variable
        return leaf


class DeferredGradients(dict[int, LazyGradient]):
    """Gradients that are computed later, by value number."""

    def follow(self, value: int, grad: Tensor, chain: Chain, number: int, starts: bool) -> bool:
        """Defer the value ``number``, made by a chain of maps of ``value`` (with the gradient
        ``grad``), if that is deferred or ``starts`` is set. True if its parts begin here.
        """
        if value in self:
            self[number] = self[value].mapped(chain)
            return False
        if starts:
            self[number] = LazyGradient([LazyPart(tuple(chain), grad)])
        return starts

    def add(self, there: tuple[Tensor, int], here: tuple[Tensor, int], total: int) -> Tensor:
        """``there + here``; if a summand is deferred so is the sum, and its placeholder returned.
        A summand is a gradient and its value number; ``total`` is that of the sum.
        """
        lazy = [self.get(number) for _, number in (there, here)]
        if not (lazy[0] or lazy[1]):
            return there[0] + here[0]
        both = (
            part or LazyGradient([LazyPart((), x)]) for part, (x, _) in zip(lazy, (there, here))
        )
        self[total] = next(both).added(next(both))
        return there[0] if lazy[0] else here[0]


def conformed(out: Tensor, chain: Chain, meta: Any) -> tuple[Tensor, list[tuple[Map, torch.dtype]]]:
    """What PyTorch's engine does after each node: a result summed over broadcast dimensions and
    converted to the dtype in ``meta``, with all the maps to it and the dtypes of their results.
    """
    shape, wanted, dtype = out.shape, tuple(meta.shape), out.dtype
    alike = shape == wanted and dtype is meta.dtype and out.layout is torch.strided
    if not alike or not wanted:  # scalars may come from another device
        if shape != wanted:
            chain = [*chain, *summed(shape, wanted)]
        conform_to = nodes.conform(out, meta)
        maps = [(map_, dtype) for map_ in chain or same(shape, shape)]
        if conform_to.dtype is not dtype:
            maps += [(map_, conform_to.dtype) for map_ in same(conform_to.shape, conform_to.shape)]
        return conform_to, maps
    return out, [(map_, dtype) for map_ in chain or same(shape, shape)]
