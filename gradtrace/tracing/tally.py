"""Counts paths by leaf and provenance, and adds the counts up by component."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, repeat, starmap
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from gradtrace.ir.program import Program
from gradtrace.kernels import Backend, LeafBatch, tuning
from gradtrace.kernels.exact_sums import summed
from gradtrace.kernels.operands import Floats, GroupSums
from gradtrace.linops import Reduce
from gradtrace.linops.indexing import laid, nearby, repeated
from gradtrace.paths.path_forest import PathProvenance
from gradtrace.tracing import fixed_pass
from gradtrace.tracing.aggregate import Counts, LeafSums, grouped, own_elements
from gradtrace.tracing.executor import TracedLeaf
from gradtrace.tracing.influence import Counted
from gradtrace.tracing.kept_plans import ComponentFacts
from gradtrace.tracing.moments import NOTHING_DRAWN, Drawn, KnownVariance, drawn_variances
from gradtrace.tracing.traced_value import (
    PendingContribution,
    TracedValue,
    cancelled,
    materialise,
    thinned,
)

SAMPLED_MAX_COUNTS = 1 << 22
"""The most counts, by leaf and set of components, of sampled elements that are added up at once."""


@dataclass
class LeafCounts:
    """A leaf and the counts of its paths."""

    name: str
    value: int
    size: int  # elements
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

    def missed(self, count: float, backend: Backend) -> Tensor | None:
        """The number of elements that are 0 but have a path, given the number of nonzero ones; None
        if there are none.
        """
        if count >= self.gradient.numel():
            return None
        missed = cancelled(self.parts, self.gradient, backend)
        return None if missed is None else missed.sum()


@dataclass
class Tally:
    """Counts a program's paths by leaf and provenance, leaf by leaf.

    On a GPU several leaves are counted in one launch; pending leaves may hold up to ``room`` bytes.
    """

    facts: ComponentFacts
    program: Program
    pairs: int
    backend: Backend
    room: int = 0
    leaves: list[LeafCounts] = field(default_factory=list)
    jobs: LeafBatch | None = None
    pending: list[PendingLeaf] = field(default_factory=list)
    uniform: list[UniformLeaf] = field(default_factory=list)
    held_bytes: int = 0  # bytes that pending uniform leaves keep alive
    drawn: Drawn | None = None  # if only a sample of elements is counted (``add_some``)
    squares: list[Counts] = field(default_factory=list)  # Σ (gradient / unit)², of ``drawn``

    def add(self, found: TracedLeaf, gradient: Tensor | None) -> None:
        """Count the paths of a leaf. A gradient that has not been computed is that of a sparse
        leaf, which lists its elements.
        """
        value = found.leaf.value
        if gradient is None:
            leaf = self._leaf(value, *2 * (found.state.parts[0].map.outputs,))
            leaf.found = _count_sparse(found.state, None, 0, self.backend)
            return
        size = total = gradient.numel()
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
        if isinstance(pair, range):
            self._add_batch(leaf, materialise(state, self.backend), gradient, pair)
            return
        if isinstance(pair, int):
            if state.sparse is not None:
                leaf.found = _count_sparse(state, gradient, pair, self.backend)
                return
            if state.lazy:
                self._add_lazy(leaf, state, gradient, pair)
                return
            if state.uniform and state.value is gradient:
                self._add_uniform(leaf, state, gradient, pair)
                return
        self._add_dense(
            leaf, materialise(state, self.backend).with_provenance(self.backend), gradient, pair
        )

    def _add_batch(
        self, leaf: LeafCounts, state: TracedValue, gradient: Tensor, pairs: range
    ) -> None:
        """Count a leaf with pairs along its first dimension."""
        compared = state.size is None and state.value is gradient
        if (
            not (state.uniform and compared) or self.backend.synchronises
        ):  # there, leaves in one launch
            self._add_dense(leaf, state.with_provenance(self.backend), gradient, pairs)
            return
        (rows, extra), counted = state.provenance, self.backend.measure_rows(gradient)
        leaf.found = Counts(*counted, rows[:1], extra, pairs.start)

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
            leaf.found = _count_pieces(state, pieces, pair, self.backend)
        else:
            self._add_dense(leaf, materialise(state, self.backend), gradient, pair)

    def _add_uniform(
        self, leaf: LeafCounts, state: TracedValue, gradient: Tensor, pair: int
    ) -> None:
        """Count a uniform leaf: its nonzero elements, and those whose contributions cancel."""
        jobs, (rows, extra) = self._jobs(gradient), state.provenance
        uniform = UniformLeaf(leaf, state.parts, gradient)
        at = None if jobs is None else jobs.measure(gradient)
        if jobs is None or at is None:
            count, size = self.backend.measure(gradient)
            if fixed_pass.current() is not None:
                leaf.found = Counts(count.reshape(1), size.reshape(1), rows, extra, pair)
                self.uniform += [uniform] if state.parts else []
                return
            missed = uniform.missed(int(count), self.backend) if state.parts else None
            count = count if missed is None else count + missed
            leaf.found = Counts(count.reshape(1), size.reshape(1), rows, extra, pair)
            return
        if state.parts:
            self.uniform.append(uniform)
        if state.parts and fixed_pass.current() is None:  # else all stay until the end
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
        self._count_ids(ids, gradient, PendingLeaf(leaf, rows, extra, pair, 1, 0, size))

    def _count_ids(self, ids: Tensor, gradient: Tensor, pending: PendingLeaf) -> None:
        """Count the elements of a leaf by their ids, together with others if possible."""
        jobs = self._jobs(gradient)
        at = None if jobs is None else jobs.tally(ids, gradient, pending.size)
        if jobs is None or at is None:
            counted = self.backend.tally(ids, gradient, pending.size)
            leaf, rows, extra, pair, blank, _, _ = pending
            leaf.found = Counts(*counted, rows, extra, pair, blank)
        else:
            self._enqueue(jobs, pending._replace(start=at))

    def _jobs(self, gradient: Tensor) -> LeafBatch | None:
        """The batch for the gradient's device; None if leaves are counted one by one."""
        jobs = self.jobs
        if jobs is None and self.room:
            jobs = self.jobs = self.backend.tally_batch(gradient)
        return jobs if jobs is not None and jobs.device == gradient.device else None

    def _enqueue(self, jobs: LeafBatch, leaf: PendingLeaf) -> None:
        self.pending.append(leaf)
        if self.held_bytes > self.room // 4:
            self._flush_uniform()
        elif jobs.full(self.room - self.held_bytes):
            self._flush()

    def count_pending(self) -> None:
        """Count the pending leaves, but not yet their elements that are 0 and have a path."""
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
            missed = uniform.missed(number, self.backend)
            if missed is not None:
                mine = slice(each.start, each.start + 1)
                missed = missed.to(each.counts.device)
                counts, sums = each.counts[mine] + missed, each.sums[mine]
                uniform.leaf.found = each._replace(counts=counts, sums=sums, start=0, size=None)
        self.uniform.clear()
        self.held_bytes = 0

    def add_some(
        self,
        drawn: Mapping[int, int],
        pair: int,
        paths: PathProvenance,
        gradient: Tensor,
        sizes: Mapping[int, int],
    ) -> None:
        """Count the paths of a sample of elements: so many (``drawn``) of each leaf, one leaf after
        another; ``gradient`` is that of each element, ``sizes`` are the elements of each leaf.
        """
        sets, first = paths.sets or [0], 0  # leaves without elements have no path
        many = len(sets)
        step = max(1, SAMPLED_MAX_COUNTS // many)
        for n in range(0, len(drawn), step):
            part = dict(islice(drawn.items(), n, n + step))
            mine = slice(first, first + sum(part.values()))
            first = mine.stop
            which = torch.arange(len(part), device="cpu")
            which = repeated(which, torch.tensor([*part.values()], device="cpu"))
            found = self._sampled(
                paths.number[mine] + many * which, gradient[mine], len(part) * many
            )
            for k, (value, count) in enumerate(part.items()):
                each = [Counts(*both, sets, 0, pair, 0, k * many, many) for both in found]
                self._leaf(value, sizes[value], count).found = each[0]
                self.squares += each[1:]

    def _sampled(self, ids: Tensor, gradient: Tensor, count: int) -> list[tuple[Tensor, Tensor]]:
        """The counts and sums of sampled elements and, for their errors, of their squares."""
        weights = [gradient]
        if self.drawn is not None:
            weights.append((gradient / self.drawn.unit).square())
        # few of the leaves and sets that could be occur
        there, ids = ids.unique(return_inverse=True)  # type: ignore[no-untyped-call]
        found = [self.backend.tally(ids.int(), weight, len(there)) for weight in weights]
        return [(_at(there, counts, count), _at(there, sums, count)) for counts, sums in found]

    def _leaf(self, value: int, size: int, total: int) -> LeafCounts:
        found = LeafCounts(self.facts.names[value], value, size, total)
        self.leaves.append(found)
        self.facts.reachable(self.program)  # now, so that it overlaps with work on a GPU
        return found

    def result(self, notes: Iterable[str] = ()) -> Counted:
        """The counts of all leaves so far, by component."""
        self._flush_uniform()
        place, reach = self.facts.reachable(self.program)
        order = [place[leaf.value] for leaf in self.leaves]
        bits = self.facts.chosen.bits
        totals = np.array([leaf.total for leaf in self.leaves], dtype=float)
        wanted = LeafSums(self.pairs, reach, order, totals, bits)
        every = [leaf.found for leaf in self.leaves if leaf.found is not None]
        sums = grouped(every, self.backend).added(wanted, self.backend)
        known: list[Iterable[KnownVariance]] = [repeat(None), repeat(None)]
        if self.drawn is not None:
            squares = grouped(self.squares, self.backend).added(wanted, self.backend)
            known = self._variances(self.drawn, (sums.through, sums.eligible), squares)
        names, sizes = [leaf.name for leaf in self.leaves], [leaf.size for leaf in self.leaves]
        own = own_elements(names, order, sizes, reach, len(bits))
        return Counted.of_sums(*self.facts.described(self.program), sums, own, known).noted(*notes)

    def _variances(
        self,
        drawn: Drawn,
        sums: tuple[Floats, Floats],
        squares: GroupSums,
    ) -> list[Iterable[KnownVariance]]:
        """The sampling variances of all components, by count and by |gradient|; none of those in
        series, whose share is 1 whatever is drawn.
        """
        found: list[Iterable[KnownVariance]] = []
        avoidable = self.facts.alternatives(self.program)
        for k, unit in enumerate((1.0, drawn.unit)):
            both = squares.through[:, :, k], squares.eligible[:, :, k]
            through, eligible = (some[:, :, k] / unit for some in sums)
            each = drawn_variances(drawn, through, eligible, both, unit)
            found.append([NOTHING_DRAWN if a is False else v for v, a in zip(each, avoidable)])
        return found


def with_gradient(found: TracedLeaf, backend: Backend) -> tuple[TracedLeaf, Tensor | None]:
    """A leaf with its gradient, which may have been deferred; None of those that are sparse."""
    gradient = found.state.value
    if gradient is None:
        state = thinned(found.state)
        if state.sparse is None:
            gradient = nearby(found.leaf.gradient(), backend.device)
            state = state._replace(value=gradient)
        found = found._replace(state=state)
    return found, gradient


def _first_counts(found: Sequence[Counts]) -> list[int]:
    """The first count of each leaf, with one sync; most share one tensor of counts."""
    places, tensors, total = dict[int, int](), list[Tensor](), 0
    for each in found:
        if id(each.counts) not in places:
            places[id(each.counts)] = total
            tensors.append(each.counts)
            total += len(each.counts)
    if len({x.device for x in tensors}) > 1:
        tensors = [x.cpu() for x in tensors]
    read: list[int] = torch.cat(tensors).tolist()
    return [read[places[id(each.counts)] + each.start] for each in found]


def _count_pieces(
    state: TracedValue, pieces: Iterable[tuple[Tensor, Tensor]], pair: int, backend: Backend
) -> Counts:
    """Count a large leaf piece by piece, computing the ids of each piece in turn."""
    rows, extra = state.provenance
    counted = starmap(lambda ids, part: backend.tally(ids, part, len(rows) + 1), pieces)
    # a generator, so that each piece is freed before the next is computed
    return Counts(*summed(counted), rows, extra, pair, 1)


def _count_sparse(
    state: TracedValue, gradient: Tensor | None, pair: int, backend: Backend
) -> Counts:
    """Count a sparse leaf: the listed elements by their ids, and the others, unless they have no
    gradient, as a uniform leaf.
    """
    sparse, (rows, extra) = state.sparse, state.provenance
    assert sparse is not None
    counts, sizes = backend.tally(sparse.ids, sparse.value, len(rows) + 1)
    if not state.parts and gradient is not None:
        line, at = laid(gradient, sparse.at)
        line[at] = 0  # restored below: measure the other elements only
        count, size = backend.measure(gradient)
        line[at] = sparse.value
        counts[1] += count
        sizes[1] += size
    return Counts(counts, sizes, rows, extra, pair, 1)


def _at(places: Tensor, some: Tensor, count: int) -> Tensor:
    """A tensor of ``count`` numbers, 0 but for some places."""
    return some.new_zeros(count).index_copy_(0, places, some)
