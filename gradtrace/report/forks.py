"""The forks of a report: how paths divide at each. Those between modules come first, then those
within one, each by information.
"""

from __future__ import annotations

from math import nan

from gradtrace.errors import TooLarge, UnknownName
from gradtrace.report.model import Branch, Fork, Module
from gradtrace.report.tuning import FORK_MAX_BRANCHES, MAX_FORKS, SAMPLED_ELEMENTS
from gradtrace.table import Row
from gradtrace.tracing.counting import influence_of
from gradtrace.tracing.traced_program import TracedProgram


def forks(
    traced: TracedProgram, modules: tuple[Module, ...], small: bool
) -> tuple[Fork, ...] | None:
    """The forks of a trace; None if there are too many to analyse. ``small``: of a sample."""
    try:
        table = influence_of(traced, "forks", sample=SAMPLED_ELEMENTS if small else "auto")
    except TooLarge:
        return None
    except UnknownName:  # there is none
        return ()
    rows: dict[str, list[Row]] = {}
    for row in table:
        rows.setdefault(row.name.partition("/")[0], []).append(row)
    numbers = {module.name: n for n, module in enumerate(modules)}
    errors = table.errors
    return tuple(_fork(*each, errors, numbers) for each in list(rows.items())[:MAX_FORKS])


def _module(branch: str, modules: dict[str, int]) -> int:
    """The number of the module that a branch is named after; -1 if it is none."""
    return modules.get(branch.partition(" (call ")[0], -1)


def _fork(name: str, rows: list[Row], errors: dict[str, float], modules: dict[str, int]) -> Fork:
    first, rest = rows, list[Row]()
    if len(rows) > FORK_MAX_BRANCHES:
        ranked = sorted(rows, key=lambda row: -row.through)
        first, rest = ranked[: FORK_MAX_BRANCHES - 1], ranked[FORK_MAX_BRANCHES - 1 :]
    branches = []
    for row in first:
        branch, numbers = row.name.partition("/")[2], (float(row.through), row.share, row.weighted)
        branches.append(Branch(branch, _module(branch, modules), *numbers, errors[row.name]))
    if rest:
        elements, share, weighted = (
            float(sum(row[name] for row in rest)) for name in ("through", "share", "weighted")
        )
        name_of_rest = f"{len(rest):,} other branches"
        branches.append(Branch(name_of_rest, -1, elements, share, weighted, nan))
    base = name.partition(" (")[0].rpartition(".")[0]
    return Fork(name, "sum", modules.get(base, -1), 1, tuple(branches))
