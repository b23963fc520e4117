"""Experiments of several parts, each with its own cells, measure and conclusion."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from gradtrace.experiments.harness.findings import Cell, Findings, Result, Row, Tick


class ResultPart(Protocol):
    """One part of an experiment, with an experiment's interface."""

    def cells(self, settings: Mapping[str, Any], seeds: int) -> list[Cell]:
        """Its independent pieces of work."""

    def measure(self, cell: Cell, tick: Tick) -> Result:
        """Measure one cell."""

    def conclude(self, rows: Sequence[Row]) -> Findings:
        """The findings from all rows."""


def all_cells(
    parts: Mapping[str, ResultPart], settings: Mapping[str, Any], seeds: int
) -> list[Cell]:
    """The cells of all parts that have settings, each with the name of its part."""
    return [
        {"part": name} | cell
        for name, part in parts.items()
        if name in settings
        for cell in part.cells(settings[name], seeds)
    ]


def all_findings(parts: Mapping[str, ResultPart], rows: Sequence[Row]) -> Findings:
    """The findings of all parts that have rows, concatenated; facts by part.

    Rows are sorted, so that a part gets them in the same order in every run.
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
