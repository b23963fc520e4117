"""Output of commands: tables, JSON, remarks, progress; all text is made printable here."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradtrace.errors import printable

if TYPE_CHECKING:
    from gradtrace.table import Table

Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")]
Top = Annotated[int, typer.Option(help="Show so many rows of a table.", min=1)]


def write(text: object) -> None:
    """Print lines on stdout."""
    for line in str(text).split("\n"):
        print(printable(line))


def write_table(table: Table, top: int) -> None:
    """Print the first rows of a table, and its notes."""
    more = len(table) - top
    left = (f"… and {more:,} more rows (--top {len(table)} shows all)",) if more > 0 else ()
    print(replace(table.top(top), notes=(*left, *table.notes)).text(None, 100))


def records(table: Table) -> dict[str, Any]:
    """A table for ``--json``: a dict for each row, by column; and its notes."""
    shown = [column.name for column in table.columns if column.shown]
    rows = [{name: row[name] for name in shown} for row in table]
    return {**table.about, "rows": rows, "notes": table.notes}


def write_json(data: Mapping[str, Any]) -> None:
    """Print JSON on stdout; numbers that are not finite are texts."""
    from gradtrace.files import json_value

    text = json.dumps(json_value(data), indent=2, allow_nan=False)
    print(text.replace("\x7f", "\\u007f"))  # the one control character that JSON does not escape


def say(line: str) -> None:
    """Print a remark on stderr, as one line; if nothing can be written there, nothing is."""
    with suppress(OSError):
        print(printable(" ".join(line.split())), file=sys.stderr, flush=True)


@contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """Show what is being done on stderr, if that is a terminal; call it to begin another task."""
    from rich.console import Console

    colours = None if os.environ.get("NO_COLOR") else "auto"
    console = Console(file=sys.stderr, color_system=colours)  # type: ignore[arg-type]
    if not console.is_terminal or console.is_dumb_terminal:
        yield lambda what: None
        return
    with console.status(printable(what)) as status:
        yield lambda what: status.update(printable(what))


@contextmanager
def stdout_is_stderr() -> Iterator[None]:
    """Send file descriptor 1 to stderr, so that what a user's script, its processes and C code
    print does not mix with our results.
    """
    try:
        sys.stdout.flush()
        kept = os.dup(1)
    except OSError:  # closed
        yield
        return
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
