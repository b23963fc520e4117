"""The structure of a program: all that passes read of it, without its tensors.

Losses of one training loop usually differ in numbers only. Programs of equal structure have equal
plans, so these can be kept (``gradtrace.tracing.kept_plans``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from gradtrace.autodiff.names import ModuleCall
from gradtrace.ir.program import Block, Program, Step

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
    if not isinstance(found, Structure):
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


_tuple = tuple.__new__


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
