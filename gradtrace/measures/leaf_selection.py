"""Influence on some leaves, or on one element of a leaf: nothing else is traced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import torch

from gradtrace.autodiff.names import unknown
from gradtrace.components.components import ComponentSelection, within
from gradtrace.errors import GradtraceError, UnknownName
from gradtrace.ir.passes.select_leaves import select_leaves
from gradtrace.tracing.counting import count_followed, counted, counted_rows, counted_sample
from gradtrace.tracing.coverage import Coverage, measured
from gradtrace.tracing.followed import follow_paths
from gradtrace.tracing.influence import Influence
from gradtrace.tracing.traced_program import TracedProgram, indices

Leaves = str | Sequence[str]
"""Leaves by name, by pattern (``"encoder.*"``) or by the module that they belong to."""

Index = int | Sequence[int]


def selected(traced: TracedProgram, of: Leaves) -> TracedProgram:
    """The trace of some leaves alone: only what leads to them is computed."""
    names = leaf_names(traced, of)
    values = {traced.leaves[name].value for name in names}
    return replace(
        traced,
        program=select_leaves(traced.program, values),
        names={value: name for value, name in traced.names.items() if value in values},
    )


def leaf_names(traced: TracedProgram, of: Leaves) -> list[str]:
    """The names of leaves, in the order of the model; an error for one that matches none."""
    found: set[str] = set()
    known = {name: name for name in traced.leaves} | dict(traced.gradients.aliases)
    for pattern in _patterns(of):
        hits = _matching(known, pattern)
        if not hits:
            raise UnknownName(unknown("leaf", pattern, known))
        found.update(known[name] for name in hits)
    return [name for name in traced.leaves if name in found]


def taking_part(traced: TracedProgram, of: Leaves, parameters: Sequence[str]) -> list[str]:
    """Those of the names and patterns that match a leaf of this loss; an error for one that matches
    no parameter of the model either.
    """
    known = [*traced.leaves, *traced.gradients.aliases]
    found = [pattern for pattern in _patterns(of) if _matching(known, pattern)]
    for pattern in _patterns(of):
        if pattern not in found and not _matching(parameters, pattern):
            leaf_names(traced, pattern)
    return found


def _patterns(of: Leaves) -> list[str]:
    patterns = [of] if isinstance(of, str) else list(of)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise UnknownName(
                f"of={pattern!r} is no name of a leaf; give names such as 'embed.weight', patterns "
                "such as 'encoder.*', or modules"
            )
    if not patterns:
        raise UnknownName("of=[] names no leaf")
    return patterns


def _matching(names: Iterable[str], pattern: str) -> list[str]:
    """The name itself, or those that the pattern matches, or those of leaves in that module."""
    every = list(names)
    if pattern in every:
        return [pattern]
    found = [name for name in every if fnmatchcase(name, pattern)]
    return found or [name for name in every if pattern and within(name, pattern)]


def influence_of(
    traced: TracedProgram,
    chosen: ComponentSelection,
    of: Leaves | None,
    index: Index | None = None,
    sample: tuple[int, int] | None = None,
    rows: tuple[float, int] | None = None,
) -> Influence:
    """The influence on some leaves (None: on all), or on the element ``index`` of one of them.
    ``sample``: over that many random elements, with a seed; ``rows``: of that part of the rows of
    large leaves, with a seed.
    """
    if rows is not None and (index is not None or sample is not None):
        raise GradtraceError("leaf_rows counts rows of whole leaves: leave sample and index out")
    if index is not None:
        name = only_leaf(traced, of)
        if sample is not None:
            raise GradtraceError(f"index names one element of {name}: leave sample out")
        return _counted_element(selected(traced, name), chosen, name, index)
    part = traced if of is None else selected(traced, of)
    if rows is not None:
        table = counted_rows(part, chosen, *rows)
    else:
        table = counted(part, chosen) if sample is None else counted_sample(part, chosen, *sample)
    return table if of is None else _noted(table, of if isinstance(of, str) else ", ".join(of))


def _noted(table: Influence, of: str) -> Influence:
    return replace(table, notes=(f"influence on {of} alone", *table.notes))


def _counted_element(
    traced: TracedProgram, chosen: ComponentSelection, name: str, index: Index
) -> Influence:
    """The influence on one element: its path to each of the losses, followed one by one."""
    if traced.granularity == "operator":
        raise GradtraceError(
            "at operator granularity a leaf is followed as a whole: leave index out, or trace with "
            "granularity='scalar'"
        )
    value, element = traced.element(name, index)
    drawn = {value: torch.tensor([element], device="cpu")}
    followed = (follow_paths(traced, drawn, pair, chosen) for pair in range(traced.pairs))
    table = count_followed(traced, chosen, followed, {value: 1})
    return _noted(table, f"{name}{list(indices(index)) or ''}")


def coverage_of(
    traced: TracedProgram,
    known: dict[tuple[object, ...], Coverage],
    of: Leaves | None,
    sample: int,
    seed: int,
) -> Coverage:
    """The coverage of a sample of elements of some leaves (None: of all); ``known`` has those that
    were measured before, which are available after an optimiser's step.
    """
    key = (traced.rule, sample, seed, None if of is None else tuple(leaf_names(traced, of)))
    if key not in known:
        traced.check_unchanged()
        known[key] = measured(traced if of is None else selected(traced, of), sample, seed)
    return known[key]


def only_leaf(traced: TracedProgram, of: Leaves | None) -> str:
    """The one leaf that an index is in; an error if there are several."""
    if of is None:
        raise GradtraceError("index names an element of a leaf: say which, of='embed.weight'")
    names = leaf_names(traced, of)
    if len(names) > 1:
        raise GradtraceError(
            f"index names an element of one leaf, and of={of!r} matches {len(names)}: "
            f"{', '.join(names[:8])}"
        )
    return names[0]
