"""Semirings whose ⊕ adds part by part: gradient, path mass, path count, entropy; and the same as
logarithms (``LogAbs``), or with weights made once for many products (``LiftedAbs``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf, log

import torch
from torch import Tensor

from gradtrace.errors import GradtraceError, OutOfRange
from gradtrace.kernels import backend_of
from gradtrace.kernels.precision import exact
from gradtrace.kernels.strides import is_dense
from gradtrace.semirings.base import (
    UNTARGETED,
    Piece,
    Semiring,
    Value,
    each,
    places,
    shifted,
    wide,
)
from gradtrace.semirings.einsum_plan import plan, sum_weight_only_letters


class Additive(Semiring):
    """⊕ adds part by part, so sums, scans and matrix products use PyTorch's own kernels."""

    def plus(self, a: Value, b: Value) -> Value:
        return (a[0] + b[0],) if len(a) == 1 else tuple(x + y for x, y in zip(a, b))

    def fold(self, x: Value, dim: int) -> Value:
        return each(x, lambda part: part.sum(dim))

    def reduce(self, x: Value, dims: Sequence[int]) -> Value:
        return each(x, lambda part: part.sum(tuple(dims), keepdim=True)) if dims else x

    def scatter(self, x: Value, target: Tensor, size: int) -> Value:
        place, many = places(target, size), size + UNTARGETED
        return each(x, lambda p: p.new_zeros(many).index_add(0, place, p)[:size])

    def scan(self, x: Value, dim: int) -> Value:
        return each(x, lambda part: part.cumsum(dim))

    def contract(self, spec: str, x: Value, weight: Tensor) -> Value:
        spec, weight = sum_weight_only_letters(spec, weight)
        pieces = self.linear(weight)
        assert pieces is not None
        out: dict[int, Tensor] = {}
        for i, o, w in pieces:
            part = self.product(spec, x[i], w.to(x[i].dtype))
            out[o] = out[o] + part if o in out else part
        return tuple(out[o] for o in sorted(out))

    def product(self, spec: str, x: Tensor, weight: Tensor) -> Tensor:
        """An einsum in full float32 precision, without TF32."""
        how = plan(spec, tuple(x.shape), tuple(weight.shape))  # torch.einsum makes it every time
        with exact(x):
            return how.back(torch.bmm(how.left(x), how.right(weight)))

    def linear(self, weight: Tensor) -> list[Piece] | None:
        return [(0, 0, self.weigh(weight)[0])]

    def size(self, x: Value) -> float:
        return float(x[0].abs().amax()) if x[0].numel() else 1.0

    def scale(self, x: Value, shift: int) -> Value:
        return each(x, lambda part: shifted(part, shift))


@dataclass(frozen=True)
class Sum(Additive):
    """(+, ×): the gradient itself, in the gradient's own dtype.

    >>> SUM.times((torch.tensor(2.0),), SUM.lift(torch.tensor(-3.0)))
    (tensor(-6.),)
    """

    name: str = "SUM"
    zero: tuple[float, ...] = (0.0,)
    one: tuple[float, ...] = (1.0,)

    def lift(self, weight: Tensor) -> Value:
        return (weight,)

    def times(self, a: Value, b: Value) -> Value:
        return (a[0] * b[0],)

    def weigh(self, weight: Tensor) -> Value:
        return (weight,)

    def product(self, spec: str, x: Tensor, weight: Tensor) -> Tensor:
        return torch.einsum(spec, x, weight)  # as PyTorch's backward computes it, including TF32

    def settle(self, x: Value, dtype: torch.dtype) -> Value:
        return (x[0].to(dtype),)

    def size(self, x: Value) -> float:
        return 1.0  # never rescaled: as PyTorch's backward computes it, including underflow


@dataclass(frozen=True)
class Abs(Additive):
    """(+, ×) on powers of absolute values: ``Σ |weight|**p`` over the paths, their total mass.

    For ``p = 1`` it is much larger than the gradient where paths cancel. The larger p, the more the
    heaviest path counts; powers other than 1 are computed in float64.

    Args:
        log: Whether values are base-2 logarithms, which do not overflow.
        p: Power of the weights.

    >>> ABS.lift(torch.tensor(-3.0))
    (tensor(3.),)
    >>> Abs(p=2).lift(torch.tensor(-3.0))
    (tensor(9.),)
    """

    log: bool = False
    name: str = "ABS"
    zero: tuple[float, ...] = (0.0,)
    one: tuple[float, ...] = (1.0,)
    p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.p < inf:
            raise GradtraceError(
                f"p is a positive number, not {self.p!r}"
                + ("; for the heaviest path alone take MAX" if self.p == inf else "")
            )
        if self.p != 1 and self.name == "ABS":
            object.__setattr__(self, "name", f"ABS**{self.p:g}")

    def lift(self, weight: Tensor) -> Value:
        if self.p == 1:
            return (weight.abs(),)
        return (weight * weight if self.p == 2 else weight.abs().pow(self.p),)

    def weigh(self, weight: Tensor) -> Value:
        if self.p != 1:
            return self.lift(weight.double())
        return (wide(weight if weight.dtype is torch.bool else weight.abs()),)

    def times_weight(self, x: Value, weight: Tensor) -> Value:
        if self.p != 1 or x[0].dtype not in (torch.float32, torch.float64):
            return super().times_weight(x, weight)
        if weight.dtype is torch.bool:
            return (x[0] * weight,)
        return (x[0] * weight.abs(),)  # a half-precision weight is widened on the way

    def plus_times(self, a: Value, b: Value, c: Value) -> Value:
        if not a[0].dtype is b[0].dtype is c[0].dtype:
            return super().plus_times(a, b, c)
        return (torch.addcmul(a[0], b[0], c[0]),)

    def weight_sums(self, weight: Tensor, dims: Sequence[int]) -> Value:
        floating = weight.is_floating_point() and weight.numel()
        if self.p != 1 or not dims or not floating or backend_of(weight).host:
            return super().weight_sums(weight, dims)  # there a norm is summed one by one
        dtype = torch.float64 if weight.dtype is torch.float64 else torch.float32
        return (torch.linalg.vector_norm(weight, 1, tuple(dims), keepdim=True, dtype=dtype),)

    def times_number(self, x: Value, number: float) -> Value:
        return (x[0] * abs(number),) if self.p == 1 else super().times_number(x, number)

    def size(self, x: Value) -> float:
        return float(x[0].amax()) if x[0].numel() else 1.0  # no value is negative

    def times(self, a: Value, b: Value) -> Value:
        return (a[0] * b[0],)

    def finish(self, x: Value, exponent: int) -> Value:
        return logarithm(x, exponent) if self.log else super().finish(x, exponent)


@dataclass(frozen=True)
class Count(Additive):
    """(+, ×) on numbers of paths: how many have a weight that is not 0, in float64.

    Args:
        exact: Whether to count in integers; 2⁶³ or more is an error.
        log: Whether values are base-2 logarithms, which do not overflow.

    >>> COUNT.lift(torch.tensor([-3.0, 0.0]))
    (tensor([1., 0.], dtype=torch.float64),)
    """

    exact: bool = False
    log: bool = False
    name: str = "COUNT"
    zero: tuple[float, ...] = (0.0,)
    one: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if self.exact:  # (count modulo 2⁶⁴, count in float64 to detect an overflow of the first)
            object.__setattr__(self, "zero", (0.0, 0.0))
            object.__setattr__(self, "one", (1.0, 1.0))

    def lift(self, weight: Tensor) -> Value:
        there = weight != 0
        return (there.long(), there.double()) if self.exact else (there.double(),)

    def times(self, a: Value, b: Value) -> Value:
        return tuple(x * y for x, y in zip(a, b))

    def linear(self, weight: Tensor) -> list[Piece]:
        return [(n, n, part) for n, part in enumerate(self.lift(weight))]

    def size(self, x: Value) -> float:
        return 1.0 if self.exact else super().size(x)

    def finish(self, x: Value, exponent: int) -> Value:
        if self.exact:
            if bool(((x[1] >= 2.0**63) | (x[0] < 0)).any()):
                most = float(x[1].max())
                raise OutOfRange(
                    f"there are about {most:.3g} paths, more than a 64-bit number holds; use COUNT "
                    "(float64) or Count(log=True)"
                )
            return x[:1]
        return logarithm(x, exponent) if self.log else super().finish(x, exponent)

    def logs(self) -> str:
        return "Count(log=True)"


@dataclass(frozen=True)
class Entropy(Additive):
    """``(Σ |w|, −Σ |w|·log |w|)`` over the paths; 0·log 0 = 0.

    ``ENTROPY.entropy(value)`` is the entropy, in nats, of the distribution that gives each path a
    probability proportional to |weight|: 0 if one path has all of it, log n for n equal paths.

    >>> value = ENTROPY.plus(ENTROPY.lift(torch.tensor(0.5)), ENTROPY.lift(torch.tensor(-0.5)))
    >>> ENTROPY.entropy(value)
    tensor(0.6931)
    """

    name: str = "ENTROPY"
    zero: tuple[float, ...] = (0.0, 0.0)
    one: tuple[float, ...] = (1.0, 0.0)

    def lift(self, weight: Tensor) -> Value:
        mass = weight.abs()
        return mass, -torch.xlogy(mass, mass)

    def times(self, a: Value, b: Value) -> Value:
        return a[0] * b[0], a[0] * b[1] + a[1] * b[0]

    def linear(self, weight: Tensor) -> list[Piece]:
        mass, spread = self.weigh(weight)
        return [(0, 0, mass), (1, 1, mass), (0, 1, spread)]

    def scale(self, x: Value, shift: int) -> Value:
        mass, spread = shifted(x[0], shift), shifted(x[1], shift)
        return mass, spread - mass * (shift * 0.6931471805599453)

    def sized(self, x: Value) -> Value:
        return x[:1]

    def entropy(self, value: Value) -> Tensor:
        """``log Z + R / Z`` of a value (Z, R); 0 where there is no path.

        Args:
            value: A pair (Z, R) of this semiring.

        Returns:
            The entropy of each element, in nats.
        """
        mass, spread = value
        there = mass > 0
        safe = torch.where(there, mass, 1.0)
        return torch.where(there, safe.log() + spread / safe, 0.0)


def logarithm(x: Value, exponent: int) -> Value:
    """``log2(x) + exponent``, in float64; -inf where there is no path."""
    return each(x, lambda part: wide(part).double().log2() + exponent)


SUM = Sum()
ABS = Abs()
COUNT = Count()
ENTROPY = Entropy()


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


FLOATS = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})


@dataclass(frozen=True)
class LiftedAbs(Abs):
    """``ABS`` for a program that is run more than once: ``known`` has the absolute values of
    weights, by their id. Each is beside its weight, which it keeps alive.
    """

    known: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, weights: Iterable[Tensor], most: int) -> LiftedAbs:
        """The semiring that knows these weights, or the smallest of them, of ``most`` bytes."""
        unique = {id(w): w for w in weights if w.dtype in FLOATS and w.dim() and is_dense(w)}
        by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for weight in sorted(unique.values(), key=lambda w: w.numel() * w.itemsize):
            most -= weight.numel() * weight.itemsize
            if most < 0:
                break
            by_kind.setdefault((weight.dtype, weight.device), []).append(weight)
        found = cls()
        for some in by_kind.values():
            lifted = torch._foreach_abs(some)
            found.known.update({id(w): (w, abs_) for w, abs_ in zip(some, lifted)})
        return found

    def _lifted(self, weight: Tensor) -> Tensor:
        """``|weight|``, in its own dtype."""
        pair = self.known.get(id(weight))
        if pair is not None:
            return pair[1]
        return weight if weight.dtype is torch.bool else weight.abs()

    def weigh(self, weight: Tensor) -> Value:
        return (wide(self._lifted(weight)),)

    def times_weight(self, x: Value, weight: Tensor) -> Value:
        return (x[0] * self._lifted(weight),)  # a half-precision weight is widened on the way

    def contract(self, spec: str, x: Value, weight: Tensor) -> Value:
        spec, weight = sum_weight_only_letters(spec, weight)
        (given,), lifted = x, self._lifted(weight)
        how = plan(spec, given.shape, lifted.shape)
        left, right = how.left(given), how.right(lifted)
        if right.dtype is left.dtype:
            with exact(left):
                if how.turned:  # written as it is read later: strided sums take twice as long
                    turned = torch.bmm(right.mT, left.mT)
                    return (torch.reshape(turned, [how.sizes[c] for c in how.out]),)
                return (how.back(torch.bmm(left, right)),)
        return (how.back(backend_of(left).widened_product(left, right)),)
