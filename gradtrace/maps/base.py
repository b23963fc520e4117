"""What every map is: a structured Jacobian from one cotangent to another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import prod
from typing import TypeAlias

import torch
from torch import Tensor

from gradtrace.semirings import Semiring
from gradtrace.shapes import Shape

Count: TypeAlias = "int | Tensor"
"""How many routes end at each element: one number for all of them, or one for each."""


class Map(ABC):
    """``out[i] = ⊕ⱼ lift(J[i, j]) ⊗ in[j]`` for a Jacobian J that is never written out.

    ``single_source``: every output element comes from at most one input element.
    ``single_target``: every input element goes to at most one output element.
    """

    __slots__ = ("in_shape", "out_shape")
    single_source = False
    single_target = False

    in_shape: Shape
    out_shape: Shape

    @abstractmethod
    def pull(self, x: Tensor, semiring: Semiring) -> Tensor:
        """The value that reaches each output element."""

    @abstractmethod
    def dense(self) -> Tensor:
        """J itself, of shape (outputs, inputs): the meaning of the map."""

    @abstractmethod
    def routes(self, count: Count) -> Count:
        """How many routes end at each output, given how many end at each input (⊕ = +, J ≠ 0 by
        structure).
        """

    def tensors(self) -> tuple[str, ...]:
        """The names of the fields that hold weights."""
        return ()

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


def per_element(count: Count, shape: Shape) -> Tensor:
    """A count written out for each element."""
    if isinstance(count, Tensor):
        return count
    return torch.full(shape, count, dtype=torch.float64)
