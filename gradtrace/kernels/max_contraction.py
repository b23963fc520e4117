"""The (max, ×) contraction: GPU kernels, the compiled CPU library, or the torch reference."""

from __future__ import annotations

import ctypes
import struct
from enum import IntEnum
from functools import cache, lru_cache
from itertools import product

import torch
from torch import Tensor

from gradtrace.errors import GradtraceError
from gradtrace.kernels import cpu_library, cuda_contraction, pointers, reference
from gradtrace.kernels.cuda_contraction import MatrixLayout
from gradtrace.kernels.reference import Contraction, Matrices, Operand, kind, sizes

KINDS = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
"""Codes of the dtypes that the library multiplies."""

READ = {**KINDS, torch.int32: 4}
"""Codes of the dtypes that it reads, including int32 provenance ids."""

NULL_VIEW = (0,) * 9
"""Null operand: the view that stands for no matrix."""

THREAD_PRODUCTS_PER_CALL = 1_000_000_000
"""Products per thread and call: at most a third of a second, during which Ctrl-C is delayed."""

SPLIT_MIN_ROWS = 64
"""The fewest rows per call when a matrix is split: each call packs the other matrix again."""


class Algorithm(IntEnum):
    """Whether the library prunes products that cannot be the largest; the result is the same.

    ``BY_MEASURE`` lets the library decide.
    """

    BY_MEASURE = 0
    DENSE = 1
    PRUNED = 2


def _library() -> ctypes.CDLL | None:
    found = cpu_library.library()
    return None if found is None else _typed(found)


@cache
def _typed(found: ctypes.CDLL) -> ctypes.CDLL:
    """The library with the ctypes signatures of its functions set."""
    found.gradtrace_contract.argtypes = [ctypes.c_void_p]
    found.gradtrace_isa.restype = ctypes.c_char_p
    found.gradtrace_current_isa.restype = ctypes.c_char_p
    found.gradtrace_use_isa.argtypes = [ctypes.c_char_p]
    return found


_CALL = struct.Struct("44q")
_RANGE = struct.Struct("4q"), 8 * 35  # first and last batch and row, and their byte offset
_COUNTS = struct.Struct("2q"), 8 * 42  # k that survived pruning, k considered; byte offset


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
    belong to b (``of_b``); 0 where the value is 0. NaN counts as the largest value. The rows of an
    ``Operand`` given as ``b`` are its n.
    """
    if cuda_contraction.served(a, b):
        return cuda_contraction.contraction(a, b, value=value, index=index, marks=marks, of_b=of_b)
    if _library() is None or not (_served(a) and _served(b)):
        return reference.contraction(a, b, value=value, index=index, marks=marks, of_b=of_b)
    values_only = marks is None and not index and isinstance(a, Tensor) and isinstance(b, Tensor)
    if values_only and sizes(a)[2] == 1:  # a single k: no maximum to take
        assert isinstance(a, Tensor) and isinstance(b, Tensor)
        dtype = kind(a, b)
        return Contraction(a.to(dtype).abs() * b.to(dtype).abs(), None, None)
    return compiled(a, b, value, index, marks, Algorithm.BY_MEASURE, of_b)[0]


def largest(a: Matrices, b: Matrices) -> Tensor:
    """``out[i, m, n] = maxₖ |a[i, m, k] · b[i, k, n]|``; 0 if k is empty."""
    value = contraction(a, b).value
    assert value is not None
    return value


def winner(a: Matrices, b: Matrices) -> tuple[Tensor, Tensor]:
    """``largest`` and the lowest k that attains it; the k is undefined where the value is 0."""
    value, index, _ = contraction(a, b, index=True)
    assert value is not None
    assert index is not None
    return value, index


def survivors(a: Matrices, b: Matrices) -> float:
    """The fraction of k that survive pruning by bounds, with ``Algorithm.PRUNED``."""
    return compiled(a, b, True, False, None, Algorithm.PRUNED)[1]


def compiled(
    a: Matrices,
    b: Matrices,
    value: bool,
    index: bool,
    marks: Matrices | None,
    algorithm: Algorithm,
    of_b: bool = False,
) -> tuple[Contraction, float]:
    """``contraction`` by the library with a given algorithm, and the fraction of k that survived
    pruning.
    """
    (i, m, k), n = sizes(a), sizes(b)[1] if isinstance(b, Operand) else b.shape[2]
    dtype = kind(a, b)
    make = torch.empty if i and m and k and n else torch.zeros
    kinds = (
        dtype if value else None,
        torch.int64 if index else None,
        torch.int32 if marks is not None else None,
    )
    made = [None if t is None else make((i, m, n), dtype=t, device="cpu") for t in kinds]
    out = Contraction(*made)
    if make is torch.zeros or all(x is None for x in out):
        return out, 0.0
    a, b, words = _flat(a), _flat(b), None if marks is None else _flat(_as_int32(marks))
    _check_sizes(a, (i, m, k), False)
    _check_sizes(b, (i, n, k), True)
    if words is not None:
        _check_sizes(words, (i, n, k) if of_b else (i, m, k), of_b)
    marked = NULL_VIEW if words is None else _view(words, *((2, 1) if of_b else (1, 2)))
    threads = torch.get_num_threads()
    places = [
        0 if x is None or kind is None else pointers.flat(x, kind, i * m * n)
        for x, kind in zip(out, kinds)
    ]
    call = bytearray(_CALL.size)
    _CALL.pack_into(
        call, 0, *_view(a, 1, 2), *_view(b, 2, 1), *marked,
        i, m, k, n, KINDS[dtype], *places, 0, i, 0, m, threads, algorithm, of_b, 0, 0,
    )  # fmt: skip
    _run(call, (i, m, k, n), THREAD_PRODUCTS_PER_CALL * threads)
    survived, considered = _COUNTS[0].unpack_from(call, _COUNTS[1])
    return out, survived / max(1, considered)


def serving(a: Tensor, b: Tensor, marks: Tensor) -> bool:
    """Whether ``carried`` accepts these tensors."""
    if not (a.is_cpu and b.is_cpu and marks.is_cpu) or marks.dtype is not torch.int32:
        return False
    return a.dtype in KINDS and b.dtype in KINDS and _library() is not None


def carried(
    a: Tensor, b: Tensor, marks: Tensor, how: MatrixLayout, shape: tuple[int, ...], value: bool
) -> Contraction | None:
    """``contraction`` with provenance ids, of tensors read by the strides in ``how``.

    Results have the given shape, with as many elements as (i, m, n). None if a size is 0.
    """
    (i, m, n), k = how.shape, how.k
    if not (i and m and n and k):
        return None
    dtype, reach = kind(a, b), _reach(how)
    largest = torch.empty(shape, dtype=dtype, device="cpu") if value else None
    out = torch.empty(shape, dtype=torch.int32, device="cpu")
    views: list[int] = []
    for x, (batch, row, inner), far in zip((a, b, marks), (how.a, how.b, how.marks), reach):
        views += (pointers.address(x, x.dtype, far), READ[x.dtype])
        views += (0, 0, batch, 0, row, 0, inner)
    places = (0 if largest is None else largest.data_ptr(), 0, out.data_ptr())  # just made
    threads = torch.get_num_threads()
    call = bytearray(_CALL.size)
    _CALL.pack_into(
        call, 0, *views, i, m, k, n, KINDS[dtype], *places,
        0, i, 0, m, threads, Algorithm.BY_MEASURE, how.of_b, 0, 0,
    )  # fmt: skip
    _run(call, (i, m, k, n), THREAD_PRODUCTS_PER_CALL * threads)
    return Contraction(largest, None, out)


@lru_cache(4096)
def _reach(how: MatrixLayout) -> tuple[int, int, int]:
    """Extents in elements of a, b and the provenance ids in memory, from first to last element."""
    (i, m, n), k = how.shape, how.k
    marked = (i, n, k) if how.of_b else (i, m, k)
    a, b, marks = (
        1 + sum((size - 1) * step for size, step in zip(sizes, steps))
        for sizes, steps in (((i, m, k), how.a), ((i, n, k), how.b), (marked, how.marks))
    )
    return a, b, marks


def _run(call: bytearray, shape: tuple[int, int, int, int], limit: int) -> None:
    """Call the library once, or for ranges of matrices or rows of at most ``limit`` products."""
    library = _library()
    assert library is not None
    i, m, k, n = shape
    place = ctypes.byref(ctypes.c_char.from_buffer(call))
    if i * m * k * n <= limit:
        cpu_library.checked(library.gradtrace_contract(place))
        return
    batches = max(1, limit // (m * k * n))
    lines = m if m * k * n <= limit else max(SPLIT_MIN_ROWS, limit // (k * n))
    for batch, row in product(range(0, i, batches), range(0, m, lines)):
        part = batch, min(i, batch + batches), row, min(m, row + lines)
        _RANGE[0].pack_into(call, _RANGE[1], *part)
        cpu_library.checked(library.gradtrace_contract(place))


def _served(x: Matrices) -> bool:
    data = x.data if isinstance(x, Operand) else x
    return data.dtype in KINDS and data.device.type == "cpu"


def _as_int32(marks: Matrices) -> Matrices:
    """Provenance ids as int32, the dtype that the library reads."""
    if isinstance(marks, Operand):
        return marks._replace(data=marks.data.int())
    return marks.int()


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


def isas() -> list[str]:
    """The instruction sets of the library that this processor supports, best last."""
    library = _library()
    out: list[str] = []
    while library is not None and (name := library.gradtrace_isa(len(out))) is not None:
        out.append(name.decode())
    return out


def isa() -> str:
    """The instruction set in use: the best, or the one that ``GRADTRACE_ISA`` names."""
    library = _library()
    return "" if library is None else str(library.gradtrace_current_isa().decode())


def use_isa(name: str) -> None:
    """Use one of ``isas`` from now on."""
    library = _library()
    if library is None or not library.gradtrace_use_isa(name.encode()):
        raise ValueError(f"no instruction set {name!r} here; there are {isas()}")
