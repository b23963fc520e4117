"""Numbers of elements that depend on one dimension alone, followed without a tensor of them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from gradtrace.linops.indexing import strides_of
from gradtrace.types import Shape


class Axis(NamedTuple):
    """Elements are numbered ``1 + index[dim] // block % total``, as the samples of a batch are.

    Every number occurs: the size along ``dim`` is a multiple of ``block · total``.
    """

    dim: int
    block: int
    total: int

    def line(self, size: int, device: torch.device) -> Tensor:
        """The numbers along the dimension, which has this size."""
        numbers = torch.arange(1, self.total + 1, dtype=torch.int32, device=device)
        if size == self.total:
            return numbers
        numbers = numbers.unsqueeze(1).expand(size // self.total // self.block, -1, self.block)
        return numbers.reshape(-1)

    def numbers(self, shape: Shape, device: torch.device) -> Tensor:
        """The number of each element of a tensor of this shape."""
        line = self.line(shape[self.dim], device)
        return line.reshape([-1 if d == self.dim else 1 for d in range(len(shape))]).expand(shape)

    def places(self, numbers: range, size: int, device: torch.device) -> Tensor:
        """For each of these numbers, from 0 on, the indices along the dimension that have it:
        (numbers, places).
        """
        every = torch.arange(size, device=device).reshape(-1, self.total, self.block)
        mine = every[:, numbers.start : numbers.stop]
        return mine.transpose(0, 1).reshape(len(numbers), -1)


MIXED = Axis(-1, 0, 0)
"""Each element is made of elements with several numbers."""


def reshaped(axis: Axis, old: Shape, new: Shape) -> Axis | None:
    """The axis after a reshape that keeps the order of elements; None if it is none."""
    if old == new:
        return axis
    step = axis.block * prod(old[axis.dim + 1 :])  # elements in a row with one number
    inner = 1
    for dim in range(len(new) - 1, -1, -1):
        if not step % inner and not new[dim] % (axis.total * (step // inner)):
            return Axis(dim, step // inner, axis.total)
        inner *= new[dim]
    return None


def viewed(
    axis: Axis, old: Shape, sizes: Sequence[int], strides: Sequence[int], offset: int
) -> Axis | None:
    """The axis after a view of a contiguous tensor; None if it is none, or not known to be one."""
    steps = strides_of(old)
    dims = {steps[d]: d for d, size in enumerate(old) if size > 1}
    first = {d: offset // step % old[d] for step, d in dims.items()}
    found: Axis | None = None
    for k, (size, stride) in enumerate(zip(sizes, strides)):
        if size == 1 or not stride:
            continue
        d = dims.pop(stride, None)
        if d is None or first[d] + size > old[d]:
            return None  # it steps over elements, or two dimensions along the same one
        if d == axis.dim:
            whole = axis.block * axis.total
            found = None if size % whole or first[d] % whole else Axis(k, axis.block, axis.total)
    return found


def recognised(numbers: Tensor, count: int) -> Axis | None:
    """The axis along which elements have these numbers; None if there is none."""
    for dim, size in enumerate(numbers.shape):
        if size % count:
            continue
        for block in {size // count, 1}:
            axis = Axis(dim, block, count)
            if torch.equal(numbers, axis.numbers(tuple(numbers.shape), numbers.device)):
                return axis
    return None
