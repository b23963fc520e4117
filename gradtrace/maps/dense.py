"""An explicit matrix: whatever is linear and small, and has no better name."""

from __future__ import annotations

from torch import Tensor

from gradtrace.maps.base import Count, Map
from gradtrace.semirings import Semiring
from gradtrace.shapes import Shape


class Dense(Map):
    """``out[i] = ⊕ⱼ matrix[i, j] · in[j]``."""

    __slots__ = ("matrix",)

    def __init__(self, matrix: Tensor, in_shape: Shape, out_shape: Shape) -> None:
        self.matrix = matrix
        self.in_shape = in_shape
        self.out_shape = out_shape

    def pull(self, x: Tensor, semiring: Semiring) -> Tensor:
        flat = semiring.contract("j,ij->i", x.reshape(-1), self.matrix)
        return flat.reshape(self.out_shape)

    def dense(self) -> Tensor:
        return self.matrix

    def routes(self, count: Count) -> Count:
        there = (self.matrix != 0).double()
        if isinstance(count, Tensor):
            return (there @ count.reshape(-1)).reshape(self.out_shape)
        return (there.sum(1) * count).reshape(self.out_shape)

    def tensors(self) -> tuple[str, ...]:
        return ("matrix",)
