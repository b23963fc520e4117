"""Elements by number: where single ones lie in memory, so that no tensor is written out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gradtrace.types import Shape


@lru_cache(maxsize=4096)
def _legs(sizes: Shape, strides: Shape) -> tuple[tuple[int, int, int], ...]:
    """``(step, size, stride)``, last first: element n lies at ``Σ (n // step % size)·stride``.

    Dimensions that follow one another in memory are one.
    """
    found: list[tuple[int, int, int]] = []
    step = 1
    for size, stride in zip(reversed(sizes), reversed(strides)):
        if size == 1:
            continue
        if found and stride == found[-1][1] * found[-1][2]:
            first, before, small = found.pop()
            found.append((first, before * size, small))
        else:
            found.append((step, size, stride))
        step *= size
    return tuple(found)


def located(at: Tensor, sizes: Sequence[int], strides: Sequence[int]) -> Tensor:
    """``Σ index·stride`` of each element, by number in row-major order of ``sizes``."""
    legs = _legs(tuple(sizes), tuple(strides))
    if at.is_cpu and at.shape == (1,):  # as whole numbers, which takes a third of the time
        n = int(at)
        return torch.tensor(
            [sum(n // step % size * stride for step, size, stride in legs)], device="cpu"
        )
    total: Tensor | None = None
    for n, (step, size, stride) in enumerate(legs):
        if not stride:
            continue
        number = at // step if step > 1 else at
        number = number % size if n + 1 < len(legs) else number
        number = number * stride if stride != 1 else number
        total = number if total is None else total + number
    return torch.zeros_like(at) if total is None else total


def nearby(x: Tensor, device: torch.device) -> Tensor:
    """A tensor without dimensions on a device; any other, as it is.

    PyTorch lets such a tensor of the CPU meet those of a GPU (``x * torch.tensor(2.0)``), but only
    as long as nothing is expanded or indexed. Its number is filled in: a copy could wait.
    """
    if x.dim() or x.device == device:
        return x
    if not x.is_cpu:
        return x.to(device)
    number: Any = x.tolist()  # not item(), which dispatch modes would see
    return torch.full((), number, dtype=x.dtype, device=device)


def picked(x: Tensor, shape: Shape, at: Tensor) -> Tensor:
    """Elements by number of a tensor that broadcasts to a shape."""
    x = nearby(x, at.device)
    if not at.numel():
        return x.new_empty(at.shape)
    if not x.dim():
        return x.expand(at.shape)
    if x.shape == shape and x.is_contiguous():
        if at.dim() == 1:
            return x.view(-1).index_select(0, at)
        return x.reshape(-1).index_select(0, at.reshape(-1)).reshape(at.shape)
    x = x.resolve_neg().expand(shape)
    place = located(at, shape, x.stride())
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, x.stride()))
    flat = x.as_strided((extent,), (1,))
    return flat.index_select(0, place.reshape(-1)).reshape(at.shape)


def laid(x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor's memory as a line, and where in it elements by number lie. Writing to it writes to
    the tensor, whose elements must fill the memory between its first and its last.
    """
    assert filled(x), "elements lie apart, or on top of each other"
    return x.as_strided((x.numel(),), (1,)), located(at, tuple(x.shape), x.stride())


def filled(x: Tensor) -> bool:
    """Whether a tensor's elements fill the memory between its first and its last."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
    return extent == x.numel()


def each_at(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """``x.index_select(dim, row)`` for each row of an index, along a new first dimension."""
    taken = x.index_select(dim, index.reshape(-1))
    shape = (*x.shape[:dim], *index.shape, *x.shape[dim + 1 :])
    return taken.reshape(shape).movedim(dim, 0)
