"""Output of commands: tables, JSON, remarks, progress.

All text is passed through ``printable`` here, whatever names and files it comes from.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from gradtrace.errors import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from gradtrace.io.table import TextTable as Data

PIPE_WIDTH = 160
STYLES = {"wrong": "bold red", "kink": "yellow", "ok": "green", "unreached": "dim"}
"""Styles of verdicts."""

Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")]


def console(stderr: bool = False) -> Console:
    """A console without colour if NO_COLOR is set, and of fixed width if it is not a terminal."""
    from rich.console import Console

    class Printable(Console):
        def print(self, *objects: Any, **options: Any) -> None:
            """Print objects; strings are escaped, tables contain printable text already."""
            super().print(*(printable(x) if isinstance(x, str) else x for x in objects), **options)

    stream = sys.stderr if stderr else sys.stdout
    return Printable(
        file=stream,
        color_system=None if os.environ.get("NO_COLOR") else "auto",
        width=None if stream.isatty() else PIPE_WIDTH,
        markup=False,
        highlight=False,
        emoji=False,
    )


def write(line: str) -> None:
    """Print a line on stdout, without wrapping."""
    console().print(line, soft_wrap=True)


def table(
    rows: Sequence[Sequence[str]], right: Iterable[int] = (), styles: dict[str, str] | None = None
) -> Table:
    """A table of text, whose first row is the header; cells found in ``styles`` are coloured."""
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    found = Table(box=SIMPLE, pad_edge=False)
    numbers = set(right)
    for k, title in enumerate(map(printable, rows[0])):
        found.add_column(title, justify="right" if k in numbers else "left", overflow="fold")
    for row in rows[1:]:
        cells = map(printable, row)
        found.add_row(*(Text(cell, style=(styles or {}).get(cell, "")) for cell in cells))
    return found


def write_table(data: Data) -> None:
    """Print a table: its title, all rows, and its notes."""
    out = console()
    if data.title:
        out.print(data.heading, soft_wrap=True)
    right = [k for k, column in enumerate(data.columns) if column.side == "right"]
    out.print(table(data.lines(None), right))
    for note in data.words(None):
        out.print(note, soft_wrap=True)


def as_text(found: Any) -> Data:
    """The table that a result prints."""
    from gradtrace.io.table import TextColumn, TextTable
    from gradtrace.table import Table

    shown = found if isinstance(found, Table) else found.table()
    if not isinstance(shown, Table):
        return cast("Data", shown)
    columns = [column for column in shown.columns if column.shown]
    rows = (tuple(row[column.name] for column in columns) for row in shown)
    rows = (tuple(None if value != value else value for value in row) for row in rows)
    named = tuple(TextColumn(column.name, column.kind, column.unit) for column in columns)
    return TextTable(shown.heading, named, tuple(rows), shown.notes)


def write_json(data: dict[str, Any]) -> None:
    """Print JSON on stdout; non-finite numbers are strings."""
    from gradtrace.io.strict_json import json_value

    text = json.dumps(json_value(data), indent=2, allow_nan=False)
    print(text.replace("\x7f", "\\u007f"))  # the one control character that JSON does not escape


def say(line: str) -> None:
    """Print a remark on stderr, as one line; if nothing can be written there, nothing is."""
    with suppress(OSError):
        print(printable(" ".join(line.split())), file=sys.stderr, flush=True)


class ProgressBar:
    """Progress of a task as a bar or a spinner, drawn by ``update``; see rich's Progress.update."""

    def __init__(self, update: Callable[..., None]) -> None:
        self._update = update

    def begin(self, what: str) -> None:
        """Begin another task."""
        self._update(description=printable(what), completed=0)

    def advance(self, done: int, total: int) -> None:
        """Update the progress of the task."""
        self._update(completed=done, total=total)


@contextmanager
def working(what: str) -> Iterator[ProgressBar]:
    """Show progress on stderr, if that is a terminal that can erase it again."""
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    out = console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
    )
    off = not out.is_terminal or out.is_dumb_terminal
    with Progress(*columns, console=out, transient=True, disable=off) as bar:
        yield ProgressBar(partial(bar.update, bar.add_task(printable(what), total=None)))
