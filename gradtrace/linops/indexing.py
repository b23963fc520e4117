"""Access to elements by number: computes their memory offsets, so that no tensor is copied."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradtrace.kernels import backend_of
from gradtrace.kernels.strides import is_dense
from gradtrace.types import Shape


@lru_cache(maxsize=4096)
def merged_dims(sizes: Shape, strides: Shape) -> tuple[tuple[int, int, int], ...]:
    """``(step, size, stride)``, last dimension first: element n is at offset
    ``Σ (n // step % size)·stride``.

    Dimensions that are contiguous with respect to each other are merged.
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
    """The memory offset ``Σ index·stride`` of each element, numbered row-major in ``sizes``."""
    dims = merged_dims(tuple(sizes), tuple(strides))
    if at.shape == (1,) and backend_of(at).host:  # in Python integers: a third of the time
        n = int(at)
        place = sum(n // step % size * stride for step, size, stride in dims)
        return torch.tensor([place], device=at.device)
    total: Tensor | None = None
    for n, (step, size, stride) in enumerate(dims):
        if not stride:
            continue
        number = at // step if step > 1 else at
        number = number % size if n + 1 < len(dims) else number
        number = number * stride if stride != 1 else number
        total = number if total is None else total + number
    return torch.zeros_like(at) if total is None else total


def nearby(x: Tensor, device: torch.device) -> Tensor:
    """A 0-dimensional tensor, moved to a device; any other tensor is returned as it is.

    PyTorch allows a 0-dimensional CPU tensor in operations on a GPU (``x * torch.tensor(2.0)``),
    but not once it is expanded or indexed. The new tensor is made by a fill, because a copy could
    synchronise.
    """
    if x.dim() or x.device == device:
        return x
    if not backend_of(x).host:
        return x.to(device)
    number: Any = x.tolist()  # not item(), which dispatch modes would see
    return torch.full((), number, dtype=x.dtype, device=device)


def picked(x: Tensor, shape: Shape, at: Tensor) -> Tensor:
    """The elements with these numbers of a tensor that broadcasts to ``shape``."""
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
    """A 1-d view of a tensor's memory, and the offsets in it of the elements with these numbers.
    Writing to the view writes to the tensor, which must be dense in memory (``is_dense``).
    """
    assert is_dense(x), "the elements have gaps in memory, or overlap"
    return x.as_strided((x.numel(),), (1,)), located(at, tuple(x.shape), x.stride())


def repeated(x: Tensor, times: Tensor) -> Tensor:
    """``x.repeat_interleave(times)`` of a short tensor on the CPU, without PyTorch's threads: to
    wake them takes milliseconds on a machine of many cores.
    """
    return torch.from_numpy(np.repeat(x.numpy(), times.numpy()))


def each_at(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """``x.index_select(dim, row)`` for each row of an index, along a new first dimension."""
    taken = x.index_select(dim, index.reshape(-1))
    shape = (*x.shape[:dim], *index.shape, *x.shape[dim + 1 :])
    return taken.reshape(shape).movedim(dim, 0)


def merged_stride(shape: Shape, steps: Sequence[int], dims: Shape) -> int | None:
    """The stride of these dimensions merged into one, the last varying fastest; None if they cannot
    be merged.
    """
    merged = merged_dims(tuple(shape[d] for d in dims), tuple(steps[d] for d in dims))
    return None if len(merged) > 1 else sum(stride for _, _, stride in merged)


def resized(shape: Shape, dim: int, size: int) -> Shape:
    """A shape with the size along ``dim`` replaced."""
    return (*shape[:dim], size, *shape[dim + 1 :])


def offsets(sizes: Shape, strides: Shape, device: torch.device) -> Tensor:
    """``Σ index·stride`` of each multi-index below ``sizes``, in row-major order."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for size, stride in zip(sizes, strides):
        total = total.unsqueeze(-1) + torch.arange(size, device=device) * stride
    return total.reshape(-1)


def line_offsets(shape: Shape, dims: Sequence[int], device: torch.device) -> Tensor:
    """The offsets, from the first, of the elements that differ along ``dims`` only."""
    steps = strides_of(shape)
    return offsets(tuple(shape[d] for d in dims), tuple(steps[d] for d in dims), device)


def strides_of(shape: Shape) -> Shape:
    """The strides of a contiguous tensor of this shape."""
    found: list[int] = []
    step = 1
    for size in reversed(shape):
        found.append(step)
        step *= size
    return tuple(reversed(found))


def multi_index(at: Tensor, shape: Shape) -> list[Tensor]:
    """The multi-index of each element number, as one tensor for each dimension."""
    found: list[Tensor] = []
    for size in reversed(shape):
        found.append(at % size)
        at = at // size
    return found[::-1]


def element_number(index: Sequence[Tensor], shape: Shape) -> Tensor:
    """The row-major number of the element with this multi-index: the inverse of ``multi_index``."""
    total = index[0]
    for number, size in zip(index[1:], shape[1:]):
        total = total * size + number
    return total
