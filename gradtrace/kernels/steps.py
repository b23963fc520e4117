"""What lies between contractions: value and mark of every element in one pass over memory.

A *mark* is an int32 number beside an element; 0 says that no path reaches it. Each function is
here in plain torch, its definition, and calls the compiled one where that can serve.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from gradtrace.kernels import native
from gradtrace.kernels.native import checked
from gradtrace.kernels.reference import argmax

LANES = 4
"""Elements are summed by place modulo this, so that sums need not wait for one another."""

CHUNK = 1 << 16
"""How many elements at least are summed on their own; chunks are then added up in order."""

CHUNKS = 64
"""The most chunks that a tally has."""

ALONE = 1 << 15
"""Elements up to which one thread does it sooner than several."""


class Carried(NamedTuple):
    """The largest |contribution| to each element, and the mark of where it came from."""

    value: Tensor
    marks: Tensor


# The compiled ones -------------------------------------------------------------------------------


@cache
def _typed(library: ctypes.CDLL) -> ctypes.CDLL:
    """The library, told what its functions take."""
    at, number, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    mark = ctypes.c_int32
    library.gradtrace_merge.argtypes = [flag, number, at, at, at, at, mark, mark, flag]
    library.gradtrace_tally.argtypes = [flag, number, at, at, number, number, at, at, flag]
    library.gradtrace_magnitude.argtypes = [flag, number, at, number, at, at, flag]
    library.gradtrace_reduce.argtypes = [flag, at, at, at, at, at, flag]
    library.gradtrace_normalise.argtypes = [flag, number, number, flag, at, at, at, at, flag]
    library.gradtrace_scatter.argtypes = [flag, number, at, at, at, number, at, at]
    return library


def _serving(value: Tensor, *others: Tensor) -> ctypes.CDLL | None:
    """The library, if it can serve: numbers it knows, on the CPU."""
    library = native.library()
    if library is None or value.dtype not in (torch.float32, torch.float64):
        return None
    if value.is_cuda or any(x.device != value.device for x in others) or value.device.type != "cpu":
        return None
    return _typed(library)


def _is_wide(x: Tensor) -> bool:
    return x.dtype is torch.float64


def _threads(n: int) -> int:
    return 1 if n <= ALONE else torch.get_num_threads()


# Choosing among terms ----------------------------------------------------------------------------


def merge(size: Tensor, marks: Tensor, value: Tensor, other: Tensor | int, shift: int = 0) -> None:
    """Let another term compete, in place: where ``|value| > size`` (NaN is largest of all, the
    first of them stays) ``size = |value|`` and ``marks = other + shift``.

    What is 0 never wins, nor where ``other``, a mark or one for each element, is 0.
    """
    library = _serving(size)
    if library is None:
        return _merge(size, marks, value, other, shift)
    if isinstance(other, int) and not other:
        return
    value = value.to(size.dtype).expand(size.shape).contiguous()
    beside, constant = (None, other) if isinstance(other, int) else (other.contiguous(), 0)
    n, there = size.numel(), 0 if beside is None else beside.data_ptr()
    where = (size.data_ptr(), marks.data_ptr(), value.data_ptr(), there)
    checked(library.gradtrace_merge(_is_wide(size), n, *where, constant, shift, _threads(n)))


def _merge(size: Tensor, marks: Tensor, value: Tensor, other: Tensor | int, shift: int) -> None:
    value = value.to(size.dtype).abs()
    wins = (value > size) | (value.isnan() & ~size.isnan())
    wins &= torch.as_tensor(other, device=size.device) != 0
    size.copy_(torch.where(wins, value, size))
    marks.copy_(torch.where(wins, other + shift, marks))


# Counting ----------------------------------------------------------------------------------------


def tally(marks: Tensor, gradient: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """``counts[m]`` (int64) and ``sums[m] = Σ |gradient|`` (float64) over the elements of mark m,
    for m below ``count``; on the device of the marks, so that nobody waits for them.

    The order of the sum is fixed: elements of a chunk by place modulo ``LANES``, lanes by pairs,
    then chunk after chunk.
    """
    marks, gradient = _together(marks, gradient)
    library = _serving(gradient, marks)
    if library is None:
        return _tally(marks, gradient, count)
    counts = torch.zeros(count, dtype=torch.int64)
    sums = torch.zeros(count, dtype=torch.float64)
    n = gradient.numel()
    where = (marks.data_ptr(), gradient.data_ptr(), count, _chunks(n, count)[0])
    found = (counts.data_ptr(), sums.data_ptr())
    checked(library.gradtrace_tally(_is_wide(gradient), n, *where, *found, _threads(n)))
    return counts, sums


def _tally(marks: Tensor, gradient: Tensor, count: int) -> tuple[Tensor, Tensor]:
    length, chunks = _chunks(gradient.numel(), count)
    place = torch.arange(gradient.numel(), device=marks.device)
    key = (place // length * LANES + place % length % LANES) * count + marks
    weights = gradient.abs().double()
    sums = torch.bincount(key, weights, minlength=chunks * LANES * count)
    counts = torch.bincount(marks, minlength=count)
    return counts, _added(sums.double().reshape(chunks, LANES, count))


def measured(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """How many elements are not 0 (int64), and the sum of their sizes (float64), in the order of
    ``tally``; 0-d, on the device of the gradient, so that nobody waits for them.
    """
    (flat,) = _together(gradient)
    library = _serving(flat)
    if library is None:
        return _measured(flat.reshape(-1))
    count, total, n = ctypes.c_int64(0), ctypes.c_double(0.0), flat.numel()
    where = (flat.data_ptr(), _chunks(n, 1)[0], ctypes.byref(count), ctypes.byref(total))
    checked(library.gradtrace_magnitude(_is_wide(flat), n, *where, _threads(n)))
    return torch.tensor(count.value), torch.tensor(total.value, dtype=torch.float64)


def magnitude(gradient: Tensor) -> tuple[int, float]:
    """``measured`` as Python's numbers, which waits for a GPU."""
    count, total = measured(gradient)
    return int(count), float(total)


def _measured(flat: Tensor) -> tuple[Tensor, Tensor]:
    length, chunks = _chunks(flat.numel(), 1)
    place = torch.arange(flat.numel(), device=flat.device)
    key = place // length * LANES + place % length % LANES
    sums = torch.bincount(key, flat.abs().double(), minlength=chunks * LANES)
    return flat.count_nonzero(), _added(sums.double().reshape(chunks, LANES, 1)).reshape(())


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
    if len(tensors) == 1 and first.is_contiguous():
        return [_wide(first)]  # flat enough
    order = sorted(range(first.dim()), key=first.stride, reverse=True)
    turned = [x.permute(order) for x in tensors]
    if all(x.is_contiguous() for x in turned):
        tensors = tuple(turned)
    return [_wide(x).reshape(-1).contiguous() for x in tensors]


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


# Choosing along lines ----------------------------------------------------------------------------


def reduce(x: Tensor, marks: Tensor, dims: Sequence[int]) -> Carried:
    """The largest |x| over dimensions, which are gone then, and the mark of the first of equals."""
    x = _wide(x)
    library = _serving(x, marks)
    if library is None or not x.numel() or prod(x.shape[d] for d in dims) >= 1 << 31:
        return _reduce(x, marks, dims)
    x, marks, levels = _leveled(x, marks, dims)
    shape = [x.shape[d] for d in range(x.dim()) if d not in dims]
    value, out = x.new_empty(shape), marks.new_empty(shape)
    how = (ctypes.c_int64 * 12)(*(part[n] for n in range(3) for part in levels))
    where = (x.data_ptr(), marks.data_ptr(), how, value.data_ptr(), out.data_ptr())
    checked(library.gradtrace_reduce(_is_wide(x), *where, _threads(x.numel())))
    return Carried(value, out)


Level = tuple[int, int, int]
"""A size, and what a step along it adds to the place of a value and of a mark."""


def _leveled(x: Tensor, marks: Tensor, dims: Sequence[int]) -> tuple[Tensor, Tensor, list[Level]]:
    """Tensors, copied if need be, whose dimensions are four levels: reduced, kept, reduced, kept,
    each of a size that may be 1.
    """
    levels = _levels(x, marks, dims)
    if levels is None:
        kept = [d for d in range(x.dim()) if d not in dims]
        order = [*kept, *sorted(dims)]
        back = [order.index(d) for d in range(x.dim())]
        x, marks = (t.permute(order).contiguous().permute(back) for t in (x, marks))
        n, width = prod(x.shape[d] for d in kept), prod(x.shape[d] for d in dims)
        levels = [(1, 0, 0), (n, width, width), (width, 1, 1), (1, 0, 0)]
    return x, marks, levels


def _levels(x: Tensor, marks: Tensor, dims: Sequence[int]) -> list[Level] | None:
    """The four levels of tensors as they lie, or None if they have more."""
    found: list[Level] = [(1, 0, 0)] * 4
    level = 4
    for d in reversed(range(x.dim())):
        size, step, along = x.shape[d], x.stride(d), marks.stride(d)
        if size == 1:
            continue
        reduced = d in dims
        if level < 4 and (level % 2 == 0) == reduced:
            inner, *steps = found[level]
            if [step, along] == [inner * each for each in steps]:
                found[level] = (inner * size, steps[0], steps[1])
                continue
        level -= 1 if (level % 2 == 1) == reduced else 2
        if level < 0:
            return None
        found[level] = (size, step, along)
    return found


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
    x = _wide(x)
    library = _serving(x, marks, target)
    if library is None:
        return _scatter(x, marks, target, size)
    x, marks, target = x.contiguous(), marks.contiguous(), target.long().contiguous()
    value, out = x.new_zeros(size), marks.new_zeros(size)
    where = (x.data_ptr(), marks.data_ptr(), target.data_ptr(), size)
    found = (value.data_ptr(), out.data_ptr())
    checked(library.gradtrace_scatter(_is_wide(x), len(x), *where, *found))
    return Carried(value, out)


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


# Diagonal plus low rank --------------------------------------------------------------------------


class Lines(NamedTuple):
    """``J[i, j] = Σᵣ left[r][i]·right[r][j]``, and ``diagonal[i]`` more for i = j, along every line
    of x; each is (lines, n), perhaps expanded.
    """

    diagonal: Tensor
    left: Sequence[Tensor]
    right: Sequence[Tensor]
    x: Tensor


class Chosen(NamedTuple):
    """The largest |J[i, j]·x[j]|, the lowest j that has it (-1 for none), or the mark there."""

    value: Tensor
    place: Tensor | None
    marks: Tensor | None


def normalise(how: Lines, marks: Tensor | None = None) -> Chosen | None:
    """The largest contribution to each element of lines, with its place, or, given marks, its mark.

    None where the compiled kernel cannot serve; ``maps.normaliser`` has it in plain torch.
    """
    parts = (how.diagonal, how.x, *how.left, *how.right)
    library = _serving(how.x, *parts)
    rank, (lines, n) = len(how.left), how.x.shape
    if library is None or rank not in (1, 2) or not how.x.numel() or n >= 1 << 31:
        return None
    if any(part.dtype is not how.x.dtype for part in parts):
        return None
    value = how.x.new_empty(lines, n)
    place = torch.empty(lines, n, dtype=torch.int64) if marks is None else None
    out = None if marks is None else marks.new_empty(lines, n)
    given = [*parts, *([] if marks is None else [marks])]
    numbers = [number for part in given for number in (part.data_ptr(), *part.stride())]
    where = (ctypes.c_int64 * (3 * len(parts) + 3))(*numbers)
    found = (0 if each is None else each.data_ptr() for each in (value, place, out))
    threads = _threads(how.x.numel() * 16)
    checked(library.gradtrace_normalise(_is_wide(how.x), lines, n, rank, where, *found, threads))
    return Chosen(value, place, out)
