"""Maps without a known structure, as matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from gradtrace.kernels import backend_of
from gradtrace.linops.base import Count, Map, Rows, Selection
from gradtrace.pytorch.plain_tensors import plain
from gradtrace.semirings import MAX, Semiring, Value
from gradtrace.semirings.base import each
from gradtrace.types import Shape


class Dense(Map):
    """``out[i] = ⊕ⱼ matrix[i, j] · in[j]``."""

    __slots__ = weights = ("matrix",)

    def __init__(self, matrix: Tensor, in_shape: Shape, out_shape: Shape) -> None:
        self.matrix = plain(matrix)
        self.in_shape = in_shape
        self.out_shape = out_shape

    def apply(self, x: Tensor) -> Tensor:
        return (self.matrix.to(x.dtype) @ x.reshape(-1)).reshape(self.out_shape)

    def apply_in(self, x: Value, semiring: Semiring) -> Value:
        if semiring == MAX:
            return (self.weighed(x[0]),)
        flat = semiring.contract("j,ij->i", each(x, lambda part: part.reshape(-1)), self.matrix)
        return each(flat, lambda part: part.reshape(self.out_shape))

    def select(self, x: Tensor, ids: Tensor, value: bool = False) -> Selection:
        if not self._all_finite(x):
            return super().select(x, ids, value)
        matrix = self.matrix.t().unsqueeze(0)
        x, ids = x.reshape(1, 1, -1), ids.reshape(1, 1, -1)
        found = backend_of(x).contract(x, matrix, value=value, ids=ids)
        assert found.ids is not None
        largest = None if found.value is None else found.value.reshape(self.out_shape)
        return largest, found.ids.reshape(self.out_shape)

    def _all_finite(self, x: Tensor) -> bool:
        """Whether x is finite, so that entries of 0 contribute 0 and the dense kernels can be used:
        a zero of the matrix is no entry, but 0 · ∞ would be NaN.
        """
        return bool(x.isfinite().all())

    def rows(self, at: Tensor) -> Rows:
        weight = self.matrix[at]
        number = torch.arange(self.inputs, device=at.device)
        return Rows(torch.where(weight != 0, number, -1), weight)

    def entry(self, at: Tensor, source: Tensor) -> Tensor:
        return self.matrix[at, source].double()

    def max_source(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1)
        if not flat.numel():
            return x.new_zeros(self.out_shape)
        return ((self.matrix != 0) * flat).amax(1).reshape(self.out_shape)

    def routes(self, count: Count, device: torch.device) -> Count:
        there = (self.matrix != 0).double()
        if isinstance(count, Tensor):
            return (there @ count.reshape(-1)).reshape(self.out_shape)
        return (there.sum(1) * count).reshape(self.out_shape)
