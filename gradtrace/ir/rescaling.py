"""Values in the range of floats, however deep the graph is: each with a power of two beside it.

``Rescaling`` reads the largest element of every value. On a GPU that would wait for all queued
work at each step, so ``DeferredRescaling`` leaves powers of two on the device: it divides by them
every few steps, and afterwards says whether all values between were in range.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import frexp, inf, isfinite
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from gradtrace.ir.program import Program
from gradtrace.kernels import backend_of
from gradtrace.kernels.strides import is_dense, without_repetition
from gradtrace.linops.indexing import nearby
from gradtrace.semirings import Abs, Semiring, Value

RESCALE_EXPONENT = 24
"""Values are rescaled to a largest entry near 1 when it is above 2**this or below 2**-this."""

DEFERRED_STEPS, DEFERRED_STEPS_ALONE = 40, 20
"""A value is rescaled, unread, after so many maps that are not moves; after fewer if no other is in
use, to which it would have to be aligned when they meet.
"""

TRIED_OFTEN = (1, 2, 8)
"""Where values have left their range, they are rescaled so many times as often, one after the
other, before they are read one by one.
"""

WATCHED_ELEMENTS = 1 << 16
"""Of larger values so many elements are looked at, in one piece: if the largest of these is not too
small, that of all is not; and what is too large becomes infinite, and stays so. Where such a piece
is 0, which tells nothing, values are looked at as a whole.
"""

WAITING_VALUES, WAITING_BYTES = 96, 1 << 29
"""How many values, and bytes of them, are kept at most until their norms are computed together."""

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


@dataclass(slots=True)
class Scalar:
    """``value · 2**exponent``, on the device; ``powers`` as in ``ScaledValue``. The value may be
    computed later, and is there after ``Rescaling.flush``.
    """

    value: Tensor | None
    exponent: int
    powers: tuple[int, ...] = ()


class UnreadScales(NamedTuple):
    """Tensors of one element that are still on the device: the powers of two that values refer to
    by number, and the largest elements of values, each of which has its ``limits``.
    """

    powers: Sequence[Tensor]
    sizes: Sequence[Tensor]
    limits: tuple[SizeLimit, ...]


class SizeLimit(NamedTuple):
    """The largest that the largest element may be, its inverse the smallest; it may be 0 unless
    only a ``part`` of the value was looked at.
    """

    most: float
    part: bool = False

    def holds(self, size: float) -> bool:
        """Whether a largest element is in range."""
        return 1 / self.most <= size <= self.most if size or self.part else True


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
        if a.powers != b.powers or a.exponent != b.exponent:
            a, b = self.aligned((a, b))
        value, age = self.semiring.plus(a.value, b.value), max(a.age, b.age)
        return ScaledValue(value, a.exponent, a.powers, age)

    def total(self, held: ScaledValue) -> Scalar:
        """``⊕`` over all elements."""
        (found,) = self.semiring.fold((held.value[0].reshape(-1),), 0)
        return Scalar(found, held.exponent, held.powers)

    def inner(self, a: ScaledValue, b: ScaledValue) -> Scalar:
        """``⊕`` over the products of all elements."""
        product = self.semiring.times(a.value, b.value)
        return self.total(ScaledValue(product, a.exponent + b.exponent, a.powers + b.powers))

    def flush(self) -> None:
        """Compute what is not yet."""

    def one(self, powers: tuple[int, ...], like: Tensor) -> Tensor:
        """What stands for the semiring's one in a value with these powers."""
        return like.new_full((), self.semiring.one[0])

    def unread(self) -> UnreadScales:
        """What tells the exponents of values, and whether all were in range."""
        return UnreadScales([], [], ())


class DeferredRescaling(Rescaling):
    """Values whose powers of two stay on the device, for semirings with values of one part that
    are at least 0. Nothing is read: see ``unread``.
    """

    def __init__(self, semiring: Semiring, often: int = 1, parts: bool = False) -> None:
        super().__init__(semiring)
        self.parts = parts  # of large values only a part is looked at
        self.steps = max(1, DEFERRED_STEPS // often)
        self.steps_alone = max(1, DEFERRED_STEPS_ALONE // often)
        self._powers: list[Tensor] = []
        self._inverses: dict[tuple[int, ...], Tensor] = {}
        self._ones: dict[tuple[int, ...], Tensor] = {}
        self._summed, self._watched = _Norms(1.0), _Norms(inf)
        self._sizes: list[tuple[Scalar, SizeLimit]] = []

    def balanced(self, held: ScaledValue, alone: bool = False) -> ScaledValue:
        """The same value, divided by the power of two of its largest element if it is due."""
        (x,) = held.value
        if not held.age or not x.numel():
            return held
        whole, bits, range_ = EXPONENT_BITS[x.dtype]
        seen = Scalar(None, 0)
        if held.age < (self.steps_alone if alone else self.steps):
            part = self.parts and x.numel() > WATCHED_ELEMENTS and is_dense(x)
            self._sizes.append((seen, SizeLimit(2.0**range_, part)))
            self._watched.append(seen, _middle(x) if part else without_repetition(x))
            return held
        self._sizes.append((seen, SizeLimit(2.0**range_)))
        seen.value = size = x.amax()
        power = size.view(whole).bitwise_and(bits).view(x.dtype).clamp(min=2.0**-range_)
        return held._replace(value=(x / power,), powers=(*held.powers, self._number(power)), age=0)

    def aligned(self, held: Sequence[ScaledValue]) -> list[ScaledValue]:
        """The same values, all with the same powers."""
        long = max((each.powers for each in held), key=len)
        if all(each.powers == long[: len(each.powers)] for each in held):
            return [self._lowered(each, long) for each in held]
        numbers = zip(*(each.powers for each in held))
        same = sum(1 for _ in takewhile(lambda n: len(set(n)) == 1, numbers))
        own = [self._inverse(each.powers[same:]) for each in held]
        least = torch.stack(own).amin()
        powers = (*long[:same], self._number(1 / least))
        return [
            each._replace(value=(x * nearby(least / inverse, x.device),), powers=powers)
            for each, inverse in zip(held, own)
            for x in each.value
        ]

    def _lowered(self, held: ScaledValue, powers: tuple[int, ...]) -> ScaledValue:
        """A value with further powers, by which it is divided."""
        if held.powers == powers:
            return held
        (x,) = held.value
        inverse = nearby(self._inverse(powers[len(held.powers) :]), x.device)
        return held._replace(value=(x * inverse,), powers=powers)

    def _inverse(self, numbers: tuple[int, ...]) -> Tensor:
        """``2**-n``, n being the sum of these powers' exponents; in float64, where it may be 0."""
        found = self._inverses.get(numbers)
        if found is None:
            if numbers:
                before = self._inverse(numbers[:-1])
                found = before / nearby(self._powers[numbers[-1]], before.device)
            else:
                found = self._powers[0].new_ones((), dtype=torch.float64)
            self._inverses[numbers] = found
        return found

    def total(self, held: ScaledValue) -> Scalar:
        """``⊕`` over all elements, later, together with those of others."""
        if not held.value[0].numel():
            return super().total(held)
        found = Scalar(None, held.exponent, held.powers)
        self._summed.append(found, held.value[0])
        return found

    def inner(self, a: ScaledValue, b: ScaledValue) -> Scalar:
        """``⊕`` over the products of all elements, later, together with those of others."""
        (x,), (y,) = a.value, b.value
        alike = x.shape == y.shape and x.stride() == y.stride() and x.dtype is y.dtype
        if not alike or not x.numel() or not is_dense(x):
            return super().inner(a, b)
        found = Scalar(None, a.exponent + b.exponent, a.powers + b.powers)
        self._summed.append(found, x, y)
        return found

    def one(self, powers: tuple[int, ...], like: Tensor) -> Tensor:
        """What stands for 1 in a value with these powers."""
        if powers not in self._ones:
            one = self._inverse(powers) if powers else like.new_ones(())
            self._ones[powers] = one.to(like.dtype)
        return nearby(self._ones[powers], like.device)

    def _number(self, power: Tensor) -> int:
        self._powers.append(power)
        return len(self._powers) - 1

    def flush(self) -> None:
        """Compute the totals and largest elements that were put off."""
        self._summed.flush()
        self._watched.flush()

    def unread(self) -> UnreadScales:
        """What tells the exponents of values, and whether all were in range."""
        self.flush()
        sizes = [size.value for size, _ in self._sizes if size.value is not None]
        return UnreadScales(self._powers, sizes, tuple(most for _, most in self._sizes))


def _middle(x: Tensor) -> Tensor:
    """``WATCHED_ELEMENTS`` of a dense tensor."""
    first = x.storage_offset() + (x.numel() - WATCHED_ELEMENTS) // 2
    return x.as_strided((WATCHED_ELEMENTS,), (1,), first)


class _Norms:
    """Norms of many tensors whose elements are at least 0, or of products of two, computed some at
    a time: each would be a launch of its own.
    """

    def __init__(self, order: float) -> None:
        self.order = order
        self._waiting: list[tuple[Scalar, Tensor, Tensor | None]] = []
        self._bytes = 0

    def append(self, result: Scalar, x: Tensor, y: Tensor | None = None) -> None:
        """Write the norm of x, or of x·y, which are dense and of one layout, to a scalar, by the
        next ``flush`` at the latest.
        """
        self._waiting.append((result, x, y))
        self._bytes += (
            min(x.untyped_storage().nbytes(), WAITING_BYTES)
            if y is None
            else (2 * x.numel() * x.itemsize)
        )
        if len(self._waiting) >= WAITING_VALUES or self._bytes > WAITING_BYTES:
            self.flush()

    def flush(self) -> None:
        """Compute what is waiting."""
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        by_kind: dict[tuple[torch.dtype, torch.device, bool], list[Any]] = {}
        for result, x, y in waiting:
            dense = y is not None or is_dense(x)
            by_kind.setdefault((x.dtype, x.device, dense), []).append((result, x, y))
        for (_, _, dense), some in by_kind.items():
            products = [(x, y) for _, x, y in some if y is not None]
            multiplied = iter(torch._foreach_mul(*zip(*products)) if products else ())
            tensors = [x if y is None else next(multiplied) for _, x, y in some]
            for (result, _, _), norm in zip(some, self._norms(tensors, dense)):
                result.value = norm

    def _norms(self, tensors: list[Tensor], dense: bool) -> Sequence[Tensor]:
        """One launch for all, if they are dense: one with gaps, or with repeated elements, and each
        takes a launch of its own.
        """
        if dense and not backend_of(tensors[0]).host:
            return torch._foreach_norm(tensors, self.order)
        # on a host a norm is summed one by one, and rounds as often
        return [x.sum() if self.order == 1 else x.amax() for x in tensors]


def rescaled(
    semiring: Semiring, program: Program, compute: Callable[[Rescaling], Result | None]
) -> Result:
    """The result of ``compute``, which is None if values have left the range of floats. Where
    reading would synchronise it is tried without, ever more often, and then with. The next program
    of the same structure begins with what was right for this one.
    """
    if isinstance(semiring, Abs) and backend_of(program.seed).synchronises:
        tried = program.facts.rescaled_often
        ways = [(TRIED_OFTEN[0], True), *((often, False) for often in TRIED_OFTEN)]
        for n in range(tried.get(semiring.p, 0), len(ways)):
            tried[semiring.p] = n
            rescaling = DeferredRescaling(semiring, *ways[n])
            found = compute(rescaling)
            if found is not None:
                return found
    found = compute(Rescaling(semiring))
    assert found is not None
    return found
