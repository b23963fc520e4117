"""``out[i] = ⊕ in[j]`` over the j up to i: cumulative sums."""

from __future__ import annotations

import torch
from torch import Tensor

from gradtrace.maps.base import Count, Map, per_element
from gradtrace.semirings import Semiring
from gradtrace.shapes import Shape


class Scan(Map):
    """Prefix ⊕ along ``dim``."""

    __slots__ = ("dim",)

    def __init__(self, dim: int, shape: Shape) -> None:
        self.dim = dim % len(shape)
        self.in_shape = self.out_shape = shape

    def pull(self, x: Tensor, semiring: Semiring) -> Tensor:
        return semiring.scan(x, self.dim)

    def dense(self) -> Tensor:
        numbers = torch.arange(self.inputs).reshape(self.in_shape)
        position = torch.zeros_like(numbers) + torch.arange(self.in_shape[self.dim]).reshape(
            [-1 if d == self.dim else 1 for d in range(len(self.in_shape))]
        )
        line = numbers.select(self.dim, 0).unsqueeze(self.dim).expand(self.in_shape).reshape(-1)
        position = position.reshape(-1)
        same = line.reshape(-1, 1) == line
        return (same & (position.reshape(-1, 1) >= position)).float()

    def routes(self, count: Count) -> Count:
        return per_element(count, self.in_shape).cumsum(self.dim)
