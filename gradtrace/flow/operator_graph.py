"""The operator graph of a program with the sizes of its cotangents: norms along depth, and where
gradients become 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from heapq import heappop, heappush
from math import inf, isnan, nan, sqrt
from typing import NamedTuple

import torch

from gradtrace.flow.sizing import Size
from gradtrace.flow.tuning import MEDIAN_DEPTHS, SEQUENCE_MIN_DEPTHS, UNDERFLOW_FACTOR
from gradtrace.ir.program import HOOKS, Program
from gradtrace.linops import Map

LOSSES = ("LogSoftmax", "NllLoss", "BinaryCrossEntropy", "LogSigmoid", "MseLoss", "KlDiv")
"""How operators begin that are a loss function's, wherever they lie before the first module."""


class Level(NamedTuple):
    """The operator with the largest gradient norm at its output, at one depth; ``zeros`` is the
    share of entries that are exactly 0.
    """

    depth: int
    norm: float
    operator: str
    module: str
    entries: int
    zeros: float

    @property
    def rms(self) -> float:
        """The root of the mean square: ``norm / √entries``."""
        return self.norm / sqrt(self.entries) if self.entries else 0.0

    @property
    def where(self) -> str:
        """The module's name in quotes; outside any module, the operator's name."""
        return f"'{self.module}'" if self.module else self.operator


class PassedGradient(NamedTuple):
    """An edge: a cotangent that an operator passes to one of the activation side, or to a leaf."""

    giver: int
    value: int
    whole: int  # the sum it is a term of, if the argument has several users; else ``value``
    taker: int | None
    leaf: int | None


class VanishedGradient(NamedTuple):
    """The block after which a gradient is exactly 0; ``faint``: by underflow."""

    block: int
    faint: bool


class Change(NamedTuple):
    """A change of the gradient from one level to another; ``uses``: over this many uses of a leaf
    (0: along the profile).
    """

    first: Level
    last: Level
    uses: int = 0

    @property
    def ratio(self) -> float:
        """``last / first``."""
        return self.last.norm / self.first.norm if self.first.norm else nan


class OperatorGraph:
    """Operators by number; the ``edges`` of the activation side and the ``depth`` of its operators;
    for each value that is 0, where it became 0 (``lost``).
    """

    def __init__(self, program: Program, size: Mapping[int, Size]) -> None:
        self.program, self.size, self.blocks = program, size, program.blocks
        self.takers = {v: n for n, block in enumerate(self.blocks) for v in block.takes.values()}
        self.wholes = program.wholes()
        self.aside = self._aside()
        self.edges = list(self._edges())
        self.depth = {0: 0} if self.blocks else {}
        for giver, _, _, taker, _ in self.edges:  # givers come before takers
            if taker is not None:
                self.depth[taker] = max(self.depth.get(taker, 0), self.depth[giver] + 1)
        self.lost = self._lost()
        self.levels: dict[int, Level] = {}  # the largest cotangent at an operator's outputs
        self.alive: set[int] = set()  # operators whose gradient is not 0, or only by underflow
        for number, depth in self.depth.items():
            block = self.blocks[number]
            value = max(block.takes.values(), key=lambda v: rank(size[v]))
            norm, _, nonzero, _, entries, _ = size[value]
            place, zeros = (block.operator, block.place.module), zero_share(entries, nonzero)
            self.levels[number] = Level(depth, norm, *place, entries, zeros)
            if nonzero or self.faint(value):
                self.alive.add(number)

    def _aside(self) -> dict[int, int]:
        """The operators not on the activation side, each with one leaf below; never the loss."""
        leaves = {leaf.value for leaf in self.program.leaves}
        found: dict[int, int] = {}
        for number in range(len(self.blocks) - 1, 0, -1):
            wholes = [self.wholes.get(v, v) for v in self.blocks[number].gives.values()]
            below = [w if w in leaves else found.get(self.takers.get(w, -1)) for w in wholes]
            if below and below[0] is not None and None not in below and self._prepares(number):
                found[number] = below[0]
        return found

    def _prepares(self, number: int) -> bool:
        """Whether an operator on leaves only prepares them for others to use: a hook, part of a
        parametrisation, or a rearrangement of the elements, each exactly once.
        """
        block = self.blocks[number]
        if block.operator == HOOKS or "parametrizations" in block.place.module.split("."):
            return True
        taken, given = (
            sum(self.size[value].nonzero for value in values.values())
            for values in (block.takes, block.gives)
        )
        return taken == given and self.gathers(number)

    def _edges(self) -> Iterator[PassedGradient]:
        for number, block in enumerate(self.blocks):
            for value in block.gives.values() if number not in self.aside else ():
                whole = self.wholes.get(value, value)
                taker = self.takers.get(whole)
                if taker is None or taker in self.aside:
                    leaf = whole if taker is None else self.aside[taker]
                    yield PassedGradient(number, value, whole, None, leaf)
                else:
                    yield PassedGradient(number, value, whole, taker, None)

    def _lost(self) -> dict[int, VanishedGradient]:
        lost: dict[int, VanishedGradient] = {}
        for number, block in enumerate(self.blocks):
            takes = block.takes.values()
            before = [lost[value] for value in takes if value in lost]
            alive = [self.size[value] for value in takes if self.size[value].largest]
            for value in block.gives.values():
                size = self.size[value]
                if size.entries and not size.nonzero:
                    here = VanishedGradient(number, self._underflows(number, alive, size))
                    lost[value] = here if alive or not before else _faintest(before)
            for step in block.merges:
                if all(term.value in lost for term in step.terms):
                    lost[step.out] = _faintest([lost[term.value] for term in step.terms])
        return lost

    def _underflows(self, number: int, takes: Sequence[Size], give: Size) -> bool:
        """Whether the gradient passed on by an operator is 0 by underflow."""
        if not takes or (self.gathers(number) and all(x.dtype is give.dtype for x in takes)):
            return False
        kind = torch.finfo(give.dtype)
        smallest = kind.smallest_normal * kind.eps
        return max(take.largest for take in takes) <= UNDERFLOW_FACTOR * smallest

    def _maps(self, number: int) -> list[Map]:
        maps = self.program.maps
        return [map_ for step in self.blocks[number].steps for map_ in maps.of(step)]

    def gathers(self, number: int) -> bool:
        """Whether an operator only moves elements."""
        return all(map_.is_gather for map_ in self._maps(number))

    def elementwise(self, number: int) -> bool:
        """Whether an operator scales or drops each element separately, as activation functions
        do.
        """
        block = self.blocks[number]
        return len(block.takes) == 1 == len(block.gives) and all(
            m.inputs == m.outputs and (m.is_diagonal or m.is_gather) for m in self._maps(number)
        )

    def faint(self, value: int) -> bool:
        """Whether a value is 0 by underflow."""
        return value in self.lost and self.lost[value].faint

    # Along depth ---------------------------------------------------------------------------------

    @cached_property
    def _peaks(self) -> list[int]:
        """For each depth the operator with the largest norm, the first if equal."""
        found: dict[int, list[int]] = {}
        for number, depth in self.depth.items():
            found.setdefault(depth, []).append(number)
        return [max(found[d], key=lambda n: rank(self.levels[n])) for d in sorted(found)]

    @cached_property
    def profile(self) -> tuple[Level, ...]:
        """The levels of all depths."""
        return tuple(self.levels[number] for number in self._peaks)

    @cached_property
    def body(self) -> tuple[Level, ...]:
        """The profile without the loss function and without dead depths.

        The loss function is the leading levels outside any module; if these are more than half of
        the profile, the leading levels with one entry. It is left out because its mean over a batch
        would look like a fall of the gradient; and what a loss of probabilities hands to its scores
        is small where the model is right.
        """
        deep = len(self.profile)
        outside = next((n for n, level in enumerate(self.profile) if level.module), deep)
        single = next((n for n, level in enumerate(self.profile) if level.entries != 1), deep)
        ends = [n for n in range(outside) if self.profile[n].operator.startswith(LOSSES)]
        head = next((n for n in (outside, single) if 2 * n <= deep), 0)
        head = max([head, *(n + 1 for n in ends if n + 1 < deep)])
        return tuple(self.levels[number] for number in self._peaks[head:] if number in self.alive)

    @cached_property
    def along(self) -> Change | None:
        """The change from the top to the end of the body; None if the body is too short.

        At the end counts the largest gradient that passes a depth, that of skip connections, too:
        operators that lie at this depth alone (scores of attention) may all get little.
        """
        if len(self.body) < MEDIAN_DEPTHS:
            return None
        count = MEDIAN_DEPTHS if len(self.body) >= 2 * MEDIAN_DEPTHS else 1
        tenth = max(count, len(self.body) // 10) | 1
        last = list(self._passing(self.body[-tenth:]))
        return Change(_median(self.body[:count]), _median(last))

    def _passing(self, levels: Sequence[Level]) -> Iterator[Level]:
        """For each level, in order of depth, the largest of it and of what operators above hand to
        those below.
        """
        depth, size = self.depth, self.size
        edges = [edge for edge in self.edges if edge.taker in self.alive]
        waiting = sorted(edges, key=lambda edge: -depth[edge.giver])
        open_: list[tuple[float, int, int]] = []  # the largest first: minus its rank, taker, value
        for level in levels:
            while waiting and depth[waiting[-1].giver] < level.depth:
                edge = waiting.pop()
                heappush(open_, (-rank(size[edge.value]), edge.taker or 0, edge.value))
            while open_ and depth[open_[0][1]] <= level.depth:
                heappop(open_)
            if open_ and -open_[0][0] > rank(level):
                _, taker, value = open_[0]
                yield self.levels[taker]._replace(norm=size[value].norm)
            else:
                yield level

    @cached_property
    def scores(self) -> set[int]:
        """The operators that a gradient comes to through a softmax only: what attention or a router
        chooses by. A softmax that is nearly even, or sure, hands on little; that is no fault.
        """
        seen, stack = {0}, [0]
        onward: dict[int, list[int]] = {}
        for edge in self.edges:
            if edge.taker is not None and not self._chooses(edge):
                onward.setdefault(edge.giver, []).append(edge.taker)
        while stack:
            new = [taker for taker in onward.get(stack.pop(), ()) if taker not in seen]
            seen.update(new)
            stack += new
        return self.depth.keys() - seen

    def _chooses(self, edge: PassedGradient) -> bool:
        """Whether an edge leads from a softmax to its scores, in fused attention to both factors of
        these.
        """
        block = self.blocks[edge.giver]
        if block.operator.startswith("ScaledDotProduct"):
            return edge.value in [block.gives.get(slot) for slot in (0, 1)]
        return block.operator.startswith(("Softmax", "SafeSoftmax"))

    @cached_property
    def repeated(self) -> list[Change]:
        """For leaves used at many depths: the change from the nearest to the farthest uses."""
        uses: dict[int, dict[int, Level]] = {}
        for edge in self.edges:
            if edge.leaf is not None and edge.giver in self.alive:
                at, of = self.levels[edge.giver], uses.setdefault(edge.leaf, {})
                of[at.depth] = max(of.get(at.depth, at), at, key=rank)
        sequences = ([of[depth] for depth in sorted(of)] for of in uses.values())
        return [
            Change(_median(levels[:MEDIAN_DEPTHS]), _median(levels[-MEDIAN_DEPTHS:]), len(levels))
            for levels in sequences
            if len(levels) >= SEQUENCE_MIN_DEPTHS
        ]


def rank(measured: Size | Level) -> float:
    """A sort key, the norm: NaN is the largest."""
    return inf if isnan(measured.norm) else measured.norm


def zero_share(entries: int, nonzero: int) -> float:
    """The share of entries that are 0; 0 if there are none."""
    return 1 - nonzero / entries if entries else 0.0


def _median(levels: Sequence[Level]) -> Level:
    return sorted(levels, key=rank)[len(levels) // 2]


def _faintest(many: Sequence[VanishedGradient]) -> VanishedGradient:
    """The first that is faint, or else the first."""
    return next((each for each in many if each.faint), many[0])
