"""Plans: what is computed, in which order and form, and when values are freed.

A plan is made from a program and a request by ``gradtrace.ir.optimise``. It holds no tensors: it
refers to values by number and to maps by their index in the program's constants.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, auto
from typing import NamedTuple, TypeAlias

import torch

from gradtrace.ir.program import Step


class Encoding(IntEnum):
    """How the provenance of a map's result is found."""

    MOVED = auto()
    """By a gather: provenance ids move with the elements."""
    SCALED = auto()
    """By a diagonal map: an element keeps its id, unless it becomes 0."""
    UNIFORM = auto()
    """All elements of the input have one provenance: there is a path, or there is none."""
    DENSE = auto()
    """Each element takes the id of its largest contribution."""
    SPARSE = auto()
    """As dense, for a leaf of which only few elements are reached: only those are held."""
    LAZY = auto()
    """As dense, for a leaf: computed while its ids are counted."""
    PARTIAL = auto()
    """The operand is a partial sum, which is taken as it is."""


class Sizing(IntEnum):
    """Whether the largest single contribution to each element is found beside a result, which is
    their sum. Only the rule ``edge`` asks for it.
    """

    NONE = 0
    """No: it is |value|, or nothing depends on it."""
    FRESH = auto()
    """Of the contributions of the operand's elements."""
    CARRIED = auto()
    """Of the contributions that the operand was made of, within the same operator."""
    LAST = auto()
    """As ``CARRIED``, but only to see which elements have a path; then it is dropped."""
    PRESENT = auto()
    """A term of a sum whose terms all have the same provenance: only whether there is a
    contribution matters, even if those of the term cancel.
    """


class Form(NamedTuple):
    """In which form a rule computes a result.

    ``deferred``: only a leaf is made of it, so its value is not computed until it is counted.
    ``leaf``: it is a leaf. ``partial``: of a sum, if more terms follow. ``size``: whether the
    largest single contribution is found too.
    """

    encoding: Encoding
    dtype: torch.dtype
    deferred: bool = False
    leaf: bool = False
    partial: bool = False
    size: Sizing = Sizing.NONE


class Apply(NamedTuple):
    """A step of one term: ``out = map(value)``."""

    step: Step
    form: Form
    free: tuple[int, ...] = ()


class Exchange(NamedTuple):
    """A step of one term whose map is across ranks: these exchange values and provenance."""

    step: Step
    form: Form
    free: tuple[int, ...] = ()


class Join(NamedTuple):
    """A step of several terms: ``out = ⊕ map(value)``. ``forms`` are those of the terms. Encoding
    ``UNIFORM`` of the result: all terms have the same provenance.
    """

    step: Step
    form: Form
    forms: tuple[Form, ...]
    free: tuple[int, ...] = ()


class Concat(NamedTuple):
    """A step whose terms tile the result, in ``order``: each element comes from one of them."""

    step: Step
    form: Form
    order: list[int]
    free: tuple[int, ...] = ()


class Sum(NamedTuple):
    """The gradient of a step within a nested sum; its provenance is that of ``Nested``."""

    step: Step
    form: Form
    forms: tuple[Form, ...]
    free: tuple[int, ...] = ()


class Nested(NamedTuple):
    """Find the largest single contributions within a sum of sums: |value| of ``takes`` through
    ``steps`` in the MAX semiring.
    """

    takes: tuple[int, ...]
    steps: tuple[Apply | Join, ...]


class TakeProvenance(NamedTuple):
    """Values take the provenance of the largest contributions that ``Nested`` found; those in
    ``sized`` their sizes, too.
    """

    values: tuple[int, ...]
    sized: frozenset[int] = frozenset()


class AddBits(NamedTuple):
    """Add bits to the provenance of every element of a value."""

    value: int
    bits: int


class AddSlices(NamedTuple):
    """Add ``bits[k]`` to the provenance of slice k along a dimension."""

    value: int
    dim: int
    bits: list[int]


class Emit(NamedTuple):
    """A leaf is complete."""

    value: int


Instruction: TypeAlias = (
    "Apply | Exchange | Join | Concat | Sum | Nested | TakeProvenance | AddBits | AddSlices | Emit"
)


@dataclass(frozen=True)
class Storage:
    """What a plan holds in memory. ``compact``: provenance ids wait for their use in one or two
    bytes instead of four. ``batch_bytes``: leaves may be held up to this many bytes, to be counted
    in one launch.
    """

    compact: bool = False
    batch_bytes: int = 0


NO_LIMIT = Storage()
"""All values as they are; each leaf is counted by itself."""


@dataclass(frozen=True)
class Plan:
    """Instructions in order, and the rule that they were planned for. ``gradients``: values are
    the gradients of recording, so those that it kept are not computed again.
    """

    rule: str
    root: int
    instructions: tuple[Instruction, ...]
    gradients: bool
    storage: Storage
