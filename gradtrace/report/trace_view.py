"""The view of a trace that a report shows: tables of all kinds of components, paths and flow."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from gradtrace.components.components import Component, ComponentSelection
from gradtrace.errors import TooLarge, UnknownName
from gradtrace.ir.program import Program
from gradtrace.measures.agreement import warning_of
from gradtrace.measures.measures import Measures
from gradtrace.measures.table_source import by_other_rules
from gradtrace.report import model
from gradtrace.report.building import view
from gradtrace.report.findings import diagnosis, undiagnosed
from gradtrace.report.forks import forks
from gradtrace.report.model import View
from gradtrace.report.source import Source
from gradtrace.report.tuning import (
    ARGUMENTS_MAX_OPERATORS,
    COVERED_ELEMENTS,
    FULL,
    FULL_VIEW_MAX_ELEMENTS,
    FULL_VIEW_MAX_OPERATORS,
    SAMPLED_ELEMENTS,
    SMALL,
)
from gradtrace.tracing.counting import component_finder, counted, counted_sample
from gradtrace.tracing.coverage import Coverage
from gradtrace.tracing.influence import Influence
from gradtrace.tracing.traced_program import TracedProgram

SMALL_VIEW_NOTE = (
    f"this is a smaller view, for a notebook: influence of {SAMPLED_ELEMENTS:,} sampled elements, "
    "and fewer cells and paths; trace.report('report.html') writes all"
)

Tables = tuple[dict[str, Influence], tuple[str, ...]]
"""Influence by kind of components, and notes on it."""


def is_large(program: Program) -> bool:
    """Whether a notebook shows the ``small`` view of a program."""
    elements = sum(leaf.tensor.numel() for leaf in program.leaves)
    return elements > FULL_VIEW_MAX_ELEMENTS or len(program.blocks) > FULL_VIEW_MAX_OPERATORS


def view_of(
    traced: Measures,
    sample: int,
    seed: int,
    small: bool = False,
    diagnosed: Mapping[str, Any] | None = None,
) -> View:
    """Everything that a report shows of a trace, with the paths of ``sample`` elements;
    ``diagnosed`` is the dict of a ``Diagnosis`` of the same loss, if there is one.
    """
    traced.check_unchanged()
    tables, notes = _tables(traced, small)
    if traced.pairs > 1:
        notes += (
            f"paths and heat maps are those of the first of {traced.pairs:,} losses; masses and "
            "flow are of their sum",
        )
    found = None
    if traced.granularity == "scalar":
        coverage = traced.coverage(min(sample, COVERED_ELEMENTS), seed)
        found = _coverage(coverage, "" if small else _contradictions(traced, tables[""]))
        notes += found.words
    source = Source(traced, tables, (*traced.notes, *notes))
    made = view(source, sample, seed, SMALL if small else FULL)
    divided = forks(traced, made.modules, small)
    modules = {each.name: n for n, each in enumerate(made.modules)}
    findings = diagnosis(diagnosed, modules) or undiagnosed(
        traced.silent, (*traced.names.values(), *traced.gradients.aliases), modules
    )
    return replace(made, coverage=found, choices=divided, diagnosis=findings)


def _coverage(found: Coverage, contradictions: str) -> model.Coverage:
    shares = found.median, *found.quartiles, found.opposite, found.cancelled
    words = (*found.lines(), *([contradictions] if contradictions else []))
    return model.Coverage(*shares, found.elements, words)


def _contradictions(traced: TracedProgram, table: Influence) -> str:
    """Where the rules contradict each other, in words, if the program is small enough to tell."""
    if table.measured is not None:  # these are shares of a sample
        return ""
    tables = [table, *by_other_rules(traced, _kinds(traced)[""])]
    return warning_of({each.rule: each.shares for each in tables})


def _tables(traced: TracedProgram, small: bool) -> Tables:
    """Influence for every kind of component in the program, counted in one pass. ``small``: over a
    sample of elements.
    """
    finder, parts = component_finder(traced), dict[str, list[Component]]()
    for key, kind in _kinds(traced).items():
        with contextlib.suppress(UnknownName):  # the program has none of this kind
            parts[key] = finder.choose(kind).components
    chosen = ComponentSelection([c for some in parts.values() for c in some], finder.component_bits)
    notes: tuple[str, ...] = ()
    if small and traced.granularity == "scalar":
        table, notes = counted_sample(traced, chosen, SAMPLED_ELEMENTS), (SMALL_VIEW_NOTE,)
    else:
        try:
            table = counted(traced, chosen)
        except TooLarge as error:
            notes = (f"influence is that of {SAMPLED_ELEMENTS:,} sampled elements: {error}",)
            table = counted_sample(traced, chosen, SAMPLED_ELEMENTS)
    rows = iter(table.rows)
    cut = {key: tuple(islice(rows, len(some))) for key, some in parts.items()}
    return {key: replace(table, rows=some) for key, some in cut.items()}, notes


def _kinds(traced: TracedProgram) -> dict[str, str | None]:
    """The kinds of components in a report, by their key there. The first is the default of
    ``influence()``, except that whole tensors have no labelled slices.
    """
    blocks, whole = traced.program.blocks, traced.granularity == "operator"
    inside = any(block.place.module for block in blocks)
    kinds: dict[str, str | None] = {"": "operators" if whole and not inside else None}
    names = ["classes", "operators", *([] if whole else ["labels"])]
    names += [] if len(blocks) > ARGUMENTS_MAX_OPERATORS else ["arguments"]
    return kinds | {name: name for name in names}
