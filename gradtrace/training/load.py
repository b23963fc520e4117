"""``gradtrace.load``: reads whatever the library writes, by the ending of its name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradtrace.errors import BadFile
from gradtrace.files import read_json
from gradtrace.report.saving import load_trace
from gradtrace.table import Table
from gradtrace.training.history import read
from gradtrace.training.incident import load_incident


def load(path: str | os.PathLike[str]) -> Any:
    """Read a file that gradtrace has written.

    Args:
        path: A trace (``.gradtrace``), a table (``.json``), the run of a Monitor (``.jsonl``) or an
            incident (``.pt``).

    Returns:
        The trace as saved, the ``Table``, the run's history as a ``Table``, or the ``Incident``,
        whose ``diagnose(model, loss_fn)`` asks again what was wrong.

    >>> from tempfile import TemporaryDirectory
    >>> from gradtrace.table import Column, Table
    >>> with TemporaryDirectory() as folder:
    ...     Table("Heads", (Column("head"), Column("share", "share")), (("0", 0.5),)).save(
    ...         f"{folder}/heads.json")
    ...     load(f"{folder}/heads.json")["0"].share
    0.5
    """
    ending = Path(path).suffix
    if ending not in READERS:
        known = ", ".join(READERS)
        raise BadFile(f"{os.fspath(path)!r} is none of {known}, which gradtrace writes")
    return READERS[ending](path)


def _table(path: str | os.PathLike[str]) -> Table:
    data = read_json(path)
    try:
        if data["gradtrace"] == "table":
            return Table.from_dict(data)
    except (KeyError, TypeError, ValueError):  # it is damaged
        pass
    raise BadFile(f"{os.fspath(path)!r} holds no whole table: give a file that table.save wrote")


READERS: dict[str, Callable[[Any], Any]] = {
    ".gradtrace": load_trace,
    ".json": _table,
    ".jsonl": lambda path: read(path)[0],
    ".pt": load_incident,
}
