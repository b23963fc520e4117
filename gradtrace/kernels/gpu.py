"""The contraction in (max, ×) on a GPU: CUDA compiled when first used, and Triton where that cannot
serve. Both give the bits of ``reference``.

The CUDA kernels take float32 (half precisions are copied as such), and read it where it lies.
"""

from __future__ import annotations

import threading
from functools import cache, lru_cache
from importlib.util import find_spec
from itertools import product
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from gradtrace.kernels import launch, reference
from gradtrace.kernels.reference import Contraction, Matrices, Operand, kind, sizes

FILE, BESIDE = "contract.cu", "rescan.cu"
INNER, THREADS, STAGES = 16, 256, 3
"""k of a step, threads, and steps whose numbers are in shared memory."""

TILES = ((128, 128), (256, 64), (64, 256))
"""Rows and columns that a thread block can work on at a time."""

BLOCKS = 256
"""The most blocks of k that one works on in a tile: their numbers are bytes."""

FEW = 128
"""Up to so many k, rows are read into shared memory whole to look for the winner."""

HELD, MOST = 48 << 10, 72 << 10
"""The most bytes that are held of 8 rows that lie apart, and of all that is held."""

LEAST = 8
"""Steps of a tile that are worth a thread block."""

KINDS = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 3}
DTYPES = (*KINDS, torch.float64)
WORKSPACE = 1 << 31
"""The most bytes that are laid out at a time."""

SMALL = 1 << 26
"""A workspace up to this is taken without asking how much room there is."""

KEEP = 1 << 25
"""A workspace up to this is kept for what comes next."""

FAR, LONG = 1 << 24, 1 << 31
"""Steps between rows, and between k, from which on an operand is copied; also columns, and steps of
all tiles, of which there are no more in a launch: kernels count in 32 bits.
"""

MANY = 65_535
"""The most matrices of a launch."""

WORTH = 1 << 22
"""Products from which on laying out pays."""


def served(*operands: Matrices) -> bool:
    """Whether these are numbers on a GPU that can be worked on here."""
    datas = [x.data if isinstance(x, Operand) else x for x in operands]
    for x in datas:
        if x.dtype not in DTYPES:
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
    worth = (i * m * n * k >= WORTH or not triton()) and n < FAR
    with launch.at(device):
        if dtype is torch.float32 and worth and launch.serves(FILE, left, right):
            given = NOWHERE if marks is None else _Side.of(_words(marks), *ROLES[of_b])
            sides = _Side.of(a, 1, 2), _Side.of(b, 2, 1), given
            _Job(shape, k, *sides, of_b, out, device).run()
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

Steps: TypeAlias = tuple[int, int, int]
"""From matrix to matrix, row to row and k to k."""


class Plan(NamedTuple):
    """How the work is divided: k into blocks, results into tiles, the steps of all tiles into a
    share for each thread block.
    """

    block: int
    rows: int
    columns: int
    steps: int  # of INNER k, in a tile
    share: int
    total: int

    @property
    def padded(self) -> int:
        """How many k, with zeros after them."""
        return self.steps * INNER

    @property
    def parts(self) -> int:
        """Thread blocks."""
        return -(-self.total // self.share)

    @property
    def cut(self) -> bool:
        """Whether a tile is left to several."""
        return self.parts > 1 and self.share % self.steps != 0


@lru_cache(4096)
def plan(batches: int, m: int, n: int, k: int, processors: int) -> Plan:
    """An equal share for each processor; the fewest zeros around the results. Larger blocks take
    less of contracting and more of looking for the winner: in proportion to k over their size, and
    to their size.
    """
    tiles = TILES if k <= BLOCKS * INNER else TILES[:1]  # registers are short with large blocks
    rows, columns = min(tiles, key=lambda tile: _up(m, tile[0]) * _up(n, tile[1]))
    sizes = ((8, FEW), (16, 2048 if rows == columns else 4096), (32, 8192), (64, 16384))
    block = next((size for size, most in sizes if k <= most), 128)
    each = max(1, block // INNER)  # steps of a block
    steps = _up(k, each * INNER) // INNER
    total = batches * -(-m // rows) * -(-n // columns) * steps
    share = _up(max(-(-total // processors), min(LEAST, steps)), each)
    if min(share, steps) * INNER > BLOCKS * block:
        share = BLOCKS * block // INNER
    return Plan(block, rows, columns, steps, min(share, total), total)


def _up(n: int, step: int) -> int:
    return -(-n // step) * step


class Space(NamedTuple):
    """Where things are in the workspace of one launch: bytes from its start, all multiples of 16.
    Copies of operands, row by k; results where nobody asked for them; which blocks they are from;
    the same two of who goes on with a tile.
    """

    left: int
    right: int
    value: int
    blocks: int
    parts: int
    numbers: int
    size: int


class Way(NamedTuple):
    """How so many matrices, rows and columns are contracted in one go."""

    plan: Plan
    space: Space
    copied: tuple[bool, bool]
    held: tuple[int, int]  # numbers from row to row in shared memory, or 0
    searching: tuple[int, int]  # results that a thread block looks at
    shared: tuple[int, int]  # bytes of shared memory: of contracting and of searching
    grids: tuple[launch.Grid, launch.Grid, launch.Grid]
    joined: bool  # whether there is something to do after contracting
    work: tuple[int, ...]  # the last words of contracting
    whole: tuple[int, ...]  # of searching: the sizes
    tile: tuple[int, ...]  # and how tiles were divided


@lru_cache(4096)
def way(
    shape: tuple[int, int, int],
    k: int,
    lie: tuple[Steps | None, Steps | None],
    asked: tuple[bool, bool],
    processors: int,
) -> Way:
    """``lie``: of the operands, None where they are not to be read where they are; ``asked``:
    whether the value is wanted, and the winner.
    """
    batches, m, n = shape
    value, searched = asked
    how = plan(batches, m, n, k, processors)
    held, searching = _held(how, shape, lie, searched)
    copied = (
        lie[0] is None or (searched and not held[0] and lie[0][2] != 1),
        lie[1] is None or (searched and not held[1] and lie[1][2] != 1),
    )
    results, area = batches * m * n, how.rows * how.columns
    sizes = (
        4 * batches * m * how.padded if copied[0] else 0,
        4 * batches * n * how.padded if copied[1] else 0,
        0 if value else 4 * results,
        batches * m * _up(n, 4) if searched else 0,
        4 * how.parts * area if how.cut else 0,
        how.parts * area if how.cut and searched else 0,
    )
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + _up(size, 16))
    high, wide = searching
    lines = (-(-m // 32) if copied[0] else 0) + (-(-n // 32) if copied[1] else 0)
    grids = (
        (-(-how.padded // 32), lines, batches),
        (how.parts, 1, 1),
        (-(-m // high) * -(-n // wide), 1, batches),
    )
    ahead = STAGES * INNER * (how.rows + how.columns + 8) * 4
    shared = (32 * THREADS + ahead + 64 * THREADS * 4, 4 * (high * held[0] + wide * held[1]))
    divided = how.steps, how.share
    return Way(
        how, Space(*starts), copied, held, searching, shared, grids, searched or how.cut,
        (m, n, k, *divided, how.total),
        (m, n, k, *searching),
        (how.rows, how.columns, *divided, INNER),
    )  # fmt: skip


def _held(
    how: Plan, shape: tuple[int, int, int], lie: tuple[Steps | None, Steps | None], searched: bool
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Which rows are read into shared memory to look for the winner, and how many results at a
    time. All of them if k is small; some of one side if they lie apart and hardly any results are
    of each, so that copying them would cost more.
    """
    line = how.padded + 4
    if not searched:
        return (0, 0), (64, 32)
    if how.block < INNER:
        return (line, line), (64, 64)
    if 32 * line <= HELD:
        _, m, n = shape
        if lie[0] is not None and lie[0][2] != 1 and n <= 256:
            return (line, 0), (8, 64)
        if lie[1] is not None and lie[1][2] != 1 and m <= 256:
            return (0, line), (64, 8)
    return (0, 0), (64, 32)


@lru_cache(64)
def _kernels(
    device: torch.device, tile: tuple[int, int, int], searched: bool, shared: int
) -> tuple[launch.Kernel, launch.Kernel, launch.Kernel]:
    block, rows, columns = tile
    defines: tuple[str, ...] = (f"KB {block}", f"BM {rows}", f"BN {columns}")
    if searched:
        defines = (*defines, "INDEX")
    return (
        launch.kernel(device, BESIDE, "pack", defines[:1]),
        launch.kernel(device, FILE, "contract", defines, shared),
        launch.kernel(device, BESIDE, "rescan", defines[:1], MOST),
    )


class _Kept(threading.local):
    """Workspaces that a thread uses again, one for each stream: what is launched on a stream comes
    after what was launched there before. A new tensor each time would cost more than a launch.
    """

    def __init__(self) -> None:
        self.tensors: dict[tuple[int | None, int], Tensor] = {}

    def memory(self, device: torch.device, size: int) -> Tensor:
        """At least so many bytes, for what is launched on the current stream now."""
        key = device.index, launch.stream(device)
        found = self.tensors.get(key)
        if found is None or found.numel() < size:
            found = torch.empty(max(size, 1), dtype=torch.uint8, device=device)
            if size <= KEEP:
                self.tensors[key] = found
        return found


_KEPT = _Kept()

PACKING, CONTRACTING = (32, 8, 1), (THREADS, 1, 1)
FIRST = (0, 0, 0)
UNPACKED = (0,) * 12


class _Job(NamedTuple):
    """One contraction, which fills in what ``out`` has."""

    shape: tuple[int, int, int]
    k: int
    a: _Side
    b: _Side
    marks: _Side
    of_b: bool
    out: Contraction
    device: torch.device

    def run(self) -> None:
        """All at once, or as much at a time as there is room for."""
        whole = self._way(self.shape)
        if whole.space.size <= SMALL and self._countable(self.shape, whole):
            self._launch(FIRST, self.shape, whole)
            return
        sizes = self._fitting(launch.room(self.device) // 2)
        for first in product(*(range(0, n, size) for n, size in zip(self.shape, sizes))):
            i, m, n = (min(s, n - at) for at, n, s in zip(first, self.shape, sizes))
            self._launch(first, (i, m, n), self._way((i, m, n)))

    def _way(self, shape: tuple[int, int, int]) -> Way:
        value, index, marks = self.out
        asked = (value is not None, index is not None or marks is not None)
        return way(shape, self.k, (self.a.lie, self.b.lie), asked, launch.processors(self.device))

    def _countable(self, shape: tuple[int, int, int], how: Way) -> bool:
        return shape[0] <= MANY and how.plan.total < LONG // 2

    def _fitting(self, room: int) -> tuple[int, int, int]:
        """How many matrices, then rows and columns, can be worked on at a time."""
        i, m, n = min(self.shape[0], MANY), *self.shape[1:]
        most = min(WORKSPACE, room)
        while True:
            how = self._way((i, m, n))
            if how.space.size <= most and self._countable((i, m, n), how):
                break
            if i > 1:
                i = -(-i // 2)
            elif max(m, n) <= LARGEST:
                break
            elif m >= n:
                m = _up(-(-m // 2), LARGEST)
            else:
                n = _up(-(-n // 2), LARGEST)
        return i, m, n

    def _launch(self, first: tuple[int, ...], shape: tuple[int, int, int], how: Way) -> None:
        a, b, (value, index, marks) = self.a, self.b, self.out
        batch, row, column = first
        _, m, n = shape
        memory = _KEPT.memory(self.device, how.space.size)
        start = memory.data_ptr()
        left, right, spare, blocks, parts, numbers, _ = [start + each for each in how.space]
        searched = index is not None or marks is not None
        tile = how.plan.block, how.plan.rows, how.plan.columns
        pack, contract, rescan = _kernels(self.device, tile, searched, how.shared[0])
        mine, theirs = a.words(batch, row), b.words(batch, column)
        here, there = (mine[0], *mine[4:]), (theirs[0], *theirs[4:])
        copy, other = here, there
        (ours, yours), padded = how.copied, how.plan.padded
        if ours or yours:
            pack(
                how.grids[0], PACKING,
                (
                    *((*mine, a.kind, m, self.k, padded, left) if ours else UNPACKED),
                    *((*theirs, b.kind, n, self.k, padded, right) if yours else UNPACKED),
                    -(-m // 32) if ours else 0,
                ),
            )  # fmt: skip
            copy = (left, m * padded, padded, 1) if ours else here
            other = (right, n * padded, padded, 1) if yours else there
        _, rows, columns = self.shape
        corner, plane = (batch * rows + row) * columns + column, rows * columns
        at = (spare, m * n, n)
        if value is not None:
            at = (value.data_ptr() + 4 * corner, plane, columns)
        results = (*at, blocks if searched else 0, parts, numbers)
        contract(
            how.grids[1], CONTRACTING,
            (
                *(copy if a.lie is None else here), *(other if b.lie is None else there),
                *results, *how.work,
            ),
            how.shared[0],
        )  # fmt: skip
        if not how.joined:
            return
        rescan(
            how.grids[2], CONTRACTING,
            (
                *copy, how.held[0], *other, how.held[1], *how.whole, *results, *how.tile,
                0 if index is None else index.data_ptr() + 8 * corner,
                0 if marks is None else marks.data_ptr() + 4 * corner,
                plane, columns, *self.marks.words(batch, column if self.of_b else row), self.of_b,
            ),
            how.shared[1],
        )  # fmt: skip


LARGEST = 256
"""Rows or columns that are not divided further."""


class _Side(NamedTuple):
    """Where the numbers of an operand are: ``struct Operand``. Tensors that it names are held."""

    kind: int
    size: int  # of a number
    place: tuple[int, int, int, int, int, int, int]
    lie: Steps | None  # of float32, which are read where they are
    held: tuple[Tensor, ...]

    @classmethod
    def of(cls, x: Matrices, rows: int, inner: int) -> _Side:
        if isinstance(x, Operand):
            data = x.data.contiguous()
            tables = tuple(table.long().contiguous() for table in x[1:])
            batch, row, k = (table.data_ptr() for table in tables)
            place = (data.data_ptr(), batch, row, k, 0, 0, 0)
            return cls(KINDS.get(data.dtype, 0), data.itemsize, place, None, (data, *tables))
        steps = x.stride()
        batch, row, k = steps[0], steps[rows], steps[inner]
        place = (x.data_ptr(), 0, 0, 0, batch, row, k)
        if x.dtype is torch.float32:
            near = row < FAR and k < LONG
            return cls(0, 4, place, (batch, row, k) if near else None, (x,))
        return cls(KINDS.get(x.dtype, 0), x.itemsize, place, None, (x,))

    def words(self, batch: int, row: int) -> tuple[int, ...]:
        """Of the matrices and the rows from these on."""
        if not batch and not row:
            return self.place
        start, batches, rows, inners, *steps = self.place
        if rows:
            return start, batches + 8 * batch, rows + 8 * row, inners, *steps
        return start + self.size * (batch * steps[0] + row * steps[1]), 0, 0, 0, *steps


NOWHERE = _Side(0, 0, (0,) * 7, None, ())
