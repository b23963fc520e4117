"""An explicit matrix: whatever is linear and small, and has no better name."""

from __future__ import annotations

import torch
from torch import Tensor

from gradtrace.maps.base import Count, Map, Rows
from gradtrace.semirings import Semiring, Value
from gradtrace.semirings.base import each
from gradtrace.shapes import Shape


class Dense(Map):
    """``out[i] = ⊕ⱼ matrix[i, j] · in[j]``."""

    __slots__ = ("matrix",)

    def __init__(self, matrix: Tensor, in_shape: Shape, out_shape: Shape) -> None:
        self.matrix = matrix
        self.in_shape = in_shape
        self.out_shape = out_shape

    def apply(self, x: Tensor) -> Tensor:
        return (self.matrix.to(x.dtype) @ x.reshape(-1)).reshape(self.out_shape)

    def pull(self, x: Value, semiring: Semiring) -> Value:
        flat = semiring.contract("j,ij->i", each(x, lambda part: part.reshape(-1)), self.matrix)
        return each(flat, lambda part: part.reshape(self.out_shape))

    def rows(self, at: Tensor) -> Rows:
        weight = self.matrix[at]
        number = torch.arange(self.inputs, device=at.device)
        return Rows(torch.where(weight != 0, number, -1), weight)

    def entry(self, at: Tensor, source: Tensor) -> Tensor:
        return self.matrix[at, source].double()

    def dense(self) -> Tensor:
        return self.matrix

    def reach(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1)
        if not flat.numel():
            return x.new_zeros(self.out_shape)
        return ((self.matrix != 0) * flat).amax(1).reshape(self.out_shape)

    def routes(self, count: Count) -> Count:
        there = (self.matrix != 0).double()
        if isinstance(count, Tensor):
            return (there @ count.reshape(-1)).reshape(self.out_shape)
        return (there.sum(1) * count).reshape(self.out_shape)

    def tensors(self) -> tuple[str, ...]:
        return ("matrix",)
