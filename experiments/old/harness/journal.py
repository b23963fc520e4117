"""The journal of an experiment: append-only files of measured rows, which survive a killed run.

Each process that measures writes its own file in ``rows/``: a header, then one line for each cell::

    {"schema": 1, "experiment": "layers", "form": "quick", "settings": {...}, "code": "9f2c", ...}
    {"cell": {...}, "result": {...}, "seconds": 0.8}

Rows of other code (see ``code``) do not count: their cells are measured again. A row is on disk
before the next cell begins. An incomplete last line (the process was killed while it wrote) is
ignored. Nothing is ever deleted: ``set_aside`` renames the folder.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from gradtrace.errors import GradtraceError
from gradtrace.experiments.harness.findings import Cell, Result
from gradtrace.io import jsonl, schemas
from gradtrace.io.strict_json import parse_encodable
from gradtrace.io.validation import SchemaMismatch

SCHEMA = 1
ASKED = ("experiment", "form", "settings", "files")
"""Fields of a header that must be equal for rows to belong to one run. The number of seeds is not
among them: cells are independent, so a run with more seeds continues one with fewer.
"""


class OtherSettings(GradtraceError):
    """A folder contains rows of other settings."""


class JournalEntry(NamedTuple):
    """A result with the seconds it took."""

    result: Result
    seconds: float


def key(cell: Cell) -> str:
    """A cell as canonical text, the same for equal cells."""
    return json.dumps(cell, sort_keys=True)


@dataclass
class Journal:
    """The rows of one experiment in ``folder/rows``."""

    folder: Path
    header: Mapping[str, Any]
    stale: set[str] = field(default_factory=set, repr=False)  # cells with rows of other code
    _file: BinaryIO | None = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "header": self.header, "stale": set(), "_file": None}

    def __del__(self) -> None:
        self.close()

    @property
    def rows(self) -> Path:
        """The folder of the files."""
        return self.folder / "rows"

    def read(self) -> tuple[dict[str, JournalEntry], list[dict[str, Any]]]:
        """All entries by the key of their cell, and the headers of their files.

        If a cell was measured twice, by two concurrent runs, the first in the order of file names
        counts.
        """
        found: dict[str, JournalEntry] = {}
        headers = []
        with self._about("read"):
            for path in sorted(self.rows.glob("*.jsonl")):
                lines = _lines(path)
                header = next(lines, None)
                if header is None:
                    continue  # killed before the header was complete
                self._check(header)
                if header.get("code") != self.header.get("code"):
                    self.stale |= {key(row["cell"]) for row in lines}
                    continue
                headers.append(header)
                for row in lines:
                    entry = JournalEntry(row["result"], row["seconds"])
                    found.setdefault(key(row["cell"]), entry)
        return found, headers

    def append(self, cell: Cell, entry: JournalEntry) -> None:
        """Write a row and flush it to disk."""
        line = _line({"cell": cell, "result": entry.result, "seconds": round(entry.seconds, 6)})
        with self._about("write to"):
            if self._file is None:
                self.rows.mkdir(parents=True, exist_ok=True)
                path = self.rows / f"{os.getpid()}-{secrets.token_hex(4)}.jsonl"
                self._file = open(path, "xb", buffering=0)  # noqa: SIM115  # as long as the process
                jsonl.append(self._file, _line({"schema": SCHEMA, **self.header}))
            jsonl.append(self._file, line)

    def close(self) -> None:
        """Close the file; a later row begins a new one."""
        if self._file is not None:
            file, self._file = self._file, None
            with suppress(OSError):
                file.close()

    def set_aside(self) -> Path | None:
        """Rename the folder of rows, to start over; its new path."""
        if not self.rows.exists():
            return None
        self.close()
        number = 1
        while (aside := self.folder / f"rows.{number}").exists():
            number += 1
        with self._about("write to"):
            self.rows.rename(aside)
        return aside

    def _check(self, header: dict[str, Any]) -> None:
        wanted = json.loads(json.dumps({name: self.header.get(name) for name in ASKED}))
        if other := _differences({name: header.get(name) for name in ASKED}, wanted):
            raise OtherSettings(
                f"{self.folder} holds rows of other settings ({other}); --restart sets them aside "
                "and begins anew, another --out leaves them where they are"
            )

    @contextmanager
    def _about(self, doing: str) -> Iterator[None]:
        """Report errors of reading or writing. After a failed write the file is closed: its torn
        last line is ignored, and a further row would begin a new file.
        """
        try:
            yield
        except OSError as error:
            self.close()
            raise GradtraceError(
                f"cannot {doing} {self.rows}: {error.strerror or error}; the rows written before "
                "are kept: free some space, or choose an --out that you may write to, then run "
                "the same command again"
            ) from error


def _line(data: dict[str, Any]) -> bytes:
    try:
        return jsonl.line_of(data, nan=True)
    except (TypeError, ValueError) as error:
        raise GradtraceError(
            f"a row must be JSON (numbers, texts, lists, dicts): {error}"
        ) from None


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The complete lines of a file, parsed and validated."""
    for number, line in enumerate(jsonl.lines(path), 1):
        if not line.endswith(b"\n"):
            return  # an incomplete last line
        try:
            row = parse_encodable(line, nan=True)
            if number == 1:
                _check_version(row, path)
            schemas.ROWS["header" if number == 1 else "row"](row)
        except SchemaMismatch as error:
            raise GradtraceError(
                f"{path}, line {number} is damaged ({error}); delete that line to measure its cell "
                "again, or --restart to set all rows aside"
            ) from error
        yield row


def _check_version(header: Any, path: Path) -> None:
    """Raise an error for a file of another schema version."""
    version = header.get("schema") if isinstance(header, dict) else None
    if type(version) is int and version != SCHEMA:
        raise GradtraceError(
            f"{path} was written by another version of gradtrace (schema {str(version)[:20]}, not "
            f"{SCHEMA}); --restart sets it aside"
        )


def _differences(there: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """All differences as text, such as ``rounds 3, not 9``."""
    told = []
    for name in sorted({*there, *wanted}):
        a, b = there.get(name), wanted.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            told += [_differences(a, b)]
        elif a != b:
            told += [f"{name} {_short(a)}, not {_short(b)}"]
    return "; ".join(text for text in told if text)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
