"""``TracedValue``: a value with the provenance of its elements, and deferred contributions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from gradtrace.kernels import Backend
from gradtrace.linops import Contract, Map, Scatter
from gradtrace.linops.base import PROBED_ELEMENTS
from gradtrace.linops.scatter import SparseElements
from gradtrace.semirings import MAX
from gradtrace.semirings.base import wide
from gradtrace.tracing import fixed_pass
from gradtrace.tracing.provenance import COMPACT_ABOVE_ENTRIES, ProvenanceTable

ROW_COST_ELEMENTS = 64
"""Computing one element by its row costs at most as much as this many elements of a full pass."""


ZERO_SEARCH_MAX_ELEMENTS = 1 << 22
"""On a GPU, values of up to this many elements are searched for zeros without first testing
``value.all()``: each of the two tests costs a synchronisation.
"""


class PendingContribution(NamedTuple):
    """A deferred contribution: ``map(x)``, then the gathers ``moves`` in order.

    ``source_ids`` are the provenance ids of ``x``, if the ids of the result are deferred too.
    ``single``: beside other contributions, it is one where any of its products is not 0, even if
    they cancel (``edge``); else where their sum is not 0.
    """

    map: Map
    x: Tensor
    moves: tuple[Map, ...] = ()
    source_ids: Tensor | None = None
    single: bool = False

    def value(self) -> Tensor:
        """``moves(map(x))``."""
        return self._moved(self.map.apply(self.x))

    def may_be_nonzero(self) -> Tensor | None:
        """Which elements may receive a nonzero contribution; None if all may."""
        found = self.map.may_be_nonzero(self.x)
        if found is None or not self.moves:
            return found
        return self._moved(found.int()) != 0

    def few(self) -> SparseElements | None:
        """Where only few elements are added to: these, with id 1 where a contribution is not 0."""
        if self.moves or not (isinstance(self.map, Scatter) and self.map.sparse):
            return None
        return self.map.few(self.x, (self.x != 0).int())

    def sent_to_zeros(self, value: Tensor) -> Tensor | None:
        """The numbers of the elements of ``value``, the result, that are 0 though an element of
        ``x`` is added to them that is not; None if that is no cheaper than by searching for zeros.
        """
        if self.moves or not (isinstance(self.map, Scatter) and self.map.sparse):
            return None
        target, flat = self.map.target.reshape(-1), value.reshape(-1)
        sent = (self.x.reshape(-1) != 0) & (target >= 0)
        sent &= flat.index_select(0, target.clamp(min=0)) == 0
        return target[sent]

    def reached(self, at: Tensor) -> Tensor:
        """Which of the elements ``at`` receive a nonzero product from some element of ``x``."""
        if self.few_rows(at):
            return self._reached_by_rows(at)
        exact = self.may_be_nonzero() if self.map.unit_weights else None
        if exact is not None:
            return exact.reshape(-1)[at]
        _, found = self.map.select(self.x, torch.ones_like(self.x, dtype=torch.int32))
        return self._moved(found).reshape(-1)[at] != 0

    def few_rows(self, at: Tensor) -> bool:
        """Whether the elements ``at`` are computed by their rows."""
        return ROW_COST_ELEMENTS * len(at) <= self.map.outputs

    def largest(self) -> Tensor:
        """The largest single |product| to each element."""
        return self._moved(self.map.apply_in((wide(self.x).abs(),), MAX)[0])

    def largest_at(self, at: Tensor) -> Tensor:
        """``largest``, of the elements ``at``."""
        return self._largest_by_rows(at) if self.few_rows(at) else self.largest().reshape(-1)[at]

    def _largest_by_rows(self, at: Tensor) -> Tensor:
        there, at = self._unmoved(at)
        return self.map.best(self.x, at).value * there

    def _reached_by_rows(self, at: Tensor) -> Tensor:
        there, at = self._unmoved(at)
        read = self.map.reads_nonzero(self.x, at)
        if read is None:
            return there & (self.map.best(self.x, at).value != 0)
        there &= read
        there[there.clone()] = self.map.best(self.x, at[there]).value != 0
        return there

    def _unmoved(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """The elements of ``map(x)`` that are moved to the elements ``at``, and whether there is
        one.
        """
        there = torch.ones_like(at, dtype=torch.bool)
        for move in reversed(self.moves):
            source = move.rows(at).source[:, 0]
            there, at = there & (source >= 0), source.clamp(min=0)
        return there, at

    def selected(self) -> tuple[Tensor, Tensor]:
        """The largest single |product| to each element, and its provenance id."""
        assert self.source_ids is not None
        size, ids = self.map.select(self.x, self.source_ids, value=True)
        assert size is not None
        return self._moved(size), self._moved(ids)

    def ids(self) -> Tensor:
        """The provenance ids of the result."""
        assert self.source_ids is not None
        return self._moved(self.map.select(self.x, self.source_ids)[1])

    def pieces(self, gradient: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]] | None:
        """Pieces of ``size`` elements in the gradient's memory order: (ids, gradients).

        None where the result's layout differs from the gradient's by more than a permutation, as
        elements would then be counted in another order.
        """
        if not isinstance(self.map, Contract):
            return None
        result = torch.empty(self.map.out_shape, device="meta")
        moved = self._moved(result)
        if moved is not result and moved._base is not result:
            return None
        if not gradient.is_contiguous() and moved.stride() != gradient.stride():
            return None
        steps = result.stride()
        if sorted(moved.stride()) != sorted(steps) or len({*steps}) < len(steps):
            return None  # not a permutation of dimensions
        along = sorted(range(gradient.dim()), key=gradient.stride, reverse=True)
        order = [steps.index(moved.stride(d)) for d in along]
        return self._pieces(gradient.permute(along).reshape(-1), order, size)

    def _pieces(self, line: Tensor, order: list[int], size: int) -> Iterator[tuple[Tensor, Tensor]]:
        assert isinstance(self.map, Contract) and self.source_ids is not None
        for first in range(0, len(line), size):
            last = min(first + size, len(line))
            yield self.map.carry_some(self.x, self.source_ids, order, first, last), line[first:last]

    def _moved(self, x: Tensor) -> Tensor:
        for move in self.moves:
            x = move.apply(x)
        return x


class TracedValue(NamedTuple):
    """A value ``value · 2**exponent`` with the provenance ids of its elements and their table.

    ``ids`` is None for a *uniform* value: all its nonzero elements have a path, with the same
    provenance. ``parts`` are the contributions that made the value, kept where it has not been
    computed yet (``value`` is None), or where it has not been checked yet whether an element that
    is 0 has a path all the same, because its contributions cancel.

    ``sparse`` lists the few elements with a provenance of their own; the others have the first one
    where ``value`` is not 0, or none if the value has not been computed.

    A part with ids is the only one, and the value's ids follow from it. Those of a leaf may be
    *lazy*: computed when they are counted, in pieces if the leaf is large, in one launch with
    others if it is small.

    ``unmasked`` ids are valid only at nonzero elements. No rule selects an element that is 0, so
    they are seldom masked.

    ``size`` is by what the value is compared with others: of a partial sum the largest term so far;
    by the rule ``edge``, the largest single |contribution|. None: |value|. Where it is known, an
    element has a path if its size is not 0.
    """

    value: Tensor | None
    exponent: int
    ids: Tensor | None
    provenance: ProvenanceTable
    parts: tuple[PendingContribution, ...] = ()
    size: Tensor | None = None
    sparse: SparseElements | None = None
    unmasked: bool = False

    @property
    def uniform(self) -> bool:
        """Whether all elements have the same provenance, where they are not 0."""
        return self.ids is None and self.sparse is None and not self.lazy

    @property
    def lazy(self) -> bool:
        """Whether the ids have not been computed yet."""
        return bool(self.parts) and self.parts[0].source_ids is not None

    def with_bits(self, bits: int) -> TracedValue:
        """With these bits added to the provenance of every element."""
        if not bits & ~self.provenance.extra:
            return self
        value, exponent, ids, provenance, *rest = self  # _replace is slower
        return _tuple(TracedValue, (value, exponent, ids, provenance.with_bits(bits), *rest))

    @property
    def compared(self) -> Tensor:
        """By what the value is compared with others, up to its sign."""
        if self.size is not None:
            return self.size
        assert self.value is not None
        return self.value

    def with_provenance(self, backend: Backend) -> TracedValue:
        """With an id for each element, and id 0 at elements without a path (not ``unmasked``)."""
        if self.ids is not None and not self.unmasked:
            return self
        compared = self.compared
        if self.ids is not None:
            ids = backend.masked(self.ids, compared)
            return self._replace(ids=ids, unmasked=False)
        ids = torch.empty(compared.shape, dtype=torch.int32, device=compared.device)
        torch.ne(compared, 0, out=ids)
        if self.sparse is not None:
            ids.view(-1)[self.sparse.at] = self.sparse.ids
        return self._replace(ids=ids, sparse=None)


_tuple = tuple.__new__


def made(
    value: Tensor | None,
    ids: Tensor | None,
    provenance: ProvenanceTable,
    parts: tuple[PendingContribution, ...] = (),
    unmasked: bool = False,
) -> TracedValue:
    """A ``TracedValue`` with exponent 0. Made for every step, so the tuple is built by
    ``tuple.__new__``, which takes a third of the time.
    """
    return _tuple(TracedValue, (value, 0, ids, provenance, parts, None, None, unmasked))


def thinned(state: TracedValue) -> TracedValue:
    """A uniform leaf whose value has not been computed, by the elements that are added to, if
    these are few: an embedding has a gradient in the rows of a batch.
    """
    if state.value is not None or not state.uniform or len(state.parts) != 1:
        return state
    few = state.parts[0].few()
    return state if few is None else state._replace(sparse=few)


def materialise(state: TracedValue, backend: Backend) -> TracedValue:
    """With ``value`` computed, and ids that include elements whose contributions cancel to 0."""
    if not state.parts:
        return state
    value = state.value
    if state.sparse is not None:
        value = state.parts[0].value() if value is None else value
        there = torch.zeros(value.shape, dtype=torch.int32, device=value.device)
        there.view(-1)[state.sparse.at] = state.sparse.ids
        return state._replace(value=value, ids=there, parts=(), sparse=None)
    if value is None:
        value = state.parts[0].value()
        for part in state.parts[1:]:
            value = value + part.value()
    if state.lazy:
        return state._replace(value=value, ids=state.parts[0].ids(), parts=())
    if state.ids is not None:
        return state._replace(value=value, parts=())
    missed = cancelled(state.parts, value, backend)
    ids = None if missed is None else ((value != 0) | missed).int()
    return state._replace(value=value, ids=ids, parts=())


def cancelled(
    parts: tuple[PendingContribution, ...], value: Tensor, backend: Backend
) -> Tensor | None:
    """Which elements of a sum are 0 although a contribution is not; None if there are none."""
    fixed = fixed_pass.current()
    if fixed is not None:
        fixed.assume_not(_may_cancel(parts, value), "elements whose contributions cancel")
        return None
    if len(parts) == 1 and (sent := parts[0].sent_to_zeros(value)) is not None:
        if not len(sent):
            return None
        found = torch.zeros(value.numel(), dtype=torch.bool, device=value.device)
        return found.index_fill_(0, sent, True).reshape(value.shape)
    at = _zeros_of_sum(parts, value, backend)
    if not len(at):
        return None
    if len(parts) == 1:
        reached = parts[0].reached(at)
    else:
        reached = torch.zeros(len(at), dtype=torch.bool, device=at.device)
        for part in parts:
            reached |= part.reached(at) if part.single else part.value().reshape(-1)[at] != 0
    if not bool(reached.any()):
        return None
    found = torch.zeros(value.numel(), dtype=torch.bool, device=value.device)
    found[at] = reached
    return found.reshape(value.shape)


def _may_cancel(parts: tuple[PendingContribution, ...], value: Tensor) -> Tensor:
    """Whether any element of a sum is 0 that may get a contribution, as a tensor."""
    zero = value == 0
    if len(parts) > 1 and not any(part.single for part in parts):
        there = parts[0].value() != 0
        for part in parts[1:]:
            there = there | (part.value() != 0)
        return (zero & there.reshape(zero.shape)).any()
    possible = _may_be_nonzero(parts)
    return (zero if possible is None else zero & possible.reshape(zero.shape)).any()


def _zeros_of_sum(
    parts: tuple[PendingContribution, ...], value: Tensor, backend: Backend
) -> Tensor:
    """The numbers of the elements of a sum that are 0, of those that may get a contribution."""
    waits, at = backend.synchronises, None
    if not waits and value.is_contiguous():
        at = backend.zeros(value)
    elif not (waits and value.numel() <= ZERO_SEARCH_MAX_ELEMENTS) and not backend.has_zeros(value):
        at = torch.empty(0, dtype=torch.int64, device=value.device)
    if at is not None and not len(at):
        return at
    if not waits and not any(_any_nonzero(part.x) for part in parts):
        return torch.empty(0, dtype=torch.int64, device=value.device)  # all contributions are 0
    if at is not None and len(parts) == 1 and (parts[0].map.unit_weights or parts[0].few_rows(at)):
        return at  # which of them have one, ``reached`` finds as fast
    possible = _may_be_nonzero(parts)
    if at is not None:
        return at if possible is None else at[possible.reshape(-1)[at]]
    zero = value == 0
    if possible is not None:
        zero &= possible.reshape(zero.shape)
    return zero.reshape(-1).nonzero().reshape(-1)


def _any_nonzero(x: Tensor) -> bool:
    """Whether any element is not 0; mostly a corner tells."""
    corner = x[tuple([slice(PROBED_ELEMENTS)] * x.dim())]
    return bool(corner.any()) or bool(x.any())


def _may_be_nonzero(parts: tuple[PendingContribution, ...]) -> Tensor | None:
    """Which elements may receive a nonzero contribution from any part; None if all may."""
    found = parts[0].may_be_nonzero()
    for part in parts[1:]:
        here = None if found is None else part.may_be_nonzero()
        found = None if found is None or here is None else found | here
    return found


def shared(states: list[TracedValue]) -> bool:
    """Whether all share one tensor of ids and one provenance table, of at most
    ``COMPACT_ABOVE_ENTRIES`` entries, and values have one dtype.
    """
    first = states[0]
    ids, provenance, value = first.ids, first.provenance, first.value
    if ids is None or value is None:
        return False
    dtype = value.dtype
    for state in states:
        if state.ids is not ids or state.size is not None:
            return False
        if (
            state.provenance.rows is not provenance.rows
            or state.provenance.extra != provenance.extra
        ):
            return False
        if state.value is None or state.value.dtype is not dtype:
            return False
    return len(provenance.rows) <= COMPACT_ABOVE_ENTRIES  # last: len() of a lazy table synchronises


def sizes(x: Tensor) -> Tensor:
    """|x| as a new contiguous tensor."""
    x = wide(x)
    if x.is_contiguous():
        return x.abs()
    return torch.abs(x, out=torch.empty(x.shape, dtype=x.dtype, device=x.device))


def own(x: Tensor) -> Tensor:
    """A contiguous copy that may be written to."""
    return x.clone(memory_format=torch.contiguous_format)
