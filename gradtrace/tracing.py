"""Gradient tracing: which contribution was the largest, at every element, in one streaming pass.

Beside the value of every cotangent element goes a *mark*: the set of components that its path to
the root has visited. A step's output takes the mark of the element it points to. So no pointers are
kept, and memory is as for a backward pass. Two rules say where an element points to:

- ``greedy``: values are the gradients. At a step, the term with the largest |contribution|; inside
  its map, the element with the largest |weight · gradient|.
- ``viterbi``: values are MAX, so that the pointers are those of the path of greatest |product|.

A contribution of exactly 0 is none; ties go to the first term, then to the lowest element. What
only moves elements does not choose: an element that was reached stays reached.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from gradtrace.engine import Held, balanced
from gradtrace.maps import Map
from gradtrace.program import Leaf, Program, Step, Term
from gradtrace.semirings import MAX
from gradtrace.semirings.base import shifted, wide

BITS = 31
"""How many components a word of a mark holds; bit 0 of the first says that there is a path."""

Words = tuple[Tensor, ...]


class State(NamedTuple):
    """What is known of a value's elements: value, power of two, mark, size of the largest
    contribution where a sum is not complete yet.
    """

    value: Tensor
    exponent: int
    words: Words
    size: Tensor | None = None


class Part(NamedTuple):
    """What one term brings: the value, how large it counts in the choice, whose mark it has."""

    value: Tensor
    size: Tensor
    words: Words


class Rule(Protocol):
    """How a term's part of a step is found, and how parts become a value."""

    def part(self, map_: Map, state: State, alone: bool) -> Part:
        """What a term brings to each output element."""

    def join(self, step: Step, parts: list[tuple[Part, int]]) -> State:
        """The state of a step, from its parts and their powers of two."""


@dataclass(frozen=True)
class Greedy:
    """Equation 1.7 of the chapter: values are gradients."""

    def part(self, map_: Map, state: State, alone: bool) -> Part:
        """The summed contribution, and the mark of the largest single one."""
        x, words = state.value, state.words
        total = map_.apply(x)
        if map_.moves:
            size = wide(total).abs()
            moved = tuple(map_.apply(word) for word in words)
            return Part(total, size, moved if alone else _where(size != 0, moved))
        if map_.stays:
            size = map_.best(x).value
            return Part(total, size, _where(size != 0, words))
        value, source = map_.best(x)
        if not alone:  # among terms it counts as what it brings in all, if it brings anything
            value = torch.where(value == 0, value, wide(total).abs())
        return Part(total, value, marks_at(words, source))

    def join(self, step: Step, parts: list[tuple[Part, int]]) -> State:
        """The sum, and the mark of the largest."""
        total, size, words = parts[0][0]
        for part, _ in parts[1:]:
            total = total + part.value
            size, words = chosen(size, words, part)
        return State(total.to(step.dtype), 0, words, size)


@dataclass(frozen=True)
class Viterbi:
    """Values are the largest |product| over the paths."""

    def part(self, map_: Map, state: State, alone: bool) -> Part:
        """The largest contribution, and its mark."""
        x, words = state.value, state.words
        if map_.moves:
            return Part(map_.apply(x), map_.apply(x), tuple(map_.apply(word) for word in words))
        value, source = map_.best(x)
        if map_.stays:
            return Part(value, value, _where(value != 0, words))
        return Part(value, value, marks_at(words, source))

    def join(self, step: Step, parts: list[tuple[Part, int]]) -> State:
        """The largest part, and its mark."""
        exponent = max(power for _, power in parts)
        size: Tensor | None = None
        words: Words = ()
        for part, power in parts:
            here = part._replace(size=shifted(part.size, power - exponent))
            size, words = (here.size, here.words) if size is None else chosen(size, words, here)
        assert size is not None
        held = balanced(Held((size,), exponent), MAX)
        return State(held.value[0], held.exponent, words)


@dataclass(frozen=True)
class Gradient:
    """Nothing but the gradient."""

    def part(self, map_: Map, state: State, alone: bool) -> Part:
        """The summed contribution."""
        total = map_.apply(state.value)
        return Part(total, total, ())

    def join(self, step: Step, parts: list[tuple[Part, int]]) -> State:
        """The sum."""
        total = parts[0][0].value
        for part, _ in parts[1:]:
            total = total + part.value
        return State(total.to(step.dtype), 0, ())


RULES: dict[str, Rule] = {"greedy": Greedy(), "viterbi": Viterbi(), "gradient": Gradient()}


def chosen(size: Tensor, words: Words, other: Part) -> tuple[Tensor, Words]:
    """The larger of two parts at every element; the first of equals."""
    later = (other.size > size) | (other.size.isnan() & ~size.isnan())
    both = tuple(torch.where(later, theirs, ours) for ours, theirs in zip(words, other.words))
    return torch.where(later, other.size, size), both


def marks_at(words: Words, source: Tensor) -> Words:
    """The marks of the elements pointed to; none for -1."""
    there, at = source >= 0, source.clamp(min=0)
    return tuple(
        torch.where(there, word.reshape(-1)[at], 0) if word.numel() else torch.zeros_like(at).int()
        for word in words
    )


def _where(there: Tensor, words: Words) -> Words:
    return tuple(torch.where(there, word, 0) for word in words)


# Marks -------------------------------------------------------------------------------------------


@dataclass
class Marks:
    """Which bits a path gets: ``block`` for visiting a block at all, ``position`` for leaving it to
    an argument, ``slices`` for the slices of a labelled tensor, along a dimension.
    """

    bits: int
    block: dict[int, int]
    position: dict[tuple[int, int], int]
    slices: dict[int, tuple[int, list[int]]]

    @property
    def words(self) -> int:
        """How many words a mark has."""
        return -(-self.bits // BITS)

    def enter(self, number: int, words: Words) -> Words:
        """Marks at the output of a block's operator."""
        words = mark(words, self.block.get(number, 0))
        if number in self.slices:
            dim, names = self.slices[number]
            shape = [len(names) if d == dim else 1 for d in range(words[0].dim())]
            for n in range(len(words)):
                slices = [bits >> (n * BITS) & _WORD for bits in names]
                along = torch.tensor(slices, dtype=torch.int32, device=words[n].device)
                words = (*words[:n], words[n] | along.reshape(shape), *words[n + 1 :])
        return words


_WORD = (1 << BITS) - 1


def mark(words: Words, bits: int) -> Words:
    """The marks with more bits."""
    if not bits:
        return words
    return tuple(
        word | part if (part := bits >> (n * BITS) & _WORD) else word
        for n, word in enumerate(words)
    )


NO_MARKS = Marks(1, {}, {}, {})
"""Only whether there is a path."""


# The pass ----------------------------------------------------------------------------------------


class Found(NamedTuple):
    """A leaf after a pass. ``pair`` is the pair that the pass was for, or a tensor that says for
    each element, from 1 on, which pair it belongs to (0: none).
    """

    leaf: Leaf
    state: State
    pair: int | Tensor


class Tracer:
    """Passes over a program by a rule, with marks."""

    def __init__(self, program: Program, rule: str, marks: Marks = NO_MARKS) -> None:
        self.program = program
        self.rule = RULES[rule]
        self.absolute = rule == "viterbi"
        self.marks = marks
        merges = [step for block in program.blocks for step in block.merges]
        self.places: dict[int, tuple[int, Tensor]] = {}
        self.partial = {step.out for step in merges} & {step.terms[0].value for step in merges}

    def run(self, seed: Tensor) -> Iterator[Found]:
        """The leaves of one loss."""
        states = {self.program.root: self.root(seed)}
        self.passage(states, None, frozenset())
        for leaf in self.program.leaves:
            yield Found(leaf, states[leaf.value], 0)

    def run_pairs(self, seed: Tensor, pairs: Pairs) -> Iterator[Found]:
        """The leaves of a vector of losses, each apart.

        What belongs to one pair only is computed for all of them at once; what mixes them, for each
        in turn.
        """
        states = {self.program.root: self.root(seed)}
        self.passage(states, pairs.apart, frozenset(pairs.of))
        for leaf in self.program.leaves:
            if leaf.value in pairs.apart:
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
                    index = _lines(there, dim)
                    self.places[value] = (dim, index)
                    state, there = _narrowed(state, dim, index), there.index_select(dim, index)
                here[value] = _only(state, there)
            self.passage(here, mixed, frozenset())
            for leaf in self.program.leaves:
                if leaf.value not in pairs.apart:
                    yield Found(leaf, here[leaf.value], pair)
        self.places = {}

    def root(self, seed: Tensor) -> State:
        """The state of the loss."""
        first = (seed != 0).int()
        words = (first, *(torch.zeros_like(first) for _ in range(self.marks.words - 1)))
        if isinstance(self.rule, Gradient):
            return State(seed, 0, ())
        return State(wide(seed).abs() if self.absolute else seed, 0, words)

    def passage(
        self, states: dict[int, State], values: set[int] | None, keep: frozenset[int]
    ) -> None:
        """Compute these values (None: all), and drop those that are used up, but for ``keep``."""
        last: dict[int, int] = {}
        for n, step in enumerate(self.program.steps()):
            if values is None or step.out in values:
                last.update((term.value, n) for term in step.terms)
        n = -1
        for number, block in enumerate(self.program.blocks):
            for value in block.takes.values():
                if value in states:
                    words = self.marks.enter(number, states[value].words)
                    states[value] = states[value]._replace(words=words)
            for step in block.steps:
                n += 1
                self._step(step, n, states, values, keep, last)
            for position, value in block.gives.items():
                bits = self.marks.position.get((number, position), 0)
                if bits and value in states:
                    words = mark(states[value].words, bits)
                    states[value] = states[value]._replace(words=words)
            for step in block.merges:
                n += 1
                self._step(step, n, states, values, keep, last)

    def _step(
        self,
        step: Step,
        n: int,
        states: dict[int, State],
        values: set[int] | None,
        keep: frozenset[int],
        last: dict[int, int],
    ) -> None:
        if values is not None and step.out not in values:
            return
        state = self.rule.join(step, [self._part(term, step, states) for term in step.terms])
        states[step.out] = state if step.out in self.partial else state._replace(size=None)
        for term in step.terms:
            if last[term.value] == n and term.value not in keep:
                states.pop(term.value, None)

    def _part(self, term: Term, step: Step, states: dict[int, State]) -> tuple[Part, int]:
        state = states[term.value]
        if term.value in self.partial and state.size is not None:  # a sum that goes on
            return Part(state.value, state.size, state.words), state.exponent
        map_: Map | None = term.map
        if term.value in self.places:
            map_ = term.map.narrow(*self.places[term.value])
        assert map_ is not None
        return self.rule.part(map_, state, len(step.terms) == 1), state.exponent


def _only(state: State, there: Tensor) -> State:
    """A state without the elements of other pairs."""
    value = torch.where(there, state.value, torch.zeros((), dtype=state.value.dtype))
    size = None if state.size is None else torch.where(there, state.size, 0)
    return State(value, state.exponent, _where(there, state.words), size)


def _lines(there: Tensor, dim: int) -> Tensor:
    """The places along a dimension where there is anything."""
    others = [d for d in range(there.dim()) if d != dim]
    return (there.any(tuple(others)) if others else there).nonzero().reshape(-1)


def _narrowed(state: State, dim: int, index: Tensor) -> State:
    """A state at some places along a dimension."""
    words = tuple(word.index_select(dim, index) for word in state.words)
    return State(state.value.index_select(dim, index), state.exponent, words)


# Pairs -------------------------------------------------------------------------------------------


@dataclass
class Pairs:
    """Which pair each element belongs to, found by following the maps.

    ``apart`` are the values whose every element can come from one loss only; ``of`` tells for those
    of them that are taken where pairs meet, and for leaves, which (from 1 on; 0: none).
    """

    apart: set[int]
    of: dict[int, Tensor]

    @classmethod
    def follow(cls, program: Program, count: int) -> Pairs:
        """Follow the pairs of a vector of losses."""
        device = program.seed.device
        # The largest pair that an element can come from, and the smallest, as the largest of a
        # count from the other end; 0 is none in both.
        up = torch.arange(1, count + 1, dtype=torch.int32, device=device)
        spans = {program.root: (up, up.flip(0))}
        apart, of = {program.root}, {}
        last = program.last_uses()
        leaves = {leaf.value for leaf in program.leaves}
        for n, step in enumerate(program.steps()):
            if all(term.value in apart for term in step.terms):
                high, low = (
                    _most([term.map.reach(spans[term.value][k]) for term in step.terms])
                    for k in (0, 1)
                )
                if bool(((high == 0) | (high + low == count + 1)).all()):
                    apart.add(step.out)
                    spans[step.out] = (high, low)
                    if step.out in leaves:
                        of[step.out] = high
            if step.out not in apart:
                of.update((t.value, spans[t.value][0]) for t in step.terms if t.value in apart)
            for term in step.terms:
                if last[term.value] == n:
                    spans.pop(term.value, None)
        return cls(apart, of)

    def summed(self, program: Program, mixed: set[int]) -> dict[int, int | None]:
        """For each value that is taken where pairs meet, the dimension along which every taker sums
        and a pair has the fewest places; None if there is no such dimension.
        """
        takers: dict[int, list[Map]] = {}
        for step in program.steps():
            if step.out in mixed:
                for term in step.terms:
                    if term.value in self.apart:
                        takers.setdefault(term.value, []).append(term.map)
        found: dict[int, int | None] = {}
        for value, maps in takers.items():
            first = self.of[value] == 1
            some = {d: _lines(first, d) for d in range(first.dim())}
            fit = [d for d in some if all(m.narrow(d, some[d]) is not None for m in maps)]
            share = {d: len(some[d]) / max(1, first.shape[d]) for d in fit}
            found[value] = min(share, key=share.__getitem__, default=None)
        return found

    def mixed(self, program: Program) -> set[int]:
        """The values that are found for each pair in turn."""
        return {step.out for step in program.steps()} - self.apart


def _most(many: list[Tensor]) -> Tensor:
    total = many[0]
    for other in many[1:]:
        total = torch.maximum(total, other)
    return total
