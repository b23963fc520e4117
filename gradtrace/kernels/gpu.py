"""The contraction in (max, ×) on a GPU: CUDA compiled when first used, and Triton where that cannot
serve. Both give the bits of ``reference``.

The CUDA kernels take float32 (half precisions are read as such) and are fast where all numbers are
finite; ``pack`` finds that out while it lays them out, and nobody waits for the answer.
"""

from __future__ import annotations

from functools import cache, lru_cache
from importlib.util import find_spec
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from gradtrace.kernels import launch, reference
from gradtrace.kernels.reference import Contraction, Matrices, Operand, kind, sizes

FILE = "contract.cu"
TILE, INNER, THREADS, STAGES = 128, 16, 256, 3
SHARED = STAGES * INNER * 2 * TILE * 4 + 64 * THREADS * 4
"""Bytes of shared memory: the tiles that are read ahead, and what results were at a block's end."""

BLOCKS = 256
"""The most blocks of k in a part: their numbers are bytes."""

KINDS = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 3}
DTYPES = (*KINDS, torch.float64)
WORKSPACE = 1 << 31
"""The most bytes that are laid out at a time."""

SMALL = 1 << 26
"""A workspace up to this is taken without asking how much room there is."""

MANY = 65_535
"""The most matrices of a launch."""

WORTH = 1 << 22
"""Products from which on laying out pays."""


def served(*operands: Matrices) -> bool:
    """Whether these are numbers on a GPU that can be worked on here."""
    datas = [_data(x) for x in operands]
    if any(x.dtype not in DTYPES for x in datas):
        return False
    return launch.serves(FILE, *datas) or (triton() and all(x.is_cuda for x in datas))


def _data(x: Matrices) -> Tensor:
    return x.data if isinstance(x, Operand) else x


@cache
def triton() -> bool:
    """Whether there is Triton."""
    return find_spec("triton") is not None


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
    left, right = _data(a), _data(b)
    device, dtype = left.device, left.dtype
    if dtype is not torch.float32 or right.dtype is not torch.float32:
        dtype = kind(left, right)
    make = torch.empty if i and m and k and n else torch.zeros
    shape = (i, m, n)
    out = Contraction(
        make(shape, dtype=dtype, device=device) if value else None,
        make(shape, dtype=torch.int64, device=device) if index else None,
        make(shape, dtype=torch.int32, device=device) if marks is not None else None,
    )
    if make is torch.zeros or not (value or index or marks is not None):
        return out
    worth = i * m * n * k >= WORTH or not triton()
    with launch.at(device):
        if dtype is torch.float32 and worth and launch.serves(FILE, left, right):
            given = NOWHERE if marks is None else _Side.of(_words(marks), *ROLES[of_b])
            job = _Job(shape, k, _Side.of(a, 1, 2), _Side.of(b, 2, 1), given, of_b, out)
            job.run(device, index or marks is not None)
        elif triton():
            from gradtrace.kernels import tiles

            words = None if marks is None else _words(marks)
            tiles.contraction(a, b, out, dtype, words, of_b)
        else:
            return reference.contraction(a, b, value=value, index=index, marks=marks, of_b=of_b)
    return out


ROLES = {False: (1, 2), True: (2, 1)}
"""In which dimensions marks of a, or those of b, have their rows and their k."""


def _words(marks: Matrices) -> Matrices:
    if _data(marks).dtype is torch.int32:
        return marks
    return marks._replace(data=marks.data.int()) if isinstance(marks, Operand) else marks.int()


# CUDA --------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """How k is divided: into blocks, and into parts of so many k for one thread block each."""

    block: int
    padded: int
    part: int
    splits: int


@lru_cache(4096)
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


class Space(NamedTuple):
    """Where things are in the workspace of one launch: bytes from its start, all multiples of 16.
    The operands k by row and, if the winner is looked for, row by k; results of parts of k.
    """

    turned: int
    across: int
    straight: int
    along: int
    parts: int
    blocks: int
    size: int


@lru_cache(4096)
def space(how: Plan, batches: int, m: int, n: int, searched: bool) -> Space:
    """``searched``: the winner is looked for, or only the value."""
    high, wide = _up(m, TILE), _up(n, TILE)
    lines = 4 * batches * how.padded
    results = how.splits * batches * high * wide
    sizes = (
        lines * high,
        lines * wide,
        lines * m if searched else 0,
        lines * n if searched else 0,
        4 * results,
        results if searched else 0,
    )
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    return Space(*starts)


class Way(NamedTuple):
    """How so many matrices, rows and columns are contracted in one go."""

    plan: Plan
    space: Space
    high: int
    wide: int
    grids: tuple[launch.Grid, launch.Grid, launch.Grid]


@lru_cache(4096)
def way(shape: tuple[int, int, int], k: int, processors: int, searched: bool) -> Way:
    """``searched``: the winner is looked for, not only the value."""
    batches, m, n = shape
    how = plan(batches, m, n, k, processors)
    high, wide = _up(m, TILE), _up(n, TILE)
    grids = (
        (-(-how.padded // 32), (high + wide) // 32, batches),
        (high // TILE * (wide // TILE), how.splits, batches),
        (-(-m // 32) * -(-n // 32), 1, batches),
    )
    return Way(how, space(how, batches, m, n, searched), high, wide, grids)


@lru_cache(64)
def _kernels(device: torch.device, block: int, searched: bool) -> tuple[launch.Kernel, ...]:
    defines = (f"KB {block}", "INDEX") if searched else (f"KB {block}",)
    return (
        launch.kernel(device, FILE, "pack", defines),
        launch.kernel(device, FILE, "contract", defines, SHARED),
        launch.kernel(device, FILE, "rescan", defines),
    )


PACKING, CONTRACTING = (32, 8, 1), (THREADS, 1, 1)
FIRST = (0, 0, 0)


class _Job(NamedTuple):
    """One contraction, which fills in what ``out`` has."""

    shape: tuple[int, int, int]
    k: int
    a: _Side
    b: _Side
    marks: _Side
    of_b: bool
    out: Contraction

    def run(self, device: torch.device, searched: bool) -> None:
        """All at once, or as much at a time as there is room for."""
        processors = launch.processors(device)
        whole = way(self.shape, self.k, processors, searched)
        if whole.space.size <= SMALL and self.shape[0] <= MANY:
            self._launch(device, searched, FIRST, self.shape, whole)
            return
        sizes = self._fitting(launch.room(device) // 2, processors, searched)
        for first in product(*(range(0, n, size) for n, size in zip(self.shape, sizes))):
            i, m, n = (min(s, n - at) for at, n, s in zip(first, self.shape, sizes))
            here = way((i, m, n), self.k, processors, searched)
            self._launch(device, searched, first, (i, m, n), here)

    def _fitting(self, room: int, processors: int, searched: bool) -> tuple[int, int, int]:
        """How many matrices, then rows and columns, can be laid out at a time."""
        i, m, n = min(self.shape[0], MANY), *self.shape[1:]
        most = min(WORKSPACE, room)
        while way((i, m, n), self.k, processors, searched).space.size > most:
            if i > 1:
                i = -(-i // 2)
            elif max(m, n) <= TILE:
                break
            elif m >= n:
                m = _up(-(-m // 2), TILE)
            else:
                n = _up(-(-n // 2), TILE)
        return i, m, n

    def _launch(
        self,
        device: torch.device,
        searched: bool,
        first: tuple[int, ...],
        shape: tuple[int, int, int],
        how: Way,
    ) -> None:
        (block, padded, part, splits), where, high, wide, grids = how
        batch, row, column = first
        _, m, n = shape
        memory = torch.empty(where.size, dtype=torch.uint8, device=device)
        strange = torch.zeros((), dtype=torch.int32, device=device)
        start, flag = memory.data_ptr(), strange.data_ptr()
        turned, across, straight, along, parts, blocks, _ = [start + at for at in where]
        pack, contract, rescan = _kernels(device, block, searched)
        pack(
            grids[0], PACKING,
            (
                *self.a.words(row), self.a.kind, m, self.k, high, padded, batch,
                turned, straight if searched else 0, flag,
                *self.b.words(column), self.b.kind, n, self.k, wide, padded, batch,
                across, along if searched else 0, flag,
                high // 32,
            ),
        )  # fmt: skip
        contract(
            grids[1], CONTRACTING,
            (turned, across, parts, blocks, high, wide, padded, part, flag), SHARED,
        )  # fmt: skip
        _, rows, columns = self.shape
        at = (batch * rows + row) * columns + column
        value, index, marks = self.out
        rescan(
            grids[2], CONTRACTING,
            (
                straight, along, turned, across, parts, blocks, splits, part, high, wide, padded,
                m, n,
                0 if value is None else value.data_ptr() + 4 * at,
                0 if index is None else index.data_ptr() + 8 * at,
                0 if marks is None else marks.data_ptr() + 4 * at,
                *self.marks.words(column if self.of_b else row), self.of_b, batch,
                rows * columns, columns, flag,
            ),
        )  # fmt: skip


class _Side(NamedTuple):
    """Where the numbers of an operand are: ``struct Operand``. Tensors that it names are held."""

    kind: int
    size: int  # of a number
    place: tuple[int, int, int, int, int, int, int]
    held: tuple[Tensor, ...]

    @classmethod
    def of(cls, x: Matrices, rows: int, inner: int) -> _Side:
        if isinstance(x, Operand):
            data = x.data.contiguous()
            tables = tuple(table.long().contiguous() for table in x[1:])
            batch, row, k = (table.data_ptr() for table in tables)
            place = (data.data_ptr(), batch, row, k, 0, 0, 0)
            return cls(KINDS.get(data.dtype, 0), data.itemsize, place, (data, *tables))
        steps = x.stride()
        place = (x.data_ptr(), 0, 0, 0, steps[0], steps[rows], steps[inner])
        return cls(KINDS.get(x.dtype, 0), x.itemsize, place, (x,))

    def words(self, row: int) -> tuple[int, ...]:
        """Of the rows from one on."""
        if not row:
            return self.place
        start, batches, rows, inners, *steps = self.place
        if rows:
            return start, batches, rows + 8 * row, inners, *steps
        return start + self.size * row * steps[1], 0, 0, 0, *steps


NOWHERE = _Side(0, 0, (0,) * 7, ())
