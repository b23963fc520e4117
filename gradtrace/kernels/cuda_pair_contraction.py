"""The (max, ×) contraction of bfloat16 operands on a GPU, two products at a time.

Products are rounded to bfloat16, which keeps their order; the blocks of k in which the largest
rounded one is attained are searched with exact products. Returns the same bits as
``plain_contraction``.
"""

from __future__ import annotations

import threading
from functools import cache, lru_cache
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from gradtrace.kernels import cuda_launch, tuning
from gradtrace.kernels.cuda_tiling import MAX_K_BLOCKS, THREADS, TilingPlan, round_up
from gradtrace.kernels.operands import Steps
from gradtrace.kernels.pointers import on_device

FILE = "contract_pairs.cu"
TILE, K_PER_STEP, STAGES, BLOCKS_PER_PROCESSOR = 128, 32, 2, 2
"""Rows and columns of a tile of results, k per step, steps buffered in shared memory, and thread
blocks per multiprocessor.
"""

SEARCHED = (64, 32)
"""Rows and columns of results that a thread block searches."""

SHARED_BYTES = STAGES * 2 * TILE * 80 + 64 * 4 * THREADS
PACKING, CONTRACTING, SEARCHING = (32, 8, 1), (THREADS, 1, 1), (512, 1, 1)
Place: TypeAlias = tuple[int, int, int, int]
"""Addresses of an operand and of its batch, row and k tables (0: none)."""


@cache
def available(device: torch.device) -> bool:
    """Whether a GPU has the instructions: since Hopper."""
    return torch.cuda.get_device_capability(device) >= (9, 0) and cuda_launch.compiles(device, FILE)


def pays(shape: tuple[int, int, int], k: int, other: TilingPlan) -> bool:
    """Whether it is faster than products in float32 with the tiles of another plan."""
    _, m, n = shape
    area = round_up(m, other.rows) * round_up(n, other.columns)
    return k >= tuning.PAIRS_MIN_K and round_up(m, TILE) * round_up(n, TILE) < 2 * area


@lru_cache(4096)
def plan(shape: tuple[int, int, int], k: int, processors: int) -> TilingPlan:
    """Equal shares for all thread blocks that run at the same time. A step is a block of k."""
    batches, m, n = shape
    steps = -(-k // K_PER_STEP)
    total = batches * -(-m // TILE) * -(-n // TILE) * steps
    least = min(tuning.SHARE_MIN_STEPS, steps)
    share = min(max(-(-total // (BLOCKS_PER_PROCESSOR * processors)), least), total)
    if min(share, steps) > MAX_K_BLOCKS:
        share = MAX_K_BLOCKS
    return TilingPlan(K_PER_STEP, TILE, TILE, steps, share, total)


class PreparedPairs(NamedTuple):
    """A contraction prepared for any operands of one layout: everything but the addresses."""

    device: torch.device
    pack: cuda_launch.Kernel
    contract: cuda_launch.Kernel
    rescan: cuda_launch.Kernel
    grids: tuple[cuda_launch.Grid, cuda_launch.Grid, cuda_launch.Grid]
    packing: tuple[tuple[int, ...], tuple[int, ...]]  # argument words of pack, without addresses
    lines: int  # rows of blocks that copy the first operand
    regions: tuple[int, int, int, int]  # of the workspace: both operands, keys, parts
    workspace_bytes: int
    sizes: tuple[int, int, int]  # rows, columns, padded k
    steps: tuple[int, int, int]  # per tile, per thread block, in total
    whole: tuple[int, int]  # strides of the results
    ids: Steps
    of_b: bool
    countable: bool  # fits the 32-bit counters of the kernels

    @property
    def small(self) -> bool:
        """Whether one launch suffices, without asking how much memory is free."""
        return self.countable and self.workspace_bytes <= tuning.SMALL_WORKSPACE_BYTES

    def __call__(self, a: Place, b: Place, ids: Place, value: int, index: int, found: int) -> None:
        """Launch it. ``value``, ``index`` and ``found`` are the addresses of the results: values,
        indices and provenance ids; 0 for those not requested.
        """
        memory = cuda_launch.WORKSPACES.memory(self.device, self.workspace_bytes)
        start, smallest = on_device(memory), on_device(_SMALLEST.of(self.device))
        left, right, keys, parts = [start + each for each in self.regions]
        first, second = self.packing
        self.pack(
            self.grids[0], PACKING, (*a, *first, left, *b, *second, right, self.lines, smallest)
        )
        words = (left, right, keys, parts, smallest, *self.sizes)
        self.contract(self.grids[1], CONTRACTING, (*words, *self.steps), SHARED_BYTES)
        self.rescan(
            self.grids[2], SEARCHING,
            (
                *words, *self.steps[:2], value, index, found, *self.whole,
                *ids, *self.ids, self.of_b,
            ),
        )  # fmt: skip


@lru_cache(4096)
def prepared(
    device: torch.device,
    whole: tuple[int, int, int],
    shape: tuple[int, int, int],
    k: int,
    strides: tuple[Steps, Steps, Steps],
    of_b: bool,
) -> PreparedPairs:
    """Prepare the contraction of a part, with sizes ``shape``, of a result with sizes ``whole``.
    ``strides``: of both operands and of the provenance ids; zeros where they have tables.
    """
    batches, m, n = shape
    how = plan(shape, k, cuda_launch.processors(device))
    padded = how.steps * K_PER_STEP
    sizes = (
        2 * batches * m * padded,
        2 * batches * n * padded,
        4 * batches * m * n,
        4 * how.parts * TILE * TILE if how.cut else 0,
    )
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + round_up(size, 16))
    lines, high, wide = -(-m // 32), *SEARCHED
    return PreparedPairs(
        device,
        cuda_launch.kernel(device, FILE, "pack_pairs"),
        cuda_launch.kernel(device, FILE, "contract_pairs", (), SHARED_BYTES),
        cuda_launch.kernel(device, FILE, "rescan_pairs"),
        (
            (-(-padded // 32), lines + -(-n // 32), batches),
            (how.parts, 1, 1),
            (-(-m // high) * -(-n // wide), 1, batches),
        ),
        ((*strides[0], m, k, padded), (*strides[1], n, k, padded)),
        lines,
        (starts[0], starts[1], starts[2], starts[3]),
        starts[4],
        (m, n, padded),
        (how.steps, how.share, how.total),
        (whole[1] * whole[2], whole[2]),
        strides[2],
        of_b,
        max(batches, lines + -(-n // 32)) <= cuda_launch.MAX_BLOCKS_YZ and how.total < 1 << 30,
    )


class _Smallest(threading.local):
    """Per thread and stream: the smallest numbers of the operands, written and read by kernels."""

    def __init__(self) -> None:
        self.tensors: dict[tuple[int | None, int], Tensor] = {}

    def of(self, device: torch.device) -> Tensor:
        key = device.index, cuda_launch.stream(device)
        found = self.tensors.get(key)
        if found is None:
            found = self.tensors[key] = torch.zeros(4, dtype=torch.int32, device=device)
        return found


_SMALLEST = _Smallest()
