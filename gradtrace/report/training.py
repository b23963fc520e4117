"""A training run as a report shows it: influence over steps, and the time of steps."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan

import numpy as np

from gradtrace.profiling.summary import Pace, pace
from gradtrace.profiling.trend_tests import FEW, medians
from gradtrace.report.model import Floats, Timing, Training
from gradtrace.runs.history import History, StepRecord

NUMBERS = 100_000
"""The most shares that a page holds; of longer runs it has some of the steps."""

POINTS = 5_000
"""The most times of steps that a page holds; of more it has medians of neighbours."""


def training(history: History) -> Training | None:
    """Influence over the traced steps of a run; None if there are none."""
    if not history.records:
        return None
    names = history.components
    records, notes = _thinned(history.records, max(1, NUMBERS // max(1, len(names))))
    return Training(
        np.array([record.step for record in records], dtype=np.int32),
        np.array([record.loss for record in records], dtype=np.float64),
        names,
        _columns(records, names, "count"),
        _columns(records, names, "gradient"),
        history.cost,
        history.running,
        (*history.notes, *notes, *_told(records)),
    )


def _thinned(
    records: tuple[StepRecord, ...], most: int
) -> tuple[tuple[StepRecord, ...], tuple[str, ...]]:
    """So many records at most, evenly spread, the first and the last among them."""
    if len(records) <= most:
        return records, ()
    places = np.unique(np.linspace(0, len(records) - 1, most).round().astype(int))
    note = f"{len(places):,} of {len(records):,} traced steps are shown; the file has all of them"
    return tuple(records[place] for place in places), (note,)


def _columns(
    records: Sequence[StepRecord], names: Sequence[str], weight: str
) -> tuple[Floats, ...]:
    """The shares of each component; NaN where a step has none."""
    place = {name: n for n, name in enumerate(names)}
    found = np.full((len(names), len(records)), nan)
    for n, record in enumerate(records):
        for row in record.influence or ():
            found[place[row.name], n] = getattr(row, weight).share
    return tuple(found)


def _told(records: Sequence[StepRecord]) -> tuple[str, ...]:
    """What is to be said of single steps, each kind of it once."""
    first: dict[str, list[int]] = {}
    for record in records:
        table = record.influence.notes if record.influence else ()
        for note in (*record.notes, *table):
            first.setdefault(note, []).append(record.step)
    return tuple(
        note if len(steps) == len(records) else f"{_steps(steps)}: {note}"
        for note, steps in first.items()
    )


def _steps(steps: Sequence[int]) -> str:
    more = f" and {len(steps) - 1:,} more" if len(steps) > 1 else ""
    return f"step {steps[0]:,}{more}"


def timing(history: History) -> Timing | None:
    """How long steps took, and whether that grows; None if none was timed."""
    if not history.seconds:
        return None
    found = pace(history.seconds, (), {})
    step, seconds = _points(history)
    slope = found.trend.slope
    return Timing(
        step,
        seconds,
        found.verdict,
        _grows(found),
        slope.value,
        slope.low,
        slope.high,
    )


def _grows(found: Pace) -> bool | None:
    return None if found.steps < FEW else found.slower > 0


def _points(history: History) -> tuple[np.ndarray[tuple[int], np.dtype[np.int32]], Floats]:
    """Steps and seconds; medians of neighbours if there are many."""
    step, seconds = history.timed, history.seconds
    if len(step) > POINTS:
        step, seconds = (medians(each, POINTS) for each in (step, seconds))  # type: ignore[assignment]
    return np.array(step, dtype=np.int32), np.array(seconds, dtype=np.float64)
