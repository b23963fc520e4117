"""Base class of linear maps: a structured Jacobian from one cotangent to another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from gradtrace.kernels import argmax, backend_of
from gradtrace.linops import tuning
from gradtrace.linops.axes import Axis
from gradtrace.semirings import Semiring, Value
from gradtrace.semirings.base import each, wide
from gradtrace.types import Shape

Count: TypeAlias = "int | Tensor"
"""How many routes end at each element: one number for all elements, or a tensor."""


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


Selection: TypeAlias = tuple[Tensor | None, Tensor]
"""(largest |contribution| or None, provenance ids) of each output element."""


class Map(ABC):
    """``out[i] = ⊕ⱼ lift(J[i, j]) ⊗ in[j]`` for a Jacobian J that is never materialised.

    ``rows`` defines J, row by row. The product in any semiring, ``apply_in``, and the largest
    contribution to each output, ``best``, have default implementations by rows; subclasses override
    them where the structure allows something cheaper. Elements are numbered in row-major order.

    ``single_source``: every output element has at most one input element.
    ``single_target``: every input element has at most one output element.
    ``is_gather``: elements are only moved, not scaled; ``is_diagonal``: only scaled, not moved.
    ``unit_weights``: all entries are 1. ``full_rows``: all rows have ``width`` entries.
    ``weights``: the names of the attributes that hold weights. ``across_ranks``: input elements are
    on several ranks, which apply the map together.
    """

    __slots__ = ("in_shape", "out_shape")
    single_source = False
    single_target = False
    is_gather = False
    is_diagonal = False
    unit_weights = False
    full_rows = False
    across_ranks = False
    weights: tuple[str, ...] = ()

    in_shape: Shape
    out_shape: Shape

    @abstractmethod
    def apply(self, x: Tensor) -> Tensor:
        """``J·x``: the product in SUM, in the dtype of x."""

    @abstractmethod
    def rows(self, at: Tensor) -> Rows:
        """The rows of J for these output elements (1-d, by number)."""

    @abstractmethod
    def max_source(self, x: Tensor) -> Tensor:
        """For each output element an upper bound on the integers x of its possible sources, by
        structure; 0 where it has no source.
        """

    def follow_axis(self, axis: Axis, device: torch.device) -> Axis | None:
        """How the output is numbered if the input is numbered along ``axis`` and each element takes
        the number of its sources, by structure: ``MIXED`` if sources have several numbers; None if
        that is not along an axis, or not known without the numbers (``max_source`` follows them).
        Tensors are not empty.
        """
        return None

    def apply_at(self, x: Tensor, at: Tensor) -> Tensor:
        """The elements ``at`` of ``apply(x)``: ``Σⱼ J[i, j]·x[j]``, one row for each."""
        flat, found = x.reshape(-1), [x.new_empty(0)]
        for some in self._chunks(x.device, at):
            source, weight = self.rows(some)
            taken = torch.where(source < 0, 0, flat[source.clamp(min=0)])
            found.append((taken * weight).sum(1).to(x.dtype))
        return torch.cat(found)

    def routes(self, count: Count, device: torch.device) -> Count:
        """How many routes end at each output element, given how many end at each input element:
        ``Σⱼ [J[i, j] ≠ 0] · count[j]``, where entries are nonzero by structure, not by value. The
        default is for ``unit_weights``.
        """
        if self.full_rows and not isinstance(count, Tensor):
            return count * self.width
        return self.apply(per_element(count, self.in_shape, device))

    def apply_in(self, x: Value, semiring: Semiring) -> Value:
        """The product in a semiring: ``⊕ⱼ lift(J[i, j]) ⊗ x[j]`` for each output element."""
        return self.generic(x, semiring)

    def select(self, x: Tensor, ids: Tensor, value: bool = False) -> Selection:
        """For each output element the provenance id of the input element that contributes most, the
        first of several, 0 for none. Returns (largest |contribution| or None, ids); the former only
        with ``value``.
        """
        largest, source = self.largest(x)
        return largest if value else None, ids_at(ids, source)

    def best(self, x: Tensor, at: Tensor | None = None) -> Best:
        """The largest contribution to each output element, or to the elements ``at``."""
        if at is not None or self.inputs >= 1 << 31:
            return self.largest(x, at)
        numbers = torch.arange(1, self.inputs + 1, dtype=torch.int32, device=x.device)
        value, number = self.select(x, numbers.reshape(self.in_shape), value=True)
        assert value is not None
        return Best(value, number.long() - 1)

    def weighed(self, x: Tensor) -> Tensor:
        """The largest |contribution| to each output element: ``best(x).value``."""
        value, _ = self.select(x, torch.ones_like(x, dtype=torch.int32), value=True)
        assert value is not None
        return value

    def entry(self, at: Tensor, source: Tensor) -> Tensor:
        """``J[at, source]``, pair by pair, in float64. Each pair must be an entry of J."""
        if self.unit_weights:
            return torch.ones((), dtype=torch.float64, device=at.device).expand(at.shape)
        found = [at.new_empty(0, dtype=torch.float64)]
        step = self._rows_at_a_time()
        for n in range(0, len(at), step):
            rows = self.rows(at[n : n + step])
            weight = rows.weight.expand(rows.source.shape)
            place = (rows.source == source[n : n + step].unsqueeze(1)).int().argmax(1, True)
            found.append(weight.gather(1, place).squeeze(1).double())
        return torch.cat(found)

    def may_be_nonzero(self, x: Tensor) -> Tensor | None:
        """A mask of the output elements that may have a nonzero contribution: a cheap upper bound,
        or None if there is none cheaper than computing each. For ``unit_weights`` it is exact.
        """
        return None

    def reads_nonzero(self, x: Tensor, at: Tensor) -> Tensor | None:
        """Which of the output elements ``at`` have an element of ``x`` in their row that is not 0;
        None if that costs as much as their largest contributions, or would synchronise.
        """
        return None

    def copies(self, count: int) -> Map | None:
        """The map of ``count`` independent inputs along a new first dimension, if that is a map of
        the same kind; else None (``side_by_side.copied`` falls back to ``SideBySide``).
        """
        return None

    def sums_over(self, dim: int) -> bool:
        """Whether the map sums over this dimension of its input and has ``narrow`` for it."""
        return False

    def narrow(self, dim: int, index: Tensor) -> Map:
        """For each row of ``index`` the map restricted to the input elements at these places along
        ``dim``, a dimension that it sums over; all others count as 0. The map of as many
        independent inputs, along a new first dimension.
        """
        raise NotImplementedError(f"{self} does not sum over dimension {dim}")

    def structure(self) -> object:
        """What passes over programs read of the map, as a hashable value: maps of equal structure
        are planned alike, whatever their weights.
        """
        return type(self)

    def tensors(self) -> tuple[str, ...]:
        """The names of the attributes that hold weight tensors."""
        if not self.weights:
            return ()
        return tuple([name for name in self.weights if isinstance(getattr(self, name), Tensor)])

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
        """Output elements, or those ``at``, in chunks of ``_rows_at_a_time``."""
        step = self._rows_at_a_time()
        if at is not None:
            at = at.reshape(-1)
            yield from (at[n : n + step] for n in range(0, len(at), step))
            return
        for first in range(0, self.outputs, step):
            yield torch.arange(first, min(first + step, self.outputs), device=device)

    def _rows_at_a_time(self) -> int:
        """As many rows as have ``ROWS_MAX_ENTRIES`` entries."""
        return max(1, tuning.ROWS_MAX_ENTRIES // max(1, self.width))

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


def ids_at(ids: Tensor, source: Tensor) -> Tensor:
    """The provenance ids of the elements ``source``; 0 for -1."""
    if not ids.numel():
        return ids.new_zeros(source.shape)
    return torch.where(source >= 0, ids.reshape(-1)[source.clamp(min=0)], 0)


def per_element(count: Count, shape: Shape, device: torch.device) -> Tensor:
    """A count as a tensor with one number for each element; if it is one already, as it is."""
    if isinstance(count, Tensor):
        return count
    return torch.full(shape, count, dtype=torch.float64, device=device)


PROBED_ELEMENTS = 4
"""Mostly one of the first elements of a line is not 0; so many are looked at before all are."""


def any_nonzero(x: Tensor, dims: Sequence[int], keepdim: bool = False) -> Tensor:
    """Whether any element along these dimensions is not 0."""
    if not dims:
        return x != 0
    if not backend_of(x).synchronises:
        few = x
        for d in dims:
            few = few.narrow(d, 0, min(PROBED_ELEMENTS, x.shape[d]))
        found = (few != 0).any(tuple(dims), keepdim)
        if bool(found.all()):
            return found
    return (x != 0).any(tuple(dims), keepdim)
