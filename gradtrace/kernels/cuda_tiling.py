"""How a contraction on a GPU is divided into tiles, shares per thread block and workspace regions.
Everything here depends only on shapes and strides, and is cached.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from gradtrace.kernels import tuning
from gradtrace.kernels.cuda_launch import Grid
from gradtrace.kernels.operands import Steps

K_PER_STEP, THREADS, STAGES = 16, 256, 3
"""k per step, threads per block, and steps buffered in shared memory."""

TILES = ((128, 128), (256, 64), (64, 256))
"""Rows and columns of the result tiles that a thread block can compute."""

MAX_K_BLOCKS = 256
"""The most blocks of k per thread block and tile: a block's number is stored in a byte."""


class TilingPlan(NamedTuple):
    """How the work is divided: k into blocks, results into tiles of rows × columns, and the steps
    of all tiles into equal shares per thread block.
    """

    block: int
    rows: int
    columns: int
    steps: int  # per tile, each of K_PER_STEP k
    share: int
    total: int

    @property
    def padded(self) -> int:
        """The number of k, padded with zeros to whole steps."""
        return self.steps * K_PER_STEP

    @property
    def parts(self) -> int:
        """The number of thread blocks."""
        return -(-self.total // self.share)

    @property
    def cut(self) -> bool:
        """Whether several thread blocks share a tile, so that partial results must be combined."""
        return self.parts > 1 and self.share % self.steps != 0


@lru_cache(4096)
def plan(batches: int, m: int, n: int, k: int, processors: int) -> TilingPlan:
    """Equal shares for all multiprocessors, and the tile with the least padding around the results.
    Larger blocks of k make the contraction cheaper (cost ∝ k / size) and the search for the argmax
    dearer (cost ∝ size).
    """
    tiles = (
        TILES if k <= MAX_K_BLOCKS * K_PER_STEP else TILES[:1]
    )  # large blocks need more registers
    rows, columns = min(tiles, key=lambda tile: round_up(m, tile[0]) * round_up(n, tile[1]))
    sizes = (
        (8, tuning.WHOLE_ROWS_MAX_K),
        (16, 2048 if rows == columns else 4096),
        (32, 8192),
        (64, 16384),
    )
    block = next((size for size, most in sizes if k <= most), 128)
    each = max(1, block // K_PER_STEP)  # steps per block
    steps = round_up(k, each * K_PER_STEP) // K_PER_STEP
    total = batches * -(-m // rows) * -(-n // columns) * steps
    share = round_up(max(-(-total // processors), min(tuning.SHARE_MIN_STEPS, steps)), each)
    if min(share, steps) * K_PER_STEP > MAX_K_BLOCKS * block:
        share = MAX_K_BLOCKS * block // K_PER_STEP
    return TilingPlan(block, rows, columns, steps, min(share, total), total)


def round_up(n: int, step: int) -> int:
    """Round up to a multiple of ``step``."""
    return -(-n // step) * step


class Workspace(NamedTuple):
    """Regions of the workspace of one launch, as byte offsets, all multiples of 16: copies of both
    operands (row by k); values, if not requested as a result; the number of the k block that each
    value comes from; values and block numbers of the partial results of shared tiles; total size.
    """

    left: int
    right: int
    value: int
    blocks: int
    parts: int
    numbers: int
    size: int


class ContractionPlan(NamedTuple):
    """How one launch contracts a given number of matrices, rows and columns."""

    plan: TilingPlan
    space: Workspace
    copied: tuple[bool, bool]
    held: tuple[int, int]  # row stride in shared memory, or 0 if not held there
    searching: tuple[int, int]  # rows and columns that a thread block searches
    shared: tuple[int, int]  # bytes of shared memory: contraction, search
    grids: tuple[Grid, Grid, Grid]
    joined: bool  # whether rescan must run after the contraction
    work: tuple[int, ...]  # last argument words of the contraction
    whole: tuple[int, ...]  # argument words of the search: sizes
    tile: tuple[int, ...]  # argument words of the search: tiling


@lru_cache(4096)
def contraction_plan(
    shape: tuple[int, int, int],
    k: int,
    strides: tuple[Steps | None, Steps | None],
    requested: tuple[bool, bool],
    processors: int,
) -> ContractionPlan:
    """The plan of one launch. ``strides``: of both operands, None for one that must be copied;
    ``requested``: whether values are, and whether the argmax (for indices or ids) is.
    """
    batches, m, n = shape
    value, searched = requested
    how = plan(batches, m, n, k, processors)
    held, searching = _held(how, shape, strides, searched)
    copied = (
        strides[0] is None or (searched and not held[0] and strides[0][2] != 1),
        strides[1] is None or (searched and not held[1] and strides[1][2] != 1),
    )
    results, area = batches * m * n, how.rows * how.columns
    sizes = (
        4 * batches * m * how.padded if copied[0] else 0,
        4 * batches * n * how.padded if copied[1] else 0,
        0 if value else 4 * results,
        batches * m * round_up(n, 4) if searched else 0,
        4 * how.parts * area if how.cut else 0,
        how.parts * area if how.cut and searched else 0,
    )
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + round_up(size, 16))
    high, wide = searching
    lines = (-(-m // 32) if copied[0] else 0) + (-(-n // 32) if copied[1] else 0)
    grids = (
        (-(-how.padded // 32), lines, batches),
        (how.parts, 1, 1),
        (-(-m // high) * -(-n // wide), 1, batches),
    )
    ahead = STAGES * K_PER_STEP * (how.rows + how.columns + 8) * 4
    shared = (32 * THREADS + ahead + 64 * THREADS * 4, 4 * (high * held[0] + wide * held[1]))
    divided = how.steps, how.share
    return ContractionPlan(
        how, Workspace(*starts), copied, held, searching, shared, grids, searched or how.cut,
        (m, n, k, *divided, how.total),
        (m, n, k, *searching),
        (how.rows, how.columns, *divided, K_PER_STEP),
    )  # fmt: skip


def workspace(shape: tuple[int, int, int], k: int, processors: int) -> int:
    """Upper bound, over all layouts of the operands, of the workspace bytes of a contraction with
    argmax: of one launch if that is small, else of the smallest parts it can be split into.
    """
    if not (k and all(shape)):
        return 0
    least = (1, min(shape[1], tuning.SPLIT_MIN_EXTENT), min(shape[2], tuning.SPLIT_MIN_EXTENT))
    whole, few = (
        contraction_plan(sizes, k, (None, None), (True, True), processors).space.size
        for sizes in (shape, least)
    )
    return min(whole, max(few, tuning.SMALL_WORKSPACE_BYTES))


def _held(
    how: TilingPlan,
    shape: tuple[int, int, int],
    strides: tuple[Steps | None, Steps | None],
    searched: bool,
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Row strides in shared memory of the operands that the argmax search holds there (0: not
    held), and the rows and columns searched per thread block. Both operands are held if k is small;
    one of them if its k is strided and each of its rows serves few results, so that copying it
    would cost more.
    """
    line = how.padded + 4
    if not searched:
        return (0, 0), (64, 32)
    if how.block < K_PER_STEP:
        return (line, line), (64, 64)
    if 32 * line <= tuning.STRIDED_ROWS_MAX_BYTES:
        _, m, n = shape
        if strides[0] is not None and strides[0][2] != 1 and n <= 256:
            return (line, 0), (8, 64)
        if strides[1] is not None and strides[1][2] != 1 and m <= 256:
            return (0, line), (64, 8)
    return (0, 0), (64, 32)
