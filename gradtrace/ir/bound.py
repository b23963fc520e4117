"""A block's formula with its maps in place of their indices, for passes that rewrite it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from gradtrace.ir.program import Block, MapTable, Step, Term
from gradtrace.linops import Map
from gradtrace.types import Shape


class BoundTerm(NamedTuple):
    """``Term`` with its map."""

    map: Map
    value: int


class BoundStep(NamedTuple):
    """``Step`` with its maps."""

    out: int
    terms: tuple[BoundTerm, ...]
    shape: Shape
    dtype: torch.dtype


@dataclass
class Formula:
    """The steps of a block, the values that it takes and those that it gives.

    The values in ``gives`` keep their numbers, whatever a pass does: later blocks take them.
    """

    takes: tuple[int, ...]
    gives: tuple[int, ...]
    steps: list[BoundStep]
    note: str = ""


def bind(block: Block, maps: MapTable) -> Formula:
    """The formula of a block."""
    steps = [
        BoundStep(out, tuple([BoundTerm(maps[at], value) for at, value in terms]), shape, dtype)
        for out, terms, shape, dtype in block.steps
    ]
    return Formula(tuple(block.takes.values()), tuple(block.gives.values()), steps, block.note)


def unbind(formula: Formula, block: Block, maps: MapTable) -> Block:
    """The block with this formula. New maps are added to the table; the others keep their index."""
    known = {id(maps[term.map]): term.map for step in block.steps for term in step.terms}

    def term(map_: Map, value: int) -> Term:
        at = known.get(id(map_))
        return maps.term(map_, value) if at is None else Term(at, value)

    steps = [
        Step(out, tuple([term(*each) for each in terms]), shape, dtype)
        for out, terms, shape, dtype in formula.steps
    ]
    return replace(block, steps=tuple(steps), note=formula.note)
