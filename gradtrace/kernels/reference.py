"""The contraction in (max, ×), in plain torch: the definition."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Operand(NamedTuple):
    """A batch of matrices that are not written out: ``x[i, r, k] = data[batch[i] + rows[r] +
    inner[k]]`` (``data`` is flat); windows of a convolution are such.
    """

    data: Tensor
    batch: Tensor
    rows: Tensor
    inner: Tensor


LIMIT = 1 << 20
"""The most products that are written out at a time."""


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def argmax(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The largest entries along a dimension and the first place of each; NaN is largest of all."""
    if x.shape[dim]:
        value, index = x.max(dim)
        return value, index
    shape = list(x.shape)
    del shape[dim]
    return x.new_zeros(shape), torch.full(shape, -1, device=x.device)


def largest(a: Tensor, b: Tensor) -> Tensor:
    """``out[i, m, n] = maxₖ |a[i, m, k] · b[i, k, n]|``; 0 where there is no k."""
    return _contract(a, b, index=False)[0]


def winner(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """``largest`` and the lowest k that attains it; the k means nothing where the value is 0."""
    value, index = _contract(a, b, index=True)
    assert index is not None
    return value, index


def _contract(a: Tensor, b: Tensor, index: bool) -> tuple[Tensor, Tensor | None]:
    a, b = _wide(a).abs(), _wide(b).abs()
    (i, m, k), n = a.shape, b.shape[-1]
    dtype = torch.promote_types(a.dtype, b.dtype)
    value = torch.zeros(i, m, n, dtype=dtype, device=a.device)
    at = torch.zeros(i, m, n, dtype=torch.int64, device=a.device) if index else None
    if not k or not value.numel():
        return value, at
    columns = max(1, LIMIT // (i * k))
    lines = max(1, columns // n)
    for row in range(0, m, lines):
        some = a[:, row : row + lines, :, None]
        for column in range(0, n, columns):
            products = some * b[:, None, :, column : column + columns]
            place = (slice(None), slice(row, row + lines), slice(column, column + columns))
            if at is None:
                value[place] = products.amax(2)
            else:
                value[place], at[place] = products.max(2)
    return value, at
