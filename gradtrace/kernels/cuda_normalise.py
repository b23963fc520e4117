"""Diagonal plus low rank: the largest entry of each row on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradtrace.kernels import cuda_launch, tuning
from gradtrace.kernels.cuda_launch import STEPS, THREADS, WIDE
from gradtrace.kernels.operands import LineLayout
from gradtrace.kernels.pointers import on_device

ELEMENTS_PER_THREAD, TILE_MAX_THREADS = 4, 256
"""Elements that a thread compares with all others of their line, and the most threads per block."""

NULL_OPERAND = (0, 0, 0)
"""Null operand."""


def normalise(
    given: Sequence[Tensor], rank: int, layout: LineLayout, sized: bool = True
) -> tuple[Tensor | None, Tensor]:
    """``Backend.normalise``: values if ``sized``, and indices or provenance ids. ``given`` are the
    diagonal, x, ``rank`` tensors left, ``rank`` tensors right, and optionally provenance ids.
    """
    lines, n, shape, steps = layout
    x = given[1]
    device, dtype, selects = x.device, x.dtype, len(given) > 2 * rank + 2
    value = torch.empty(shape, dtype=dtype, device=device) if sized else None
    found = torch.empty(shape, dtype=torch.int32 if selects else torch.int64, device=device)
    at = [(on_device(part), *step) for part, step in zip(given, steps)]
    # A warp per line if lines are short or there are enough of them, else a block per line.
    rows = 32 if n <= 512 or lines >= 16 * cuda_launch.processors(device) else 256
    words = (
        *at[0], *at[1], *at[2], *(at[3] if rank == 2 else NULL_OPERAND),
        *at[rank + 2], *(at[5] if rank == 2 else NULL_OPERAND),
        *(at[-1] if selects else NULL_OPERAND),
        lines, n, rows, 0 if value is None else on_device(value),
        *((0, on_device(found)) if selects else (on_device(found), 0)),
    )  # fmt: skip
    with cuda_launch.at(device):
        if rank == 1:
            grid = -(-lines // (256 // rows)), 1, 1
            cuda_launch.kernel(device, STEPS, RANKED[dtype])(grid, THREADS, (*words, 0))
        else:
            _pairs(x, lines, n, words)
    return value, found


RANKED = {dtype: f"ranked_{name}" for dtype, name in WIDE.items()}
PRUNED = {dtype: f"pruned_{name}" for dtype, name in WIDE.items()}
PAIRED = {dtype: f"paired_{name}" for dtype, name in WIDE.items()}


def _pairs(x: Tensor, lines: int, n: int, words: tuple[int, ...]) -> None:
    """``normalise`` of rank two. In long lines, elements that cannot attain the maximum are pruned
    first; lines where pruning does not work are left to the pairwise kernel.
    """
    device, dtype, left = x.device, x.dtype, 0
    if n > tuning.PAIRWISE_MAX_ELEMENTS:
        over = torch.empty(lines, dtype=torch.int32, device=device)
        left = on_device(over)
        cuda_launch.kernel(device, STEPS, PRUNED[dtype])((lines, 1, 1), THREADS, (*words, left))
    threads = min(TILE_MAX_THREADS, -(-n // (32 * ELEMENTS_PER_THREAD)) * 32)
    grid = lines * -(-n // (ELEMENTS_PER_THREAD * threads)), 1, 1
    cuda_launch.kernel(device, STEPS, PAIRED[dtype])(grid, (threads, 1, 1), (*words, left))
