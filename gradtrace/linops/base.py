"""Base class of linear maps: a structured Jacobian from one cotangent to another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from math import prod
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from gradtrace.kernels import argmax
from gradtrace.semirings import Semiring, Value
from gradtrace.semirings.base import each, wide
from gradtrace.types import Shape

Count: TypeAlias = "int | Tensor"
"""How many routes end at each element: one number for all elements, or a tensor."""

ROWS_MAX_ENTRIES = 1 << 20
"""The most entries of a Jacobian that are materialised at a time."""


class Rows(NamedTuple):
    """Some rows of a Jacobian: the input element (column) of each entry, ascending, and its weight.

    ``source`` is (rows, width), ``weight`` broadcasts to it. A source of -1 means no entry.
    """

    source: Tensor
    weight: Tensor


class Best(NamedTuple):
    """For each output element ``maxⱼ |J[i, j]·in[j]|`` and the lowest j that attains it.

    The source is -1 where the value is 0: a contribution of 0 does not count as one.
    """

    value: Tensor
    source: Tensor


class Map(ABC):
    """``out[i] = ⊕ⱼ lift(J[i, j]) ⊗ in[j]`` for a Jacobian J that is never materialised.

    ``rows`` defines J, row by row. The product in any semiring, ``apply_in``, and the largest
    contribution to each output, ``best``, have default implementations by rows; subclasses override
    them where the structure allows something cheaper. Elements are numbered in row-major order.

    ``single_source``: every output element has at most one input element.
    ``single_target``: every input element has at most one output element.
    ``is_gather``: elements are only moved, not scaled; ``is_diagonal``: only scaled, not moved.
    """

    __slots__ = ("in_shape", "out_shape")
    single_source = False
    single_target = False
    is_gather = False
    is_diagonal = False

    in_shape: Shape
    out_shape: Shape

    @abstractmethod
    def apply(self, x: Tensor) -> Tensor:
        """``J·x``: the product in SUM, in the dtype of x."""

    @abstractmethod
    def rows(self, at: Tensor) -> Rows:
        """The rows of J for these output elements (1-d, by number)."""

    @abstractmethod
    def routes(self, count: Count) -> Count:
        """How many routes end at each output element, given how many end at each input element:
        ``Σⱼ [J[i, j] ≠ 0] · count[j]``, where entries are nonzero by structure, not by value.
        """

    def apply_in(self, x: Value, semiring: Semiring) -> Value:
        """The product in a semiring: ``⊕ⱼ lift(J[i, j]) ⊗ x[j]`` for each output element."""
        return self.generic(x, semiring)

    def best(self, x: Tensor, at: Tensor | None = None) -> Best:
        """The largest contribution to each output element, or to the elements ``at``."""
        return self.largest(x, at)

    def select(self, x: Tensor, marks: Tensor, value: bool = False) -> tuple[Tensor | None, Tensor]:
        """For each output element the provenance id of the input element that ``best`` selects, 0
        for none. Returns (largest |contribution| or None, ids); the former only with ``value``.
        """
        largest, source = self.best(x)
        return largest if value else None, ids_at(marks, source)

    def entry(self, at: Tensor, source: Tensor) -> Tensor:
        """``J[at, source]``, pair by pair, in float64. Each pair must be an entry of J."""
        found = [at.new_empty(0, dtype=torch.float64)]
        step = max(1, ROWS_MAX_ENTRIES // max(1, self.width))
        for n in range(0, len(at), step):
            rows = self.rows(at[n : n + step])
            weight = rows.weight.expand(rows.source.shape)
            place = (rows.source == source[n : n + step].unsqueeze(1)).int().argmax(1, True)
            found.append(weight.gather(1, place).squeeze(1).double())
        return torch.cat(found)

    @abstractmethod
    def max_source(self, x: Tensor) -> Tensor:
        """For each output element an upper bound on the integers x of its possible sources, by
        structure; 0 where it has no source.
        """

    def weighed(self, x: Tensor) -> Tensor:
        """The largest |contribution| to each output element: ``best(x).value``."""
        return self.best(x).value

    def may_be_nonzero(self, x: Tensor) -> Tensor | None:
        """A mask of the output elements that may have a nonzero contribution: a cheap upper bound,
        or None if there is none cheaper than computing each.
        """
        return None

    def narrow(self, dim: int, index: Tensor) -> Map | None:
        """The map restricted to the input elements at ``index`` along ``dim``, a dimension that it
        sums over; all others count as 0. None if it does not sum over ``dim``, or this is not
        known.
        """
        return None

    def copies(self, count: int) -> Map | None:
        """The map of ``count`` independent inputs along a new first dimension, if that is a map of
        the same kind; else None (``side_by_side.copied`` falls back to ``SideBySide``).
        """
        return None

    def narrow_each(self, dim: int, index: Tensor) -> Map | None:
        """``narrow`` by each row of ``index``, applied to independent inputs along a new first
        dimension, if that is one map of the same kind; else None.
        """
        return None

    def tensors(self) -> tuple[str, ...]:
        """The names of the attributes that hold weight tensors."""
        return ()

    # Default implementations by rows -------------------------------------------------------------

    def generic(self, x: Value, semiring: Semiring) -> Value:
        """``apply_in`` by rows, in chunks."""
        found = []
        flat = each(x, lambda part: part.reshape(-1))
        for at in self._chunks(x[0].device, None):
            source, weight = _masked(self.rows(at))
            taken = tuple(taken_at(part, source, zero) for part, zero in zip(flat, semiring.zero))
            found.append(semiring.fold(semiring.times(semiring.weigh(weight), taken), 1))
        if not found:
            return semiring.zeros(self.out_shape, x)
        return tuple(torch.cat(parts).reshape(self.out_shape) for parts in zip(*found))

    def largest(self, x: Tensor, at: Tensor | None = None) -> Best:
        """``best`` by rows, in chunks."""
        values, sources = [], []
        flat = wide(x).reshape(-1)
        for some in self._chunks(x.device, at):
            source, weight = _masked(self.rows(some))
            size = (wide(weight) * taken_at(flat, source, 0.0)).abs()
            value, place = argmax(size, 1)
            chosen = (
                source.gather(1, place.clamp(min=0).unsqueeze(1)).squeeze(1)
                if source.shape[1]
                else place
            )
            values.append(value)
            sources.append(torch.where(value == 0, -1, chosen))
        shape = self.out_shape if at is None else tuple(at.shape)
        if not values:
            no_source = torch.full(shape, -1, device=x.device)
            return Best(flat.new_zeros(shape), no_source)
        return Best(torch.cat(values).reshape(shape), torch.cat(sources).reshape(shape))

    def _chunks(self, device: torch.device, at: Tensor | None) -> Iterator[Tensor]:
        """Output elements, or those ``at``, in chunks whose rows have at most ``ROWS_MAX_ENTRIES``
        entries.
        """
        step = max(1, ROWS_MAX_ENTRIES // max(1, self.width))
        if at is not None:
            at = at.reshape(-1)
            yield from (at[n : n + step] for n in range(0, len(at), step))
            return
        for first in range(0, self.outputs, step):
            yield torch.arange(first, min(first + step, self.outputs), device=device)

    @property
    def width(self) -> int:
        """The most entries that a row can have."""
        return 1 if self.single_source else self.inputs

    # Sizes ---------------------------------------------------------------------------------------

    @property
    def inputs(self) -> int:
        """The number of input elements."""
        return prod(self.in_shape)

    @property
    def outputs(self) -> int:
        """The number of output elements."""
        return prod(self.out_shape)

    def __repr__(self) -> str:
        arrow = f"{list(self.in_shape)} -> {list(self.out_shape)}"
        return f"{type(self).__name__}({arrow})"


def _masked(rows: Rows) -> Rows:
    """Rows with weight 0 where there is no entry, since ∞ · 0 would be NaN."""
    if not rows.weight.dim():
        return rows
    weight = rows.weight.expand(rows.source.shape)
    return Rows(
        rows.source, torch.where(rows.source >= 0, weight, torch.zeros_like(weight[:1, :1]))
    )


def taken_at(flat: Tensor, source: Tensor, zero: float) -> Tensor:
    """``flat[source]``, and ``zero`` where source is -1."""
    if not flat.numel():
        return flat.new_full(tuple(source.shape), zero)
    absent = torch.full((), zero, dtype=flat.dtype, device=flat.device)
    return torch.where(source >= 0, flat[source.clamp(min=0)], absent)


def chosen(value: Tensor, source: Tensor, at: Tensor | None) -> Best:
    """A ``Best`` with source -1 where the value is 0; of all elements, or of those ``at``."""
    source = torch.where(value == 0, -1, source)
    if at is None:
        return Best(value, source)
    return Best(value.reshape(-1)[at], source.reshape(-1)[at])


def ids_at(marks: Tensor, source: Tensor) -> Tensor:
    """The provenance ids of the elements ``source``; 0 for -1."""
    if not marks.numel():
        return marks.new_zeros(source.shape)
    return torch.where(source >= 0, marks.reshape(-1)[source.clamp(min=0)], 0)


def ones_at(at: Tensor) -> Tensor:
    """Weights of 1, in float64: those of maps that only move or sum elements."""
    return torch.ones((), dtype=torch.float64, device=at.device).expand(at.shape)


def per_element(count: Count, shape: Shape) -> Tensor:
    """A count as a tensor with one number for each element."""
    if isinstance(count, Tensor):
        return count
    return torch.full(shape, count, dtype=torch.float64, device="cpu")


def resized(shape: Shape, dim: int, size: int) -> Shape:
    """A shape with the size along ``dim`` replaced."""
    return (*shape[:dim], size, *shape[dim + 1 :])


def offsets(sizes: Shape, strides: Shape, device: torch.device) -> Tensor:
    """``Σ index·stride`` of each multi-index below ``sizes``, in row-major order."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for size, stride in zip(sizes, strides):
        total = total.unsqueeze(-1) + torch.arange(size, device=device) * stride
    return total.reshape(-1)


def strides_of(shape: Shape) -> Shape:
    """The strides of a contiguous tensor of this shape."""
    found: list[int] = []
    step = 1
    for size in reversed(shape):
        found.append(step)
        step *= size
    return tuple(reversed(found))


def multi_index(at: Tensor, shape: Shape) -> list[Tensor]:
    """The multi-index of each element number, as one tensor for each dimension."""
    found: list[Tensor] = []
    for size in reversed(shape):
        found.append(at % size)
        at = at // size
    return found[::-1]
