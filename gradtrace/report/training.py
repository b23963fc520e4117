"""The data of a training run in a report: influence over steps, and step times."""

from __future__ import annotations

import os
from math import nan
from typing import TypeAlias

import numpy as np

from gradtrace.errors import GradtraceError
from gradtrace.report.encode import Column, View, floats, ints
from gradtrace.report.page import report, write
from gradtrace.table import Table

Run: TypeAlias = Table | tuple[Table, Table]
"""The traced steps of a run, and the times of its steps."""

MAX_SHARES, MAX_TIMES = 100_000, 5_000
"""The most shares and step times of a run in a page; of more it has some, evenly spaced."""


def parts(run: Run | None) -> dict[str, View | None]:
    """The parts of a report that show a run: its traced steps, and its times if they are given."""
    tables = run if isinstance(run, tuple) else () if run is None else (run,)
    if not all(isinstance(table, Table) for table in tables):
        raise GradtraceError(
            f"training={run!r} is no run; give gt.load('run.jsonl'), or the two tables "
            "(monitor.history, monitor.times)"
        )
    history, times = (*tables, None, None)[:2]
    return {
        "training": None if history is None else training(history),
        "timing": None if times is None else timing(times),
    }


def training(history: Table) -> View | None:
    """Influence over the traced steps of a run; None if there are none."""
    if not len(history):
        return None
    known = {column.name for column in history.columns}
    names = [name.removeprefix("share ") for name in known if name.startswith("share ")]
    names = sorted(names, key=[column.name.partition(" ")[2] for column in history.columns].index)
    at = _places(len(history), max(2, MAX_SHARES // max(1, len(names))))
    notes = [*history.notes, *(history.column("note") if "note" in known else ())]

    def column(name: str) -> Column:
        return floats(history.column(name))[at] if name in known else np.full(len(at), nan)

    return {
        "step": ints(history.column("step"))[at],
        "loss": column("loss"),
        "components": names,
        "share": [column(f"share {name}") for name in names],
        "weighted": [column(f"weighted {name}") for name in names],
        "cost": float(column("cost")[-1]),
        "running": bool(history.about.get("running")),
        "notes": [note for note in dict.fromkeys(notes) if note],
    }


def timing(times: Table) -> View | None:
    """Step times, with the verdict on their trend; None if no step was timed."""
    if not len(times):
        return None
    at = _places(len(times), MAX_TIMES)
    slope = {name: float(times.about.get(name, nan)) for name in ("slope", "low", "high")}
    return {
        "step": ints(times.column("step"))[at],
        "seconds": floats(times.column("seconds"))[at],
        "verdict": " ".join(times.notes),
        "grows": times.about.get("grows"),
        **slope,
    }


def write_run(path: str | os.PathLike[str], history: Table, times: Table, name: str = "") -> None:
    """Write the page of a run.

    Args:
        path: HTML file to write.
        history: A row for each traced step.
        times: The seconds of each step.
        name: Title of the page.
    """
    write(
        path, report(None, name or str(history.about.get("model", "")), **parts((history, times)))
    )


def _places(count: int, most: int) -> Column:
    """At most so many places, evenly spaced, with the first and the last."""
    found: Column = np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))
    return found
