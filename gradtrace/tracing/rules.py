"""Rules that choose, for each element, the contribution it points to: greedy, Viterbi, none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gradtrace.ir.interpreter import ScaledValue, balanced
from gradtrace.ir.program import Step
from gradtrace.kernels import backend_of, tuning
from gradtrace.linops import Contract, Identity, Map, Reduce, Scatter
from gradtrace.linops.indexing import filled, laid
from gradtrace.linops.scatter import SparseElements
from gradtrace.semirings import MAX
from gradtrace.semirings.base import NARROW, cast, shifted, wide
from gradtrace.tracing.provenance import compact
from gradtrace.tracing.traced_value import (
    PendingContribution,
    StepContext,
    TracedValue,
    alike,
    made,
    materialise,
    own,
    shared,
    sizes,
)


class Rule(Protocol):
    """How a traced value is propagated through a map, and how terms are summed."""

    def through(
        self, map_: Map, state: TracedValue, step: Step, context: StepContext
    ) -> TracedValue:
        """Apply a map; ``context`` gives gradients that are known already."""

    def join(
        self, states: list[TracedValue], step: Step, context: StepContext, on: bool = False
    ) -> TracedValue:
        """The sum of terms; ``on`` if it is a partial sum and more terms follow."""


@dataclass(frozen=True)
class Greedy:
    """Equation 1.7 of the chapter: values are gradients."""

    def through(
        self, map_: Map, state: TracedValue, step: Step, context: StepContext
    ) -> TracedValue:
        """The gradient, and the provenance of the largest contribution to each element."""
        known = context.known.get(step.out)
        if map_.is_gather:
            return self._gather(map_, state, step, known)
        state = materialise(state)
        x = state.value
        assert x is not None
        choosing = not map_.is_diagonal
        defer = choosing and step.out in context.tails
        value = known if known is not None or defer else cast(map_.apply(x), step.dtype)
        if choosing and not state.provenance.single:
            assert state.ids is not None
            if value is None and isinstance(map_, Scatter) and map_.sparse:
                sparse = map_.few(x, state.ids)
                return TracedValue(
                    None, 0, None, state.provenance, (PendingContribution(map_, x),), None, sparse
                )
            if defer and _lazy_ids(map_, x, context):
                return TracedValue(
                    value,
                    0,
                    None,
                    state.provenance,
                    (PendingContribution(map_, x, (), state.ids),),
                )
            ids = map_.select(x, state.ids)[1]
            return made(
                value,
                ids,
                state.provenance,
                (PendingContribution(map_, x),) if value is None else (),
            )
        if choosing:
            found = TracedValue(value, 0, None, state.provenance, (PendingContribution(map_, x),))
            return found if defer else materialise(found)
        assert value is not None
        return self._scale(map_, state, value)

    @staticmethod
    def _gather(map_: Map, state: TracedValue, step: Step, known: Tensor | None) -> TracedValue:
        if state.sparse is not None:
            if isinstance(map_, Identity):
                return state
            state = materialise(state)
        value, _, ids, provenance, parts, _, _, unmasked = state
        if unmasked and value is not None and value.dtype is not step.dtype:
            ids, unmasked = state.with_provenance().ids, False  # the cast may round a nonzero to 0
        if ids is not None:
            ids = map_.apply(ids)
        if known is None and value is not None:
            known = cast(map_.apply(value), step.dtype)
        if parts:
            parts = tuple(part._replace(moves=(*part.moves, map_)) for part in parts)
        return made(known, ids, provenance, parts, unmasked)

    @staticmethod
    def _scale(map_: Map, state: TracedValue, value: Tensor) -> TracedValue:
        """A diagonal map: an element that becomes 0 loses its path."""
        x, ids = state.value, state.ids
        assert x is not None
        if x.dtype in NARROW or value.dtype in NARROW:  # an underflow to 0 keeps its path
            there = map_.weighed(x) != 0
            if ids is None and not backend_of(x).synchronises and torch.equal(there, value != 0):
                return TracedValue(value, 0, None, state.provenance)
            ids = there.int() if ids is None else ids * there
            return made(value, ids, state.provenance)
        return made(value, ids, state.provenance, (), ids is not None)

    def join(
        self, states: list[TracedValue], step: Step, context: StepContext, on: bool = False
    ) -> TracedValue:
        """The sum, and the provenance of the largest term."""
        known = context.known.get(step.out)
        if alike(states):
            return self._join_uniform(states, step, context, known)
        if (
            known is None
            and step.out in context.ends
            and (found := self._join_sparse(states, step))
        ):
            return found
        if not on and shared(states) and (found := self._join_shared_ids(states, step, known)):
            return found
        first, *rest = map(materialise, states)
        if len(rest) == 1 and not on and (found := self._join_pair(first, rest[0], step, known)):
            return found
        given = first.ids
        first = first.with_provenance()
        assert first.value is not None and first.ids is not None
        total, provenance = first.value, first.provenance
        size, ids = first.size, first.ids
        if size is None:
            free = ids is not given and ids.is_contiguous()
            size, ids = sizes(total), ids if free else own(ids)
        for other in rest:
            assert other.value is not None
            if known is None:
                total = total + other.value
            theirs = 1 if other.ids is None else other.ids
            provenance, shift = provenance.joined(other.provenance)
            backend_of(size).merge(size, ids, wide(other.value), theirs, shift)
        ids, provenance = compact(ids, provenance)
        total = cast(total, step.dtype) if known is None else known
        return TracedValue(total, 0, ids, provenance, (), size)

    @staticmethod
    def _join_shared_ids(
        states: list[TracedValue], step: Step, known: Tensor | None
    ) -> TracedValue | None:
        """Terms that share one tensor of ids: an element has a path if any of its terms is not 0.
        None where comparing the terms is no slower.
        """
        first, *rest = states
        given, value, total = first.ids, first.value, first.value
        assert given is not None and value is not None and total is not None
        ids = given
        backend = backend_of(value)
        if first.unmasked and backend.synchronises:
            # Comparing with the first term is enough: if another term is not 0 and not larger than
            # the first, the first is not 0 either.
            for n, other in enumerate(rest):
                assert other.value is not None
                merged = backend.merge_pair(value, ids, not n, other.value, given, 0)
                if merged is None:
                    return None
                ids = merged
        elif first.unmasked and not bool(value.all()):
            return None
        for other in rest if known is None else ():
            assert other.value is not None
            total = total + other.value
        return made(cast(total, step.dtype) if known is None else known, ids, first.provenance)

    @staticmethod
    def _join_pair(
        first: TracedValue, second: TracedValue, step: Step, known: Tensor | None
    ) -> TracedValue | None:
        """``join`` of two terms in one kernel; None where there is no such kernel."""
        assert first.value is not None and second.value is not None
        backend = backend_of(first.value)
        if first.size is not None or not backend.fuses(first.value, second.value):
            return None
        uniform = first.ids is None
        provenance, shift = first.provenance.joined(second.provenance)
        ids = backend.merge_pair(
            first.value,
            1 if first.ids is None else first.ids,
            uniform or first.unmasked,
            second.value,
            1 if second.ids is None else second.ids,
            shift,
        )
        if ids is None:
            return None
        total = known
        if total is None:
            total = cast(first.value + second.value, step.dtype)
        return TracedValue(total, 0, *compact(ids, provenance))

    @staticmethod
    def _join_sparse(states: list[TracedValue], step: Step) -> TracedValue | None:
        """A uniform term plus a sparse one: only the sparse elements are compared."""
        if len(states) != 2 or states[0].uniform_set is None or states[1].sparse is None:
            return None
        first, (at, other, marks) = states[0], states[1].sparse
        fresh = first.value is None
        first = materialise(first)
        if first.ids is not None or first.value is None:
            return None
        total = first.value.to(step.dtype)
        if (total is first.value and not fresh) or not filled(total):
            total = own(total)
        line, place = laid(total, at)
        here = line[place]
        size, ids = wide(here).abs(), (here != 0).int()
        provenance, shift = first.provenance.joined(states[1].provenance)
        backend_of(size).merge(size, ids, wide(other), marks, shift)
        here = line[place] = (here + other).to(step.dtype)
        return TracedValue(total, 0, None, provenance, sparse=SparseElements(at, here, ids))

    @staticmethod
    def _join_uniform(
        states: list[TracedValue], step: Step, context: StepContext, known: Tensor | None
    ) -> TracedValue:
        """Uniform terms of equal provenance: only whether any of them is not 0 matters."""
        parts: list[PendingContribution] = []
        for state in states:
            if state.value is None or len(state.parts) > 1:
                parts += state.parts
            else:
                parts.append(PendingContribution(Identity(tuple(state.value.shape)), state.value))
        if known is None and step.out not in context.tails:
            total = parts[0].value()
            for part in parts[1:]:
                total = total + part.value()
            known = total.to(step.dtype)
        found = TracedValue(known, 0, None, states[0].provenance, tuple(parts))
        return found if step.out in context.tails else materialise(found)


def _lazy_ids(map_: Map, x: Tensor, context: StepContext) -> bool:
    """Whether a leaf's ids are computed lazily, while they are counted: in pieces if the leaf is
    large, or in one launch with other leaves.
    """
    if isinstance(map_, Reduce):
        return context.ample and backend_of(x).fuses(x)
    if not isinstance(map_, Contract):
        return False
    return map_.outputs > tuning.PIECE_ELEMENTS and map_.plan().turned


@dataclass(frozen=True)
class Viterbi:
    """Values are the largest |product| over the paths."""

    def through(
        self, map_: Map, state: TracedValue, step: Step, context: StepContext
    ) -> TracedValue:
        """The largest |contribution|, and its provenance."""
        x, ids = state.value, state.ids
        assert x is not None
        if map_.is_gather:
            moved = None if ids is None else map_.apply(ids)
            return state._replace(value=map_.apply(x), ids=moved)
        if ids is None:
            value = map_.apply_in((x,), MAX)[0]
        elif state.provenance.single and not map_.is_diagonal:
            value, ids = map_.apply_in((x,), MAX)[0], None
        elif map_.is_diagonal:
            value = map_.apply_in((x,), MAX)[0]
            ids = backend_of(value).masked(ids, value)
        else:
            found, ids = map_.select(x, ids, value=True)
            assert found is not None
            value = found
        held = balanced(ScaledValue((value,), state.exponent), MAX)
        return TracedValue(held.value[0], held.exponent, ids, state.provenance)

    def join(
        self, states: list[TracedValue], step: Step, context: StepContext, on: bool = False
    ) -> TracedValue:
        """The largest term, and its provenance."""
        exponent = max(state.exponent for state in states)
        values = []
        for state in states:
            assert state.value is not None
            values.append(shifted(state.value, state.exponent - exponent))
        if alike(states):
            size = values[0]
            for value in values[1:]:
                size = torch.maximum(size, value)
            return TracedValue(size, exponent, None, states[0].provenance)
        first = states[0].with_provenance()
        assert first.ids is not None
        size, ids, provenance = own(values[0]), own(first.ids), first.provenance
        for other, value in zip(states[1:], values[1:]):
            theirs = 1 if other.ids is None else other.ids
            provenance, shift = provenance.joined(other.provenance)
            backend_of(size).merge(size, ids, value, theirs, shift)
        return TracedValue(size, exponent, *compact(ids, provenance))


@dataclass(frozen=True)
class Gradient:
    """Values are gradients; provenance is passed on unchanged."""

    def through(
        self, map_: Map, state: TracedValue, step: Step, context: StepContext
    ) -> TracedValue:
        """The summed contribution."""
        assert state.value is not None
        return state._replace(value=map_.apply(state.value).to(step.dtype))

    def join(
        self, states: list[TracedValue], step: Step, context: StepContext, on: bool = False
    ) -> TracedValue:
        """The sum."""
        total = states[0].value
        for state in states[1:]:
            assert total is not None and state.value is not None
            total = total + state.value
        assert total is not None
        return states[0]._replace(value=total.to(step.dtype))


RULES: dict[str, Rule] = {"greedy": Greedy(), "viterbi": Viterbi(), "gradient": Gradient()}
