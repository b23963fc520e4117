"""The data of a training run in a report: influence over steps, and step times."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan

import numpy as np

from gradtrace.profiling.summary import pace
from gradtrace.profiling.trend_tests import medians
from gradtrace.profiling.tuning import MIN_TREND_POINTS
from gradtrace.report.model import Floats, Timing, Training
from gradtrace.report.tuning import MAX_SHARES, MAX_TIMES
from gradtrace.runs.history import History, StepRecord


def training(history: History) -> Training | None:
    """Influence over the traced steps of a run; None if there are neither such nor incidents."""
    if not history.records and not history.incidents:
        return None
    names = history.components
    records, notes = _thinned(history.records, max(1, MAX_SHARES // max(1, len(names))))
    return Training(
        np.array([record.step for record in records], dtype=np.int32),
        np.array([record.loss for record in records], dtype=np.float64),
        names,
        _columns(records, names, "count"),
        _columns(records, names, "gradient"),
        history.cost,
        history.running,
        (*history.notes, *notes, *_step_notes(records)),
    )


def _thinned(
    records: tuple[StepRecord, ...], most: int
) -> tuple[tuple[StepRecord, ...], tuple[str, ...]]:
    """At most ``most`` records, evenly spaced, including the first and the last; and a note."""
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


def _step_notes(records: Sequence[StepRecord]) -> tuple[str, ...]:
    """The notes of single steps, each distinct note once."""
    first: dict[str, list[int]] = {}
    for record in records:
        table = record.influence.notes if record.influence else ()
        for note in (*record.notes, *table):
            first.setdefault(note, []).append(record.step)
    found = []
    for note, steps in first.items():
        more = f" and {len(steps) - 1:,} more" if len(steps) > 1 else ""
        where = f"step {steps[0]:,}{more}: "
        found.append(note if len(steps) == len(records) else where + note)
    return tuple(found)


def timing(history: History) -> Timing | None:
    """Step times, and whether they grow; None if no step was timed."""
    step, seconds = history.timed, history.seconds
    if not seconds:
        return None
    found = pace(seconds, (), {})
    if len(step) > MAX_TIMES:
        step, seconds = (medians(each, MAX_TIMES) for each in (step, seconds))  # type: ignore[assignment]
    slope = found.trend.slope
    return Timing(
        np.array(step, dtype=np.int32),
        np.array(seconds, dtype=np.float64),
        found.verdict,
        None if found.steps < MIN_TREND_POINTS else found.slower > 0,
        slope.value,
        slope.low,
        slope.high,
    )
