"""What every semiring is, and how its five operations make all the others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from gradtrace.errors import OutOfRange
from gradtrace.semirings.einsum_plan import plan

Value: TypeAlias = tuple[Tensor, ...]
"""A value of a semiring for every element of a cotangent: tensors of its shape, one a part."""

Piece: TypeAlias = tuple[int, int, Tensor]
"""``(i, o, w)``: part o of the result takes part i of the input, weighed with w, in a plain sum."""

LIMIT = 1 << 20
"""The most products that are written out at a time."""


NARROW = frozenset({torch.float16, torch.bfloat16, torch.bool})


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in a dtype; PyTorch takes its time to find that nothing is to be done."""
    return x if x.dtype is dtype else x.to(dtype)


def wide(x: Tensor) -> Tensor:
    """The tensor in float32, if it is of half precision (or a mask)."""
    return x.float() if x.dtype in NARROW else x


class Semiring(ABC):
    """(⊕, ⊗) with their neutral elements, and ``lift``: what a derivative counts as.

    A semiring of your own is a frozen dataclass with ``name``, ``zero``, ``one`` (a number for each
    part of a value), ``lift``, ``plus`` and ``times``; ``gradtrace.testing.check_semiring`` tells
    whether the laws hold. Everything else follows from these and may be overridden to be faster.

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

    # What a semiring must say ------------------------------------------------------------------

    @abstractmethod
    def lift(self, weight: Tensor) -> Value:
        """The value of a derivative.

        Products stay products, ``lift(a·b) = lift(a) ⊗ lift(b)``; ``lift(1)`` is one, ``lift(0)``
        zero.
        """

    @abstractmethod
    def plus(self, a: Value, b: Value) -> Value:
        """``a ⊕ b``, elementwise."""

    @abstractmethod
    def times(self, a: Value, b: Value) -> Value:
        """``a ⊗ b``, elementwise, broadcasting."""

    # What it may say: ranges and precision -----------------------------------------------------

    def size(self, x: Value) -> float:
        """The largest magnitude in a value, where ``scale`` can move it; 1 where it cannot."""
        return 1.0

    def scale(self, x: Value, shift: int) -> Value:
        """The value times 2 to this power."""
        raise NotImplementedError(f"{self.name} cannot be scaled")

    def weigh(self, weight: Tensor) -> Value:
        """``lift`` in the precision that is computed in: half precision counts as float32."""
        return self.lift(wide(weight))

    def settle(self, x: Value, dtype: torch.dtype) -> Value:
        """The value of a step whose gradient is of this dtype."""
        return x

    def finish(self, x: Value, exponent: int) -> Value:
        """The value times 2 to this power, as the caller gets it."""
        if not exponent:
            return x
        result = self.scale(x, exponent)
        if _lost(self.sized(x), self.sized(result)):
            x = tuple(part.double() for part in x)
            result = self.scale(x, exponent)
        if _lost(self.sized(x), self.sized(result)):
            raise OutOfRange(
                f"a value of {self.name} is about 2 to the power {exponent}, outside the range of "
                f"float64; ask for logarithms: gradtrace.semirings.{self.logs()}"
            )
        return result

    def sized(self, x: Value) -> Value:
        """The parts of a value that grow with the weights of paths, and so may leave the range."""
        return x

    def logs(self) -> str:
        """The semiring to ask for where values leave the range of floats."""
        return "Abs(log=True)"

    def linear(self, weight: Tensor) -> list[Piece] | None:
        """What ``x ⊗ lift(weight)`` is in plain sums and products, if ⊕ is a sum of each part."""
        return None

    # What follows ------------------------------------------------------------------------------

    def zeros(self, shape: Sequence[int], like: Value) -> Value:
        """``zero`` everywhere."""
        return tuple(part.new_full(tuple(shape), z) for part, z in zip(like, self.zero))

    def fold(self, x: Value, dim: int) -> Value:
        """``⊕`` over a dimension, which is gone then; by halves, log n rounds."""
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
        """``⊕`` over dimensions, which are kept with size 1."""
        for d in dims:
            x = tuple(part.unsqueeze(d) for part in self.fold(x, d))
        return x

    def scatter(self, x: Value, target: Tensor, size: int) -> Value:
        """``out[i] = ⊕ x[j]`` over the j with ``target[j] = i``; -1 goes nowhere. Flat."""
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
        """Prefix ``⊕`` along a dimension; log n rounds."""
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
        """``⊕`` over the letters that the result of an einsum lacks of ``x ⊗ lift(weight)``."""
        how = plan(spec, tuple(x[0].shape), tuple(weight.shape))
        left = each(x, how.left)
        right = self.weigh(how.right(weight))
        b, m, k = left[0].shape
        n = right[0].shape[-1]
        columns = max(1, LIMIT // max(1, b * k))
        lines = max(1, columns // max(1, n))
        out = []
        for i in range(0, m, lines):
            row = []
            some = tuple(part[:, i : i + lines, :, None] for part in left)
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
    """A function of every part."""
    return tuple(f(part) for part in x)


def shifted(x: Tensor, shift: int) -> Tensor:
    """``x`` times 2 to this power, exactly, in steps that are within the range of its dtype."""
    while shift:
        step = max(-96, min(96, shift))
        x = x * 2.0**step
        shift -= step
        if abs(shift) > 4096:  # beyond any float: zero or infinity by now
            shift = 4096 if shift > 0 else -4096
    return x


def _lost(before: Value, after: Value) -> bool:
    """Whether a number became infinite, zero, or (in float32) so small that it has few digits."""
    return any(
        bool(((b != 0) & b.isfinite() & (~a.isfinite() | _faint(a))).any())
        for b, a in zip(before, after)
    )


def _faint(x: Tensor) -> Tensor:
    return x == 0 if x.dtype is torch.float64 else x.abs() < torch.finfo(x.dtype).tiny
