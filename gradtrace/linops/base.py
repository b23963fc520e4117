"""What every map is: a structured Jacobian from one cotangent to another."""

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
"""How many routes end at each element: one number for all of them, or one for each."""

LIMIT = 1 << 20
"""The most entries of a Jacobian that are written out at a time."""


class Rows(NamedTuple):
    """Some rows of a Jacobian: where each entry comes from, in rising order, and its weight.

    Both are (rows, width), the weight perhaps only broadcast to it; a source of -1 is no entry.
    """

    source: Tensor
    weight: Tensor


class Best(NamedTuple):
    """For each output element ``maxⱼ |J[i, j]·in[j]|`` and the lowest j that attains it.

    The source is -1 where the value is 0: a contribution of 0 is none.
    """

    value: Tensor
    source: Tensor


class Map(ABC):
    """``out[i] = ⊕ⱼ lift(J[i, j]) ⊗ in[j]`` for a Jacobian J that is never written out.

    ``rows`` defines J, row by row. Its product in any semiring, ``apply_in``, and the largest
    contribution to each output, ``best``, follow from it, and are overridden where the structure
    allows something cheaper.

    ``single_source``: every output element comes from at most one input element.
    ``single_target``: every input element goes to at most one output element.
    ``is_gather``: elements are only moved, not weighed; ``is_diagonal``: only weighed, not moved.
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
        """``J·x``: the pull in SUM, in the dtype of x."""

    @abstractmethod
    def dense(self) -> Tensor:
        """J itself, of shape (outputs, inputs): the meaning of the map."""

    @abstractmethod
    def rows(self, at: Tensor) -> Rows:
        """The rows of J for these output elements."""

    @abstractmethod
    def routes(self, count: Count) -> Count:
        """How many routes end at each output, given how many end at each input (⊕ = +, J ≠ 0 by
        structure).
        """

    def apply_in(self, x: Value, semiring: Semiring) -> Value:
        """The value that reaches each output element."""
        return self.generic(x, semiring)

    def best(self, x: Tensor, at: Tensor | None = None) -> Best:
        """The largest contribution to each output element, or to those ``at``."""
        return self.largest(x, at)

    def select(self, x: Tensor, marks: Tensor, value: bool = False) -> tuple[Tensor | None, Tensor]:
        """For each output element the mark of the input element that ``best`` names, 0 for none;
        before it, if asked for, the largest |contribution|.
        """
        largest, source = self.best(x)
        return largest if value else None, marks_at(marks, source)

    def entry(self, at: Tensor, source: Tensor) -> Tensor:
        """``J[at, source]``, pair by pair, in float64; there is such an entry."""
        found = [at.new_empty(0, dtype=torch.float64)]
        step = max(1, LIMIT // max(1, self.width))
        for n in range(0, len(at), step):
            rows = self.rows(at[n : n + step])
            weight = rows.weight.expand(rows.source.shape)
            place = (rows.source == source[n : n + step].unsqueeze(1)).int().argmax(1, True)
            found.append(weight.gather(1, place).squeeze(1).double())
        return torch.cat(found)

    @abstractmethod
    def max_source(self, x: Tensor) -> Tensor:
        """The largest of the whole numbers x that an output element can come from, by structure,
        or more; 0 where it comes from none.
        """

    def weighed(self, x: Tensor) -> Tensor:
        """The largest |contribution| to each output element: ``best(x).value``."""
        return self.best(x).value

    def may_be_nonzero(self, x: Tensor) -> Tensor | None:
        """Which output elements may get a contribution other than 0, as cheaply as can be told;
        None if that takes a look at each.
        """
        return None

    def narrow(self, dim: int, index: Tensor) -> Map | None:
        """The map of the input elements at these places along a dimension that it sums over, all
        others being 0; None if it does not sum over it, or cannot tell.
        """
        return None

    def copies(self, count: int) -> Map | None:
        """The map of many inputs at once, along a new first dimension, each by itself, where that
        is a map of the same kind; else None (``maps.beside``).
        """
        return None

    def narrow_each(self, dim: int, index: Tensor) -> Map | None:
        """``narrow`` for each row of an index, of an input of its own, where that is one map of the
        same kind; else None.
        """
        return None

    def tensors(self) -> tuple[str, ...]:
        """The names of the fields that hold weights."""
        return ()

    # The one definition --------------------------------------------------------------------------

    def generic(self, x: Value, semiring: Semiring) -> Value:
        """``apply_in`` by rows, some at a time."""
        found = []
        flat = each(x, lambda part: part.reshape(-1))
        for at in self._some(x[0].device, None):
            source, weight = _solid(self.rows(at))
            taken = tuple(taken_at(part, source, zero) for part, zero in zip(flat, semiring.zero))
            found.append(semiring.fold(semiring.times(semiring.weigh(weight), taken), 1))
        if not found:
            return semiring.zeros(self.out_shape, x)
        return tuple(torch.cat(parts).reshape(self.out_shape) for parts in zip(*found))

    def largest(self, x: Tensor, at: Tensor | None = None) -> Best:
        """``best`` by rows, some at a time."""
        values, sources = [], []
        flat = wide(x).reshape(-1)
        for some in self._some(x.device, at):
            source, weight = _solid(self.rows(some))
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
            nowhere = torch.full(shape, -1, device=x.device)
            return Best(flat.new_zeros(shape), nowhere)
        return Best(torch.cat(values).reshape(shape), torch.cat(sources).reshape(shape))

    def _some(self, device: torch.device, at: Tensor | None) -> Iterator[Tensor]:
        """Output elements, as many at a time as their rows fit."""
        step = max(1, LIMIT // max(1, self.width))
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
        """How many elements the input has."""
        return prod(self.in_shape)

    @property
    def outputs(self) -> int:
        """How many elements the output has."""
        return prod(self.out_shape)

    def __repr__(self) -> str:
        arrow = f"{list(self.in_shape)} -> {list(self.out_shape)}"
        return f"{type(self).__name__}({arrow})"


def _solid(rows: Rows) -> Rows:
    """Rows whose weight is 0 where there is no entry: 0 times infinity would be NaN."""
    if not rows.weight.dim():
        return rows
    weight = rows.weight.expand(rows.source.shape)
    return Rows(
        rows.source, torch.where(rows.source >= 0, weight, torch.zeros_like(weight[:1, :1]))
    )


def taken_at(flat: Tensor, source: Tensor, zero: float) -> Tensor:
    """The elements at these places; ``zero`` for -1."""
    if not flat.numel():
        return flat.new_full(tuple(source.shape), zero)
    nothing = torch.full((), zero, dtype=flat.dtype, device=flat.device)
    return torch.where(source >= 0, flat[source.clamp(min=0)], nothing)


def chosen(value: Tensor, source: Tensor, at: Tensor | None) -> Best:
    """A ``Best`` of all elements, or of those ``at``."""
    source = torch.where(value == 0, -1, source)
    if at is None:
        return Best(value, source)
    return Best(value.reshape(-1)[at], source.reshape(-1)[at])


def marks_at(marks: Tensor, source: Tensor) -> Tensor:
    """The marks of the elements pointed to; 0 for -1."""
    if not marks.numel():
        return marks.new_zeros(source.shape)
    return torch.where(source >= 0, marks.reshape(-1)[source.clamp(min=0)], 0)


def ones_at(at: Tensor) -> Tensor:
    """The weights of elements that are only moved or summed."""
    return torch.ones((), dtype=torch.float64, device=at.device).expand(at.shape)


def per_element(count: Count, shape: Shape) -> Tensor:
    """A count written out for each element."""
    if isinstance(count, Tensor):
        return count
    return torch.full(shape, count, dtype=torch.float64, device="cpu")


def resized(shape: Shape, dim: int, size: int) -> Shape:
    """A shape with another size along a dimension."""
    return (*shape[:dim], size, *shape[dim + 1 :])


def offsets(sizes: Shape, strides: Shape, device: torch.device) -> Tensor:
    """What each multi-index below ``sizes`` adds to an element's number, in row-major order."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for size, stride in zip(sizes, strides):
        total = total.unsqueeze(-1) + torch.arange(size, device=device) * stride
    return total.reshape(-1)


def strides_of(shape: Shape) -> Shape:
    """What a step along each dimension adds to an element's number."""
    found: list[int] = []
    step = 1
    for size in reversed(shape):
        found.append(step)
        step *= size
    return tuple(reversed(found))


def numbers_in(at: Tensor, shape: Shape) -> list[Tensor]:
    """The multi-index of each element, one tensor a dimension."""
    found: list[Tensor] = []
    for size in reversed(shape):
        found.append(at % size)
        at = at // size
    return found[::-1]
