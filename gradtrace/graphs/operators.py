"""Vertices and edges of the operator graph."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from gradtrace.types import Shape


@dataclass(frozen=True, slots=True)
class Operator:
    """A vertex: an operator of the forward pass, or a leaf.

    ``shapes`` has one shape for each output. ``leaf`` is the name of a leaf, and ``names`` are all
    its names (tied weights have several). ``module`` is the innermost module in whose forward it
    was made (``""`` outside any), ``call`` the index of that module's call.
    """

    index: int
    name: str
    shapes: tuple[Shape, ...]
    module: str = ""
    call: int = 0
    leaf: str | None = None
    names: tuple[str, ...] = ()

    @property
    def shape(self) -> Shape:
        """The shape of the (first) output."""
        return self.shapes[0] if self.shapes else ()

    @property
    def size(self) -> int:
        """The number of output scalars."""
        return sum(prod(shape) for shape in self.shapes)


@dataclass(frozen=True, slots=True)
class Edge:
    """``(u, v, k)``: output ``slot`` of operator v is the k-th argument of operator u.

    ``producer`` is None where the argument needs no gradient.
    """

    consumer: int
    producer: int | None
    position: int
    slot: int = 0
