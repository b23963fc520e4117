"""``out[i] = w[i] · in[i]``: elementwise operations and identities."""

from __future__ import annotations

import torch
from torch import Tensor

from gradtrace.linops.base import Best, Count, Map, Rows, chosen, ones_at
from gradtrace.linops.indexing import nearby, picked
from gradtrace.pytorch.plain_tensors import plain
from gradtrace.semirings import Semiring, Value
from gradtrace.semirings.base import each, wide
from gradtrace.types import Shape


class Identity(Map):
    """``out[i] = in[i]``: a reshape that keeps the order of elements."""

    __slots__ = ()
    single_source = single_target = is_gather = True

    def __init__(self, in_shape: Shape, out_shape: Shape | None = None) -> None:
        self.in_shape = in_shape
        self.out_shape = in_shape if out_shape is None else out_shape

    def apply(self, x: Tensor) -> Tensor:
        return x if x.shape == self.out_shape else torch.reshape(x, self.out_shape)

    def apply_in(self, x: Value, semiring: Semiring) -> Value:
        return each(x, self.apply)

    def best(self, x: Tensor, at: Tensor | None = None) -> Best:
        if at is not None:
            return chosen(wide(picked(x, self.in_shape, at)).abs(), at, None)
        numbers = torch.arange(self.inputs, device=x.device).reshape(self.out_shape)
        return chosen(wide(x).abs().reshape(self.out_shape), numbers, None)

    def entry(self, at: Tensor, source: Tensor) -> Tensor:
        return ones_at(at)

    def may_be_nonzero(self, x: Tensor) -> Tensor | None:
        return (x != 0).reshape(self.out_shape)

    def select(self, x: Tensor, marks: Tensor, value: bool = False) -> tuple[Tensor | None, Tensor]:
        size = wide(x).abs().reshape(self.out_shape)
        selected = torch.where(size != 0, marks.reshape(self.out_shape), 0)
        return size if value else None, selected

    def rows(self, at: Tensor) -> Rows:
        return Rows(at.unsqueeze(1), torch.ones((), device=at.device))

    def max_source(self, x: Tensor) -> Tensor:
        return x.reshape(self.out_shape)

    def copies(self, count: int) -> Map | None:
        return Identity((count, *self.in_shape), (count, *self.out_shape))

    def routes(self, count: Count) -> Count:
        return count.reshape(self.out_shape) if isinstance(count, Tensor) else count


FULL_PRECISION = frozenset({torch.float32, torch.float64})
"""Dtypes in which PyTorch rounds a Python number to the dtype before multiplying."""


class Scale(Map):
    """``out[i] = w[i] · in[i]``; ``weight`` is a number, or a tensor that broadcasts."""

    __slots__ = ("weight",)
    single_source = single_target = is_diagonal = True

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
        return semiring.times(semiring.weigh(self._weight(x[0])), x)

    def best(self, x: Tensor, at: Tensor | None = None) -> Best:
        weight = wide(self._weight(wide(x)))
        if at is not None:
            here = wide(picked(x, self.in_shape, at))
            return chosen((picked(weight, self.in_shape, at) * here).abs(), at, None)
        value = self.weighed(x)
        numbers = torch.arange(self.inputs, device=x.device).reshape(self.out_shape)
        return chosen(value, numbers, None)

    def weighed(self, x: Tensor) -> Tensor:
        x = wide(x)
        return (wide(self._weight(x)) * x).abs()

    def entry(self, at: Tensor, source: Tensor) -> Tensor:
        if not isinstance(self.weight, Tensor):
            return self.weight * ones_at(at)
        return picked(self.weight, self.in_shape, at).double()

    def select(self, x: Tensor, marks: Tensor, value: bool = False) -> tuple[Tensor | None, Tensor]:
        size = self.weighed(x)
        return size if value else None, torch.where(size != 0, marks, 0)

    def rows(self, at: Tensor) -> Rows:
        if not isinstance(self.weight, Tensor):
            number = torch.tensor(self.weight, dtype=torch.float64, device=at.device)
            return Rows(at.unsqueeze(1), number)
        return Rows(at.unsqueeze(1), picked(self.weight, self.in_shape, at).unsqueeze(1))

    def max_source(self, x: Tensor) -> Tensor:
        return x

    def copies(self, count: int) -> Map | None:
        return Scale(self.weight, (count, *self.in_shape))

    def routes(self, count: Count) -> Count:
        return count

    def tensors(self) -> tuple[str, ...]:
        return ("weight",) if isinstance(self.weight, Tensor) else ()
