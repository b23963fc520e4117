"""``out = ⊕ in`` over dimensions: sums, means, the backward of broadcasting."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from gradtrace.kernels import backend_of
from gradtrace.linops.axes import MIXED, Axis, reshaped
from gradtrace.linops.base import Map, Rows, Selection, any_nonzero
from gradtrace.linops.indexing import line_offsets, located, resized, strides_of
from gradtrace.semirings import Semiring, Value
from gradtrace.semirings.base import each
from gradtrace.types import Shape


class Reduce(Map):
    """``out[i] = ⊕ in[j]`` over the j that agree with i outside ``dims``."""

    __slots__ = ("dims",)
    single_target = unit_weights = full_rows = True

    def __init__(self, dims: Sequence[int], in_shape: Shape, out_shape: Shape) -> None:
        self.dims = tuple(d % len(in_shape) for d in dims)
        self.in_shape = in_shape
        self.out_shape = out_shape

    def structure(self) -> object:
        return Reduce, self.dims, self.in_shape

    @property
    def single_source(self) -> bool:  # type: ignore[override]
        """Whether all dimensions summed over are of size 1 or 0."""
        return all(self.in_shape[d] <= 1 for d in self.dims)

    def apply(self, x: Tensor) -> Tensor:
        return (x.sum(self.dims) if self.dims else x).reshape(self.out_shape)

    def apply_in(self, x: Value, semiring: Semiring) -> Value:
        return each(semiring.reduce(x, self.dims), lambda part: part.reshape(self.out_shape))

    def select(self, x: Tensor, ids: Tensor, value: bool = False) -> Selection:
        largest, selected = backend_of(x).reduce(x, ids, self.dims)
        shape = self.out_shape
        if selected.shape == shape:
            return largest if value else None, selected
        return torch.reshape(largest, shape) if value else None, torch.reshape(selected, shape)

    def rows(self, at: Tensor) -> Rows:
        base = located(at, self._kept_shape(), strides_of(self.in_shape))
        over = line_offsets(self.in_shape, sorted(self.dims), at.device)
        return Rows(base.unsqueeze(1) + over, torch.ones((), device=at.device))

    @property
    def width(self) -> int:
        return prod(self.in_shape[d] for d in self.dims)

    def max_source(self, x: Tensor) -> Tensor:
        if not x.numel():
            return x.new_zeros(self.out_shape)
        return (x.amax(self.dims) if self.dims else x).reshape(self.out_shape)

    def follow_axis(self, axis: Axis, device: torch.device) -> Axis | None:
        if axis.dim in self.dims:
            return MIXED
        return reshaped(axis, self._kept_shape(), self.out_shape)

    def may_be_nonzero(self, x: Tensor) -> Tensor | None:
        return any_nonzero(x, self.dims).reshape(self.out_shape)

    def copies(self, count: int) -> Map | None:
        dims = [d + 1 for d in self.dims]
        return Reduce(dims, (count, *self.in_shape), (count, *self.out_shape))

    def sums_over(self, dim: int) -> bool:
        return dim in self.dims

    def narrow(self, dim: int, index: Tensor) -> Map:
        count, places = index.shape
        dims, shape = [d + 1 for d in self.dims], resized(self.in_shape, dim, places)
        return Reduce(dims, (count, *shape), (count, *self.out_shape))

    def _kept_shape(self) -> Shape:
        return tuple(1 if d in self.dims else n for d, n in enumerate(self.in_shape))

    def targets(self) -> Tensor:
        """For each input element the number of its output element."""
        numbers = torch.arange(self.outputs, device="cpu").reshape(self._kept_shape())
        return numbers.expand(self.in_shape)
