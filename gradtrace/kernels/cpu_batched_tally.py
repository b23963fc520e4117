"""Tallies many small leaves on the CPU in one call of the compiled library."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from gradtrace.kernels import pointers, tuning
from gradtrace.kernels.cpu_library import checked


class CpuBatchedTally:
    """Leaves without provenance ids, collected to be measured in one call; see ``LeafBatch``.

    Only small ones: of these the call takes as long as the work. A large leaf is measured by
    itself, on all threads, and need not be held until then.
    """

    def __init__(self, device: torch.device, library: ctypes.CDLL) -> None:
        self.device = device
        self.library = library
        self._held: list[Tensor] = []
        self._items: list[int] = []  # address, size and whether it is float64, of each

    def full(self, room: int) -> bool:
        """Whether the leaves must be measured now."""
        return len(self._held) * tuning.CPU_BATCH_MAX_ELEMENTS * 8 > room

    def tally(self, ids: Tensor, gradient: Tensor, count: int) -> int | None:
        """None: a leaf with ids is tallied by itself."""
        return None

    def reduce(
        self, x: Tensor, ids: Tensor, dims: tuple[int, ...], gradient: Tensor, count: int
    ) -> int | None:
        """None: a leaf with ids is tallied by itself."""
        return None

    def measure(self, gradient: Tensor) -> int | None:
        """Add a leaf for ``Backend.measure``; None for a large one."""
        size, dtype = gradient.numel(), gradient.dtype
        if size > tuning.CPU_BATCH_MAX_ELEMENTS or not gradient.is_contiguous():
            return None
        if dtype is not torch.float32 and dtype is not torch.float64:
            return None
        self._items += (pointers.quick_address(gradient, dtype, size), size, dtype is torch.float64)
        self._held.append(gradient)
        return len(self._held) - 1

    def counted(self) -> tuple[Tensor, Tensor]:
        """Measure all added leaves, and release them: counts and sums."""
        many, items = len(self._held), np.array(self._items, np.int64)
        counts = torch.empty(many, dtype=torch.int64, device=self.device)
        sums = torch.empty(many, dtype=torch.float64, device=self.device)
        elements = int(items[1::3].sum())
        threads = 1 if elements <= tuning.SINGLE_THREAD_MAX_ELEMENTS else torch.get_num_threads()
        found = counts.data_ptr(), sums.data_ptr()  # just made
        checked(self.library.gradtrace_magnitudes(many, items.ctypes.data, *found, threads))
        self._held, self._items = [], []
        return counts, sums
