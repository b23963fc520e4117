"""``Spectrum``: mass and gradient of all paths, by their length or by the residual branches taken.

Every value is held once for each grade (length so far, or branches so far) that a path to it has,
so a spectrum costs about as many passes as there are grades.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import nan
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from gradtrace.errors import GradtraceError, UnknownName, printable
from gradtrace.io.table import RowSequence, Summarised, TextColumn, TextTable, known
from gradtrace.ir import memory
from gradtrace.ir.interpreter import is_move, value_of
from gradtrace.ir.passes.residuals import residual_branches
from gradtrace.ir.program import HOOKS, Leaf, Program, Step
from gradtrace.ir.rescaling import Rescaling, Scalar, ScaledValue, rescaled
from gradtrace.kernels import fetch_scalars
from gradtrace.linops import column_sums, transposed
from gradtrace.measures.mass import LOGARITHMS_FROM, checked_power
from gradtrace.paths.masked_weights import finitely
from gradtrace.paths.path_mass import SumLayout, leaf_tails
from gradtrace.semirings import SUM, Abs, Semiring
from gradtrace.tracing.moments import as_float, in_units
from gradtrace.tracing.traced_program import TracedProgram

WHAT, REMEDY = "measuring a spectrum", "take the spectrum of one leaf: spectrum(of=name)"

By: TypeAlias = Literal["length", "branches"]
Graded: TypeAlias = dict[int, ScaledValue]
"""A value for each grade."""


@dataclass(frozen=True)
class SpectrumRow:
    """The paths of one grade: their mass ``Σ |weight|**p``, its share of the mass of all paths, and
    the share of the gradient that they carry, ``⟨g_n, g⟩ / ⟨g, g⟩``.
    """

    grade: int
    mass: float
    share: float
    gradient: float


@dataclass(frozen=True)
class Spectrum(RowSequence[SpectrumRow], Summarised):
    """Mass and gradient of all paths by ``"length"`` (operators on the path, a fused one counting
    as one) or by ``"branches"`` (residual branches taken: of ``x + f(x)`` the path through f).

    Shares of mass add up to 1, and so do those of the gradient, which may be negative where paths
    of a grade pull against the whole. ``gradients`` are the parts of the gradient by grade, for the
    spectrum of one leaf; they add up to its gradient. For several losses, the gradient is that of
    their sum.
    """

    by: By
    rows: tuple[SpectrumRow, ...]
    p: float = 1.0
    of: str | None = None
    gradients: Mapping[int, Tensor] = field(default_factory=dict, repr=False, compare=False)
    notes: tuple[str, ...] = ()

    @property
    def masses(self) -> dict[int, float]:
        """``{grade: mass}``."""
        return {row.grade: row.mass for row in self.rows}

    @property
    def shares(self) -> dict[int, float]:
        """``{grade: share of the mass of all paths}``."""
        return {row.grade: row.share for row in self.rows}

    @property
    def gradient_shares(self) -> dict[int, float]:
        """``{grade: share of the gradient}``."""
        return {row.grade: row.gradient for row in self.rows}

    @property
    def mean(self) -> float:
        """The mean grade of a path, each path weighed by its mass."""
        return sum(row.grade * row.share for row in self.rows) if self.rows else nan

    def table(self) -> TextTable:
        """The table as text: one row per grade."""
        columns = (
            TextColumn(self.by, "count"),
            TextColumn("share of mass", "share"),
            TextColumn("share of gradient", "share"),
            TextColumn("mass", "number"),
        )
        rows = tuple(
            (row.grade, known(row.share), known(row.gradient), row.mass) for row in self.rows
        )
        of = f" of {self.of}" if self.of else ""
        return TextTable(f"Spectrum{of} by {self.by} (p = {self.p:g})", columns, rows, self.notes)

    def __repr__(self) -> str:
        of = f", of={self.of!r}" if self.of else ""
        return printable(f"Spectrum(by={self.by!r}, {len(self.rows)} grades, p={self.p:g}{of})")


def spectrum_of(traced: TracedProgram, by: str, p: float, of: str | None) -> Spectrum:
    """The spectrum of all leaves, or of one; see ``Spectrum``."""
    kind, semiring = _checked(by), Abs(p=checked_power(p))
    if p > LOGARITHMS_FROM:
        raise GradtraceError(
            f"a spectrum is of p up to {LOGARITHMS_FROM}, not {p:g}; mass(p={p:g}) goes further"
        )
    leaves = list(traced.program.leaves) if of is None else [traced.leaf(of)]
    grading = Grading.of(traced.program, kind, leaves)
    with torch.no_grad(), memory.within(traced.backend, WHAT, REMEDY):
        given = {leaf.value: leaf.gradient() for leaf in leaves}
        square = sum(fetch_scalars([_inner(g, g) for g in given.values()]))
        masses, inner, parts = finitely(
            traced.program,
            lambda some: _measured(replace(grading, program=some), semiring, given, of),
        )
    total = sum(masses.values(), Fraction(0))
    rows = tuple(
        SpectrumRow(
            n,
            as_float(masses.get(n, Fraction(0))),
            float(masses.get(n, Fraction(0)) / total) if total else nan,
            inner.get(n, 0.0) / square if square else nan,
        )
        for n in sorted(masses.keys() | inner.keys())
    )
    summed = [f"of the sum of {traced.pairs:,} losses"] if traced.pairs > 1 else []
    return Spectrum(kind, rows, float(p), of, parts, (*summed, *traced.notes))


def _measured(
    grading: Grading, semiring: Semiring, given: Mapping[int, Tensor], of: str | None
) -> tuple[dict[int, Fraction], dict[int, float], dict[int, Tensor]]:
    """By grade: masses, ⟨g_n, g⟩, and of one leaf the parts of its gradient."""
    masses, parts = _masses(grading, semiring), dict[int, Tensor]()
    if of is None:
        inner = _products(grading, given)
    else:
        (leaf,) = grading.leaves
        parts = _parts(grading, leaf)
        inner = _fetched({n: [_inner(x, given[leaf.value])] for n, x in parts.items()})
    return masses, inner, parts


def _checked(by: str) -> By:
    if by == "length":
        return "length"
    if by == "branches":
        return "branches"
    raise UnknownName(f"a spectrum is by 'length' or 'branches', not {by!r}")


def _inner(a: Tensor, b: Tensor) -> Tensor:
    return (a.double() * b.double()).sum()


def _fetched(found: Mapping[int, list[Tensor]]) -> dict[int, float]:
    """The sum of the scalars of each grade, with one synchronisation."""
    numbers = iter(fetch_scalars([each for some in found.values() for each in some]))
    return {grade: sum(next(numbers) for _ in some) for grade, some in found.items()}


@dataclass
class Grading:
    """Which blocks and arguments raise a path's grade by one, and the values that lead to the
    leaves that are measured.
    """

    program: Program
    blocks: frozenset[int]
    arguments: frozenset[tuple[int, int]]
    leaves: list[Leaf]
    alive: set[int]

    @classmethod
    def of(cls, program: Program, by: By, leaves: list[Leaf]) -> Grading:
        """The grading of a program by length or by branches."""
        alive = {leaf.value for leaf in leaves}
        for step in reversed(program.steps()):
            if step.out in alive:
                alive.update(term.value for term in step.terms)
        if by == "branches":
            arguments = frozenset(residual_branches(program))
            return cls(program, frozenset(), arguments, leaves, alive)
        blocks = (n for n, block in enumerate(program.blocks) if block.operator != HOOKS)
        return cls(program, frozenset(blocks), frozenset(), leaves, alive)

    def run(
        self,
        rescaling: Rescaling,
        tails: Mapping[int, int],
        at_tail: Callable[[Step, Values], None],
    ) -> dict[int, Graded]:
        """Run the program grade by grade; returns the values of the leaves that are no tails.
        ``at_tail`` is called with the steps to tails, which are not computed.
        """
        program = self.program
        seed = rescaling.semiring.weigh(program.seed)
        values: Values = {program.root: {0: ScaledValue(seed, 0)}}
        keep = {leaf.value for leaf in self.leaves}
        last, n = program.last_uses, -1
        for number, block in enumerate(program.blocks):
            if number in self.blocks:
                self._raise(values, block.takes.values())
            branches = [v for at, v in block.gives.items() if (number, at) in self.arguments]
            for k, step in enumerate((*block.steps, *block.merges)):
                n += 1
                if k == len(block.steps):
                    self._raise(values, branches)
                if step.out in tails:
                    at_tail(step, values)
                elif step.out in self.alive:
                    values[step.out] = self._graded(step, values, rescaling)
                for term in step.terms:
                    if last[term.value] == n and term.value not in keep:
                        values.pop(term.value, None)
            if not block.merges:
                self._raise(values, branches)
        return {value: values[value] for value in keep if value in values}

    def _raise(self, values: Values, which: Any) -> None:
        for value in which:
            if value in values:
                values[value] = {grade + 1: held for grade, held in values[value].items()}

    def _graded(self, step: Step, values: Values, rescaling: Rescaling) -> Graded:
        found: Graded = {}
        maps = self.program.maps
        for grade in sorted({g for term in step.terms for g in values.get(term.value, ())}):
            here = [term for term in step.terms if grade in values.get(term.value, ())]
            held = {term.value: values[term.value][grade] for term in here}
            some = step._replace(terms=tuple(here))
            part = value_of(some, maps, held, rescaling)
            found[grade] = part if is_move(some, maps) else rescaling.balanced(part)
        return found


Values: TypeAlias = dict[int, Graded]


def _masses(grading: Grading, semiring: Semiring) -> dict[int, Fraction]:
    """The mass of the paths of each grade."""
    program = grading.program
    mine = {leaf.value for leaf in grading.leaves}
    raised = _raised(grading)
    every = leaf_tails(program, raised)
    tails = {value: leaf for value, leaf in every.items() if leaf in mine}
    (like,) = semiring.weigh(program.seed)

    def measured(rescaling: Rescaling) -> dict[int, Fraction] | None:
        found: dict[int, list[Scalar]] = {}
        ones = (rescaling.one((), like),)

        def at_tail(step: Step, values: Values) -> None:
            for at, value in step.terms:
                if value in tails or value not in values:
                    continue
                (sums,) = column_sums(program.maps[at], semiring, ones)
                for grade, held in values[value].items():
                    part = held._replace(value=(held.value[0] * sums,))
                    found.setdefault(grade, []).append(rescaling.total(part))

        for graded in grading.run(rescaling, tails, at_tail).values():
            for grade, held in graded.items():
                found.setdefault(grade, []).append(rescaling.total(held))
        layout, tensors = SumLayout.of([found], rescaling)
        sums = layout.read(tensors)
        if sums is None:
            return None
        ((masses,), power) = sums
        return {grade: in_units(mass, power) for grade, mass in masses.items()}

    return rescaled(semiring, program, measured)


def _raised(grading: Grading) -> set[int]:
    """The values at which the grade of paths changes."""
    blocks = grading.program.blocks
    found = {value for n in grading.blocks for value in blocks[n].takes.values()}
    return found | {blocks[n].gives[at] for n, at in grading.arguments}


def _products(grading: Grading, given: Mapping[int, Tensor]) -> dict[int, float]:
    """``⟨g_n, g⟩`` for each grade n. The gradients of leaves are pulled back to the inputs of the
    last maps, once for all grades, so that no part of a gradient is formed.
    """
    program = grading.program
    tails = {v: leaf for v, leaf in leaf_tails(program, _raised(grading)).items() if v == leaf}
    found: dict[int, list[Tensor]] = {}

    def at_tail(step: Step, values: Values) -> None:
        for at, value in step.terms:
            if value not in values:
                continue
            pulled = transposed(program.maps[at]).apply(given[step.out].reshape(step.shape))
            for grade, held in values[value].items():
                found.setdefault(grade, []).append(_inner(held.value[0], pulled))

    for leaf, graded in grading.run(Rescaling(SUM), tails, at_tail).items():
        for grade, held in graded.items():
            found.setdefault(grade, []).append(_inner(held.value[0], given[leaf]))
    return _fetched(found)


def _parts(grading: Grading, leaf: Leaf) -> dict[int, Tensor]:
    """The parts of a leaf's gradient, by grade."""
    found = grading.run(Rescaling(SUM), {}, lambda step, values: None).get(leaf.value, {})
    shape = leaf.tensor.shape
    return {grade: held.value[0].reshape(shape) for grade, held in sorted(found.items())}
