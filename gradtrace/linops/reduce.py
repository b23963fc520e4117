"""``out = ⊕ in`` over dimensions: sums, means, the backward of broadcasting."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from gradtrace.kernels import argmax, steps
from gradtrace.linops.base import (
    Best,
    Count,
    Map,
    Rows,
    chosen,
    multi_index,
    offsets,
    ones_at,
    resized,
    strides_of,
)
from gradtrace.semirings import Semiring, Value
from gradtrace.semirings.base import each, wide
from gradtrace.types import Shape


class Reduce(Map):
    """``out[i] = ⊕ in[j]`` over the j that agree with i outside ``dims``."""

    __slots__ = ("dims",)
    single_target = True

    def __init__(self, dims: Sequence[int], in_shape: Shape, out_shape: Shape) -> None:
        self.dims = tuple(d % len(in_shape) for d in dims)
        self.in_shape = in_shape
        self.out_shape = out_shape

    @property
    def single_source(self) -> bool:  # type: ignore[override]
        """Whether all dimensions summed over are of size 1 or 0."""
        return all(self.in_shape[d] <= 1 for d in self.dims)

    def apply(self, x: Tensor) -> Tensor:
        return (x.sum(self.dims) if self.dims else x).reshape(self.out_shape)

    def apply_in(self, x: Value, semiring: Semiring) -> Value:
        return each(semiring.reduce(x, self.dims), lambda part: part.reshape(self.out_shape))

    def best(self, x: Tensor, at: Tensor | None = None) -> Best:
        if at is not None:
            return self.largest(x, at)
        kept = [d for d in range(len(self.in_shape)) if d not in self.dims]
        slices = wide(x).abs().permute([*kept, *sorted(self.dims)])
        base, over = self._source_offsets(torch.arange(self.outputs, device=x.device))
        value, place = argmax(slices.reshape(self.outputs, self.width), 1)
        source = base + over[place.clamp(min=0)] if self.width else place
        return chosen(value.reshape(self.out_shape), source.reshape(self.out_shape), None)

    def select(self, x: Tensor, marks: Tensor, value: bool = False) -> tuple[Tensor | None, Tensor]:
        largest, selected = steps.reduce(x, marks, self.dims)
        shape = self.out_shape
        if selected.shape == shape:
            return largest if value else None, selected
        return torch.reshape(largest, shape) if value else None, torch.reshape(selected, shape)

    def rows(self, at: Tensor) -> Rows:
        base, over = self._source_offsets(at)
        return Rows(base.unsqueeze(1) + over, torch.ones((), device=at.device))

    def entry(self, at: Tensor, source: Tensor) -> Tensor:
        return ones_at(at)

    def _source_offsets(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """The input elements that output elements are sums of, as ``base[i] + over[k]``."""
        steps = strides_of(self.in_shape)
        kept = [d for d in range(len(self.in_shape)) if d not in self.dims]
        base = torch.zeros_like(at)
        for d, number in zip(kept, multi_index(at, tuple(self.in_shape[d] for d in kept))):
            base = base + number * steps[d]
        over = sorted(self.dims)
        sizes = tuple(self.in_shape[d] for d in over)
        return base, offsets(sizes, tuple(steps[d] for d in over), at.device)

    @property
    def width(self) -> int:
        return prod(self.in_shape[d] for d in self.dims)

    def max_source(self, x: Tensor) -> Tensor:
        if not x.numel():
            return x.new_zeros(self.out_shape)
        return (x.amax(self.dims) if self.dims else x).reshape(self.out_shape)

    def narrow(self, dim: int, index: Tensor) -> Map | None:
        if dim not in self.dims:
            return None
        return Reduce(self.dims, resized(self.in_shape, dim, len(index)), self.out_shape)

    def copies(self, count: int) -> Map | None:
        dims = [d + 1 for d in self.dims]
        return Reduce(dims, (count, *self.in_shape), (count, *self.out_shape))

    def narrow_each(self, dim: int, index: Tensor) -> Map | None:
        narrow = self.narrow(dim, index[0])
        return None if narrow is None else narrow.copies(len(index))

    def _kept_shape(self) -> Shape:
        return tuple(1 if d in self.dims else n for d, n in enumerate(self.in_shape))

    def targets(self) -> Tensor:
        """For each input element the number of its output element."""
        return (
            torch.arange(self.outputs, device="cpu")
            .reshape(self._kept_shape())
            .expand(self.in_shape)
        )

    def routes(self, count: Count) -> Count:
        if isinstance(count, Tensor):
            return count.sum(self.dims).reshape(self.out_shape) if self.dims else count
        for d in self.dims:
            count *= self.in_shape[d]
        return count
