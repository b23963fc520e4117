"""The contraction in (max, ×) on a GPU: CUDA compiled when first used, and Triton where that cannot
serve. Both give the bits of ``reference``.

The CUDA kernels take float32 (half precisions are read as such) and are fast where all numbers are
finite; ``pack`` finds that out while it lays them out, and nobody waits for the answer.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    datas = [x.data for x in operands]  # a tensor's data is a tensor
    if any(x.dtype not in DTYPES for x in datas):
        return False
    return launch.serves(FILE, *datas) or (triton() and all(x.is_cuda for x in datas))


@cache
def triton() -> bool:
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
    dtype, device = kind(a, b), a.data.device
    make = torch.empty if i and m and k and n else torch.zeros
    shape = (i, m, n)
    out = Contraction(
        make(shape, dtype=dtype, device=device) if value else None,
        make(shape, dtype=torch.int64, device=device) if index else None,
        make(shape, dtype=torch.int32, device=device) if marks is not None else None,
    )
    if make is torch.zeros or not (value or index or marks is not None):
        return out
    marks = None if marks is None else _words(marks)
    worth = i * m * n * k >= WORTH or not triton()
    with launch.at(device):
        if dtype is torch.float32 and worth and launch.serves(FILE, a.data, b.data):
            _Job(i, m, n, k, a, b, marks, of_b, out).run(device)
        elif triton():
            from gradtrace.kernels import tiles

            tiles.contraction(a, b, out, dtype, marks, of_b)
        else:
            return reference.contraction(a, b, value=value, index=index, marks=marks, of_b=of_b)
    return out


def _words(marks: Matrices) -> Matrices:
    if marks.data.dtype is torch.int32:
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


class Piece(NamedTuple):
    """So many matrices, rows and columns, from a first of each on."""

    batch: int
    row: int
    column: int
    batches: int
    rows: int
    columns: int


class _Job(NamedTuple):
    """One contraction, which fills in what ``out`` has."""

    i: int
    m: int
    n: int
    k: int
    a: Matrices
    b: Matrices
    marks: Matrices | None
    of_b: bool
    out: Contraction

    def run(self, device: torch.device) -> None:
        """All at once, or as much at a time as there is room for."""
        searched = self.out.index is not None or self.out.marks is not None
        processors = launch.processors(device)
        left, right = _Side.of(self.a, 1, 2), _Side.of(self.b, 2, 1)
        given = None
        if self.marks is not None:
            given = _Side.of(self.marks, *((2, 1) if self.of_b else (1, 2)))
        for piece in self._pieces(device, processors, searched):
            how = plan(piece.batches, piece.rows, piece.columns, self.k, processors)
            self._launch(device, piece, how, searched, left, right, given)

    def _pieces(self, device: torch.device, processors: int, searched: bool) -> Iterator[Piece]:
        sizes = [min(self.i, MANY), self.m, self.n]

        def needed() -> int:
            batches, m, n = sizes
            return space(plan(*sizes, self.k, processors), batches, m, n, searched).size

        if needed() > SMALL:
            most = min(WORKSPACE, launch.room(device) // 2)
            while needed() > most:  # fewer matrices, then fewer rows or columns
                sides = (sizes[1], sizes[2])
                which = 0 if sizes[0] > 1 else 1 + (sides[1] > sides[0])
                if sizes[which] <= (TILE if which else 1):
                    break
                half = -(-sizes[which] // 2)
                sizes[which] = _up(half, TILE) if which else half
        for batch, row, column in product(
            range(0, self.i, sizes[0]), range(0, self.m, sizes[1]), range(0, self.n, sizes[2])
        ):
            yield Piece(
                batch, row, column, min(sizes[0], self.i - batch),
                min(sizes[1], self.m - row), min(sizes[2], self.n - column),
            )  # fmt: skip

    def _launch(
        self,
        device: torch.device,
        piece: Piece,
        how: Plan,
        searched: bool,
        left: _Side,
        right: _Side,
        given: _Side | None,
    ) -> None:
        batch, row, column, batches, m, n = piece
        block, padded, part, splits = how
        high, wide = _up(m, TILE), _up(n, TILE)
        where = space(how, batches, m, n, searched)
        memory = torch.empty(where.size, dtype=torch.uint8, device=device)
        strange = torch.zeros((), dtype=torch.int32, device=device)
        start, flag = memory.data_ptr(), strange.data_ptr()
        turned, across, straight, along, parts, blocks = (start + at for at in where[:6])
        rows = (left.words(row), right.words(column))
        defines = _defines(block, searched)
        launch.kernel(device, FILE, "pack", defines)(
            (-(-padded // 32), (high + wide) // 32, batches), (32, 8, 1),
            (
                *rows[0], left.kind, m, self.k, high, padded, batch,
                turned, straight if searched else 0, flag,
                *rows[1], right.kind, n, self.k, wide, padded, batch,
                across, along if searched else 0, flag,
                high // 32,
            ),
        )  # fmt: skip
        launch.kernel(device, FILE, "contract", defines, SHARED)(
            (high // TILE * (wide // TILE), splits, batches), (THREADS, 1, 1),
            (turned, across, parts, blocks, high, wide, padded, part, flag), SHARED,
        )  # fmt: skip
        marked = NOWHERE if given is None else given.words(column if self.of_b else row)
        first = (batch * self.m + row) * self.n + column
        value, index, marks = self.out
        launch.kernel(device, FILE, "rescan", defines)(
            (-(-m // 32) * -(-n // 32), 1, batches), (THREADS, 1, 1),
            (
                straight, along, turned, across, parts, blocks, splits, part, high, wide, padded,
                m, n,
                0 if value is None else value.data_ptr() + 4 * first,
                0 if index is None else index.data_ptr() + 8 * first,
                0 if marks is None else marks.data_ptr() + 4 * first,
                *marked, self.of_b, batch, self.m * self.n, self.n, flag,
            ),
        )  # fmt: skip


@cache
def _defines(block: int, searched: bool) -> tuple[str, ...]:
    return (f"KB {block}", "INDEX") if searched else (f"KB {block}",)


class _Side(NamedTuple):
    """Where the numbers of an operand are. Tensors that the words name are held on to."""

    kind: int
    held: tuple[Tensor, ...]
    start: int
    tables: tuple[int, int, int]
    steps: tuple[int, int, int]

    @classmethod
    def of(cls, x: Matrices, rows: int, inner: int) -> _Side:
        number = KINDS.get(x.data.dtype, 0)
        if isinstance(x, Operand):
            data, *tables = (x.data.contiguous(), *(table.long().contiguous() for table in x[1:]))
            batch, row, k = (table.data_ptr() for table in tables)
            return cls(number, (data, *tables), data.data_ptr(), (batch, row, k), (0, 0, 0))
        steps = x.stride()
        return cls(number, (x,), x.data_ptr(), (0, 0, 0), (steps[0], steps[rows], steps[inner]))

    def words(self, row: int) -> tuple[int, ...]:
        """``struct Operand``, of the rows from one on."""
        batch, rows, inners = self.tables
        if rows:
            return self.start, batch, rows + 8 * row, inners, *self.steps
        item = self.held[0].element_size()
        return self.start + item * row * self.steps[1], 0, 0, 0, *self.steps


NOWHERE = (0,) * 7
