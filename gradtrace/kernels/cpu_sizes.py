"""How large the elements of a tensor are, and which are 0, by the compiled CPU library."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from gradtrace.kernels import pointers, tuning
from gradtrace.kernels.cpu_library import checked, threads_for
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
