"""``gradtrace trace --measure NAME``: the other measures of a trace, as tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from typer import Option

from gradtrace.cli.influence import DEFAULT_TOP
from gradtrace.cli.printing import as_text, write_table
from gradtrace.errors import UnknownName, did_you_mean

if TYPE_CHECKING:
    from gradtrace.components import components as component_names
    from gradtrace.io.table import TextTable
    from gradtrace.traced import Trace


class Question(NamedTuple):
    """What is measured: of which components, on which leaves (None: all), with which power."""

    components: component_names.Components
    of: Sequence[str] | None
    power: float


MEASURES: dict[str, Callable[[Trace, Question], Any]] = {
    "decompose": lambda trace, asked: trace.decompose(asked.components),
    "mass": lambda trace, asked: trace.mass(asked.components, asked.power),
    "choices": lambda trace, asked: trace.choices(("paths", "gradient", "mass"), of=asked.of),
    "agreement": lambda trace, asked: trace.agreement(asked.components),
    "spectrum": lambda trace, asked: trace.spectrum("length", asked.power),
    "branches": lambda trace, asked: trace.spectrum("branches", asked.power),
}
"""By name, in the order of the help."""


def names(incomplete: str) -> list[str]:
    """Shell completion."""
    return [name for name in MEASURES if name.startswith(incomplete)]


Measured = Annotated[
    list[str] | None,
    Option(
        "--measure",
        metavar="NAME",
        help="Measure more. decompose: the gradient through each component, exactly and with its "
        "sign; mass: the share of all paths by |weight|; choices: how paths, gradient and mass "
        "divide at each fork; agreement: whether the rules find the same; spectrum, branches: "
        "mass and gradient by length of paths, or by residual branches taken. May be given again.",
        autocompletion=names,
    ),
]
Power = Annotated[
    float,
    Option(
        metavar="P",
        help="For mass, spectrum and branches: a path counts as |weight| to this power; the "
        "larger, the more the heaviest count.",
    ),
]


def checked(wanted: Sequence[str]) -> list[str]:
    """The names, each once, or an error for one that is none."""
    for name in wanted:
        if name not in MEASURES:
            raise UnknownName(f"--measure {name!r} is no measure{did_you_mean(name, MEASURES)}")
    return list(dict.fromkeys(wanted))


def measured(
    trace: Trace, wanted: Sequence[str], asked: Question, begin: Callable[[str], None]
) -> dict[str, TextTable]:
    """The tables by name; ``begin`` is told of each."""
    found: dict[str, TextTable] = {}
    for name in wanted:
        begin(f"measuring {name}")
        found[name] = as_text(MEASURES[name](trace, asked))
    return found


RANKED = ("score", "share")
"""Columns whose largest numbers tell most; tables without one are cut in their own order."""


def _shortened(table: TextTable, most: int | None) -> TextTable:
    """The rows that tell most, the largest first; the table as it is if it has no more."""
    if most is None or len(table.rows) <= most:
        return table
    names = [column.name for column in table.columns]
    return table.top(most, next((name for name in RANKED if name in names), None))


def write_measure(table: TextTable, top: int | None) -> None:
    """Print the table, or those of its rows that tell most."""
    shown = _shortened(table, top or DEFAULT_TOP)
    more = len(table.rows) - len(shown.rows)
    left = (f"… and {more:,} more rows (--top {len(table.rows)} shows all)",) if more else ()
    write_table(replace(shown, notes=(*left, *table.notes)))


def data(table: TextTable, top: int | None) -> dict[str, Any]:
    """The table for ``--json``."""
    return {"rows": _shortened(table, top).to_dicts(), "notes": list(table.notes)}
