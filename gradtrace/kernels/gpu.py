"""The contraction in (max, ×) on a GPU: CUDA compiled when first used, and Triton where that cannot
serve. Both give the bits of ``reference``.

The CUDA kernels take float32 (half precisions are read as such) and are fast where all numbers are
finite; ``pack`` finds that out while it lays them out, and nobody waits for the answer.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from gradtrace.kernels import reference
from gradtrace.kernels.reference import Contraction, Matrices, Operand, kind, sizes

SOURCE = Path(__file__).with_name("cuda") / "contract.cu"
TILE, INNER, THREADS, STAGES = 128, 16, 256, 3
SHARED = STAGES * INNER * 2 * TILE * 4 + 64 * THREADS * 4
"""Bytes of shared memory: the tiles that are read ahead, and what results were at a block's end."""

BLOCKS = 256
"""The most blocks of k in a part: their numbers are bytes."""

KINDS = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 3}
PACKED = 1 << 28
"""The most numbers that are laid out at a time."""

WORTH = 1 << 22
"""Products from which on laying out pays."""


def served(*operands: Matrices) -> bool:
    """Whether these are numbers on a GPU that can be worked on here."""
    datas = [x.data if isinstance(x, Operand) else x for x in operands]
    return all(x.is_cuda and x.dtype in (*KINDS, torch.float64) for x in datas) and (
        _cuda() or _triton()
    )


@cache
def _triton() -> bool:
    return find_spec("triton") is not None


@cache
def _cuda() -> bool:
    """Whether CUDA can be compiled here, tried once."""
    if torch.version.hip or not torch.cuda.is_available():
        return False
    try:
        _kernels(INNER, True)
    except (RuntimeError, OSError, AttributeError, ImportError):
        return False
    return True


def contraction(
    a: Matrices,
    b: Matrices,
    *,
    value: bool = True,
    index: bool = False,
    marks: Matrices | None = None,
    of_b: bool = False,
) -> Contraction:
    """``reference.contraction`` on the device of its operands."""
    (i, m, k), n = sizes(a), sizes(b)[1] if isinstance(b, Operand) else b.shape[2]
    dtype, device = kind(a, b), (a.data if isinstance(a, Operand) else a).device
    make = torch.empty if i and m and k and n else torch.zeros
    out = Contraction(
        make((i, m, n), dtype=dtype, device=device) if value else None,
        make((i, m, n), dtype=torch.int64, device=device) if index else None,
        make((i, m, n), dtype=torch.int32, device=device) if marks is not None else None,
    )
    if make is torch.zeros or all(x is None for x in out):
        return out
    marks = None if marks is None else _words(marks)
    with torch.cuda.device(device):
        if dtype is torch.float32 and _cuda() and (i * m * n * k >= WORTH or not _triton()):
            _fast(a, b, out, marks, of_b)
        elif _triton():
            from gradtrace.kernels import tiles

            tiles.contraction(a, b, out, dtype, marks, of_b)
        else:
            return reference.contraction(a, b, value=value, index=index, marks=marks, of_b=of_b)
    return out


def _words(marks: Matrices) -> Matrices:
    return marks._replace(data=marks.data.int()) if isinstance(marks, Operand) else marks.int()


# CUDA --------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """How k is divided: into blocks, and into parts of so many k for one thread block each."""

    block: int
    padded: int
    part: int
    splits: int


def plan(batches: int, m: int, n: int, k: int, processors: int) -> Plan:
    """Enough thread blocks for all processors, and parts of at most 256 blocks."""
    block = next((size for size in (16, 32, 64) if k <= size * BLOCKS), 128)
    padded = _up(k, block)
    tiles = batches * -(-m // TILE) * -(-n // TILE)
    wanted = max(1, min(round(2 * processors / tiles), padded // (8 * block)))
    splits = max(wanted, -(-padded // (BLOCKS * block)))
    part = _up(-(-padded // splits), block)
    return Plan(block, padded, part, -(-padded // part))


def _up(n: int, step: int) -> int:
    return -(-n // step) * step


def _fast(a: Matrices, b: Matrices, out: Contraction, marks: Matrices | None, of_b: bool) -> None:
    """Fill in what ``out`` has, by CUDA, some batches or rows at a time."""
    (i, m, k), n = sizes(a), sizes(b)[1] if isinstance(b, Operand) else b.shape[2]
    device = (a.data if isinstance(a, Operand) else a).device
    most = max(1, PACKED // (_up(k, TILE) * (_up(m, TILE) + _up(n, TILE))))
    lines = m if most > 1 else max(TILE, PACKED // _up(k, TILE) // TILE * TILE)
    left, right = _Side.of(a, 1, 2), _Side.of(b, 2, 1)
    given = None if marks is None else _Side.of(marks, *((2, 1) if of_b else (1, 2)))
    for first in range(0, i, most):
        some = min(most, i - first)
        for row in range(0, m, lines):
            size = min(lines, m - row)
            job = _Job(plan(some, size, n, k, _processors(device)), first, some, size, n, k)
            whole = size == m
            part = Contraction(
                *(None if x is None else x[first : first + some, row : row + size] for x in out)
            )
            here = (
                part
                if whole
                else Contraction(
                    *(
                        None if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
                        for x in part
                    )
                )
            )
            theirs = given if given is None or of_b else given.below(row)
            strange = torch.zeros((), dtype=torch.int32, device=device)
            job.run(left.below(row), right, here, theirs, of_b, strange)
            if not whole:
                for x, y in zip(part, here):
                    if x is not None and y is not None:
                        x.copy_(y)


class _Side(NamedTuple):
    """Where the numbers of an operand are."""

    data: Tensor
    tables: tuple[Tensor | None, Tensor | None, Tensor | None]
    steps: tuple[int, int, int]
    offset: int = 0

    @classmethod
    def of(cls, x: Matrices, rows: int, inner: int) -> _Side:
        if isinstance(x, Operand):
            batch, row, k = (table.long().contiguous() for table in x[1:])
            return cls(x.data.contiguous(), (batch, row, k), (0, 0, 0))
        steps = x.stride()
        return cls(x, (None, None, None), (steps[0], steps[rows], steps[inner]))

    def below(self, row: int) -> _Side:
        """The rows from one on."""
        batch, rows, inner = self.tables
        if rows is not None:
            return self._replace(tables=(batch, rows[row:], inner))
        return self._replace(offset=self.offset + row * self.steps[1])

    def words(self) -> tuple[int, ...]:
        """``struct Operand``."""
        start = self.data.data_ptr() + self.offset * self.data.element_size()
        return start, *map(_of, self.tables), *self.steps


NOWHERE = (0,) * 7


class _Job(NamedTuple):
    """One launch of the three kernels."""

    plan: Plan
    first: int
    batches: int
    m: int
    n: int
    k: int

    def run(
        self,
        a: _Side,
        b: _Side,
        out: Contraction,
        marks: _Side | None,
        of_b: bool,
        strange: Tensor,
    ) -> None:
        block, padded, part, splits = self.plan
        searched = out.index is not None or out.marks is not None
        kernels = _kernels(block, searched)
        high, wide = _up(self.m, TILE), _up(self.n, TILE)
        turned, straight = self._pack(kernels, a, self.m, high, searched, strange)
        across, along = self._pack(kernels, b, self.n, wide, searched, strange)
        shape = (splits, self.batches, high, wide)
        parts = torch.empty(shape, dtype=torch.float32, device=a.data.device)
        blocks = torch.empty(shape if searched else 1, dtype=torch.uint8, device=a.data.device)
        between, flag = (_of(parts), _of(blocks)), _of(strange)
        kernels.contract(
            (high // TILE * (wide // TILE), splits, self.batches), (THREADS, 1, 1),
            _of(turned), _of(across), *between, high, wide, padded, part, flag,
        )  # fmt: skip
        given = NOWHERE if marks is None else marks.words()
        kernels.rescan(
            (-(-self.m // 32) * -(-self.n // 32), 1, self.batches), (THREADS, 1, 1),
            *map(_of, (straight, along, turned, across)), *between, splits, part, high, wide,
            padded, self.m, self.n, *map(_of, out), *given, of_b, self.first, flag,
        )  # fmt: skip

    def _pack(
        self, kernels: Kernels, side: _Side, rows: int, padded: int, both: bool, strange: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """An operand laid out k by row, and row by k if that is needed too."""
        device, k = side.data.device, self.plan.padded
        turned = torch.empty((self.batches, k, padded), dtype=torch.float32, device=device)
        straight = None
        if both:
            straight = torch.empty((self.batches, rows, k), dtype=torch.float32, device=device)
        kernels.pack(
            (-(-k // 32), padded // 32, self.batches), (32, 8, 1),
            *side.words(), KINDS[side.data.dtype], rows, self.k, padded, k, self.first,
            _of(turned), _of(straight), _of(strange),
        )  # fmt: skip
        return turned, straight


def _of(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


@cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class Kernel(NamedTuple):
    """A compiled function, which takes one structure of 64-bit words."""

    function: ctypes.c_void_p
    shared: int

    def __call__(
        self, grid: tuple[int, int, int], block: tuple[int, int, int], *words: int
    ) -> None:
        """Launch it on the current stream."""
        call = (ctypes.c_longlong * len(words))(*words)
        place = (ctypes.c_void_p * 1)(ctypes.addressof(call))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        launch = _driver().cuLaunchKernel
        _checked(launch(self.function, *grid, *block, self.shared, stream, place, None))


class Kernels(NamedTuple):
    """What ``contract.cu`` holds."""

    pack: Kernel
    contract: Kernel
    rescan: Kernel


def _kernels(block: int, index: bool) -> Kernels:
    return _compiled(torch.cuda.current_device(), block, index)


@cache
def _compiled(device: int, block: int, index: bool) -> Kernels:
    from torch.cuda._utils import _nvrtc_compile

    names = [
        f"#define KB {block}",
        *(["#define INDEX"] if index else []),
        SOURCE.read_text("utf-8"),
    ]
    found = []
    torch.zeros((), device=f"cuda:{device}")  # there is a context then
    for name, shared in (("pack", 0), ("contract", SHARED), ("rescan", 0)):
        binary, mangled = _nvrtc_compile("\n".join(names), name)
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        driver = _driver()
        _checked(driver.cuModuleLoadData(ctypes.byref(module), binary))
        _checked(driver.cuModuleGetFunction(ctypes.byref(function), module, mangled.encode()))
        if shared:
            _checked(driver.cuFuncSetAttribute(function, 8, shared))  # the limit of dynamic memory
        found.append(Kernel(function, shared))
    return Kernels(*found)


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if torch.version.cuda and _windows() else "libcuda.so.1")


def _windows() -> bool:
    import sys

    return sys.platform == "win32"


def _checked(code: int) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"CUDA: {text.value.decode() if text.value else code}")
