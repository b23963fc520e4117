"""Diagonal plus low rank on a GPU: the largest entry of each row, or their sum."""

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
    lines, n, shape, _ = layout
    x = given[1]
    device, dtype, selects = x.device, x.dtype, len(given) > 2 * rank + 2
    value = torch.empty(shape, dtype=dtype, device=device) if sized else None
    found = torch.empty(shape, dtype=torch.int32 if selects else torch.int64, device=device)
    places = (0, on_device(found)) if selects else (on_device(found), 0)
    rows = _threads_of_a_line(lines, n, device)
    words = (*_words(given, rank, layout), rows, 0 if value is None else on_device(value), *places)
    with cuda_launch.at(device):
        if rank == 1:
            grid = -(-lines // (256 // rows)), 1, 1
            cuda_launch.kernel(device, STEPS, RANKED[dtype])(grid, THREADS, (*words, 0))
        else:
            _pairs(x, lines, n, words)
    return value, found


@cuda_launch.as_one_call
def sums(given: Sequence[Tensor], rank: int, layout: LineLayout) -> Tensor:
    """``Backend.normalised_sums``; ``given`` as in ``normalise``, without provenance ids."""
    lines, n, shape, _ = layout
    device, dtype = given[1].device, given[1].dtype
    found = torch.empty(shape, dtype=dtype, device=device)
    rows = _threads_of_a_line(lines, n, device)
    words = (*_words(given, rank, layout), rows, on_device(found), 0, 0, 0)
    with cuda_launch.at(device):
        if rank == 1:
            grid = -(-lines // (256 // rows)), 1, 1
            cuda_launch.kernel(device, STEPS, RANKED_SUMS[dtype])(grid, THREADS, words)
        else:
            grid, threads = _tiles(lines, n)
            cuda_launch.kernel(device, STEPS, PAIRED_SUMS[dtype])(grid, threads, words)
    return found


def _threads_of_a_line(lines: int, n: int, device: torch.device) -> int:
    """A warp per line if lines are short or there are enough of them, else a block per line."""
    return 32 if n <= 512 or lines >= 16 * cuda_launch.processors(device) else 256


def _words(given: Sequence[Tensor], rank: int, layout: LineLayout) -> tuple[int, ...]:
    """The first argument words of all kernels here: tensors, and the sizes of lines."""
    lines, n, _, steps = layout
    at = [(on_device(part), *step) for part, step in zip(given, steps)]
    selects = len(given) > 2 * rank + 2
    return (
        *at[0], *at[1], *at[2], *(at[3] if rank == 2 else NULL_OPERAND),
        *at[rank + 2], *(at[5] if rank == 2 else NULL_OPERAND),
        *(at[-1] if selects else NULL_OPERAND), lines, n,
    )  # fmt: skip


def _tiles(lines: int, n: int) -> tuple[cuda_launch.Grid, cuda_launch.Grid]:
    """Grid and block of kernels that take every element of a line with every other."""
    threads = min(TILE_MAX_THREADS, -(-n // (32 * ELEMENTS_PER_THREAD)) * 32)
    return (lines * -(-n // (ELEMENTS_PER_THREAD * threads)), 1, 1), (threads, 1, 1)


RANKED = {dtype: f"ranked_{name}" for dtype, name in WIDE.items()}
PRUNED = {dtype: f"pruned_{name}" for dtype, name in WIDE.items()}
PAIRED = {dtype: f"paired_{name}" for dtype, name in WIDE.items()}
RANKED_SUMS = {dtype: f"ranked_sums_{name}" for dtype, name in WIDE.items()}
PAIRED_SUMS = {dtype: f"paired_sums_{name}" for dtype, name in WIDE.items()}


def _pairs(x: Tensor, lines: int, n: int, words: tuple[int, ...]) -> None:
    """``normalise`` of rank two. In long lines, elements that cannot attain the maximum are pruned
    first; lines where pruning does not work are left to the pairwise kernel.
    """
    device, dtype, left = x.device, x.dtype, 0
    if n > tuning.PAIRWISE_MAX_ELEMENTS:
        over = torch.empty(lines, dtype=torch.int32, device=device)
        left = on_device(over)
        cuda_launch.kernel(device, STEPS, PRUNED[dtype])((lines, 1, 1), THREADS, (*words, left))
    grid, threads = _tiles(lines, n)
    cuda_launch.kernel(device, STEPS, PAIRED[dtype])(grid, threads, (*words, left))
