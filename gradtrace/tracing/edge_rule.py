"""The rule ``edge``: values are gradients; of the users of a value, the largest single edge."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from gradtrace.ir.plan import Encoding, Form, Sizing
from gradtrace.kernels import Backend
from gradtrace.linops import Map
from gradtrace.semirings import MAX
from gradtrace.semirings.base import cast, wide
from gradtrace.tracing.greedy_rule import Greedy
from gradtrace.tracing.traced_value import (
    PendingContribution,
    TracedValue,
    materialise,
    own,
    sizes,
)


@dataclass(frozen=True)
class Edge(Greedy):
    """Equation 1.7 of the chapter on the scalar graph: values are gradients. Of all users of a
    value and all their elements, the one with the largest ``|w · g|``.

    Inside an operator that is the choice of ``greedy``. Users are compared by ``TracedValue.size``,
    which is found where a sum over users needs it (``Form.size``).
    """

    def through(
        self, map_: Map, state: TracedValue, form: Form, known: Tensor | None = None
    ) -> TracedValue:
        """The gradient, the provenance of the largest contribution, and its size if asked for."""
        how = form.size
        if state.size is not None and how not in (Sizing.CARRIED, Sizing.LAST):
            state = unsized(state, self.backend)
        if how is Sizing.NONE:
            found = super().through(map_, state, form, known)
            return _single(found, False) if state.parts else found
        if how is Sizing.PRESENT:
            return _present(_single(super().through(map_, state, form, known), True))
        if form.encoding is Encoding.MOVED:
            size = None if state.size is None else map_.apply(state.size)
            found = _single(self._gather(map_, state, form.dtype, known), True)
            found = found if size is None else found._replace(size=size)
        elif state.size is None and _is_later(form):
            # |value|, or found in ``join``
            return _single(super().through(map_, state, form, known), True)
        else:
            found = self._sized(map_, state, form, known)
        return unsized(found, self.backend) if how is Sizing.LAST else found

    def _sized(
        self, map_: Map, state: TracedValue, form: Form, known: Tensor | None
    ) -> TracedValue:
        """A map that scales or selects, with the largest |contribution|."""
        state = materialise(state, self.backend)
        x, compared, ids = state.value, state.compared, state.ids
        assert x is not None
        value = known
        if value is None and not (form.deferred and form.encoding is Encoding.DENSE):
            value = cast(map_.apply(x), form.dtype)
        if form.encoding is Encoding.SCALED:
            unmasked = ids is not None
            size = map_.weighed(compared)
            return TracedValue(value, 0, ids, state.provenance, (), size, None, unmasked)
        if form.encoding is Encoding.UNIFORM:
            size = map_.apply_in((wide(compared).abs(),), MAX)[0]
            return TracedValue(value, 0, None, state.provenance, (), size)
        ids = state.with_provenance(self.backend).ids if ids is None else ids
        assert ids is not None
        found, ids = map_.select(compared, ids, value=True)
        parts = (PendingContribution(map_, x),) if value is None else ()
        return TracedValue(value, 0, ids, state.provenance, parts, found)

    def join(
        self, states: list[TracedValue], form: Form, known: Tensor | None = None
    ) -> TracedValue:
        """The sum, and the provenance of the term with the largest single contribution."""
        wanted = form.size is not Sizing.NONE
        if form.encoding is Encoding.UNIFORM:
            if not wanted and all(state.uniform and state.size is None for state in states):
                return self._join_uniform(states, form, known)
            how = with_size if wanted else _kept
            states = [how(state, self.backend) for state in states]
        elif known is None and form.leaf and (found := self._join_sparse(states, form.dtype)):
            return found
        else:
            states = [with_size(state, self.backend) for state in states]
        if not wanted and all(state.size is None for state in states):
            return super().join(states, form, known)
        first, *rest = states
        if len(rest) == 1 and not form.partial and not wanted:
            found = self._join_pair(first, rest[0], form.dtype, known)
            if found is not None:
                return found
        return self._join_all(first, rest, form, known)

    def _compared_at(
        self, state: TracedValue, here: Tensor, other: TracedValue
    ) -> tuple[Tensor, Tensor]:
        sparse, theirs = other.sparse, None
        assert sparse is not None
        mine = wide(here).abs()
        if state.size is not None:
            mine = state.size.reshape(-1)[sparse.at]
        elif state.parts and state.parts[0].single:
            mine = reduce(torch.maximum, [part.largest_at(sparse.at) for part in state.parts])
        if other.parts[0].single:
            theirs = sparse.size
        return mine.reshape(here.shape), wide(sparse.value) if theirs is None else theirs

    def _parts(self, state: TracedValue) -> tuple[PendingContribution, ...]:
        return state.parts if state.parts else super()._parts(state)


def with_size(state: TracedValue, backend: Backend) -> TracedValue:
    """With the value, its provenance and the size of its contributions, if they were deferred."""
    if state.size is not None or not state.parts:
        return materialise(state, backend)
    if not state.parts[0].single:
        found = materialise(state, backend)
        return found if found.ids is None else found._replace(unmasked=True)
    if state.sparse is not None:
        at, _, _, few = state.sparse
        found = materialise(state, backend)
        assert found.value is not None and few is not None
        size = torch.zeros(found.value.shape, dtype=few.dtype, device=few.device)
        size.view(-1)[at] = few
        return found._replace(size=size)
    value, ids = state.value, None
    if value is None:
        value = state.parts[0].value()
        for part in state.parts[1:]:
            value = value + part.value()
    if state.lazy:
        size, ids = state.parts[0].selected()
    else:
        size = reduce(torch.maximum, [part.largest() for part in state.parts])
    return owned(state._replace(value=value, ids=ids, parts=(), size=size))


def owned(state: TracedValue) -> TracedValue:
    """With a size and ids that are contiguous and may be written to, given that nothing else uses
    the memory that they are views of.
    """
    size, ids = state.size, state.ids
    assert size is not None
    if not size.is_contiguous():
        size = own(size)
    if ids is not None and not ids.is_contiguous():
        ids = own(ids)
    return state._replace(size=size, ids=ids)


def unsized(state: TracedValue, backend: Backend) -> TracedValue:
    """Without a size, but with the provenance of the elements whose contributions cancel."""
    size, value = state.size, state.value
    assert size is not None
    waits = backend.synchronises
    if state.ids is None and value is not None and not waits and torch.equal(size != 0, value != 0):
        return state._replace(size=None)
    return state.with_provenance(backend)._replace(size=None)


def _is_later(form: Form) -> bool:
    """Whether the size is found when it is compared: of a diagonal map it is |value|, and leaves
    are computed late.
    """
    if form.encoding is Encoding.DENSE:
        return False
    return form.deferred or form.encoding is Encoding.SCALED


def _single(state: TracedValue, single: bool) -> TracedValue:
    """Whether deferred contributions are compared one by one, or as their sum: an operator compares
    single contributions of its own, and the sums of the operators before it.
    """
    if not state.parts or state.parts[0].single is single:
        return state
    return state._replace(parts=tuple([part._replace(single=single) for part in state.parts]))


def _kept(state: TracedValue, backend: Backend) -> TracedValue:
    """Materialised, with a size that is not 0 where single contributions cancel."""
    if state.parts and state.parts[0].single:
        return _present(materialise(state, backend))
    return with_size(state, backend)


def _present(state: TracedValue) -> TracedValue:
    """With a size that is not 0 where there is a path, of whatever size."""
    if state.ids is None or state.unmasked or state.value is None:
        return state
    size = sizes(state.value)
    least = torch.finfo(size.dtype).tiny
    return state._replace(size=torch.where((size == 0) & (state.ids != 0), least, size))
