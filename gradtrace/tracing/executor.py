"""Executes a plan: which contribution was the largest, at every element, in one streaming pass.

Each cotangent element carries its *provenance*: the set of components that its path to the root
has visited (see ``provenance``). An element of a step's output takes the provenance of the element
it points to. So no pointers are stored, and memory is that of a backward pass. Three rules define
what an element points to:

- ``greedy``: values are the gradients. Of the users of a value, the one with the largest
  |contribution|, a sum; inside that operator, the element with the largest |weight · gradient|.
- ``edge``: values are the gradients. Of all elements of all users of a value, the one with the
  largest |weight · gradient|.
- ``viterbi``: values are computed in the MAX semiring, so the pointers are those of the path of
  greatest |product|.

A contribution of exactly 0 does not count; ties go to the first term, then to the lowest element.
Gathers do not choose: an element that has a path keeps it.

A value is *uniform* if all its elements have the same provenance. Then it does not matter which
contribution was the largest, only whether there is any: an element has a path where it is not 0,
and nothing is compared. Gradients that recording has kept are not computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradtrace.ir.plan import (
    AddBits,
    AddSlices,
    Apply,
    Concat,
    Emit,
    Encoding,
    Exchange,
    Form,
    Join,
    Nested,
    Plan,
    Sizing,
    Sum,
    TakeProvenance,
)
from gradtrace.ir.program import Constants, Leaf, Step
from gradtrace.kernels import Backend
from gradtrace.linops import Map, tiled
from gradtrace.linops.across_ranks import RankGather
from gradtrace.semirings.base import shifted, wide
from gradtrace.tracing.compact_storage import CompactValues, packed, take, unpacked
from gradtrace.tracing.edge_rule import unsized, with_size
from gradtrace.tracing.provenance import (
    COMPACT_ABOVE_ENTRIES,
    ProvenanceTable,
    compact,
    sliced,
)
from gradtrace.tracing.rules import RULES, Gradient, Rule, Viterbi
from gradtrace.tracing.traced_value import TracedValue, made, materialise, own, shared

UNADDED_MAX_TERMS = 3
"""A partial sum keeps up to this many terms unadded, where all share one tensor of ids."""


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
        return self.leaf.gradient() if self.state.value is None else self.state.value


def execute(plan: Plan, constants: Constants, backend: Backend) -> Iterator[TracedLeaf]:
    """The leaves of one loss, each yielded as soon as it is complete. All values are on the device
    of the backend.
    """
    executor = Executor(plan, constants, backend)
    states = executor.values()
    states[plan.root] = executor.root(constants.seed)
    leaves = {leaf.value: leaf for leaf in constants.leaves}
    for value in executor.run(states):
        yield TracedLeaf(leaves[value], take(states, value), 0)


class Executor:
    """Runs the instructions of a plan on traced values.

    ``maps`` gives the map of a term; by default, the one in the constants. ``batched``: pairs are
    along a new first dimension of every value.
    """

    def __init__(
        self,
        plan: Plan,
        constants: Constants,
        backend: Backend,
        maps: Callable[[int, int], Map] | None = None,
    ) -> None:
        self.plan, self.backend = plan, backend
        self.rule = RULES[plan.rule](backend)
        self.absolute, self.by_edge = plan.rule == "viterbi", plan.rule == "edge"
        self.compact = plan.storage.compact
        self.batched = maps is not None
        self.maps = table = constants.maps
        self.map = maps or (lambda at, value: table[at])
        self.known = constants.known_gradients() if plan.gradients else {}
        self.states: dict[int, TracedValue] = {}
        self.sums: dict[int, list[TracedValue]] = {}  # partial sums over users
        self.largest: dict[int, TracedValue] = {}  # of the last ``Nested``

    def values(self) -> dict[int, TracedValue]:
        """A dictionary for traced values by number."""
        return CompactValues() if self.compact else {}

    def root(self, seed: Tensor) -> TracedValue:
        """The traced value of the loss, given its seed cotangent."""
        return TracedValue(wide(seed).abs() if self.absolute else seed, 0, None, ProvenanceTable())

    def run(self, states: dict[int, TracedValue]) -> Iterator[int]:
        """Compute values into ``states``, and yield leaves as they are complete."""
        maps, unbatched = self.maps, not self.batched
        self.states, known, through = states, self.known, self.rule.through
        op: Any
        for op in self.plan.instructions:  # hot loop: thousands of steps, most of one term
            kind = type(op)
            if kind is Apply:
                step, form, free = op
                out, ((at, value),), _, _ = step
                map_ = maps[at] if unbatched else self.map(at, value)
                states[out] = through(map_, states[value], form, known.get(out))
            elif kind is Emit:
                if self.by_edge and (found := states[op.value]).size is not None:
                    states[op.value] = unsized(found, self.backend)
                yield op.value
                continue
            else:
                free = HANDLERS[kind](self, op)
            for value in free:
                states.pop(value, None)

    def _add_bits(self, op: AddBits) -> tuple[int, ...]:
        state = self.states.get(op.value)
        if state is not None and op.bits & ~state.provenance.extra:
            self.states[op.value] = self.states[op.value].with_bits(op.bits)
        return ()

    def _add_slices(self, op: AddSlices) -> tuple[int, ...]:
        if op.value in self.states:
            state = materialise(self.states[op.value], self.backend).with_provenance(self.backend)
            assert state.ids is not None
            dim = op.dim + self.batched
            ids, provenance = sliced(state.ids, state.provenance, dim, op.bits, self.backend)
            self.states[op.value] = state._replace(ids=ids, provenance=provenance)
        return ()

    def _nested(self, op: Nested) -> tuple[int, ...]:
        """The largest single |contribution| to each value of a nested sum, and its provenance."""
        sizes = {value: _sizes(self.states[value], self.backend) for value in op.takes}
        rule = Viterbi(self.backend)
        for each in op.steps:
            forms = each.forms if isinstance(each, Join) else (each.form,)
            sizes[each.step.out] = self._joined(rule, each.step, each.form, forms, sizes)
        self.largest = sizes
        return ()

    def _take_provenance(self, op: TakeProvenance) -> tuple[int, ...]:
        for value in op.values:
            largest = self.largest[value].with_provenance(self.backend)
            found = made(self.states[value].value, largest.ids, largest.provenance)
            if value in op.sized:
                found = found._replace(size=_shifted(largest, 0))
            self.states[value] = found
        self.largest = {}
        return ()

    def _sum(self, op: Sum) -> tuple[int, ...]:
        """The gradient of a value, without provenance."""
        step, form, forms, free = op
        known = self.known.get(step.out)
        if known is not None:
            self.states[step.out] = made(known, None, ProvenanceTable())
        else:
            inputs = {
                term.value: materialise(self.states[term.value], self.backend)
                for term in step.terms
            }
            found = self._joined(Gradient(self.backend), step, form, forms, inputs)
            self.states[step.out] = found._replace(ids=None, unmasked=False)
        return free

    def _joined(
        self,
        rule: Rule,
        step: Step,
        form: Form,
        forms: tuple[Form, ...],
        states: Mapping[int, TracedValue],
    ) -> TracedValue:
        found = [
            rule.through(self.map(at, value), states[value], each)
            for (at, value), each in zip(step.terms, forms)
        ]
        return found[0] if len(found) == 1 else rule.join(found, form)

    def _concat(self, op: Concat) -> tuple[int, ...]:
        step = op.step
        maps = [self.map(at, value) for at, value in step.terms]
        known, states = self.known.get(step.out), [self.states[value] for _, value in step.terms]
        states = [self._sized(state, op.form) for state in states]
        found = concatenated(maps, states, op.order, known, op.form, self.absolute, self.backend)
        self.states[step.out] = self._unsized_last(found, op.form)
        return op.free

    def _exchange(self, op: Exchange) -> tuple[int, ...]:
        step, form, free = op
        ((at, value),) = step.terms
        map_ = self.map(at, value)
        assert isinstance(map_, RankGather)
        known, state = self.known.get(step.out), self._sized(self.states[value], form)
        found = exchanged(map_, state, known, form, self.absolute, self.backend)
        self.states[step.out] = self._unsized_last(found, form)
        return free

    def _sized(self, state: TracedValue, form: Form) -> TracedValue:
        """A part of a value, with its size if the whole has one."""
        if form.size >= Sizing.CARRIED:
            return with_size(state, self.backend)
        state = state if state.size is None else unsized(state, self.backend)
        return materialise(state, self.backend)

    def _unsized_last(self, state: TracedValue, form: Form) -> TracedValue:
        return unsized(state, self.backend) if form.size is Sizing.LAST else state

    def _join(self, op: Join) -> tuple[int, ...]:
        """The sum of several terms, or one more term of the sum over a value's users."""
        step, form, forms, free = op
        found: list[TracedValue] = []
        checked = 0  # how many leading terms are known to be uniform
        for (at, value), each in zip(step.terms, forms):
            some = self.sums.pop(value, None) if each.encoding is Encoding.PARTIAL else None
            if some is None:
                state = self.rule.through(self.map(at, value), self.states[value], each)
                found.append(state if found else self._first(state, each))
            elif found or len(some) == 1:
                found += map(unpacked, some) if self.compact else some
            else:  # extend the list in place: there may be thousands of terms
                found, checked = some, len(some)
        if not form.partial:
            total = self.rule.join(found, form, self.known.get(step.out))
            done = total.size is None or form.size is not Sizing.NONE
            self.states[step.out] = total if done else total._replace(size=None)
        elif self._stays_apart(found, form, checked):
            self.sums[step.out] = found
        else:
            total = self.rule.join(found, form)
            self.sums[step.out] = [packed(total) if self.compact else total]
        return free

    def _first(self, state: TracedValue, form: Form) -> TracedValue:
        """The first of several terms. A gathered element of it has a path only if it is not 0;
        elements of later terms that are 0 are never chosen.
        """
        if state.size is not None:  # ``join`` writes to it
            ids = None if state.ids is None else own(state.ids)
            return state._replace(size=own(state.size), ids=ids)
        if form.size is not Sizing.NONE and state.parts:
            return state
        has_ids = state.ids is not None or state.lazy
        gathered = form.encoding is Encoding.MOVED and not self.absolute
        if gathered and has_ids and not state.unmasked:
            return materialise(state, self.backend)._replace(unmasked=True)
        return state

    def _stays_apart(self, found: list[TracedValue], form: Form, checked: int) -> bool:
        """Whether the terms of a partial sum are added only when the sum is complete."""
        if form.encoding is Encoding.UNIFORM and all(
            state.uniform and state.size is None for state in found[checked:]
        ):
            return True
        return not self.compact and len(found) <= UNADDED_MAX_TERMS and shared(found)


HANDLERS: dict[type, Callable[[Executor, Any], tuple[int, ...]]] = {
    AddBits: Executor._add_bits,
    AddSlices: Executor._add_slices,
    Concat: Executor._concat,
    Exchange: Executor._exchange,
    Join: Executor._join,
    Nested: Executor._nested,
    Sum: Executor._sum,
    TakeProvenance: Executor._take_provenance,
}
"""How each instruction but ``Apply`` and ``Emit`` is run; returns the values to free."""


def concatenated(
    maps: list[Map],
    states: list[TracedValue],
    order: list[int],
    known: Tensor | None,
    form: Form,
    absolute: bool,
    backend: Backend,
) -> TracedValue:
    """Terms that tile the output: each element comes from one of them."""
    exponent = max(state.exponent for state in states)
    value = known
    if value is None:
        value = tiled(maps, [_shifted(state, exponent) for state in states], order)
    size = None
    if form.size is not Sizing.NONE:
        size = tiled(maps, [wide(state.compared).abs() for state in states], order)
    if form.encoding is Encoding.UNIFORM and all(state.uniform for state in states):
        return TracedValue(value, exponent, None, states[0].provenance, (), size)
    ids, provenance = [], states[0].provenance
    for state in states:
        given = state.with_provenance(backend).ids if state.ids is None else state.ids
        assert given is not None
        provenance, shift = provenance.joined(state.provenance)
        ids.append(torch.add(given, given != 0, alpha=shift) if shift else given)
    both = tiled(maps, ids, order)
    found = TracedValue(value, exponent, both, provenance, (), size, None, True)
    return _compacted(found, absolute, backend)


def _compacted(state: TracedValue, absolute: bool, backend: Backend) -> TracedValue:
    """A value of unmasked ids; masked if the table is large, and by the rule ``viterbi``."""
    ids, provenance, compared = state.ids, state.provenance, state.compared
    if ids is None or not (absolute or len(provenance.rows) > COMPACT_ABOVE_ENTRIES):
        return state
    # compact() must not count ids of elements that are 0 as used
    ids, provenance = compact(ids * (compared != 0), provenance, backend)
    return state._replace(ids=ids, provenance=provenance, unmasked=False)


def _sizes(state: TracedValue, backend: Backend) -> TracedValue:
    """|value|, with id 0 at elements that are 0."""
    state = materialise(state, backend)
    if state.ids is not None:
        state = state._replace(unmasked=True).with_provenance(backend)
    assert state.value is not None
    return TracedValue(wide(state.value).abs(), state.exponent, state.ids, state.provenance)


def _shifted(state: TracedValue, exponent: int) -> Tensor:
    assert state.value is not None
    return shifted(state.value, state.exponent - exponent)


def exchanged(
    map_: RankGather,
    state: TracedValue,
    known: Tensor | None,
    form: Form,
    absolute: bool,
    backend: Backend,
) -> TracedValue:
    """The whole of a value, of this rank's part of it and those of the others.

    Ranks number provenance sets each by themselves. So their tables are put one after the other, in
    the order of ranks, and ids are shifted before they are gathered. The result is the same on all
    ranks. ``known`` is its gradient, if recording kept it.
    """
    assert state.value is not None
    layout, rows = map_.layout, state.provenance.sets()[1:]
    said = layout.told((state.exponent, state.ids is None, rows))
    exponent = max(power for power, _, _ in said)
    value = known
    if value is None:
        value = layout.gather(shifted(state.value, state.exponent - exponent))
    size = None
    if form.size is not Sizing.NONE:
        size = layout.gather(wide(state.compared).abs())
    if all(uniform and sets == rows for _, uniform, sets in said):
        return TracedValue(value, exponent, None, state.provenance, (), size)
    ids = state.with_provenance(backend).ids
    assert ids is not None
    table = ProvenanceTable(tuple(said[0][2]))
    shift = 0
    for rank, (_, _, sets) in enumerate(said[1:], 1):
        table, start = table.joined(ProvenanceTable(tuple(sets)))
        shift = start if rank == layout.rank else shift
    both = layout.gather(torch.add(ids, ids != 0, alpha=shift) if shift else ids)
    found = TracedValue(value, exponent, both, table, (), size, None, True)
    return _compacted(found, absolute, backend)
