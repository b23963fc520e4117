"""An einsum of a cotangent with a weight, brought into the form of a batched matrix product."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from torch import Tensor

from gradtrace.shapes import Shape


@dataclass(frozen=True)
class Plan:
    """``out[b, m, n] = ⊕ₖ x[b, m, k] ⊗ w[b, k, n]`` for a spec such as ``"mk,kn->mn"``.

    Letters: b are in all three, m the input's and the result's, n the weight's and the result's, k
    those of the input that the result lacks, in the order of the input, so that a larger k is a
    later element. Letters of the weight alone are summed.
    """

    x: str
    w: str
    out: str
    sizes: dict[str, int]

    @property
    def batch(self) -> str:
        """In all three."""
        return "".join(c for c in self.out if c in self.x and c in self.w)

    @property
    def rows(self) -> str:
        """Of the input and the result."""
        return "".join(c for c in self.out if c in self.x and c not in self.w)

    @property
    def columns(self) -> str:
        """Of the weight and the result."""
        return "".join(c for c in self.out if c not in self.x)

    @property
    def inner(self) -> str:
        """Of the input, not of the result: what the sum runs over."""
        return "".join(c for c in self.x if c not in self.out)

    def size(self, letters: str) -> int:
        """How many combinations these letters have."""
        return prod(self.sizes[c] for c in letters)

    def left(self, x: Tensor) -> Tensor:
        """The input as (b, m, k)."""
        groups = (self.batch, self.rows, self.inner)
        x = x.permute([self.x.index(c) for c in "".join(groups)])
        return x.reshape([self.size(group) for group in groups])

    def right(self, w: Tensor) -> Tensor:
        """The weight as (b, k, n)."""
        spec, w = together(f"{self.x},{self.w}->{self.out}", w)
        kept = list(spec.split(",")[1].split("->")[0])
        groups = (self.batch, self.inner, self.columns)
        for c in self.inner:
            if c not in kept:  # the same weight for all of them
                w, kept = w.unsqueeze(-1).expand(*w.shape, self.sizes[c]), [*kept, c]
        w = w.permute([kept.index(c) for c in "".join(groups)])
        return w.reshape([self.size(group) for group in groups])

    def back(self, out: Tensor) -> Tensor:
        """(b, m, n) in the shape of the result."""
        letters = self.batch + self.rows + self.columns
        out = out.reshape([self.sizes[c] for c in letters])
        return out.permute([letters.index(c) for c in self.out])

    @property
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


@lru_cache(maxsize=4096)
def _plan(spec: str, x: Shape, w: Shape) -> Plan:
    left, rest = spec.split(",")
    right, out = rest.split("->")
    return Plan(left, right, out, dict(zip(left, x)) | dict(zip(right, w)))


def plan(spec: str, x: Shape, w: Shape) -> Plan:
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
