"""Tallies many leaves on a GPU in one launch, instead of several launches per leaf.

Most leaves are small, and launching a kernel from Python takes longer than the kernel itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from gradtrace.kernels import cuda_launch, cuda_reduce, cuda_tally, tuning
from gradtrace.kernels.cuda_launch import KINDS, STEPS
from gradtrace.kernels.cuda_reduce import ReduceJob, ReducePlan
from gradtrace.kernels.cuda_tally import TallyJob
from gradtrace.kernels.pointers import on_device
from gradtrace.kernels.strides import flattened, reduction


@lru_cache(4096)
def _reduce_plan(
    shape: Sequence[int],
    steps: Sequence[int],
    along: Sequence[int],
    dims: tuple[int, ...],
    processors: int,
) -> ReducePlan | None:
    """The plan of a reduction of values and ids with these strides; None if they need a copy."""
    how = reduction(shape, steps, along, dims)
    return cuda_reduce.reduce_plan(how.levels, processors) if how.short and how.levels else None


def batchable(gradient: Tensor, *others: Tensor) -> bool:
    """Whether a leaf can be tallied in a batch with others: in one piece, and of a dtype and on a
    GPU that the kernels support.
    """
    if gradient.numel() > tuning.PIECE_ELEMENTS or gradient.dtype not in KINDS:
        return False
    return cuda_launch.serves(STEPS, gradient, *others)


class BatchedTally:
    """Leaves on one GPU, collected to be tallied in one launch; see ``LeafBatch``."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._clear()

    def _clear(self) -> None:
        self.bytes = self.entries = 0  # referenced bytes; length of the results
        self._words = self._reductions = self._tallies = self._used = 0
        self._held: list[Tensor] = []
        self._space: Tensor | None = None
        self._tallied: dict[str, list[TallyJob]] = {}
        self._reduced: tuple[list[ReduceJob], list[ReduceJob]] = ([], [])  # float, double

    def full(self, room: int) -> bool:
        """Whether the leaves must be tallied now, if at most ``room`` bytes may be referenced."""
        return (
            self._tallies >= cuda_tally.MAX_TALLIES
            or self._reductions >= cuda_reduce.MAX_REDUCTIONS
            or self._words > tuning.CACHED_WORDS
            or self.bytes > room
        )

    def tally(self, ids: Tensor, gradient: Tensor, count: int) -> int | None:
        """Add a leaf for ``Backend.tally``."""
        if not batchable(gradient, ids) or ids.dtype is not torch.int32:
            return None
        if not (ids.is_contiguous() and gradient.is_contiguous()):
            ids, gradient = flattened(ids, gradient)
        at = self._add(cuda_tally.TALLY, on_device(ids), gradient, count)
        if at is not None:
            self._hold(ids, gradient)
        return at

    def measure(self, gradient: Tensor) -> int | None:
        """Add a leaf for ``Backend.measure``."""
        if not batchable(gradient):
            return None
        if not gradient.is_contiguous():
            (gradient,) = flattened(gradient)
        self._hold(gradient)
        return self._add(cuda_tally.MEASURE, 0, gradient, 1)

    def reduce(
        self, x: Tensor, ids: Tensor, dims: tuple[int, ...], gradient: Tensor, count: int
    ) -> int | None:
        """Add a leaf for ``Backend.tally``, with the ids that ``Backend.reduce`` returns."""
        if not batchable(gradient, x, ids) or ids.dtype is not torch.int32:
            return None
        kind, processors = KINDS.get(x.dtype), cuda_launch.processors(self.device)
        reduce_plan = _reduce_plan(x.shape, x.stride(), ids.stride(), dims, processors)
        if kind is None or reduce_plan is None or reduce_plan.results != gradient.numel():
            return None
        if not gradient.is_contiguous():
            return None
        most, out = self._allocated(
            2 * reduce_plan.places if reduce_plan.combine_blocks else 0, reduce_plan.results
        )
        at = self._add(cuda_tally.TALLY, out, gradient, count)
        if at is not None:
            job = ReduceJob(on_device(x), on_device(ids), kind, reduce_plan, most, 0, out)
            self._reduced[kind == 1].append(job)
            self._reductions += 1
            self._hold(x, ids, gradient)
        return at

    def _allocated(self, parts: int, results: int) -> tuple[int, int]:
        """Addresses of memory for ``parts`` words of 8 bytes and ``results`` words of 4 bytes."""
        words = parts + (results + 1) // 2
        if self._space is None or self._used + words > len(self._space):
            size = max(tuning.SPACE_WORDS, words)
            self._space = torch.empty(size, dtype=torch.int64, device=self.device)
            self._used = 0
            self._hold(self._space)
        at = on_device(self._space) + 8 * self._used
        self._used += words
        return at, at + 8 * parts

    def _add(self, names: Sequence[str], ids: int, gradient: Tensor, count: int) -> int | None:
        kind, n, at = KINDS[gradient.dtype], gradient.numel(), self.entries
        wide = kind == 1
        plan = cuda_tally.tally_plan(n, count, wide, self.device)
        if plan.ids < count:  # needs several launches
            return None
        job = TallyJob(ids, on_device(gradient), kind, n, count, 0, plan, at, self._words)
        self._tallied.setdefault(names[wide], []).append(job)
        self._tallies += 1
        self._words += plan.words
        self.entries += count
        return at

    def _hold(self, *tensors: Tensor) -> None:
        self._held += tensors
        for x in tensors:
            self.bytes += x.nbytes

    def counted(self) -> tuple[Tensor, Tensor]:
        """Tally all added leaves, and release them: counts and sums."""
        found = cuda_tally.results(self.entries, self.device)
        with cuda_launch.at(self.device):
            for wide, reductions in enumerate(self._reduced):
                if reductions:
                    cuda_reduce.reduced(bool(wide), self.device, reductions)
            for name, jobs in self._tallied.items():
                cuda_tally.counted(name, self.device, jobs, found, self._words)
        self._clear()
        return found
