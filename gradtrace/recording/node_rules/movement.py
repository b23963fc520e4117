"""Rules of nodes that move elements, and of those that sum them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate

import torch
from torch import Tensor

from gradtrace.autodiff import nodes
from gradtrace.autodiff.nodes import Edges, Node, signed
from gradtrace.linops import Index, Map, Scale, Scan, nothing
from gradtrace.recording.node_rules.base import (
    Chain,
    JoinedCotangent,
    Product,
    RuleResult,
    as_tuple,
    cut,
    flipped,
    is_complex,
    permuted,
    same,
    slot,
    summed,
    swapped,
)

# Movements ---------------------------------------------------------------------------------------


def transpose_2d(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``t``."""
    out = node(grad)
    return [(out, flipped(grad.shape, out.shape))]


def transpose(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``transpose``: exchanges two dimensions."""
    out = node(grad)
    return [(out, swapped(node._saved_dim0, node._saved_dim1, grad.shape, out.shape))]


def permute(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``permute``: the inverse permutation."""
    out, dims = node(grad), grad.dim()
    order = [signed(d) % dims for d in node._saved_dims]
    back = tuple(sorted(range(dims), key=order.__getitem__))
    return [(out, permuted(back, grad.shape, out.shape))]


def slice_or_select(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``slice`` and ``select``: pads with zeros; of other steps than 1 the node itself is the index
    function.
    """
    out = node(grad)
    selects = hasattr(node, "_saved_index")
    if not out.is_complex() and (selects or node._saved_step == 1):
        dim = signed(node._saved_dim) % out.dim()
        place = node._saved_index if selects else node._saved_start or 0  # None: from the first on
        size, first = out.shape[dim], signed(place)
        start = min(max(first + size if first < 0 else first, 0), size)
        shape = grad.shape
        cut = (*shape[:dim], 1, *shape[dim:]) if selects else tuple(shape)
        return [(out, [slot(dim, start, cut, tuple(shape), tuple(out.shape))])]
    return [(out, [Index(node, tuple(grad.shape), tuple(out.shape), True, injective=True)])]


def reshape(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """The same elements in the same order."""
    out = node(grad)
    return [(out, same(grad.shape, out.shape))]


def identity(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``clone`` and ``alias``."""
    return [(grad, ())]


def to_copy(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """Another dtype or device; the values are the same up to rounding."""
    out = node(grad)
    product.changes_device |= out.device != grad.device
    return None if out.is_complex() else [(out, [])]


def cat(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``cat``: each argument is a slice along ``dim``, but for empty ones of shape ``(0,)``."""
    dim, start, shape = signed(node._saved_dim) % grad.dim(), 0, grad.shape
    found: list[tuple[Tensor, Chain] | None] = []
    for out in as_tuple(node(grad)):
        part = out.shape
        if part == (0,):
            found.append((out, [nothing(tuple(shape), (0,))]))
            continue
        found.append((out, cut(dim, start, shape, part)))
        start += part[dim]
    return found


def stack(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``stack``: each argument is one index along the new dimension."""
    dim, shape = signed(node._saved_dim) % grad.dim(), tuple(grad.shape)
    return [
        (out, [Index(_slice(dim, k), shape, tuple(out.shape), injective=True)])
        for k, out in enumerate(as_tuple(node(grad)))
    ]


def _slice(dim: int, k: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x.select(dim, k)


# Sums --------------------------------------------------------------------------------------------


def expand(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``expand``: sums over the expanded dimensions."""
    shape = grad.shape
    if shape == node._saved_self_sym_sizes:
        return [(grad, ())]
    out = node(grad)
    return [(out, summed(shape, out.shape))]


def sum_or_mean(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``sum`` and ``mean``: broadcasts the cotangent to all summands; for a mean, divides it."""
    out = node(grad)
    chain: list[Map] = [_spread(node, grad, out)]
    if type(node).__name__.startswith("Mean"):
        count = max(1, out.numel() // max(1, grad.numel()))
        chain.append(Scale(1 / count, tuple(out.shape)))
    return [(out, chain)]


def weighted(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """Functions of many elements, each of whose derivatives is a number times the cotangent of the
    sum that the element is in (``logsumexp``, norms, losses): the node's results for ones.
    """
    if any(child is not None for child, _ in edges[1:]) or is_complex(edges[0]):
        return None
    weight: Tensor | None = next(iter(as_tuple(node(torch.ones_like(grad)))))
    if weight is None:  # the norm of order 0, which counts
        return [None]
    spread = _spread(node, grad, weight)
    return [(spread.apply(grad) * weight, [spread, Scale(weight, tuple(weight.shape))])]


def _spread(node: Node, grad: Tensor, out: Tensor) -> Index:
    """Broadcasts the cotangent of sums over the saved dimensions to the shape of the summands."""
    shape, wide = tuple(grad.shape), tuple(out.shape)
    thin = shape
    if len(shape) < len(wide):
        over = getattr(node, "_saved_dim", None) or range(len(wide))
        dims = {signed(d) % len(wide) for d in over}
        thin = tuple(1 if d in dims else n for d, n in enumerate(wide))
    return Index(lambda x: x.reshape(thin).expand(wide), shape, wide)


def cumsum(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``cumsum``: the sum of the cotangents from an element on."""
    if not grad.dim() or nodes.wanted(*edges[0]).dtype is not grad.dtype:
        return None
    scan = Scan(signed(node._saved_dim) % grad.dim(), tuple(grad.shape), reverse=True)
    return [(node(grad), [scan])]


# Several cotangents ------------------------------------------------------------------------------


def split(node: Node, grads: Mapping[int, Tensor]) -> JoinedCotangent:
    """``split``: each output is a slice of the argument along ``dim``."""
    out, dim = _joined_cotangent(node, grads)
    if type(node).__name__.startswith("SplitWithSizes"):
        starts = [0, *accumulate(node._saved_split_sizes)]
    else:
        starts = [k * node._saved_split_size for k in range(max(grads) + 1)]
    wide = out.shape
    return out, {k: slot(dim, starts[k], g.shape, g.shape, wide) for k, g in grads.items()}


def unbound(node: Node, grads: Mapping[int, Tensor]) -> JoinedCotangent:
    """``unbind``: each output is one index along ``dim``."""
    out, dim = _joined_cotangent(node, grads)
    cuts = {k: (*g.shape[:dim], 1, *g.shape[dim:]) for k, g in grads.items()}
    return out, {k: slot(dim, k, cuts[k], g.shape, out.shape) for k, g in grads.items()}


def _joined_cotangent(node: Node, grads: Mapping[int, Tensor]) -> tuple[Tensor, int]:
    """The node's result for its cotangents, and the dimension that was split."""
    out = node(*[grads.get(k) for k in range(nodes.outputs_of(node))])
    return out, signed(node._saved_dim) % out.dim()
