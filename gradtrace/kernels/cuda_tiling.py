"""How a contraction on a GPU is divided: into tiles, shares of them, and parts of a workspace. All
of it follows from shapes and from how operands lie, and is worked out once for each.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, TypeAlias

from gradtrace.kernels.cuda_launch import Grid

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

SMALL = 1 << 26
"""A workspace up to this is taken without asking how much room there is."""

LARGEST = 256
"""Rows or columns that are not divided further."""

Steps: TypeAlias = tuple[int, int, int]
"""From matrix to matrix, row to row and k to k."""


class TilingPlan(NamedTuple):
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
def plan(batches: int, m: int, n: int, k: int, processors: int) -> TilingPlan:
    """An equal share for each processor; the fewest zeros around the results. Larger blocks take
    less of contracting and more of looking for the winner: in proportion to k over their size, and
    to their size.
    """
    tiles = TILES if k <= BLOCKS * INNER else TILES[:1]  # registers are short with large blocks
    rows, columns = min(tiles, key=lambda tile: up(m, tile[0]) * up(n, tile[1]))
    sizes = ((8, FEW), (16, 2048 if rows == columns else 4096), (32, 8192), (64, 16384))
    block = next((size for size, most in sizes if k <= most), 128)
    each = max(1, block // INNER)  # steps of a block
    steps = up(k, each * INNER) // INNER
    total = batches * -(-m // rows) * -(-n // columns) * steps
    share = up(max(-(-total // processors), min(LEAST, steps)), each)
    if min(share, steps) * INNER > BLOCKS * block:
        share = BLOCKS * block // INNER
    return TilingPlan(block, rows, columns, steps, min(share, total), total)


def up(n: int, step: int) -> int:
    """To the next multiple."""
    return -(-n // step) * step


class Workspace(NamedTuple):
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


class ContractionPlan(NamedTuple):
    """How so many matrices, rows and columns are contracted in one go."""

    plan: TilingPlan
    space: Workspace
    copied: tuple[bool, bool]
    held: tuple[int, int]  # numbers from row to row in shared memory, or 0
    searching: tuple[int, int]  # results that a thread block looks at
    shared: tuple[int, int]  # bytes of shared memory: of contracting and of searching
    grids: tuple[Grid, Grid, Grid]
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
) -> ContractionPlan:
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
        batches * m * up(n, 4) if searched else 0,
        4 * how.parts * area if how.cut else 0,
        how.parts * area if how.cut and searched else 0,
    )
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + up(size, 16))
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
    return ContractionPlan(
        how, Workspace(*starts), copied, held, searching, shared, grids, searched or how.cut,
        (m, n, k, *divided, how.total),
        (m, n, k, *searching),
        (how.rows, how.columns, *divided, INNER),
    )  # fmt: skip


def workspace(shape: tuple[int, int, int], k: int, processors: int) -> int:
    """The bytes that a contraction with the winner asks for at most, however its operands lie: for
    all at once if that is little, else for as little as it can do with.
    """
    if not (k and all(shape)):
        return 0
    least = (1, min(shape[1], LARGEST), min(shape[2], LARGEST))
    whole, few = (
        way(sizes, k, (None, None), (True, True), processors).space.size for sizes in (shape, least)
    )
    return min(whole, max(few, SMALL))


def _held(
    how: TilingPlan,
    shape: tuple[int, int, int],
    lie: tuple[Steps | None, Steps | None],
    searched: bool,
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
