"""Rules of matrix products, of distances and of cumulative sums of exponentials."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradtrace.autodiff.nodes import Edges, Node, signed
from gradtrace.linops import Around, Contract, Index, Map, Scale, Scan, Scatter, Sparse
from gradtrace.recording.aten_rules import distance_maps, matrix_times, times_matrix
from gradtrace.recording.node_rules.base import Chain, Edge, Product, RuleResult


def matmul(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``x @ w``; the node saves an operand only if the other one needs a gradient."""
    x, w = node._saved_self, node._saved_mat2
    steps = node._saved_mat2_sym_strides if type(node).__name__ == "MmBackward0" else ()
    return [_left(grad, w, edges[0], product), _right(grad, x, edges[1], product, steps)]


def addmm(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``bias + x @ w``."""
    if node._saved_alpha != 1 or node._saved_beta != 1:
        return None
    x, w = node._saved_mat1, node._saved_mat2
    bias: tuple[Tensor, Chain] | None = None if edges[0][0] is None else (grad, ())
    steps = node._saved_mat2_sym_strides
    return [bias, _left(grad, w, edges[1], product), _right(grad, x, edges[2], product, steps)]


def sparse_addmm(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``bias + A @ x`` with a sparse A that needs no gradient."""
    if node._saved_alpha != 1 or edges[1][0] is not None:
        return None
    if node._saved_beta != 1 and edges[0][0] is not None:  # sparse.mm: beta is 0, without bias
        return None
    bias: tuple[Tensor, Chain] | None = None if edges[0][0] is None else (grad, ())
    return [bias, None, _right(grad, node._saved_mat1, edges[2], product)]


def mv(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``A @ x`` of a constant matrix and a vector."""
    if edges[0][0] is not None:
        return None
    matrix = node._saved_self
    out = matrix.t() @ grad
    shape, wanted = tuple(grad.shape), tuple(out.shape)
    if matrix.layout is not torch.strided:
        return [None, (out, matrix_times(matrix.t(), shape, wanted))]
    return [None, (out, (Contract("m,mk->k", matrix, shape, wanted),))]


def sparse_mm_reduce(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``torch.sparse.mm(A, x, reduce)`` with a constant A in CSR layout."""
    if edges[0][0] is not None:
        return None
    matrix, how, winner = node._saved_self, node._saved_reduce, node._saved_result1
    shape, wanted = tuple(grad.shape), (matrix.shape[1], grad.shape[1])
    values, columns, starts = matrix.values(), matrix.col_indices().long(), matrix.crow_indices()
    count = starts.diff()
    if how in ("sum", "mean"):
        rows = torch.arange(len(count), device=grad.device).repeat_interleave(count)
        weight = values / count[rows] if how == "mean" else values
        entries, around = (columns, rows, weight), Around(inner=shape[1])
        chain: list[Map] = [Sparse.of(entries, shape, wanted, around)]
    else:  # amax, amin: the cotangent of each element goes to the entry that was chosen
        there = (count > 0).unsqueeze(1) & (winner < len(values))
        entry = torch.where(there, winner, 0)
        column = torch.arange(shape[1], device=grad.device)
        target = torch.where(there, columns[entry] * shape[1] + column, -1)
        chain = [Scale(values[entry], shape), Scatter(target, wanted)]
    out = grad
    for step in chain:
        out = step.apply(out)
    return [None, (out, chain)]


def _left(
    grad: Tensor, w: Tensor | None, edge: Edge, product: Product
) -> tuple[Tensor, Chain] | None:
    """The gradient of ``x @ w`` by x: ``g @ wᵀ``, of matrices or batches of matrices."""
    if edge[0] is None or w is None:
        return None
    if w.layout is not torch.strided:
        out = grad @ w.t()
        return out, times_matrix(w.t(), tuple(grad.shape), tuple(out.shape))
    out = product(grad, w.mT, edge)
    spec = "mn,kn->mk" if grad.dim() == 2 else "bmn,bkn->bmk"
    return out, (Contract(spec, w, tuple(grad.shape), tuple(out.shape)),)


def _right(
    grad: Tensor, x: Tensor | None, edge: Edge, product: Product, steps: Sequence[int] = ()
) -> tuple[Tensor, Chain] | None:
    """The gradient of ``x @ w`` by w: ``xᵀ @ g``.

    ``steps`` are the strides of w, if known. The result gets the same memory order, as in PyTorch.
    """
    if edge[0] is None or x is None:
        return None
    if x.layout is not torch.strided:
        across = x.transpose(-2, -1)
        out = (torch.mm if x.dim() == 2 else torch.bmm)(across, grad)
        return out, matrix_times(across, tuple(grad.shape), tuple(out.shape))
    via_transpose = len(steps) == 2 and steps[0] == 1 != steps[1]  # PyTorch's condition
    out = product(x.mT, grad, edge, via_transpose, None if x.is_leaf and x.requires_grad else grad)
    spec = "mn,mk->kn" if grad.dim() == 2 else "bmn,bmk->bkn"
    map_ = Contract(spec, x, tuple(grad.shape), tuple(out.shape), via_transpose)
    return out, (map_,)


def euclidean_dist(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """Euclidean distances that the forward pass computed by a matrix product.

    The gradient by each set of points is recorded with one weight for each pair and coordinate;
    PyTorch's own formula has two terms that would have to be merged.
    """
    if grad.dtype not in (torch.float32, torch.float64):
        return None
    x, y, distance = node._saved_x1, node._saved_x2, node._saved_result
    if not distance.numel() or not x.numel():
        return None
    ratio = (grad / distance).masked_fill_(distance == 0, 0)
    first = x * ratio.sum(-1, True) - ratio @ y
    second = y * ratio.sum(-2).unsqueeze(-1) - ratio.mT @ x
    turn = Index(lambda g: g.mT, tuple(grad.shape), tuple(grad.mT.shape), injective=True)
    return [
        None if edges[0][0] is None else (first, distance_maps(x, y, 2.0, distance)),
        None if edges[1][0] is None else (second, [turn, *distance_maps(y, x, 2.0, distance.mT)]),
    ]


def logcumsumexp(node: Node, grad: Tensor, edges: Edges, product: Product) -> RuleResult:
    """``logcumsumexp``: ``∂yᵢ/∂xⱼ = exp(xⱼ - yᵢ)`` for j ≤ i.

    Recorded as a reverse cumulative sum between two scalings, ``exp(m - yᵢ)`` and ``exp(xⱼ - m)``
    with ``m = max y``. Where these would overflow, as one matrix for each slice along ``dim``.
    """
    if not grad.dim() or not grad.numel() or grad.is_complex():
        return None
    x, y, dim = node._saved_self, node._saved_result, signed(node._saved_dim) % grad.dim()
    shape = tuple(grad.shape)
    most = y.amax(dim, keepdim=True)
    span = float((most - y.amin(dim, keepdim=True)).amax())
    if span < (600 if y.dtype is torch.float64 else 60):  # False for NaN
        before, after = (most - y).exp(), (x - most).exp()
        scan = Scan(dim, shape, reverse=True)
        out = scan.apply(grad * before) * after
        return [(out, [Scale(before, shape), scan, Scale(after, shape)])]
    x, y = x.movedim(dim, -1), y.movedim(dim, -1)
    weight = (x.unsqueeze(-1) - y.unsqueeze(-2)).exp().triu()  # (..., j, i)
    letters = "abcdefghijkl"[: grad.dim()]
    into, rest = letters.replace(letters[dim], "z"), letters.replace(letters[dim], "")
    spec = f"{letters},{rest}z{letters[dim]}->{into}"
    product_of = Contract(spec, weight, shape, shape)
    return [(product_of.apply(grad), [product_of])]
