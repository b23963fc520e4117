"""The rules by which an element points to the one that its gradient mostly came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gradtrace.ir.interpreter import Held, balanced
from gradtrace.ir.program import Step
from gradtrace.kernels import steps as fused
from gradtrace.kernels import sync
from gradtrace.kernels.cuda_steps import larger
from gradtrace.linops import Contract, Identity, Map, Reduce, Scatter
from gradtrace.linops.indexing import filled, laid
from gradtrace.linops.scatter import Few
from gradtrace.semirings import MAX
from gradtrace.semirings.base import NARROW, cast, shifted, wide
from gradtrace.tracing.provenance import compact
from gradtrace.tracing.traced_value import (
    Part,
    Scope,
    State,
    alike,
    made,
    own,
    shared,
    sizes,
    solid,
    where,
)


class Rule(Protocol):
    """How a state is found through a map, and how states become one."""

    def through(self, map_: Map, state: State, step: Step, scope: Scope) -> State:
        """What a value becomes by a map, if nothing is added to it."""

    def join(self, states: list[State], step: Step, scope: Scope, on: bool = False) -> State:
        """The state of a sum. Its terms are complete; ``on`` if more of them follow."""


@dataclass(frozen=True)
class Greedy:
    """Equation 1.7 of the chapter: values are gradients."""

    def through(self, map_: Map, state: State, step: Step, scope: Scope) -> State:
        """The gradient, and the mark of the largest contribution to each element."""
        known = scope.known.get(step.out)
        if map_.moves:
            return self._moved(map_, state, step, known)
        state = solid(state)
        x = state.value
        assert x is not None
        choosing = not map_.stays
        later = choosing and step.out in scope.tails
        value = known if known is not None or later else cast(map_.apply(x), step.dtype)
        if choosing and not state.palette.single:
            assert state.numbers is not None
            if value is None and isinstance(map_, Scatter) and map_.sparse:
                few = map_.few(x, state.numbers)
                return State(None, 0, None, state.palette, (Part(map_, x),), None, few)
            if later and _late(map_, x, scope):
                return State(value, 0, None, state.palette, (Part(map_, x, (), state.numbers),))
            numbers = map_.carry(x, state.numbers)[1]
            return made(value, numbers, state.palette, (Part(map_, x),) if value is None else ())
        if choosing:
            found = State(value, 0, None, state.palette, (Part(map_, x),))
            return found if later else solid(found)
        assert value is not None
        return self._stayed(map_, state, value)

    @staticmethod
    def _moved(map_: Map, state: State, step: Step, known: Tensor | None) -> State:
        if state.few is not None:
            if isinstance(map_, Identity):
                return state
            state = solid(state)
        value, _, numbers, palette, parts, _, _, loose = state
        if loose and value is not None and value.dtype is not step.dtype:
            numbers, loose = state.written().numbers, False  # what is 0 by rounding is not 0
        if numbers is not None:
            numbers = map_.apply(numbers)
        if known is None and value is not None:
            known = cast(map_.apply(value), step.dtype)
        if parts:
            parts = tuple(part._replace(moves=(*part.moves, map_)) for part in parts)
        return made(known, numbers, palette, parts, loose)

    @staticmethod
    def _stayed(map_: Map, state: State, value: Tensor) -> State:
        """Elements that are weighed: one that becomes 0 has no path any more."""
        x, numbers = state.value, state.numbers
        assert x is not None
        if x.dtype in NARROW or value.dtype in NARROW:  # 0 by rounding to few digits is not 0
            there = map_.weighed(x) != 0
            if numbers is None and not sync.avoid(x) and torch.equal(there, value != 0):
                return State(value, 0, None, state.palette)
            numbers = there.int() if numbers is None else numbers * there
            return made(value, numbers, state.palette)
        return made(value, numbers, state.palette, (), numbers is not None)

    def join(self, states: list[State], step: Step, scope: Scope, on: bool = False) -> State:
        """The sum, and the mark of the largest term."""
        known = scope.known.get(step.out)
        if alike(states):
            return self._alike(states, step, scope, known)
        if known is None and step.out in scope.ends and (found := self._patched(states, step)):
            return found
        if not on and shared(states) and (found := self._shared(states, step, known)):
            return found
        first, *rest = map(solid, states)
        if len(rest) == 1 and not on and (found := self._larger(first, rest[0], step, known)):
            return found
        given = first.numbers
        first = first.written()
        assert first.value is not None and first.numbers is not None
        total, palette = first.value, first.palette
        size, numbers = first.size, first.numbers
        if size is None:
            free = numbers is not given and numbers.is_contiguous()
            size, numbers = sizes(total), numbers if free else own(numbers)
        for other in rest:
            assert other.value is not None
            if known is None:
                total = total + other.value
            theirs = 1 if other.numbers is None else other.numbers
            palette, shift = palette.then(other.palette)
            fused.merge(size, numbers, wide(other.value), theirs, shift)
        numbers, palette = compact(numbers, palette)
        total = cast(total, step.dtype) if known is None else known
        return State(total, 0, numbers, palette, (), size)

    @staticmethod
    def _shared(states: list[State], step: Step, known: Tensor | None) -> State | None:
        """Terms that have the very same marks: it only matters whether one of them is not 0. None
        where that is not told sooner than by comparing them.
        """
        first, *rest = states
        given, value, total = first.numbers, first.value, first.value
        assert given is not None and value is not None and total is not None
        numbers = given
        if first.loose and sync.avoid(value):
            # Where another term is no larger than the first and is not 0, that is not 0 either.
            for n, other in enumerate(rest):
                assert other.value is not None
                told = larger(value, numbers, not n, other.value, given, 0)
                if told is None:
                    return None
                numbers = told
        elif first.loose and not bool(value.all()):
            return None
        for other in rest if known is None else ():
            assert other.value is not None
            total = total + other.value
        return made(cast(total, step.dtype) if known is None else known, numbers, first.palette)

    @staticmethod
    def _larger(first: State, second: State, step: Step, known: Tensor | None) -> State | None:
        """``join`` of two terms in one step, where there is a kernel for it."""
        assert first.value is not None and second.value is not None
        if first.size is not None or not fused.on_gpu(first.value, second.value):
            return None
        plain = first.numbers is None
        palette, shift = first.palette.then(second.palette)
        numbers = larger(
            first.value,
            1 if first.numbers is None else first.numbers,
            plain or first.loose,
            second.value,
            1 if second.numbers is None else second.numbers,
            shift,
        )
        if numbers is None:
            return None
        total = known
        if total is None:
            total = cast(first.value + second.value, step.dtype)
        return State(total, 0, *compact(numbers, palette))

    @staticmethod
    def _patched(states: list[State], step: Step) -> State | None:
        """A plain term and one that has few elements: only these are compared."""
        if len(states) != 2 or states[0].mark is None or states[1].few is None:
            return None
        first, (at, other, marks) = states[0], states[1].few
        fresh = first.value is None
        first = solid(first)
        if first.numbers is not None or first.value is None:
            return None
        total = first.value.to(step.dtype)
        if (total is first.value and not fresh) or not filled(total):
            total = own(total)
        line, place = laid(total, at)
        here = line[place]
        size, numbers = wide(here).abs(), (here != 0).int()
        palette, shift = first.palette.then(states[1].palette)
        fused.merge(size, numbers, wide(other), marks, shift)
        here = line[place] = (here + other).to(step.dtype)
        return State(total, 0, None, palette, few=Few(at, here, numbers))

    @staticmethod
    def _alike(states: list[State], step: Step, scope: Scope, known: Tensor | None) -> State:
        """Terms that all have one and the same mark: only whether one is not 0 matters."""
        parts: list[Part] = []
        for state in states:
            if state.value is None or len(state.parts) > 1:
                parts += state.parts
            else:
                parts.append(Part(Identity(tuple(state.value.shape)), state.value))
        if known is None and step.out not in scope.tails:
            total = parts[0].value()
            for part in parts[1:]:
                total = total + part.value()
            known = total.to(step.dtype)
        found = State(known, 0, None, states[0].palette, tuple(parts))
        return found if step.out in scope.tails else solid(found)


def _late(map_: Map, x: Tensor, scope: Scope) -> bool:
    """Whether marks are worked out as they are counted: a row of the result after the other if
    there are many, or together with those of other leaves.
    """
    if isinstance(map_, Reduce):
        return scope.ample and fused.on_gpu(x)
    return isinstance(map_, Contract) and map_.outputs > fused.PIECE and map_.plan().turned


@dataclass(frozen=True)
class Viterbi:
    """Values are the largest |product| over the paths."""

    def through(self, map_: Map, state: State, step: Step, scope: Scope) -> State:
        """The largest contribution, and its mark."""
        x, numbers = state.value, state.numbers
        assert x is not None
        if map_.moves:
            moved = None if numbers is None else map_.apply(numbers)
            return state._replace(value=map_.apply(x), numbers=moved)
        if numbers is None:
            value = map_.pull((x,), MAX)[0]
        elif state.palette.single and not map_.stays:
            value, numbers = map_.pull((x,), MAX)[0], None
        elif map_.stays:
            value = map_.pull((x,), MAX)[0]
            numbers = where(value, numbers)
        else:
            found, numbers = map_.carry(x, numbers, value=True)
            assert found is not None
            value = found
        held = balanced(Held((value,), state.exponent), MAX)
        return State(held.value[0], held.exponent, numbers, state.palette)

    def join(self, states: list[State], step: Step, scope: Scope, on: bool = False) -> State:
        """The largest term, and its mark."""
        exponent = max(state.exponent for state in states)
        values = []
        for state in states:
            assert state.value is not None
            values.append(shifted(state.value, state.exponent - exponent))
        if alike(states):
            size = values[0]
            for value in values[1:]:
                size = torch.maximum(size, value)
            return State(size, exponent, None, states[0].palette)
        first = states[0].written()
        assert first.numbers is not None
        size, numbers, palette = own(values[0]), own(first.numbers), first.palette
        for other, value in zip(states[1:], values[1:]):
            theirs = 1 if other.numbers is None else other.numbers
            palette, shift = palette.then(other.palette)
            fused.merge(size, numbers, value, theirs, shift)
        return State(size, exponent, *compact(numbers, palette))


@dataclass(frozen=True)
class Gradient:
    """Nothing but the gradient."""

    def through(self, map_: Map, state: State, step: Step, scope: Scope) -> State:
        """The summed contribution."""
        assert state.value is not None
        return state._replace(value=map_.apply(state.value).to(step.dtype))

    def join(self, states: list[State], step: Step, scope: Scope, on: bool = False) -> State:
        """The sum."""
        total = states[0].value
        for state in states[1:]:
            assert total is not None and state.value is not None
            total = total + state.value
        assert total is not None
        return states[0]._replace(value=total.to(step.dtype))


RULES: dict[str, Rule] = {"greedy": Greedy(), "viterbi": Viterbi(), "gradient": Gradient()}
