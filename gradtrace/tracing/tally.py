"""Counting paths: how many of each mark end at each leaf, and the table that comes of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import starmap
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import Parameter

from gradtrace.ir.program import Program, Term
from gradtrace.kernels import steps as fused
from gradtrace.kernels import sync
from gradtrace.kernels.cuda_batched_tally import BatchedTally
from gradtrace.linops import Reduce
from gradtrace.linops.indexing import laid
from gradtrace.tracing.aggregate import Counts, Reach, grouped
from gradtrace.tracing.components import Component
from gradtrace.tracing.influence import Influence, Moments, Row, Weight
from gradtrace.tracing.provenance import ComponentBits, words_of
from gradtrace.tracing.traced_value import PendingContribution, TracedValue, cancelled, materialise
from gradtrace.tracing.tracer import TracedLeaf

NONFINITE = "some gradients are NaN or infinite; their paths count, but have no weight"


@dataclass
class LeafCounts:
    """A leaf by name and value, how many elements it has, how many paths there could be, and, once
    it is counted, how many there are.
    """

    name: str
    value: int
    size: int
    total: int
    found: Counts | None = None


class ReachableComponents(NamedTuple):
    """What can be said without counting: the place of each leaf's value; which components paths
    from the leaf at each place could pass; and which leaves belong to which.
    """

    place: dict[int, int]
    reach: Reach


class PendingLeaf(NamedTuple):
    """A leaf that waits to be counted, and what its ``Counts`` will be."""

    leaf: LeafCounts
    rows: Sequence[int]
    extra: int
    pair: int
    blank: int
    start: int
    size: int


class UniformLeaf(NamedTuple):
    """A leaf all of whose paths have one mark, and what it is made of: if some of its elements are
    0, something may have come to them all the same.
    """

    leaf: LeafCounts
    parts: tuple[PendingContribution, ...]
    gradient: Tensor

    def missed(self, count: float) -> Tensor | None:
        """How many more elements have a path than are not 0; None if there is none."""
        if count >= self.gradient.numel():
            return None
        missed = cancelled(self.parts, self.gradient)
        return None if missed is None else missed.sum()


@dataclass
class Tally:
    """Counts paths as leaves come in: those of a program, by marks that components are made of.

    On a GPU leaves are counted together, as long as those that wait hold no more than ``room``
    bytes.
    """

    components: list[Component]
    program: Program
    marks: ComponentBits
    names: dict[int, str]
    pairs: int
    room: int = 0
    leaves: list[LeafCounts] = field(default_factory=list)
    sized: set[str] = field(default_factory=set)
    able: ReachableComponents | None = None
    jobs: BatchedTally | None = None
    ahead: list[PendingLeaf] = field(default_factory=list)
    plain: list[UniformLeaf] = field(default_factory=list)
    held: int = 0  # bytes of plain ones

    def add(self, found: TracedLeaf, gradient: Tensor) -> None:
        """Count the paths of a leaf."""
        value, total = found.leaf.value, gradient.numel()
        size = total
        if isinstance(found.pair, range):
            size = total // len(found.pair)
        elif isinstance(found.pair, Tensor):
            # A parameter is there for every pair, even if no two of them meet in an element of it
            # (an embedding whose rows are each used once); an input is there once, each part for
            # its pair.
            shared = isinstance(found.leaf.tensor, Parameter) or bool((found.pair == 0).any())
            total = total * self.pairs if shared else total
        leaf = self._leaf(value, size, total)
        state, pair = found.state, found.pair
        if isinstance(pair, int):
            if state.sparse is not None:
                leaf.found = _of_few(state, gradient, pair)
                return
            if state.lazy:
                self._add_late(leaf, state, gradient, pair)
                return
            if state.mark is not None and state.value is gradient:
                self._add_plain(leaf, state, gradient, pair)
                return
        self._add_written(leaf, materialise(state).with_provenance(), gradient, pair)

    def _add_late(self, leaf: LeafCounts, state: TracedValue, gradient: Tensor, pair: int) -> None:
        """Marks are worked out with those of others, or a piece at a time, or now."""
        part, (rows, extra) = state.parts[0], state.provenance
        jobs = self._jobs(gradient)
        if jobs is not None and isinstance(part.map, Reduce) and not part.moves:
            assert part.marks is not None
            size = len(rows) + 1
            at = jobs.reduce(part.x, part.marks, part.map.dims, gradient, size)
            if at is not None:
                self._wait(jobs, PendingLeaf(leaf, rows, extra, pair, 1, at, size))
                return
        pieces = part.pieces(gradient, fused.PIECE_ELEMENTS)
        if pieces is not None:
            leaf.found = _of_pieces(state, pieces, pair)
        else:
            self._add_written(leaf, materialise(state), gradient, pair)

    def _add_plain(self, leaf: LeafCounts, state: TracedValue, gradient: Tensor, pair: int) -> None:
        """A leaf all of whose paths have one mark: its elements that are not 0, and those to which
        something came all the same.
        """
        jobs, (rows, extra) = self._jobs(gradient), state.provenance
        plain = UniformLeaf(leaf, state.parts, gradient)
        at = None if jobs is None else jobs.measure(gradient)
        if jobs is None or at is None:
            count, size = fused.measured(gradient)
            missed = plain.missed(int(count)) if state.parts else None
            count = count if missed is None else count + missed
            leaf.found = Counts(count.reshape(1), size.reshape(1), rows, extra, pair)
            return
        if state.parts:
            self.plain.append(plain)
            self.held += sum(x.nbytes for x in (gradient, *(part.x for part in state.parts)))
        self._wait(jobs, PendingLeaf(leaf, rows, extra, pair, 0, at, 1))

    def _add_written(
        self, leaf: LeafCounts, state: TracedValue, gradient: Tensor, pair: int | Tensor | range
    ) -> None:
        """A leaf each of whose elements has a mark."""
        ids, (rows, extra) = state.ids, state.provenance
        assert ids is not None
        size = len(rows) + 1
        if isinstance(pair, Tensor):
            there = (pair > 0) & (ids > 0)
            ids = torch.where(there, (pair.int() - 1) * len(rows) + ids, 0)
            pair, size = 0, self.pairs * len(rows) + 1
        elif isinstance(pair, range):
            number = torch.arange(len(pair), dtype=ids.dtype, device=ids.device)
            shift = (number * len(rows)).reshape(-1, *[1] * (ids.dim() - 1))
            ids = torch.where(ids > 0, ids + shift, 0)
            size = len(pair) * len(rows) + 1
            pair = pair.start
        jobs = self._jobs(gradient)
        at = None if jobs is None else jobs.tally(ids, gradient, size)
        if jobs is None or at is None:
            leaf.found = Counts(*fused.tally(ids, gradient, size), rows, extra, pair, 1)
        else:
            self._wait(jobs, PendingLeaf(leaf, rows, extra, pair, 1, at, size))

    def _jobs(self, gradient: Tensor) -> BatchedTally | None:
        """Leaves that wait on the gradient's device, if any may."""
        jobs = self.jobs
        if jobs is None and self.room and fused.batchable(gradient):
            jobs = self.jobs = BatchedTally(gradient.device)
        return jobs if jobs is not None and jobs.device == gradient.device else None

    def _wait(self, jobs: BatchedTally, leaf: PendingLeaf) -> None:
        self.ahead.append(leaf)
        if self.held > self.room // 4:
            self._settle()
        elif jobs.full(self.room - self.held):
            self._flush()

    def _flush(self) -> None:
        """Count the leaves that wait."""
        if self.jobs is not None and self.ahead:
            found = self.jobs.counted()
            for leaf, rows, extra, pair, blank, start, size in self.ahead:
                leaf.found = Counts(*found, rows, extra, pair, blank, start, size)
            self.ahead.clear()

    def _settle(self) -> None:
        """Look whether elements of plain leaves are 0: once, for all of them."""
        self._flush()
        if not self.plain:
            return
        found = [plain.leaf.found for plain in self.plain]
        ids = [each.counts[each.start] for each in found if each is not None]
        for plain, each, number in zip(self.plain, found, sync.fetch_scalars(ids)):
            missed = plain.missed(number)
            if each is not None and missed is not None:
                mine = slice(each.start, each.start + 1)
                counts, sums = each.counts[mine] + missed, each.sums[mine]
                plain.leaf.found = each._replace(counts=counts, sums=sums, start=0, size=None)
        self.plain.clear()
        self.held = 0

    def add_some(
        self, value: int, pair: int, marks: list[int], number: Tensor, gradient: Tensor, size: int
    ) -> None:
        """Count the paths of some elements of a leaf, which has ``size`` of them: each element's
        number among the marks, and its gradient.
        """
        counts, sizes = fused.tally(number.int(), gradient, len(marks))
        self._leaf(value, size, len(number)).found = Counts(counts, sizes, marks, 0, pair)

    def _leaf(self, value: int, size: int, total: int) -> LeafCounts:
        name = self.names[value]
        own = 0 if name in self.sized else size
        self.sized.add(name)
        found = LeafCounts(name, value, own, total)
        self.leaves.append(found)
        self._foreseen()
        return found

    def result(self, rule: str, weight: Weight, notes: Iterable[str] = ()) -> Influence:
        """The table."""
        self._settle()
        place, reach = self._foreseen()
        order = [place[leaf.value] for leaf in self.leaves]
        groups = grouped([leaf.found for leaf in self.leaves if leaf.found is not None])
        bits = [component.bits for component in self.components]
        sizes = np.zeros(len(place))
        np.add.at(sizes, order, [float(leaf.size) for leaf in self.leaves])  # exact below 2**53
        totals = np.array([leaf.total for leaf in self.leaves], dtype=float)
        eligible, through, unreached, finite = groups.added(self.pairs, reach, order, totals, bits)
        own = np.zeros(len(bits))
        np.add.at(own, reach.owned[1], sizes[reach.owned[0]])
        if not finite:
            notes = (*notes, NONFINITE)
        moments = (
            map(Moments.over, through[:, :, k].T.tolist(), eligible[:, :, k].T.tolist())
            for k in (0, 1)
        )
        names = (component.name for component in self.components)
        counts = map(int, own.tolist()), map(int, unreached.tolist())
        rows = tuple(map(Row, names, *counts, *moments))
        return Influence(rows, self.pairs, weight, rule, tuple(notes))

    def _foreseen(self) -> ReachableComponents:
        """Worked out when the first leaf has come: a GPU is busy then."""
        if self.able is None:
            values = [leaf.value for leaf in self.program.leaves]
            place = {value: n for n, value in enumerate(values)}
            reached = possible(self.program, self.marks)
            words = words_of([reached[value] for value in values])
            self.able = ReachableComponents(place, Reach(words, self._owned(values)))
        return self.able

    def _owned(self, values: list[int]) -> npt.NDArray[np.int64]:
        """The leaves that belong to components, and these, one pair after the other."""
        places: dict[str, list[int]] = {}
        for place, value in enumerate(values):
            places.setdefault(self.names[value], []).append(place)
        leaves: list[int] = []
        components: list[int] = []
        for n, component in enumerate(self.components):
            here = [place for name in component.owns for place in places.get(name, ())]
            leaves += here
            components += [n] * len(here)
        return np.array([leaves, components], np.int64)


def _of_pieces(state: TracedValue, pieces: Iterable[tuple[Tensor, Tensor]], pair: int) -> Counts:
    """A large leaf: marks are worked out and counted a piece at a time."""
    rows, extra = state.provenance
    counted = starmap(lambda marks, part: fused.tally(marks, part, len(rows) + 1), pieces)
    # each piece is gone when the next one comes
    return Counts(*fused.summed(counted), rows, extra, pair, 1)


def _of_few(state: TracedValue, gradient: Tensor, pair: int) -> Counts:
    """A leaf of which few elements have marks of their own: these are counted by themselves, and
    the others, unless they have nothing, as a plain leaf is.
    """
    few, (rows, extra) = state.sparse, state.provenance
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


def possible(program: Program, marks: ComponentBits) -> dict[int, int]:
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
