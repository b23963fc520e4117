"""Tensors as they are in memory: flat views, and dimensions merged by their strides."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple, TypeAlias

from torch import Tensor


def flat(x: Tensor) -> Tensor:
    """A flat view of the memory from a tensor's first element to its last."""
    if x.is_contiguous():
        return x.view(-1)
    extent = 1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride()))
    return x.as_strided((extent if x.numel() else 0,), (1,))


def is_dense(x: Tensor) -> bool:
    """Whether a tensor fills the memory from its first element to its last, in any order of
    dimensions.
    """
    if x.is_contiguous():
        return True
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    return x.permute(order).is_contiguous()


def without_repetition(x: Tensor) -> Tensor:
    """The different elements of an expanded tensor."""
    if x.is_contiguous() or 0 not in (strides := x.stride()):
        return x
    return x.as_strided([n if step else 1 for n, step in zip(x.shape, strides)], strides)


def flattened(*tensors: Tensor) -> list[Tensor]:
    """Tensors of one shape flattened alike: in memory order, without a copy, if all are dense with
    the same strides, else in row-major order.
    """
    first = tensors[0]
    if all(x.is_contiguous() for x in tensors):
        return [x.view(-1) for x in tensors]
    order = sorted(range(first.dim()), key=first.stride, reverse=True)
    turned = [x.permute(order) for x in tensors]
    if all(x.is_contiguous() for x in turned):
        tensors = tuple(turned)
    return [x.reshape(-1).contiguous() for x in tensors]


MAX_DIMS = 6
"""The most dimensions that the elementwise kernels support, after merging."""


@lru_cache(4096)
def merged(shape: Sequence[int], *steps: Sequence[int]) -> tuple[int, ...] | None:
    """Merge dimensions that are adjacent in memory in all tensors. The argument words of the CUDA
    kernels: the number of dimensions left, then their sizes, innermost first, then the strides of
    each tensor; None if more than ``MAX_DIMS`` are left.
    """
    sizes: list[int] = []
    found: list[tuple[int, ...]] = []
    for d in reversed(range(len(shape))):
        here = tuple(step[d] for step in steps)
        if shape[d] == 1:
            continue
        if sizes and here == tuple(sizes[-1] * step for step in found[-1]):
            sizes[-1] *= shape[d]
            continue
        sizes.append(shape[d])
        found.append(here)
    if len(sizes) > MAX_DIMS:
        return None
    rest = MAX_DIMS - len(sizes)
    words = [len(sizes), *sizes, *[1] * rest]
    for k in range(len(steps)):
        words += [*(step[k] for step in found), *[0] * rest]
    return tuple(words)


# Reductions --------------------------------------------------------------------------------------

Level: TypeAlias = tuple[int, int, int]
"""A size, the stride of the values and the stride of the provenance ids."""

Levels: TypeAlias = tuple[Level, Level, Level, Level]
"""Dimensions merged to four: reduced, kept, reduced, kept; the size of a level may be 1."""


class Reduction(NamedTuple):
    """Whether the kernels support the sizes (nonempty, fewer than 2³¹ reduced elements), the shape
    of the result, and the four levels of the tensors by their strides; None if they need more.
    """

    short: bool
    shape: tuple[int, ...]
    levels: Levels | None


@lru_cache(4096)
def reduction(
    shape: Sequence[int], steps: Sequence[int], along: Sequence[int], dims: tuple[int, ...]
) -> Reduction:
    """How values (strides ``steps``) and ids (strides ``along``) are reduced over ``dims``."""
    short = prod(shape) > 0 and prod(shape[d] for d in dims) < 1 << 31
    kept = tuple(size for d, size in enumerate(shape) if d not in dims)
    return Reduction(short, kept, _levels(shape, steps, along, dims))


def _levels(
    shape: Sequence[int], steps: Sequence[int], others: Sequence[int], dims: Sequence[int]
) -> Levels | None:
    """The four levels of tensors with these strides, or None if they need more."""
    found: list[Level] = [(1, 0, 0)] * 4
    level = 4
    for d in reversed(range(len(shape))):
        size, step, along = shape[d], steps[d], others[d]
        if size == 1:
            continue
        reduced = d in dims
        if level < 4 and (level % 2 == 0) == reduced:
            inner, *before = found[level]
            if [step, along] == [inner * each for each in before]:
                found[level] = (inner * size, before[0], before[1])
                continue
        level -= 1 if (level % 2 == 1) == reduced else 2
        if level < 0:
            return None
        found[level] = (size, step, along)
    return found[0], found[1], found[2], found[3]


def leveled(
    x: Tensor, ids: Tensor, dims: Sequence[int], levels: Levels | None
) -> tuple[Tensor, Tensor, Levels]:
    """Values and ids with their levels; copied if they have none."""
    if levels is None:
        kept = [d for d in range(x.dim()) if d not in dims]
        order = [*kept, *sorted(dims)]
        back = [order.index(d) for d in range(x.dim())]
        x, ids = (t.permute(order).contiguous().permute(back) for t in (x, ids))
        n, width = prod(x.shape[d] for d in kept), prod(x.shape[d] for d in dims)
        levels = ((1, 0, 0), (n, width, width), (width, 1, 1), (1, 0, 0))
    return x, ids, levels


def extent(levels: Levels, part: int) -> int:
    """Extent in memory, in elements, of the values (part 1) or the provenance ids (part 2)."""
    return 1 + sum((level[0] - 1) * level[part] for level in levels)
