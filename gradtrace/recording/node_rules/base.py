"""What a rule for a node is given and returns, and the maps without tensors that nodes share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from gradtrace.autodiff import nodes
from gradtrace.autodiff.nodes import Edges, Node, signed
from gradtrace.linops import Cut, Identity, Index, Map, Reduce, Slot
from gradtrace.recording.aten_rules import BatchedWeights
from gradtrace.types import Shape

Chain: TypeAlias = Sequence[Map]

RuleResult: TypeAlias = "list[tuple[Tensor, Chain] | None] | None"
"""For each argument, its cotangent and the maps that lead to it (an empty chain is the identity),
or None for no gradient. None instead of the list: the rule does not apply, record the formula."""

Edge: TypeAlias = "tuple[Node | None, int]"


class Product(Protocol):
    """Computes the matrix products that are passed along an edge, or placeholders for them.

    A ``bare`` program needs neither products nor convolutions. Weights of maps that the gradient
    itself does not depend on are requested from ``batched_weights``.
    """

    bare: bool
    batched_weights: BatchedWeights
    changes_device: bool

    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        edge: Edge,
        via_transpose: bool = False,
        grad: Tensor | None = None,
    ) -> Tensor:
        """``a @ b``; with ``via_transpose`` as ``(bᵀ @ aᵀ)ᵀ``, which has transposed strides. With
        ``grad``, the operand that is the cotangent, the product may be deferred.
        """

    def defer(self, edge: Edge, shape: Sequence[int], grad: Tensor) -> Tensor | None:
        """A placeholder of this shape if the gradient computed from ``grad`` can be deferred."""

    def one(self, like: Tensor) -> Tensor:
        """A 0-d tensor 1 of the dtype and on the device of ``like``."""


NodeRule: TypeAlias = Callable[[Node, Tensor, Edges, Product], RuleResult]

JoinedCotangent: TypeAlias = "tuple[Tensor, dict[int, Slot]]"
"""The cotangent of the single argument, and the map to it from that of each output."""

# Maps without tensors are equal for similar nodes, as in the layers of a model, so they are cached.
# Shapes may be torch.Size or tuples: they hash alike.

shared = lru_cache(1 << 12)


@shared
def same(shape: Shape, wanted: Shape) -> Chain:
    """The same elements in the same order."""
    return (Identity(tuple(shape), tuple(wanted)),)


@shared
def summed(shape: Shape, wanted: Shape) -> Chain:
    """Sums over broadcast dimensions, from ``shape`` to ``wanted``."""
    extra = len(shape) - len(wanted)
    over = [d for d, n in enumerate(shape) if d < extra or (n != 1 and wanted[d - extra] == 1)]
    return (Reduce(over, tuple(shape), tuple(wanted)),)


@shared
def permuted(order: tuple[int, ...], shape: Shape, wanted: Shape) -> Chain:
    """A permutation of the dimensions."""
    return (Index(lambda x: x.permute(order), tuple(shape), tuple(wanted), injective=True),)


@shared
def swapped(first: int, second: int, shape: Shape, wanted: Shape) -> Chain:
    """Exchanges two dimensions."""
    first, second = signed(first), signed(second)

    def swap(x: Tensor) -> Tensor:
        return x.transpose(first, second)

    return (Index(swap, tuple(shape), tuple(wanted), injective=True),)


@shared
def flipped(shape: Shape, wanted: Shape) -> Chain:
    """``torch.t``: transposes a matrix; a vector is unchanged."""
    return (Index(torch.t, tuple(shape), tuple(wanted), injective=True),)


@shared
def cut(dim: int, start: int, shape: Shape, wanted: Shape) -> Chain:
    """``x.narrow(dim, start, wanted[dim])``."""
    return (Cut(dim, start, tuple(shape), tuple(wanted)),)


@shared
def slot(dim: int, start: int, cut: Shape, shape: Shape, wanted: Shape) -> Slot:
    """The adjoint of ``cut``: a slice along a dimension, padded with zeros."""
    return Slot(dim, start, tuple(cut), tuple(shape), tuple(wanted))


def as_tuple(outs: Any) -> Iterable[Tensor]:
    """The results of a node, of which some return one tensor."""
    return outs if type(outs) is tuple else (outs,)


def is_complex(edge: Edge) -> bool:
    """Whether an argument is complex, though the result of the operator is real."""
    return edge[0] is not None and bool(nodes.wanted(*edge).dtype.is_complex)
