"""How large the elements of a tensor are, and which are 0, by the compiled CPU library."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from gradtrace.kernels import pointers, tuning
from gradtrace.kernels.cpu_library import checked, threads_for
from gradtrace.kernels.operands import Whole
from gradtrace.kernels.plain_contraction import widened
from gradtrace.kernels.strides import is_dense


def sizes(library: ctypes.CDLL, x: Tensor) -> Tensor | None:
    """``Backend.sizes``, of float32 without gaps in memory; None of others."""
    call = getattr(library, "gradtrace_sizes", None)  # an older library has none
    if call is None or x.dtype is not torch.float32 or not x.is_cpu or x.is_neg():
        return None
    if not is_dense(x):
        return None
    n = x.numel()
    found = torch.empty(4, dtype=torch.float64, device="cpu")
    checked(call(n, pointers.address(x, x.dtype, n), found.data_ptr(), threads_for(n)))
    return found


def zeros(library: ctypes.CDLL, x: Tensor) -> Tensor | None:
    """``Backend.zeros``, of contiguous tensors of float32 or float64; None of others."""
    call = getattr(library, "gradtrace_zeros", None)
    kind = x.dtype in (torch.float32, torch.float64)
    if call is None or not (kind and x.is_cpu and x.is_contiguous()):
        return None
    n, count = x.numel(), ctypes.c_int64()
    place, room = pointers.flat(x, x.dtype, n), tuning.ZEROS_ROOM
    while True:
        found = torch.empty(room, dtype=torch.int64, device="cpu")
        given = (x.dtype is torch.float64, n, place, room, found.data_ptr(), ctypes.byref(count))
        checked(call(*given, threads_for(n)))
        if count.value <= room:
            return found[: count.value]
        room = count.value


def rows(library: ctypes.CDLL, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """``Backend.measure_rows``, of rows that are worth a call each; None of others."""
    x, count = widened(x), len(x)
    size = x.numel() // max(1, count)
    if not (tuning.MEASURED_MIN_ELEMENTS <= size <= tuning.PIECE_ELEMENTS and x.is_cpu):
        return None
    if x.dtype not in (torch.float32, torch.float64):
        return None
    if not (x.stride(0) == size and is_dense(x[0])):  # each row in one place
        x = x.contiguous()
    items = np.empty((count, 3), np.int64)
    first = pointers.address(x, x.dtype, count * size)
    items[:, 0] = first + np.arange(count) * (size * x.itemsize)
    items[:, 1:] = size, x.dtype is torch.float64
    return magnitudes(library, items)


def magnitudes(library: ctypes.CDLL, items: Whole) -> tuple[Tensor, Tensor]:
    """The number of nonzero elements and ``Σ |x[i]|`` of tensors, given the address, the size and
    whether it is float64 of each.
    """
    counts = torch.empty(len(items), dtype=torch.int64, device="cpu")
    sums = torch.empty(len(items), dtype=torch.float64, device="cpu")
    found = counts.data_ptr(), sums.data_ptr()  # just made
    threads = threads_for(int(items[:, 1].sum()))
    checked(library.gradtrace_magnitudes(len(items), items.ctypes.data, *found, threads))
    return counts, sums
