"""The largest product along single lines (rows), for a few elements of a large contraction."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from gradtrace.kernels import pointers
from gradtrace.kernels.cpu_library import checked, library
from gradtrace.kernels.reference import argmax

MAX_PRODUCTS = 1 << 20
"""The most products materialised at a time."""

CTYPES = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "t": ctypes.c_int}
ARGUMENTS = {"products": "ppnnppnnnnppt", "others": "pppppnnnppt"}
"""Signatures of the kernels: pointers (p), int64 numbers (n) and the number of threads (t)."""

SUFFIX = {torch.float32: "float", torch.float64: "double"}


class TensorLines(NamedTuple):
    """Strided lines of a tensor: element k of line n is ``data[offset[n] + k·step]``, ``data``
    flat.
    """

    data: Tensor
    offset: Tensor
    step: int

    def take(self, some: slice, length: int) -> Tensor:
        """A slice of the lines as a tensor: (lines, length)."""
        number = torch.arange(length, device=self.offset.device) * self.step
        return self.data[self.offset[some].unsqueeze(1) + number]


def flat(x: Tensor) -> Tensor:
    """A flat view of the memory from a tensor's first element to its last."""
    extent = 1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride()))
    return x.as_strided((extent if x.numel() else 0,), (1,))


def products(a: TensorLines, b: TensorLines, length: int) -> tuple[Tensor, Tensor]:
    """``maxₖ |a[n, k]·b[n, k]|`` along every line and the lowest k that attains it; the k is
    undefined where the value is 0.
    """
    call = _native("products", a.data, b.data)
    if call is None or not length:
        return _products(a, b, length)
    value, place = _results(a.offset, a.data.dtype)
    first, second = a.offset.contiguous(), b.offset.contiguous()
    n, at = len(first), pointers.flat
    given: list[int] = []
    for lines, offset in ((a, first), (b, second)):
        size = lines.data.numel()
        given += (at(lines.data, value.dtype, size), at(offset, torch.int64, n), lines.step, size)
    found = at(value, value.dtype, n), at(place, torch.int64, n)
    checked(call(*given, n, length, *found, torch.get_num_threads()))
    return value, place


def _products(a: TensorLines, b: TensorLines, length: int) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(a.data.dtype, b.data.dtype)
    value, place = _results(a.offset, dtype)
    step = max(1, MAX_PRODUCTS // max(1, length))
    for first in range(0, len(value), step):
        some = slice(first, first + step)
        size = (a.take(some, length) * b.take(some, length)).abs()
        value[some], place[some] = argmax(size, 1)
    return value, place


def others(
    left: Tensor, right: Tensor, x: Tensor, line: Tensor, skip: Tensor
) -> tuple[Tensor, Tensor]:
    """For ``w[n, k] = Σᵣ left[r, n]·right[r, line[n], k]``: the largest
    ``|w[n, k]·x[line[n], k]|`` over ``k ≠ skip[n]`` and the lowest k that attains it. Lines have at
    least two elements.
    """
    call = _native("others", left, right, x) if len(left) == 2 else None
    if call is None:
        return _others(left, right, x, line, skip)
    left, right, x = left.contiguous(), right.contiguous(), x.contiguous()
    line, skip = line.contiguous(), skip.contiguous()
    value, place = _results(line, x.dtype)
    (lines, width), n, kind, at = x.shape, len(line), x.dtype, pointers.flat
    given = (
        at(left, kind, 2 * n), at(right, kind, 2 * lines * width), at(x, kind, lines * width),
        at(line, torch.int64, n), at(skip, torch.int64, n),
    )  # fmt: skip
    found = at(value, kind, n), at(place, torch.int64, n)
    checked(call(*given, n, lines, width, *found, torch.get_num_threads()))
    return value, place


def _others(
    left: Tensor, right: Tensor, x: Tensor, line: Tensor, skip: Tensor
) -> tuple[Tensor, Tensor]:
    value, place = _results(line, x.dtype)
    step = max(1, MAX_PRODUCTS // x.shape[1])
    for first in range(0, len(line), step):
        some = slice(first, first + step)
        weight = left[0, some].unsqueeze(1) * right[0, line[some]]
        for u, v in zip(left[1:], right[1:]):
            weight = weight + u[some].unsqueeze(1) * v[line[some]]
        size = (weight * x[line[some]]).abs().scatter(1, skip[some].unsqueeze(1), -1.0)
        value[some], place[some] = argmax(size, 1)
    return value, place


def _results(like: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    value = torch.empty(len(like), dtype=dtype, device=like.device)
    return value, torch.empty(len(like), dtype=torch.int64, device=like.device)


def _native(name: str, *tensors: Tensor) -> Callable[..., int] | None:
    """The compiled kernel, or None if it does not support these tensors."""
    dtypes = {x.dtype for x in tensors}
    if len(dtypes) > 1 or any(x.device.type != "cpu" for x in tensors):
        return None
    suffix = SUFFIX.get(dtypes.pop())
    return None if suffix is None else _function(f"gradtrace_{name}_{suffix}", name)


@cache
def _function(symbol: str, name: str) -> Callable[..., int] | None:
    found = library()
    if found is None:
        return None
    call: Callable[..., int] = getattr(found, symbol)
    call.argtypes = [CTYPES[code] for code in ARGUMENTS[name]]  # type: ignore[attr-defined]
    return call
