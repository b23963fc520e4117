"""Fused elementwise and reduction kernels: values and provenance ids in one pass over memory.

A *provenance id* (parameter ``marks``) is an int32 number stored per element; 0 means that no path
reaches the element. Each function has its definition in plain torch here and calls the compiled CPU
kernel where that supports the tensors; on a GPU, the kernels of ``cuda_steps``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from gradtrace.kernels import cpu_library, cuda_steps, pointers
from gradtrace.kernels.cpu_library import checked
from gradtrace.kernels.cuda_steps import LineLayout
from gradtrace.kernels.reference import argmax

PIECE_ELEMENTS = 1 << 24
"""Larger leaves are summed in pieces of this many elements: their provenance ids need not be in
memory all at once, and the exact sums of a piece fit into 64 bits per bin."""

SINGLE_THREAD_MAX_ELEMENTS = 1 << 15
"""Up to this many elements one thread is faster than several."""


class Selected(NamedTuple):
    """The largest |contribution| to each element, and the provenance id of its source."""

    value: Tensor
    marks: Tensor


# Compiled kernels --------------------------------------------------------------------------------


@cache
def _typed(library: ctypes.CDLL) -> ctypes.CDLL:
    """The library with the ctypes signatures of its functions set."""
    at, number, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    mark = ctypes.c_int32
    library.gradtrace_merge.argtypes = [flag, number, at, at, at, at, mark, mark, flag]
    library.gradtrace_tally.argtypes = [flag, number, at, at, number, at, at, flag]
    library.gradtrace_magnitude.argtypes = [flag, number, at, at, at, flag]
    library.gradtrace_reduce.argtypes = [flag, at, at, at, at, at, flag]
    library.gradtrace_normalise.argtypes = [flag, number, number, flag, at, at, at, at, flag]
    library.gradtrace_scatter.argtypes = [flag, number, at, at, at, number, at, at]
    library.gradtrace_sparse.argtypes = [flag, at, at, at, at, at, at, at, at, flag]
    return library


def _serving(value: Tensor, *others: Tensor) -> ctypes.CDLL | None:
    """The library, if it supports these tensors: all on the CPU, values float32 or float64."""
    library = cpu_library.library()
    if library is None or not value.is_cpu or value.dtype not in (torch.float32, torch.float64):
        return None
    for x in others:
        if not x.is_cpu:
            return None
    return _typed(library)


def on_gpu(value: Tensor, *others: Tensor) -> bool:
    """Whether the GPU kernels support these tensors."""
    return cuda_steps.serves(value, *others) and value.dtype in cuda_steps.KINDS


def batchable(gradient: Tensor, *others: Tensor) -> bool:
    """Whether a leaf can be tallied in a batch with others: on a GPU, and in one piece."""
    return gradient.numel() <= PIECE_ELEMENTS and on_gpu(gradient, *others)


def _is_wide(x: Tensor) -> bool:
    return x.dtype is torch.float64


def _threads(n: int) -> int:
    return 1 if n <= SINGLE_THREAD_MAX_ELEMENTS else torch.get_num_threads()


# Maximum of terms --------------------------------------------------------------------------------


def merge(size: Tensor, marks: Tensor, value: Tensor, other: Tensor | int, shift: int = 0) -> None:
    """Elementwise maximum with another term, in place: where ``|value| > size``, set
    ``size = |value|`` and ``marks = other + shift``.

    NaN counts as the largest value, and the first NaN stays. ``other`` is one provenance id or one
    per element; where it is 0, and where the value is 0, nothing changes.
    """
    if on_gpu(size, marks, value) and cuda_steps.merge(size, marks, value, other, shift):
        return
    library = _serving(size, marks, value)
    if library is None or not (size.is_contiguous() and marks.is_contiguous()):
        return _merge(size, marks, value, other, shift)
    if isinstance(other, int) and not other:
        return
    value = value.to(size.dtype).expand(size.shape).contiguous()
    beside, constant = (None, other) if isinstance(other, int) else (other.contiguous(), 0)
    n, at = size.numel(), pointers.flat
    there = 0 if beside is None else at(beside, torch.int32, n)
    where = (at(size, size.dtype, n), at(marks, torch.int32, n), at(value, size.dtype, n), there)
    checked(library.gradtrace_merge(_is_wide(size), n, *where, constant, shift, _threads(n)))


def _merge(size: Tensor, marks: Tensor, value: Tensor, other: Tensor | int, shift: int) -> None:
    value = value.to(size.dtype).abs()
    wins = (value > size) | (value.isnan() & ~size.isnan())
    wins &= torch.as_tensor(other, device=size.device) != 0
    size.copy_(torch.where(wins, value, size))
    marks.copy_(torch.where(wins, other + shift, marks))


# Counts and sums by provenance id ----------------------------------------------------------------


def tally(marks: Tensor, gradient: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """``counts[m]`` (int64) and ``sums[m] = Σ |gradient|`` (float64) over the elements with
    provenance id m, for m below ``count``; on the device of the ids, without a sync.

    Sums are exact and rounded once, so that they are the same bits on every device and in any order
    of elements; leaves larger than ``PIECE_ELEMENTS`` are summed piece by piece. An id that is not
    below ``count`` is an error; on a GPU, where checking would need a sync, its element is ignored.
    """
    if (
        on_gpu(gradient, marks)
        and count
        and marks.dtype is torch.int32
        and _is_one_piece(marks, gradient)
    ):
        return cuda_steps.tally(marks, gradient, count)
    if gradient.device != marks.device:  # a CPU scalar among GPU tensors
        gradient = gradient.to(marks.device)
    marks, gradient = flattened(marks, gradient)
    if gradient.numel() <= PIECE_ELEMENTS:
        return _piece(marks, gradient, count)
    pieces = (
        _piece(
            marks[first : first + PIECE_ELEMENTS], gradient[first : first + PIECE_ELEMENTS], count
        )
        for first in range(0, gradient.numel(), PIECE_ELEMENTS)
    )
    return summed(pieces)


def summed(pieces: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Add up the counts and sums of pieces, in order."""
    found: tuple[Tensor, Tensor] | None = None
    for counts, sums in pieces:
        found = (counts, sums) if found is None else (found[0] + counts, found[1] + sums)
    assert found is not None
    return found


def _piece(marks: Tensor, gradient: Tensor, count: int) -> tuple[Tensor, Tensor]:
    if count and marks.dtype is torch.int32 and on_gpu(gradient, marks):
        return cuda_steps.tally(marks, gradient, count)
    gradient = _wide(gradient)
    library = _serving(gradient, marks)
    if library is None:
        return _tally(marks, gradient, count)
    counts = torch.empty(count, dtype=torch.int64, device=gradient.device)
    sums = torch.empty(count, dtype=torch.float64, device=gradient.device)
    n, at = gradient.numel(), pointers.flat
    where = (at(marks, torch.int32, n), at(gradient, gradient.dtype, n), count)
    found = (counts.data_ptr(), sums.data_ptr())  # just made
    checked(library.gradtrace_tally(_is_wide(gradient), n, *where, *found, _threads(n)))
    return counts, sums


def _tally(marks: Tensor, gradient: Tensor, count: int) -> tuple[Tensor, Tensor]:
    return torch.bincount(marks, minlength=count), _summed(marks, gradient, count)


def measured(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The number of nonzero elements (int64) and ``Σ |gradient|`` (float64, exact as in
    ``tally``); both 0-d, on the device of the gradient, without a sync.
    """
    if on_gpu(gradient) and _is_one_piece(gradient):
        return cuda_steps.measured(gradient)
    (flat,) = flattened(gradient)
    if flat.numel() <= PIECE_ELEMENTS:
        return _measured_piece(flat)
    pieces = (
        flat[first : first + PIECE_ELEMENTS] for first in range(0, flat.numel(), PIECE_ELEMENTS)
    )
    return summed(map(_measured_piece, pieces))


def _measured_piece(flat: Tensor) -> tuple[Tensor, Tensor]:
    if on_gpu(flat):
        return cuda_steps.measured(flat)
    flat = _wide(flat)
    library = _serving(flat)
    if library is None:
        return _measured(flat.reshape(-1))
    n, at = flat.numel(), pointers.flat
    count = torch.empty((), dtype=torch.int64, device=flat.device)
    total = torch.empty((), dtype=torch.float64, device=flat.device)
    where = (at(flat, flat.dtype, n), count.data_ptr(), total.data_ptr())
    checked(library.gradtrace_magnitude(_is_wide(flat), n, *where, _threads(n)))
    return count, total


def magnitude(gradient: Tensor) -> tuple[int, float]:
    """``measured`` as Python numbers; synchronises with a GPU."""
    count, total = measured(gradient)
    return int(count), float(total)


def _measured(flat: Tensor) -> tuple[Tensor, Tensor]:
    all_of_them = torch.zeros(len(flat), dtype=torch.int64, device=flat.device)
    return flat.count_nonzero(), _summed(all_of_them, flat, 1).reshape(())


UNIT_EXPONENT = -1074
"""Every float64 is an integer multiple of 2**UNIT_EXPONENT."""

BIN_BITS = 8
"""Bits from one bin to the next."""


def _summed(marks: Tensor, gradient: Tensor, count: int) -> Tensor:
    """Σ |gradient| by provenance id, exact and rounded once.

    Each value is an integer number of units, of at most 60 bits counted from the start of a bin.
    Its lower 32 bits are added to that bin, the others to the bin where they begin.
    """
    size = gradient.double().abs()
    finite, bits = size.isfinite(), size.view(torch.int64)
    field = bits >> 52
    shift = (field - 1).clamp(min=0)
    whole = bits & (1 << 52) - 1 | (field > 0).long() << 52
    whole = torch.where(finite, whole, 0)
    there = shift[whole > 0]
    if not len(there):
        lowest = rows = 0
    else:
        lowest = int(there.min()) // BIN_BITS
        rows = int(there.max()) // BIN_BITS - lowest + 1 + 32 // BIN_BITS
    units, row = whole << shift % BIN_BITS, torch.where(whole > 0, shift // BIN_BITS - lowest, 0)
    rows = max(rows, 1 + 32 // BIN_BITS)
    bins = torch.zeros(rows * count, dtype=torch.int64, device=marks.device)
    bins.index_add_(0, row * count + marks, units & (1 << 32) - 1)
    bins.index_add_(0, (row + 32 // BIN_BITS) * count + marks, units >> 32)
    odd = torch.zeros(count, dtype=torch.float64, device=marks.device)
    odd.index_add_(0, marks, torch.where(finite, 0.0, size))
    return _rounded(bins.reshape(rows, count), BIN_BITS * lowest + UNIT_EXPONENT) + odd


def _rounded(bins: Tensor, power: int) -> Tensor:
    """``Σᵢ bins[i]·2**(power + BIN_BITS·i)`` as float64, rounded to nearest, ties to even.

    The highest nonzero digit of BIN_BITS bits and the seven below it form two integers, whose sum
    is rounded once; of all lower digits it only matters whether they are 0 (a sticky bit).
    """
    carry = torch.zeros_like(bins[0])
    high, low, lost = carry, carry, carry
    held = [carry] * 4
    mask = (1 << BIN_BITS) - 1
    for n in range(len(bins) + 64 // BIN_BITS):
        carry = carry + bins[n] if n < len(bins) else carry
        digit, carry = carry & mask, carry >> BIN_BITS
        lost = lost | low & mask
        low = low >> BIN_BITS | (high & mask) << 32 - BIN_BITS
        high = high >> BIN_BITS | digit << 32 - BIN_BITS
        now = (high, low, lost, torch.full_like(carry, n))
        held = [torch.where(digit > 0, new, old) for new, old in zip(now, held)]
    high, low, lost, top = held
    total = high.double() * 2.0**32 + (low | (lost > 0).long()).double()
    power_of_two = power + BIN_BITS * (top - 7)
    first = power_of_two.clamp(min=-1000)
    return total * _two(first) * _two(power_of_two - first)  # two factors: no early underflow


def _two(power: Tensor) -> Tensor:
    """``2**power``, exact."""
    return (power + 1023 << 52).view(torch.float64)


def _is_one_piece(*tensors: Tensor) -> bool:
    """Whether these are contiguous and no larger than one piece."""
    return tensors[0].numel() <= PIECE_ELEMENTS and all(x.is_contiguous() for x in tensors)


def flattened(*tensors: Tensor) -> list[Tensor]:
    """Tensors of one shape flattened alike: in memory order, without a copy, if all are dense with
    the same strides, else in row-major order.
    """
    first = tensors[0]
    if all(x.is_contiguous() for x in tensors):
        return [x.view(-1) for x in tensors]
    order = sorted(range(first.dim()), key=first.stride, reverse=True)
    turned = [x.permute(order) for x in tensors]
    if all(x.is_contiguous() for x in turned):
        tensors = tuple(turned)
    return [x.reshape(-1).contiguous() for x in tensors]


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


# Maximum along dimensions ------------------------------------------------------------------------


def reduce(x: Tensor, marks: Tensor, dims: Sequence[int]) -> Selected:
    """The largest |x| over ``dims``, which are removed, and the provenance id of its first
    occurrence.
    """
    how = reduction(x.shape, x.stride(), marks.stride(), tuple(dims))
    if how.short and marks.dtype is torch.int32 and on_gpu(x, marks):
        x, marks, levels = _leveled(x, marks, dims, how.levels)
        return Selected(*cuda_steps.reduce(x, marks, levels, how.shape))
    x = _wide(x)
    library = _serving(x, marks)
    if library is None or not how.short:
        return _reduce(x, marks, dims)
    x, marks, levels = _leveled(x, marks, dims, how.levels)
    value = torch.empty(how.shape, dtype=x.dtype, device="cpu")
    out = torch.empty(how.shape, dtype=torch.int32, device="cpu")
    numbers = (ctypes.c_int64 * 12)(*(part[n] for n in range(3) for part in levels))
    given = (
        pointers.address(x, x.dtype, _extent(levels, 1)),
        pointers.address(marks, torch.int32, _extent(levels, 2)),
    )
    found = (value.data_ptr(), out.data_ptr())  # just made
    checked(library.gradtrace_reduce(_is_wide(x), *given, numbers, *found, _threads(x.numel())))
    return Selected(value, out)


Level = tuple[int, int, int]
"""A size, the stride of the values and the stride of the provenance ids."""

Levels = tuple[Level, Level, Level, Level]


class Reduction(NamedTuple):
    """Whether the kernels support the sizes (nonempty, fewer than 2³¹ reduced elements), the shape
    of the result, and the four levels of the tensors by their strides; None if they need more.
    """

    short: bool
    shape: tuple[int, ...]
    levels: Levels | None


@lru_cache(4096)
def reduction(
    shape: Sequence[int], steps: Sequence[int], along: Sequence[int], dims: tuple[int, ...]
) -> Reduction:
    """How values (strides ``steps``) and ids (strides ``along``) are reduced over ``dims``."""
    short = prod(shape) > 0 and prod(shape[d] for d in dims) < 1 << 31
    kept = tuple(size for d, size in enumerate(shape) if d not in dims)
    return Reduction(short, kept, _levels(shape, steps, along, dims))


def _extent(levels: Levels, part: int) -> int:
    """Extent in memory, in elements, of the values (part 1) or the provenance ids (part 2)."""
    return 1 + sum((level[0] - 1) * level[part] for level in levels)


def _leveled(
    x: Tensor, marks: Tensor, dims: Sequence[int], levels: Levels | None
) -> tuple[Tensor, Tensor, Levels]:
    """Tensors, copied if necessary, whose dimensions collapse to four levels: reduced, kept,
    reduced, kept; the size of a level may be 1.
    """
    if levels is None:
        kept = [d for d in range(x.dim()) if d not in dims]
        order = [*kept, *sorted(dims)]
        back = [order.index(d) for d in range(x.dim())]
        x, marks = (t.permute(order).contiguous().permute(back) for t in (x, marks))
        n, width = prod(x.shape[d] for d in kept), prod(x.shape[d] for d in dims)
        levels = ((1, 0, 0), (n, width, width), (width, 1, 1), (1, 0, 0))
    return x, marks, levels


def _levels(
    shape: Sequence[int], steps: Sequence[int], others: Sequence[int], dims: Sequence[int]
) -> Levels | None:
    """The four levels of tensors with these strides, or None if they need more."""
    found: list[Level] = [(1, 0, 0)] * 4
    level = 4
    for d in reversed(range(len(shape))):
        size, step, along = shape[d], steps[d], others[d]
        if size == 1:
            continue
        reduced = d in dims
        if level < 4 and (level % 2 == 0) == reduced:
            inner, *before = found[level]
            if [step, along] == [inner * each for each in before]:
                found[level] = (inner * size, before[0], before[1])
                continue
        level -= 1 if (level % 2 == 1) == reduced else 2
        if level < 0:
            return None
        found[level] = (size, step, along)
    return found[0], found[1], found[2], found[3]


def _reduce(x: Tensor, marks: Tensor, dims: Sequence[int]) -> Selected:
    kept = [d for d in range(x.dim()) if d not in dims]
    shape, width = [x.shape[d] for d in kept], prod(x.shape[d] for d in dims)
    order = [*kept, *sorted(dims)]
    value, place = argmax(_wide(x).abs().permute(order).reshape(prod(shape), width), 1)
    lines = marks.permute(order).reshape(prod(shape), width)
    return Selected(value.reshape(shape), _taken(lines, value, place).reshape(shape))


def _taken(lines: Tensor, value: Tensor, place: Tensor) -> Tensor:
    """``lines[n, place[n]]``, provenance ids; 0 where the value is 0."""
    if not lines.shape[1]:
        return lines.new_zeros(len(lines))
    return torch.where(value != 0, lines.gather(1, place.unsqueeze(1)).squeeze(1), 0)


def scatter(x: Tensor, marks: Tensor, target: Tensor, size: int) -> Selected:
    """``max |x[j]|`` over all j with ``target[j] = i`` (-1: dropped) for each i below ``size``, and
    the provenance id of its first occurrence. All tensors are flat.
    """
    if marks.dtype is torch.int32 and on_gpu(x, marks, target):
        flat = (x.contiguous(), marks.contiguous(), target.long().contiguous())
        return Selected(*cuda_steps.scatter(*flat, size))
    x = _wide(x)
    library = _serving(x, marks, target)
    if library is None:
        return _scatter(x, marks, target, size)
    x, marks, target = x.contiguous(), marks.contiguous(), target.long().contiguous()
    value, out = x.new_zeros(size), marks.new_zeros(size)
    n, at = x.numel(), pointers.flat
    where = (at(x, x.dtype, n), at(marks, torch.int32, n), at(target, torch.int64, n), size)
    found = (at(value, x.dtype, size), at(out, torch.int32, size))
    checked(library.gradtrace_scatter(_is_wide(x), n, *where, *found))
    return Selected(value, out)


def _scatter(x: Tensor, marks: Tensor, target: Tensor, size: int) -> Selected:
    n, sizes = len(x), _wide(x).abs()
    place = target.remainder(size + 1)  # -1 becomes an extra last index
    value = sizes.new_zeros(size + 1).scatter_reduce(0, place, sizes, "amax")
    wins = (sizes == value[place]) | sizes.isnan()
    number = torch.where(wins, torch.arange(n, device=x.device), n)
    first = torch.full_like(value, n, dtype=torch.int64).scatter_reduce(0, place, number, "amin")
    there = (value != 0) & (first < n)
    padded = torch.cat([marks, marks.new_zeros(1)])
    return Selected(value[:-1], torch.where(there, padded[first], 0)[:-1])


class Compressed(NamedTuple):
    """Sparse matrices in CSR format: row r has the entries from ``starts[r]`` to
    ``starts[r + 1]``, with ascending columns ``source`` and values ``weight``.

    ``sizes`` are (blocks, planes, inner, columns, rows): x is (blocks, planes, columns, inner), the
    result (blocks, planes, rows, inner). Rows are numbered across all blocks, columns within each.
    """

    starts: Tensor
    source: Tensor
    weight: Tensor
    sizes: tuple[int, int, int, int, int]


def sparse_sum(how: Compressed, x: Tensor) -> Tensor:
    """``Σₑ weight[e]·x[source[e]]`` over the entries e of each row, in order. Returned flat."""
    out = x.new_zeros(how.sizes[0] * how.sizes[1] * how.sizes[2] * how.sizes[4])
    return out if _sparse_native(how, x, None, out, None) else _sparse_sum(how, x)


def _sparse_sum(how: Compressed, x: Tensor) -> Tensor:
    row, product = _products(how, x)
    total = product.new_zeros(product.shape[0], len(how.starts) - 1, product.shape[2])
    return _unturned(total.index_add_(1, row, product), how)


def sparse(how: Compressed, x: Tensor, marks: Tensor) -> Selected:
    """The largest ``|weight[e]·x[source[e]]|`` over the entries e of each row, and the provenance
    id of its first occurrence. Returned flat.
    """
    size = how.sizes[0] * how.sizes[1] * how.sizes[2] * how.sizes[4]
    value, out = x.new_zeros(size), marks.new_zeros(size)
    if not _sparse_native(how, x, marks, value, out):
        return _sparse(how, x, marks)
    return Selected(value, out)


def _sparse_native(
    how: Compressed, x: Tensor, marks: Tensor | None, value: Tensor, out: Tensor | None
) -> bool:
    """Run ``sparse``, or ``sparse_sum`` if ``marks`` is None, in the compiled kernel; False if it
    does not support the tensors.
    """
    starts, source, weight, sizes = how
    library = _serving(x, starts, source, weight, *(() if marks is None else (marks,)))
    if library is None or weight.dtype is not x.dtype or is_functorch_wrapped_tensor(x):
        return False
    starts, source, weight, x = (part.contiguous() for part in (starts, source, weight, x))
    blocks, planes, inner, columns, rows = sizes
    n, at, size = len(source), pointers.flat, blocks * planes * inner
    where = (
        at(starts, torch.int64, blocks * rows + 1),
        at(source, torch.int64, n),
        at(weight, x.dtype, n),
        at(x, x.dtype, size * columns),
    )
    beside = None if marks is None else marks.contiguous()
    mark = 0 if beside is None else at(beside, torch.int32, size * columns)
    found = 0 if out is None else at(out, torch.int32, size * rows)
    results = (mark, at(value, x.dtype, size * rows), found)
    numbers = (ctypes.c_int64 * 6)(*sizes, n)
    threads = _threads(n * planes * inner)
    checked(library.gradtrace_sparse(_is_wide(x), numbers, *where, *results, threads))
    return True


def _products(how: Compressed, x: Tensor) -> tuple[Tensor, Tensor]:
    """The row of each entry, and ``weight·x`` at each entry: (planes, entries, inner)."""
    starts, source, weight, (*_, columns, rows) = how
    numbers = torch.arange(len(starts) - 1, device=starts.device)
    row = numbers.repeat_interleave(starts.diff(), output_size=len(source))
    taken = _entries(x, source + row // max(rows, 1) * columns, how)
    return row, taken * weight.reshape(1, -1, 1)


def _entries(x: Tensor, column: Tensor, how: Compressed) -> Tensor:
    """The elements of x at the columns of entries: (planes, entries, inner)."""
    blocks, planes, inner, columns, _ = how.sizes
    turned = x.reshape(blocks, planes, columns, inner).transpose(0, 1)
    return turned.reshape(planes, blocks * columns, inner).index_select(1, column)


def _unturned(x: Tensor, how: Compressed) -> Tensor:
    blocks, planes, inner, _, rows = how.sizes
    return x.reshape(planes, blocks, rows, inner).transpose(0, 1).reshape(-1)


def _sparse(how: Compressed, x: Tensor, marks: Tensor) -> Selected:
    row, product = _products(how, x)
    rows, columns = max(how.sizes[4], 1), how.sizes[3]
    n, size, target = len(row), product.abs(), row.reshape(1, -1, 1).expand(product.shape)
    shape = (product.shape[0], len(how.starts) - 1, product.shape[2])
    value = size.new_zeros(shape).scatter_reduce(1, target, size, "amax")
    wins = (size == value.gather(1, target)) | size.isnan()
    number = torch.arange(n, device=x.device).reshape(1, -1, 1)
    number = torch.where(wins, number, n)
    first = number.new_full(shape, n).scatter_reduce(1, target, number, "amin")
    beside = _entries(marks, how.source + row // rows * columns, how)
    beside = torch.cat([beside, beside.new_zeros(beside.shape[0], 1, beside.shape[2])], 1)
    handed = torch.where(value != 0, beside.gather(1, first), 0)
    return Selected(_unturned(value, how), _unturned(handed, how))


def gather(marks: Tensor, source: Tensor) -> Tensor:
    """``marks[source]`` with flat ``marks``; 0 where the source is -1."""
    if (
        marks.dtype is torch.int32
        and source.dtype is torch.int64
        and cuda_steps.serves(marks, source)
    ):
        return cuda_steps.gather(marks.contiguous(), source.contiguous())
    if not marks.numel():
        return marks.new_zeros(source.shape)
    return torch.where(source >= 0, marks[source.clamp(min=0)], 0)


# Diagonal plus low rank --------------------------------------------------------------------------


class LowRankLines(NamedTuple):
    """``J[i, j] = diagonal[i]·δᵢⱼ + Σᵣ left[r][i]·right[r][j]`` for every line (row) of x; each
    tensor is (lines, n), possibly expanded.
    """

    diagonal: Tensor
    left: Sequence[Tensor]
    right: Sequence[Tensor]
    x: Tensor


class LargestEntry(NamedTuple):
    """The largest ``|J[i, j]·x[j]|`` if requested, and either the lowest j that attains it (-1 for
    none) or the provenance id at that j.
    """

    value: Tensor | None
    place: Tensor | None
    marks: Tensor | None


def normalise(
    how: LowRankLines,
    marks: Tensor | None = None,
    value: bool = True,
    layout: LineLayout | None = None,
) -> LargestEntry | None:
    """``maxⱼ |J[i, j]·x[j]|`` for each element i of every line, with its index j or, given
    provenance ids, the id at j. With a layout, the tensors may have other shapes than (lines, n).

    None where no compiled kernel supports the tensors; ``linops.diag_low_rank`` has the computation
    in plain torch.
    """
    diagonal, left, right, x = how
    parts, kind = (diagonal, x, *left, *right), x.dtype
    given = parts if marks is None else (*parts, marks)
    if layout is None:
        each = [(part.stride(0), part.stride(1)) for part in given]
        layout = LineLayout(x.shape[0], x.shape[1], x.shape, each)
    lines, n, shape, steps = layout
    if len(left) not in (1, 2) or not lines * n or n >= 1 << 31:
        return None
    for part in parts:
        if part.dtype is not kind:
            return None
    if kind in cuda_steps.WIDE and cuda_steps.serves(*parts):
        most, found = cuda_steps.normalise(given, len(left), layout, value)
        return LargestEntry(most, found, None) if marks is None else LargestEntry(most, None, found)
    library = _serving(x, *parts)
    if library is None:
        return None
    most = x.new_empty(shape)
    place = torch.empty(shape, dtype=torch.int64, device=x.device) if marks is None else None
    out = None if marks is None else marks.new_empty(shape)
    numbers: list[int] = []
    for part, (line, step) in zip(given, steps):
        reach = 1 + (lines - 1) * line + (n - 1) * step
        kind_of = torch.int32 if part is marks else kind
        numbers += (pointers.address(part, kind_of, reach), line, step)
    where = (ctypes.c_int64 * (3 * len(parts) + 3))(*numbers)
    wanted = ((most, kind), (place, torch.int64), (out, torch.int32))
    results = (0 if t is None else pointers.flat(t, dtype, lines * n) for t, dtype in wanted)
    sizes, threads = (lines, n, len(left)), _threads(lines * n * 16)
    checked(library.gradtrace_normalise(_is_wide(x), *sizes, where, *results, threads))
    return LargestEntry(most, place, out)
