"""In plain torch: the largest contribution along dimensions, to targets, in sparse matrices."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from gradtrace.kernels.operands import Compressed, Selected
from gradtrace.kernels.plain_contraction import argmax, widened


def merge(size: Tensor, ids: Tensor, value: Tensor, other: Tensor | int, shift: int = 0) -> None:
    """``Backend.merge``."""
    value = value.to(size.dtype).abs()
    wins = (value > size) | (value.isnan() & ~size.isnan())
    wins &= torch.as_tensor(other, device=size.device) != 0
    size.copy_(torch.where(wins, value, size))
    ids.copy_(torch.where(wins, other + shift, ids))


def reduce(x: Tensor, ids: Tensor, dims: Sequence[int]) -> Selected:
    """``Backend.reduce``."""
    kept = [d for d in range(x.dim()) if d not in dims]
    shape, width = [x.shape[d] for d in kept], prod(x.shape[d] for d in dims)
    order = [*kept, *sorted(dims)]
    value, place = argmax(widened(x).abs().permute(order).reshape(prod(shape), width), 1)
    lines = ids.permute(order).reshape(prod(shape), width)
    return Selected(value.reshape(shape), _taken(lines, value, place).reshape(shape))


def _taken(lines: Tensor, value: Tensor, place: Tensor) -> Tensor:
    """``lines[n, place[n]]``, provenance ids; 0 where the value is 0."""
    if not lines.shape[1]:
        return lines.new_zeros(len(lines))
    return torch.where(value != 0, lines.gather(1, place.unsqueeze(1)).squeeze(1), 0)


def scatter(x: Tensor, ids: Tensor, target: Tensor, size: int) -> Selected:
    """``Backend.scatter``."""
    n, sizes = len(x), widened(x).abs()
    place = target.remainder(size + 1)  # -1 becomes an extra last index
    value = sizes.new_zeros(size + 1).scatter_reduce(0, place, sizes, "amax")
    wins = (sizes == value[place]) | sizes.isnan()
    number = torch.where(wins, torch.arange(n, device=x.device), n)
    first = torch.full_like(value, n, dtype=torch.int64).scatter_reduce(0, place, number, "amin")
    there = (value != 0) & (first < n)
    padded = torch.cat([ids, ids.new_zeros(1)])
    return Selected(value[:-1], torch.where(there, padded[first], 0)[:-1])


# Sparse matrices ---------------------------------------------------------------------------------


def sparse_sum(matrices: Compressed, x: Tensor) -> Tensor:
    """``Backend.sparse_sum``."""
    row, product = _products(matrices, x)
    total = product.new_zeros(product.shape[0], len(matrices.starts) - 1, product.shape[2])
    return _unturned(total.index_add_(1, row, product), matrices)


def sparse(matrices: Compressed, x: Tensor, ids: Tensor) -> Selected:
    """``Backend.sparse``."""
    row, product = _products(matrices, x)
    rows, columns = max(matrices.sizes[4], 1), matrices.sizes[3]
    n, size, target = len(row), product.abs(), row.reshape(1, -1, 1).expand(product.shape)
    shape = (product.shape[0], len(matrices.starts) - 1, product.shape[2])
    value = size.new_zeros(shape).scatter_reduce(1, target, size, "amax")
    wins = (size == value.gather(1, target)) | size.isnan()
    number = torch.arange(n, device=x.device).reshape(1, -1, 1)
    number = torch.where(wins, number, n)
    first = number.new_full(shape, n).scatter_reduce(1, target, number, "amin")
    beside = _entries(ids, matrices.source + row // rows * columns, matrices)
    beside = torch.cat([beside, beside.new_zeros(beside.shape[0], 1, beside.shape[2])], 1)
    selected = torch.where(value != 0, beside.gather(1, first), 0)
    return Selected(_unturned(value, matrices), _unturned(selected, matrices))


def _products(matrices: Compressed, x: Tensor) -> tuple[Tensor, Tensor]:
    """The row of each entry, and ``weight·x`` at each entry: (planes, entries, inner)."""
    starts, source, weight, (*_, columns, rows) = matrices
    numbers = torch.arange(len(starts) - 1, device=starts.device)
    row = numbers.repeat_interleave(starts.diff(), output_size=len(source))
    taken = _entries(x, source + row // max(rows, 1) * columns, matrices)
    return row, taken * weight.reshape(1, -1, 1)


def _entries(x: Tensor, column: Tensor, matrices: Compressed) -> Tensor:
    """The elements of x at the columns of entries: (planes, entries, inner)."""
    blocks, planes, inner, columns, _ = matrices.sizes
    turned = x.reshape(blocks, planes, columns, inner).transpose(0, 1)
    return turned.reshape(planes, blocks * columns, inner).index_select(1, column)


def _unturned(x: Tensor, matrices: Compressed) -> Tensor:
    blocks, planes, inner, _, rows = matrices.sizes
    return x.reshape(planes, blocks, rows, inner).transpose(0, 1).reshape(-1)
