"""Gradient tracing: which contribution was the largest, at every element, in one streaming pass.

Each cotangent element carries its *provenance*: the set of components that its path to the root
has visited (see ``provenance``). An element of a step's output takes the provenance of the element
it points to. So no pointers are stored, and memory is that of a backward pass. Two rules define
what an element points to:

- ``greedy``: values are the gradients. Of the users of a value, the one with the largest
  |contribution|; inside that operator, the element with the largest |weight · gradient|.
- ``viterbi``: values are computed in the MAX semiring, so the pointers are those of the path of
  greatest |product|.

A contribution of exactly 0 does not count; ties go to the first term, then to the lowest element.
Gathers do not choose: an element that has a path keeps it.

A value is *uniform* if all its elements have the same provenance. Then it does not matter which
contribution was the largest, only whether there is any: an element has a path where it is not 0,
and nothing is compared. Gradients that recording has kept are not computed again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from gradtrace.ir.passes.nested_sums import NestedSum, nested
from gradtrace.ir.program import Leaf, Program, Step
from gradtrace.linops import Map, copied, narrowed, tiled, tiling
from gradtrace.linops.indexing import each_at, nearby
from gradtrace.semirings.base import shifted, wide
from gradtrace.tracing.compact_storage import CompactValues, packed, take, unpacked
from gradtrace.tracing.per_sample import Pairs, places
from gradtrace.tracing.provenance import (
    COMPACT_ABOVE_ENTRIES,
    NO_COMPONENTS,
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
    """A leaf after a pass. ``pair`` is one of

    - int: the pair that the pass was for;
    - Tensor: for each element the pair it belongs to, counted from 1 (0: none);
    - range: the pairs along the first dimension of ``state``.
    """

    leaf: Leaf
    state: TracedValue
    pair: int | Tensor | range

    @property
    def gradient(self) -> Tensor:
        """The leaf's gradient; only where values are gradients, so not for ``viterbi``."""
        return self.leaf.compute() if self.state.value is None else self.state.value


NO_CONTEXT = StepContext({}, frozenset())
VITERBI, GRADIENT = RULES["viterbi"], RULES["gradient"]

BATCH_MAX_ELEMENTS = 1 << 20
"""Pairs that mix are computed in batches, such that no batched value has more elements."""

UNADDED_MAX_TERMS = 3
"""A partial sum keeps up to this many terms unadded, where all share one tensor of ids."""


class Tracer:
    """Runs a program by a rule and propagates provenance.

    ``marks`` says which bits a path gets where. ``narrow`` keeps ids in one or two bytes while a
    value waits for its use, to save memory.
    """

    def __init__(
        self,
        program: Program,
        rule: str,
        marks: ComponentBits = NO_COMPONENTS,
        narrow: bool = False,
    ) -> None:
        self.program = program
        self.maps = program.maps
        self.narrow = narrow
        self.rule = RULES[rule]
        self.absolute = rule == "viterbi"
        self.marks = marks
        merges = [step for block in program.blocks for step in block.merges]
        # Partial sums: merges whose result is the first term of another merge. Their terms are
        # compared one by one with those that follow.
        self.partial = {step.out for step in merges} & {step.terms[0].value for step in merges}
        if self.absolute:
            self.partial = set()  # max is associative: partial results can be compared
        self.leaves = {leaf.value: leaf for leaf in program.leaves}
        self.nested: dict[int, NestedSum] = {}  # by block
        if isinstance(self.rule, Greedy):
            for number, block in enumerate(program.blocks):
                if (part := nested(block, self.maps)) is not None:
                    self.nested[number] = part
        # While pairs are batched along a first dimension: the batch size (0: not batched); for a
        # value, a dimension and the indices along it of each pair's elements; by id of a map,
        # its batched version.
        self.count = 0
        self.places: dict[int, tuple[int, Tensor]] = {}
        self.copied: dict[int, Map] = {}

    def run(self, seed: Tensor) -> Iterator[TracedLeaf]:
        """The leaves of one loss, each yielded as soon as it is complete."""
        context = self._step_context() if isinstance(self.rule, Greedy) else NO_CONTEXT
        states = self._states()
        states[self.program.root] = self.root(seed)
        for leaf in self.execute(states, None, frozenset(), context):
            yield TracedLeaf(leaf, take(states, leaf.value), 0)

    def _states(self) -> dict[int, TracedValue]:
        return CompactValues() if self.narrow else {}

    def run_pairs(self, seed: Tensor, pairs: Pairs) -> Iterator[TracedLeaf]:
        """The leaves of a vector of losses, traced separately for each loss.

        Values whose elements each belong to one pair are computed once for all pairs. Values that
        mix pairs are computed in batches, each pair in its own slice along a new first dimension.
        """
        states = self._states()
        states[self.program.root] = self.root(seed)
        for leaf in self.execute(states, pairs.apart, frozenset(pairs.of), NO_CONTEXT):
            yield TracedLeaf(leaf, states[leaf.value], pairs.of[leaf.value])
        mixed = pairs.mixed(self.program)
        along = pairs.summed(self.program, mixed)
        for some in self._batches(mixed, len(seed)):
            here = self._states()
            if len(some) != self.count:
                self.count, self.copied = len(some), {}
            self.places = {}
            for value, dim in along.items():
                state, of = states[value], pairs.of[value]
                if dim is not None:  # only the pair's own indices: the others would add 0
                    self.places[value] = (dim, places(of, some, dim))
                here[value] = _only(state, of, some, self.places.get(value))
            for leaf in self.execute(here, mixed, frozenset(), NO_CONTEXT):
                yield TracedLeaf(leaf, take(here, leaf.value), some)
        self.count, self.places, self.copied = 0, {}, {}

    def _batches(self, mixed: set[int], count: int) -> Iterator[range]:
        """The pairs in batches, if any value mixes pairs; see ``BATCH_MAX_ELEMENTS``."""
        most = max((prod(s.shape) for s in self.program.steps() if s.out in mixed), default=1)
        size = 1 if self.narrow else max(1, BATCH_MAX_ELEMENTS // max(1, most))
        for first in range(0, count if mixed else 0, size):
            yield range(first, min(first + size, count))

    def root(self, seed: Tensor) -> TracedValue:
        """The traced value of the loss, given its seed cotangent."""
        return TracedValue(wide(seed).abs() if self.absolute else seed, 0, None, ProvenanceTable())

    def _step_context(self) -> StepContext:
        known = dict(self.program.kept)
        for leaf in self.program.leaves:
            if (given := leaf.known) is not None:
                known[leaf.value] = given
        device = self.program.seed.device
        for value in [value for value, grad in known.items() if not grad.dim()]:
            known[value] = nearby(known[value], device)
        ends = frozenset(self.leaves)
        return StepContext(known, tails(self.program) - self.partial, ends, not self.narrow)

    def execute(
        self,
        states: dict[int, TracedValue],
        values: set[int] | None,
        keep: frozenset[int],
        context: StepContext,
    ) -> Iterator[Leaf]:
        """Compute ``values`` (None: all) into ``states`` and yield leaves as they are complete.

        A value is dropped after its last use, unless it is in ``keep``.
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
        unbatched, through, maps = not self.count, self.rule.through, self.maps
        for number, block in enumerate(self.program.blocks):
            self._add_block_bits(number, block.takes, states)
            part = self.nested.get(number)
            if part is not None and (values is None or part.gives & values):
                chosen = self._largest_contributions(part, states)
            else:
                part = None
            for step in block.steps:  # hot loop: thousands of steps, most of one term
                n += 1
                out, terms, _, _ = step
                if values is not None and out not in values:
                    continue
                if part is not None and out in part.alone:
                    states[out] = self._summed(step, states, context)
                    _drop(step, n, states, last, keep)
                elif unbatched and len(terms) == 1:
                    at, value = terms[0]
                    states[out] = through(maps[at], states[value], step, context)
                    if last[value] == n and value not in keep:
                        del states[value]
                else:
                    states[out] = self._step(step, states, context)
                    _drop(step, n, states, last, keep)
            for value in part.gives if part is not None else ():
                states[value] = _with_provenance_of(states[value], chosen[value])
            for position, value in block.gives.items() if positions else ():
                bits = positions.get((number, position), 0)
                if bits and value in states:
                    states[value] = states[value].with_bits(bits)
            for step in block.merges:
                n += 1
                if values is None or step.out in values:
                    self._merge(step, states, sums, context)
                    _drop(step, n, states, last, keep)
            for value in block.gives.values():
                if value in leaves and value in states:
                    yield leaves[value]
            for step in block.merges:
                if step.out in leaves and step.out in states:
                    yield leaves[step.out]

    def _add_block_bits(
        self, number: int, takes: dict[int, int], states: dict[int, TracedValue]
    ) -> None:
        """Add the bits for visiting a block, and for its labelled slices, to its cotangents."""
        bits, slices = self.marks.block.get(number, 0), self.marks.slices.get(number)
        for value in takes.values() if bits or slices else ():
            if value in states:
                state = states[value]
                if bits & ~state.provenance.extra:
                    states[value] = state = state.with_bits(bits)
                if slices:
                    state = materialise(state).with_provenance()
                    assert state.ids is not None
                    dim, kinds = slices
                    dim += bool(self.count)
                    ids, provenance = sliced(state.ids, state.provenance, dim, kinds)
                    states[value] = state._replace(ids=ids, provenance=provenance)

    def _step(
        self, step: Step, states: dict[int, TracedValue], context: StepContext
    ) -> TracedValue:
        if len(step.terms) == 1:
            at, value = step.terms[0]
            return self.rule.through(self._map(at, value), states[value], step, context)
        maps = [self._map(at, value) for at, value in step.terms]
        if order := tiling(maps):
            known = context.known.get(step.out)
            return self._tiled(maps, [states[value] for _, value in step.terms], order, known)
        terms: list[TracedValue] = []
        for map_, (_, value) in zip(maps, step.terms):
            terms.append(self._term(map_, states[value], step, not terms))
        return _ended(self.rule.join(terms, step, context))

    def _largest_contributions(
        self, part: NestedSum, states: dict[int, TracedValue]
    ) -> dict[int, TracedValue]:
        """For the outputs of nested sums: the largest single |contribution| and its provenance."""
        sizes = {value: _sizes(states[value]) for value in part.takes}
        for step in part.steps:
            sizes[step.out] = self._joined(VITERBI, step, sizes, NO_CONTEXT)
        return {value: sizes[value] for value in part.gives}

    def _summed(
        self, step: Step, states: dict[int, TracedValue], context: StepContext
    ) -> TracedValue:
        """The gradient of a value, without provenance."""
        known = context.known.get(step.out)
        if known is not None:
            return made(known, None, ProvenanceTable())
        inputs = {term.value: materialise(states[term.value]) for term in step.terms}
        return self._joined(GRADIENT, step, inputs, context)._replace(ids=None, unmasked=False)

    def _joined(
        self, rule: Rule, step: Step, states: Mapping[int, TracedValue], context: StepContext
    ) -> TracedValue:
        found = [
            rule.through(self._map(at, value), states[value], step, context)
            for at, value in step.terms
        ]
        return found[0] if len(found) == 1 else rule.join(found, step, context)

    def _tiled(
        self, maps: list[Map], states: list[TracedValue], order: list[int], known: Tensor | None
    ) -> TracedValue:
        """Terms that tile the output (a concatenation): each element comes from one of them."""
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
        # compact() must not count ids of elements that are 0 as used
        if self.absolute or len(provenance.rows) > COMPACT_ABOVE_ENTRIES:
            return TracedValue(value, exponent, *compact(both * (value != 0), provenance))
        return made(value, both, provenance, unmasked=True)

    def _term(self, map_: Map, state: TracedValue, step: Step, first: bool) -> TracedValue:
        """One of several terms. A gathered element of the first term has a path only if it is not
        0; elements of later terms that are 0 are never chosen.
        """
        state = self.rule.through(map_, state, step, NO_CONTEXT)
        has_ids = state.ids is not None or state.lazy
        if first and map_.is_gather and has_ids and not self.absolute and not state.unmasked:
            state = materialise(state)._replace(unmasked=True)
        return state

    def _merge(
        self,
        step: Step,
        states: dict[int, TracedValue],
        sums: dict[int, list[TracedValue]],
        context: StepContext,
    ) -> None:
        """Add one more term to the sum over a value's users; ``sums`` holds partial sums."""
        found: list[TracedValue] = []
        checked = 0  # how many leading terms are known to be uniform and equal
        for at, value in step.terms:
            if value in sums:
                some = sums.pop(value)
                if found or len(some) == 1:
                    found += map(unpacked, some) if self.narrow else some
                else:  # extend the list in place: there may be thousands of terms
                    found, checked = some, len(some)
            else:
                state = states[value]
                found.append(self._term(self._map(at, value), state, step, not found))
        if step.out not in self.partial:
            states[step.out] = _ended(self.rule.join(found, step, context))
        elif alike(found, checked) or (
            not self.narrow and len(found) <= UNADDED_MAX_TERMS and shared(found)
        ):
            sums[step.out] = found
        else:
            total = self.rule.join(found, step, NO_CONTEXT, on=True)
            sums[step.out] = [packed(total) if self.narrow else total]

    def _map(self, at: int, value: int) -> Map:
        map_ = self.maps[at]
        if not self.count:
            return map_
        if value in self.places:
            return narrowed(map_, *self.places[value])
        found = self.copied.get(id(map_))
        if found is None:
            found = self.copied[id(map_)] = copied(map_, self.count)
        return found


def _sizes(state: TracedValue) -> TracedValue:
    """|value|, with id 0 at elements that are 0."""
    state = materialise(state)
    if state.ids is not None:
        state = state._replace(unmasked=True)
    state = state if state.ids is None else state.with_provenance()
    assert state.value is not None
    return TracedValue(wide(state.value).abs(), state.exponent, state.ids, state.provenance)


def _with_provenance_of(state: TracedValue, largest: TracedValue) -> TracedValue:
    """A value with the provenance of its largest contributions."""
    return made(state.value, largest.with_provenance().ids, largest.provenance)


def _ended(state: TracedValue) -> TracedValue:
    """A complete sum: without the size of its largest term."""
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
    """Values whose only use leads to a leaf through gathers and sums: no map chooses after them.

    Includes the leaves themselves.
    """
    ends = {leaf.value for leaf in program.leaves}
    found, used = set(ends), set[int]()
    for out, terms, _, _ in reversed(program.steps()):  # users of a value come before its maker
        on = out in found
        for at, value in terms:
            if value not in used:
                used.add(value)
                if on and program.maps[at].is_gather:
                    found.add(value)
            elif value in found and value not in ends:
                found.remove(value)  # it has another user
    return found


def _only(
    state: TracedValue, of: Tensor, pairs: range, at: tuple[int, Tensor] | None
) -> TracedValue:
    """A value batched over pairs, with 0 at elements of other pairs.

    ``of`` gives each element's pair. ``at`` is a dimension and, for each pair, the indices along
    it to select; None selects all.
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
    """A tensor with a new first dimension over pairs, indexed for each pair if ``at``."""
    return x.unsqueeze(0) if at is None else each_at(x, *at)
