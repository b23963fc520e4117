"""Lowers a plan to a ``PlanTable``, for the tensors of one loss."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from gradtrace.ir.plan import (
    AddBits,
    Apply,
    Concat,
    Emit,
    Encoding,
    Form,
    Join,
    Plan,
)
from gradtrace.ir.program import Constants, Step
from gradtrace.linops import Identity, Index, Map, Normaliser, Scatter, Slot
from gradtrace.linops.gather import Cut
from gradtrace.linops.select_words import ASK, NotCovered, Operands, select_words
from gradtrace.tracing.plan_table import (
    Computed,
    CountedLeaf,
    Op,
    PendingPart,
    PlanTable,
    Question,
    Reading,
    TableWriter,
)

MAX_DEPTH = 100
"""How many gradients that recording did not keep may follow from each other."""


class Value(NamedTuple):
    """What is known of a value while a plan is lowered. ``deferred``: it is not computed before its
    leaf is counted; ``parts``: the contributions that made it, while it is uniform.
    """

    deferred: bool = False
    parts: tuple[PendingPart, ...] = ()


def lowered(plan: Plan, constants: Constants) -> PlanTable:
    """The table of a plan, for tensors that lie as these do; raises ``NotCovered``."""
    if plan.rule != "greedy" or not plan.gradients:
        raise NotCovered(f"the rule {plan.rule}")
    if plan.storage.compact:
        raise NotCovered("memory is short")
    return Lowering(plan, constants).table()


class Lowering:
    """Lowers the instructions of a plan, one by one."""

    def __init__(self, plan: Plan, constants: Constants) -> None:
        self.plan, self.maps = plan, constants.maps
        self.recorded = constants.known_gradients()
        self.recorded[plan.root] = constants.seed
        self.out = TableWriter(constants, dict(self.recorded))
        self.places = {leaf.value: n for n, leaf in enumerate(constants.leaves)}
        self.slots: dict[object, int] = {}
        self.values: dict[int, Value] = {plan.root: Value()}  # those that are held
        self.made: dict[int, Computed] = {}  # how gradients that were not kept are computed
        self.sums: dict[int, tuple[int, ...]] = {}  # of partial sums, the keys of their terms
        self.terms: dict[int, tuple[PendingPart, ...]] = {}  # contributions, of such a term
        self.facts: dict[int, object] = {}
        self.lazy: dict[int, int] = {}
        self.questions: list[Question] = []
        self.leaves: list[CountedLeaf] = []

    def table(self) -> PlanTable:
        """The table of all instructions."""
        handlers: dict[type, Any] = {
            Apply: self._apply,
            Join: self._join,
            Concat: self._concat,
            AddBits: self._add_bits,
            Emit: self._emit,
        }
        self.out.add(Op.ROOT, self._slot(self.plan.root))
        for op in self.plan.instructions:
            handler = handlers.get(type(op))
            if handler is None:
                raise NotCovered(f"instruction {type(op).__name__}")
            handler(op)
        out = self.out
        layouts = [(x.shape, x.stride()) for x in out.tensors]
        facts, words = [*self.facts.items()], out.words(len(self.slots))
        given = (words, (*out.readings,), layouts, (*out.computed,), facts, self.lazy)
        return PlanTable(*given, self.questions, self.leaves, self.plan.root)

    def _slot(self, value: object) -> int:
        return self.slots.setdefault(value, len(self.slots))

    # Gradients -----------------------------------------------------------------------------------

    def _key(self, value: int, depth: int = 0) -> int:
        """The key of a value's gradient, which is computed if recording has not kept it."""
        if value in self.out.known:
            return value
        made = self.made.get(value)
        if made is None or depth > MAX_DEPTH:
            raise NotCovered("gradients that recording did not keep")
        keys = [self._key(key, depth + 1) for key in made.keys]
        if made.maps and made.order is None and self._same(self.maps[made.maps[0]]):
            return keys[0]
        self.out.compute(made._replace(keys=(*keys,)))
        return value

    @staticmethod
    def _same(map_: Map) -> bool:
        return isinstance(map_, Identity) and map_.in_shape == map_.out_shape

    def _view(self, value: int) -> int:
        return self.out.value(self._key(value))

    # Instructions --------------------------------------------------------------------------------

    def _add_bits(self, op: AddBits) -> None:
        if op.value in self.values:
            self.out.add(Op.BITS, self._slot(op.value), self.out.set_of(op.bits))

    def _apply(self, op: Apply) -> None:
        step, form, free = op
        ((at, value),) = step.terms
        self._step(step.out, at, value, form)
        self._free(free)

    def _step(self, out: int, at: int, value: int, form: Form) -> None:
        """``out = map(value)``, also of one term of several."""
        if form.dtype is not torch.float32:
            raise NotCovered(f"gradients of {form.dtype}")
        if value not in self.values:
            raise NotCovered("a partial sum that is used by itself")
        self.made[out] = Computed(out, (value,), (at,), form.dtype)
        before, encoding = self.values[value], form.encoding
        known = out in self.recorded
        if encoding is Encoding.MOVED:
            self._moved(out, at, value)
            parts = [part._replace(moves=(*part.moves, at)) for part in before.parts]
            self.values[out] = Value(before.deferred and not known, (*parts,))
            return
        if before.deferred:
            raise NotCovered("a deferred value that is used")
        self.values[out] = Value(form.deferred and not known)
        if encoding is Encoding.SCALED:
            self.out.add(Op.SCALE, self._slot(out), self._slot(value))
        elif encoding is Encoding.UNIFORM:
            self._uniform(out, at, value, form.deferred)
        elif encoding is Encoding.DENSE:
            words = self._selected(at, value)
            self.out.add(Op.SELECT, self._slot(out), self._slot(value), self._view(value), *words)
        else:
            raise NotCovered(f"a leaf that is counted in pieces ({encoding.name.lower()})")

    def _selected(self, at: int, value: int) -> list[int]:
        """The words by which a map selects."""

        def pointer(_: Map, name: str, part: int | None = None) -> int:
            return self.out.reading(Reading(-1, at, name, part))

        key = self._key(value)
        x = self.out.known[key]
        if (fact := fact_of(self.maps[at])) is not None:
            self.facts[at] = fact
        to = Operands(x, self.out.reading(Reading(key)), pointer, self.out.view)
        try:
            return select_words(self.maps[at], to)
        except NotCovered:
            self.questions.append(Question(at, key))
            return [ASK, len(self.questions) - 1, self.maps[at].outputs]

    def _uniform(self, out: int, at: int, value: int, deferred: bool) -> None:
        """All elements have one provenance; only those whose contributions cancel are looked at."""
        words = [self._slot(out), self._slot(value)]
        if deferred:
            self.out.add(Op.UNIFORM, *words, -1)
            self.values[out] = self.values[out]._replace(parts=(PendingPart(at, self._key(value)),))
            return
        how = self._selected(at, value)
        views = self._view(out), self._view(value)
        self.out.add(Op.UNIFORM, *words, *views, len(how), *how)

    def _free(self, free: Sequence[int]) -> None:
        for value in free:
            if self.values.pop(value, None) is not None:
                self.out.add(Op.FREE, self._slot(value))

    # Gathers -------------------------------------------------------------------------------------

    def _moved(self, out: int, at: int, value: int) -> None:
        """Ids move with their elements."""
        map_, words = self.maps[at], (self._slot(out), self._slot(value))
        if isinstance(map_, Identity):
            self.out.add(Op.COPY, *words)
            return
        if isinstance(map_, Slot):
            self.out.add(Op.PLACE, *words, *_part(map_))
            return
        if not isinstance(map_, Index):
            raise NotCovered(f"{type(map_).__name__} is not among the moves that it knows")
        self.facts[at] = fact_of(map_)
        moved = map_._view(None)
        if moved is None:
            if not (map_.inputs and map_.outputs):
                raise NotCovered("an empty tensor")
            pointer = self.out.reading(Reading(-1, at, "source"))
            self.out.add(Op.TABLE, *words, pointer, map_.outputs, map_.inputs)
        else:
            start = int(moved.storage_offset())
            view = self.out.view(-1, moved.shape, moved.stride(), start)
            self.out.add(Op.GATHER, *words, view)

    # Sums ----------------------------------------------------------------------------------------

    def _join(self, op: Join) -> None:
        step, form, forms, free = op
        if form.dtype is not torch.float32:
            raise NotCovered(f"gradients of {form.dtype}")
        words: list[int] = []
        keys: list[int] = []
        for (at, value), each in zip(step.terms, forms):
            if each.encoding is Encoding.PARTIAL:
                keys += self.sums.pop(value)
                words += (self._slot(("sum", value)), -1, 1, 0)
                continue
            term, moved = value, each.encoding is Encoding.MOVED
            if not (moved and self._same(self.maps[at])) or value not in self.values:
                term = -1 - len(self.slots)  # a value of its own
                self._step(term, at, value, each)
            keys.append(term)
            parts = self.values[term].parts
            if not parts or not (self.values[term].deferred or len(parts) > 1):
                parts = (PendingPart(-1, term),)
            self.terms[term] = parts
            words += (self._slot(term), self._view(term), 0, moved)
        self._sum(step, form, words, keys)
        for key in keys:
            if key < 0 and self.values.pop(key, None) is not None:
                self.out.add(Op.FREE, self._slot(key))
        self._free(free)

    def _sum(self, step: Step, form: Form, words: list[int], keys: list[int]) -> None:
        out, alike = step.out, form.encoding is Encoding.UNIFORM
        where = self._slot(("sum", out) if form.partial else out)
        total = -1
        deferred = form.deferred and alike
        if form.partial:
            self.sums[out] = (*keys,)
        else:
            self.made[out] = Computed(out, (*keys,), (), form.dtype)
            self.values[out] = Value(deferred and out not in self.recorded)
            if deferred:
                parts = tuple(part for key in keys for part in self.terms[key])
                self.values[out] = self.values[out]._replace(parts=parts)
            elif alike:
                total = self._view(out)
        unknown = deferred and out not in self.recorded
        flags = int(alike), int(form.partial), deferred + unknown
        self.out.add(Op.JOIN, where, prod(step.shape), len(words) // 4, *flags, *words, total)

    def _concat(self, op: Concat) -> None:
        step, form, order, free = op
        if form.dtype is not torch.float32:
            raise NotCovered(f"gradients of {form.dtype}")
        keys = tuple(value for _, value in step.terms)
        maps = tuple(at for at, _ in step.terms)
        self.made[step.out] = Computed(step.out, keys, maps, form.dtype, order)
        words: list[int] = []
        for at, value in step.terms:
            map_ = self.maps[at]
            assert isinstance(map_, Slot)
            words += (self._slot(value), self._view(value), *_part(map_))
        head = prod(step.shape), len(keys), int(form.encoding is Encoding.UNIFORM)
        self.out.add(Op.CONCAT, self._slot(step.out), *head, self._view(step.out), *words)
        self.values[step.out] = Value()
        self._free(free)

    # Leaves --------------------------------------------------------------------------------------

    def _emit(self, op: Emit) -> None:
        value = op.value
        here, place = self.values[value], self.places[value]
        if here.deferred and len(here.parts) == 1 and self._is_sparse(here.parts[0]):
            self._counted(
                CountedLeaf(value, place, self._outputs(here.parts[0]), here.parts, True), -1
            )
            return
        if here.deferred:
            pointer = self.out.reading(Reading(place, leaf=True))
            gradient = self.out.tensors[pointer]
            view = self.out.view(pointer, gradient.shape, gradient.stride())
            self.lazy[pointer] = place
        else:
            key = self._key(value)
            view, gradient = self.out.value(key), self.out.known[key]
        self._counted(CountedLeaf(value, place, gradient.numel(), here.parts), view)

    def _counted(self, leaf: CountedLeaf, view: int) -> None:
        self.out.add(Op.EMIT, len(self.leaves), self._slot(leaf.value), view)
        self.leaves.append(leaf)

    def _is_sparse(self, part: PendingPart) -> bool:
        map_ = self.maps[part.map]
        return isinstance(map_, Scatter) and map_.sparse and not part.moves

    def _outputs(self, part: PendingPart) -> int:
        return self.maps[part.map].outputs


def _part(map_: Slot) -> tuple[int, int, int, int]:
    """Where a slot writes: so many lines of a length, into lines of another, from a place on."""
    inner = prod(map_.cut[map_.dim + 1 :])
    outer, length = prod(map_.cut[: map_.dim]), map_.cut[map_.dim] * inner
    return outer, length, map_.out_shape[map_.dim] * inner, map_.start * inner


PLAIN = (int, bool, float, str, type(None))


def fact_of(map_: Map) -> object:
    """What a table depends on of a map, beside the structure of its program and the layouts of its
    tensors: along which dimensions it sums, how it moves elements.
    """
    if isinstance(map_, Normaliser):
        return map_.dims
    if isinstance(map_, Cut):
        return map_.dim, map_.start
    if not isinstance(map_, Index) or isinstance(map_, Slot):
        return None
    code, *given = _parts_of(map_.move)
    if code is not None and all(map(_is_plain, given)):
        return code, *given
    moved = map_._view(None)  # it may read tensors: look where it moves elements
    return None if moved is None else (moved.shape, moved.stride(), moved.storage_offset())


def _parts_of(move: Any) -> tuple[object, ...]:
    """The code of a function, None if that is not all, and what it has taken from around it."""
    if move is torch.t:
        return (move,)
    cells, code = getattr(move, "__closure__", None) or (), getattr(move, "__code__", None)
    whole = code is not None and not (move.__defaults__ or move.__kwdefaults__)
    return (code if whole else None, *(cell.cell_contents for cell in cells))


def _is_plain(x: Any) -> bool:
    if isinstance(x, (tuple, list)):
        return all(map(_is_plain, x))
    return isinstance(x, PLAIN)
