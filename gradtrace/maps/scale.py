"""``out[i] = w[i] · in[i]``: elementwise operations and identities."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from gradtrace.maps.base import Count, Map
from gradtrace.semirings import Semiring
from gradtrace.shapes import Shape


class Identity(Map):
    """``out[i] = in[i]``, in a shape of as many elements in the same order."""

    __slots__ = ()
    single_source = single_target = True

    def __init__(self, in_shape: Shape, out_shape: Shape | None = None) -> None:
        self.in_shape = in_shape
        self.out_shape = in_shape if out_shape is None else out_shape

    def pull(self, x: Tensor, semiring: Semiring) -> Tensor:
        return x.reshape(self.out_shape)

    def dense(self) -> Tensor:
        return torch.eye(self.inputs)

    def routes(self, count: Count) -> Count:
        return count.reshape(self.out_shape) if isinstance(count, Tensor) else count


class Scale(Map):
    """``out[i] = w[i] · in[i]``; ``weight`` is a number, or a tensor that broadcasts."""

    __slots__ = ("weight",)
    single_source = single_target = True

    def __init__(self, weight: Tensor | float, shape: Shape) -> None:
        self.weight = weight
        self.in_shape = self.out_shape = shape

    def _weight(self, like: Tensor) -> Tensor:
        if isinstance(self.weight, Tensor):
            return self.weight
        return torch.tensor(self.weight, dtype=torch.float64, device=like.device).to(like.dtype)

    def pull(self, x: Tensor, semiring: Semiring) -> Tensor:
        return semiring.times(semiring.lift(self._weight(x)), x)

    def dense(self) -> Tensor:
        weight = self._weight(torch.ones((), dtype=torch.float64))
        return torch.diag(weight.expand(self.in_shape).reshape(prod(self.in_shape)))

    def routes(self, count: Count) -> Count:
        return count

    def tensors(self) -> tuple[str, ...]:
        return ("weight",) if isinstance(self.weight, Tensor) else ()
