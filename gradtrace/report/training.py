"""The data of a training run in a report: influence over steps, and step times."""

from __future__ import annotations

import os

import numpy as np

from gradtrace.report.model import Floats, Ints, Timing, Training
from gradtrace.report.page import report, write
from gradtrace.report.tuning import MAX_SHARES, MAX_TIMES
from gradtrace.table import Table
from gradtrace.training.history import slope_of


def training(history: Table) -> Training | None:
    """Influence over the traced steps of a run; None if there are none."""
    if not len(history):
        return None
    columns = [each.name for each in history.columns]
    names = tuple(name[len("share ") :] for name in columns if name.startswith("share "))
    places = _places(len(history), max(1, MAX_SHARES // max(1, len(names))))

    def values(name: str) -> Floats:
        found: Floats = np.array(history.column(name), dtype=np.float64)[places]
        return found

    notes = dict.fromkeys((*history.notes, *filter(None, history.column("note"))))
    return Training(
        np.array(history.column("step"), dtype=np.int32)[places],
        values("loss"),
        names,
        tuple(values(f"share {name}") for name in names),
        tuple(values(f"weighted {name}") for name in names),
        float(history.column("cost")[-1]),
        bool(history.about.get("running")),
        tuple(notes),
    )


def timing(times: Table) -> Timing | None:
    """Step times, and whether they grow; None if no step was timed."""
    if not len(times):
        return None
    places = _places(len(times), MAX_TIMES)
    steps, seconds = times.column("step"), times.column("seconds")
    slope, changes = slope_of(steps, seconds)
    return Timing(
        np.array(steps, dtype=np.int32)[places],
        np.array(seconds, dtype=np.float64)[places],
        " ".join(times.notes),
        changes and slope > 0,
        slope,
        slope,
        slope,
    )


def _places(count: int, most: int) -> Ints:
    """At most so many places, evenly spaced, with the first and the last."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int32))


def write_run(path: str | os.PathLike[str], history: Table, times: Table, name: str = "") -> None:
    """Write the page of a run."""
    title = name or str(history.about.get("model", "training"))
    write(path, report([], title, training(history), timing(times)))
