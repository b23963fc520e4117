"""The rows of a finished run as one file beside its page: ``NAME.rows.jsonl.gz``.

The first line says how the run was made, each other line is a cell with its result and the seconds
it took, in the order of the cells::

    {"schema": 1, "experiment": "induction", "form": "full", "settings": {...}, "seeds": 20, ...}
    {"cell": {...}, "result": {...}, "seconds": 0.8}

Equal runs make equal files: the header of gzip holds no time and no name. ``gradtrace experiment
NAME --rows FILE`` makes every table and figure again from such a file, and measures nothing. With
``--rows`` given again, rows of later files take the place of those of the same cell, and cells that
the first had not are added.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gradtrace.errors import GradtraceError
from gradtrace.experiments.harness.findings import Cell, Row
from gradtrace.experiments.harness.journal import JournalEntry, key
from gradtrace.io import atomic_files, jsonl, schemas, tuning
from gradtrace.io.atomic_files import WRITER_HINT, BadFile
from gradtrace.io.strict_json import parse_encodable, weight
from gradtrace.io.validation import SchemaMismatch

FILE = "rows.jsonl.gz"
MOST = 100_000_000
"""The most bytes of a file."""

RAN = (
    *("schema", "experiment", "name", "command", "form", "settings", "seeds", "cells", "seconds"),
    *("machines", "versions", "date"),
)
"""The fields of ``results.json`` that tell how a run was made."""


class PublishedRows(NamedTuple):
    """How a run was made, its rows, and the seconds that each took."""

    ran: dict[str, Any]
    rows: list[Row]
    seconds: list[float]

    @property
    def made(self) -> Iterator[tuple[Cell, JournalEntry]]:
        """Cells with their results and seconds."""
        for row, seconds in zip(self.rows, self.seconds):
            yield row.cell, JournalEntry(row.result, seconds)


def packed(ran: Mapping[str, Any], rows: Iterable[tuple[Cell, JournalEntry]]) -> bytes:
    """The content of the file."""
    out = io.BytesIO()
    with gzip.GzipFile("", "wb", compresslevel=9, fileobj=out, mtime=0) as file:
        file.write(jsonl.line_of({name: ran[name] for name in RAN}))
        for cell, entry in rows:
            row = {"cell": cell, "result": entry.result, "seconds": round(entry.seconds, 6)}
            file.write(jsonl.line_of(row, nan=True))
    return out.getvalue()


def unpacked(path: Path) -> PublishedRows:
    """The content of a file; raises an error that says what is wrong with it."""
    found: list[Row] = []
    seconds: list[float] = []
    ran: dict[str, Any] = {}
    taken = 0  # estimated bytes of memory
    for number, line in enumerate(_lines(path), 1):
        taken += weight(line.decode(errors="replace"))
        if taken > tuning.JSON_MAX_BYTES or number > 1 + ran.get("cells", number):
            raise GradtraceError(f"{path} has more rows than it says, or than fit: {WRITER_HINT}")
        try:
            row = parse_encodable(line, nan=number > 1)
            schemas.ROWS["published" if number == 1 else "row"](row)
        except SchemaMismatch as error:
            raise GradtraceError(f"{path}, line {number} is damaged ({error})") from error
        if number == 1:
            ran = dict(row)
        else:
            found.append(Row(row["cell"], row["result"]))
            seconds.append(row["seconds"])
    if ran.get("cells") != len(found):
        raise GradtraceError(f"{path} is not whole: give a file that --docs wrote")
    return PublishedRows({name: ran[name] for name in RAN}, found, seconds)


def merged(runs: Sequence[PublishedRows], cells: Sequence[Cell]) -> PublishedRows:
    """One run of several, the later of which measured some cells again or more of them; ``cells``
    are those that the settings and seeds of the first ask for.
    """
    first = runs[0].ran
    found = {key(cell): entry for run in runs for cell, entry in run.made}
    missing = sum(key(cell) not in found for cell in cells)
    if missing or len(found) > len(cells):
        raise GradtraceError(
            f"these rows do not make one run: {missing} of the {len(cells)} cells of "
            f"`{first['command']}` are missing, and {len(found) - len(cells) + missing} rows are "
            "of other cells; the first --rows must be the file of the whole run, the others of "
            "runs with its settings"
        )
    made = [found[key(cell)] for cell in cells]
    seconds = [entry.seconds for entry in made]
    ran = first | {
        "cells": len(cells),
        "seconds": round(sum(seconds), 2),
        "machines": distinct(one for run in runs for one in run.ran["machines"]),
        "versions": distinct(one for run in runs for one in run.ran["versions"]),
        "date": ", ".join(sorted({run.ran["date"] for run in runs})),
    }
    rows = [Row(cell, entry.result) for cell, entry in zip(cells, made)]
    return PublishedRows(ran, rows, seconds)


def distinct(found: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without repetitions."""
    return [json.loads(text) for text in dict.fromkeys(json.dumps(part) for part in found)]


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, unpacked one by one: a small file may hold very long ones."""
    try:
        with atomic_files.reading(path) as raw, gzip.GzipFile(fileobj=raw) as file:
            yield from jsonl.split(io.BufferedReader(file))
    except BadFile as error:
        raise GradtraceError(str(error)) from error
