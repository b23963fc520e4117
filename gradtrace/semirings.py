"""Semirings: what takes the place of (+, ×) in back-propagation.

Back-propagation sums over all paths the product of the local derivatives along each. A semiring
says what the sum and the product are, and ``lift`` what a derivative counts as:
``out[i] = ⊕ⱼ lift(J[i, j]) ⊗ in[j]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Semiring(Protocol):
    """The operations that maps are pulled with. A value is a tensor of the cotangent's shape."""

    @property
    def name(self) -> str:
        """What tables and errors call it."""

    @property
    def zero(self) -> float:
        """The neutral element of ⊕: no path."""

    @property
    def one(self) -> float:
        """The neutral element of ⊗: the empty path."""

    def lift(self, weight: Tensor) -> Tensor:
        """The value of a single derivative, where products stay products.

        ``lift(a·b) = lift(a) ⊗ lift(b)``.
        """

    def plus(self, a: Tensor, b: Tensor) -> Tensor:
        """``a ⊕ b``, elementwise."""

    def times(self, a: Tensor, b: Tensor) -> Tensor:
        """``a ⊗ b``, elementwise, broadcasting."""

    def reduce(self, x: Tensor, dims: Sequence[int]) -> Tensor:
        """``⊕`` over dimensions, which are kept with size 1."""

    def scatter(self, x: Tensor, target: Tensor, size: int) -> Tensor:
        """``out[i] = ⊕ x[j]`` over the j with ``target[j] = i``; -1 goes nowhere. Flat."""

    def scan(self, x: Tensor, dim: int) -> Tensor:
        """Prefix ``⊕`` along a dimension."""

    def contract(self, spec: str, x: Tensor, weight: Tensor) -> Tensor:
        """``⊕`` over the letters that the result of an einsum lacks of ``x ⊗ lift(weight)``."""


@dataclass(frozen=True)
class Sum:
    """(+, ×): the gradient itself."""

    name: str = "SUM"
    zero: float = 0.0
    one: float = 1.0

    def lift(self, weight: Tensor) -> Tensor:
        return weight

    def plus(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def times(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b

    def reduce(self, x: Tensor, dims: Sequence[int]) -> Tensor:
        return x.sum(tuple(dims), keepdim=True) if dims else x

    def scatter(self, x: Tensor, target: Tensor, size: int) -> Tensor:
        out = x.new_zeros(size + 1)  # the last place takes what goes nowhere
        return out.index_add(0, target.remainder(size + 1), x)[:size]

    def scan(self, x: Tensor, dim: int) -> Tensor:
        return x.cumsum(dim)

    def contract(self, spec: str, x: Tensor, weight: Tensor) -> Tensor:
        return torch.einsum(spec, x, weight.to(x.dtype))


SUM = Sum()
