"""What lies between contractions: value and mark of every element in one pass over memory.

A *mark* is an int32 number beside an element; 0 says that no path reaches it. Each function is
here in plain torch, its definition, and calls the compiled one where that can serve.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from gradtrace.kernels.reference import argmax

LANES = 4
"""Elements are summed by place modulo this, so that sums need not wait for one another."""

CHUNK = 1 << 16
"""How many elements at least are summed on their own; chunks are then added up in order."""

CHUNKS = 64
"""The most chunks that a tally has."""


class Carried(NamedTuple):
    """The largest |contribution| to each element, and the mark of where it came from."""

    value: Tensor
    marks: Tensor


# Choosing among terms ----------------------------------------------------------------------------


def merge(size: Tensor, marks: Tensor, value: Tensor, other: Tensor | int, shift: int = 0) -> None:
    """Let another term compete, in place: where ``|value| > size`` (NaN is largest of all, the
    first of them stays) ``size = |value|`` and ``marks = other + shift``.

    What is 0 never wins, nor where ``other``, a mark or one for each element, is 0.
    """
    _merge(size, marks, value, other, shift)


def _merge(size: Tensor, marks: Tensor, value: Tensor, other: Tensor | int, shift: int) -> None:
    value = value.to(size.dtype).abs()
    wins = (value > size) | (value.isnan() & ~size.isnan())
    wins &= torch.as_tensor(other, device=size.device) != 0
    size.copy_(torch.where(wins, value, size))
    marks.copy_(torch.where(wins, other + shift, marks))


# Counting ----------------------------------------------------------------------------------------


def tally(marks: Tensor, gradient: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """``counts[m]`` (int64) and ``sums[m] = Σ |gradient|`` (float64) over the elements of mark m,
    for m below ``count``.

    The order of the sum is fixed: elements of a chunk by place modulo ``LANES``, lanes by pairs,
    then chunk after chunk.
    """
    marks, gradient = _together(marks, gradient)
    return _tally(marks, gradient, count)


def _tally(marks: Tensor, gradient: Tensor, count: int) -> tuple[Tensor, Tensor]:
    length, chunks = _chunks(gradient.numel(), count)
    place = torch.arange(gradient.numel(), device=marks.device)
    key = (place // length * LANES + place % length % LANES) * count + marks
    weights = gradient.abs().double()
    sums = torch.bincount(key, weights, minlength=chunks * LANES * count)
    counts = torch.bincount(marks, minlength=count)
    return counts, _added(sums.reshape(chunks, LANES, count))


def magnitude(gradient: Tensor) -> tuple[int, float]:
    """How many elements are not 0, and the sum of their sizes, in the order of ``tally``."""
    (flat,) = _together(gradient)
    length, chunks = _chunks(flat.numel(), 1)
    place = torch.arange(flat.numel(), device=flat.device)
    key = place // length * LANES + place % length % LANES
    sums = torch.bincount(key, flat.abs().double(), minlength=chunks * LANES)
    return int(flat.count_nonzero()), float(_added(sums.reshape(chunks, LANES, 1)))


def _chunks(n: int, count: int) -> tuple[int, int]:
    """How long a chunk is, and how many there are: fewer where each needs a long table."""
    most = max(1, min(CHUNKS, (1 << 18) // max(count, 1)))
    length = max(CHUNK, -(-n // most))
    length += -length % LANES
    return length, max(1, -(-n // length))


def _added(sums: Tensor) -> Tensor:
    """(chunks, lanes, marks) summed: lanes by pairs, then chunks in order."""
    lanes = (sums[:, 0] + sums[:, 1]) + (sums[:, 2] + sums[:, 3])
    total = lanes[0]
    for chunk in lanes[1:]:
        total = total + chunk
    return total


def _together(*tensors: Tensor) -> list[Tensor]:
    """Tensors of one shape as flat ones, in the order of memory if all have the same strides and
    no gaps, else row by row. Half precision is widened.
    """
    first = tensors[0]
    order = sorted(range(first.dim()), key=first.stride, reverse=True)
    turned = [x.permute(order) for x in tensors]
    if all(x.is_contiguous() for x in turned):
        tensors = tuple(turned)
    return [_wide(x).reshape(-1) for x in tensors]


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


# Choosing along lines ----------------------------------------------------------------------------


def reduce(x: Tensor, marks: Tensor, dims: Sequence[int]) -> Carried:
    """The largest |x| over dimensions, which are gone then, and the mark of the first of equals."""
    return _reduce(x, marks, dims)


def _reduce(x: Tensor, marks: Tensor, dims: Sequence[int]) -> Carried:
    kept = [d for d in range(x.dim()) if d not in dims]
    shape, width = [x.shape[d] for d in kept], prod(x.shape[d] for d in dims)
    order = [*kept, *sorted(dims)]
    value, place = argmax(_wide(x).abs().permute(order).reshape(prod(shape), width), 1)
    lines = marks.permute(order).reshape(prod(shape), width)
    return Carried(value.reshape(shape), _taken(lines, value, place).reshape(shape))


def _taken(lines: Tensor, value: Tensor, place: Tensor) -> Tensor:
    """The marks of lines at a place of each; 0 where the value is 0."""
    if not lines.shape[1]:
        return lines.new_zeros(len(lines))
    return torch.where(value != 0, lines.gather(1, place.unsqueeze(1)).squeeze(1), 0)


def scatter(x: Tensor, marks: Tensor, target: Tensor, size: int) -> Carried:
    """``max |x[j]|`` over ``target[j] = i`` (-1: goes nowhere) for each i below ``size``, and the
    mark of the first of equals. Flat.
    """
    return _scatter(x, marks, target, size)


def _scatter(x: Tensor, marks: Tensor, target: Tensor, size: int) -> Carried:
    n, sizes = len(x), _wide(x).abs()
    place = target.remainder(size + 1)  # the last place takes what goes nowhere
    value = sizes.new_zeros(size + 1).scatter_reduce(0, place, sizes, "amax")
    wins = (sizes == value[place]) | sizes.isnan()
    number = torch.where(wins, torch.arange(n, device=x.device), n)
    first = torch.full_like(value, n, dtype=torch.int64).scatter_reduce(0, place, number, "amin")
    there = (value != 0) & (first < n)
    padded = torch.cat([marks, marks.new_zeros(1)])
    return Carried(value[:-1], torch.where(there, padded[first], 0)[:-1])
