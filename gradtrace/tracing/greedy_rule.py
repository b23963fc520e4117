"""The rule ``greedy``: values are gradients; of a value's users, the one that hands back most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradtrace.ir.plan import Encoding, Form
from gradtrace.kernels import Backend
from gradtrace.kernels.strides import is_dense
from gradtrace.linops import Identity, Map, Scale, Scatter
from gradtrace.linops.indexing import laid
from gradtrace.linops.scatter import SparseElements
from gradtrace.semirings.base import NARROW, cast, wide
from gradtrace.tracing.provenance import ProvenanceTable, compact
from gradtrace.tracing.traced_value import (
    PendingContribution,
    TracedValue,
    made,
    materialise,
    own,
    shared,
    sizes,
)


@dataclass(frozen=True)
class Greedy:
    """Algorithm 1 of the chapter: values are gradients. Of the users of a value, the one with the
    largest |contribution|, which is a sum over its elements; inside it, the largest element.
    """

    backend: Backend

    def through(
        self, map_: Map, state: TracedValue, form: Form, known: Tensor | None = None
    ) -> TracedValue:
        """The gradient, and the provenance of the largest contribution to each element."""
        encoding, dtype, deferred, _, _, _ = form
        if encoding is Encoding.MOVED:
            return self._gather(map_, state, dtype, known)
        state = materialise(state, self.backend)
        x, provenance = state.value, state.provenance
        assert x is not None
        value = known if known is not None or deferred else cast(map_.apply(x), dtype)
        if encoding is Encoding.SCALED:
            assert value is not None
            return self._scale(map_, state, value)
        if encoding is Encoding.UNIFORM:
            found = TracedValue(value, 0, None, provenance, (PendingContribution(map_, x),))
            return found if deferred else materialise(found, self.backend)
        ids = state.with_provenance(self.backend).ids if state.ids is None else state.ids
        assert ids is not None
        if encoding is Encoding.SPARSE:
            assert isinstance(map_, Scatter)
            part, sparse = PendingContribution(map_, x), map_.few(x, ids)
            return TracedValue(None, 0, None, provenance, (part,), None, sparse)
        if encoding is Encoding.LAZY:
            return TracedValue(value, 0, None, provenance, (PendingContribution(map_, x, (), ids),))
        parts = (PendingContribution(map_, x),) if value is None else ()
        return made(value, map_.select(x, ids)[1], provenance, parts)

    def _gather(
        self, map_: Map, state: TracedValue, dtype: torch.dtype, known: Tensor | None
    ) -> TracedValue:
        if state.sparse is not None:
            if isinstance(map_, Identity):
                return state
            state = materialise(state, self.backend)
        value, _, ids, provenance, parts, _, _, unmasked = state
        if unmasked and value is not None and value.dtype is not dtype:
            ids, unmasked = (
                state.with_provenance(self.backend).ids,
                False,
            )  # the cast may round a nonzero to 0
        if ids is not None:
            ids = map_.apply(ids)
        if known is None and value is not None:
            known = cast(map_.apply(value), dtype)
        if parts:
            parts = tuple(part._replace(moves=(*part.moves, map_)) for part in parts)
        return made(known, ids, provenance, parts, unmasked)

    def _scale(self, map_: Map, state: TracedValue, value: Tensor) -> TracedValue:
        """A diagonal map: an element that becomes 0 loses its path."""
        x, ids = state.value, state.ids
        assert x is not None
        if x.dtype in NARROW or value.dtype in NARROW:  # an underflow to 0 keeps its path
            found = None
            if isinstance(map_, Scale) and (ids is not None or self.backend.synchronises):
                found = self.backend.scaled_ids(x, map_.weight, ids)
            if found is not None:
                return made(value, found, state.provenance)
            there = map_.weighed(x) != 0
            if ids is None and not self.backend.synchronises and torch.equal(there, value != 0):
                return TracedValue(value, 0, None, state.provenance)
            ids = there.int() if ids is None else ids * there
            return made(value, ids, state.provenance)
        return made(value, ids, state.provenance, (), ids is not None)

    def join(
        self, states: list[TracedValue], form: Form, known: Tensor | None = None
    ) -> TracedValue:
        """The sum, and the provenance of the largest term."""
        if alike(states, form):
            return self._join_uniform(states, form, known)
        if known is None and form.leaf and (found := self._join_sparse(states, form.dtype)):
            return found
        first, *rest = states
        if first.ids is not None or first.parts:
            first = compared_by_value(materialise(first, self.backend))
        states = [first, *rest]
        if (
            not form.partial
            and shared(states)
            and (found := self._join_shared_ids(states, form.dtype, known))
        ):
            return found
        rest = [materialise(state, self.backend) for state in rest]
        if (
            len(rest) == 1
            and not form.partial
            and (found := self._join_pair(first, rest[0], form.dtype, known))
        ):
            return found
        return self._join_all(first, rest, form, known)

    def _join_all(
        self, first: TracedValue, rest: Sequence[TracedValue], form: Form, known: Tensor | None
    ) -> TracedValue:
        """The sum of any terms, compared one by one; the ``size`` of the first is written to."""
        assert first.value is not None
        total = first.value
        for other in rest if known is None else ():
            assert other.value is not None
            total = total + other.value
        (size, ids), provenance, rest = self._begun(first, rest)
        for other in rest:
            theirs = 1 if other.ids is None else other.ids
            provenance, shift = provenance.joined(other.provenance)
            self.backend.merge(size, ids, other.compared, theirs, shift)
        ids, provenance = compact(ids, provenance, self.backend)
        total = cast(total, form.dtype) if known is None else known
        return TracedValue(total, 0, ids, provenance, (), size)

    def _begun(
        self, first: TracedValue, rest: Sequence[TracedValue]
    ) -> tuple[tuple[Tensor, Tensor], ProvenanceTable, Sequence[TracedValue]]:
        """The sizes and ids of the first term, to be written to, its provenance, and the terms to
        merge into it. Where a kernel merges the second into it at once, that is done.
        """
        assert first.value is not None
        if first.size is None and rest and self.backend.fuses(first.value, rest[0].compared):
            provenance, shift = first.provenance.joined(rest[0].provenance)
            found = self.backend.merge_sized(*_pair(first, rest[0]), shift)
            if found is not None:
                return found, provenance, rest[1:]
        state = first.with_provenance(self.backend)
        size, ids = state.size, state.ids
        assert ids is not None
        if size is None:
            free = ids is not first.ids and ids.is_contiguous()
            size, ids = sizes(first.value), ids if free else own(ids)
        return (size, ids), state.provenance, rest

    def _join_shared_ids(
        self, states: list[TracedValue], dtype: torch.dtype, known: Tensor | None
    ) -> TracedValue | None:
        """Terms that share one tensor of ids: an element has a path if any of its terms is not 0.
        None where comparing the terms is no slower.
        """
        first, *rest = states
        given, value, total = first.ids, first.value, first.value
        assert given is not None and value is not None and total is not None
        ids = given
        backend = self.backend
        if first.unmasked and backend.synchronises:
            # Comparing with the first term is enough: if another term is not 0 and not larger than
            # the first, the first is not 0 either.
            for n, other in enumerate(rest):
                assert other.value is not None
                merged = backend.merge_pair(value, ids, not n, other.value, given, 0)
                if merged is None:
                    return None
                ids = merged
        elif first.unmasked and backend.has_zeros(value):
            return None
        for other in rest if known is None else ():
            assert other.value is not None
            total = total + other.value
        return made(cast(total, dtype) if known is None else known, ids, first.provenance)

    def _join_pair(
        self, first: TracedValue, second: TracedValue, dtype: torch.dtype, known: Tensor | None
    ) -> TracedValue | None:
        """``join`` of two terms in one kernel; None where there is no such kernel."""
        assert first.value is not None and second.value is not None
        backend = self.backend
        if not backend.fuses(first.compared, second.compared):
            return None
        provenance, shift = first.provenance.joined(second.provenance)
        ids = backend.merge_pair(*_pair(first, second), shift)
        if ids is None:
            return None
        total = known
        if total is None:
            total = cast(first.value + second.value, dtype)
        return TracedValue(total, 0, *compact(ids, provenance, self.backend))

    def _join_sparse(self, states: list[TracedValue], dtype: torch.dtype) -> TracedValue | None:
        """A uniform term plus a sparse one: only the sparse elements are compared."""
        if len(states) != 2 or not states[0].uniform or states[1].sparse is None:
            return None
        given, (at, other, theirs, _) = states[0], states[1].sparse
        fresh = given.value is None
        first = materialise(given, self.backend)
        if first.ids is not None or first.value is None:
            return None
        total = first.value.to(dtype)
        if (total is first.value and not fresh) or not is_dense(total):
            total = own(total)
        line, place = laid(total, at)
        here = line[place]
        size, contributed = self._compared_at(given, here, states[1])
        ids = (size != 0).int()
        provenance, shift = first.provenance.joined(states[1].provenance)
        self.backend.merge(size, ids, contributed, theirs, shift)
        here = line[place] = (here + other).to(dtype)
        return TracedValue(total, 0, None, provenance, sparse=SparseElements(at, here, ids))

    def _compared_at(
        self, state: TracedValue, here: Tensor, other: TracedValue
    ) -> tuple[Tensor, Tensor]:
        """By what the elements of a sparse value are compared with those of a uniform one, which
        are ``here``: the sizes of these, as a new tensor, and of those.
        """
        assert other.sparse is not None
        return wide(here).abs(), wide(other.sparse.value)

    def _parts(self, state: TracedValue) -> tuple[PendingContribution, ...]:
        """The contributions by which a term of a sum has a path."""
        if state.value is None or len(state.parts) > 1:
            return state.parts
        return (PendingContribution(Identity(tuple(state.value.shape)), state.value),)

    def _join_uniform(
        self, states: list[TracedValue], form: Form, known: Tensor | None
    ) -> TracedValue:
        """Uniform terms of equal provenance: only whether any of them is not 0 matters."""
        parts: list[PendingContribution] = []
        for state in states:
            parts += self._parts(state)
        if known is None and not form.deferred:
            total = parts[0].value()
            for part in parts[1:]:
                total = total + part.value()
            known = total.to(form.dtype)
        found = TracedValue(known, 0, None, states[0].provenance, tuple(parts))
        return found if form.deferred else materialise(found, self.backend)


def _pair(
    first: TracedValue, second: TracedValue
) -> tuple[Tensor, Tensor | int, bool, Tensor, Tensor | int]:
    """What ``merge_pair`` compares."""
    return (
        first.compared,
        1 if first.ids is None else first.ids,
        first.ids is None or first.unmasked,
        second.compared,
        1 if second.ids is None else second.ids,
    )


def compared_by_value(state: TracedValue) -> TracedValue:
    """A term of a sum over users: where it is 0 it hands back nothing, though its own contributions
    may cancel. Only the first term can have the id of such an element; others must be larger.
    """
    if state.ids is None or state.unmasked or state.size is not None:
        return state
    return state._replace(unmasked=True)


def alike(states: list[TracedValue], form: Form) -> bool:
    """Whether all terms have the same provenance in all elements."""
    return form.encoding is Encoding.UNIFORM and all(state.uniform for state in states)
