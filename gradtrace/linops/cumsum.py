"""``out[i] = ⊕ in[j]`` over ``j <= i``, or over ``j >= i``: cumulative sums."""

from __future__ import annotations

import torch
from torch import Tensor

from gradtrace.linops.base import Best, Map, Rows, Selection, chosen, ids_at
from gradtrace.linops.indexing import strides_of
from gradtrace.semirings import Semiring, Value
from gradtrace.semirings.base import each, wide
from gradtrace.types import Shape


class Scan(Map):
    """Prefix ⊕ along ``dim``; with ``reverse``, suffix ⊕."""

    __slots__ = ("dim", "reverse")
    unit_weights = True

    def __init__(self, dim: int, shape: Shape, reverse: bool = False) -> None:
        self.dim = dim % len(shape)
        self.reverse = reverse
        self.in_shape = self.out_shape = shape

    def _flip(self, x: Tensor) -> Tensor:
        return x.flip(self.dim) if self.reverse else x

    def apply(self, x: Tensor) -> Tensor:
        return self._flip(self._flip(x).cumsum(self.dim))

    def apply_in(self, x: Value, semiring: Semiring) -> Value:
        return each(semiring.scan(each(x, self._flip), self.dim), self._flip)

    def best(self, x: Tensor, at: Tensor | None = None) -> Best:
        size = self._flip(wide(x).abs())
        if not size.numel():
            return self.largest(x, at)
        value = size.cummax(self.dim).values
        n, step = self.in_shape[self.dim], strides_of(self.in_shape)[self.dim]
        shape = [n if d == self.dim else 1 for d in range(size.dim())]
        number = torch.arange(n, device=x.device).reshape(shape)
        before = value.roll(1, self.dim)
        # Ties go to the lowest element: the first one seen from the left, the last from the right.
        larger = size >= before if self.reverse else size > before
        # NaN counts as larger than any number.
        larger |= size.isnan() if self.reverse else size.isnan() & ~before.isnan()
        larger &= ~(before.isnan() & ~size.isnan())
        met = torch.where(larger | (number == 0), number, 0).cummax(self.dim).values
        place = self._flip(n - 1 - met if self.reverse else met)
        own = torch.arange(self.inputs, device=x.device).reshape(self.in_shape)
        return chosen(self._flip(value), own - (number - place) * step, at)

    def select(self, x: Tensor, ids: Tensor, value: bool = False) -> Selection:
        largest, source = self.best(x)
        return largest if value else None, ids_at(ids, source)

    def rows(self, at: Tensor) -> Rows:
        n, step = self.in_shape[self.dim], strides_of(self.in_shape)[self.dim]
        here = ((at // step) % n).unsqueeze(1)
        number = torch.arange(n, device=at.device)
        there = number >= here if self.reverse else number <= here
        source = at.unsqueeze(1) + (number - here) * step
        return Rows(torch.where(there, source, -1), torch.ones((), device=at.device))

    def copies(self, count: int) -> Map | None:
        return Scan(self.dim + 1, (count, *self.in_shape), self.reverse)

    @property
    def width(self) -> int:
        return self.in_shape[self.dim]

    def max_source(self, x: Tensor) -> Tensor:
        return self._flip(self._flip(x).cummax(self.dim).values) if x.numel() else x
