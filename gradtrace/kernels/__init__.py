"""Kernels of the (max, ×) contraction and of what is done with its results, by device.

``backend_of`` returns the ``Backend`` of a tensor or device: the only place that asks what device
something is on. Other rooms call its operations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradtrace.kernels import cpu_library
from gradtrace.kernels.backend import Backend
from gradtrace.kernels.cpu_backend import Cpu
from gradtrace.kernels.cuda_backend import Cuda
from gradtrace.kernels.operands import Contraction, LeafBatch, Matrices, Operand
from gradtrace.kernels.plain_contraction import argmax
from gradtrace.kernels.reference import Reference
from gradtrace.kernels.sync import fetch_scalars

__all__ = [
    "Backend",
    "Contraction",
    "Cpu",
    "Cuda",
    "LeafBatch",
    "Matrices",
    "Operand",
    "Reference",
    "allocated_bytes",
    "argmax",
    "backend_of",
    "fetch_scalars",
    "instruction_set",
    "largest",
    "synchronise",
    "winner",
]


def _chosen(device: torch.device) -> Backend:
    if device.type == "cuda":
        return Cuda(device)
    library = cpu_library.library() if device.type == "cpu" else None
    return Reference(device) if library is None else Cpu(device, library)


class _ByDevice(dict[torch.device, Backend]):
    """The backend of each device, chosen when it is first needed."""

    def __missing__(self, device: torch.device) -> Backend:
        found = self[device] = _chosen(device)
        return found


_BACKENDS = _ByDevice()


def backend_of(where: Matrices | torch.device) -> Backend:
    """The backend of a tensor, or of a device.

    >>> backend_of(torch.ones(3)).synchronises
    False
    """
    device = where if type(where) is torch.device else where.device  # type: ignore[union-attr]
    return _BACKENDS[device]


def largest(a: Matrices, b: Matrices) -> Tensor:
    """``out[i, m, n] = maxₖ |a[i, m, k] · b[i, k, n]|``; 0 if k is empty."""
    value = backend_of(a).contract(a, b).value
    assert value is not None
    return value


def winner(a: Matrices, b: Matrices) -> tuple[Tensor, Tensor]:
    """``largest`` and the lowest k that attains it; the k is undefined where the value is 0."""
    value, index, _ = backend_of(a).contract(a, b, index=True)
    assert value is not None and index is not None
    return value, index


def synchronise() -> None:
    """Wait for all work that was queued on GPUs; returns at once if there are none."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def allocated_bytes() -> int | None:
    """Bytes allocated to tensors on all GPUs; None if CUDA is not in use."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return sum(torch.cuda.memory_allocated(at) for at in range(torch.cuda.device_count()))


def instruction_set() -> str:
    """The instruction set that the compiled CPU kernels use; empty without these."""
    return cpu_library.isa()


def summing(backend: Backend) -> Backend | None:
    """The backend that has a kernel for ``group_sums``: this one, that of the CPU, or none."""
    found = backend if backend.sums_groups else backend_of(torch.device("cpu"))
    return found if found.sums_groups else None
