"""The (max, ×) contraction by the compiled CPU library."""

from __future__ import annotations

import ctypes
import struct
from enum import IntEnum
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from gradtrace.errors import GradtraceError
from gradtrace.kernels import cpu_library, pointers, tuning
from gradtrace.kernels.operands import (
    Contraction,
    Matrices,
    MatrixLayout,
    Operand,
    as_int32,
    columns,
    product_dtype,
    sizes,
)

KINDS = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
"""Codes of the dtypes that the library multiplies."""

READ = {**KINDS, torch.int32: 4}
"""Codes of the dtypes that it reads, including int32 provenance ids."""

NULL_VIEW = (0,) * 9
"""Null operand: the view that stands for no matrix."""


class Algorithm(IntEnum):
    """Whether the library prunes products that cannot be the largest; the result is the same.

    ``BY_MEASURE`` lets the library decide.
    """

    BY_MEASURE = 0
    DENSE = 1
    PRUNED = 2


_CALL = struct.Struct("44q")
_RANGE = struct.Struct("4q"), 8 * 35  # first and last batch and row, and their byte offset
_COUNTS = struct.Struct("2q"), 8 * 42  # k that survived pruning, k considered; byte offset


def survivors(a: Matrices, b: Matrices) -> float:
    """The fraction of k that survive pruning by bounds, with ``Algorithm.PRUNED``."""
    return compiled(a, b, True, False, None, Algorithm.PRUNED)[1]


def compiled(
    a: Matrices,
    b: Matrices,
    value: bool,
    index: bool,
    ids: Matrices | None,
    algorithm: Algorithm,
    of_b: bool = False,
) -> tuple[Contraction, float]:
    """``Backend.contract`` with a given algorithm, and the fraction of k that survived pruning."""
    (i, m, k), n = sizes(a), columns(b)
    dtype = product_dtype(a, b)
    make = torch.empty if i and m and k and n else torch.zeros
    kinds = (
        dtype if value else None,
        torch.int64 if index else None,
        torch.int32 if ids is not None else None,
    )
    made = [None if t is None else make((i, m, n), dtype=t, device="cpu") for t in kinds]
    out = Contraction(*made)
    if make is torch.zeros or all(x is None for x in out):
        return out, 0.0
    a, b, words = _flat(a), _flat(b), None if ids is None else _flat(as_int32(ids))
    _check_sizes(a, (i, m, k), False)
    _check_sizes(b, (i, n, k), True)
    if words is not None:
        _check_sizes(words, (i, n, k) if of_b else (i, m, k), of_b)
    ids_view = NULL_VIEW if words is None else _view(words, *((2, 1) if of_b else (1, 2)))
    threads = torch.get_num_threads()
    places = [
        0 if x is None or kind is None else pointers.flat(x, kind, i * m * n)
        for x, kind in zip(out, kinds)
    ]
    call = bytearray(_CALL.size)
    _CALL.pack_into(
        call, 0, *_view(a, 1, 2), *_view(b, 2, 1), *ids_view,
        i, m, k, n, KINDS[dtype], *places, 0, i, 0, m, threads, algorithm, of_b, 0, 0,
    )  # fmt: skip
    _run(call, (i, m, k, n), tuning.THREAD_PRODUCTS_PER_CALL * threads)
    survived, considered = _COUNTS[0].unpack_from(call, _COUNTS[1])
    return out, survived / max(1, considered)


def serves(*operands: Matrices) -> bool:
    """Whether the library multiplies these operands."""
    return all(x.dtype in KINDS and x.device.type == "cpu" for x in operands)


def serves_strided(a: Tensor, b: Tensor, ids: Tensor, how: MatrixLayout) -> bool:
    """Whether ``strided`` accepts these tensors."""
    if not (a.is_cpu and b.is_cpu and ids.is_cpu) or ids.dtype is not torch.int32:
        return False
    return a.dtype in KINDS and b.dtype in KINDS and how.k > 0 and all(how.shape)


def strided(
    a: Tensor, b: Tensor, ids: Tensor, how: MatrixLayout, shape: tuple[int, ...], value: bool
) -> Contraction:
    """``Backend.contract_strided`` of matrices that are not empty."""
    (i, m, n), k = how.shape, how.k
    dtype, reach = product_dtype(a, b), _reach(how)
    largest = torch.empty(shape, dtype=dtype, device="cpu") if value else None
    out = torch.empty(shape, dtype=torch.int32, device="cpu")
    views: list[int] = []
    for x, (batch, row, inner), far in zip((a, b, ids), (how.a, how.b, how.ids), reach):
        views += (pointers.address(x, x.dtype, far), READ[x.dtype])
        views += (0, 0, batch, 0, row, 0, inner)
    places = (0 if largest is None else largest.data_ptr(), 0, out.data_ptr())  # just made
    threads = torch.get_num_threads()
    call = bytearray(_CALL.size)
    _CALL.pack_into(
        call, 0, *views, i, m, k, n, KINDS[dtype], *places,
        0, i, 0, m, threads, Algorithm.BY_MEASURE, how.of_b, 0, 0,
    )  # fmt: skip
    _run(call, (i, m, k, n), tuning.THREAD_PRODUCTS_PER_CALL * threads)
    return Contraction(largest, None, out)


@lru_cache(4096)
def _reach(how: MatrixLayout) -> tuple[int, int, int]:
    """Extents in elements of a, b and the provenance ids in memory, from first to last element."""
    (i, m, n), k = how.shape, how.k
    of_ids = (i, n, k) if how.of_b else (i, m, k)
    a, b, ids = (
        1 + sum((size - 1) * step for size, step in zip(sizes, steps))
        for sizes, steps in (((i, m, k), how.a), ((i, n, k), how.b), (of_ids, how.ids))
    )
    return a, b, ids


def _run(call: bytearray, shape: tuple[int, int, int, int], limit: int) -> None:
    """Call the library once, or for ranges of matrices or rows of at most ``limit`` products."""
    library = cpu_library.library()
    assert library is not None
    i, m, k, n = shape
    place = ctypes.byref(ctypes.c_char.from_buffer(call))
    if i * m * k * n <= limit:
        cpu_library.checked(library.gradtrace_contract(place))
        return
    batches = max(1, limit // (m * k * n))
    lines = m if m * k * n <= limit else max(tuning.SPLIT_MIN_ROWS, limit // (k * n))
    for batch, row in product(range(0, i, batches), range(0, m, lines)):
        part = batch, min(i, batch + batches), row, min(m, row + lines)
        _RANGE[0].pack_into(call, _RANGE[1], *part)
        cpu_library.checked(library.gradtrace_contract(place))


def _flat(x: Matrices) -> Matrices:
    return Operand(*(part.contiguous() for part in x)) if isinstance(x, Operand) else x


def _check_sizes(x: Matrices, wanted: tuple[int, int, int], turned: bool) -> None:
    """Raise unless an operand has the sizes that are passed to the library for all operands."""
    found = sizes(x)
    if turned and not isinstance(x, Operand):
        found = found[0], found[2], found[1]
    if found != wanted:
        raise GradtraceError(f"a contraction was given operands of sizes {found} and {wanted}")


def _view(x: Matrices, rows: int, inner: int) -> tuple[int, ...]:
    """The nine words that describe an operand to the library: address, dtype code, number of
    elements (0 without tables), then table and stride of batch, row and k. ``rows`` and ``inner``
    are the dimensions of a tensor that hold its rows and its k.
    """
    data = x.data if isinstance(x, Operand) else x
    kind = READ.get(data.dtype)
    if kind is None:
        raise GradtraceError(f"a contraction was given numbers of {data.dtype}")
    if isinstance(x, Operand):
        size, flat = data.numel(), pointers.flat
        batch, line, k = (flat(table, torch.int64, table.numel()) for table in x[1:])
        return flat(data, data.dtype, size), kind, size, batch, 0, line, 0, k, 0
    step = x.stride()
    reach = 1 + sum((size - 1) * each for size, each in zip(x.shape, step))
    return pointers.address(x, x.dtype, reach), kind, 0, 0, step[0], 0, step[rows], 0, step[inner]
