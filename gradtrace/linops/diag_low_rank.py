"""Diagonal plus low rank along dimensions: softmax and the norms."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from gradtrace.kernels import argmax, backend_of
from gradtrace.kernels.operands import LargestEntry, LineLayout, LowRankLines
from gradtrace.linops import tuning
from gradtrace.linops.axes import MIXED, Axis
from gradtrace.linops.base import Best, Count, Map, Rows, Selection, any_nonzero, chosen
from gradtrace.linops.columns import LowRankColumns, column_layout
from gradtrace.linops.convex_hull import PointCloud
from gradtrace.linops.indexing import (
    line_offsets,
    located,
    merged_stride,
    picked,
    strides_of,
)
from gradtrace.linops.low_rank_sums import expanded_sums, is_expanded, pairwise_sums, sums_of_others
from gradtrace.pytorch.plain_tensors import plain
from gradtrace.semirings import MAX, Abs, Semiring, Value
from gradtrace.semirings.base import each, wide
from gradtrace.types import Shape


class Normaliser(Map):
    """``out[i] = d[i]·in[i] + Σᵣ left[r][i] · Σⱼ right[r][j]·in[j]``, j over ``dims``.

    One weight for a pair: ``J[i, j] = δᵢⱼ·d[i] + Σᵣ left[r][i]·right[r][j]`` where i and j agree
    outside ``dims``. ``diagonal``, ``left`` and ``right`` broadcast to the shape.

    A line is the set of elements that differ only along ``dims``; a place is a position on it.
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
        if x.numel() >= tuning.KERNEL_MIN_ELEMENTS and (found := self._by_columns(x)) is not None:
            return found
        if x.numel() < 2 * tuning.CACHED_ELEMENTS or 0 in self.dims:
            return self._applied(x, slice(None))
        some = tuning.CACHED_ELEMENTS * len(x) // x.numel()  # rows that stay in a CPU's cache
        if not (some and backend_of(x).host and x.is_contiguous()):
            return self._applied(x, slice(None))
        parts = [slice(n, n + some) for n in range(0, len(x), some)]
        first = self._applied(x, parts[0])
        out = torch.empty_like(x, dtype=first.dtype)
        out[parts[0]] = first
        for part in parts[1:]:
            out[part] = self._applied(x, part)
        return out

    def _by_columns(self, x: Tensor) -> Tensor | None:
        """``apply`` by a kernel, for lines that are columns of matrices; None if there is none."""
        backend, parts = backend_of(x), (self.diagonal, x, *self.left, *self.right)
        if not backend.host:
            return None
        layout = column_layout(self.in_shape, self.dims, *[(p.shape, p.stride()) for p in parts])
        if layout is None:
            return None
        lines = LowRankLines(self.diagonal, self.left, self.right, x)
        found = backend.low_rank(lines, layout)
        return None if found is None else found.reshape(self.in_shape)

    def _applied(self, x: Tensor, part: slice) -> Tensor:
        """``apply`` for a part along the first dimension."""
        x = x[part] if x.dim() else x

        def here(t: Tensor) -> Tensor:
            return t[part] if t.dim() == x.dim() and t.dim() and len(t) > 1 else t

        out = here(self.diagonal) * x
        for u, v in zip(self.left, self.right):
            total = (here(v) * x).sum(self.dims, keepdim=True) if self.dims else here(v) * x
            out = out + here(u) * total
        return out

    # Along lines ---------------------------------------------------------------------------------

    def _lines(self, x: Tensor) -> Tensor:
        """A tensor that broadcasts to the shape, reshaped to (lines, elements of a line)."""
        order, _, width = _line_order(self.in_shape, self.dims)
        if x.shape != self.in_shape:
            x = x.expand(*self.in_shape)
        return torch.reshape(x if order is None else torch.permute(x, order), (-1, width))

    def _back(self, lines: Tensor) -> Tensor:
        """The inverse of ``_lines``."""
        order, back, _ = _line_order(self.in_shape, self.dims)
        if order is None or back is None:
            return lines if lines.shape == self.in_shape else torch.reshape(lines, self.in_shape)
        return lines.reshape([self.in_shape[d] for d in order]).permute(back)

    def _own_weights(self) -> Tensor:
        """``J[i, i]``."""
        total = wide(self.diagonal)
        for u, v in zip(self.left, self.right):
            total = total + wide(u) * wide(v)
        return total.expand(self.in_shape)

    def apply_in(self, x: Value, semiring: Semiring) -> Value:
        if isinstance(semiring, Abs) and semiring.p == 1 and self.inputs:
            found = self._sums_by_kernel(x[0])
            if found is not None:
                return (self._back(found),)
        if self.inputs > tuning.SEMIRING_PIECE_ELEMENTS and 0 not in self.dims:
            return _in_pieces(self, x, semiring)
        return self.applied_in(x, semiring)

    def applied_in(self, x: Value, semiring: Semiring) -> Value:
        """``apply_in`` for all elements at once."""
        if len(self.left) != 1 or not self.inputs:
            if semiring == MAX:
                return (self.weighed(x[0]),)
            return self._summed(x, semiring) if self.inputs else self.generic(x, semiring)
        u, v = semiring.weigh(self.left[0]), semiring.weigh(self.right[0])
        own = semiring.times(semiring.weigh(self._own_weights()), x)
        seen = each(semiring.times(v, x), self._lines)
        if isinstance(semiring, Abs):
            rest = (self._back(sums_of_others(seen[0])),)
            return semiring.plus(own, semiring.times(u, rest))
        # ⊕ over all elements but the own one: prefix ⊕ suffix, both exclusive.
        before = _exclusive(semiring.scan(seen, 1), semiring)
        reversed_ = semiring.scan(each(seen, lambda part: part.flip(1)), 1)
        after = each(_exclusive(reversed_, semiring), lambda part: part.flip(1))
        others = each(semiring.plus(before, after), self._back)
        return semiring.plus(own, semiring.times(u, others))

    def _sums_by_kernel(self, x: Tensor) -> Tensor | None:
        """``Σⱼ |J[i, j]|·x[j]`` as lines; None if no kernel supports it."""
        backend = backend_of(x)
        if not backend.sums_lines:
            return None
        lines, _, layout = self._operands(wide(x), None)
        return backend.normalised_sums(lines, layout)

    def _summed(self, x: Value, semiring: Semiring) -> Value:
        """``apply_in`` for ranks other than 1."""
        diagonal, *pairs = [
            self._lines(wide(part)) for part in (self.diagonal, *self.left, *self.right)
        ]
        left, right = pairs[: len(self.left)], pairs[len(self.left) :]
        lines = each(x, self._lines)
        if isinstance(semiring, Abs) and is_expanded(semiring.p, len(left), self.width):
            found = expanded_sums(diagonal, left, right, lines[0], int(semiring.p))
            return (self._back(found.to(torch.promote_types(x[0].dtype, diagonal.dtype))),)
        return each(pairwise_sums(diagonal, left, right, lines, semiring), self._back)

    def may_be_nonzero(self, x: Tensor) -> Tensor | None:
        return any_nonzero(x, self.dims, keepdim=True).expand(self.in_shape)

    def best(self, x: Tensor, at: Tensor | None = None) -> Best:
        if at is not None and self.inputs and 2 * at.numel() < self.inputs and self.width > 1:
            return self._best_at(x, at)
        return chosen(*super().best(x), at)

    def select(self, x: Tensor, ids: Tensor, value: bool = False) -> Selection:
        if not self.inputs:
            return super().select(x, ids, value)
        x = wide(x)
        found = self._selected(x, ids, value)
        if found is None or found.ids is None:
            size, place = self._best_places(x)
            ids = torch.where(size != 0, self._lines(ids).gather(1, place), 0)
            return self._back(size) if value else None, self._back(ids)
        size_or_none = None if found.value is None or not value else self._back(found.value)
        return size_or_none, self._back(found.ids)

    def _selected(self, x: Tensor, ids: Tensor, value: bool) -> LargestEntry | None:
        """``select`` by a kernel; None if no kernel supports it."""
        lines, words, layout = self._operands(x, ids)
        return backend_of(x).normalise(lines, words, value, layout)

    def _operands(
        self, x: Tensor, ids: Tensor | None
    ) -> tuple[LowRankLines, Tensor | None, LineLayout | None]:
        """The tensors of the map, x and ids for kernels: with their own strides, and a layout that
        says how to read them as lines; or, where there is none, as lines.
        """
        parts = [wide(part) for part in (self.diagonal, x, *self.left, *self.right)]
        every = parts if ids is None else [*parts, ids]
        tensors = [(part.shape, part.stride()) for part in every]
        layout = _line_layout(self.in_shape, self.dims, *tensors)
        if layout is None:
            parts = [self._lines(part) for part in parts]
            ids = None if ids is None else self._lines(ids)
        (diagonal, x, *pairs), rank = parts, len(self.left)
        return LowRankLines(diagonal, pairs[:rank], pairs[rank:], x), ids, layout

    def _best_places(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The largest contribution to each element of each line, and its place, in plain torch."""
        own = self._lines((self._own_weights() * x).abs())
        left, right = ([self._lines(wide(p)) for p in parts] for parts in (self.left, self.right))
        x, number = self._lines(x), torch.arange(self.width, device=x.device)
        if len(left) == 1 and self.width > 1:
            line = torch.arange(len(x), device=x.device).unsqueeze(1)
            value, place = _two_largest((right[0] * x).abs(), line, number)
            value = left[0].abs() * value
        else:
            value, place = PointCloud(left, right, x).others()
        return _larger(own, number, value, place)

    def _best_at(self, x: Tensor, at: Tensor) -> Best:
        """``best`` of some elements: only their lines are read."""
        number = at.reshape(-1)
        base, over = self._source_offsets(number)
        place = torch.searchsorted(over, number - base)
        line, used_lines = self._line_of(number)
        left = torch.stack([_at(u, number, self.in_shape) for u in self.left])
        if len(left) == 1:
            size = _rows_at(self._lines((wide(self.right[0]) * wide(x)).abs()), used_lines)
            value, other = _two_largest(size, line, place)
            value = left[0].abs() * value
        else:
            right = [_rows_at(self._lines(wide(v)), used_lines) for v in self.right]
            here = _rows_at(self._lines(wide(x)), used_lines)
            value, other = backend_of(x).normalise_at(left, torch.stack(right), here, line, place)
        own = _at(self.diagonal, number, self.in_shape)
        for u, v in zip(left, self.right):
            own = own + u * _at(v, number, self.in_shape)
        own = (own * _at(x, number, self.in_shape)).abs()
        value, winner = _larger(own, place, value, other)
        return chosen(value.reshape(at.shape), (base + over[winner]).reshape(at.shape), None)

    def _line_of(self, at: Tensor) -> tuple[Tensor, Tensor | None]:
        """For each element the index of its line in a list of distinct lines, and that list (None:
        all lines).
        """
        kept = [d for d in range(len(self.in_shape)) if d not in self.dims]
        along = dict(zip(kept, strides_of(tuple(self.in_shape[d] for d in kept))))
        line = located(at, self.in_shape, [along.get(d, 0) for d in range(len(self.in_shape))])
        if len(at) * self.width >= self.inputs:
            return line, None
        used_lines, line = line.unique(return_inverse=True)  # type: ignore[no-untyped-call]
        return line, used_lines

    # Rows ----------------------------------------------------------------------------------------

    def rows(self, at: Tensor) -> Rows:
        base, over = self._source_offsets(at)
        source = base.unsqueeze(1) + over
        return Rows(source, self._weight(at.unsqueeze(1), source).expand(source.shape))

    def entry(self, at: Tensor, source: Tensor) -> Tensor:
        return self._weight(at, source).double()

    def _weight(self, at: Tensor, source: Tensor) -> Tensor:
        """``J[at, source]`` of pairs on one line."""
        weight = torch.zeros((), device=at.device)
        for u, v in zip(self.left, self.right):
            weight = weight + _at(u, at, self.in_shape) * _at(v, source, self.in_shape)
        own = weight + _at(self.diagonal, at, self.in_shape)
        return torch.where(source == at, own, weight)

    def _source_offsets(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """The elements on the lines of these elements, as ``base[i] + over[place]``."""
        steps = [0 if d in self.dims else n for d, n in enumerate(strides_of(self.in_shape))]
        base = located(at, self.in_shape, steps)
        return base, line_offsets(self.in_shape, self.dims, at.device)

    @property
    def width(self) -> int:
        return prod(self.in_shape[d] for d in self.dims)

    def max_source(self, x: Tensor) -> Tensor:
        return x.amax(self.dims, keepdim=True).expand(x.shape) if x.numel() and self.dims else x

    def follow_axis(self, axis: Axis, device: torch.device) -> Axis | None:
        return MIXED if axis.dim in self.dims else axis

    def copies(self, count: int) -> Map:
        dims = [d + 1 for d in self.dims]
        pairs = list(zip(self.left, self.right))
        return Normaliser(self.diagonal, pairs, dims, (count, *self.in_shape))

    def sums_over(self, dim: int) -> bool:
        return dim in self.dims

    def narrow(self, dim: int, index: Tensor) -> Map:
        whole = self.copies(len(index))
        return LowRankColumns(whole, self.diagonal, (self.left, self.right), self.dims, dim, index)

    def routes(self, count: Count, device: torch.device) -> Count:
        if not isinstance(count, Tensor):
            return count * self.width
        return (count.sum(self.dims, keepdim=True) if self.dims else count).expand(self.out_shape)


@lru_cache(maxsize=4096)
def _line_order(shape: Shape, dims: Shape) -> tuple[Shape | None, Shape | None, int]:
    """The permutation that moves ``dims`` last and its inverse (None: they are last already), and
    the length of a line.
    """
    order = (*(d for d in range(len(shape)) if d not in dims), *dims)
    width = prod(shape[d] for d in dims)
    if order == tuple(range(len(shape))):
        return None, None, width
    return order, tuple(order.index(d) for d in range(len(order))), width


@lru_cache(maxsize=4096)
def _line_layout(shape: Shape, dims: Shape, *tensors: tuple[Shape, Shape]) -> LineLayout | None:
    """The strides across and along lines of tensors with these shapes and strides, broadcast to
    ``shape``; None if one of them would have to be copied.
    """
    kept = tuple(d for d in range(len(shape)) if d not in dims)
    found: list[tuple[int, int]] = []
    for sizes, strides in tensors:
        missing = len(shape) - len(sizes)
        steps = [0] * missing + [s if size > 1 else 0 for size, s in zip(sizes, strides)]
        line, along = merged_stride(shape, steps, kept), merged_stride(shape, steps, dims)
        if line is None or along is None:
            return None
        found.append((line, along))
    lines, n = (prod(shape[d] for d in some) for some in (kept, dims))
    return LineLayout(lines, n, shape, tuple(found))


def _at(x: Tensor, number: Tensor, shape: Shape) -> Tensor:
    """The elements with these numbers of a tensor that broadcasts to ``shape``."""
    return wide(picked(x, shape, number))


def _rows_at(lines: Tensor, used_lines: Tensor | None) -> Tensor:
    return lines if used_lines is None else lines.index_select(0, used_lines)


def _larger(own: Tensor, number: Tensor, others: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """The larger of an element's own contribution and that of another, and its place."""
    # The lower place wins ties; NaN wins against numbers.
    first = (own > others) | ((own == others) & (number < place)) | (place < 0)
    first |= own.isnan() & ~(others.isnan() & (place < number))
    return torch.where(first, own, others), torch.where(first, number, place)


def _two_largest(size: Tensor, line: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
    """For elements (line, place ``skip``) the largest of the others on its line, and its place.
    Overwrites ``size``.
    """
    most, first = argmax(size, 1)
    second_most, second = argmax(size.scatter_(1, first.unsqueeze(1), -1.0), 1)
    is_first = skip == first[line]
    value = torch.where(is_first, second_most[line], most[line])
    return value, torch.where(is_first, second[line], first[line])


def _exclusive(lines: Value, semiring: Semiring) -> Value:
    """An inclusive prefix ⊕ made exclusive: shifted by one along the line."""
    return tuple(
        torch.cat([part.new_full((len(part), 1), zero), part[:, :-1]], 1)
        for part, zero in zip(lines, semiring.zero)
    )


# Pieces ------------------------------------------------------------------------------------------


def _in_pieces(map_: Normaliser, x: Value, semiring: Semiring) -> Value:
    """``apply_in`` for some rows at a time: it takes ten times the memory of its result."""
    rows = len(x[0])
    some = max(1, tuning.SEMIRING_PIECE_ELEMENTS * rows // map_.inputs)
    out: Value | None = None
    for start in range(0, rows, some):
        part = slice(start, min(start + some, rows))
        found = _rows_of(map_, part).applied_in(tuple([t[part] for t in x]), semiring)
        if out is None:
            out = tuple([t.new_empty((rows, *t.shape[1:])) for t in found])
        for whole, piece in zip(out, found):
            whole[part] = piece
    assert out is not None
    return out


def _rows_of(map_: Normaliser, part: slice) -> Normaliser:
    """The map of some elements of the first dimension, which is none of ``dims``."""

    def here(t: Tensor) -> Tensor:
        return t[part] if t.dim() == len(map_.in_shape) and len(t) > 1 else t

    pairs = [(here(u), here(v)) for u, v in zip(map_.left, map_.right)]
    shape = (part.stop - part.start, *map_.in_shape[1:])
    return Normaliser(here(map_.diagonal), pairs, map_.dims, shape)
