"""Semirings whose ⊕ selects: the largest path, the extremes, the k largest, any path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from gradtrace.errors import GradtraceError
from gradtrace.kernels import backend_of, largest
from gradtrace.semirings.base import UNTARGETED, Semiring, Value, each, places, shifted
from gradtrace.semirings.einsum_plan import plan, sum_weight_only_letters


class Scaled(Semiring):
    """Semirings whose values are proportional to the weights of paths; or, with ``log``, the base-2
    logarithms of these in float64, which do not overflow however deep the graph is.
    """

    log: bool = False

    def size(self, x: Value) -> float:
        if self.log:
            return 1.0
        return max(float(part.abs().amax()) if part.numel() else 1.0 for part in x)

    def scale(self, x: Value, shift: int) -> Value:
        return each(x, lambda part: shifted(part, shift))

    def mass(self, weight: Tensor) -> Tensor:
        """``|weight|``, or its logarithm."""
        return weight.abs().double().log2() if self.log else weight.abs()

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """The product, or the sum of logarithms."""
        return a + b if self.log else a * b


@dataclass(frozen=True)
class Max(Scaled):
    """(max, ×) on absolute values: ``|weight|`` of the largest path.

    Args:
        log: Whether values are base-2 logarithms, which do not overflow.

    >>> MAX.plus(MAX.lift(torch.tensor(-3.0)), MAX.lift(torch.tensor(2.0)))
    (tensor(3.),)
    >>> Max(log=True).lift(torch.tensor([-8.0, 0.0]))
    (tensor([3., -inf], dtype=torch.float64),)
    """

    log: bool = False
    name: str = "MAX"
    zero: tuple[float, ...] = (0.0,)
    one: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if self.log:
            object.__setattr__(self, "zero", (-inf,))
            object.__setattr__(self, "one", (0.0,))

    def size(self, x: Value) -> float:
        if self.log or not x[0].numel():
            return 1.0
        return float(x[0].amax())  # values are absolute, so no abs() is needed

    def lift(self, weight: Tensor) -> Value:
        return (self.mass(weight),)

    def plus(self, a: Value, b: Value) -> Value:
        return (torch.maximum(a[0], b[0]),)

    def times(self, a: Value, b: Value) -> Value:
        return (self.product(a[0], b[0]),)

    def fold(self, x: Value, dim: int) -> Value:
        return (x[0].amax(dim),) if x[0].shape[dim] else super().fold(x, dim)

    def reduce(self, x: Value, dims: Sequence[int]) -> Value:
        if not dims or not x[0].numel():
            return super().reduce(x, dims)
        return (x[0].amax(tuple(dims), keepdim=True),)

    def scatter(self, x: Value, target: Tensor, size: int) -> Value:
        out = x[0].new_full((size + UNTARGETED,), self.zero[0])
        return (out.scatter_reduce(0, places(target, size), x[0], "amax")[:size],)

    def scan(self, x: Value, dim: int) -> Value:
        return (x[0].cummax(dim).values,) if x[0].numel() else x

    def contract(self, spec: str, x: Value, weight: Tensor) -> Value:
        if self.log:
            return super().contract(spec, x, weight)
        how = plan(spec, tuple(x[0].shape), tuple(weight.shape))
        return (how.back(largest(how.left(x[0]), how.right(weight))),)

    def logs(self) -> str:
        return "Max(log=True)"


@dataclass(frozen=True)
class Extremes(Scaled):
    """The most positive and the most negative path, 0 where there is none of that sign.

    The largest signed weight alone is not a semiring: a negative derivative makes the smallest the
    largest.

    >>> EXTREMES.times(EXTREMES.lift(torch.tensor(-3.0)), EXTREMES.lift(torch.tensor(2.0)))
    (tensor(0.), tensor(-6.))
    """

    name: str = "EXTREMES"
    zero: tuple[float, ...] = (0.0, 0.0)
    one: tuple[float, ...] = (1.0, 0.0)

    def lift(self, weight: Tensor) -> Value:
        return weight.clamp(min=0), weight.clamp(max=0)

    def plus(self, a: Value, b: Value) -> Value:
        return torch.maximum(a[0], b[0]), torch.minimum(a[1], b[1])

    def times(self, a: Value, b: Value) -> Value:
        most = torch.maximum(present(a[0], b[0]), present(a[1], b[1]))
        least = torch.minimum(present(a[0], b[1]), present(a[1], b[0]))
        return most, least

    def fold(self, x: Value, dim: int) -> Value:
        return (x[0].amax(dim), x[1].amin(dim)) if x[0].shape[dim] else super().fold(x, dim)


@dataclass(frozen=True)
class TopK(Scaled):
    """``|weight|`` of the k largest paths, descending, one for each part of a value; 0 where there
    are fewer paths. Paths of equal weight are counted separately.

    Args:
        k: How many paths.
        log: Whether values are base-2 logarithms, which do not overflow.

    >>> top = TopK(2)
    >>> top.plus(top.lift(torch.tensor(-3.0)), top.lift(torch.tensor(2.0)))
    (tensor(3.), tensor(2.))
    """

    k: int
    log: bool = False
    name: str = ""
    zero: tuple[float, ...] = ()
    one: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.k, int) or self.k < 1:
            raise GradtraceError(f"TopK takes a number of paths from 1 on, not {self.k!r}")
        none, whole = (-inf, 0.0) if self.log else (0.0, 1.0)
        object.__setattr__(self, "name", self.name or f"TopK({self.k})")
        object.__setattr__(self, "zero", (none,) * self.k)
        object.__setattr__(self, "one", (whole,) + (none,) * (self.k - 1))

    def lift(self, weight: Tensor) -> Value:
        first = self.mass(weight)
        return (first,) + (torch.full_like(first, self.zero[0]),) * (self.k - 1)

    def plus(self, a: Value, b: Value) -> Value:
        return self._top([*a, *b])

    def times(self, a: Value, b: Value) -> Value:
        # a[i]·b[j] has (i + 1)(j + 1) - 1 products that are at least as large, so only pairs with
        # (i + 1)(j + 1) <= k can be among the k largest.
        pairs = [(i, j) for i in range(self.k) for j in range(self.k // (i + 1))]
        product = self.product if self.log else present
        return self._top([product(a[i], b[j]) for i, j in pairs])

    def fold(self, x: Value, dim: int) -> Value:
        if not x[0].shape[dim]:
            return super().fold(x, dim)
        dim %= x[0].dim()
        stacked = torch.cat(x, dim)
        found = stacked.topk(min(self.k, stacked.shape[dim]), dim).values
        return found.unbind(dim)  # at least k, since each element has k parts

    def contract(self, spec: str, x: Value, weight: Tensor) -> Value:
        backend = backend_of(weight)
        if self.log or self.k > backend.max_top_k:
            return super().contract(spec, x, weight)
        how = plan(spec, tuple(x[0].shape), tuple(weight.shape))
        right = self.weigh(how.right(weight))[0]
        found = backend.contract_top(each(x, how.left), right)
        return super().contract(spec, x, weight) if found is None else each(found, how.back)

    def logs(self) -> str:
        return f"TopK({self.k}, log=True)"

    def _top(self, many: Sequence[Tensor]) -> Value:
        stacked = torch.stack(torch.broadcast_tensors(*many))  # type: ignore[no-untyped-call]
        return stacked.topk(self.k, 0).values.unbind(0)


@dataclass(frozen=True)
class Bool(Semiring):
    """(or, and): whether any path has a weight that is not 0.

    >>> BOOL.lift(torch.tensor([-3.0, 0.0]))
    (tensor([ True, False]),)
    """

    name: str = "BOOL"
    zero: tuple[float, ...] = (False,)
    one: tuple[float, ...] = (True,)

    def lift(self, weight: Tensor) -> Value:
        return (weight != 0,)

    def plus(self, a: Value, b: Value) -> Value:
        return (a[0] | b[0],)

    def times(self, a: Value, b: Value) -> Value:
        return (a[0] & b[0],)

    def fold(self, x: Value, dim: int) -> Value:
        return (x[0].any(dim),)

    def scan(self, x: Value, dim: int) -> Value:
        return (x[0].cumsum(dim) > 0,)

    def scatter(self, x: Value, target: Tensor, size: int) -> Value:
        out = x[0].new_zeros(size + UNTARGETED, dtype=torch.int32)
        return (out.index_add(0, places(target, size), x[0].int())[:size] > 0,)

    def contract(self, spec: str, x: Value, weight: Tensor) -> Value:
        spec, weight = sum_weight_only_letters(spec, weight)
        return (torch.einsum(spec, x[0].float(), (weight != 0).float()) > 0,)


def present(a: Tensor, b: Tensor) -> Tensor:
    """``a · b``, but 0 where either is 0 (no path), even if the other is infinite; never -0."""
    return torch.where((a == 0) | (b == 0), 0.0, a * b).to(torch.promote_types(a.dtype, b.dtype))


MAX = Max()
EXTREMES = Extremes()
BOOL = Bool()
