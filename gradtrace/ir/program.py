"""The backward program: blocks of steps, each a sum of maps applied to earlier values; and its
structure, all that passes read of it, without its tensors.

Losses of one training loop usually differ in numbers only. Programs of equal structure have equal
plans, so these can be kept (``gradtrace.tracing.kept_plans``).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradtrace.autodiff.names import ModuleCall
from gradtrace.ir.lazy_gradient import LazyGradient
from gradtrace.linops import Map
from gradtrace.linops.indexing import nearby
from gradtrace.pytorch.dtensor import Layout, LocalParts
from gradtrace.types import Shape


class Term(NamedTuple):
    """One map applied to one value; the map by its index in ``Constants.maps``."""

    map: int
    value: int


class Step(NamedTuple):
    """``out = ⊕ map(value)`` over the terms. A complex value is stored as its real and imaginary
    parts, in a last dimension of size 2.
    """

    out: int
    terms: tuple[Term, ...]
    shape: Shape
    dtype: torch.dtype


class MapTable(list[Map]):
    """The maps of a program; steps refer to them by index."""

    def term(self, map_: Map, value: int) -> Term:
        """A term with this map, which is added to the table."""
        self.append(map_)
        return _tuple(Term, (len(self) - 1, value))

    def single(self, out: int, map_: Map, value: int, dtype: torch.dtype) -> Step:
        """A step with one term. Nearly every node has one, so this calls ``tuple.__new__``
        directly: NamedTuple constructors are Python code and take three times as long.
        """
        term = _tuple(Term, (len(self), value))
        self.append(map_)
        return _tuple(Step, (out, (term,), map_.out_shape, dtype))

    def of(self, step: Step) -> list[Map]:
        """The maps of a step's terms."""
        return [self[term.map] for term in step.terms]


_tuple = tuple.__new__

HOOKS = "hooks"
"""Operator name of a block that stands for a hook on a leaf which changes its gradient."""


@dataclass(slots=True)
class Block:
    """The backward formula of one operator.

    ``takes`` maps output slots to the values of their cotangents, ``gives`` maps argument positions
    to the values of their cotangents. ``merges`` are the steps that add these to the contributions
    of earlier users of the same argument. ``composed`` is set if the formula was recorded operation
    by operation, so that two elements may be connected by several routes. ``opened`` is set if a
    fused operator was decomposed, so that each step counts as an operator. ``note`` says what is
    not exact for semirings other than SUM.
    """

    operator: str
    place: ModuleCall
    takes: dict[int, int]
    steps: tuple[Step, ...] = ()
    gives: dict[int, int] = field(default_factory=dict)
    merges: tuple[Step, ...] = ()
    composed: bool = False
    opened: bool = False
    note: str = ""
    label: tuple[int, tuple[str | None, ...]] | None = None


@dataclass(slots=True)
class Leaf:
    """A leaf, the number of the value that is its gradient, and the gradient as autograd's formulas
    computed it, or a lazy gradient that can be computed later. ``shard`` is the part that this rank
    holds of a parameter which is in memory as a whole only while it is used. With a ``layout``, the
    gradient given is this rank's part of it, and it is finite. ``device``: that of the program's
    values, where it is not the leaf's own.
    """

    tensor: Tensor
    value: int
    given: Tensor | LazyGradient
    shard: Any = None  # a DTensor
    layout: Layout | None = None
    device: torch.device | None = None

    def compute(self) -> Tensor:
        """The gradient, computed now if it is lazy, gathered if this rank has a part of it; on the
        leaf's device.
        """
        if isinstance(self.given, LazyGradient):
            return self.given.total()
        if self.device is not None:
            return self.given.to(self.tensor.device)
        return self.given if self.layout is None else self.layout.gather(self.given)

    def gradient(self) -> Tensor:
        """``compute``, on the device of the program's values."""
        return self.compute() if self.device is None else self.compute().to(self.device)

    @property
    def stored(self) -> Tensor:
        """What is in memory of the leaf."""
        return self.tensor if self.shard is None else self.shard.to_local()

    @property
    def known(self) -> Tensor | None:
        """The gradient if it has been computed, else None."""
        if self.layout is not None or isinstance(self.given, LazyGradient):
            return None
        return self.given


@dataclass
class Constants:
    """All that holds a tensor; programs and plans refer to it by index.

    Losses of the same structure have equal programs, and each its own constants. ``seed`` is the
    cotangent of the loss. ``kept`` are gradients that recording computed anyway, by value number.
    ``parts``: values of which this rank has its own part, and the ranks that have the others.
    """

    seed: Tensor
    maps: MapTable
    leaves: list[Leaf]
    kept: dict[int, Tensor] = field(default_factory=dict)
    parts: LocalParts | None = None

    def known_gradients(self) -> dict[int, Tensor]:
        """The gradients that recording has computed, by value: of leaves, and those it kept."""
        known = dict(self.kept)
        for leaf in self.leaves:
            if (given := leaf.known) is not None:
                known[leaf.value] = given
        for value in [value for value, grad in known.items() if not grad.dim()]:
            known[value] = nearby(known[value], self.seed.device)
        return known


@dataclass(eq=False)
class ProgramFacts:
    """What follows from the structure of a program, found when asked for. Programs that were
    replayed from one recording share it.
    """

    structure: Structure | None = None
    maps: tuple[object, ...] = ()  # the structures of its maps, if they are known
    last_uses: dict[int, int] | None = None
    step_bytes: tuple[int, int] | None = None  # gradtrace.ir.memory.step_bytes
    streaming_bytes: dict[Hashable, int] = field(default_factory=dict)  # ir.memory.streaming
    rescaled_often: dict[float, int] = field(default_factory=dict)  # by power: ir.rescaling


@dataclass
class Program:
    """A backward pass as data. Run it with ``gradtrace.ir.interpreter.run``.

    ``constants`` refer to the weights and activations of the forward pass, so a program is valid
    until these are changed in place. ``root`` is the number of the loss's cotangent; values have
    numbers below ``size``. ``blocks`` are shared with programs of the same structure: do not modify
    them. ``recorded`` is the reason why nodes were recorded one by one; empty if an earlier
    recording was replayed, None for a program made of another.
    """

    root: int
    size: int
    blocks: tuple[Block, ...]
    constants: Constants
    facts: ProgramFacts = field(default_factory=ProgramFacts, init=False, repr=False, compare=False)
    recorded: str | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def seed(self) -> Tensor:
        """The cotangent of the loss."""
        return self.constants.seed

    @property
    def leaves(self) -> list[Leaf]:
        """The leaves that have a gradient."""
        return self.constants.leaves

    @property
    def kept(self) -> dict[int, Tensor]:
        """Gradients that recording kept, by value number."""
        return self.constants.kept

    @property
    def maps(self) -> MapTable:
        """The maps that steps refer to."""
        return self.constants.maps

    def steps(self) -> list[Step]:
        """All steps, in execution order."""
        found: list[Step] = []
        for block in self.blocks:
            found += block.steps
            if block.merges:
                found += block.merges
        return found

    @property
    def last_uses(self) -> dict[int, int]:
        """For each value the number of the last step that reads it. Cached: do not modify."""
        found = self.facts.last_uses
        if found is None:
            found = {value: n for n, step in enumerate(self.steps()) for _, value in step.terms}
            self.facts.last_uses = found
        return found

    def wholes(self) -> dict[int, int]:
        """For each value that is added to other contributions to the same argument, the value that
        is the complete sum.
        """
        found: dict[int, int] = {}
        for block in reversed(self.blocks):
            for step in reversed(block.merges):
                for term in step.terms:
                    found[term.value] = found.get(step.out, step.out)
        return found

    def notes(self) -> list[str]:
        """What is not exact for semirings other than SUM, one line for each operator concerned."""
        return [f"{block.operator}: {block.note}" for block in self.blocks if block.note]

    def __repr__(self) -> str:
        steps = sum(len(block.steps) for block in self.blocks)
        return (
            f"Program({len(self.blocks):,} operators, {steps:,} steps, {len(self.leaves)} leaves)"
        )


Pairs = tuple[tuple[int, int], ...]


class BlockStructure(NamedTuple):
    """The fields of a ``Block`` as hashable values."""

    operator: str
    place: ModuleCall
    takes: Pairs
    steps: tuple[Step, ...]
    gives: Pairs
    merges: tuple[Step, ...]
    opened: bool
    label: tuple[int, tuple[str | None, ...]] | None


@dataclass(frozen=True)
class Structure:
    """A program without its tensors. ``leaves`` are values, and whether their gradients have been
    computed; ``kept`` the values whose gradients recording kept. The hash is computed once.
    """

    root: int
    dtype: torch.dtype
    device: torch.device
    leaves: tuple[tuple[int, bool], ...]
    blocks: tuple[BlockStructure, ...]
    maps: tuple[object, ...]
    kept: tuple[int, ...]

    @cached_property
    def _hash(self) -> int:
        return hash((self.root, self.leaves, self.blocks, self.maps, self.kept))

    def __hash__(self) -> int:
        return self._hash


def structure_of(program: Program) -> Structure:
    """The structure of a program; programs replayed from one recording have the same object."""
    found = program.facts.structure
    if found is None:
        seed, maps = program.seed, program.facts.maps
        if len(maps) != len(program.maps):
            maps = tuple([map_.structure() for map_ in program.maps])
        found = Structure(
            program.root,
            seed.dtype,
            seed.device,
            tuple([(leaf.value, leaf.known is not None) for leaf in program.leaves]),
            tuple(map(_block, program.blocks)),
            maps,
            tuple(program.kept),
        )
        program.facts.structure = found
    return found


def _block(block: Block) -> BlockStructure:
    takes, gives = block.takes, block.gives
    return _tuple(
        BlockStructure,
        (
            block.operator,
            block.place,
            (*takes.items(),),
            block.steps,
            (*gives.items(),),
            block.merges,
            block.opened,
            block.label,
        ),
    )


def difference(old: Structure, new: Structure) -> str:
    """The first difference between two structures, in words."""
    if (old.dtype, old.device) != (new.dtype, new.device):
        return f"the loss is {new.dtype} on {new.device}, not {old.dtype} on {old.device}"
    for before, after in zip(old.blocks, new.blocks):
        if before != after and (found := _block_difference(before, after)):
            return found
    if len(old.blocks) != len(new.blocks):
        return f"{len(new.blocks):,} operators, not {len(old.blocks):,}"
    if len(old.leaves) != len(new.leaves):
        return f"{len(new.leaves):,} leaves, not {len(old.leaves):,}"
    if old.maps != new.maps:
        return "derivatives of another kind"
    if old.kept != new.kept:
        return "other gradients were kept in memory"
    return "modules or parameters have other names"


def _block_difference(old: BlockStructure, new: BlockStructure) -> str:
    where = f" in {new.place.module}" if new.place.module else ""
    if (old.operator, old.place) != (new.operator, new.place):
        there = f" in {old.place.module}" if old.place.module else ""
        return f"{new.operator}{where} in place of {old.operator}{there}"
    shapes = [tuple(step.shape for step in each.steps + each.merges) for each in (old, new)]
    if shapes[0] != shapes[1]:
        changed = [pair for pair in zip(*shapes) if pair[0] != pair[1]]
        if changed:
            return f"{new.operator}{where}: shape {changed[0][1]}, not {changed[0][0]}"
    return f"{new.operator}{where} is connected otherwise" if old.steps != new.steps else ""
