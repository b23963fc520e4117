"""Paths followed on a GPU: all of them in one launch, from leaf to root."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradtrace.kernels import cuda_launch
from gradtrace.kernels.cuda_launch import THREADS
from gradtrace.kernels.path_table import BoundTable, PathEnds
from gradtrace.kernels.pointers import on_device

PATHS = "paths.cu"
WARPS = 8
"""Paths per block of threads."""


def follow(table: BoundTable, starts: Tensor, words: int) -> PathEnds:
    """``Backend.follow_paths``."""
    device, n = table.held[0].device, len(starts)
    array, places = (_sent(part, device) for part in (torch.from_numpy(table.words), starts))
    found = torch.zeros(n, words + 3, dtype=torch.int64, device=device)
    sets, rest = found.view(-1)[: n * words], found.view(-1)[n * words :]
    at = [on_device(rest) + 8 * n * k for k in range(3)]
    with cuda_launch.at(device):
        cuda_launch.kernel(device, PATHS, "follow")(
            (-(-n // WARPS), 1, 1), THREADS,
            (on_device(array), on_device(places), n, words, on_device(sets), *at),
        )  # fmt: skip
    numbers = found.cpu().view(-1).numpy()
    several = numbers[: n * words].reshape(n, words)
    mantissa, exponent, gradient = np.split(numbers[n * words :], 3)
    return PathEnds(several, mantissa.view(np.float64), exponent, gradient.view(np.float64))


def _sent(x: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor, copied to a device without waiting for it."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x
