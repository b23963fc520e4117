"""Nodes that are one map for each argument, so that nobody need look inside.

To watch a formula costs several times what a small formula costs. Most nodes of most models are
products with a saved matrix, elementwise functions and views: for these the node's own formula, or
the operands it saved, tell the map. Every row must agree with what watching the formula gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from gradtrace.autograd import Edges, Node
from gradtrace.maps import Contract, Identity, Index, Map, Reduce, Scale, Scatter
from gradtrace.shapes import Shape

Found: TypeAlias = "list[tuple[Tensor, list[Map]] | None] | None"
"""For each argument, its cotangent and the maps that lead to it (none: it is the same). None
instead of it all: look inside."""

Edge: TypeAlias = "tuple[Node | None, int]"


class Product(Protocol):
    """Computes the products of matrices that are handed to an edge, or what stands in for them."""

    def __call__(
        self, a: Tensor, b: Tensor, edge: Edge, turned: bool = False, grad: Tensor | None = None
    ) -> Tensor:
        """``a @ b``; ``turned``: as ``(bᵀ @ aᵀ)ᵀ``, which lies otherwise in memory. With ``grad``,
        the cotangent among them, the product can be put off.
        """

    def later(self, edge: Edge, shape: Sequence[int], grad: Tensor) -> Tensor | None:
        """A stand-in of this shape for what is made of a cotangent, if that can be put off."""


NodeRule: TypeAlias = Callable[[Node, Tensor, Edges, Product], Found]


def turned(node: Node, grad: Tensor, edges: Edges, product: Product) -> Found:
    """A permutation: the node itself is the movement."""
    out = node(grad)
    return [(out, [Index(node, tuple(grad.shape), tuple(out.shape), injective=True)])]


def reshaped(node: Node, grad: Tensor, edges: Edges, product: Product) -> Found:
    """The same elements in the same order."""
    out = node(grad)
    return [(out, [Identity(tuple(grad.shape), tuple(out.shape))])]


def scaled(node: Node, grad: Tensor, edges: Edges, product: Product) -> Found:
    """Elementwise: what the node makes of ones. It is called once, as checkpoints demand."""
    weight = node(torch.ones_like(grad))
    return [(weight * grad, [Scale(weight, tuple(grad.shape))])]


def matrix(node: Node, grad: Tensor, edges: Edges, product: Product) -> Found:
    """``x @ w``, where a node saves an operand only if the other needs a gradient."""
    x, w = node._saved_self, node._saved_mat2
    steps = node._saved_mat2_sym_strides if type(node).__name__ == "MmBackward0" else ()
    return [_left(grad, w, edges[0], product), _right(grad, x, edges[1], product, steps)]


def affine(node: Node, grad: Tensor, edges: Edges, product: Product) -> Found:
    """``bias + x @ w``."""
    if node._saved_alpha != 1 or node._saved_beta != 1:
        return None
    x, w = node._saved_mat1, node._saved_mat2
    bias: tuple[Tensor, list[Map]] | None = None if edges[0][0] is None else (grad, [])
    steps = node._saved_mat2_sym_strides
    return [bias, _left(grad, w, edges[1], product), _right(grad, x, edges[2], product, steps)]


def _left(
    grad: Tensor, w: Tensor | None, edge: Edge, product: Product
) -> tuple[Tensor, list[Map]] | None:
    """Back through ``x @ w`` to x: ``g @ wᵀ``, of matrices or batches of them."""
    if edge[0] is None or w is None:
        return None
    out = product(grad, w.mT, edge)
    spec = "mn,kn->mk" if grad.dim() == 2 else "bmn,bkn->bmk"
    return out, [Contract(spec, w, tuple(grad.shape), tuple(out.shape))]


def _right(
    grad: Tensor,
    x: Tensor | None,
    edge: Edge,
    product: Product,
    steps: Sequence[int] = (),
) -> tuple[Tensor, list[Map]] | None:
    """Back through ``x @ w`` to w: ``xᵀ @ g``. It lies in memory as w does, by its strides."""
    if edge[0] is None or x is None:
        return None
    turned = len(steps) == 2 and steps[0] == 1 != steps[1]  # as PyTorch's own formula has it
    out = product(x.mT, grad, edge, turned, None if x.is_leaf and x.requires_grad else grad)
    spec = "mn,mk->kn" if grad.dim() == 2 else "bmn,bmk->bkn"
    return out, [Contract(spec, x, tuple(grad.shape), tuple(out.shape))]


def looked_up(node: Node, grad: Tensor, edges: Edges, product: Product) -> Found:
    """Rows of a table: known only where the whole table's gradient can be put off."""
    if node._saved_scale_grad_by_freq or node._saved_sparse:
        return None
    rows = node._saved_weight_sym_argsize_0
    out = product.later(edges[0], (rows, grad.shape[-1]), grad)
    if out is None:
        return None
    padding = node._saved_padding_idx
    return [(out, [Scatter.table(node._saved_indices, tuple(grad.shape), rows, padding)])]


def summed(shape: Shape, wanted: Shape) -> list[Map]:
    """The undoing of broadcasting."""
    extra = len(shape) - len(wanted)
    over = [d for d, n in enumerate(shape) if d < extra or (n != 1 and wanted[d - extra] == 1)]
    return [Reduce(over, shape, wanted)]


_ROWS: tuple[tuple[NodeRule, str], ...] = (
    (turned, "T0 Transpose0 Permute0"),
    (reshaped, "View0 UnsafeView0 ReshapeAlias0 Unsqueeze0 Clone0"),
    (scaled, "Tanh0 Sigmoid0 Gelu0 Silu0 Exp0 Pow0 Sqrt0 Rsqrt0 Sin0 Cos0 Neg0 Log0"),
    (matrix, "Mm0 Bmm0"),
    (affine, "Addmm0"),
    (looked_up, "Embedding0"),
)

NODES: dict[str, NodeRule] = {
    f"{name[:-1]}Backward{name[-1]}": rule for rule, names in _ROWS for name in names.split()
}
"""By type of node."""

UNDONE = {"AddmmBackward0": 0}
"""The argument position at which a node's result may still have to be summed over."""
