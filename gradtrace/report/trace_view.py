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
from gradtrace.report import model
from gradtrace.report.building import view
from gradtrace.report.findings import diagnosis, undiagnosed
from gradtrace.report.forks import forks
from gradtrace.report.model import View
from gradtrace.report.source import Source
from gradtrace.report.tuning import (
    COVERED_ELEMENTS,
    FULL,
    FULL_VIEW_MAX_ELEMENTS,
    FULL_VIEW_MAX_OPERATORS,
    SAMPLED_ELEMENTS,
    SMALL,
)
from gradtrace.table import Table
from gradtrace.tracing.counting import component_finder, counted, counted_sample, drawn_of
from gradtrace.tracing.coverage import coverage_of
from gradtrace.tracing.influence import table_of
from gradtrace.tracing.traced_program import TracedProgram

SMALL_VIEW_NOTE = (
    f"this is a smaller view, for a notebook: influence of {SAMPLED_ELEMENTS:,} sampled elements, "
    "and fewer cells and paths; trace.report('report.html') writes all"
)

Tables = tuple[dict[str, Table], tuple[str, ...]]
"""Influence by kind of components, and notes on it."""


def is_large(program: Program) -> bool:
    """Whether a notebook shows the ``small`` view of a program."""
    elements = sum(leaf.tensor.numel() for leaf in program.leaves)
    return elements > FULL_VIEW_MAX_ELEMENTS or len(program.blocks) > FULL_VIEW_MAX_OPERATORS


def view_of(
    traced: TracedProgram,
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
    found = _coverage(coverage_of(traced, min(sample, COVERED_ELEMENTS), seed))
    notes += found.words
    source = Source(traced, tables, (*traced.notes, *notes))
    made = view(source, sample, seed, SMALL if small else FULL)
    divided = forks(traced, made.modules, small)
    modules = {each.name: n for n, each in enumerate(made.modules)}
    findings = diagnosis(diagnosed, modules) or undiagnosed(
        traced.silent, (*traced.names.values(), *traced.gradients.aliases), modules
    )
    return replace(made, coverage=found, choices=divided, diagnosis=findings)


def _coverage(found: Table) -> model.Coverage:
    every = found["all"]
    names = ("median", "lower", "upper", "opposite", "cancelled")
    median, lower, upper, opposite, cancelled = (float(every[name]) for name in names)
    shares = median, lower, upper, opposite, cancelled
    return model.Coverage(*shares, every["elements"], found.notes)


def _tables(traced: TracedProgram, small: bool) -> Tables:
    """Influence for every kind of component in the program, counted in one pass. ``small``: over a
    sample of elements.
    """
    finder, parts = component_finder(traced), dict[str, list[Component]]()
    for key, kind in KINDS.items():
        with contextlib.suppress(UnknownName):  # the program has none of this kind
            parts[key] = finder.choose(kind).components
    chosen = ComponentSelection([c for some in parts.values() for c in some], finder.component_bits)
    notes, drawn = tuple[str, ...](), drawn_of(traced, SAMPLED_ELEMENTS if small else "auto")
    if drawn is None:
        try:
            found = counted(traced, chosen)
        except TooLarge as error:
            notes, drawn = (f"influence is that of {SAMPLED_ELEMENTS:,} elements: {error}",), 10_000
    elif small:
        notes = (SMALL_VIEW_NOTE,)
    about: dict[str, Any] = {"rule": traced.rule}
    if drawn is not None:
        found, about["sampled"] = counted_sample(traced, chosen, drawn), drawn
    rows = iter(found.rows)
    cut = {key: replace(found, rows=tuple(islice(rows, len(x)))) for key, x in parts.items()}
    return {key: table_of(some, {**about, "by": key}) for key, some in cut.items()}, notes


KINDS = {"": "modules", "operators": "operators", "labels": "labels"}
"""The kinds of components in a report, by their key there."""
