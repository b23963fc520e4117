"""Diagonal plus low rank along dimensions: softmax and the norms."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from gradtrace.kernels import argmax, steps
from gradtrace.kernels.cuda_steps import LineLayout
from gradtrace.kernels.rows import others
from gradtrace.kernels.steps import LowRankLines
from gradtrace.linops.base import Best, Count, Map, Rows, chosen, numbers_in, offsets, strides_of
from gradtrace.linops.convex_hull import PointCloud
from gradtrace.linops.indexing import located, picked
from gradtrace.pytorch.plain_tensors import plain
from gradtrace.semirings import MAX, Semiring, Value
from gradtrace.semirings.base import each, wide
from gradtrace.types import Shape


class Normaliser(Map):
    """``out[i] = d[i]·in[i] + Σᵣ left[r][i] · Σⱼ right[r][j]·in[j]``, j over ``dims``.

    One weight for a pair: ``J[i, j] = δᵢⱼ·d[i] + Σᵣ left[r][i]·right[r][j]`` where i and j agree
    outside ``dims``. ``diagonal``, ``left`` and ``right`` broadcast to the shape.
    """

    __slots__ = ("diagonal", "dims", "left", "right")

    def __init__(
        self,
        diagonal: Tensor,
        pairs: Sequence[tuple[Tensor, Tensor]],
        dims: Sequence[int],
        shape: Shape,
    ) -> None:
        self.diagonal = plain(diagonal)
        self.left = tuple([plain(u) for u, _ in pairs])
        self.right = tuple([plain(v) for _, v in pairs])
        self.dims = tuple(sorted(d % len(shape) for d in dims)) if shape else ()
        self.in_shape = self.out_shape = shape

    def apply(self, x: Tensor) -> Tensor:
        out = self.diagonal * x
        for u, v in zip(self.left, self.right):
            total = (v * x).sum(self.dims, keepdim=True) if self.dims else v * x
            out = out + u * total
        return out

    # Along lines ---------------------------------------------------------------------------------

    def _lines(self, x: Tensor) -> Tensor:
        """A tensor that broadcasts to the shape, as (lines, elements of a line)."""
        order, _, width = _ordered(self.in_shape, self.dims)
        if x.shape != self.in_shape:
            x = x.expand(*self.in_shape)
        return torch.reshape(x if order is None else torch.permute(x, order), (-1, width))

    def _back(self, lines: Tensor) -> Tensor:
        order, back, _ = _ordered(self.in_shape, self.dims)
        if order is None or back is None:
            return lines if lines.shape == self.in_shape else torch.reshape(lines, self.in_shape)
        return lines.reshape([self.in_shape[d] for d in order]).permute(back)

    def _own(self) -> Tensor:
        """``J[i, i]``."""
        total = wide(self.diagonal)
        for u, v in zip(self.left, self.right):
            total = total + wide(u) * wide(v)
        return total.expand(self.in_shape)

    def apply_in(self, x: Value, semiring: Semiring) -> Value:
        if len(self.left) != 1 or not self.inputs:
            if semiring == MAX:
                return (self.best(x[0]).value,)
            return self.generic(x, semiring)
        # All but the own element: what lies before it ⊕ what lies after it.
        u, v = semiring.weigh(self.left[0]), semiring.weigh(self.right[0])
        own = semiring.times(semiring.weigh(self._own()), x)
        seen = each(semiring.times(v, x), self._lines)
        before = _shifted(semiring.scan(seen, 1), semiring)
        turned = semiring.scan(each(seen, lambda part: part.flip(1)), 1)
        after = each(_shifted(turned, semiring), lambda part: part.flip(1))
        others = each(semiring.plus(before, after), self._back)
        return semiring.plus(own, semiring.times(u, others))

    def may_be_nonzero(self, x: Tensor) -> Tensor | None:
        there = x != 0
        return there.any(self.dims, keepdim=True).expand(self.in_shape) if self.dims else there

    def best(self, x: Tensor, at: Tensor | None = None) -> Best:
        if not self.inputs:
            return self.largest(x, at)
        if at is not None and 2 * at.numel() < self.inputs and self.width > 1:
            return self._best_at(x, at)
        x = wide(x)
        found = steps.normalise(self._along(x))
        value, place = self._chosen(x) if found is None else (found.value, found.place)
        base, over = self._places(torch.arange(self.inputs, device=x.device))
        assert value is not None and place is not None
        source = base.reshape(self.in_shape) + over[self._back(place)]
        return chosen(self._back(value), source, at)

    def select(self, x: Tensor, marks: Tensor, value: bool = False) -> tuple[Tensor | None, Tensor]:
        if self.inputs:
            found = self._carried(wide(x), marks, value)
            if found is not None and found.marks is not None:
                size = self._back(found.value) if value and found.value is not None else None
                return size, self._back(found.marks)
        return super().select(x, marks, value)

    def _carried(self, x: Tensor, marks: Tensor, value: bool) -> steps.LargestEntry | None:
        """By the kernel, on tensors as they lie, unless one has to be copied to be lines."""
        left, right = [wide(u) for u in self.left], [wide(v) for v in self.right]
        diagonal = wide(self.diagonal)
        tensors = [(part.shape, part.stride()) for part in (diagonal, x, *left, *right, marks)]
        lies = _lies(self.in_shape, self.dims, *tensors)
        if lies is None:
            return steps.normalise(self._along(x), self._lines(marks), value)
        return steps.normalise(LowRankLines(diagonal, left, right, x), marks, value, lies)

    def _along(self, x: Tensor) -> LowRankLines:
        """The map line by line."""
        diagonal, *parts = (self._lines(wide(p)) for p in (self.diagonal, *self.left, *self.right))
        rank = len(self.left)
        return LowRankLines(diagonal, parts[:rank], parts[rank:], self._lines(x))

    def _chosen(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The largest contribution to each element of each line, and its place."""
        own = self._lines((self._own() * x).abs())
        number = torch.arange(self.width, device=x.device)
        return _larger(own, number, *self._others(x))

    def _best_at(self, x: Tensor, at: Tensor) -> Best:
        """``best`` of few elements: only lines that they lie on are looked at."""
        number = at.reshape(-1)
        base, over = self._places(number)
        place = torch.searchsorted(over, number - base)
        line, few = self._line(number)
        left = torch.stack([_at(u, number, self.in_shape) for u in self.left])
        if len(left) == 1:
            size = _some(self._lines((wide(self.right[0]) * wide(x)).abs()), few)
            value, other = _two_largest(size, line, place)
            value = left[0].abs() * value
        else:
            right = [_some(self._lines(wide(v)), few) for v in self.right]
            here = _some(self._lines(wide(x)), few)
            value, other = others(left, torch.stack(right), here, line, place)
        own = _at(self.diagonal, number, self.in_shape)
        for u, v in zip(left, self.right):
            own = own + u * _at(v, number, self.in_shape)
        own = (own * _at(x, number, self.in_shape)).abs()
        value, winner = _larger(own, place, value, other)
        return chosen(value.reshape(at.shape), (base + over[winner]).reshape(at.shape), None)

    def _line(self, at: Tensor) -> tuple[Tensor, Tensor | None]:
        """The line that each element lies on, among these few (None: among all)."""
        kept = [d for d in range(len(self.in_shape)) if d not in self.dims]
        along = dict(zip(kept, strides_of(tuple(self.in_shape[d] for d in kept))))
        line = located(at, self.in_shape, [along.get(d, 0) for d in range(len(self.in_shape))])
        if len(at) * self.width >= self.inputs:
            return line, None
        few, line = line.unique(return_inverse=True)  # type: ignore[no-untyped-call]
        return line, few

    def _others(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """For each element of each line the largest contribution of another, and its place."""
        if len(self.left) == 1:
            return self._others_of_one(x)
        lines = [self._lines(wide(part)) for part in (*self.left, *self.right)]
        rank = len(self.left)
        return PointCloud(lines[:rank], lines[rank:], self._lines(x)).others()

    def _others_of_one(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Rank one: the largest of a line, or the second largest where that is the own one."""
        u = self._lines(wide(self.left[0])).abs()
        size = self._lines((wide(self.right[0]) * x).abs())
        most, first = argmax(size, 1)
        rest = size.scatter(1, first.unsqueeze(1), -1.0)
        second_most, second = argmax(rest, 1)
        number = torch.arange(self.width, device=x.device)
        is_first = number == first.unsqueeze(1)
        value = torch.where(is_first, second_most.unsqueeze(1), most.unsqueeze(1))
        place = torch.where(is_first, second.unsqueeze(1), first.unsqueeze(1))
        there = value != -1  # a line of one element has no other
        return torch.where(there, u * value, 0.0), torch.where(there, place, -1)

    # Rows ----------------------------------------------------------------------------------------

    def rows(self, at: Tensor) -> Rows:
        base, over = self._places(at)
        source = base.unsqueeze(1) + over
        weight = torch.zeros((), device=at.device)
        for u, v in zip(self.left, self.right):
            weight = weight + _at(u, at.unsqueeze(1), self.in_shape) * _at(v, source, self.in_shape)
        own = source == at.unsqueeze(1)
        diagonal = _at(self.diagonal, at.unsqueeze(1), self.in_shape)
        return Rows(source, torch.where(own, weight + diagonal, weight).expand(source.shape))

    def entry(self, at: Tensor, source: Tensor) -> Tensor:
        weight = torch.zeros((), device=at.device)
        for u, v in zip(self.left, self.right):
            weight = weight + _at(u, at, self.in_shape) * _at(v, source, self.in_shape)
        own = weight + _at(self.diagonal, at, self.in_shape)
        return torch.where(source == at, own, weight).double()

    def _places(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """Where the line of each element begins, and the steps along it."""
        steps = strides_of(self.in_shape)
        base = torch.zeros_like(at)
        for d, number in enumerate(numbers_in(at, self.in_shape)):
            if d not in self.dims:
                base = base + number * steps[d]
        sizes = tuple(self.in_shape[d] for d in self.dims)
        return base, offsets(sizes, tuple(steps[d] for d in self.dims), at.device)

    @property
    def width(self) -> int:
        return prod(self.in_shape[d] for d in self.dims)

    def max_source(self, x: Tensor) -> Tensor:
        return x.amax(self.dims, keepdim=True).expand(x.shape) if x.numel() and self.dims else x

    def copies(self, count: int) -> Map | None:
        if not self.in_shape:
            return None
        dims = [d + 1 for d in self.dims]
        pairs = list(zip(self.left, self.right))
        return Normaliser(self.diagonal, pairs, dims, (count, *self.in_shape))

    def dense(self) -> Tensor:
        shape, n = self.in_shape, self.inputs
        kept = tuple(1 if d in self.dims else size for d, size in enumerate(shape))
        line = torch.arange(prod(kept), device="cpu").reshape(kept).expand(shape).reshape(-1)
        same = line.reshape(-1, 1) == line
        matrix = torch.diag(self.diagonal.expand(shape).reshape(n))
        for u, v in zip(self.left, self.right):
            outer = u.expand(shape).reshape(n, 1) * v.expand(shape).reshape(1, n)
            matrix = matrix + torch.where(
                same, outer, torch.zeros((), dtype=outer.dtype, device="cpu")
            )
        return matrix

    def routes(self, count: Count) -> Count:
        if isinstance(count, Tensor):
            total = count.sum(self.dims, keepdim=True) if self.dims else count
            return total.expand(self.out_shape)
        return count * prod(self.in_shape[d] for d in self.dims)


@lru_cache(maxsize=4096)
def _ordered(shape: Shape, dims: Shape) -> tuple[Shape | None, Shape | None, int]:
    """The order of dimensions in which lines come last, and back (None: they do), and how long a
    line is.
    """
    order = (*(d for d in range(len(shape)) if d not in dims), *dims)
    width = prod(shape[d] for d in dims)
    if order == tuple(range(len(shape))):
        return None, None, width
    return order, tuple(order.index(d) for d in range(len(order))), width


@lru_cache(maxsize=4096)
def _lies(shape: Shape, dims: Shape, *tensors: tuple[Shape, Shape]) -> LineLayout | None:
    """How tensors of these shapes and strides, broadcast to a shape, lie as lines; None if one of
    them has to be copied for that.
    """
    kept = tuple(d for d in range(len(shape)) if d not in dims)
    found: list[tuple[int, int]] = []
    for sizes, strides in tensors:
        missing = len(shape) - len(sizes)
        steps = [0] * missing + [s if size > 1 else 0 for size, s in zip(sizes, strides)]
        line, along = _step(shape, steps, kept), _step(shape, steps, dims)
        if line is None or along is None:
            return None
        found.append((line, along))
    lines, n = (prod(shape[d] for d in some) for some in (kept, dims))
    return LineLayout(lines, n, shape, tuple(found))


def _step(shape: Shape, steps: Sequence[int], dims: Shape) -> int | None:
    """What one more adds to the place of an element where dimensions are counted through as one,
    the last first; None if it is not always the same.
    """
    found, length = 0, 1
    for d in reversed(dims):
        if shape[d] == 1:
            continue
        if length == 1:
            found = steps[d]
        elif steps[d] != found * length:
            return None
        length *= shape[d]
    return found


def _at(x: Tensor, number: Tensor, shape: Shape) -> Tensor:
    """Elements by number of a tensor that broadcasts to a shape."""
    return wide(picked(x, shape, number))


def _some(lines: Tensor, few: Tensor | None) -> Tensor:
    return lines if few is None else lines.index_select(0, few)


def _larger(own: Tensor, number: Tensor, others: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """The larger of an element's own contribution and that of another, and its place."""
    # The own element wins ties against later ones only; NaN wins against numbers.
    first = (own > others) | ((own == others) & (number < place)) | (place < 0)
    first |= own.isnan() & ~(others.isnan() & (place < number))
    return torch.where(first, own, others), torch.where(first, number, place)


def _two_largest(size: Tensor, line: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
    """For elements of lines the largest of the others, and its place; size is overwritten."""
    most, first = argmax(size, 1)
    second_most, second = argmax(size.scatter_(1, first.unsqueeze(1), -1.0), 1)
    is_first = skip == first[line]
    value = torch.where(is_first, second_most[line], most[line])
    return value, torch.where(is_first, second[line], first[line])


def _shifted(lines: Value, semiring: Semiring) -> Value:
    """A prefix ⊕ without the element itself."""
    return tuple(
        torch.cat([part.new_full((len(part), 1), zero), part[:, :-1]], 1)
        for part, zero in zip(lines, semiring.zero)
    )
