"""Summary of step times and meter readings: whether they grow, as text and numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from math import isfinite, nan
from statistics import fmean
from typing import Any, NamedTuple

from gradtrace.errors import printable
from gradtrace.io.strict_json import json_value
from gradtrace.io.table import IGNORE, Summarised, TextColumn, TextTable
from gradtrace.profiling import resource_meters as meters
from gradtrace.profiling import tuning
from gradtrace.profiling.resource_meters import MeterKind, MeterSeries
from gradtrace.profiling.trend_tests import (
    Interval,
    Shift,
    Trend,
    mann_kendall,
    medians,
    shift,
    theil_sen,
    trend,
)
from gradtrace.pytorch.memory_limits import spelt

ADVICE = {
    meters.TENSORS: (
        "a list that keeps losses or outputs? keep loss.item() or output.detach() in their place"
    ),
    meters.STORAGE: "results that are kept from step to step?",
    meters.GRAPH: (
        "a state or a sum of losses that is carried over? detach() it, so that a step's graph ends"
    ),
    meters.OBJECTS: "lists, dictionaries, hooks or closures that only get more?",
    meters.RESIDENT: (
        "graphs that are kept alive (losses in a list, retain_graph=True), or a cache?"
    ),
    meters.CUDA: "losses or outputs that are kept, and their graphs with them?",
    meters.COLLECTOR: "the collector looks through all objects that live: what makes them more?",
    meters.LOADING: "the loader itself becomes slower; it is not in the time of a step",
    meters.MACHINE: "the machine itself becomes slower: other processes, or heat",
}
"""Likely causes of growth."""

LEVEL = f"{tuning.CONFIDENCE_LEVEL:.0%}"
MEASURED = ("first", "last", "rate", "p", "readings", "grows")
GROWS = {1: "yes", 0: "no", -1: "falls"}
SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


class RateOfChange(NamedTuple):
    """The change of a measure: by ``rate`` a step, from ``first`` to ``last``."""

    kind: MeterKind
    rate: Interval
    p: float
    first: float
    last: float
    readings: int
    steps: int

    @property
    def grows(self) -> bool:
        """Whether growth is significant, and above the thresholds of its kind."""
        gain = self.rate.value * self.steps
        enough = self.rate.value >= self.kind.floor and gain >= self.kind.least * abs(self.first)
        return self.p < 1 - tuning.CONFIDENCE_LEVEL and self.rate.low > 0 and enough

    @property
    def share(self) -> float:
        """The increase over all steps, as a share of ``first``."""
        return self.rate.value * self.steps / self.first if self.first else nan

    def __str__(self) -> str:
        if self.kind.unit == "s":  # for times the relative change matters
            return f"{self.kind.name} +{self.share:.0%} to {_spell(self.last, 's')}"
        return f"{self.kind.name} +{_spell(self.rate.value, self.kind.unit)} a step"


@dataclass(frozen=True, repr=False)
class Pace(Summarised):
    """Whether the steps of a loop slow down, and what grows with them.

    ``trend`` is the trend of the step time over steps, ``epochs`` that of the mean step time over
    epochs; ``overhead`` is the seconds that timing a step costs, ``reading`` the total seconds of
    reading gauges. ``left`` is the number of warm-up steps that are left out.
    """

    steps: int
    left: int
    total: float
    trend: Trend
    jump: Shift | None
    epochs: Trend | None
    rounds: int
    growths: tuple[RateOfChange, ...]
    overhead: float
    reading: float

    @property
    def slower(self) -> int:
        """1 if the steps slow down, -1 if they speed up, 0 if neither is significant."""
        return self.trend.sign

    @property
    def growing(self) -> tuple[RateOfChange, ...]:
        """The measures that grow."""
        return tuple(growth for growth in self.growths if growth.grows)

    @property
    def verdict(self) -> str:
        """The result in a few sentences."""
        return " ".join(self._sentences())

    def _sentences(self) -> Iterator[str]:
        if self.steps < tuning.MIN_TREND_POINTS:
            yield (
                f"Too few steps to tell: {self.steps} after {self.left} of warm-up, and at least "
                f"{tuning.MIN_TREND_POINTS} are needed."
            )
        else:
            yield from self._times()
        yield from self._growing()
        if self.epochs is not None:
            sign, change = self.epochs.sign, self.epochs.relative()
            verb = {1: "grows", -1: "falls", 0: "shows no trend"}[sign]
            start = f"Over {self.rounds:,} epochs the time of a step {verb}"
            yield f"{start}: {_change(change)} an epoch."

    def _times(self) -> Iterator[str]:
        span, unit = (1000, "per 1,000 steps")
        if self.steps < tuning.PER_THOUSAND_FROM_STEPS:
            span, unit = self.steps, f"over these {self.steps} steps"
        each = f"{_spell(self.trend.middle, 's')} each"
        change = f"{_change(self.trend.relative(span))} {unit}"
        if self.slower:
            yield f"Steps {'slow down' if self.slower > 0 else 'speed up'}: {each}, {change}."
        elif self.jump is not None:
            yield (
                f"Steps do not slow down steadily ({change}), but change at about step "
                f"{self.jump.at + self.left:,.0f}: from {_spell(self.jump.before, 's')} to "
                f"{_spell(self.jump.after, 's')} each."
            )
        elif self.trend.relative(self.steps).high < tuning.MAX_STEADY_CHANGE_SHARE:
            yield f"Steps do not slow down: {each}, {change}."
        else:
            yield f"It cannot be told whether steps slow down: {each}, {change}."

    def _growing(self) -> Iterator[str]:
        listed = ", ".join(map(str, self.growing))
        if self.growing:
            advice = ADVICE[self.growing[0].kind]
            start = "What grows with them" if self.slower > 0 else "What grows"
            yield f"{start}: {listed} ({advice})."
        elif self.slower > 0 and self.growths:
            yield "Nothing that is measured grows with them."

    # Shown ---------------------------------------------------------------------------------------

    def table(self) -> TextTable:
        """Every measure with its change per step, the interval of that, and the p of no trend."""
        names = ("what", "first", "last", "a step", "low", "high", "p", "grows")
        columns = tuple(TextColumn(name, "number" if name == "p" else "text") for name in names)
        found = self.trend
        rows = [_row("time of a step", "s", found.middle, None, found.slope, found.p, found.sign)]
        for each in self.growths:
            kind, ends = each.kind, (each.first, each.last)
            rows.append(_row(kind.name, kind.unit, *ends, each.rate, each.p, each.grows))
        return TextTable("", columns, tuple(rows), (self._method_note(), self._cost_note()))

    def _method_note(self) -> str:
        return (
            f"Theil-Sen slopes with {LEVEL} intervals and Mann-Kendall tests; of times, those of "
            f"medians of {self.trend.points} blocks, the variance enlarged "
            f"{self.trend.inflation:.1f}-fold for what neighbours have in common. "
            f"{self.left} steps of warm-up are left out; the time's first is its median."
        )

    def _cost_note(self) -> str:
        share = self.reading / self.total if self.total else 0.0
        return (
            f"To time a step takes {_spell(self.overhead, 's')}; reading gauges between steps took "
            f"{_spell(self.reading, 's')}, {share:.1%} of the steps' own time."
        )

    def to_dict(self) -> dict[str, Any]:
        """All fields, ready for JSON; non-finite numbers are None."""
        measures = [
            {"name": growth.kind.name, "unit": growth.kind.unit}
            | {name: getattr(growth, name) for name in MEASURED}
            for growth in self.growths
        ]
        found: dict[str, Any] = json_value(
            {
                "verdict": self.verdict,
                "steps": self.steps,
                "warmup": self.left,
                "slower": self.slower,
                "seconds": self.trend.middle,
                "trend": self.trend._asdict(),
                "jump": self.jump and self.jump._asdict(),
                "epochs": self.epochs and self.epochs._asdict(),
                "measures": measures,
                "overhead": self.overhead,
                "reading": self.reading,
            },
            missing=True,
        )
        return found

    def __str__(self) -> str:
        return f"{printable(self.verdict)}\n{self.table()}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        verdict = escape(printable(self.verdict))
        return f'<div class="{IGNORE}"><p>{verdict}</p>\n{self.table()._repr_html_()}</div>'


def pace(
    times: Sequence[float],
    epochs: Sequence[int],
    seen: Mapping[str, MeterSeries],
    *,
    warmup: int = 10,
    overhead: float = 0.0,
    reading: float = 0.0,
) -> Pace:
    """The pace of a loop, from its step times, the first step of each epoch, and the readings.

    In a short loop, at most a quarter of the steps is warm-up.
    """
    left = min(warmup, len(times) // 4)
    rest = times[left:]
    growths = [growth(some, left, len(times)) for some in seen.values()]
    means = _means(times, epochs, left)
    return Pace(
        steps=len(rest),
        left=left,
        total=sum(times),
        trend=trend(rest),
        jump=shift(rest),
        epochs=trend(means) if len(means) >= tuning.MIN_TREND_POINTS else None,
        rounds=len(means),
        growths=tuple(found for found in growths if found is not None),
        overhead=overhead,
        reading=reading,
    )


def growth(seen: MeterSeries, left: int, total: int) -> RateOfChange | None:
    """The change of a measure per step, without warm-up; None if there are too few readings.

    Counts are not noisy, so autocorrelation is not corrected for; for times it is, by ``trend``. An
    exact count that always rises needs no test: the interval is then the range of its rates.
    """
    kept = [(step, value) for step, value in zip(seen.steps, seen.values) if step > left]
    if len(kept) < (tuning.MIN_EXACT_READINGS if seen.kind.exact else tuning.MIN_READINGS):
        return None
    x, y = ([float(pair[at]) for pair in kept] for at in (0, 1))
    if seen.kind.unit == "s":
        found = trend(y, x)
        rate, p = found.slope, found.p
    else:
        a, b = (medians(each, tuning.MAX_COUNT_BLOCKS) for each in (x, y))
        rate, p = theil_sen(a, b), mann_kendall(b).p
    if seen.kind.exact and all(a < b for a, b in pairwise(y)):
        rates = [(d - b) / (c - a) for (a, b), (c, d) in pairwise(zip(x, y))]
        rate, p = Interval(rate.value, min(rates), max(rates)), 0.0
    some = max(len(y) // 5, 1)
    first, last = (float(medians(part, 1)[0]) for part in (y[:some], y[-some:]))
    return RateOfChange(seen.kind, rate, p, first, last, len(kept), total - left)


def _means(times: Sequence[float], epochs: Sequence[int], left: int) -> list[float]:
    """The mean step time of each epoch, without warm-up; the last epoch may be incomplete."""
    ends = [*epochs, len(times)]
    parts = [times[max(begin, left) : end] for begin, end in pairwise(ends)]
    return [fmean(part) for part in parts if part]


# Text ---------------------------------------------------------------------------------------------


def _change(change: Interval) -> str:
    """``+3.1% (95% interval +2.0% to +4.2%)``."""
    if not all(map(isfinite, change)):
        return "by a share that cannot be told"
    value, low, high = (f"{part:+.1%}" if abs(part) < 0.1 else f"{part:+.0%}" for part in change)
    return f"{value} ({LEVEL} interval {low} to {high})"


def _spell(value: float, unit: str) -> str:
    """A number with its unit, as text.

    >>> _spell(0.00231, "s"), _spell(3 << 20, "bytes"), _spell(12.0, "")
    ('2.31 ms', '3.0 MiB', '12')
    """
    if not isfinite(value):
        return "–"
    sign = "-" if value < 0 else ""
    size = abs(value)
    if unit == "s":
        scale, word = next((pair for pair in SECONDS if size >= pair[0]), SECONDS[-1])
        return f"{sign}{size / scale:.3g} {word}"
    if unit == "bytes":
        return sign + spelt(round(size))
    return sign + (f"{size:,.0f}" if size >= 100 else f"{size:.3g}")


def _row(name: str, unit: str, *values: Any) -> tuple[object, ...]:
    """A row of the table, from the first and last value, the rate, its p, and whether it grows."""
    first, last, rate, p, grows = values
    texts = (None if value is None else _spell(value, unit) for value in (first, last, *rate))
    return (name, *texts, p, GROWS[grows])
