"""``out[i] = w[i] · in[i]``: elementwise operations."""

from __future__ import annotations

import torch
from torch import Tensor

from gradtrace.linops.axes import Axis
from gradtrace.linops.base import Best, Count, Map, Rows, Selection, chosen
from gradtrace.linops.indexing import nearby, picked
from gradtrace.pytorch.plain_tensors import plain
from gradtrace.semirings import Semiring, Value
from gradtrace.semirings.base import wide
from gradtrace.types import Shape

FULL_PRECISION = frozenset({torch.float32, torch.float64})
"""Dtypes in which PyTorch rounds a Python number to the dtype before multiplying."""


class Scale(Map):
    """``out[i] = w[i] · in[i]``; ``weight`` is a number, or a tensor that broadcasts."""

    __slots__ = ("weight",)
    single_source = single_target = is_diagonal = True
    weights = ("weight",)

    def __init__(self, weight: Tensor | float, shape: Shape) -> None:
        self.weight = plain(weight) if isinstance(weight, Tensor) else weight
        self.in_shape = self.out_shape = shape

    def _weight(self, like: Tensor) -> Tensor:
        if isinstance(self.weight, Tensor):
            return nearby(self.weight, like.device)
        dtype = like.dtype if like.is_floating_point() else torch.float64
        return torch.full((), self.weight, dtype=dtype, device=like.device)  # fill: no host sync

    def apply(self, x: Tensor) -> Tensor:
        if x.dtype in FULL_PRECISION:
            return x * self.weight
        return self._weight(x) * x

    def apply_in(self, x: Value, semiring: Semiring) -> Value:
        if not isinstance(self.weight, Tensor):
            return semiring.times_number(x, self.weight)
        return semiring.times_weight(x, self._weight(x[0]))

    def best(self, x: Tensor, at: Tensor | None = None) -> Best:
        if at is None:
            return super().best(x)
        weight, here = (picked(part, self.in_shape, at) for part in (self._weight(wide(x)), x))
        return chosen((wide(weight) * wide(here)).abs(), at, None)

    def weighed(self, x: Tensor) -> Tensor:
        x = wide(x)
        return (wide(self._weight(x)) * x).abs()

    def select(self, x: Tensor, ids: Tensor, value: bool = False) -> Selection:
        size = self.weighed(x)
        return size if value else None, torch.where(size != 0, ids, 0)

    def entry(self, at: Tensor, source: Tensor) -> Tensor:
        if not isinstance(self.weight, Tensor):
            return torch.full(at.shape, self.weight, dtype=torch.float64, device=at.device)
        return picked(self.weight, self.in_shape, at).double()

    def rows(self, at: Tensor) -> Rows:
        if not isinstance(self.weight, Tensor):
            number = torch.tensor(self.weight, dtype=torch.float64, device=at.device)
            return Rows(at.unsqueeze(1), number)
        return Rows(at.unsqueeze(1), picked(self.weight, self.in_shape, at).unsqueeze(1))

    def max_source(self, x: Tensor) -> Tensor:
        return x

    def follow_axis(self, axis: Axis, device: torch.device) -> Axis | None:
        return axis

    def copies(self, count: int) -> Map | None:
        return Scale(self.weight, (count, *self.in_shape))

    def routes(self, count: Count, device: torch.device) -> Count:
        return count
