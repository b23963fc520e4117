"""An experiment of several parts, each with cells, a measure and a conclusion of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from gradtrace.experiments.harness.findings import Cell, Findings, Result, Row, Tick


class ResultPart(Protocol):
    """An experiment in the small."""

    def cells(self, settings: Mapping[str, Any], seeds: int) -> list[Cell]:
        """Its pieces of work."""

    def measure(self, cell: Cell, tick: Tick) -> Result:
        """One of them, done."""

    def conclude(self, rows: Sequence[Row]) -> Findings:
        """What came out."""


def all_cells(
    parts: Mapping[str, ResultPart], settings: Mapping[str, Any], seeds: int
) -> list[Cell]:
    """Those of all parts that have settings; each says its part."""
    return [
        {"part": name} | cell
        for name, part in parts.items()
        if name in settings
        for cell in part.cells(settings[name], seeds)
    ]


def all_findings(parts: Mapping[str, ResultPart], rows: Sequence[Row]) -> Findings:
    """The findings of all parts that have rows, one after another; facts by part.

    A part gets its rows in the same order however they come.
    """
    ordered = sorted(rows, key=lambda row: json.dumps(row.cell, sort_keys=True))
    found = {
        name: part.conclude([row for row in ordered if row.cell["part"] == name])
        for name, part in parts.items()
        if any(row.cell["part"] == name for row in ordered)
    }
    return Findings(
        " ".join(one.sentence for one in found.values()),
        tuple(table for one in found.values() for table in one.tables),
        tuple(plot for one in found.values() for plot in one.plots),
        {name: one.facts for name, one in found.items()},
    )
