"""The largest contribution along dimensions, and to targets, on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from gradtrace.kernels import cuda_launch
from gradtrace.kernels.cuda_launch import KINDS, STEPS, THREADS, UNUSED_WORDS, WIDE, blocks
from gradtrace.kernels.pointers import on_device
from gradtrace.kernels.strides import Levels

MAX_REDUCTIONS = 16
"""The most reductions per launch; the same as in ``steps.cu``."""


def reduce(x: Tensor, ids: Tensor, levels: Levels, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """``Backend.reduce`` of tensors whose dimensions collapse to four levels."""
    device = x.device
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    value = torch.empty(shape, dtype=dtype, device=device)
    out = torch.empty(shape, dtype=torch.int32, device=device)
    how, most = reduce_plan(levels, cuda_launch.processors(device)), 0
    if how.combine_blocks:
        partial = torch.empty(2 * how.places, dtype=torch.int64, device=device)
        most = on_device(partial)
    where = on_device(x), on_device(ids), KINDS[x.dtype]
    job = ReduceJob(*where, how, most, on_device(value), on_device(out))
    with cuda_launch.at(device):
        reduced(dtype is torch.float64, device, (job,))
    return value, out


class ReduceJob(NamedTuple):
    """A reduction: addresses of values and provenance ids, dtype code, plan; address of the partial
    results, if lines are cut into several parts; addresses of the resulting values (0: not wanted)
    and ids.
    """

    x: int
    ids: int
    kind: int
    reduce_plan: ReducePlan
    most: int
    value: int
    out: int


def reduced(wide: bool, device: torch.device, jobs: Sequence[ReduceJob]) -> None:
    """Run at most ``MAX_REDUCTIONS`` reductions in one launch, and one more launch to combine the
    parts of lines that were cut.
    """
    words, first, combine_blocks = [len(jobs)], 0, 0
    for x, ids, kind, how, most, value, out in jobs:
        words += (x, ids, kind, *how.words, most, most + 8 * how.places, value, out, first)
        first += how.blocks
        combine_blocks = max(combine_blocks, how.combine_blocks)
    words += UNUSED_WORDS[: 25 * (MAX_REDUCTIONS - len(jobs))]
    given = tuple(words)
    cuda_launch.kernel(device, STEPS, REDUCE[wide])((first, 1, 1), THREADS, given)
    if combine_blocks:
        cuda_launch.kernel(device, STEPS, COMBINE[wide])(
            (combine_blocks, len(jobs), 1), THREADS, given
        )


REDUCE, COMBINE = ("reduce_float", "reduce_double"), ("combine_float", "combine_double")


class ReducePlan(NamedTuple):
    """How lines are reduced: thread blocks, argument words of the kernel, thread blocks of the
    second pass that combines parts (0: lines are not cut), parts of all lines, number of results.
    """

    blocks: int
    words: tuple[int, ...]
    combine_blocks: int
    places: int
    results: int


@lru_cache(4096)
def reduce_plan(levels: Levels, processors: int) -> ReducePlan:
    """The plan for a reduction on a GPU with this many multiprocessors."""
    (r1, *_), (k1, *_), (r2, *_), (k2, *_) = levels
    columns, rows, cuts, length = divided(r1 * r2, k1 * k2, k2 > 1, processors)
    words = (
        *(level[part] for part in range(3) for level in levels),
        int(k2 > 1), columns, rows, cuts, length,
    )  # fmt: skip
    results = k1 * k2
    combine_blocks = -(-results // 256) if cuts > 1 else 0
    return ReducePlan(-(-results // columns) * cuts, words, combine_blocks, cuts * results, results)


@lru_cache(4096)
def divided(reduced: int, results: int, beside: bool, processors: int) -> tuple[int, int, int, int]:
    """Results per block of 256 threads, threads per result, parts into which each line is cut so
    that all multiprocessors have work, and elements per part.
    """
    whole = 1 << max(0, reduced - 1).bit_length()  # a power of two
    if beside:  # 32 neighbours, or 8, for coalesced reads
        columns = 32 if -(-results // 32) >= 2 * processors else 8
        rows = min(256 // columns, whole)
    else:
        rows = min(whole, 32 if reduced <= 512 else 256)
    columns = 256 // rows
    blocks = -(-results // columns)
    cuts = max(1, min(2 * processors // blocks, reduced // (8 * rows)))
    length = -(-reduced // cuts)
    return columns, rows, -(-reduced // length), length


def scatter(x: Tensor, ids: Tensor, target: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """``Backend.scatter`` of flat contiguous tensors; the target is int64."""
    device, n = x.device, x.numel()
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    value = torch.zeros(size, dtype=dtype, device=device)
    first = torch.full((size,), n, dtype=torch.int64, device=device)
    words = (
        on_device(x), on_device(target), KINDS[x.dtype], n, size, on_device(value),
        on_device(first),
    )  # fmt: skip
    with cuda_launch.at(device):
        for name in ("scatter_max", "scatter_first") if n and size else ():
            cuda_launch.kernel(device, STEPS, f"{name}_{WIDE[dtype]}")(blocks(n), THREADS, words)
        return value, gather(ids, first)


def gather(ids: Tensor, source: Tensor) -> Tensor:
    """``ids[source]`` of contiguous tensors, ``ids`` flat; 0 for an index out of range."""
    out = torch.empty(source.shape, dtype=torch.int32, device=ids.device)
    n = source.numel()
    if n:
        with cuda_launch.at(ids.device):
            cuda_launch.kernel(ids.device, STEPS, "gather")(
                blocks(n), THREADS,
                (on_device(ids), on_device(source), n, ids.numel(), on_device(out)),
            )  # fmt: skip
    return out
