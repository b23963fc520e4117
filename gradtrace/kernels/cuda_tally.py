"""Counts and exact sums by provenance id on a GPU, for one leaf or many in a launch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from gradtrace.kernels import cuda_launch, tuning
from gradtrace.kernels.cuda_launch import KINDS, STEPS, TALLY_THREADS, UNUSED_WORDS
from gradtrace.kernels.pointers import on_device

BINS = {False: (40, 8), True: (264, 12)}
"""By whether values are double: bins per id in ``steps.cu``, and how many are in shared memory."""

MAX_TALLIES = 32
"""The most leaves per launch; the same as in ``steps.cu``."""

HEADER_WORDS = 16
"""Words before the bins in the workspace."""


class TallyJob(NamedTuple):
    """A leaf to tally: addresses of its provenance ids (0: all nonzero elements count as one id)
    and of its gradient, dtype code, number of elements; the number of ids, the lowest of them, the
    plan; the offsets of its results and of its workspace, in words.
    """

    ids: int
    gradient: int
    kind: int
    n: int
    id_count: int
    low: int
    plan: TallyPlan
    at: int = 0
    work: int = 0


def counted(
    name: str,
    device: torch.device,
    jobs: Sequence[TallyJob],
    found: tuple[Tensor, Tensor],
    work: int,
) -> None:
    """Tally at most ``MAX_TALLIES`` leaves in one launch, into the counts and sums of ``found``;
    ``work`` is the total size of their workspaces in words.
    """
    memory = _work(device, work)  # a reference until the launch: a large workspace is not cached
    counts, sums, place = on_device(found[0]), on_device(found[1]), on_device(memory)
    words, first, shared = [len(jobs)], 0, 0
    for ids, gradient, kind, n, id_count, low, plan, at, mine in jobs:
        words += (
            ids, gradient, kind, n, id_count, low, min(plan.slots, id_count), plan.length,
            place + 8 * mine, sums + 8 * at, counts + 8 * at, first, plan.blocks,
        )  # fmt: skip
        first += plan.blocks
        shared = max(shared, plan.shared)
    words += UNUSED_WORDS[: 13 * (MAX_TALLIES - len(jobs))]
    cuda_launch.kernel(device, STEPS, name)((first, 1, 1), TALLY_THREADS, tuple(words), shared)


def results(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Uninitialised counts and sums for ``count`` provenance ids."""
    counts = torch.empty(count, dtype=torch.int64, device=device)
    return counts, torch.empty(count, dtype=torch.float64, device=device)


def tally(ids: Tensor, gradient: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """``Backend.tally`` of at most ``PIECE_ELEMENTS`` contiguous elements; ``count`` ≥ 1."""
    device, kind, n = gradient.device, KINDS[gradient.dtype], gradient.numel()
    found, plan = results(count, device), tally_plan(n, count, kind == 1, device)
    where = on_device(ids), on_device(gradient), kind, n
    with cuda_launch.at(device):
        for low in range(0, count, plan.ids):
            job = TallyJob(*where, min(plan.ids, count - low), low, plan, low)
            counted(TALLY[kind == 1], device, (job,), found, plan.words)
    return found


def measured(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """``Backend.measure`` of at most ``PIECE_ELEMENTS`` contiguous elements."""
    device, kind, n = gradient.device, KINDS[gradient.dtype], gradient.numel()
    found, plan = results(1, device), tally_plan(n, 1, kind == 1, device)
    job = TallyJob(0, on_device(gradient), kind, n, 1, 0, plan)
    with cuda_launch.at(device):
        counted(MEASURE[kind == 1], device, (job,), found, plan.words)
    return found[0].reshape(()), found[1].reshape(())


TALLY, MEASURE = ("tally_float", "tally_double"), ("measure_float", "measure_double")


class TallyPlan(NamedTuple):
    """How a leaf is tallied: thread blocks, elements per block, provenance ids in shared memory,
    bytes of shared memory; ids per launch, and words of workspace for these.
    """

    blocks: int
    length: int
    slots: int
    shared: int
    ids: int
    words: int


def tally_plan(n: int, count: int, wide: bool, device: torch.device) -> TallyPlan:
    """The plan for tallying n elements by ``count`` provenance ids."""
    return _tally_plan(n, count, wide, cuda_launch.processors(device))


@lru_cache(4096)
def _tally_plan(n: int, count: int, wide: bool, processors: int) -> TallyPlan:
    bins, window = BINS[wide]
    blocks = max(1, min(-(-n // tuning.BLOCK_MIN_ELEMENTS), 2 * processors))
    length = -(-n // blocks // 32) * 32 or 32  # a multiple of 32: whole cache lines
    ids = min(count, tuning.WORK_MAX_BYTES // (8 * (bins + 2)))
    slots = min(ids, tuning.SHARED_BYTES // (4 * (2 * window + 2)))
    shared = 4 * slots * (2 * window + (2 if slots < ids else 1))
    return TallyPlan(
        max(1, -(-n // length)), length, slots, shared, ids, HEADER_WORDS + (bins + 2) * ids
    )


_WORK: dict[tuple[torch.device, int], Tensor] = {}


def _work(device: torch.device, words: int) -> Tensor:
    """A workspace of at least this many zero words. Kernels leave it zeroed, so that one tensor per
    stream is reused.
    """
    stream = cuda_launch.stream(device)
    found = _WORK.get((device, stream))
    if found is None or len(found) < words:
        found = torch.zeros(max(words, tuning.CACHED_WORDS), dtype=torch.int64, device=device)
        if words <= tuning.CACHED_WORDS:
            _WORK[device, stream] = found
    return found


def taken(device: torch.device, stream: int) -> Tensor | None:
    """The workspace of a stream, which is not cached any more."""
    return _WORK.pop((device, stream), None)
