"""Values in the range of floats, however deep the graph is: each with a power of two beside it.

``Rescaling`` reads the largest element of every value. On a GPU that would wait for all queued
work at each step, so ``DeferredRescaling`` leaves powers of two on the device: it divides by them
every few steps, and afterwards says whether all values between were in range.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from math import frexp, isfinite
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from gradtrace.kernels import backend_of, fetch_scalars
from gradtrace.semirings import Abs, Semiring, Value

RESCALE_EXPONENT = 24
"""Values are rescaled to a largest entry near 1 when it is above 2**this or below 2**-this."""

DEFERRED_STEPS, DEFERRED_STEPS_ALONE = 20, 5
"""A value is rescaled, unread, after so many maps that are not moves; after fewer if no other is in
use, to which it would have to be aligned when they meet.
"""

WATCHED_VALUES, WATCHED_BYTES = 32, 1 << 27
"""How many values, and bytes of them, are kept at most until their largest elements are found."""

EXPONENT_BITS = {
    torch.float32: (torch.int32, 0x7F80_0000, 48),
    torch.float64: (torch.int64, 0x7FF0_0000_0000_0000, 400),
}
"""Of a dtype: integers of its size, the bits of its exponent, and which powers of two largest
elements may have so that their products, summed, are in range.
"""

Result = TypeVar("Result")


class ScaledValue(NamedTuple):
    """``value · 2**exponent``. Deep graphs leave the range of floats; scaling by powers of two is
    exact.

    ``powers`` are the numbers of further powers of two, that are on the device; ``age`` is the
    number of maps since the last of them.
    """

    value: Value
    exponent: int
    powers: tuple[int, ...] = ()
    age: int = 0


class Rescaling:
    """Values with known exponents, rescaled as soon as they need it."""

    def __init__(self, semiring: Semiring) -> None:
        self.semiring = semiring

    def balanced(self, held: ScaledValue, alone: bool = False) -> ScaledValue:
        """The same value rescaled to a largest entry near 1, if it was outside the range of
        ``RESCALE_EXPONENT``. Zero and non-finite values are returned as they are. ``alone`` says
        that no other value is in use.
        """
        size = self.semiring.size(held.value)
        power = frexp(size)[1]
        if abs(power) <= RESCALE_EXPONENT or not size or not isfinite(size):
            return held
        scaled = self.semiring.scale(held.value, -power)
        return held._replace(value=scaled, exponent=held.exponent + power)

    def aligned(self, held: Sequence[ScaledValue]) -> list[ScaledValue]:
        """The same values, all with the same exponent."""
        most = max(each.exponent for each in held)
        return [
            each
            if each.exponent == most
            else each._replace(
                value=self.semiring.scale(each.value, each.exponent - most), exponent=most
            )
            for each in held
        ]

    def plus(self, a: ScaledValue, b: ScaledValue) -> ScaledValue:
        """``a ⊕ b``."""
        a, b = self.aligned((a, b))
        return a._replace(value=self.semiring.plus(a.value, b.value), age=max(a.age, b.age))

    def one(self, powers: tuple[int, ...], like: Tensor) -> Tensor:
        """What stands for the semiring's one in a value with these powers."""
        return like.new_full((), self.semiring.one[0])

    def exponents(self) -> list[int]:
        """The powers of two that values refer to by number."""
        return []

    def in_range(self, results: Sequence[float]) -> bool:
        """Whether no value has left the range of its dtype on the way to these results."""
        return True


class DeferredRescaling(Rescaling):
    """Values whose powers of two stay on the device, for semirings with values of one part that
    are at least 0. Nothing is read before ``exponents`` and ``in_range``.
    """

    def __init__(self, semiring: Semiring) -> None:
        super().__init__(semiring)
        self._powers: list[Tensor] = []
        self._products: dict[tuple[int, ...], Tensor] = {}
        self._ones: dict[tuple[int, ...], Tensor] = {}
        self._watched: list[Tensor] = []
        self._bytes = 0
        self._sizes: list[tuple[Tensor, int]] = []

    def balanced(self, held: ScaledValue, alone: bool = False) -> ScaledValue:
        """The same value, divided by the power of two of its largest element if it is due."""
        (x,) = held.value
        if not held.age or not x.numel():
            return held
        if held.age < (DEFERRED_STEPS_ALONE if alone else DEFERRED_STEPS):
            self._watch(x)
            return held
        size = x.amax()
        whole, bits, range_ = EXPONENT_BITS[x.dtype]
        self._sizes.append((size, range_))
        power = size.view(whole).bitwise_and(bits).view(x.dtype).clamp(min=2.0**-range_)
        return held._replace(value=(x / power,), powers=(*held.powers, self._number(power)), age=0)

    def aligned(self, held: Sequence[ScaledValue]) -> list[ScaledValue]:
        """The same values, all with the same powers."""
        long = max((each.powers for each in held), key=len)
        if all(each.powers == long[: len(each.powers)] for each in held):
            return [self._lowered(each, long) for each in held]
        numbers = zip(*(each.powers for each in held))
        same = sum(1 for _ in takewhile(lambda n: len(set(n)) == 1, numbers))
        own = [self._product(each.powers[same:], each.value[0]) for each in held]
        most = torch.stack(own).amax()
        powers = (*long[:same], self._number(most))
        return [
            each._replace(value=(each.value[0] * (power / most).to(each.value[0].dtype),),
                          powers=powers)
            for each, power in zip(held, own)
        ]  # fmt: skip

    def _lowered(self, held: ScaledValue, powers: tuple[int, ...]) -> ScaledValue:
        """A value with further powers, by which it is divided."""
        if held.powers == powers:
            return held
        (x,) = held.value
        return held._replace(
            value=(x / self._product(powers[len(held.powers) :], x),), powers=powers
        )

    def one(self, powers: tuple[int, ...], like: Tensor) -> Tensor:
        """What stands for 1 in a value with these powers."""
        if powers not in self._ones:
            one = self._product(powers, like).reciprocal() if powers else like.new_ones(())
            self._ones[powers] = one.to(like.dtype)
        return self._ones[powers].to(like.device)

    def _product(self, numbers: tuple[int, ...], like: Tensor) -> Tensor:
        found = self._products.get(numbers)
        if found is None:
            last = self._powers[numbers[-1]].double()
            found = self._product(numbers[:-1], like) * last if numbers[1:] else last
            self._products[numbers] = found
        return found.to(like.device)

    def _number(self, power: Tensor) -> int:
        self._powers.append(power)
        return len(self._powers) - 1

    def _watch(self, x: Tensor) -> None:
        """Find the largest element later, together with those of others."""
        self._watched.append(x)
        self._bytes += x.numel() * x.itemsize
        if len(self._watched) == WATCHED_VALUES or self._bytes > WATCHED_BYTES:
            self._measure()

    def _measure(self) -> None:
        for dtype, (_, _, range_) in EXPONENT_BITS.items():
            some = [x for x in self._watched if x.dtype is dtype]
            if some:
                sizes = torch._foreach_norm(some, float("inf"))
                self._sizes += [(size, range_) for size in sizes]
        self._watched, self._bytes = [], 0

    def exponents(self) -> list[int]:
        """The powers of two that values refer to by number; reads them."""
        return [frexp(power)[1] - 1 for power in fetch_scalars(self._powers)]

    def in_range(self, results: Sequence[float]) -> bool:
        """Whether these are finite, and all values on the way had largest elements that allow for
        products and sums; reads these.
        """
        self._measure()
        if not all(map(isfinite, results)):
            return False
        sizes = fetch_scalars([size for size, _ in self._sizes])
        limits = (2.0**range_ for _, range_ in self._sizes)
        return all(not size or 1 / most <= size <= most for size, most in zip(sizes, limits))


def rescaled(
    semiring: Semiring, like: Tensor, compute: Callable[[Rescaling], Result | None]
) -> Result:
    """The result of ``compute``, which is None if values have left the range of floats. Where
    reading would synchronise it is tried without, and then with.
    """
    found = None
    if isinstance(semiring, Abs) and backend_of(like).synchronises:
        found = compute(DeferredRescaling(semiring))
    if found is None:
        found = compute(Rescaling(semiring))
    assert found is not None
    return found
