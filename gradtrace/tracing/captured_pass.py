"""Influence of the losses of one structure by a graph of launches, captured once.

Between two losses of one structure only tensors differ, and on a GPU a pass over a small model
takes longer in Python than on the device. So from the third loss on a pass has fixed sizes
(``fixed_pass``) and reads its tensors from memory of its own (``ir.static_operands``); its launches
are captured, and made again for later losses. Results are the same to the bit. What the graph
cannot do, as its sizes follow from elements, is done after it: sparse leaves, and elements whose
contributions cancel. Where an assumption of the pass was wrong, the pass is made as before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import Parameter

from gradtrace.ir.plan import (
    AddBits,
    AddSlices,
    Apply,
    Concat,
    Emit,
    Encoding,
    Exchange,
    Form,
    Instruction,
    Join,
    Nested,
    Plan,
    Sum,
    TakeProvenance,
)
from gradtrace.ir.program import Constants, Program
from gradtrace.ir.static_operands import StaticOperands
from gradtrace.kernels import Backend, tuning
from gradtrace.kernels.capture import Captured, NotCapturable
from gradtrace.kernels.sync import AsyncCopy
from gradtrace.linops import Map, Scatter
from gradtrace.tracing.captures import Slot
from gradtrace.tracing.executor import Executor, TracedLeaf
from gradtrace.tracing.fixed_pass import FixedPass
from gradtrace.tracing.kept_plans import ComponentFacts
from gradtrace.tracing.tally import LeafCounts, Tally, UniformLeaf, with_gradient
from gradtrace.tracing.traced_value import TracedValue

MAX_MISSES = 3
"""After so many losses in a row that did not fit the graph, there is none any more."""

MEMORY_SHARE = 8
"""A captured pass takes at most one part in so many of the memory that is free."""

RULES = ("greedy", "edge")
"""The rules by which values are gradients; by another, their range is looked at."""


@dataclass
class Parts:
    """The instructions of a plan that a graph can make, and those that are made after it."""

    now: Plan
    later: Plan
    order: dict[int, int]  # of the leaves, by value


def divided(plan: Plan, maps: Sequence[Map]) -> Parts:
    """Divide the instructions: those with a sparse term, and all that use what these compute, are
    made later.
    """
    now: list[Instruction] = []
    later: list[Instruction] = []
    late: set[int] = set()
    needed: set[int] = set()
    for op in plan.instructions:
        reads, writes, sparse = _touched(op, maps)
        if sparse or not late.isdisjoint(reads):
            late.update(writes)
            needed.update(reads)
            later.append(op)
        elif needed.isdisjoint(writes):
            now.append(op)
        else:
            raise NotCapturable("the components of a sparse leaf")
    kept = [
        op._replace(free=tuple([value for value in op.free if value not in needed]))
        if isinstance(op, (Apply, Join, Concat, Sum))
        else op
        for op in now
    ]
    emitted = [op.value for op in plan.instructions if isinstance(op, Emit)]
    parts = [replace(plan, instructions=tuple(some)) for some in (kept, later)]
    return Parts(parts[0], parts[1], {value: n for n, value in enumerate(emitted)})


def _touched(op: Instruction, maps: Sequence[Map]) -> tuple[list[int], list[int], bool]:
    """The values that an instruction reads and writes, and whether its sizes follow from data."""
    if isinstance(op, (Exchange, AddSlices, Nested, TakeProvenance)):
        raise NotCapturable(f"a step of another kind ({type(op).__name__})")
    if isinstance(op, Emit):
        return [op.value], [], False
    if isinstance(op, AddBits):
        return [op.value], [op.value], False
    forms = op.forms if isinstance(op, (Join, Sum)) else (op.form,)
    terms = zip(op.step.terms, forms)
    sparse = any(_is_sparse(maps[at], form) for (at, _), form in terms)
    return [value for _, value in op.step.terms], [op.step.out], sparse


def _is_sparse(map_: Map, form: Form) -> bool:
    if form.encoding in (Encoding.SPARSE, Encoding.DENSE, Encoding.LAZY):
        return isinstance(map_, Scatter) and map_.sparse
    return False


class Missed(NotCapturable):
    """The loss did not fit the captured pass; the next one may."""


class CapturedPass:
    """A pass over the program of one structure, captured with the tensors of one loss."""

    def __init__(
        self, plan: Plan, facts: ComponentFacts, program: Program, backend: Backend
    ) -> None:
        self.facts, self.backend, self.plan = facts, backend, plan
        self.parts = divided(plan, program.maps)
        free = backend.free_bytes()
        self.most = tuning.CAPTURED_MAX_BYTES
        self.most = self.most if free is None else min(self.most, free // MEMORY_SHARE)
        self.operands = StaticOperands(program.constants, self.most)
        self.fixed = FixedPass(backend)
        self.graph: Captured | None = None
        # what the last pass has left
        self._leaves: list[LeafCounts] = []
        self._numbers: dict[int, Tensor] = {}
        self._uniform: list[UniformLeaf] = []
        self._sparse: list[TracedLeaf] = []
        self._states: dict[int, TracedValue] = {}
        self._sums: dict[int, list[TracedValue]] = {}

    @property
    def nbytes(self) -> int:
        """The bytes of its memory on the device."""
        return self.operands.nbytes + (0 if self.graph is None else self.graph.nbytes)

    def tally(self, program: Program) -> Tally:
        """Count the leaves of a program; the counts are valid until the next call. Raises
        ``NotCapturable``.
        """
        reason = self.operands.take(program.constants)
        if reason:
            raise Missed(reason)
        if not self.fixed.found:
            self._make(program)
            self.fixed.found = True
        else:
            if self.graph is None:
                self._capture(program)
            assert self.graph is not None
            self.graph.replay()
        reason = self.fixed.read(lambda line: AsyncCopy(line).read())
        if reason:
            raise Missed(reason)
        return self._counted(program)

    def _capture(self, program: Program) -> None:
        self.graph = self.backend.captured(lambda: self._make(program))
        if self.graph is None:
            raise NotCapturable("there are no graphs on this device")
        if self.nbytes > self.most:
            raise NotCapturable(f"its values take {self.graph.nbytes / 2**20:,.0f} MiB")
        if not self.parts.later.instructions:
            self.operands.constants.maps.clear()  # so that it holds no weights

    def _make(self, program: Program) -> None:
        """The part of the pass that the graph has."""
        constants, self._sparse = self.operands.constants, []
        tally = self._tally(program)
        with self.fixed.entered():
            executor = Executor(self.parts.now, constants, self.backend)
            states = executor.values()
            states[self.plan.root] = executor.root(constants.seed)
            leaves = {leaf.value: leaf for leaf in constants.leaves}
            for value in executor.run(states):
                found = TracedLeaf(leaves[value], states.pop(value), 0)
                if is_sparse(found):
                    self._sparse.append(found)
                else:
                    tally.add(*with_gradient(found, self.backend))
            tally.count_pending()
            self._numbers = _numbers(tally.leaves)
            self.fixed.tell([*self._numbers.values()])
        self._leaves, self._uniform = tally.leaves, tally.uniform
        self._states, self._sums = dict(states), dict(executor.sums)

    def _tally(self, program: Program) -> Tally:
        return Tally(self.facts, program, 1, self.backend, self.plan.storage.batch_bytes)

    def _counted(self, program: Program) -> Tally:
        """The counts of the last pass, and of what it has left to be done."""
        read = dict(zip(self._numbers, self.fixed.numbers))
        copies = {id(leaf): _read(leaf, read) for leaf in self._leaves}
        tally = self._tally(program)
        tally.leaves = [*copies.values()]
        tally.uniform = [each._replace(leaf=copies[id(each.leaf)]) for each in self._uniform]
        for found in self._sparse:
            tally.add(*with_gradient(found, self.backend))
        if self.parts.later.instructions:
            constants = self.operands.constants
            executor = Executor(self.parts.later, constants, self.backend)
            executor.sums = {value: [*some] for value, some in self._sums.items()}
            states = dict(self._states)
            leaves = {leaf.value: leaf for leaf in constants.leaves}
            for value in executor.run(states):
                found = TracedLeaf(leaves[value], states[value], 0)
                tally.add(*with_gradient(found, self.backend))
        tally.leaves.sort(key=lambda leaf: self.parts.order[leaf.value])
        return tally


def _numbers(leaves: Sequence[LeafCounts]) -> dict[int, Tensor]:
    """The tensors of counts and sums, each once, by their ``id()``."""
    found = [each.found for each in leaves if each.found is not None]
    return {id(x): x for each in found for x in (each.counts, each.sums)}


def _read(leaf: LeafCounts, numbers: Mapping[int, Tensor]) -> LeafCounts:
    """A leaf with the counts that were read."""
    found = leaf.found
    assert found is not None
    counts, sums = numbers[id(found.counts)], numbers[id(found.sums)]
    return replace(leaf, found=found._replace(counts=counts, sums=sums))


def is_sparse(found: TracedLeaf) -> bool:
    """Whether a leaf may be counted by the few elements that are added to: how many these are
    follows from data.
    """
    state = found.state
    if state.value is not None or not state.uniform or len(state.parts) != 1:
        return False
    part = state.parts[0]
    return not part.moves and isinstance(part.map, Scatter) and part.map.sparse


# Which passes are captured ------------------------------------------------------------------------


@contextmanager
def captured(
    facts: ComponentFacts, plan: Plan, program: Program, backend: Backend
) -> Iterator[Tally | None]:
    """Count the leaves of a program by the graph of its plan; None if there is none. The counts
    are those of this loss until the context is left.
    """
    slot = facts.captures.setdefault(id(plan), Slot())
    if slot.off or not slot.lock.acquire(blocking=False):
        yield None
        return
    try:
        yield _tallied(slot, facts, plan, program, backend)
    finally:
        slot.lock.release()


def _tallied(
    slot: Slot, facts: ComponentFacts, plan: Plan, program: Program, backend: Backend
) -> Tally | None:
    slot.runs += 1
    if slot.runs < tuning.CAPTURED_AFTER_LOSSES:
        slot.reason = "it was not met often enough"
        return None
    try:
        made = slot.made
        if not isinstance(made, CapturedPass):
            _check(plan, program.constants, backend)
            made = slot.made = CapturedPass(plan, facts, program, backend)
            _drop_with_model(slot, program.constants)
        slot.used()
        found = made.tally(program)
    except NotCapturable as error:
        slot.misses += 1
        lasting = not isinstance(error, Missed) or slot.misses >= MAX_MISSES
        slot.drop(str(error), off=lasting)
        return None
    except torch.OutOfMemoryError:  # without the copies it may fit
        slot.drop("there is not enough memory", off=True)
        return None
    slot.reason = ""
    if made.graph is not None:
        slot.misses = 0
        slot.replays += 1
    return found


def _check(plan: Plan, constants: Constants, backend: Backend) -> None:
    """Raise ``NotCapturable`` for what is known not to be captured."""
    if plan.rule not in RULES:
        raise NotCapturable(f"the rule {plan.rule} looks at values")
    if plan.storage.compact:
        raise NotCapturable("memory is short")
    for leaf in constants.leaves:
        if leaf.device is not None or leaf.layout is not None or leaf.shard is not None:
            raise NotCapturable("it is on several devices")


def _drop_with_model(slot: Slot, constants: Constants) -> None:
    for leaf in constants.leaves:
        if isinstance(leaf.tensor, Parameter):
            slot.drop_with(leaf.tensor)
            return
