"""Nodes that are one map for each argument, so that nobody need look inside.

To watch a formula costs several times what a small formula costs. Most nodes of most models are
products with a saved matrix, elementwise functions and views: for these the node's own formula, or
the operands it saved, tell the map. Every row must agree with what watching the formula gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradtrace.autograd import Node
from gradtrace.maps import Contract, Identity, Index, Map, Reduce, Scale
from gradtrace.shapes import Shape

Found: TypeAlias = "tuple[Sequence[Tensor | None], Sequence[list[Map] | None]] | None"
"""What the node gives, and the maps that lead to it, by argument position; None: look inside."""

NodeRule: TypeAlias = Callable[[Node, Tensor], Found]


def turned(node: Node, grad: Tensor) -> Found:
    """A permutation: the node itself is the movement."""
    out = node(grad)
    return (out,), ([Index(node, tuple(grad.shape), tuple(out.shape), injective=True)],)


def reshaped(node: Node, grad: Tensor) -> Found:
    """The same elements in the same order."""
    out = node(grad)
    return (out,), ([Identity(tuple(grad.shape), tuple(out.shape))],)


def scaled(node: Node, grad: Tensor) -> Found:
    """Elementwise: what the node makes of ones."""
    out = node(grad)
    weight = node(torch.ones_like(grad))
    return (out,), ([Scale(weight, tuple(grad.shape))],)


def matrix(node: Node, grad: Tensor) -> Found:
    """``x @ w``."""
    outs = _outs(node, grad)
    return outs, _operands(grad, outs, node._saved_self, node._saved_mat2, "mn", "mk", "kn")


def batch(node: Node, grad: Tensor) -> Found:
    """A batch of ``x @ w``."""
    outs = _outs(node, grad)
    return outs, _operands(grad, outs, node._saved_self, node._saved_mat2, "bmn", "bmk", "bkn")


def affine(node: Node, grad: Tensor) -> Found:
    """``bias + x @ w``."""
    if node._saved_alpha != 1 or node._saved_beta != 1:
        return None
    outs = _outs(node, grad)
    x, w = _operands(grad, outs[1:], node._saved_mat1, node._saved_mat2, "mn", "mk", "kn")
    return outs, ([Identity(tuple(grad.shape))], x, w)


def _outs(node: Node, grad: Tensor) -> tuple[Tensor | None, ...]:
    outs = node(grad)
    return outs if type(outs) is tuple else (outs,)


def _operands(
    grad: Tensor, outs: Sequence[Tensor | None], x: Any, w: Any, o: str, a: str, b: str
) -> tuple[list[Map] | None, list[Map] | None]:
    """Back through an einsum ``a,b->o`` to either operand by way of the other."""
    shape = tuple(grad.shape)
    return (
        None if outs[0] is None else [Contract(f"{o},{b}->{a}", w, shape, tuple(outs[0].shape))],
        None if outs[1] is None else [Contract(f"{o},{a}->{b}", x, shape, tuple(outs[1].shape))],
    )


def summed(shape: Shape, wanted: Shape) -> list[Map]:
    """The undoing of broadcasting."""
    extra = len(shape) - len(wanted)
    over = [d for d, n in enumerate(shape) if d < extra or (n != 1 and wanted[d - extra] == 1)]
    return [Reduce(over, shape, wanted)]


_ROWS: tuple[tuple[NodeRule, str], ...] = (
    (turned, "T0 Transpose0 Permute0"),
    (reshaped, "View0 UnsafeView0 ReshapeAlias0 Unsqueeze0 Clone0"),
    (scaled, "Tanh0 Sigmoid0 Gelu0 Silu0 Exp0 Pow0 Sqrt0 Rsqrt0 Sin0 Cos0 Neg0 Log0"),
    (matrix, "Mm0"),
    (batch, "Bmm0"),
    (affine, "Addmm0"),
)

NODES: dict[str, NodeRule] = {
    f"{name[:-1]}Backward{name[-1]}": rule for rule, names in _ROWS for name in names.split()
}
"""By type of node."""

UNDONE = {"AddmmBackward0": 0}
"""The argument position at which a node's result may still have to be summed over."""
