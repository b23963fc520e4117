"""``Moments``: exact sums over pairs, from which a share and its standard error follow."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import inf, nan, sqrt


class Moments:
    """Sums over pairs of ``through`` (t) and ``eligible`` (e): Σt, Σe, Σt², Σte, Σe², exact.

    Float sums depend on their order; fractions do not, so merging parts in any order gives the
    same bits. The fractions are computed lazily, as most rows of most tables are never read.
    """

    __slots__ = ("_pairs", "_parts", "_power")

    def __init__(
        self,
        t: Fraction = Fraction(0),
        e: Fraction = Fraction(0),
        tt: Fraction = Fraction(0),
        te: Fraction = Fraction(0),
        ee: Fraction = Fraction(0),
    ) -> None:
        self._parts: tuple[Fraction, ...] | None = (t, e, tt, te, ee)
        self._pairs: tuple[Sequence[float], Sequence[float]] = ((), ())
        self._power = 0

    @classmethod
    def of(cls, through: float, eligible: float) -> Moments:
        """The moments of one pair."""
        return cls.over((float(through),), (float(eligible),))

    @classmethod
    def over(cls, through: Sequence[float], eligible: Sequence[float]) -> Moments:
        """The moments of many pairs."""
        return cls.whole(through, eligible, 0)

    @classmethod
    def whole(cls, through: Sequence[float], eligible: Sequence[float], power: int) -> Moments:
        """The moments of many pairs, given in units of ``2**power``; whole numbers may have any
        size.
        """
        found = cls.__new__(cls)
        found._parts, found._pairs, found._power = None, (through, eligible), power
        return found

    @property
    def through(self) -> Sequence[float]:
        """``t`` of each pair, of moments that were made by ``over``."""
        return self._pairs[0]

    def parts(self) -> tuple[Fraction, ...]:
        """The five sums."""
        if self._parts is None:
            self._parts = _summed(*self._pairs, self._power)
        return self._parts

    @property
    def t(self) -> Fraction:
        """``Σt``."""
        return self.parts()[0]

    @property
    def e(self) -> Fraction:
        """``Σe``."""
        return self.parts()[1]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Moments) and self.parts() == other.parts()

    def __hash__(self) -> int:
        return hash(self.parts())

    def __repr__(self) -> str:
        through, eligible = map(_rounded, (self.t, self.e))
        return f"Moments(through={through:.6g}, eligible={eligible:.6g}, share={self.share:.4g})"

    def __add__(self, other: Moments) -> Moments:
        return Moments(*(a + b for a, b in zip(self.parts(), other.parts())))

    @property
    def share(self) -> float:
        """``Σt / Σe``."""
        if self._parts is None and len(self._pairs[0]) == 1:
            (t,), (e,) = self._pairs  # division rounds as the exact quotient does
            if isinstance(t, int) and isinstance(e, int):
                return t / e if e else nan
            if 1e-200 < e < 1e200 and 1e-100 * e < t <= e:
                return t / e
        return float(self.t / self.e) if self.e else nan

    def error(self, pairs: int) -> float:
        """The standard error of the share over pairs, as of a ratio estimator."""
        t, e, tt, te, ee = self.parts()
        if pairs < 2 or not e:
            return nan
        share = t / e
        residual = tt - 2 * share * te + share * share * ee
        return sqrt(max(0.0, float(residual * pairs / (pairs - 1) / e**2)))


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


def _rounded(number: Fraction) -> float:
    try:
        return float(number)
    except OverflowError:
        return inf


NOTHING = Moments()
