"""Counts paths by leaf and provenance, and makes the ``Influence`` table of the counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat, starmap
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from gradtrace.ir.program import Program
from gradtrace.kernels import LeafBatch, backend_of, tuning
from gradtrace.kernels.exact_sums import summed
from gradtrace.kernels.operands import Floats, GroupSums
from gradtrace.linops import Reduce
from gradtrace.linops.indexing import laid
from gradtrace.tracing.aggregate import Counts, grouped
from gradtrace.tracing.executor import TracedLeaf
from gradtrace.tracing.influence import Influence, Moments, Row, Weight
from gradtrace.tracing.kept_plans import ComponentFacts
from gradtrace.tracing.moments import SamplingVariance
from gradtrace.tracing.sampling import NOTHING_DRAWN, Drawn, drawn_variances
from gradtrace.tracing.traced_value import PendingContribution, TracedValue, cancelled, materialise

NONFINITE = "some gradients are NaN or infinite; their paths count, but have no weight"


@dataclass
class LeafCounts:
    """A leaf and the counts of its paths."""

    name: str
    value: int
    size: int  # elements; 0 if a leaf of this name was added before
    total: int  # the number of paths if every element counted had one
    found: Counts | None = None  # set once the leaf is counted


class PendingLeaf(NamedTuple):
    """A leaf in the current batch, and the fields of its ``Counts``."""

    leaf: LeafCounts
    rows: Sequence[int]
    extra: int
    pair: int
    blank: int
    start: int
    size: int


class UniformLeaf(NamedTuple):
    """A leaf all of whose paths have the same provenance, with its contributions: an element that
    is 0 may have a path all the same, if its contributions cancel.
    """

    leaf: LeafCounts
    parts: tuple[PendingContribution, ...]
    gradient: Tensor

    def missed(self, count: float) -> Tensor | None:
        """The number of elements that are 0 but have a path, given the number of nonzero ones; None
        if there are none.
        """
        if count >= self.gradient.numel():
            return None
        missed = cancelled(self.parts, self.gradient)
        return None if missed is None else missed.sum()


@dataclass
class Tally:
    """Counts a program's paths by leaf and provenance, leaf by leaf.

    On a GPU several leaves are counted in one launch; pending leaves may hold up to ``room`` bytes.
    """

    facts: ComponentFacts
    program: Program
    pairs: int
    room: int = 0
    leaves: list[LeafCounts] = field(default_factory=list)
    sized: set[str] = field(default_factory=set)
    jobs: LeafBatch | None = None
    pending: list[PendingLeaf] = field(default_factory=list)
    uniform: list[UniformLeaf] = field(default_factory=list)
    held_bytes: int = 0  # bytes that pending uniform leaves keep alive
    drawn: Drawn | None = None  # if only a sample of elements is counted (``add_some``)
    squares: list[Counts] = field(default_factory=list)  # Σ (gradient / unit)², of ``drawn``

    def add(self, found: TracedLeaf, gradient: Tensor) -> None:
        """Count the paths of a leaf."""
        value, total = found.leaf.value, gradient.numel()
        size = total
        if isinstance(found.pair, range):
            size = total // len(found.pair)
        elif isinstance(found.pair, Tensor):
            # A parameter counts once for every pair, even if no element is shared by two pairs (an
            # embedding whose rows are each used once); an input counts once, each part for its
            # pair.
            shared = isinstance(found.leaf.tensor, Parameter) or bool((found.pair == 0).any())
            total = total * self.pairs if shared else total
        leaf = self._leaf(value, size, total)
        state, pair = found.state, found.pair
        if isinstance(pair, int):
            if state.sparse is not None:
                leaf.found = _count_sparse(state, gradient, pair)
                return
            if state.lazy:
                self._add_lazy(leaf, state, gradient, pair)
                return
            if state.uniform and state.value is gradient:
                self._add_uniform(leaf, state, gradient, pair)
                return
        self._add_dense(leaf, materialise(state).with_provenance(), gradient, pair)

    def _add_lazy(self, leaf: LeafCounts, state: TracedValue, gradient: Tensor, pair: int) -> None:
        """Compute lazy ids and count them: batched with other leaves, in pieces, or at once."""
        part, (rows, extra) = state.parts[0], state.provenance
        jobs = self._jobs(gradient)
        if jobs is not None and isinstance(part.map, Reduce) and not part.moves:
            assert part.source_ids is not None
            size = len(rows) + 1
            at = jobs.reduce(part.x, part.source_ids, part.map.dims, gradient, size)
            if at is not None:
                self._enqueue(jobs, PendingLeaf(leaf, rows, extra, pair, 1, at, size))
                return
        pieces = part.pieces(gradient, tuning.PIECE_ELEMENTS)
        if pieces is not None:
            leaf.found = _count_pieces(state, pieces, pair)
        else:
            self._add_dense(leaf, materialise(state), gradient, pair)

    def _add_uniform(
        self, leaf: LeafCounts, state: TracedValue, gradient: Tensor, pair: int
    ) -> None:
        """Count a uniform leaf: its nonzero elements, and those whose contributions cancel."""
        jobs, (rows, extra) = self._jobs(gradient), state.provenance
        uniform = UniformLeaf(leaf, state.parts, gradient)
        at = None if jobs is None else jobs.measure(gradient)
        if jobs is None or at is None:
            count, size = backend_of(gradient).measure(gradient)
            missed = uniform.missed(int(count)) if state.parts else None
            count = count if missed is None else count + missed
            leaf.found = Counts(count.reshape(1), size.reshape(1), rows, extra, pair)
            return
        if state.parts:
            self.uniform.append(uniform)
            self.held_bytes += sum(x.nbytes for x in (gradient, *(part.x for part in state.parts)))
        self._enqueue(jobs, PendingLeaf(leaf, rows, extra, pair, 0, at, 1))

    def _add_dense(
        self, leaf: LeafCounts, state: TracedValue, gradient: Tensor, pair: int | Tensor | range
    ) -> None:
        """Count a leaf with an id for each element."""
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
            counted = backend_of(ids).tally(ids, gradient, size)
            leaf.found = Counts(*counted, rows, extra, pair, 1)
        else:
            self._enqueue(jobs, PendingLeaf(leaf, rows, extra, pair, 1, at, size))

    def _jobs(self, gradient: Tensor) -> LeafBatch | None:
        """The batch for the gradient's device; None if leaves are counted one by one."""
        jobs = self.jobs
        if jobs is None and self.room:
            jobs = self.jobs = backend_of(gradient).tally_batch(gradient)
        return jobs if jobs is not None and jobs.device == gradient.device else None

    def _enqueue(self, jobs: LeafBatch, leaf: PendingLeaf) -> None:
        self.pending.append(leaf)
        if self.held_bytes > self.room // 4:
            self._flush_uniform()
        elif jobs.full(self.room - self.held_bytes):
            self._flush()

    def _flush(self) -> None:
        """Count the pending leaves."""
        if self.jobs is not None and self.pending:
            found = self.jobs.counted()
            for leaf, rows, extra, pair, blank, start, size in self.pending:
                leaf.found = Counts(*found, rows, extra, pair, blank, start, size)
            self.pending.clear()

    def _flush_uniform(self) -> None:
        """Flush, then add the cancelled elements of all uniform leaves, with one sync."""
        self._flush()
        if not self.uniform:
            return
        found = [each.leaf.found for each in self.uniform if each.leaf.found is not None]
        for uniform, each, number in zip(self.uniform, found, _first_counts(found)):
            missed = uniform.missed(number)
            if missed is not None:
                mine = slice(each.start, each.start + 1)
                counts, sums = each.counts[mine] + missed, each.sums[mine]
                uniform.leaf.found = each._replace(counts=counts, sums=sums, start=0, size=None)
        self.uniform.clear()
        self.held_bytes = 0

    def add_some(
        self, value: int, pair: int, sets: list[int], number: Tensor, gradient: Tensor, size: int
    ) -> None:
        """Count the paths of a sample of a leaf's elements; the leaf has ``size`` elements.

        ``sets`` are the distinct provenance sets, ``number`` the index of each sampled element's
        set among them, ``gradient`` the elements' gradients.
        """
        backend, ids = backend_of(number), number.int()
        counts, sizes = backend.tally(ids, gradient, len(sets))
        self._leaf(value, size, len(number)).found = Counts(counts, sizes, sets, 0, pair)
        if self.drawn is not None:
            squares = (gradient / self.drawn.unit).square()
            counts, sizes = backend.tally(ids, squares, len(sets))
            self.squares.append(Counts(counts, sizes, sets, 0, pair))

    def _leaf(self, value: int, size: int, total: int) -> LeafCounts:
        name = self.facts.names[value]
        own = 0 if name in self.sized else size
        self.sized.add(name)
        found = LeafCounts(name, value, own, total)
        self.leaves.append(found)
        self.facts.reachable(self.program)  # now, so that it overlaps with work on a GPU
        return found

    def result(self, rule: str, weight: Weight, notes: Iterable[str] = ()) -> Influence:
        """The influence table of all leaves counted so far."""
        self._flush_uniform()
        place, reach = self.facts.reachable(self.program)
        order = [place[leaf.value] for leaf in self.leaves]
        groups = grouped([leaf.found for leaf in self.leaves if leaf.found is not None])
        components = self.facts.chosen.components
        bits = [component.bits for component in components]
        sizes = np.zeros(len(place))
        np.add.at(sizes, order, [float(leaf.size) for leaf in self.leaves])  # exact below 2**53
        totals = np.array([leaf.total for leaf in self.leaves], dtype=float)
        eligible, through, unreached, finite = groups.added(self.pairs, reach, order, totals, bits)
        own = np.zeros(len(bits))
        np.add.at(own, reach.owned[1], sizes[reach.owned[0]])
        if not finite:
            notes = (*notes, NONFINITE)
        avoidable = self.facts.alternatives(self.program)
        known: list[Iterable[SamplingVariance | None]] = [repeat(None), repeat(None)]
        if self.drawn is not None:
            both = grouped(self.squares).added(self.pairs, reach, order, totals, bits)
            known = self._variances(self.drawn, (through, eligible), both, avoidable)
        moments = (
            map(Moments.over, through[:, :, k].T.tolist(), eligible[:, :, k].T.tolist(), known[k])
            for k in (0, 1)
        )
        names = (component.name for component in components)
        counts = map(int, own.tolist()), map(int, unreached.tolist())
        rows = tuple(map(Row, names, *counts, *moments, avoidable))
        return Influence(rows, self.pairs, weight, rule, tuple(notes))

    def _variances(
        self,
        drawn: Drawn,
        sums: tuple[Floats, Floats],
        squares: GroupSums,
        avoidable: Sequence[bool | None],
    ) -> list[Iterable[SamplingVariance | None]]:
        """The sampling variances of all components, by count and by |gradient|; none of those in
        series, whose share is 1 whatever is drawn.
        """
        found: list[Iterable[SamplingVariance | None]] = []
        for k, unit in enumerate((1.0, drawn.unit)):
            both = squares.through[:, :, k], squares.eligible[:, :, k]
            each = drawn_variances(drawn, sums[0][:, :, k] / unit, sums[1][:, :, k] / unit, both)
            scaled = each if unit == 1 else [v.times(unit) for v in each]
            found.append([NOTHING_DRAWN if a is False else v for v, a in zip(scaled, avoidable)])
        return found


def _first_counts(found: Sequence[Counts]) -> list[int]:
    """The first count of each leaf, with one sync; most share one tensor of counts."""
    places, tensors, total = dict[int, int](), list[Tensor](), 0
    for each in found:
        if id(each.counts) not in places:
            places[id(each.counts)] = total
            tensors.append(each.counts)
            total += len(each.counts)
    read: list[int] = torch.cat(tensors).tolist()
    return [read[places[id(each.counts)] + each.start] for each in found]


def _count_pieces(state: TracedValue, pieces: Iterable[tuple[Tensor, Tensor]], pair: int) -> Counts:
    """Count a large leaf piece by piece, computing the ids of each piece in turn."""
    rows, extra = state.provenance
    counted = starmap(lambda ids, part: backend_of(ids).tally(ids, part, len(rows) + 1), pieces)
    # a generator, so that each piece is freed before the next is computed
    return Counts(*summed(counted), rows, extra, pair, 1)


def _count_sparse(state: TracedValue, gradient: Tensor, pair: int) -> Counts:
    """Count a sparse leaf: the listed elements by their ids, and the others, unless they have no
    gradient, as a uniform leaf.
    """
    sparse, (rows, extra) = state.sparse, state.provenance
    assert sparse is not None
    counts, sizes = backend_of(sparse.ids).tally(sparse.ids, sparse.value, len(rows) + 1)
    if not state.parts:
        line, at = laid(gradient, sparse.at)
        line[at] = 0  # restored below: measure the other elements only
        count, size = backend_of(gradient).measure(gradient)
        line[at] = sparse.value
        counts[1] += count
        sizes[1] += size
    return Counts(counts, sizes, rows, extra, pair, 1)
