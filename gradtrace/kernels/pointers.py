"""Addresses of tensors for compiled kernels, validated so that a bad tensor raises an error.

A compiled kernel dereferences its pointers unchecked. A tensor without memory of its own (a zero
tensor of forward-mode AD, a wrapper subclass, one on the meta device, one whose storage was freed),
or with another dtype, size or layout than the kernel expects, would crash the interpreter.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from gradtrace.errors import GradtraceError
from gradtrace.pytorch.plain_tensors import PLAIN, is_wrapper


def address(x: Tensor, dtype: torch.dtype, reach: int) -> int:
    """Address of a CPU tensor's first element, for a kernel that accesses memory up to ``reach``
    elements (exclusive) from there.
    """
    if 0 < reach <= _extent(x) and (found := _pointer(x, dtype)):
        return found
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
    if reach == 0:  # an empty view may start outside its storage, as x[1] of an empty x
        start = 0
    if reach < 0 or (start + reach) * dtype.itemsize > size or (reach and not first):
        _refuse(x, f"{reach:,} elements were expected in memory")
    if x.is_neg():
        _refuse(x, "its elements are negated lazily; call resolve_neg()")
    return first + start * dtype.itemsize if first else 0


def quick_address(x: Tensor, dtype: torch.dtype, reach: int) -> int:
    """``address`` of a contiguous tensor of ``reach`` elements."""
    return _pointer(x, dtype) or address(x, dtype, reach)


def flat(x: Tensor, dtype: torch.dtype, count: int) -> int:
    """``address`` of a contiguous tensor of ``count`` elements, which is looked at."""
    if x.numel() != count or not x.is_contiguous():
        _refuse(x, f"{count:,} elements side by side were expected")
    return quick_address(x, dtype, count)


def _extent(x: Tensor) -> int:
    """The number of elements from a tensor's first to its last in memory."""
    if x.is_contiguous():
        return x.numel()
    return 1 + sum([(size - 1) * step for size, step in zip(x.shape, x.stride())])


def _pointer(x: Tensor, dtype: torch.dtype) -> int:
    """A plausible address of a plain tensor's first element, 0 if anything is unusual: to look at
    the memory itself makes Python's object of it, which takes longer than a small kernel.
    """
    if type(x) not in PLAIN or x.dtype is not dtype or not x.is_cpu or x.is_neg():
        return 0
    try:
        found = x.data_ptr()
    except RuntimeError:  # a stand-in of torch.func, which has no memory
        return 0
    return found if found >= MIN_ADDRESS or not x.storage_offset() else 0


MIN_ADDRESS = 1 << 32
"""A data pointer below this may be an offset from a null pointer, not an address; where Python has
a fixed place in memory, as that of Debian and Ubuntu, small tensors lie below it, too.
"""


def on_device(x: Tensor) -> int:
    """Device address of a tensor's first element. The caller has checked its dtype, sizes, strides
    and device (``cuda_launch.serves``). Launches are many and short, so a plausible pointer of a
    plain tensor is returned without further checks.
    """
    try:
        at = x.data_ptr() if type(x) in PLAIN else 0
    except RuntimeError:  # no storage, or not strided
        at = 0
    if at >= MIN_ADDRESS and not x.is_neg():
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
