"""Output of commands: tables, JSON, remarks; all text is made printable here."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from gradtrace.errors import printable

if TYPE_CHECKING:
    from gradtrace.table import Table

Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")]
Top = Annotated[int, typer.Option(help="Show so many rows of a table.", min=1)]


def write(text: object, file: TextIO | None = None) -> None:
    """Print lines on stdout, or to a file."""
    for line in str(text).split("\n"):
        print(printable(line), file=file)


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


def progress(what: str) -> None:
    """Say what is being done, if somebody watches."""
    if sys.stderr.isatty():
        say(f"gradtrace: {what} …")
