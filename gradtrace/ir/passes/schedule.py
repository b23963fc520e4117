"""Pass that lowers a program to the instructions of a plan.

It decides, for every step, how provenance is found (``Encoding``), what need not be computed until
a leaf is counted, and after which step a value is freed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradtrace.ir.passes.edge_sizes import (
    NO_SIZES,
    single_contributions,
    sized_values,
)
from gradtrace.ir.passes.nested_sums import NestedSum, nested
from gradtrace.ir.passes.provenance import (
    NO_COMPONENTS,
    ComponentBits,
    ProvenanceBounds,
    analyse_provenance,
)
from gradtrace.ir.passes.tails import find_lone_tails, find_tails
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
    Sizing,
    Sum,
    TakeProvenance,
)
from gradtrace.ir.program import Block, Program, Step, Term
from gradtrace.kernels import backend_of, tuning
from gradtrace.linops import Contract, Map, Reduce, Scatter, tiling


@dataclass(frozen=True)
class Request:
    """What is asked of a program.

    ``rule`` is greedy, edge, viterbi or gradient; ``components`` the bits of provenance. ``values``
    are those to compute (None: all); of them ``keep`` are not freed. ``gradients``: whether values
    are those of recording, whose kept gradients are used and whose leaves need not be computed.
    ``bounds`` are those of ``components``, if they are known.
    """

    rule: str
    components: ComponentBits = NO_COMPONENTS
    values: frozenset[int] | None = None
    keep: frozenset[int] = frozenset()
    gradients: bool = False
    bounds: ProvenanceBounds | None = None


def partial_sums(program: Program) -> set[int]:
    """Merges whose result is the first term of another merge: sums over some users of a value."""
    merges = [step for block in program.blocks for step in block.merges]
    return {step.out for step in merges} & {step.terms[0].value for step in merges}


class Schedule:
    """Lowers the blocks of a program, one by one. ``compact``: memory is short.

    There are thousands of steps, each as short as a call or two, so this is written with few calls.
    """

    def __init__(self, program: Program, request: Request, compact: bool = False) -> None:
        self.program = program
        self.maps = program.maps
        self.rule = request.rule
        self.components = request.components
        self.leaves = {leaf.value for leaf in program.leaves}
        # A leaf may have a user within its own block: in a fused LSTM the cotangent of one bias is
        # copied from that of the other. It must not be freed before it is counted.
        self.values, self.keep = request.values, request.keep | self.leaves
        # The terms of a partial sum are compared one by one with those that follow. A maximum is
        # associative, so by ``viterbi`` partial results can be compared instead.
        self.partial = partial_sums(program) if self.rule != "viterbi" else set()
        self.tails, self.known, self.ends = set[int](), set[int](), set[int]()
        if request.gradients:
            self.tails, self.ends = find_tails(program) - self.partial, self.leaves
            known = {leaf.value for leaf in program.leaves if leaf.known is not None}
            self.known = known | program.kept.keys()
        self.put_off = find_lone_tails(program) if self.rule == "viterbi" else self.tails
        bounds = request.bounds or analyse_provenance(program, self.components)
        self.must, self.may = bounds
        self.single, self.sized = NO_SIZES, set[int]()
        if self.rule == "edge":
            self.single = single_contributions(program)
            self.sized = sized_values(program, self.single, self.partial, bounds)
        self.batches_leaves = backend_of(program.seed).fuses(program.seed) and not compact
        self.last = self._last_uses()
        self.number = -1  # of the step
        self.found: list[Instruction] = []
        self.forms: dict[tuple[object, ...], Form] = {}

    def _last_uses(self) -> dict[int, int]:
        """For each value the last step that reads it."""
        if self.values is None:
            return self.program.last_uses
        steps = enumerate(self.program.steps())
        return {term.value: n for n, s in steps if s.out in self.values for term in s.terms}

    def instructions(self) -> tuple[Instruction, ...]:
        """All instructions, in order."""
        if self.program.root in self.leaves and self.values is None:
            self.found.append(Emit(self.program.root))
        for number, block in enumerate(self.program.blocks):
            self._block(number, block)
        return tuple(self.found)

    def _block(self, number: int, block: Block) -> None:
        found, values, leaves, components = self.found, self.values, self.leaves, self.components
        takes, position = block.takes, components.position
        bits = components.block.get(number, 0)
        for value in takes.values() if bits else ():
            found.append(_tuple(AddBits, (value, bits)))
        if number in components.slices:
            found += [AddSlices(value, *components.slices[number]) for value in takes.values()]
        part = nested(block, self.maps) if self.rule in ("greedy", "edge") else None
        if part is not None and (values is None or part.gives & values):
            found.append(self._nested(part))
        else:
            part = None
        for step in block.steps:
            self.number += 1
            if values is None or step[0] in values:
                alone = part is not None and step.out in part.alone
                found.append(self._sum(step) if alone else self._lowered(step, block.opened))
        if part is not None:
            found.append(TakeProvenance(tuple(part.gives), part.gives & self.sized))
        for at, value in block.gives.items():
            if position and (number, at) in position and (values is None or value in values):
                found.append(AddBits(value, position[number, at]))
        for step in block.merges:
            self.number += 1
            if values is None or step[0] in values:
                found.append(self._join(step, self._free(step)))
        given = block.gives.values()
        for value in (*given, *[step.out for step in block.merges]) if block.merges else given:
            if value in leaves and (values is None or value in values):
                found.append(_tuple(Emit, (value,)))

    def _lowered(self, step: Step, opened: bool) -> Apply | Exchange | Join | Concat:
        terms = step[1]
        if len(terms) == 1:
            value = terms[0][1]
            kept = self.last[value] != self.number or value in self.keep
            form = self._form(step, terms[0], step[0] in self.tails, step[0] in self.put_off)
            if self.sized:
                form = self._with_size(form, self._size(step))
            if self.maps[terms[0][0]].across_ranks:
                return Exchange(step, form, () if kept else (value,))
            return _tuple(Apply, (step, form, () if kept else (value,)))
        free = self._free(step)
        order = tiling(self.maps.of(step))
        if order is not None:
            form = self._result(step)
            return Concat(step, self._with_size(form, self._size(step)), order, free)
        return self._join(step, free, opened)

    def _join(self, step: Step, free: tuple[int, ...], opened: bool = False) -> Join:
        result, terms = self._result(step), self._terms(step)
        if self.single.summed:
            final = step.out in self.sized or self.must[step.out] != self.may[step.out]
            sizing = [self._term_size(step, term, final, opened) for term in step.terms]
            terms = tuple([self._with_size(*each) for each in zip(terms, sizing)])
        return Join(step, result, terms, free)

    def _size(self, step: Step) -> Sizing:
        """Of a step of one term, or of a concatenation."""
        carried = any(self.single.carries(step.out, term.value) for term in step.terms)
        if step.out in self.sized:
            return Sizing.CARRIED if carried else Sizing.FRESH
        inner = carried and any(term.value in self.sized for term in step.terms)
        return Sizing.LAST if inner else Sizing.NONE

    def _term_size(self, step: Step, term: Term, final: bool, opened: bool) -> Sizing:
        """Of one of several terms; ``final``: whether they are compared by size in the end."""
        if self.single.carries(step.out, term.value):
            return Sizing.CARRIED if final else Sizing.PRESENT
        if not opened or self.maps[term.map].single_source:
            return Sizing.NONE
        return Sizing.FRESH if final else Sizing.PRESENT

    def _with_size(self, form: Form, size: Sizing) -> Form:
        return form if form.size is size else self._shared(*form[:5], size)

    def _sum(self, step: Step) -> Sum:
        return Sum(step, self._result(step), self._terms(step), self._free(step))

    def _terms(self, step: Step) -> tuple[Form, ...]:
        return tuple([self._form(step, term) for term in step.terms])

    def _nested(self, part: NestedSum) -> Nested:
        steps = (
            Apply(step, self._form(step, step.terms[0]))
            if len(step.terms) == 1
            else self._join(step, ())
            for step in part.steps
        )
        return Nested(tuple(part.takes), tuple(steps))

    def _result(self, step: Step) -> Form:
        """The form of a sum."""
        out = step.out
        uniform = self.rule == "gradient" or self.must[out] == self.may[out]
        encoding = Encoding.UNIFORM if uniform else Encoding.DENSE
        tail, end, partial = out in self.tails, out in self.ends, out in self.partial
        if out in self.sized:
            return self._shared(encoding, step.dtype, tail, end, partial, Sizing.FRESH)
        return self._shared(encoding, step.dtype, tail, end, partial)

    def _form(self, step: Step, term: Term, tail: bool = False, put_off: bool = False) -> Form:
        """The form of one term; ``tail``: the only one of a step in the tail of a leaf;
        ``put_off``: its provenance may be found when the leaf is counted.
        """
        map_, value, dtype = self.maps[term[0]], term[1], step[3]
        if value in self.partial:
            return self._shared(Encoding.PARTIAL, dtype)
        if map_.is_gather or self.rule == "gradient":
            return self._shared(Encoding.MOVED, dtype)
        if map_.is_diagonal:
            return self._shared(Encoding.SCALED, dtype)
        if self.must[value] == self.may[value]:
            return self._shared(Encoding.UNIFORM, dtype, tail)
        encoding = Encoding.DENSE
        if tail and step.out not in self.known and isinstance(map_, Scatter) and map_.sparse:
            encoding = Encoding.SPARSE
        elif put_off and self._is_lazy(map_):
            encoding = Encoding.LAZY
        return self._shared(encoding, dtype, tail)

    def _shared(self, *fields: Any) -> Form:
        """A form; equal ones are one object."""
        found = self.forms.get(fields)
        if found is None:
            found = self.forms[fields] = Form(*fields)
        return found

    def _is_lazy(self, map_: Map) -> bool:
        """Whether a leaf's ids are computed while they are counted: in pieces if the leaf is large,
        or in one launch with other leaves.
        """
        if isinstance(map_, Reduce):
            return self.batches_leaves
        return (
            isinstance(map_, Contract)
            and map_.outputs > tuning.PIECE_ELEMENTS
            and map_.plan().turned
        )

    def _free(self, step: Step) -> tuple[int, ...]:
        """The values that no later step reads."""
        last, number = self.last, self.number
        values = {value for _, value in step.terms if last[value] == number}
        return tuple(values - self.keep)


_tuple = tuple.__new__
