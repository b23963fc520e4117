"""The data of a training run in a report: influence over steps, and step times."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import nan, sqrt
from typing import NamedTuple

import numpy as np

from gradtrace.report.model import Floats, Timing, Training
from gradtrace.report.tuning import MAX_SHARES, MAX_TIMES
from gradtrace.runs.history import History, StepRecord

WARMUP_STEPS = 10
"""Steps at the start of a run that are left out of the trend of its times."""

MIN_TREND_STEPS = 10
"""Fewer steps than this show no trend."""

TREND_BLOCKS = 32
"""A trend is that of the medians of so many blocks, which spikes do not move."""


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
    later = np.asarray(seconds[WARMUP_STEPS:], np.float64)
    trend = _trend(later) if len(later) >= MIN_TREND_STEPS else None
    if len(step) > MAX_TIMES:
        step, seconds = (_medians(each, MAX_TIMES) for each in (step, seconds))  # type: ignore[assignment]
    return Timing(
        np.array(step, dtype=np.int32),
        np.array(seconds, dtype=np.float64),
        _verdict(trend, later),
        None if trend is None else trend.low > 0,
        *(trend or (nan, nan, nan)),
    )


class Trend(NamedTuple):
    """The change of a time by each step, in seconds, and its interval of 95%."""

    slope: float
    low: float
    high: float


def _trend(seconds: Floats) -> Trend:
    """The median of the slopes between all pairs of blocks (Theil and Sen), and Sen's interval,
    widened for what neighbouring blocks have in common.
    """
    x, y = _medians(np.arange(len(seconds)), TREND_BLOCKS), _medians(seconds, TREND_BLOCKS)
    later, earlier = np.tril_indices(len(y), -1)
    slopes = np.sort((y[later] - y[earlier]) / (x[later] - x[earlier]))
    middle, n = float(np.median(slopes)), len(y)
    rest = y - middle * x
    rest -= rest.mean()
    shared = float(rest[1:] @ rest[:-1]) / (float(rest @ rest) or 1.0)
    common = min(max(shared, 0.0), 0.9)
    variance = n * (n - 1) * (2 * n + 5) / 18 * (1 + common) / (1 - common)
    aside = round(1.96 * sqrt(variance) / 2)
    low, high = (min(max(len(slopes) // 2 + a, 0), len(slopes) - 1) for a in (-aside, aside))
    return Trend(middle, float(slopes[low]), float(slopes[high]))


def _verdict(trend: Trend | None, seconds: Floats) -> str:
    """Whether steps slow down, in a sentence."""
    if trend is None:
        return (
            f"Too few steps to tell: {len(seconds)} after {WARMUP_STEPS} of warm-up, and at least "
            f"{MIN_TREND_STEPS} are needed."
        )
    middle = float(np.median(seconds))
    change = trend.slope * len(seconds) / middle if middle else 0.0
    said = "slow down" if trend.low > 0 else "speed up" if trend.high < 0 else "do not slow down"
    return f"Steps {said}: {middle * 1000:.3g} ms each, {change:+.1%} over {len(seconds):,} steps."


def _medians(values: Sequence[float] | Floats, blocks: int) -> Floats:
    """The medians of so many consecutive blocks of nearly equal length; fewer of short series."""
    every = np.asarray(values, np.float64)
    ends = np.linspace(0, len(every), min(blocks, len(every)) + 1).round().astype(int)
    return np.array([np.median(every[i:j]) for i, j in pairwise(ends)])
