"""The (max, ×) contraction in plain torch: the definition that all kernels must match."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor


class Operand(NamedTuple):
    """A batch of matrices given by offset tables: ``x[i, r, k] = data[batch[i] + rows[r] +
    inner[k]]``, ``data`` flat; for example the windows of a convolution.
    """

    data: Tensor
    batch: Tensor
    rows: Tensor
    inner: Tensor


Matrices: TypeAlias = Tensor | Operand
"""A batch of matrices. As right operand of a contraction, a tensor is (i, k, n), and an ``Operand``
has n as its rows and k as its inner dimension.
"""


class Contraction(NamedTuple):
    """Results of a contraction, each (i, m, n); None where it was not requested."""

    value: Tensor | None
    index: Tensor | None  # type: ignore[assignment]  # not tuple.index
    marks: Tensor | None


MAX_PRODUCTS = 1 << 20
"""The most products materialised at a time."""


def _wide(x: Tensor) -> Tensor:
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


def sizes(x: Matrices) -> tuple[int, int, int]:
    """(matrices, rows, k) of an operand; the shape of a tensor."""
    if isinstance(x, Operand):
        return len(x.batch), len(x.rows), len(x.inner)
    batch, rows, inner = x.shape
    return batch, rows, inner


def kind(a: Matrices, b: Matrices) -> torch.dtype:
    """The dtype of the products; half precisions are promoted to float32."""
    left, right = a.data.dtype, b.data.dtype  # a tensor's data is a tensor
    if left is right and left.itemsize > 2:
        return left
    wide = [torch.float32 if dtype.itemsize == 2 else dtype for dtype in (left, right)]
    return torch.promote_types(*wide)


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
    marks: Matrices | None = None,
    of_b: bool = False,
) -> Contraction:
    """``value[i, m, n] = maxₖ |a[i, m, k] · b[i, k, n]|``, 0 if k is empty.

    ``index`` is the lowest k that attains the maximum, undefined where the value is 0. The
    provenance ids of the result are ``marks[i, m, index]``, or ``marks[i, index, n]`` if the ids
    belong to b (``of_b``); 0 where the value is 0.
    """
    (i, m, k), n = sizes(a), sizes(b)[1] if isinstance(b, Operand) else b.shape[2]
    right = b if isinstance(b, Operand) else b.transpose(1, 2)
    device = (a.data if isinstance(a, Operand) else a).device
    sizes_out = torch.zeros(i, m, n, dtype=kind(a, b), device=device)
    at = torch.zeros(i, m, n, dtype=torch.int64, device=device) if index else None
    out_ids = None if marks is None else torch.zeros(i, m, n, dtype=torch.int32, device=device)
    columns = max(1, MAX_PRODUCTS // max(1, i * k))
    lines = max(1, columns // max(1, n))
    for row in range(0, m if i and k else 0, lines):
        rows = slice(row, row + lines)
        some = _wide(_some(a, rows)).abs()[:, :, None]
        ids = None if marks is None or of_b else _some(marks, rows).int()
        for column in range(0, n, columns):
            place = (slice(None), rows, slice(column, column + columns))
            products = some * _wide(_some(right, place[2])).abs()[:, None]
            if at is None and out_ids is None:
                sizes_out[place] = products.amax(3)
                continue
            best, first = products.max(3)
            sizes_out[place] = best
            if at is not None:
                at[place] = first
            if out_ids is None:
                continue
            if ids is not None:
                found = ids.gather(2, first)
            else:
                assert marks is not None
                ids_of_b = marks if isinstance(marks, Operand) else marks.transpose(1, 2)
                found = _some(ids_of_b, place[2]).int().gather(2, first.mT).mT
            out_ids[place] = found.masked_fill(best == 0, 0)
    return Contraction(sizes_out if value else None, at, out_ids)
