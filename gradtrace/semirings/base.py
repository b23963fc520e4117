"""Base class of semirings, with default implementations of all operations derived from ⊕ and ⊗."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from gradtrace.errors import OutOfRange
from gradtrace.semirings.einsum_plan import plan

Value: TypeAlias = tuple[Tensor, ...]
"""A semiring value for every element of a cotangent: a tensor of its shape for each part."""

Piece: TypeAlias = tuple[int, int, Tensor]
"""``(i, o, w)``: part o of the result is a sum with weights w over part i of the input."""

CHUNK_PRODUCTS = 1 << 20
"""The most products that are materialised at a time."""


NARROW = frozenset({torch.float16, torch.bfloat16, torch.bool})
"""Dtypes that are computed in float32."""


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.to(dtype)``, skipped if not needed: even a no-op ``to`` has a measurable overhead."""
    return x if x.dtype is dtype else x.to(dtype)


def wide(x: Tensor) -> Tensor:
    """The tensor in float32 if it is half precision or bool, else as it is."""
    return x.float() if x.dtype in NARROW else x


class Semiring(ABC):
    """(⊕, ⊗) with their neutral elements, and ``lift``, which turns a derivative into a value.

    To define your own, write a frozen dataclass with ``name``, ``zero``, ``one`` (a number for each
    part of a value), ``lift``, ``plus`` and ``times``; ``gradtrace.testing.check_semiring`` checks
    the laws. Everything else has a default and may be overridden to be faster.

    Args:
        name: What it is called in messages.
        zero: Neutral element of ⊕, a number for each part of a value.
        one: Neutral element of ⊗, likewise.

    >>> from dataclasses import dataclass
    >>> import torch, gradtrace as gt
    >>> @dataclass(frozen=True)
    ... class Votes(gt.semirings.Semiring):
    ...     "How many paths have a positive weight, and how many a negative one."
    ...     name: str = "VOTES"
    ...     zero: tuple[float, ...] = (0.0, 0.0)
    ...     one: tuple[float, ...] = (1.0, 0.0)
    ...     def lift(self, weight):
    ...         return (weight > 0).double(), (weight < 0).double()
    ...     def plus(self, a, b):
    ...         return a[0] + b[0], a[1] + b[1]
    ...     def times(self, a, b):
    ...         return a[0] * b[0] + a[1] * b[1], a[0] * b[1] + a[1] * b[0]
    >>> gt.testing.check_semiring(Votes())
    """

    name: str
    zero: tuple[float, ...]
    one: tuple[float, ...]

    # Required ------------------------------------------------------------------------------------

    @abstractmethod
    def lift(self, weight: Tensor) -> Value:
        """The value of a derivative.

        It must be multiplicative, ``lift(a·b) = lift(a) ⊗ lift(b)``, with ``lift(1) = one`` and
        ``lift(0) = zero``.

        Args:
            weight: Derivatives.

        Returns:
            The values, of the same shape.
        """

    @abstractmethod
    def plus(self, a: Value, b: Value) -> Value:
        """``a ⊕ b``, elementwise.

        Args:
            a: A value.
            b: A value of the same shape.

        Returns:
            A value of that shape.
        """

    @abstractmethod
    def times(self, a: Value, b: Value) -> Value:
        """``a ⊗ b``, elementwise, with broadcasting.

        Args:
            a: A value.
            b: A value that can be broadcast with it.

        Returns:
            Their product.
        """

    # Optional: range and precision ---------------------------------------------------------------

    def size(self, x: Value) -> float:
        """The largest magnitude in a value; 1 if the value cannot be rescaled by ``scale``.

        Args:
            x: A value.

        Returns:
            The magnitude, as a Python number.
        """
        return 1.0

    def scale(self, x: Value, shift: int) -> Value:
        """The value times ``2**shift``.

        Args:
            x: A value.
            shift: Power of two.

        Returns:
            The scaled value.
        """
        raise NotImplementedError(f"{self.name} cannot be scaled")

    def weigh(self, weight: Tensor) -> Value:
        """``lift`` in the precision used for computing: half precision is lifted as float32.

        Args:
            weight: Derivatives.

        Returns:
            The values.
        """
        return self.lift(wide(weight))

    def settle(self, x: Value, dtype: torch.dtype) -> Value:
        """The result of a step, rounded as the semiring wants for a gradient of this dtype.

        Args:
            x: A value.
            dtype: Of the gradient at this place.

        Returns:
            The rounded value.
        """
        return x

    def finish(self, x: Value, exponent: int) -> Value:
        """The value times ``2**exponent``, as it is returned to the caller. Falls back to float64;
        raises OutOfRange if that does not suffice.

        Args:
            x: A value.
            exponent: Power of two.

        Returns:
            The value in range.
        """
        if not exponent:
            return x
        result = self.scale(x, exponent)
        if _left_range(self.sized(x), self.sized(result)):
            x = tuple(part.double() for part in x)
            result = self.scale(x, exponent)
        if _left_range(self.sized(x), self.sized(result)):
            raise OutOfRange(
                f"a value of {self.name} is about 2 to the power {exponent}, outside the range of "
                f"float64; ask for logarithms: gradtrace.semirings.{self.logs()}"
            )
        return result

    def sized(self, x: Value) -> Value:
        """The parts of a value that scale with the weights of paths, and so may leave the range of
        floats.

        Args:
            x: A value.

        Returns:
            These parts.
        """
        return x

    def logs(self) -> str:
        """The semiring that error messages recommend if values leave the range of floats."""
        return "Abs(log=True)"

    def linear(self, weight: Tensor) -> list[Piece] | None:
        """``x ⊗ lift(weight)`` as ordinary weighted sums of parts, if ⊕ adds part by part; else
        None.

        Args:
            weight: Derivatives.

        Returns:
            The pieces, or None.
        """
        return None

    # Derived operations --------------------------------------------------------------------------

    def times_weight(self, x: Value, weight: Tensor) -> Value:
        """``lift(weight) ⊗ x``, elementwise, with broadcasting.

        Args:
            x: A value.
            weight: Derivatives.

        Returns:
            Their product.
        """
        return self.times(self.weigh(weight), x)

    def plus_times(self, a: Value, b: Value, c: Value) -> Value:
        """``a ⊕ b ⊗ c``, with broadcasting.

        Args:
            a: A value.
            b: A value.
            c: A value.

        Returns:
            The result, of the broadcast shape.
        """
        return self.plus(a, self.times(b, c))

    def weight_sums(self, weight: Tensor, dims: Sequence[int]) -> Value:
        """``⊕ lift(weight)`` over dimensions, which are kept with size 1.

        Args:
            weight: Derivatives.
            dims: Dimensions to sum over.

        Returns:
            The sums.
        """
        return self.reduce(self.weigh(weight), dims)

    def times_number(self, x: Value, number: float) -> Value:
        """``lift(number) ⊗ x``.

        Args:
            x: A value.
            number: A derivative that is the same everywhere.

        Returns:
            Their product.
        """
        dtype = x[0].dtype if x[0].is_floating_point() else torch.float64
        weight = torch.full((), number, dtype=dtype, device=x[0].device)  # fill: no host sync
        return self.times(self.weigh(weight), x)

    def zeros(self, shape: Sequence[int], like: Value) -> Value:
        """A value that is ``zero`` everywhere, with the dtypes and device of ``like``.

        Args:
            shape: Of the result.
            like: A value with the dtypes and device.

        Returns:
            The value.
        """
        return tuple(part.new_full(tuple(shape), z) for part, z in zip(like, self.zero))

    def fold(self, x: Value, dim: int) -> Value:
        """``⊕`` over a dimension, which is removed. Combines halves, in log n rounds.

        Args:
            x: A value.
            dim: Dimension to sum over.

        Returns:
            A value with a dimension less.
        """
        n = x[0].shape[dim]
        if not n:
            shape = list(x[0].shape)
            del shape[dim]
            return self.zeros(shape, x)
        while n > 1:
            half = n // 2
            first = tuple(part.narrow(dim, 0, half) for part in x)
            second = tuple(part.narrow(dim, half, half) for part in x)
            both = self.plus(first, second)
            if n % 2:
                last = tuple(part.narrow(dim, n - 1, 1) for part in x)
                both = tuple(torch.cat(pair, dim) for pair in zip(both, last))
            x, n = both, n - half
        return tuple(part.select(dim, 0) for part in x)

    def reduce(self, x: Value, dims: Sequence[int]) -> Value:
        """``⊕`` over dimensions, which are kept with size 1.

        Args:
            x: A value.
            dims: Dimensions to sum over.

        Returns:
            The sums.
        """
        for d in dims:
            x = tuple(part.unsqueeze(d) for part in self.fold(x, d))
        return x

    def scatter(self, x: Value, target: Tensor, size: int) -> Value:
        """``out[i] = ⊕ x[j]`` over the j with ``target[j] = i``; elements with target -1 are
        dropped. ``x`` and ``target`` are 1-d, the result has ``size`` elements.

        Args:
            x: A value.
            target: For each element its place in the result, or -1.
            size: Number of elements of the result.

        Returns:
            The sums.
        """
        order = target.argsort(stable=True)
        order = order[target[order] >= 0]
        target = target[order]
        x = tuple(part[order] for part in x)
        count = torch.bincount(target, minlength=size)
        starts = count.cumsum(0) - count
        rank = torch.arange(len(target), device=target.device) - starts[target]
        step, most = 1, int(count.max()) if size else 0
        while step < most:  # x[j] ⊕= x[j + step] within the elements of one target
            at = ((rank % (2 * step) == 0) & (rank + step < count[target])).nonzero().reshape(-1)
            both = self.plus(tuple(p[at] for p in x), tuple(p[at + step] for p in x))
            x = tuple(part.index_copy(0, at, new) for part, new in zip(x, both))
            step *= 2
        out = self.zeros([size], x)
        first = starts[count > 0]
        at = (count > 0).nonzero().reshape(-1)
        return tuple(o.index_copy(0, at, part[first]) for o, part in zip(out, x))

    def scan(self, x: Value, dim: int) -> Value:
        """Inclusive prefix ``⊕`` along a dimension, in log n rounds.

        Args:
            x: A value.
            dim: Dimension to sum along.

        Returns:
            The partial sums, of the same shape.
        """
        n, step = x[0].shape[dim], 1
        while step < n:
            before = tuple(part.narrow(dim, 0, n - step) for part in x)
            here = tuple(part.narrow(dim, step, n - step) for part in x)
            both = self.plus(before, here)
            x = tuple(
                torch.cat([part.narrow(dim, 0, step), new], dim) for part, new in zip(x, both)
            )
            step *= 2
        return x

    def contract(self, spec: str, x: Value, weight: Tensor) -> Value:
        """An einsum of x and ``lift(weight)`` with ⊗ as product, and ⊕ over the letters that the
        result lacks.

        Args:
            spec: Letters of dimensions, as for ``torch.einsum``: ``"ij,jk->ik"``.
            x: A value.
            weight: Derivatives.

        Returns:
            The contraction.
        """
        how = plan(spec, tuple(x[0].shape), tuple(weight.shape))
        left = each(x, how.left)
        right = self.weigh(how.right(weight))
        b, m, k = left[0].shape
        n = right[0].shape[-1]
        columns = max(1, CHUNK_PRODUCTS // max(1, b * k))
        rows = max(1, columns // max(1, n))
        out = []
        for i in range(0, m, rows):
            row = []
            some = tuple(part[:, i : i + rows, :, None] for part in left)
            for j in range(0, n, columns):
                w = tuple(part[:, None, :, j : j + columns] for part in right)
                row.append(self.fold(self.times(some, w), 2))
            out.append(
                tuple(torch.cat(parts, 2) for parts in zip(*row)) if len(row) != 1 else row[0]
            )
        if not m or not n:
            return each(self.zeros([b, m, n], x), how.back)
        return tuple(how.back(torch.cat(parts, 1)) for parts in zip(*out))


def each(x: Value, f: Callable[[Tensor], Tensor]) -> Value:
    """``f`` applied to every part of a value."""
    return (f(x[0]),) if len(x) == 1 else tuple(f(part) for part in x)


UNTARGETED = 1024
"""Places of a table for elements without a target. On a GPU additions to one place wait for each
other: with one place two million elements took three seconds.
"""


def places(target: Tensor, size: int) -> Tensor:
    """Where elements go in a table of ``size + UNTARGETED`` places: those without a target (-1) are
    spread over its end.
    """
    number = torch.arange(len(target), device=target.device) & (UNTARGETED - 1)
    return torch.where(target < 0, number + size, target)


def shifted(x: Tensor, shift: int) -> Tensor:
    """``x · 2**shift``, exactly, by factors that are within the range of its dtype."""
    while shift:
        step = max(-96, min(96, shift))
        x = x * 2.0**step
        shift -= step
        if abs(shift) > 4096:  # beyond the range of any float: the result is 0 or infinite
            shift = 4096 if shift > 0 else -4096
    return x


def _left_range(before: Value, after: Value) -> bool:
    """Whether a nonzero finite number became infinite or zero or, below float64, subnormal."""
    return any(
        bool(((b != 0) & b.isfinite() & (~a.isfinite() | _underflowed(a))).any())
        for b, a in zip(before, after)
    )


def _underflowed(x: Tensor) -> Tensor:
    return x == 0 if x.dtype is torch.float64 else x.abs() < torch.finfo(x.dtype).tiny
