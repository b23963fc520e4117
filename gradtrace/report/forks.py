"""The forks of a report: how paths divide at each. Those between modules come first, then those
within one, each by information.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import nan

from gradtrace.errors import TooLarge
from gradtrace.measures.choosing import all_choices, choices
from gradtrace.report.model import Branch, Fork, Module
from gradtrace.report.tuning import FORK_MAX_BRANCHES, MAX_FORKS, SAMPLED_ELEMENTS
from gradtrace.tracing.choices import Choice, Choices
from gradtrace.tracing.traced_program import TracedProgram


def forks(
    traced: TracedProgram, modules: tuple[Module, ...], small: bool
) -> tuple[Fork, ...] | None:
    """The forks of a trace; None if there are too many to analyse. ``small``: of a sample."""
    scalar = traced.granularity == "scalar"
    try:
        drawn = SAMPLED_ELEMENTS, 0
        found = choices(traced, sample=drawn) if small and scalar else all_choices(traced)
    except TooLarge:
        return None
    return shown(found, {module.name: n for n, module in enumerate(modules)})


def shown(found: Choices, modules: Mapping[str, int]) -> tuple[Fork, ...]:
    """The forks as a report shows them; ``modules`` are their numbers by name."""
    rows: dict[str, list[Choice]] = {}
    for row in found.rows:
        rows.setdefault(row.fork, []).append(row)
    order = found.ranked()[:MAX_FORKS]
    return tuple(_fork(rows[name], found.pairs, modules) for name in order)


def _module(branch: str, modules: Mapping[str, int]) -> int:
    """The number of the module that a branch is named after; -1 if it is none."""
    return modules.get(branch.partition(" (call ")[0], -1)


def _fork(rows: list[Choice], pairs: int, modules: Mapping[str, int]) -> Fork:
    first, rest = rows, list[Choice]()
    if len(rows) > FORK_MAX_BRANCHES:
        ranked = sorted(rows, key=lambda row: -row.count.t)
        first, rest = ranked[: FORK_MAX_BRANCHES - 1], ranked[FORK_MAX_BRANCHES - 1 :]
    branches = [
        Branch(
            row.branch,
            _module(row.branch, modules),
            float(row.count.t),
            row.count.share,
            row.gradient.share,
            row.count.error(pairs),
        )
        for row in first
    ]
    if rest:
        elements, share, weighted = map(sum, zip(*map(_numbers, rest)))
        name = f"{len(rest):,} other branches"
        branches.append(Branch(name, -1, elements, share, weighted, nan))
    name, kind, times = rows[0].fork, rows[0].kind, rows[0].times
    base = name.partition(" (")[0].rpartition(".")[0]
    return Fork(name, kind, modules.get(base, -1), times, tuple(branches))


def _numbers(row: Choice) -> tuple[float, float, float]:
    return float(row.count.t), row.count.share, row.gradient.share
