"""The results of an experiment as JSON: ``results.json``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

from gradtrace.errors import GradtraceError
from gradtrace.experiments.harness.findings import Findings, Series, Table
from gradtrace.experiments.harness.statistics import steady
from gradtrace.io import atomic_files, container
from gradtrace.io.atomic_files import BadFile
from gradtrace.io.schemas import RESULTS
from gradtrace.io.strict_json import json_value, parse
from gradtrace.io.validation import SchemaMismatch

SCHEMA = 1
FILE = "results.json"
MOST = 100_000_000
"""The most bytes of a ``results.json``."""


def found(findings: Findings, name: str) -> dict[str, Any]:
    """Check findings and convert them to JSON values; non-finite numbers become null."""
    for table in findings.tables:
        _check_table(table, name)
    for plot in findings.plots:
        for series in plot.series:
            _check_series(series, name)
    try:
        data: dict[str, Any] = json.loads(json.dumps(json_value(asdict(findings), missing=True)))
    except (TypeError, ValueError) as error:
        raise GradtraceError(f"{name}: what conclude returned is not JSON: {error}") from error
    return data


def lead(experiment: object, data: Mapping[str, Any]) -> dict[str, str]:
    """What a page leads with: a sentence or two, and the names of a plot or drawing and of a table
    ("" if there is none).
    """
    drawn = [*(plot["name"] for plot in data["plots"]), *data["drawings"]]
    chosen, tell = getattr(experiment, "FIGURE", ""), getattr(experiment, "headline", None)
    told = tell(data["facts"]) if tell is not None and data["plots"] else ""
    figure = chosen if chosen in drawn else (drawn or [""])[0]
    titles = [table["title"] for table in data["tables"]]
    wanted = getattr(experiment, "TABLE", "")
    table = wanted if wanted in titles else (titles or [""])[0]
    answer = told or sentences(data["sentence"])[0]
    return {"headline": answer, "figure": figure, "table": table}


def sentences(text: str) -> list[str]:
    """The sentences of a text, each with the full stop that ends it.

    >>> sentences("It takes 1.5 s, e.g. here, as Du et al. say. More follows.")
    ['It takes 1.5 s, e.g. here, as Du et al. say.', 'More follows.']
    """
    return re.split(r"(?<=[.!?])(?<!\.\.)(?<!e\.g\.)(?<! al\.) (?=[^a-z])", text)


def _check_table(table: Table, name: str) -> None:
    for row in table.rows:
        if len(row) != len(table.columns):
            raise GradtraceError(
                f"{name}: the table {table.title!r} has {len(table.columns)} columns, but a row of "
                f"{len(row)}"
            )


def _check_series(series: Series, name: str) -> None:
    sizes = {len(part) for part in (series.x, series.y)}
    sizes |= {len(part) for part in (series.low, series.high) if len(part)}
    if len(sizes) > 1 or bool(len(series.low)) != bool(len(series.high)):
        raise GradtraceError(
            f"{name}: the series {series.label!r} has {len(series.x)} x, {len(series.y)} y, "
            f"{len(series.low)} low and {len(series.high)} high"
        )


def text(data: Mapping[str, Any]) -> str:
    """The content of the file."""
    return json.dumps(data, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def read(path: Path) -> dict[str, Any] | None:
    """Read a file; None if it is not of this schema."""
    try:
        data = parse(atomic_files.content(path, MOST))
        RESULTS(data)
    except (BadFile, SchemaMismatch):
        return None
    return dict(data) if data["schema"] == SCHEMA else None


def write(path: Path, content: str | bytes) -> None:
    """Write a file atomically."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        container.put(path, content)
    except (OSError, BadFile) as error:
        why = getattr(error, "strerror", None) or error
        raise GradtraceError(
            f"cannot write {path}: {why}; what was measured is kept: run the same command again "
            "when there is room, or with an --out that you may write to"
        ) from error


def name(data: Mapping[str, Any]) -> str:
    """The name of a run: the experiment's, or that of ``--name``, for runs on other data."""
    return str(data.get("name") or data["experiment"])


# Text ---------------------------------------------------------------------------------------------


def told(value: Any) -> str:
    """A table cell as text: 1,234, 0.0123, or – for None and non-finite numbers."""
    if value is None or (isinstance(value, float) and not isfinite(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{steady(value):,.0f}" if 1e4 <= abs(value) < 1e9 else f"{steady(value):.4g}"
    return str(value)


def numeric(table: Mapping[str, Any], column: int) -> bool:
    """Whether a column of a table contains numbers, which are right-aligned."""
    cells = [row[column] for row in table["rows"] if row[column] is not None]
    return bool(cells) and all(isinstance(cell, (int, float)) for cell in cells)


def facts(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """How an experiment was run, as (name, text) pairs."""
    told_machines = "; ".join(
        f"{m['processor']}, {m['cores']} cores ({m['system']})" for m in data["machines"]
    )
    told_versions = "; ".join(
        ", ".join(f"{name} {number}" for name, number in found.items())
        for found in data["versions"]
    )
    settings = ", ".join(f"{k} = {json.dumps(v)}" for k, v in data["settings"].items())
    return [
        ("Form", f"{data['form']}: {settings}"),
        ("Seeds", f"{data['seeds']:,}"),
        ("Work", f"{data['cells']:,} cells, {minutes(data['seconds'])} in all, one thread each"),
        ("Machine", told_machines),
        ("Versions", told_versions),
        ("Date", data["date"]),
    ]


def minutes(seconds: float) -> str:
    """``12.3 s`` or ``4.5 minutes``."""
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} minutes"
