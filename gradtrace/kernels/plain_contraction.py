"""The (max, ×) contraction in plain torch: of whole matrices, and along single lines."""

from __future__ import annotations

import torch
from torch import Tensor

from gradtrace.kernels import tuning
from gradtrace.kernels.operands import (
    Contraction,
    Matrices,
    MatrixLayout,
    Operand,
    TensorLines,
    columns,
    product_dtype,
    sizes,
)


def widened(x: Tensor) -> Tensor:
    """Half precisions as float32; other tensors as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def argmax(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The maximum along a dimension and its first index; NaN counts as the largest value.

    Along an empty dimension the maximum is 0 and the index -1.
    """
    if x.shape[dim]:
        value, index = x.max(dim)
        return value, index
    shape = list(x.shape)
    del shape[dim]
    return x.new_zeros(shape), torch.full(shape, -1, device=x.device)


def _some(x: Matrices, rows: slice) -> Tensor:
    """A slice of the rows as a tensor: (batch, rows, k)."""
    if not isinstance(x, Operand):
        return x[:, rows]
    return x.data[x.batch[:, None, None] + x.rows[rows, None] + x.inner]


def contraction(
    a: Matrices,
    b: Matrices,
    *,
    value: bool = True,
    index: bool = False,
    ids: Matrices | None = None,
    of_b: bool = False,
) -> Contraction:
    """``Backend.contract``."""
    (i, m, k), n = sizes(a), columns(b)
    right = b if isinstance(b, Operand) else b.transpose(1, 2)
    device = a.device
    largest = torch.zeros(i, m, n, dtype=product_dtype(a, b), device=device)
    at = torch.zeros(i, m, n, dtype=torch.int64, device=device) if index else None
    chosen = None if ids is None else torch.zeros(i, m, n, dtype=torch.int32, device=device)
    width = max(1, tuning.MAX_PRODUCTS // max(1, i * k))
    lines = max(1, width // max(1, n))
    for row in range(0, m if i and k else 0, lines):
        rows = slice(row, row + lines)
        some = widened(_some(a, rows)).abs()[:, :, None]
        ids_of_a = None if ids is None or of_b else _some(ids, rows).int()
        for column in range(0, n, width):
            place = (slice(None), rows, slice(column, column + width))
            products = some * widened(_some(right, place[2])).abs()[:, None]
            if at is None and chosen is None:
                largest[place] = products.amax(3)
                continue
            best, first = products.max(3)
            largest[place] = best
            if at is not None:
                at[place] = first
            if chosen is None:
                continue
            if ids_of_a is not None:
                found = ids_of_a.gather(2, first)
            else:
                assert ids is not None
                ids_of_b = ids if isinstance(ids, Operand) else ids.transpose(1, 2)
                found = _some(ids_of_b, place[2]).int().gather(2, first.mT).mT
            chosen[place] = found.masked_fill(best == 0, 0)
    return Contraction(largest if value else None, at, chosen)


def as_matrices(
    a: Tensor, b: Tensor, ids: Tensor, layout: MatrixLayout
) -> tuple[Tensor, Tensor, Tensor]:
    """Tensors viewed as the matrices of a contraction, by the strides in a layout."""
    (i, m, n), k = layout.shape, layout.k
    left, right = a.as_strided((i, m, k), layout.a), b.as_strided((i, n, k), layout.b).mT
    if layout.of_b:
        return left, right, ids.as_strided((i, n, k), layout.ids).mT
    return left, right, ids.as_strided((i, m, k), layout.ids)


def lines(a: TensorLines, b: TensorLines, length: int) -> tuple[Tensor, Tensor]:
    """``Backend.contract_lines``."""
    dtype = torch.promote_types(a.data.dtype, b.data.dtype)
    value, place = line_results(a.offset, dtype)
    step = max(1, tuning.MAX_PRODUCTS // max(1, length))
    for first in range(0, len(value), step):
        some = slice(first, first + step)
        size = (a.take(some, length) * b.take(some, length)).abs()
        value[some], place[some] = argmax(size, 1)
    return value, place


def others(
    left: Tensor, right: Tensor, x: Tensor, line: Tensor, skip: Tensor
) -> tuple[Tensor, Tensor]:
    """``Backend.normalise_at``."""
    value, place = line_results(line, x.dtype)
    step = max(1, tuning.MAX_PRODUCTS // x.shape[1])
    for first in range(0, len(line), step):
        some = slice(first, first + step)
        weight = left[0, some].unsqueeze(1) * right[0, line[some]]
        for u, v in zip(left[1:], right[1:]):
            weight = weight + u[some].unsqueeze(1) * v[line[some]]
        size = (weight * x[line[some]]).abs().scatter(1, skip[some].unsqueeze(1), -1.0)
        value[some], place[some] = argmax(size, 1)
    return value, place


def line_results(like: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Uninitialised values and places, one for each line."""
    value = torch.empty(len(like), dtype=dtype, device=like.device)
    return value, torch.empty(len(like), dtype=torch.int64, device=like.device)
