"""What a table that was counted over a sample of elements says of its own error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from hashlib import sha256
from math import frexp
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradtrace.kernels.operands import Floats
from gradtrace.tracing.moments import SamplingVariance

NOTHING_DRAWN = SamplingVariance(*[Fraction(0)] * 5)


class Drawn(NamedTuple):
    """How many elements were drawn for each loss, of how many. ``unit``: a power of two near the
    largest gradient, in which gradients are squared: the squares of small ones would be 0.
    """

    sample: int
    population: int
    unit: float = 1.0

    @property
    def left(self) -> float:
        """The part of the population that was not drawn."""
        return 1 - self.sample / self.population if self.population else 0.0


def drawn_variances(
    drawn: Drawn, through: Floats, eligible: Floats, squares: tuple[Floats, Floats], unit: float = 1
) -> list[Callable[[], SamplingVariance]]:
    """The sampling variance of each component, of elements drawn without replacement, for each loss
    anew. Given are, by (pair, component), Σt and Σe of weights, and the same of their squares.

    The variance of a total over n of N elements is ``(1 - n/N) · n/(n-1) · Σ (x - mean)²``. Weights
    are given in units of ``unit``. The numbers are made exact when they are asked for.
    """
    n = max(drawn.sample, 1)
    factor = drawn.left * n / max(n - 1, 1)
    t, a = through, np.maximum(eligible - through, 0.0)
    tt, ee = squares
    aa = np.maximum(ee - tt, 0.0)
    whole = ee.sum(0)
    parts = (
        factor * np.maximum(tt - t * t / n, 0.0).sum(0),
        -factor * (t * a / n).sum(0),
        factor * np.maximum(aa - a * a / n, 0.0).sum(0),
        whole,
        drawn.left * whole,
    )
    return [partial(_variance, each, unit) for each in zip(*(part.tolist() for part in parts))]


def _variance(parts: Sequence[float], unit: float) -> SamplingVariance:
    found = SamplingVariance(*map(_rounded, parts))
    return found if unit == 1 else found.times(unit)


def variances(parts: Sequence[Floats]) -> list[Callable[[], SamplingVariance]]:
    """The variances of components, from the parts of all; rounded, as they are estimates."""
    return [partial(_variance, each, 1.0) for each in zip(*(p.tolist() for p in parts))]


def _rounded(x: float) -> Fraction:
    return Fraction(float(f"{x:.7g}")) if np.isfinite(x) else Fraction(0)


def unit_of(gradient: Tensor) -> float:
    """A power of two near the largest finite |gradient|; 1 if all are 0."""
    size = gradient.abs()
    largest = float(torch.where(size.isfinite(), size, 0.0).max()) if len(size) else 0.0
    return 2.0 ** max(-1000, frexp(largest)[1]) if largest else 1.0


def seed_of(seed: int, *numbers: int) -> int:
    """The seed of a sample of its own, for a loss or a batch; the given one for number 0 alone.

    >>> seed_of(7, 0), seed_of(7, 1) == seed_of(7, 1), seed_of(7, 1) == seed_of(7, 2)
    (7, True, False)
    """
    if not any(numbers):
        return seed
    digest = sha256(repr((seed, *numbers)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
