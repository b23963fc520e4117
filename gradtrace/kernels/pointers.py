"""Addresses that are handed to compiled code: checked here, once, so that a bad tensor is an error.

A compiled kernel reads what it is pointed to. A tensor without memory of its own (a zero tensor of
forward-mode AD, a wrapper subclass, one on the meta device, one whose storage was freed), or of
another dtype, size or layout than the kernel was told, would end the interpreter.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from gradtrace.errors import GradtraceError
from gradtrace.pytorch.plain_tensors import PLAIN, is_wrapper


def address(x: Tensor, dtype: torch.dtype, reach: int) -> int:
    """Where the elements of a tensor on the CPU lie, of which the kernel reads or writes those
    before ``reach``, counted in memory from the first one on.
    """
    if type(x) not in PLAIN and is_wrapper(x):
        _refuse(x, "its elements are not in memory")
    try:
        memory, start = x.untyped_storage(), int(x.storage_offset())
        first, size = memory.data_ptr(), memory.nbytes()
    except (RuntimeError, NotImplementedError) as error:
        _refuse(x, "its elements are not in memory", error)
    if x.dtype is not dtype:
        _refuse(x, f"{dtype} was expected")
    if not x.is_cpu:
        _refuse(x, "it is not on the CPU")
    if reach == 0:  # the place of nothing may be anywhere, as that of x[1] of an empty x
        start = 0
    if reach < 0 or (start + reach) * dtype.itemsize > size or (reach and not first):
        _refuse(x, f"{reach:,} elements were expected in memory")
    if x.is_neg():
        _refuse(x, "its elements are negated lazily; call resolve_neg()")
    return first + start * dtype.itemsize if first else 0


def flat(x: Tensor, dtype: torch.dtype, count: int) -> int:
    """``address`` of a tensor of so many elements that lie side by side."""
    if x.numel() != count or not x.is_contiguous():
        _refuse(x, f"{count:,} elements side by side were expected")
    return address(x, dtype, count)


LOW = 1 << 32
"""Below, a number may be an offset into memory that is not there."""


def on_device(x: Tensor) -> int:
    """Where the elements of a tensor lie, for a kernel on a GPU that was told its dtype, sizes and
    strides, and that its device is right (``launch.serves``). Launches are many and short, so what
    is surely an address is not looked at twice.
    """
    try:
        at = x.data_ptr() if type(x) in PLAIN else 0
    except RuntimeError:  # it has no memory, or is not strided
        at = 0
    if at >= LOW and not x.is_neg():
        return at
    if is_wrapper(x):
        _refuse(x, "its elements are not in memory")
    try:
        memory = x.untyped_storage()
        first, size = memory.data_ptr(), memory.nbytes()
    except (RuntimeError, NotImplementedError) as error:
        _refuse(x, "its elements are not in memory", error)
    if not (first and size):
        if not x.numel():
            return 0
        _refuse(x, "its elements are not in memory")
    if x.is_neg():
        _refuse(x, "its elements are negated lazily; call resolve_neg()")
    return first + int(x.storage_offset()) * x.itemsize


def _refuse(x: Tensor, why: str, error: Exception | None = None) -> NoReturn:
    raise GradtraceError(
        f"a kernel was given a {type(x).__name__} of shape {tuple(x.shape)}, {x.dtype}, on "
        f"{x.device}: {why}. This is a fault of gradtrace, unless you called the kernel yourself"
    ) from error
