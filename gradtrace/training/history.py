"""The file of a run: lines of JSON, of which tables of traced steps and of step times are made."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import combinations
from math import nan, sqrt
from statistics import median
from typing import Any, TypeAlias

from gradtrace.errors import BadFile, caution
from gradtrace.files import append_line, read_lines
from gradtrace.table import Column, Table

Line: TypeAlias = Mapping[str, Any]

FLUSHED = 1_000
"""Step times are written at least every so many steps."""

SHARES = ("share ", "± share ", "weighted ", "fork ", "cost")
PRINTED = 4
"""How many columns of shares are printed; all are saved."""

TREND_POINTS, TREND_SIGMAS = 60, 3.0
"""Step times are compared at so many points, and change if that is so unlikely by chance."""


class RunLog:
    """The lines of a run, in memory and, if there is a path, appended to a file."""

    def __init__(self, path: str | os.PathLike[str] | None, head: Line) -> None:
        self.path, self.lines = path, list[Any]()
        if path is not None and os.path.exists(path) and os.path.getsize(path):
            self.lines = _checked(path)
        self.next = max((n + 1 for line in self.lines for n in _steps(line)), default=0)
        self._waiting = dict[int, float]()
        self.lines.append({"run": "gradtrace", "version": 1, **head})
        if path is not None:
            append_line(path, self.lines[-1])

    def add(self, line: Line) -> None:
        """Append a line. If the file cannot be written, say so once and go on in memory."""
        self.lines.append(line)
        if self.path is not None:
            try:
                append_line(self.path, line)
            except BadFile as error:
                self.path = None
                caution(f"{error}; training goes on, and monitor.history has all steps")

    def time(self, step: int, seconds: float) -> None:
        """Append how long a step took; written together with others."""
        self._waiting[step] = seconds
        if len(self._waiting) >= FLUSHED:
            self.flush()

    def flush(self) -> None:
        """Write the step times that are not written."""
        if self._waiting:
            self.add({"times": {step: round(each, 7) for step, each in self._waiting.items()}})
            self._waiting = {}

    def tables(self) -> tuple[Table, Table]:
        """The traced steps, and the times of all steps."""
        self.flush()
        return tables_of(self.lines)


def read(path: str | os.PathLike[str]) -> tuple[Table, Table]:
    """Read the file of a run, which may still be going on.

    Args:
        path: File that a ``Monitor`` writes; a line that is not finished is left out.

    Returns:
        A table with a row for each traced step, and one with the seconds of every step.
    """
    return tables_of(_checked(path))


def tables_of(lines: Sequence[Line]) -> tuple[Table, Table]:
    """The two tables; of a step that was done again, after resuming, the last line counts."""
    traced = {line["step"]: line for line in lines if "loss" in line}
    names = dict.fromkeys(name for line in traced.values() for name in line)
    names = dict.fromkeys(name for name in names if name not in ("step", "note"))
    shown = {"loss", "cost", *[name for name in names if name.startswith("share ")][:PRINTED]}
    columns = [
        Column(name, "share" if name.startswith(SHARES) else "number", shown=name in shown)
        for name in names
    ]
    rows: Any = tuple(
        (step, *(float(line.get(name, nan)) for name in names), str(line.get("note", "")))
        for step, line in sorted(traced.items())
    )
    notes = dict.fromkeys(line.get("note") for line in lines if "loss" not in line)
    about = {key: each for key, each in (lines[0] if lines else {}).items() if key != "run"}
    about["running"] = not any("end" in line for line in lines[-1:])
    every = Column("step", "count"), *columns, Column("note")
    history = Table("Run", every, rows, tuple(str(note) for note in notes if note), about)
    return history, _times(lines, about)


def _times(lines: Sequence[Line], about: Line) -> Table:
    found = {int(n): each for line in lines for n, each in line.get("times", {}).items()}
    rows: Any = tuple(sorted(found.items()))
    columns = Column("step", "count"), Column("seconds", "number", "s")
    words, facts = trend([n for n, _ in rows], [seconds for _, seconds in rows])
    return Table("Time per step", columns, rows, (words,) if words else (), {**about, **facts})


def trend(steps: Sequence[int], seconds: Sequence[float]) -> tuple[str, dict[str, Any]]:
    """How long steps take, and whether that changes: by the slope of Theil and Sen over medians of
    neighbouring steps, and the test of Mann and Kendall.

    >>> trend(range(100), [0.01 + 0.0001 * n for n in range(100)])[0]
    'a step takes 14.9 ms (median), and 10 ms more each 100 steps'
    """
    if len(steps) < 10:
        return "", {"grows": None}
    size = -(-len(steps) // TREND_POINTS)
    cut = [slice(n, n + size) for n in range(0, len(steps), size)]
    points = [(median(steps[each]), median(seconds[each])) for each in cut]
    pairs = [(b[0] - a[0], b[1] - a[1]) for a, b in combinations(points, 2)]
    slope = median(rise / run for run, rise in pairs)
    sign, n = sum((rise > 0) - (rise < 0) for _, rise in pairs), len(points)
    changes = abs(sign) > TREND_SIGMAS * sqrt(n * (n - 1) * (2 * n + 5) / 18)
    per = 10 ** (len(str(len(steps))) - 1)
    more = f"{1000 * abs(slope) * per:.2g} ms {'more' if slope > 0 else 'less'} each {per:,} steps"
    words = f"a step takes {1000 * median(seconds):.3g} ms (median), and "
    words += more if changes else "no more or less as the run goes on"
    return words, {"slope": slope, "grows": changes and slope > 0}


def _steps(line: Line) -> list[int]:
    """The steps that a line is of."""
    return [*map(int, line.get("times", ())), *([line["step"]] if "step" in line else [])]


def _checked(path: str | os.PathLike[str]) -> list[Any]:
    """The lines of a file, if a Monitor wrote it."""
    lines = [line for line in read_lines(path) if isinstance(line, dict)]
    if not lines or lines[0].get("run") != "gradtrace":
        raise BadFile(f"{os.fspath(path)!r} is no run of a gradtrace.Monitor: give another file")
    if lines[0].get("version") != 1:
        raise BadFile(f"{os.fspath(path)!r} is of a newer gradtrace: update gradtrace")
    return lines
