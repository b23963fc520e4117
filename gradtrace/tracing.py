"""Gradient tracing: which contribution was the largest, at every element, in one streaming pass.

Beside the value of every cotangent element goes a *mark*: the set of components that its path to
the root has visited (``gradtrace.marks``). A step's output takes the mark of the element it points
to. So no pointers are kept, and memory is as for a backward pass. Two rules say where an element
points to:

- ``greedy``: values are the gradients. At a step, the term with the largest |contribution|; inside
  its map, the element with the largest |weight · gradient|.
- ``viterbi``: values are MAX, so that the pointers are those of the path of greatest |product|.

A contribution of exactly 0 is none; ties go to the first term, then to the lowest element. What
only moves elements does not choose: an element that was reached stays reached.

Where all elements have the same mark it does not matter which of them was the largest, but only
whether there is any: such a value is *plain*, its elements have a path where they are not 0, and
nothing is compared. Gradients that recording has kept are not computed again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from gradtrace.engine import Held, balanced
from gradtrace.kernels import steps as fused
from gradtrace.maps import Identity, Map, Scatter, tiled, tiling
from gradtrace.maps.places import filled, laid
from gradtrace.maps.scatter import Few
from gradtrace.marks import NO_MARKS, Marks, Palette, compact, sliced
from gradtrace.pairs import Pairs, lines
from gradtrace.program import Leaf, Program, Step
from gradtrace.semirings import MAX
from gradtrace.semirings.base import NARROW, shifted, wide

SINGLE = 64
"""To look at an element by itself costs as much as to look at so many together, or less."""


class Part(NamedTuple):
    """A contribution that was not worked out: ``map(x)``, then moved."""

    map: Map
    x: Tensor
    moves: tuple[Map, ...] = ()

    def value(self) -> Tensor:
        """The summed contribution."""
        return self._moved(self.map.apply(self.x))

    def loud(self) -> Tensor | None:
        """Which elements may get anything but 0; None if all of them may."""
        found = self.map.loud(self.x)
        return None if found is None else self._moved(found.int()) != 0

    def reached(self, at: Tensor) -> Tensor:
        """Which of these elements get anything but 0 from some element."""
        if SINGLE * len(at) > self.map.outputs:
            _, found = self.map.carry(self.x, torch.ones_like(self.x, dtype=torch.int32))
            return self._moved(found).reshape(-1)[at] != 0
        there = torch.ones_like(at, dtype=torch.bool)
        for move in reversed(self.moves):
            source = move.rows(at).source[:, 0]
            there, at = there & (source >= 0), source.clamp(min=0)
        return there & (self.map.best(self.x, at).value != 0)

    def _moved(self, x: Tensor) -> Tensor:
        for move in self.moves:
            x = move.apply(x)
        return x


class State(NamedTuple):
    """What is known of a value's elements: value, power of two, numbers of marks, palette.

    ``numbers`` is None for a *plain* value: those of its elements that are not 0 have a path, all
    with the same mark. ``parts`` say what made the value if that is put off (``value`` is None), or
    if nobody has looked yet whether an element that is 0 has a path all the same, because its
    contributions cancel; of several parts, one that is not 0 itself counts.

    ``few``, if there are any, are the elements that have something to say, each with its mark; the
    others have a path, with the first mark, where ``value`` is not 0, or none if that is put off.
    """

    value: Tensor | None
    exponent: int
    numbers: Tensor | None
    palette: Palette
    parts: tuple[Part, ...] = ()
    size: Tensor | None = None  # of the largest term so far, where a sum goes on
    few: Few | None = None

    @property
    def mark(self) -> int | None:
        """The one mark of a plain value."""
        plain = self.numbers is None and self.few is None
        return self.palette.rows[0] | self.palette.extra if plain else None

    def marked(self, bits: int) -> State:
        """More bits in every mark."""
        return self._replace(palette=self.palette.mark(bits)) if bits else self

    def at(self, index: tuple[int, ...]) -> int:
        """The mark of one element; 0 if it has no path."""
        state = solid(self).written()
        assert state.numbers is not None
        return self.palette.marks()[int(state.numbers[index])]

    def written(self) -> State:
        """With a number for each element."""
        if self.numbers is not None:
            return self
        assert self.value is not None
        numbers = torch.empty(self.value.shape, dtype=torch.int32, device=self.value.device)
        torch.ne(self.value, 0, out=numbers)
        if self.few is not None:
            numbers.view(-1)[self.few.at] = self.few.marks
        return self._replace(numbers=numbers, few=None)


class Scope(NamedTuple):
    """What a step may know: gradients that were kept, values that only leaves are made of, and
    those that are leaves.
    """

    known: Mapping[int, Tensor]
    tails: frozenset[int] | set[int]
    ends: frozenset[int] = frozenset()


class Rule(Protocol):
    """How a state is found through a map, and how states become one."""

    def through(self, map_: Map, state: State, step: Step, scope: Scope) -> State:
        """What a value becomes by a map, if nothing is added to it."""

    def join(self, states: list[State], step: Step, scope: Scope) -> State:
        """The state of a sum. Its terms are complete."""


# The greedy rule ---------------------------------------------------------------------------------


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
        value = known if known is not None or later else map_.apply(x).to(step.dtype)
        if choosing and len(state.palette.rows) > 1:
            assert state.numbers is not None
            if value is None and isinstance(map_, Scatter) and map_.sparse:
                few = map_.few(x, state.numbers)
                return State(None, 0, None, state.palette, (Part(map_, x),), None, few)
            numbers = map_.carry(x, state.numbers)[1]
            parts = (Part(map_, x),) if value is None else ()
            return State(value, 0, numbers, state.palette, parts)
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
        numbers = state.numbers
        if numbers is not None:
            numbers = map_.apply(numbers)
        if known is None and state.value is not None:
            known = map_.apply(state.value).to(step.dtype)
        parts = tuple(part._replace(moves=(*part.moves, map_)) for part in state.parts)
        return State(known, 0, numbers, state.palette, parts)

    @staticmethod
    def _stayed(map_: Map, state: State, value: Tensor) -> State:
        """Elements that are weighed: one that becomes 0 has no path any more."""
        x, numbers = state.value, state.numbers
        assert x is not None
        if x.dtype in NARROW or value.dtype in NARROW:  # 0 by rounding to few digits is not 0
            there = map_.best(x).value != 0
            if numbers is None and bool((there == (value != 0)).all()):
                return State(value, 0, None, state.palette)
            numbers = there.int() if numbers is None else torch.where(there, numbers, 0)
        elif numbers is not None and not bool(value.all()):
            numbers = torch.where(value != 0, numbers, 0)
        return State(value, 0, numbers, state.palette)

    def join(self, states: list[State], step: Step, scope: Scope) -> State:
        """The sum, and the mark of the largest term."""
        known = scope.known.get(step.out)
        if alike(states):
            return self._alike(states, step, scope, known)
        if known is None and step.out in scope.ends and (found := self._patched(states, step)):
            return found
        first, *rest = map(solid, states)
        fresh = first.numbers is None
        first = first.written()
        assert first.value is not None and first.numbers is not None
        total, palette = first.value, first.palette
        size, numbers = first.size, first.numbers
        if size is None:
            size, numbers = _sizes(total), numbers if fresh else _own(numbers)
        for other in rest:
            assert other.value is not None
            if known is None:
                total = total + other.value
            theirs = 1 if other.numbers is None else other.numbers
            fused.merge(size, numbers, wide(other.value), theirs, len(palette.rows))
            palette = palette.then(other.palette)
        numbers, palette = compact(numbers, palette)
        total = total.to(step.dtype) if known is None else known
        return State(total, 0, numbers, palette, (), size)

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
            total = _own(total)
        line, place = laid(total, at)
        here = line[place]
        size, numbers = wide(here).abs(), (here != 0).int()
        fused.merge(size, numbers, wide(other), marks, len(first.palette.rows))
        here = line[place] = (here + other).to(step.dtype)
        palette = first.palette.then(states[1].palette)
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


def solid(state: State) -> State:
    """The state with its value, and with all paths of elements that are 0."""
    if not state.parts:
        return state
    value = state.value
    if state.few is not None:
        value = state.parts[0].value() if value is None else value
        there = torch.zeros(value.shape, dtype=torch.int32, device=value.device)
        there.view(-1)[state.few.at] = state.few.marks
        return state._replace(value=value, numbers=there, parts=(), few=None)
    if value is None:
        value = state.parts[0].value()
        for part in state.parts[1:]:
            value = value + part.value()
    if state.numbers is not None:
        return state._replace(value=value, parts=())
    missed = cancelled(state.parts, value)
    numbers = None if missed is None else ((value != 0) | missed).int()
    return state._replace(value=value, numbers=numbers, parts=())


def cancelled(parts: tuple[Part, ...], value: Tensor) -> Tensor | None:
    """Which elements of a sum are 0 though something came to them; None if there is none."""
    if bool(value.all()):
        return None
    if not any(bool(part.x.any()) for part in parts):
        return None  # nothing came at all
    zero = value == 0
    loud: Tensor | None = torch.zeros((), dtype=torch.bool, device=value.device)
    for part in parts:
        here = part.loud()
        loud = None if here is None or loud is None else loud | here
    if loud is not None:
        zero &= loud.reshape(zero.shape)
    at = zero.reshape(-1).nonzero().reshape(-1)
    if not len(at):
        return None
    if len(parts) == 1:
        reached = parts[0].reached(at)
    else:
        reached = torch.zeros(len(at), dtype=torch.bool, device=at.device)
        for part in parts:
            reached |= part.value().reshape(-1)[at] != 0
    if not bool(reached.any()):
        return None
    found = torch.zeros(value.numel(), dtype=torch.bool, device=value.device)
    found[at[reached]] = True
    return found.reshape(value.shape)


# The other rules ---------------------------------------------------------------------------------


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
        elif len(state.palette.rows) == 1 and not map_.stays:
            value, numbers = map_.pull((x,), MAX)[0], None
        elif map_.stays:
            value = map_.pull((x,), MAX)[0]
            numbers = torch.where(value != 0, numbers, 0)
        else:
            found, numbers = map_.carry(x, numbers, value=True)
            assert found is not None
            value = found
        held = balanced(Held((value,), state.exponent), MAX)
        return State(held.value[0], held.exponent, numbers, state.palette)

    def join(self, states: list[State], step: Step, scope: Scope) -> State:
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
        size, numbers, palette = _own(values[0]), _own(first.numbers), first.palette
        for other, value in zip(states[1:], values[1:]):
            theirs = 1 if other.numbers is None else other.numbers
            fused.merge(size, numbers, value, theirs, len(palette.rows))
            palette = palette.then(other.palette)
        return State(size, exponent, *compact(numbers, palette))


@dataclass(frozen=True)
class Gradient:
    """Nothing but the gradient."""

    def through(self, map_: Map, state: State, step: Step, scope: Scope) -> State:
        """The summed contribution."""
        assert state.value is not None
        return state._replace(value=map_.apply(state.value).to(step.dtype))

    def join(self, states: list[State], step: Step, scope: Scope) -> State:
        """The sum."""
        total = states[0].value
        for state in states[1:]:
            assert total is not None and state.value is not None
            total = total + state.value
        assert total is not None
        return states[0]._replace(value=total.to(step.dtype))


def alike(states: list[State]) -> bool:
    """Whether all are plain, with one and the same mark."""
    mark = states[0].mark
    return mark is not None and all(state.mark == mark for state in states)


def _sizes(x: Tensor) -> Tensor:
    """|x| in a memory of its own, row by row."""
    x = wide(x)
    return torch.abs(x, out=torch.empty(x.shape, dtype=x.dtype, device=x.device))


def _own(x: Tensor) -> Tensor:
    """A copy that may be written to."""
    return x.clone(memory_format=torch.contiguous_format)


RULES: dict[str, Rule] = {"greedy": Greedy(), "viterbi": Viterbi(), "gradient": Gradient()}


# The pass ----------------------------------------------------------------------------------------


class Found(NamedTuple):
    """A leaf after a pass. ``pair`` is the pair that the pass was for, or a tensor that says for
    each element, from 1 on, which pair it belongs to (0: none).
    """

    leaf: Leaf
    state: State
    pair: int | Tensor

    @property
    def gradient(self) -> Tensor:
        """The value, where that is the gradient."""
        return self.leaf.compute() if self.state.value is None else self.state.value


NOTHING = Scope({}, frozenset())


class Tracer:
    """Passes over a program by a rule, with marks."""

    def __init__(self, program: Program, rule: str, marks: Marks = NO_MARKS) -> None:
        self.program = program
        self.rule = RULES[rule]
        self.absolute = rule == "viterbi"
        self.marks = marks
        merges = [step for block in program.blocks for step in block.merges]
        # sums that go on: their terms are compared with those that follow, one by one
        self.partial = {step.out for step in merges} & {step.terms[0].value for step in merges}
        if self.absolute:
            self.partial = set()  # the largest of the largest is the largest
        self.leaves = {leaf.value: leaf for leaf in program.leaves}
        self.places: dict[int, tuple[int, Tensor]] = {}

    def run(self, seed: Tensor) -> Iterator[Found]:
        """The leaves of one loss, each as soon as it is complete."""
        scope = self._scope() if isinstance(self.rule, Greedy) else NOTHING
        states = {self.program.root: self.root(seed)}
        for leaf in self.passage(states, None, frozenset(), scope):
            yield Found(leaf, states.pop(leaf.value), 0)

    def run_pairs(self, seed: Tensor, pairs: Pairs) -> Iterator[Found]:
        """The leaves of a vector of losses, each apart.

        What belongs to one pair only is computed for all of them at once; what mixes them, for each
        in turn.
        """
        states = {self.program.root: self.root(seed)}
        for leaf in self.passage(states, pairs.apart, frozenset(pairs.of), NOTHING):
            yield Found(leaf, states[leaf.value], pairs.of[leaf.value])
        mixed = pairs.mixed(self.program)
        along = pairs.summed(self.program, mixed)
        kept = {value: states[value] for value in along}
        for pair in range(len(seed)):
            here = {}
            self.places = {}
            for value, state in kept.items():
                there = pairs.of[value] == pair + 1
                dim = along[value]
                if dim is not None:  # only where the pair is: the rest is summed over anyway
                    index = lines(there, dim)
                    self.places[value] = (dim, index)
                    state, there = _narrowed(state, dim, index), there.index_select(dim, index)
                here[value] = _only(state, there)
            for leaf in self.passage(here, mixed, frozenset(), NOTHING):
                yield Found(leaf, here.pop(leaf.value), pair)
        self.places = {}

    def root(self, seed: Tensor) -> State:
        """The state of the loss."""
        return State(wide(seed).abs() if self.absolute else seed, 0, None, Palette())

    def _scope(self) -> Scope:
        known = dict(self.program.kept)
        for leaf in self.program.leaves:
            if leaf.known is not None:
                known[leaf.value] = leaf.known
        return Scope(known, tails(self.program) - self.partial, frozenset(self.leaves))

    def passage(
        self,
        states: dict[int, State],
        values: set[int] | None,
        keep: frozenset[int],
        scope: Scope,
    ) -> Iterator[Leaf]:
        """Compute these values (None: all), and drop those that are used up, but for ``keep``; tell
        leaves as they come.
        """
        last: dict[int, int] = {}
        for n, step in enumerate(self.program.steps()):
            if values is None or step.out in values:
                last.update((term.value, n) for term in step.terms)
        sums: dict[int, list[State]] = {}
        if self.program.root in self.leaves and values is None:
            yield self.leaves[self.program.root]
        n = -1
        for number, block in enumerate(self.program.blocks):
            for value in block.takes.values():
                if value in states:
                    states[value] = self._enter(number, states[value])
            for step in block.steps:
                n += 1
                if values is None or step.out in values:
                    states[step.out] = self._step(step, states, scope)
                    _drop(step, n, states, last, keep)
            for position, value in block.gives.items():
                bits = self.marks.position.get((number, position), 0)
                if bits and value in states:
                    states[value] = states[value].marked(bits)
            for step in block.merges:
                n += 1
                if values is None or step.out in values:
                    self._merge(step, states, sums, scope)
                    _drop(step, n, states, last, keep)
            for value in (*block.gives.values(), *(step.out for step in block.merges)):
                if value in self.leaves and value in states:
                    yield self.leaves[value]

    def _enter(self, number: int, state: State) -> State:
        """Marks at the output of a block's operator."""
        state = state.marked(self.marks.block.get(number, 0))
        if number not in self.marks.slices:
            return state
        state = solid(state).written()
        assert state.numbers is not None
        numbers, palette = sliced(state.numbers, state.palette, *self.marks.slices[number])
        return state._replace(numbers=numbers, palette=palette)

    def _step(self, step: Step, states: dict[int, State], scope: Scope) -> State:
        if len(step.terms) == 1:
            map_, value = step.terms[0]
            return self.rule.through(self._map(map_, value), states[value], step, scope)
        maps = [self._map(map_, value) for map_, value in step.terms]
        if order := tiling(maps):
            found = self._tiled(maps, [states[value] for _, value in step.terms], order)
            known = scope.known.get(step.out)
            return found if known is None else found._replace(value=known)
        terms: list[State] = []
        for map_, (_, value) in zip(maps, step.terms):
            terms.append(self._term(map_, states[value], step, not terms))
        return self.rule.join(terms, step, scope)._replace(size=None)

    @staticmethod
    def _tiled(maps: list[Map], states: list[State], order: list[int]) -> State:
        """Terms that lie side by side: each element comes from one of them, if it is not 0."""
        states = [solid(state) for state in states]
        exponent = max(state.exponent for state in states)
        value = tiled(maps, [_shifted(state, exponent) for state in states], order)
        if alike(states):
            return State(value, exponent, None, states[0].palette)
        numbers, palette = [], Palette(())
        for state in states:
            written = state.written().numbers
            assert written is not None
            numbers.append(torch.where(written == 0, 0, written + len(palette.rows)))
            palette = palette.then(state.palette)
        both = torch.where(value != 0, tiled(maps, numbers, order), 0)
        return State(value, exponent, *compact(both, palette))

    def _term(self, map_: Map, state: State, step: Step, first: bool) -> State:
        """What one of several terms brings. An element that is only moved counts if it is not 0;
        of terms that follow, 0 counts for nothing anyway.
        """
        state = self.rule.through(map_, state, step, NOTHING)
        if first and map_.moves and state.numbers is not None and not self.absolute:
            state = solid(state)
            assert state.value is not None and state.numbers is not None
            if not bool(state.value.all()):
                state = state._replace(numbers=torch.where(state.value != 0, state.numbers, 0))
        return state

    def _merge(
        self, step: Step, states: dict[int, State], sums: dict[int, list[State]], scope: Scope
    ) -> None:
        """A sum over the users of a value, one more of them."""
        found: list[State] = []
        for map_, value in step.terms:
            if value in sums:
                found += sums.pop(value)
            else:
                state = states[value]
                found.append(self._term(self._map(map_, value), state, step, not found))
        if step.out not in self.partial:
            states[step.out] = self.rule.join(found, step, scope)._replace(size=None)
        elif alike(found):
            sums[step.out] = found
        else:
            sums[step.out] = [self.rule.join(found, step, NOTHING)]

    def _map(self, map_: Map, value: int) -> Map:
        if value not in self.places:
            return map_
        found = map_.narrow(*self.places[value])
        assert found is not None
        return found


def _shifted(state: State, exponent: int) -> Tensor:
    assert state.value is not None
    return shifted(state.value, state.exponent - exponent)


def _drop(
    step: Step, n: int, states: dict[int, State], last: dict[int, int], keep: frozenset[int]
) -> None:
    for term in step.terms:
        if last[term.value] == n and term.value not in keep:
            states.pop(term.value, None)


def tails(program: Program) -> set[int]:
    """Values that nothing but a leaf is made of: moved and added up with others, no more."""
    uses: dict[int, int] = {}
    for step in program.steps():
        for term in step.terms:
            uses[term.value] = uses.get(term.value, 0) + 1
    found = {leaf.value for leaf in program.leaves}
    for block in reversed(program.blocks):
        for step in (*reversed(block.merges), *reversed(block.steps)):
            if step.out in found:
                found.update(t.value for t in step.terms if t.map.moves and uses[t.value] == 1)
    return found


def _only(state: State, there: Tensor) -> State:
    """A state without the elements of other pairs."""
    assert state.value is not None
    value = torch.where(there, state.value, torch.zeros((), dtype=state.value.dtype))
    numbers = None if state.numbers is None else torch.where(there, state.numbers, 0)
    return state._replace(value=value, numbers=numbers)


def _narrowed(state: State, dim: int, index: Tensor) -> State:
    """A state at some places along a dimension."""
    assert state.value is not None
    numbers = None if state.numbers is None else state.numbers.index_select(dim, index)
    return state._replace(value=state.value.index_select(dim, index), numbers=numbers)
