"""Rules of nodes whose results depend on one element of each argument."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradtrace.autodiff import nodes
from gradtrace.autodiff.nodes import Edges, Node
from gradtrace.linops import Scale
from gradtrace.recording.aten_rules import RULES, Call, mask_map
from gradtrace.recording.node_rules.base import Chain, Product, RuleResult, is_complex

aten = torch.ops.aten


def elementwise(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """Elementwise functions: the weight is the node's result for ones.

    The node is called once, since checkpoints return saved tensors once only.
    """
    weight = node(torch.ones_like(grad))
    return [(weight * grad, [Scale(weight, tuple(grad.shape))])]


def sigmoid(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``g · y · (1 - y)``, as ``elementwise`` computes it. If the saved result and the cotangent
    have equal strides, a 0-d 1 replaces the tensor of ones: the weight's strides are the same.
    """
    y = node._saved_result
    ones = product.one(grad) if y.stride() == grad.stride() else torch.ones_like(grad)
    weight = aten.sigmoid_backward.default(ones, y)
    return [(weight * grad, (Scale(weight, tuple(grad.shape)),))]


def tanh(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``g · (1 - y²)``.

    In float32 and float64 the gradient has the same bits whether or not ``1 - y²`` is computed
    separately, so the weight is batched with those of other nodes. Narrower dtypes would round it.
    """
    y = node._saved_result
    if y.stride() != grad.stride() or y.dtype not in (torch.float32, torch.float64):
        weight = aten.tanh_backward.default(torch.ones_like(grad), y)
        return [(weight * grad, (Scale(weight, tuple(grad.shape)),))]
    scale = Scale(y, tuple(grad.shape))

    def fill(weight: Tensor) -> None:
        scale.weight = weight

    product.batched_weights.request(_slopes, (y,), fill)
    return [(aten.tanh_backward.default(grad, y), (scale,))]


def _slopes(y: Tensor) -> tuple[Tensor]:
    """``1 - y²``."""
    one = torch.ones((), dtype=y.dtype, device=y.device)
    return (aten.tanh_backward.default(one, y),)


def pow_scalar(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``x ** number``: ``n · x^(n - 1)``, computed as in PyTorch's formula."""
    x, power = node._saved_self, node._saved_exponent
    weight = power * x.pow(power - 1) if power else torch.zeros_like(x)
    if x.stride() != grad.stride():
        weight = torch.ones_like(grad) * weight  # with the strides of the cotangent
    return [(weight * grad, (Scale(weight, tuple(grad.shape)),))]


def add(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``x + y``."""
    return [(grad, ()), (grad, ())] if node._saved_alpha == 1 else None


def sub(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``x - y``."""
    if node._saved_alpha != 1:
        return None
    minus = (Scale(-1, tuple(grad.shape)),)
    return [(grad, ()), None if edges[1][0] is None else (-grad, minus)]


def mul(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``x · y``; the node saves a factor only if the other one needs a gradient."""
    x = None if edges[0][0] is None else _product_with(grad, node._saved_other)
    y = None if edges[1][0] is None else _product_with(grad, node._saved_self)
    return [x, y]


def mul_scalar(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``x · number``."""
    return [(node(grad), (Scale(node._saved_other, tuple(grad.shape)),))]


def _product_with(grad: Tensor, factor: Tensor) -> tuple[Tensor, Chain]:
    """``grad · factor``, and its map."""
    return grad * factor, (Scale(_number(factor), tuple(grad.shape)),)


def _number(x: Tensor) -> Tensor | float:
    """A saved factor, as a Python number if the user's code has a number there."""
    if not nodes.is_number(x):
        return x
    number: Any = x.tolist()  # not item(), which dispatch modes intercept
    return number  # type: ignore[no-any-return]


def div(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``x / y``: ``g / y`` and ``-g · x / y²``, computed as in PyTorch's formula."""
    saved, shape = node._saved_other, tuple(grad.shape)
    by, second = _number(saved), None
    if edges[1][0] is not None:
        factor = node._saved_self / saved / saved
        second = -grad * factor, (Scale(-1, shape), Scale(factor, shape))
    if edges[0][0] is None:
        return [None, second]
    call = Call(aten.div.Tensor, (grad, by), {}, [grad], grad / by, 0)
    ((chain, _),) = RULES["div"](call)
    return [(call.out, chain), second]


def absolute(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``abs``: ``g · sgn(x)``."""
    if is_complex(edges[0]):
        return None
    return [_product_with(grad, node._saved_self.sgn())]


# Masks -------------------------------------------------------------------------------------------


def _where(mask: Tensor, grad: Tensor) -> tuple[Tensor, Chain]:
    """The cotangent where the mask is true, and 0 elsewhere."""
    map_ = mask_map(mask, tuple(grad.shape))
    return map_.apply(grad), (map_,)


def where(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``where(mask, x, y)``."""
    mask = node._saved_condition
    x = None if edges[0][0] is None else _where(mask, grad)
    return [x, None if edges[1][0] is None else _where(~mask, grad)]


def masked_fill(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``x.masked_fill(mask, number)``."""
    if any(child is not None for child, _ in edges[1:]):
        return None
    return [_where(~node._saved_mask, grad)]


def clamp(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``clamp`` between numbers, of which one may be missing."""
    x, bounds = node._saved_self, [getattr(node, f"_saved_{end}", None) for end in ("min", "max")]
    if bounds == [None, None]:
        return [(grad, ())]
    masks = [x >= bounds[0]] if bounds[0] is not None else []
    masks += [x <= bounds[1]] if bounds[1] is not None else []
    return [_where(masks[0] if len(masks) == 1 else masks[0] & masks[1], grad)]
