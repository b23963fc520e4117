"""``out[i] = ⊕ in[j]`` over the j up to i: cumulative sums."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from gradtrace.maps.base import Best, Count, Map, Rows, chosen, per_element, strides_of
from gradtrace.semirings import Semiring, Value
from gradtrace.semirings.base import wide
from gradtrace.shapes import Shape


class Scan(Map):
    """Prefix ⊕ along ``dim``."""

    __slots__ = ("dim",)

    def __init__(self, dim: int, shape: Shape) -> None:
        self.dim = dim % len(shape)
        self.in_shape = self.out_shape = shape

    def apply(self, x: Tensor) -> Tensor:
        return x.cumsum(self.dim)

    def pull(self, x: Value, semiring: Semiring) -> Value:
        return semiring.scan(x, self.dim)

    def best(self, x: Tensor, at: Tensor | None = None) -> Best:
        size = wide(x).abs()
        if not size.numel():
            return self.largest(x, at)
        value = size.cummax(self.dim).values
        n, step = self.in_shape[self.dim], strides_of(self.in_shape)[self.dim]
        shape = [n if d == self.dim else 1 for d in range(size.dim())]
        number = torch.arange(n, device=x.device).reshape(shape)
        before = value.roll(1, self.dim)
        fresh = (size > before) | (size.isnan() & ~before.isnan()) | (number == 0)
        first = torch.where(fresh, number, 0).cummax(self.dim).values  # the first of equals
        own = torch.arange(self.inputs, device=x.device).reshape(self.in_shape)
        return chosen(value, own - (number - first) * step, at)

    def rows(self, at: Tensor) -> Rows:
        n, step = self.in_shape[self.dim], strides_of(self.in_shape)[self.dim]
        here = (at // step) % n
        number = torch.arange(n, device=at.device)
        source = (at - here * step).unsqueeze(1) + number * step
        source = torch.where(number <= here.unsqueeze(1), source, -1)
        return Rows(source, torch.ones((), device=at.device))

    @property
    def width(self) -> int:
        return self.in_shape[self.dim]

    def reach(self, x: Tensor) -> Tensor:
        return x.cummax(self.dim).values if x.numel() else x

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
