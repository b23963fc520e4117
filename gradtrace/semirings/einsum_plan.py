"""Lowers an einsum of a cotangent with a weight to a batched matrix product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from gradtrace.types import Shape


@dataclass(frozen=True)
class EinsumPlan:
    """``out[b, m, n] = ⊕ₖ x[b, m, k] ⊗ w[b, k, n]`` for a spec such as ``"mk,kn->mn"``.

    b stands for the letters in all three, m for those of the input and the result, n for those of
    the weight and the result, k for those of the input that the result lacks, in the order of the
    input, so that a larger k is a later element. Letters of the weight alone are summed.

    A plan is cached by spec and shapes, so its layouts are computed once.
    """

    x: str
    w: str
    out: str
    sizes: dict[str, int]

    @cached_property
    def batch(self) -> str:
        """Letters in all three."""
        return "".join(c for c in self.out if c in self.x and c in self.w)

    @cached_property
    def rows(self) -> str:
        """Letters of the input and the result."""
        return "".join(c for c in self.out if c in self.x and c not in self.w)

    @cached_property
    def columns(self) -> str:
        """Letters of the weight and the result."""
        return "".join(c for c in self.out if c not in self.x)

    @cached_property
    def inner(self) -> str:
        """Letters of the input that the result lacks: those that are contracted."""
        return "".join(c for c in self.x if c not in self.out)

    def size(self, letters: str) -> int:
        """The product of the sizes of these letters."""
        return prod(self.sizes[c] for c in letters)

    def left(self, x: Tensor) -> Tensor:
        """The input as (b, m, k)."""
        return self._left(x)

    @cached_property
    def _left(self) -> EinsumLayout:
        return self._layout(self.x, (self.batch, self.rows, self.inner))

    def right(self, w: Tensor) -> Tensor:
        """The weight as (b, k, n)."""
        alone, missing, layout = self._right
        if alone:  # a pair of elements must have one weight
            w = w.sum(alone)
        for size in missing:  # the weight does not depend on these letters
            w = w.unsqueeze(-1).expand(*w.shape, size)
        return layout(w)

    @cached_property
    def _right(self) -> tuple[list[int], list[int], EinsumLayout]:
        """Dimensions with letters of the weight alone, the sizes of contracted letters that it
        lacks, and the layout of the rest.
        """
        alone = [d for d, c in enumerate(self.w) if c not in self.x and c not in self.out]
        missing = [c for c in self.inner if c not in self.w]
        kept = "".join([c for d, c in enumerate(self.w) if d not in alone] + missing)
        layout = self._layout(kept, (self.batch, self.inner, self.columns))
        return alone, [self.sizes[c] for c in missing], layout

    def back(self, out: Tensor) -> Tensor:
        """(b, m, n) reshaped to the einsum's result."""
        shape, order = self.written
        out = torch.reshape(out, shape)  # the method out.reshape() takes half as long again
        return out if order is None else torch.permute(out, order)

    @cached_property
    def written(self) -> tuple[list[int], list[int] | None]:
        """The shape of (b, m, n) with one dimension for each letter, and the permutation of these
        to the result's order (None: already in that order).
        """
        letters = self.batch + self.rows + self.columns
        order = [letters.index(c) for c in self.out]
        return [self.sizes[c] for c in letters], None if letters == self.out else order

    def _layout(self, letters: str, groups: Sequence[str]) -> EinsumLayout:
        """The permutation and reshape from one dimension for each letter to one for each group."""
        wanted = "".join(groups)
        order = None if wanted == letters else [letters.index(c) for c in wanted]
        return EinsumLayout(order, [self.size(group) for group in groups])

    @cached_property
    def turned(self) -> bool:
        """Whether the result is transposed: its columns come before its rows."""
        return bool(self.rows and self.columns) and self.out == (
            self.batch + self.columns + self.rows
        )

    def strides(self, letters: str) -> dict[str, int]:
        """The stride of each letter in a contiguous tensor with these dimensions."""
        found, step = {}, 1
        for c in reversed(letters):
            found[c] = step
            step *= self.sizes[c]
        return found

    @cached_property
    def element_strides(self) -> ElementStrides:
        """From numbers of elements to their places in the batched product."""
        steps = self.strides(self.x)
        kept = {c: steps[c] for c in self.batch + self.rows}
        spread = [*map(self.strides, (self.batch, self.rows, self.columns)), kept]
        batch, row, column, first = (tuple(by.get(c, 0) for c in self.out) for by in spread)
        inner = self.strides(self.inner)
        sizes, along = (tuple(by[c] for c in self.inner) for by in (self.sizes, steps))
        position = tuple(inner.get(c, 0) for c in self.x)
        return ElementStrides(batch, row, column, first, position, (sizes, along))


class ElementStrides(NamedTuple):
    """Strides that take element numbers to positions in the batched product.

    For each dimension of the output, the stride of the ``batch``, ``row`` and ``column`` number,
    and of the ``first`` input element that the output element is a sum of. ``inner``: for each
    dimension of the input, the stride of the contraction index. ``along``: sizes and input strides
    of the contracted dimensions.
    """

    batch: Shape
    row: Shape
    column: Shape
    first: Shape
    inner: Shape
    along: tuple[Shape, Shape]


class EinsumLayout(NamedTuple):
    """A permutation of dimensions (None: identity), followed by a reshape."""

    order: list[int] | None
    shape: list[int]

    def __call__(self, x: Tensor) -> Tensor:
        """Apply both; a view if the strides allow it."""
        return torch.reshape(x if self.order is None else torch.permute(x, self.order), self.shape)


@lru_cache(maxsize=4096)
def _plan(spec: str, x: Shape, w: Shape) -> EinsumPlan:
    left, rest = spec.split(",")
    right, out = rest.split("->")
    return EinsumPlan(left, right, out, dict(zip(left, x)) | dict(zip(right, w)))


def plan(spec: str, x: Shape, w: Shape) -> EinsumPlan:
    """The plan for an einsum of these shapes, cached."""
    return _plan(spec, tuple(x), tuple(w))


def sum_weight_only_letters(spec: str, weight: Tensor) -> tuple[str, Tensor]:
    """The same einsum with letters of the weight alone summed out, since ``lift`` applies to the
    one weight of a pair of elements.
    """
    kept, alone = _weight_only_letters(spec)
    return (kept, weight.sum(alone)) if alone else (spec, weight)


@lru_cache(maxsize=4096)
def _weight_only_letters(spec: str) -> tuple[str, list[int]]:
    """The einsum without these letters, and their dimensions in the weight."""
    x, rest = spec.split(",")
    w, out = rest.split("->")
    alone = [d for d, c in enumerate(w) if c not in x and c not in out]
    kept = "".join(c for c in w if c in x or c in out)
    return f"{x},{kept}->{out}", alone
