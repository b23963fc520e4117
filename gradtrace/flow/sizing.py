"""Measures every cotangent of a program, its operator graph, and where gradients become 0."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf, prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

from gradtrace.flow.result import UNDERFLOW_FACTOR
from gradtrace.ir.interpreter import gradient_of
from gradtrace.ir.program import HOOKS, Block, Program
from gradtrace.linops import Map


class Size(NamedTuple):
    """Measurements of a cotangent; ``mass`` is ``Σ |x[i]|``."""

    norm: float
    largest: float
    nonzero: int
    mass: float
    entries: int
    dtype: torch.dtype


def measure(program: Program, seed: Tensor) -> dict[int, Size]:
    """The sizes of all cotangents at operators' outputs and inputs, and of leaves.

    One pass; each cotangent is dropped after its last use.
    """
    last, wanted = program.last_uses, _wanted(program)
    kept = program.kept if seed is program.seed else {}
    values, found = {program.root: seed}, dict[int, Tensor]()
    shapes = {program.root: (seed.numel(), seed.dtype)}
    with torch.no_grad():
        found[program.root] = sizes(seed)
        for n, step in enumerate(program.steps()):
            known = kept.get(step.out)
            values[step.out] = gradient_of(step, program.maps, values) if known is None else known
            if step.out in wanted:
                found[step.out] = sizes(values[step.out])
                shapes[step.out] = (prod(step.shape), step.dtype)
            for value in (step.out, *(term.value for term in step.terms)):
                if last.get(value, -1) <= n:
                    values.pop(value, None)
    numbers = (each.tolist() for each in _to_cpu(list(found.values())))
    return {
        value: Size(a, b, int(c), d, *shapes[value]) for value, (a, b, c, d) in zip(found, numbers)
    }


def _wanted(program: Program) -> set[int]:
    wanted = {leaf.value for leaf in program.leaves}
    for block in program.blocks:
        wanted.update(block.takes.values(), block.gives.values())
    return wanted


def _to_cpu(many: list[Tensor]) -> Iterable[Tensor]:
    """Copied to the CPU in one transfer: a sync for each would cost more than its computation."""
    devices = {each.device for each in many}
    return torch.stack(many).cpu() if len(devices) == 1 else (each.cpu() for each in many)


def sizes(x: Tensor) -> Tensor:
    """``‖x‖``, ``max |x[i]|``, the number of nonzero entries and ``Σ |x[i]|``, as float64 (4,).

    float64 holds the squares of all smaller floats. Squares of float64 may overflow, so there
    ``‖x‖ = m ‖x/m‖`` with m the largest magnitude.
    """
    if not x.numel():
        return torch.zeros(4, dtype=torch.float64, device=x.device)
    largest = vector_norm(x, inf).double()
    if x.dtype is torch.float64:
        unit = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
        norm = vector_norm(x / unit) * unit
    else:
        norm = vector_norm(x, dtype=torch.float64)
    mass = vector_norm(x, 1, dtype=torch.float64)
    return torch.stack([norm, largest, x.count_nonzero().double(), mass])


# The operator graph ------------------------------------------------------------------------------


class PassedGradient(NamedTuple):
    """An edge: a cotangent that an operator passes to one of the activation side, or to a leaf."""

    giver: int
    value: int
    whole: int  # the sum it is a term of, if the argument has several users; else ``value``
    taker: int | None
    leaf: int | None


class OperatorGraph:
    """Operators by number, the edges of the activation side, and depths."""

    def __init__(self, program: Program, size: Mapping[int, Size]) -> None:
        self.program = program
        self.size = size
        self.blocks = program.blocks
        self.takers = {v: n for n, block in enumerate(self.blocks) for v in block.takes.values()}
        self.wholes = program.wholes()
        self.aside = self._aside()
        self.edges = list(self._edges())
        self.depth = self._depth()

    def _aside(self) -> dict[int, int]:
        """The operators not on the activation side, each with one leaf below; never the loss."""
        leaves = {leaf.value for leaf in self.program.leaves}
        found: dict[int, int] = {}
        for number in range(len(self.blocks) - 1, 0, -1):
            block = self.blocks[number]
            wholes = [self.wholes.get(value, value) for value in block.gives.values()]
            below = [w if w in leaves else found.get(self.takers.get(w, -1)) for w in wholes]
            if below and below[0] is not None and None not in below and self._prepares(block):
                found[number] = below[0]
        return found

    def _prepares(self, block: Block) -> bool:
        """Whether an operator on leaves only prepares them for others to use."""
        parametrised = "parametrizations" in block.place.module.split(".")
        return block.operator == HOOKS or parametrised or self._views(block)

    def _views(self, block: Block) -> bool:
        """Whether an operator only rearranges elements, each exactly once."""
        taken, given = (
            sum(self.size[value].nonzero for value in values.values())
            for values in (block.takes, block.gives)
        )
        return taken == given and all(m.is_gather for m in maps_of(block, self.program))

    def _edges(self) -> Iterator[PassedGradient]:
        for number, block in enumerate(self.blocks):
            if number in self.aside:
                continue
            for value in block.gives.values():
                whole = self.wholes.get(value, value)
                taker = self.takers.get(whole)
                if taker is None or taker in self.aside:
                    leaf = whole if taker is None else self.aside[taker]
                    yield PassedGradient(number, value, whole, None, leaf)
                else:
                    yield PassedGradient(number, value, whole, taker, None)

    def _depth(self) -> dict[int, int]:
        found = {0: 0} if self.blocks else {}
        for edge in self.edges:  # givers come before takers
            if edge.taker is not None:
                found[edge.taker] = max(found.get(edge.taker, 0), found[edge.giver] + 1)
        return found

    def enters(self, edge: PassedGradient) -> int | None:
        """The operator that receives an edge, if it is in another call or another module."""
        if edge.taker is None or self.blocks[edge.taker].place == self.blocks[edge.giver].place:
            return None
        return edge.taker


def maps_of(block: Block, program: Program) -> Iterator[Map]:
    """The maps of an operator's formula."""
    return (map_ for step in block.steps for map_ in program.maps.of(step))


def elementwise(block: Block, program: Program) -> bool:
    """Whether an operator scales or drops each element separately, as activation functions do."""
    single = len(block.takes) == 1 == len(block.gives)
    return single and all(
        m.inputs == m.outputs and (m.is_diagonal or m.is_gather) for m in maps_of(block, program)
    )


# What became 0 -----------------------------------------------------------------------------------


class VanishedGradient(NamedTuple):
    """The block after which a gradient is exactly 0; ``faint``: by underflow."""

    block: int
    faint: bool


def losses_of(wiring: OperatorGraph, size: Mapping[int, Size]) -> dict[int, VanishedGradient]:
    """For every value that is 0, where it became 0."""
    lost: dict[int, VanishedGradient] = {}
    for number, block in enumerate(wiring.blocks):
        takes = block.takes.values()
        before = [lost[value] for value in takes if value in lost]
        alive = [size[value] for value in takes if size[value].largest]
        for value in block.gives.values():
            if size[value].entries and not size[value].nonzero:
                here = VanishedGradient(
                    number, underflows(maps_of(block, wiring.program), alive, size[value])
                )
                lost[value] = here if alive or not before else _of(before)
        for step in block.merges:
            if all(term.value in lost for term in step.terms):
                lost[step.out] = _of([lost[term.value] for term in step.terms])
    return lost


def underflows(maps: Iterable[Map], takes: Sequence[Size], give: Size) -> bool:
    """Whether the gradient passed on by an operator is 0 by underflow."""
    if not takes or (
        all(m.is_gather for m in maps) and all(take.dtype is give.dtype for take in takes)
    ):
        return False
    kind = torch.finfo(give.dtype)
    return max(take.largest for take in takes) <= UNDERFLOW_FACTOR * kind.smallest_normal * kind.eps


def _of(many: Sequence[VanishedGradient]) -> VanishedGradient:
    return next((each for each in many if each.faint), many[0])
