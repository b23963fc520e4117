"""Counting paths: how many of each mark end at each leaf, and the table that comes of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import starmap

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from gradtrace.components import Component
from gradtrace.groups import Bools, Counts, grouped, sparse
from gradtrace.influence import Influence, Moments, Row, Weight
from gradtrace.kernels import steps as fused
from gradtrace.maps.places import laid
from gradtrace.marks import Marks, words_of
from gradtrace.program import Program, Term
from gradtrace.states import State, cancelled, solid
from gradtrace.tracing import Found

NONFINITE = "some gradients are NaN or infinite; their paths count, but have no weight"


@dataclass
class Counted:
    """A leaf by name and value, how many elements it has, and how many paths there could be."""

    name: str
    value: int
    size: int
    total: int
    found: Counts


@dataclass
class Tally:
    """Counts paths as leaves come in: those of a program, by marks that components are made of."""

    components: list[Component]
    program: Program
    marks: Marks
    names: dict[int, str]
    pairs: int
    leaves: list[Counted] = field(default_factory=list)
    sized: set[str] = field(default_factory=set)

    def add(self, found: Found, gradient: Tensor) -> None:
        """Count the paths of a leaf."""
        value, total = found.leaf.value, gradient.numel()
        if isinstance(found.pair, Tensor):
            # A parameter is there for every pair, even if no two of them meet in an element of it
            # (an embedding whose rows are each used once); an input is there once, each part for
            # its pair.
            shared = isinstance(found.leaf.tensor, Parameter) or bool((found.pair == 0).any())
            total = total * self.pairs if shared else total
        self._count(value, gradient.numel(), total, counts_of(found, gradient, self.pairs))

    def add_some(
        self, value: int, pair: int, marks: list[int], number: Tensor, gradient: Tensor, size: int
    ) -> None:
        """Count the paths of some elements of a leaf, which has ``size`` of them: each element's
        number among the marks, and its gradient.
        """
        counts, sizes = fused.tally(number.int(), gradient, len(marks))
        self._count(value, size, len(number), Counts(counts, sizes, marks, 0, pair))

    def _count(self, value: int, size: int, total: int, found: Counts) -> None:
        name = self.names[value]
        own = 0 if name in self.sized else size
        self.sized.add(name)
        self.leaves.append(Counted(name, value, own, total, found))

    def result(self, rule: str, weight: Weight, notes: Iterable[str] = ()) -> Influence:
        """The table. What can be said without the counts comes first: a GPU may still be busy."""
        owns, reached = self._owned(), possible(self.program, self.marks)
        bits = [component.bits for component in self.components]
        could = hits([reached[leaf.value] for leaf in self.leaves], bits) & ~owns
        groups = grouped([leaf.found for leaf in self.leaves])
        sizes = np.array([leaf.size for leaf in self.leaves], dtype=float)  # exact below 2**53
        totals = np.array([leaf.total for leaf in self.leaves], dtype=float)
        own = sizes @ owns.astype(float)
        eligible, through = groups.added(self.pairs, could, bits)
        unreached = (totals - groups.totals()) @ could.astype(float)
        if not groups.finite():
            notes = (*notes, NONFINITE)
        moments = (
            map(Moments.over, through[:, :, k].T.tolist(), eligible[:, :, k].T.tolist())
            for k in (0, 1)
        )
        names = (component.name for component in self.components)
        counts = map(int, own.tolist()), map(int, unreached.tolist())
        rows = tuple(map(Row, names, *counts, *moments))
        return Influence(rows, self.pairs, weight, rule, tuple(notes))

    def _owned(self) -> Bools:
        """Which leaf belongs to which component."""
        places: dict[str, list[int]] = {}
        for place, leaf in enumerate(self.leaves):
            places.setdefault(leaf.name, []).append(place)
        leaves: list[int] = []
        components: list[int] = []
        for n, component in enumerate(self.components):
            here = [place for name in component.owns for place in places.get(name, ())]
            leaves += here
            components += [n] * len(here)
        owns = np.zeros((len(self.leaves), len(self.components)), dtype=bool)
        owns[leaves, components] = True
        return owns


def counts_of(found: Found, gradient: Tensor, pairs: int) -> Counts:
    """The elements of a leaf by pair and mark."""
    state, pair = found.state, found.pair
    if state.few is not None and isinstance(pair, int):
        return _of_few(state, gradient, pair)
    if state.late and isinstance(pair, int):
        pieces = state.parts[0].pieces(gradient, fused.PIECE)
        if pieces is not None:
            return _of_pieces(state, pieces, pair)
    if state.mark is not None and isinstance(pair, int) and state.value is gradient:
        return _of_plain(state, gradient, pair)
    state = solid(state).written()
    numbers, (rows, extra) = state.numbers, state.palette
    assert numbers is not None
    if isinstance(pair, int):
        return Counts(*fused.tally(numbers, gradient, len(rows) + 1), rows, extra, pair, 1)
    there = (pair > 0) & (numbers > 0)
    numbers = torch.where(there, (pair.int() - 1) * len(rows) + numbers, 0)
    return Counts(*fused.tally(numbers, gradient, pairs * len(rows) + 1), rows, extra, 0, 1)


def _of_pieces(state: State, pieces: Iterable[tuple[Tensor, Tensor]], pair: int) -> Counts:
    """A large leaf: marks are worked out and counted a piece at a time."""
    rows, extra = state.palette
    counted = starmap(lambda marks, part: fused.tally(marks, part, len(rows) + 1), pieces)
    # each piece is gone when the next one comes
    return Counts(*fused.summed(counted), rows, extra, pair, 1)


def _of_plain(state: State, gradient: Tensor, pair: int) -> Counts:
    """A leaf all of whose paths have one mark: its elements that are not 0, and those to which
    something came all the same.
    """
    count, size = fused.measured(gradient)
    if state.parts and int(count) < gradient.numel():
        missed = cancelled(state.parts, gradient)
        count = count if missed is None else count + missed.sum()
    return Counts(count.reshape(1), size.reshape(1), *state.palette, pair)


def _of_few(state: State, gradient: Tensor, pair: int) -> Counts:
    """A leaf of which few elements have marks of their own: these are counted by themselves, and
    the others, unless they have nothing, as a plain leaf is.
    """
    few, (rows, extra) = state.few, state.palette
    assert few is not None
    counts, sizes = fused.tally(few.marks, few.value, len(rows) + 1)
    if not state.parts:
        line, at = laid(gradient, few.at)
        line[at] = 0  # for a moment
        count, size = fused.measured(gradient)
        line[at] = few.value
        counts[1] += count
        sizes[1] += size
    return Counts(counts, sizes, rows, extra, pair, 1)


def hits(marks: list[int], bits: list[int]) -> Bools:
    """Which marks have any of some bits, as a matrix of marks by sets of bits."""
    found, words = np.zeros((len(marks), len(bits)), dtype=bool), words_of(marks)
    for n, which, some in sparse(words_of(bits)[:, : words.shape[1]]):
        found[:, which] |= (words[:, n, None] & some) != 0
    return found


def possible(program: Program, marks: Marks) -> dict[int, int]:
    """For each value the bits that some route of operators from it to the root would give."""
    found, positions = {program.root: 1}, marks.position
    for number, block in enumerate(program.blocks):
        bits = marks.block.get(number, 0)
        for each in marks.slices[number][1] if number in marks.slices else ():
            bits |= each
        for value in block.takes.values() if bits else ():
            found[value] |= bits
        for out, terms, _, _ in block.steps:
            found[out] = found[terms[0][1]] if len(terms) == 1 else _any(found, terms)
        for position, value in block.gives.items() if positions else ():
            found[value] |= positions.get((number, position), 0)
        for out, terms, _, _ in block.merges:
            found[out] = _any(found, terms)
    return found


def _any(found: dict[int, int], terms: tuple[Term, ...]) -> int:
    total = 0
    for _, value in terms:
        total |= found[value]
    return total
