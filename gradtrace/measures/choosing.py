"""Counts how paths divide at the forks of a program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import nan

from gradtrace.components.components import Component, ComponentSelection
from gradtrace.components.forks import Fork, find_forks, fork_bits
from gradtrace.errors import GradtraceError, UnknownName
from gradtrace.ir.passes.provenance import ComponentBits
from gradtrace.measures.decompose import decomposed
from gradtrace.measures.mass import mass_through
from gradtrace.tracing.choices import MEASURES, Choice, Choices
from gradtrace.tracing.counting import Leaves, counted, counted_sample, selected
from gradtrace.tracing.influence import Row
from gradtrace.tracing.moments import Moments
from gradtrace.tracing.traced_program import TracedProgram

NO_FORKS = (
    "there is no fork: every parameter of this loss has one way to it only, so paths have no choice"
)


def choices(
    traced: TracedProgram,
    measures: Sequence[str] = ("paths",),
    of: Leaves | None = None,
    every: bool = False,
    sample: tuple[int, int] | None = None,
) -> Choices:
    """How paths divide at each fork; see ``Trace.choices``. ``sample``: how many elements, and a
    seed.
    """
    _check_measures(measures)
    traced = traced if of is None else selected(traced, of)
    forks = find_forks(traced.program, traced.names, traced.modules, every)
    if traced.granularity == "operator":  # a whole tensor runs through all slices
        forks = [fork for fork in forks if fork.kind != "label"]
    if not forks:
        return Choices((), traced.pairs, traced.rule, (NO_FORKS, *traced.notes))
    chosen = branches(traced, forks)
    table = counted(traced, chosen) if sample is None else counted_sample(traced, chosen, *sample)
    rows = _divided(forks, table.rows)
    more = [measure for measure in MEASURES[1:] if measure in measures]
    found = {measure: _shares(forks, _THROUGH[measure](traced, chosen)) for measure in more}
    rows = tuple(
        replace(row, others={m: shares[row.fork, row.branch] for m, shares in found.items()})
        for row in rows
    )
    return Choices(rows, traced.pairs, traced.rule, table.notes)


def all_choices(traced: TracedProgram) -> Choices:
    """``choices`` of all elements at the main forks, found once: reports and files both have it."""
    if traced.divided is None:
        traced.divided = choices(traced)
    return traced.divided


def _gradients(traced: TracedProgram, chosen: ComponentSelection) -> list[float]:
    """Of each branch ⟨g_branch, g⟩: what the gradient through it adds to the gradient, signed."""
    return decomposed(traced, chosen).column("dot")


def _masses(traced: TracedProgram, chosen: ComponentSelection) -> list[float]:
    """Of each branch the mass of the paths through it."""
    return [row.mass for row in mass_through(traced, chosen)]


_THROUGH = {"gradient": _gradients, "mass": _masses}


def _shares(forks: Sequence[Fork], through: Sequence[float]) -> dict[tuple[str, str], float]:
    """The share of each branch, by fork and branch: forks of one name are added."""
    branches, totals = dict[tuple[str, str], float](), dict[str, float]()
    places = [(fork.name, branch.name) for fork in forks for branch in fork.branches]
    for (fork, branch), part in zip(places, through):
        branches[fork, branch] = branches.get((fork, branch), 0.0) + part
        totals[fork] = totals.get(fork, 0.0) + part
    return {key: part / totals[key[0]] if totals[key[0]] else nan for key, part in branches.items()}


def _check_measures(measures: Sequence[str]) -> None:
    if isinstance(measures, str) or not isinstance(measures, Iterable):
        given = measures if isinstance(measures, str) else MEASURES[0]
        raise GradtraceError(f"measures are several: measures=({given!r},)")
    for measure in measures:
        if measure not in MEASURES:
            raise UnknownName(f"measure {measure!r} is none of {', '.join(MEASURES)}")


def branches(traced: TracedProgram, forks: Sequence[Fork]) -> ComponentSelection:
    """The branches of forks as components, in order. The leaves without a choice at a fork belong
    to its branches, so that they do not count.
    """
    bits = ComponentBits({}, {}, {})
    numbers = iter(fork_bits(forks, traced.program.blocks, bits))
    leaves, found = frozenset(traced.names.values()), list[Component]()
    for fork in forks:
        others = leaves - fork.choosers
        found += [Component(f"{fork.name}: {b.name}", next(numbers), others) for b in fork.branches]
    return ComponentSelection(found, bits)


def _divided(forks: Sequence[Fork], rows: Sequence[Row]) -> tuple[Choice, ...]:
    """Rows of choices from those of the branches: forks of one name are added."""
    sums: dict[tuple[str, str], list[list[float]]] = {}
    kinds, times, place = dict[str, str](), dict[str, int](), 0
    between = {fork.name for fork in forks if fork.between}
    for fork in forks:
        kinds[fork.name], times[fork.name] = fork.kind, times.get(fork.name, 0) + 1
        for branch, row in zip(fork.branches, rows[place : place + len(fork.branches)]):
            both = [list(row.count.through), list(row.gradient.through)]
            known = sums.setdefault((fork.name, branch.name), both)
            if known is not both:
                known[:] = [[*map(sum, zip(*two))] for two in zip(known, both)]
        place += len(fork.branches)
    totals: dict[str, list[list[float]]] = {}
    for (name, _), both in sums.items():
        known = totals.setdefault(name, [[0.0] * len(line) for line in both])
        known[:] = [[*map(sum, zip(*two))] for two in zip(known, both)]
    found = []
    for (name, taken), both in sums.items():
        count, gradient = map(Moments.over, both, totals[name])
        where = (name, taken, kinds[name])
        found.append(Choice(*where, count, gradient, {}, times[name], name in between))
    return tuple(found)
