"""``LogAbs``: masses of paths held as logarithms, for powers that floats have no range for."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, log

import torch
from torch import Tensor

from gradtrace.semirings.base import Semiring, Value

LOG_2 = log(2)


@dataclass(frozen=True)
class LogAbs(Semiring):
    """``log₂ Σ |weight|**p``, as ``Abs(p=p)``, in logarithms from beginning to end.

    One power of two for each tensor keeps depth from leaving the range of floats, but not the
    elements of one tensor from each other: for p = 64 a weight of 1e-5 beside 1 is 1e-320. There
    are no matrix products in logarithms, so this is many times slower.

    >>> LogAbs(p=64).lift(torch.tensor([-8.0, 0.0]))
    (tensor([192., -inf], dtype=torch.float64),)
    """

    p: float = 1.0
    name: str = "LOG-ABS"
    zero: tuple[float, ...] = (-inf,)
    one: tuple[float, ...] = (0.0,)

    def lift(self, weight: Tensor) -> Value:
        return (weight.double().abs().log2() * self.p,)

    def plus(self, a: Value, b: Value) -> Value:
        return (torch.logaddexp2(a[0], b[0]),)

    def times(self, a: Value, b: Value) -> Value:
        return (a[0] + b[0],)

    def fold(self, x: Value, dim: int) -> Value:
        return ((x[0] * LOG_2).logsumexp(dim) / LOG_2,)
