"""The backward program: blocks of steps, each a sum of maps applied to earlier values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from gradtrace.autodiff.names import ModuleCall
from gradtrace.ir.lazy_gradient import LazyGradient
from gradtrace.linops import Map
from gradtrace.types import Shape


class Term(NamedTuple):
    """One map applied to one value."""

    map: Map
    value: int


class Step(NamedTuple):
    """``out = ⊕ over terms (map, value)``; a complex value is its real and imaginary parts, in a
    last dimension of size 2.
    """

    out: int
    terms: tuple[Term, ...]
    shape: Shape
    dtype: torch.dtype


def single(out: int, map_: Map, value: int, dtype: torch.dtype) -> Step:
    """A step of one term. There is one for nearly every node, so the tuples are made as tuples are;
    the constructors of named ones, which are Python code, take three times as long.
    """
    term = _tuple(Term, (map_, value))
    return _tuple(Step, (out, (term,), map_.out_shape, dtype))


def double(out: int, map_: Map, values: tuple[int, int], dtype: torch.dtype) -> Step:
    """A sum of two values, each through the same map."""
    terms = tuple([_tuple(Term, (map_, value)) for value in values])
    return _tuple(Step, (out, terms, map_.out_shape, dtype))


_tuple = tuple.__new__

HOOKS = "hooks"
"""What stands for an operator where a hook on a leaf changes its gradient."""


@dataclass(slots=True)
class Block:
    """The formula of one operator.

    ``takes`` are the values of its cotangents by output slot, ``gives`` the values it hands to
    its arguments by position, ``merges`` the sums with what other users of an argument handed to it
    before. ``opened`` says that a fused operator was taken apart, so that its steps are operators
    of their own. ``note`` says what is not exact for semirings other than SUM.
    """

    operator: str
    place: ModuleCall
    takes: dict[int, int]
    steps: list[Step] = field(default_factory=list)
    gives: dict[int, int] = field(default_factory=dict)
    merges: Sequence[Step] = ()  # most blocks have none
    opened: bool = False
    note: str = ""
    label: tuple[int, tuple[str | None, ...]] | None = None


@dataclass
class Leaf:
    """A leaf, the value that is its gradient, and the gradient as autograd's formulas gave it, or
    what it can be made of.
    """

    tensor: Tensor
    value: int
    given: Tensor | LazyGradient

    def compute(self) -> Tensor:
        """The gradient."""
        return self.given.total() if isinstance(self.given, LazyGradient) else self.given

    @property
    def known(self) -> Tensor | None:
        """The gradient if it was computed already."""
        return None if isinstance(self.given, LazyGradient) else self.given


@dataclass
class Program:
    """A backward pass as data. Run it with ``gradtrace.ir.interpreter.run``.

    It refers to the weights and activations of the forward pass, so it is valid until these are
    changed in place. ``kept`` are gradients of values that recording has computed anyway.
    """

    seed: Tensor
    root: int
    blocks: list[Block]
    leaves: list[Leaf]
    kept: dict[int, Tensor] = field(default_factory=dict)

    def steps(self) -> list[Step]:
        """All steps, in an order that can be run."""
        found: list[Step] = []
        for block in self.blocks:
            found += block.steps
            if block.merges:
                found += block.merges
        return found

    @cached_property
    def last_uses(self) -> dict[int, int]:
        """For each value the number of the last step that takes it. Not to be written to."""
        return {value: n for n, step in enumerate(self.steps()) for _, value in step.terms}

    def wholes(self) -> dict[int, int]:
        """The sum that a value ends up in, for those that are added to what others hand to the same
        argument.
        """
        found: dict[int, int] = {}
        for block in reversed(self.blocks):
            for step in reversed(block.merges):
                for term in step.terms:
                    found[term.value] = found.get(step.out, step.out)
        return found

    def notes(self) -> list[str]:
        """What is not exact for semirings other than SUM, one line an operator."""
        return [f"{block.operator}: {block.note}" for block in self.blocks if block.note]

    def __repr__(self) -> str:
        steps = sum(len(block.steps) for block in self.blocks)
        return (
            f"Program({len(self.blocks):,} operators, {steps:,} steps, {len(self.leaves)} leaves)"
        )
