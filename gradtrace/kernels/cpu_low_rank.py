"""The compiled product with a diagonal plus low rank, where lines are columns of matrices."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from gradtrace.kernels import pointers
from gradtrace.kernels.cpu_library import checked, threads_for
from gradtrace.kernels.operands import ColumnLayout, LowRankLines

SUMMED_BYTES = 128
"""The kernel adds up columns of so many bytes at a time, and has no other for the rest."""


def product(library: ctypes.CDLL, lines: LowRankLines, layout: ColumnLayout) -> Tensor | None:
    """``Backend.low_rank``; None if the library does not support it."""
    diagonal, left, right, x = lines
    if layout.columns * x.itemsize % SUMMED_BYTES:
        return None
    return _run(library, (diagonal, x, *left, *right), layout, len(left))


def of_sums(
    library: ctypes.CDLL, left: Sequence[Tensor], sums: Sequence[Tensor], layout: ColumnLayout
) -> Tensor | None:
    """``Backend.low_rank_sums``; None if the library does not support it."""
    return _run(library, (*left, *sums), layout, len(left))


def _run(
    library: ctypes.CDLL, given: Sequence[Tensor], layout: ColumnLayout, rank: int
) -> Tensor | None:
    call = getattr(library, "gradtrace_low_rank", None)  # an older library has none
    if call is None or rank not in (1, 2) or not _serves(given):
        return None
    (count, n, columns, steps), dtype = layout, given[0].dtype
    numbers = [0] * (6 if len(given) == 2 * rank else 0)  # no diagonal, no x
    for part, (line, row) in zip(given, steps):
        reach = (count - 1) * line + (n - 1) * row + columns
        numbers += (pointers.address(part, dtype, reach), line, row)
    where = (ctypes.c_int64 * (6 * rank + 6))(*numbers)
    out = torch.empty((count, n, columns), dtype=dtype, device="cpu")
    sizes, threads = (count, n, columns, rank), threads_for(out.numel())
    checked(call(dtype is torch.float64, *sizes, where, out.data_ptr(), threads))  # just made
    return out


def _serves(given: Sequence[Tensor]) -> bool:
    """Whether these are plain numbers of one dtype on the CPU, and neither autograd nor torch.func
    follows what is done with them.
    """
    kind = given[0].dtype
    if kind is not torch.float32 and kind is not torch.float64:
        return False
    if torch.is_grad_enabled() and any(part.requires_grad for part in given):
        return False
    return all(
        part.dtype is kind and part.is_cpu and not is_functorch_wrapped_tensor(part)
        for part in given
    )
