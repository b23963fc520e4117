"""Kernels of the (max, ×) contraction and of what is done with its results, by device.

``backend_of`` returns the ``Backend`` of a tensor or device: the only place that asks what device
something is on. Other rooms call its operations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradtrace.kernels.backend import Backend
from gradtrace.kernels.devices import chosen
from gradtrace.kernels.max_contraction import contraction, largest, survivors, winner
from gradtrace.kernels.reference import Contraction, Matrices, Operand, argmax

__all__ = [
    "Backend",
    "Contraction",
    "Matrices",
    "Operand",
    "allocated_bytes",
    "argmax",
    "backend_of",
    "contraction",
    "largest",
    "survivors",
    "synchronise",
    "winner",
]


class _ByDevice(dict[torch.device, Backend]):
    """The backend of each device, chosen when it is first needed."""

    def __missing__(self, device: torch.device) -> Backend:
        found = self[device] = chosen(device)
        return found


_BACKENDS = _ByDevice()


def backend_of(where: Tensor | torch.device) -> Backend:
    """The backend of a tensor, or of a device.

    >>> backend_of(torch.ones(3)).synchronises
    False
    """
    return _BACKENDS[where if type(where) is torch.device else where.device]  # type: ignore


def synchronise() -> None:
    """Wait for all work that was queued on GPUs; returns at once if there are none."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def allocated_bytes() -> int | None:
    """Bytes allocated to tensors on all GPUs; None if CUDA is not in use."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return sum(torch.cuda.memory_allocated(at) for at in range(torch.cuda.device_count()))
