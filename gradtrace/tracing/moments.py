"""``Moments``: exact sums over losses, from which a share and its standard error follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from hashlib import sha256
from math import frexp, inf, isfinite, nan, sqrt
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from gradtrace.kernels.operands import Floats

Z2 = Fraction(196, 100) ** 2
"""The square of the normal quantile of a 95% interval."""


class SamplingVariance(NamedTuple):
    """How far Σt and Σe may be off because not all elements were counted.

    ``tt``, ``ta``, ``aa``: the estimated variances and covariance of what passes, t, and of what
    goes around, a = e - t. ``units``: Σ (eligible part of a unit drawn)²; ``left``: the same, each
    times the part of its population that was not drawn. A unit is what is drawn at once: an
    element, or a row of a weight. All but ``units`` are 0 where everything was drawn.
    """

    tt: Fraction
    ta: Fraction
    aa: Fraction
    units: Fraction
    left: Fraction

    def plus(self, other: SamplingVariance) -> SamplingVariance:
        """The variance of the sum of two independent samples."""
        return SamplingVariance(*(a + b for a, b in zip(self, other)))

    def times(self, factor: float | Fraction) -> SamplingVariance:
        """The variance of sums that are ``factor`` times as large."""
        square = Fraction(factor) ** 2
        return SamplingVariance(*(each * square for each in self))

    def of_share(self, share: Fraction, eligible: Fraction) -> float:
        """The variance of ``share = Σt / Σe``, as of a ratio estimator: that of Σt - share·Σe =
        (1 - share)·Σt - share·Σa, over (Σe)².

        Where (nearly) all or none of the units drawn pass the component, that would be 0, though
        others may do the opposite. So it is at least the variance by Agresti and Coull, ``p(1 - p)
        / (m + z²)`` times the part not drawn, where m is the effective number of units, z = 1.96
        and p the share with z²/2 hits and misses added: for a share of 0, 1.96 errors are about
        2.7 / m ("rule of three"). Both are estimated from the same few units; 1 + z²/m allows for
        that, somewhat more than Student's t does, as gradients are skewed.
        """
        rest = 1 - share
        residual = rest**2 * self.tt - 2 * share * rest * self.ta + share**2 * self.aa
        linear = residual / eligible**2
        if not self.units:
            return float(linear)
        many = eligible**2 / self.units
        p = (share * many + Z2 / 2) / (many + Z2)
        least = self.left / self.units * p * (1 - p) / (many + Z2)
        return float(max(linear, least) * (1 + Z2 / many))


KnownVariance: TypeAlias = SamplingVariance | Callable[[], SamplingVariance] | None
"""A sampling variance, or a function that computes it."""


class Moments:
    """Sums over losses of ``through`` (t) and ``eligible`` (e): Σt, Σe, Σt², Σte, Σe², exact; and
    what is known of their error if only a sample of elements was counted (``sampling``).

    Float sums depend on their order; fractions do not, so merging parts in any order gives the
    same bits. The fractions are computed lazily, as most rows of most tables are never read.
    """

    __slots__ = ("_pairs", "_parts", "_power", "_sampling")

    def __init__(
        self,
        t: Fraction = Fraction(0),
        e: Fraction = Fraction(0),
        tt: Fraction = Fraction(0),
        te: Fraction = Fraction(0),
        ee: Fraction = Fraction(0),
        *sampling: Fraction,
    ) -> None:
        self._parts: tuple[Fraction, ...] | None = (t, e, tt, te, ee)
        self._pairs: tuple[Sequence[float], Sequence[float]] = ((), ())
        self._power = 0
        self._sampling: KnownVariance = SamplingVariance(*sampling) if sampling else None

    @classmethod
    def of(cls, through: float, eligible: float) -> Moments:
        """The moments of one loss."""
        return cls.over((float(through),), (float(eligible),))

    @classmethod
    def over(
        cls,
        through: Sequence[float],
        eligible: Sequence[float],
        sampling: KnownVariance = None,
    ) -> Moments:
        """The moments of many losses; a function computes their variance when it is asked for."""
        found = cls.whole(through, eligible, 0)
        found._sampling = sampling
        return found

    @classmethod
    def whole(cls, through: Sequence[float], eligible: Sequence[float], power: int) -> Moments:
        """The moments of many losses, given in units of ``2**power``; whole numbers may have any
        size.
        """
        found = cls.__new__(cls)
        found._parts, found._pairs, found._power = None, (through, eligible), power
        found._sampling = None
        return found

    @property
    def sampling(self) -> SamplingVariance | None:
        """What is known of the error of a sample; None if all elements were counted."""
        if callable(self._sampling):
            self._sampling = self._sampling()
        return self._sampling

    @sampling.setter
    def sampling(self, known: SamplingVariance | None) -> None:
        self._sampling = known

    @property
    def through(self) -> Sequence[float]:
        """``t`` of each loss, of moments that were made by ``over``."""
        return self._pairs[0]

    @property
    def eligible(self) -> Sequence[float]:
        """``e`` of each loss, of moments that were made by ``over``."""
        return self._pairs[1]

    def single(self) -> tuple[float, float] | None:
        """Σt and Σe of a single loss, if they are floats: the five sums follow from them."""
        if len(self._pairs[0]) != 1 or self._power:
            return None
        (t,), (e,) = self._pairs
        return (t, e) if isinstance(t, float) and isinstance(e, float) else None

    def parts(self) -> tuple[Fraction, ...]:
        """The five sums."""
        if self._parts is None:
            self._parts = _summed(*self._pairs, self._power)
        return self._parts

    def numbers(self) -> tuple[Fraction, ...]:
        """The arguments of ``Moments``: the five sums, and five more if elements were sampled."""
        return self.parts() + (self.sampling or ())

    @property
    def sums(self) -> tuple[float, float]:
        """Σt and Σe as floats."""
        return self.single() or (as_float(self.t), as_float(self.e))

    @property
    def t(self) -> Fraction:
        """``Σt``."""
        return self.parts()[0]

    @property
    def e(self) -> Fraction:
        """``Σe``."""
        return self.parts()[1]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Moments) and self._known() == other._known()

    def __hash__(self) -> int:
        return hash(self.parts())

    def _known(self) -> tuple[Fraction, ...]:
        """The sums, and their sampling variance unless all elements were drawn."""
        exact = self.sampling is None or not any(self.sampling._replace(units=Fraction(0)))
        return self.parts() if exact else self.numbers()

    def __repr__(self) -> str:
        through, eligible = map(as_float, (self.t, self.e))
        return f"Moments(through={through:.6g}, eligible={eligible:.6g}, share={self.share:.4g})"

    def __add__(self, other: Moments) -> Moments:
        mine, theirs = self.sampling, other.sampling
        both = mine.plus(theirs) if mine and theirs else mine or theirs or ()
        return Moments(*(a + b for a, b in zip(self.parts(), other.parts())), *both)

    @property
    def share(self) -> float:
        """``Σt / Σe``."""
        if self._parts is None and len(self._pairs[0]) == 1:
            (t,), (e,) = self._pairs  # division rounds as the exact quotient does
            if not t and e < 1e200:
                return 0.0 if e else nan
            if isinstance(t, int) and isinstance(e, int):
                return t / e if e else nan
            if 1e-200 < e < 1e200 and 1e-100 * e < t <= e:
                return t / e
        return float(self.t / self.e) if self.e else nan

    def error(self, pairs: int) -> float:
        """The standard error of the share: over losses, as of a ratio estimator, and of the sample
        of elements, if not all were counted; nan if there is one loss and no sample.

        Every loss has a sample of its own, so that what differs between losses includes the error
        of their samples. It is too uncertain if losses are few, and 0 for a rare component: so the
        larger of the two is taken.

        Args:
            pairs: Number of losses that were counted.

        Returns:
            The standard error.
        """
        t, e, tt, te, ee = self.parts()
        if not e:
            return nan
        share, found = t / e, list[float]()
        if pairs > 1:
            residual = tt - 2 * share * te + share * share * ee
            found.append(max(0.0, float(residual * pairs / (pairs - 1) / e**2)))
        if self.sampling is not None:
            found.append(self.sampling.of_share(share, e))
        return sqrt(max(found)) if found else nan


def _summed(through: Sequence[float], eligible: Sequence[float], unit: int) -> tuple[Fraction, ...]:
    """Σt, Σe, Σt², Σte, Σe² in units of ``2**unit``, exact: integers over a common power of two."""
    ratios = [x.as_integer_ratio() for x in (*through, *eligible)]
    power = max((below.bit_length() for _, below in ratios), default=1) - 1
    whole = [above << (power + 1 - below.bit_length()) for above, below in ratios]
    t, e = whole[: len(through)], whole[len(through) :]
    one, two = unit - power, 2 * (unit - power)
    return (
        in_units(sum(t), one),
        in_units(sum(e), one),
        in_units(sum(x * x for x in t), two),
        in_units(sum(x * y for x, y in zip(t, e)), two),
        in_units(sum(y * y for y in e), two),
    )


def in_units(number: int, power: int) -> Fraction:
    """``number · 2**power``."""
    return Fraction(number << power) if power >= 0 else Fraction(number, 1 << -power)


def loss_count(losses: int) -> str:
    """How many losses a table is over, in words.

    >>> loss_count(1), loss_count(1200)
    ('1 loss', '1,200 losses')
    """
    return "1 loss" if losses == 1 else f"{losses:,} losses"


def as_float(number: Fraction) -> float:
    """The nearest float; infinite beyond their range."""
    try:
        return float(number)
    except OverflowError:
        return inf


NOTHING = Moments()


# Samples of elements ------------------------------------------------------------------------------


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
    return Fraction(float(f"{x:.7g}")) if isfinite(x) else Fraction(0)


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
