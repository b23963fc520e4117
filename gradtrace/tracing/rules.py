"""Rules that choose, for each element, the contribution it points to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gradtrace.ir.plan import Encoding, Form
from gradtrace.ir.rescaling import Rescaling, ScaledValue
from gradtrace.kernels import Backend
from gradtrace.linops import Map
from gradtrace.semirings import MAX
from gradtrace.semirings.base import shifted
from gradtrace.tracing.edge_rule import Edge
from gradtrace.tracing.greedy_rule import Greedy, alike
from gradtrace.tracing.provenance import compact
from gradtrace.tracing.traced_value import PendingContribution, TracedValue, own

_RESCALING = Rescaling(MAX)


class Rule(Protocol):
    """How a traced value is propagated through a map, and how terms are summed."""

    def through(
        self, map_: Map, state: TracedValue, form: Form, known: Tensor | None = None
    ) -> TracedValue:
        """Apply a map; ``known`` is the result's gradient, if it has been computed already."""

    def join(
        self, states: list[TracedValue], form: Form, known: Tensor | None = None
    ) -> TracedValue:
        """The sum of terms."""


@dataclass(frozen=True)
class Viterbi:
    """Values are the largest |product| over the paths."""

    backend: Backend

    def through(
        self, map_: Map, state: TracedValue, form: Form, known: Tensor | None = None
    ) -> TracedValue:
        """The largest |contribution|, and its provenance."""
        if state.lazy:  # of a leaf: its last steps are moves
            part = state.parts[0]
            return state._replace(parts=(part._replace(moves=(*part.moves, map_)),))
        x, ids = state.value, state.ids
        assert x is not None
        if form.encoding is Encoding.MOVED:
            moved = None if ids is None else map_.apply(ids)
            return state._replace(value=map_.apply(x), ids=moved)
        if form.encoding is Encoding.LAZY and ids is not None:  # nobody compares a leaf's value
            part = PendingContribution(map_, x, (), ids)
            return TracedValue(None, state.exponent, None, state.provenance, (part,))
        if ids is None:
            value = map_.apply_in((x,), MAX)[0]
        elif form.encoding is Encoding.UNIFORM:
            value, ids = map_.apply_in((x,), MAX)[0], None
        elif form.encoding is Encoding.SCALED:
            value = map_.apply_in((x,), MAX)[0]
            ids = self.backend.masked(ids, value)
        else:
            found, ids = map_.select(x, ids, value=True)
            assert found is not None
            value = found
        held = _RESCALING.balanced(ScaledValue((value,), state.exponent))
        return TracedValue(held.value[0], held.exponent, ids, state.provenance)

    def join(
        self, states: list[TracedValue], form: Form, known: Tensor | None = None
    ) -> TracedValue:
        """The largest term, and its provenance."""
        exponent = max(state.exponent for state in states)
        values = []
        for state in states:
            assert state.value is not None
            values.append(shifted(state.value, state.exponent - exponent))
        if alike(states, form):
            size = values[0]
            for value in values[1:]:
                size = torch.maximum(size, value)
            return TracedValue(size, exponent, None, states[0].provenance)
        first = states[0].with_provenance(self.backend)
        assert first.ids is not None
        size, ids, provenance = own(values[0]), own(first.ids), first.provenance
        for other, value in zip(states[1:], values[1:]):
            theirs = 1 if other.ids is None else other.ids
            provenance, shift = provenance.joined(other.provenance)
            self.backend.merge(size, ids, value, theirs, shift)
        return TracedValue(size, exponent, *compact(ids, provenance, self.backend))


@dataclass(frozen=True)
class Gradient:
    """Values are gradients; provenance is passed on unchanged."""

    backend: Backend

    def through(
        self, map_: Map, state: TracedValue, form: Form, known: Tensor | None = None
    ) -> TracedValue:
        """The summed contribution."""
        assert state.value is not None
        return state._replace(value=map_.apply(state.value).to(form.dtype))

    def join(
        self, states: list[TracedValue], form: Form, known: Tensor | None = None
    ) -> TracedValue:
        """The sum."""
        total = states[0].value
        for state in states[1:]:
            assert total is not None and state.value is not None
            total = total + state.value
        assert total is not None
        return states[0]._replace(value=total.to(form.dtype))


RULES: dict[str, Callable[[Backend], Rule]] = {
    "greedy": Greedy,
    "edge": Edge,
    "viterbi": Viterbi,
    "gradient": Gradient,
}
