"""``out[i] = ⊕ in[j]`` over the j up to i: cumulative sums."""

from __future__ import annotations

from math import prod

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
        before, n, after = (
            self.in_shape[: self.dim],
            self.in_shape[self.dim],
            prod(self.in_shape[self.dim + 1 :]),
        )
        triangle = torch.ones(n, n).tril()
        return torch.kron(torch.eye(prod(before)), torch.kron(triangle, torch.eye(after)))

    def routes(self, count: Count) -> Count:
        return per_element(count, self.in_shape).cumsum(self.dim)
