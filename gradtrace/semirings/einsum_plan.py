"""An einsum of a cotangent with a weight, brought into the form of a batched matrix product."""

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

    Letters: b are in all three, m the input's and the result's, n the weight's and the result's, k
    those of the input that the result lacks, in the order of the input, so that a larger k is a
    later element. Letters of the weight alone are summed.

    A plan is made once and used for every product of its shapes, so what follows from the letters
    is worked out once.
    """

    x: str
    w: str
    out: str
    sizes: dict[str, int]

    @cached_property
    def batch(self) -> str:
        """In all three."""
        return "".join(c for c in self.out if c in self.x and c in self.w)

    @cached_property
    def rows(self) -> str:
        """Of the input and the result."""
        return "".join(c for c in self.out if c in self.x and c not in self.w)

    @cached_property
    def columns(self) -> str:
        """Of the weight and the result."""
        return "".join(c for c in self.out if c not in self.x)

    @cached_property
    def inner(self) -> str:
        """Of the input, not of the result: what the sum runs over."""
        return "".join(c for c in self.x if c not in self.out)

    def size(self, letters: str) -> int:
        """How many combinations these letters have."""
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
        if alone:  # two elements have one weight
            w = w.sum(alone)
        for size in missing:  # the same weight for all of them
            w = w.unsqueeze(-1).expand(*w.shape, size)
        return layout(w)

    @cached_property
    def _right(self) -> tuple[list[int], list[int], EinsumLayout]:
        """Dimensions of the weight alone, sizes of those it lacks, and how the rest is laid out."""
        alone = [d for d, c in enumerate(self.w) if c not in self.x and c not in self.out]
        missing = [c for c in self.inner if c not in self.w]
        kept = "".join([c for d, c in enumerate(self.w) if d not in alone] + missing)
        layout = self._layout(kept, (self.batch, self.inner, self.columns))
        return alone, [self.sizes[c] for c in missing], layout

    def back(self, out: Tensor) -> Tensor:
        """(b, m, n) in the shape of the result."""
        shape, order = self.written
        out = torch.reshape(out, shape)  # as a method it would take half as long again
        return out if order is None else torch.permute(out, order)

    @cached_property
    def written(self) -> tuple[list[int], list[int] | None]:
        """The shape of (b, m, n) with a dimension for each letter, and the order of these that the
        result has, if another.
        """
        letters = self.batch + self.rows + self.columns
        order = [letters.index(c) for c in self.out]
        return [self.sizes[c] for c in letters], None if letters == self.out else order

    def _layout(self, letters: str, groups: Sequence[str]) -> EinsumLayout:
        """From dimensions of these letters to one for each group of them."""
        wanted = "".join(groups)
        order = None if wanted == letters else [letters.index(c) for c in wanted]
        return EinsumLayout(order, [self.size(group) for group in groups])

    @cached_property
    def turned(self) -> bool:
        """Whether the result has its columns before its rows."""
        return bool(self.rows and self.columns) and self.out == (
            self.batch + self.columns + self.rows
        )

    def strides(self, letters: str) -> dict[str, int]:
        """What a step along each letter adds to an element's number."""
        found, step = {}, 1
        for c in reversed(letters):
            found[c] = step
            step *= self.sizes[c]
        return found


class EinsumLayout(NamedTuple):
    """Dimensions in another order (None: as they are), then in another shape."""

    order: list[int] | None
    shape: list[int]

    def __call__(self, x: Tensor) -> Tensor:
        """The tensor laid out so."""
        return torch.reshape(x if self.order is None else torch.permute(x, self.order), self.shape)


@lru_cache(maxsize=4096)
def _plan(spec: str, x: Shape, w: Shape) -> EinsumPlan:
    left, rest = spec.split(",")
    right, out = rest.split("->")
    return EinsumPlan(left, right, out, dict(zip(left, x)) | dict(zip(right, w)))


def plan(spec: str, x: Shape, w: Shape) -> EinsumPlan:
    """How an einsum of these shapes is a batched matrix product."""
    return _plan(spec, tuple(x), tuple(w))


def together(spec: str, weight: Tensor) -> tuple[str, Tensor]:
    """The same einsum, letters of the weight alone summed: two elements have one weight."""
    x, rest = spec.split(",")
    w, out = rest.split("->")
    alone = [d for d, c in enumerate(w) if c not in x and c not in out]
    if not alone:
        return spec, weight
    kept = "".join(c for c in w if c in x or c in out)
    return f"{x},{kept}->{out}", weight.sum(alone)
