"""Gradient tracing: which contribution was the largest, at every element, in one streaming pass.

Beside the value of every cotangent element goes a *mark*: the set of components that its path to
the root has visited (``provenance``). A step's output takes the mark of the element it points to.
 So no pointers are kept, and memory is as for a backward pass. Two rules say where an element
points to:

- ``greedy``: values are the gradients. Of the users of a value, the one with the largest
  |contribution|; inside that operator, the element with the largest |weight · gradient|.
- ``viterbi``: values are MAX, so that the pointers are those of the path of greatest |product|.

A contribution of exactly 0 is none; ties go to the first term, then to the lowest element. What
only moves elements does not choose: an element that was reached stays reached.

Where all elements have the same mark it does not matter which of them was the largest, but only
whether there is any: such a value is *plain*, its elements have a path where they are not 0, and
nothing is compared. Gradients that recording has kept are not computed again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from gradtrace.ir.nested_sums import NestedSum, nested
from gradtrace.ir.program import Leaf, Program, Step
from gradtrace.linops import Map, copied, narrowed, tiled, tiling
from gradtrace.linops.indexing import each_at, nearby
from gradtrace.semirings.base import shifted, wide
from gradtrace.tracing.compact_storage import CompactValues, packed, take, unpacked
from gradtrace.tracing.per_sample import Pairs, places
from gradtrace.tracing.provenance import (
    MANY,
    NO_MARKS,
    ComponentBits,
    ProvenanceTable,
    compact,
    sliced,
)
from gradtrace.tracing.rules import RULES, Greedy, Rule
from gradtrace.tracing.traced_value import (
    StepContext,
    TracedValue,
    alike,
    made,
    materialise,
    shared,
)


class TracedLeaf(NamedTuple):
    """A leaf after a pass. ``pair`` is the pair that the pass was for; or a tensor that says for
    each element, from 1 on, which pair it belongs to (0: none); or the pairs that the first
    dimension of the state is for.
    """

    leaf: Leaf
    state: TracedValue
    pair: int | Tensor | range

    @property
    def gradient(self) -> Tensor:
        """The value, where that is the gradient."""
        return self.leaf.compute() if self.state.value is None else self.state.value


NOTHING = StepContext({}, frozenset())
VITERBI, GRADIENT = RULES["viterbi"], RULES["gradient"]

TOGETHER = 1 << 20
"""Pairs that mix are computed together as long as no value of theirs has more elements."""

TERMS = 3
"""As many terms of a sum that goes on are held as they are, where all have the same marks."""


class Tracer:
    """Passes over a program by a rule, with marks; ``narrow`` ones while they wait, where memory
    is short.
    """

    def __init__(
        self, program: Program, rule: str, marks: ComponentBits = NO_MARKS, narrow: bool = False
    ) -> None:
        self.program = program
        self.narrow = narrow
        self.rule = RULES[rule]
        self.absolute = rule == "viterbi"
        self.marks = marks
        merges = [step for block in program.blocks for step in block.merges]
        # sums that go on: their terms are compared with those that follow, one by one
        self.partial = {step.out for step in merges} & {step.terms[0].value for step in merges}
        if self.absolute:
            self.partial = set()  # the largest of the largest is the largest
        self.leaves = {leaf.value: leaf for leaf in program.leaves}
        self.nested: dict[int, NestedSum] = {}  # by block
        if isinstance(self.rule, Greedy):
            for number, block in enumerate(program.blocks):
                if (part := nested(block)) is not None:
                    self.nested[number] = part
        # While pairs are computed together, along a first dimension: how many (0: they are not);
        # where each has its elements of a value, along a dimension; and the maps for so many.
        self.count = 0
        self.places: dict[int, tuple[int, Tensor]] = {}
        self.copied: dict[int, tuple[Map, Map]] = {}

    def run(self, seed: Tensor) -> Iterator[TracedLeaf]:
        """The leaves of one loss, each as soon as it is complete."""
        scope = self._scope() if isinstance(self.rule, Greedy) else NOTHING
        states = self._states()
        states[self.program.root] = self.root(seed)
        for leaf in self.passage(states, None, frozenset(), scope):
            yield TracedLeaf(leaf, take(states, leaf.value), 0)

    def _states(self) -> dict[int, TracedValue]:
        return CompactValues() if self.narrow else {}

    def run_pairs(self, seed: Tensor, pairs: Pairs) -> Iterator[TracedLeaf]:
        """The leaves of a vector of losses, each apart.

        What belongs to one pair only is computed for all of them at once. What mixes them is
        computed for some at a time, each in a slice of its own along a new first dimension.
        """
        states = self._states()
        states[self.program.root] = self.root(seed)
        for leaf in self.passage(states, pairs.apart, frozenset(pairs.of), NOTHING):
            yield TracedLeaf(leaf, states[leaf.value], pairs.of[leaf.value])
        mixed = pairs.mixed(self.program)
        along = pairs.summed(self.program, mixed)
        for some in self._together(mixed, len(seed)):
            here = self._states()
            if len(some) != self.count:
                self.count, self.copied = len(some), {}
            self.places = {}
            for value, dim in along.items():
                state, of = states[value], pairs.of[value]
                if dim is not None:  # only where the pair is: the rest is summed over anyway
                    self.places[value] = (dim, places(of, some, dim))
                here[value] = _only(state, of, some, self.places.get(value))
            for leaf in self.passage(here, mixed, frozenset(), NOTHING):
                yield TracedLeaf(leaf, take(here, leaf.value), some)
        self.count, self.places, self.copied = 0, {}, {}

    def _together(self, mixed: set[int], count: int) -> Iterator[range]:
        """The pairs, as many at a time as should be computed together."""
        most = max((prod(s.shape) for s in self.program.steps() if s.out in mixed), default=1)
        size = 1 if self.narrow else max(1, TOGETHER // max(1, most))
        for first in range(0, count if mixed else 0, size):
            yield range(first, min(first + size, count))

    def root(self, seed: Tensor) -> TracedValue:
        """The state of the loss."""
        return TracedValue(wide(seed).abs() if self.absolute else seed, 0, None, ProvenanceTable())

    def _scope(self) -> StepContext:
        known = dict(self.program.kept)
        for leaf in self.program.leaves:
            if (given := leaf.known) is not None:
                known[leaf.value] = given
        device = self.program.seed.device
        for value in [value for value, grad in known.items() if not grad.dim()]:
            known[value] = nearby(known[value], device)
        ends = frozenset(self.leaves)
        return StepContext(known, tails(self.program) - self.partial, ends, not self.narrow)

    def passage(
        self,
        states: dict[int, TracedValue],
        values: set[int] | None,
        keep: frozenset[int],
        scope: StepContext,
    ) -> Iterator[Leaf]:
        """Compute these values (None: all), and drop those that are used up, but for ``keep``; tell
        leaves as they come.
        """
        last = self.program.last_uses
        if values is not None:
            last = {
                term.value: n
                for n, step in enumerate(self.program.steps())
                if step.out in values
                for term in step.terms
            }
        sums: dict[int, list[TracedValue]] = {}
        if self.program.root in self.leaves and values is None:
            yield self.leaves[self.program.root]
        n, leaves, positions = -1, self.leaves, self.marks.position
        plainly, through = not self.count, self.rule.through
        for number, block in enumerate(self.program.blocks):
            self._enter(number, block.takes, states)
            part = self.nested.get(number)
            if part is not None and (values is None or part.gives & values):
                chosen = self._chosen(part, states)
            else:
                part = None
            for step in block.steps:  # there are thousands of them, most of one term
                n += 1
                out, terms, _, _ = step
                if values is not None and out not in values:
                    continue
                if part is not None and out in part.alone:
                    states[out] = self._summed(step, states, scope)
                    _drop(step, n, states, last, keep)
                elif plainly and len(terms) == 1:
                    map_, value = terms[0]
                    states[out] = through(map_, states[value], step, scope)
                    if last[value] == n and value not in keep:
                        del states[value]
                else:
                    states[out] = self._step(step, states, scope)
                    _drop(step, n, states, last, keep)
            for value in part.gives if part is not None else ():
                states[value] = _pointed(states[value], chosen[value])
            for position, value in block.gives.items() if positions else ():
                bits = positions.get((number, position), 0)
                if bits and value in states:
                    states[value] = states[value].marked(bits)
            for step in block.merges:
                n += 1
                if values is None or step.out in values:
                    self._merge(step, states, sums, scope)
                    _drop(step, n, states, last, keep)
            for value in block.gives.values():
                if value in leaves and value in states:
                    yield leaves[value]
            for step in block.merges:
                if step.out in leaves and step.out in states:
                    yield leaves[step.out]

    def _enter(self, number: int, takes: dict[int, int], states: dict[int, TracedValue]) -> None:
        """Marks at the output of a block's operator."""
        bits, slices = self.marks.block.get(number, 0), self.marks.slices.get(number)
        for value in takes.values() if bits or slices else ():
            if value in states:
                state = states[value]
                if bits & ~state.provenance.extra:
                    states[value] = state = state.marked(bits)
                if slices:
                    state = materialise(state).with_provenance()
                    assert state.ids is not None
                    dim, kinds = slices
                    dim += bool(self.count)
                    ids, provenance = sliced(state.ids, state.provenance, dim, kinds)
                    states[value] = state._replace(ids=ids, provenance=provenance)

    def _step(self, step: Step, states: dict[int, TracedValue], scope: StepContext) -> TracedValue:
        if len(step.terms) == 1:
            map_, value = step.terms[0]
            return self.rule.through(self._map(map_, value), states[value], step, scope)
        maps = [self._map(map_, value) for map_, value in step.terms]
        if order := tiling(maps):
            known = scope.known.get(step.out)
            return self._tiled(maps, [states[value] for _, value in step.terms], order, known)
        terms: list[TracedValue] = []
        for map_, (_, value) in zip(maps, step.terms):
            terms.append(self._term(map_, states[value], step, not terms))
        return _ended(self.rule.join(terms, step, scope))

    def _chosen(self, part: NestedSum, states: dict[int, TracedValue]) -> dict[int, TracedValue]:
        """For what sums of sums hand on, the largest single |contribution| and its mark."""
        sizes = {value: _sizes(states[value]) for value in part.takes}
        for step in part.steps:
            sizes[step.out] = self._joined(VITERBI, step, sizes, NOTHING)
        return {value: sizes[value] for value in part.gives}

    def _summed(
        self, step: Step, states: dict[int, TracedValue], scope: StepContext
    ) -> TracedValue:
        """The gradient of a value, whatever marks it may have."""
        known = scope.known.get(step.out)
        if known is not None:
            return made(known, None, ProvenanceTable())
        inputs = {term.value: materialise(states[term.value]) for term in step.terms}
        return self._joined(GRADIENT, step, inputs, scope)._replace(ids=None, unmasked=False)

    def _joined(
        self, rule: Rule, step: Step, states: Mapping[int, TracedValue], scope: StepContext
    ) -> TracedValue:
        found = [
            rule.through(self._map(map_, value), states[value], step, scope)
            for map_, value in step.terms
        ]
        return found[0] if len(found) == 1 else rule.join(found, step, scope)

    def _tiled(
        self, maps: list[Map], states: list[TracedValue], order: list[int], known: Tensor | None
    ) -> TracedValue:
        """Terms that lie side by side: each element comes from one of them, if it is not 0."""
        states = [materialise(state) for state in states]
        exponent = max(state.exponent for state in states)
        value = known
        if value is None:
            value = tiled(maps, [_shifted(state, exponent) for state in states], order)
        if alike(states):
            return TracedValue(value, exponent, None, states[0].provenance)
        ids, provenance = [], states[0].provenance
        for state in states:
            given = state.with_provenance().ids if state.ids is None else state.ids
            assert given is not None
            provenance, shift = provenance.joined(state.provenance)
            ids.append(torch.add(given, given != 0, alpha=shift) if shift else given)
        both = tiled(maps, ids, order)
        if (
            self.absolute or len(provenance.rows) > MANY
        ):  # none is to be told by elements that are 0
            return TracedValue(value, exponent, *compact(both * (value != 0), provenance))
        return made(value, both, provenance, unmasked=True)

    def _term(self, map_: Map, state: TracedValue, step: Step, first: bool) -> TracedValue:
        """What one of several terms brings. An element that is only moved counts if it is not 0;
        of terms that follow, 0 counts for nothing anyway.
        """
        state = self.rule.through(map_, state, step, NOTHING)
        marked = state.ids is not None or state.lazy
        if first and map_.is_gather and marked and not self.absolute and not state.unmasked:
            state = materialise(state)._replace(unmasked=True)
        return state

    def _merge(
        self,
        step: Step,
        states: dict[int, TracedValue],
        sums: dict[int, list[TracedValue]],
        scope: StepContext,
    ) -> None:
        """A sum over the users of a value, one more of them."""
        found: list[TracedValue] = []
        told = 0  # so many of them are known to be alike, if there are more than one
        for map_, value in step.terms:
            if value in sums:
                some = sums.pop(value)
                if found or len(some) == 1:
                    found += map(unpacked, some) if self.narrow else some
                else:  # what goes on is not copied: there may be thousands of terms
                    found, told = some, len(some)
            else:
                state = states[value]
                found.append(self._term(self._map(map_, value), state, step, not found))
        if step.out not in self.partial:
            states[step.out] = _ended(self.rule.join(found, step, scope))
        elif alike(found, told) or (not self.narrow and len(found) <= TERMS and shared(found)):
            sums[step.out] = found
        else:
            total = self.rule.join(found, step, NOTHING, on=True)
            sums[step.out] = [packed(total) if self.narrow else total]

    def _map(self, map_: Map, value: int) -> Map:
        if not self.count:
            return map_
        if value in self.places:
            return narrowed(map_, *self.places[value])
        known = self.copied.get(id(map_))
        if known is None:
            self.copied[id(map_)] = known = map_, copied(map_, self.count)
        return known[1]


def _sizes(state: TracedValue) -> TracedValue:
    """The sizes of a value's elements; such as are 0 have no mark."""
    state = materialise(state)
    if state.ids is not None:
        state = state._replace(unmasked=True)
    state = state if state.ids is None else state.with_provenance()
    assert state.value is not None
    return TracedValue(wide(state.value).abs(), state.exponent, state.ids, state.provenance)


def _pointed(state: TracedValue, largest: TracedValue) -> TracedValue:
    """A value with the marks of its largest contributions."""
    return made(state.value, largest.with_provenance().ids, largest.provenance)


def _ended(state: TracedValue) -> TracedValue:
    """A sum that does not go on."""
    return state if state.size is None else state._replace(size=None)


def _shifted(state: TracedValue, exponent: int) -> Tensor:
    assert state.value is not None
    return shifted(state.value, state.exponent - exponent)


def _drop(
    step: Step, n: int, states: dict[int, TracedValue], last: dict[int, int], keep: frozenset[int]
) -> None:
    for term in step.terms:
        if last[term.value] == n and term.value not in keep:
            states.pop(term.value, None)


def tails(program: Program) -> set[int]:
    """Values that nothing but a leaf is made of: moved and added up with others, no more."""
    ends = {leaf.value for leaf in program.leaves}
    found, used = set(ends), set[int]()
    for out, terms, _, _ in reversed(program.steps()):  # all who use a value, then who makes it
        on = out in found
        for map_, value in terms:
            if value not in used:
                used.add(value)
                if on and map_.is_gather:
                    found.add(value)
            elif value in found and value not in ends:
                found.remove(value)  # somebody else uses it too
    return found


def _only(
    state: TracedValue, of: Tensor, pairs: range, at: tuple[int, Tensor] | None
) -> TracedValue:
    """A state once for each pair, without the elements of other pairs: ``of`` says whose they are.
    With ``at``, a dimension and the places along it of each pair, only these.
    """
    value, ids = state.value, state.ids
    assert value is not None
    mine = torch.arange(pairs.start + 1, pairs.stop + 1, device=of.device)
    there = _each(of, at) == mine.reshape(-1, *[1] * value.dim())
    nothing = torch.zeros((), dtype=value.dtype, device=value.device)
    value = torch.where(there, _each(value, at), nothing)
    ids = None if ids is None else torch.where(there, _each(ids, at), 0)
    return state._replace(value=value, ids=ids)


def _each(x: Tensor, at: tuple[int, Tensor] | None) -> Tensor:
    """Along a first dimension, what each pair takes of a tensor."""
    return x.unsqueeze(0) if at is None else each_at(x, *at)
