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
from gradtrace.table import Column, Kind, Row, Table

Line: TypeAlias = Mapping[str, Any]

FLUSHED = 1_000
"""Step times are written at least every so many steps."""

KINDS: dict[str, Kind] = {"step": "count", "note": "text", "cost": "share"}
SHARES = ("share ", "± share ", "weighted ", "± weighted ", "fork ")
PRINTED = 4
"""How many columns of shares are printed; all are saved."""

TREND_POINTS, TREND_SIGMAS = 60, 3.0
"""Step times are compared at so many points, and change if that is so unlikely by chance."""


class RunLog:
    """The lines of a run, in memory and, if there is a path, appended to a file."""

    def __init__(self, path: str | os.PathLike[str] | None, head: Line) -> None:
        self.path, self.pid = path, os.getpid()
        self.lines = list[Any]()
        if path is not None and os.path.exists(path) and os.path.getsize(path):
            self.lines = _checked(path)
        self.next = max((line.get("step", -1) + 1 for line in _steps(self.lines)), default=0)
        self._waiting, self._first = list[float](), 0
        self._failed = False
        self.add({"run": "gradtrace", "version": 1, **head}, must=True)

    def add(self, line: Line, must: bool = False) -> None:
        """Append a line. If the file cannot be written, say so once and go on in memory."""
        self.lines.append(line)
        if self.path is None or self._failed or os.getpid() != self.pid:
            return
        try:
            append_line(self.path, line)
        except BadFile as error:
            if must:
                raise
            self._failed = True
            caution(f"{error}; training goes on, and monitor.history has all steps")

    def time(self, step: int, seconds: float) -> None:
        """Append how long a step took; written together with others."""
        if self._first + len(self._waiting) != step or len(self._waiting) >= FLUSHED:
            self.flush()
            self._first = step
        self._waiting.append(seconds)

    def flush(self) -> None:
        """Write the step times that are not written."""
        if self._waiting:
            self.add({"times": [self._first, *(round(each, 7) for each in self._waiting)]})
        self._first, self._waiting = self._first + len(self._waiting), []

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
    rows = {line["step"]: line for line in lines if "loss" in line}
    names = list(dict.fromkeys(name for line in rows.values() for name in line))
    names = [name for name in names if name not in ("step", "note")]
    shown = [name for name in names if name.startswith("share ")][:PRINTED]
    columns = [Column("step", "count"), *(_column(name, shown) for name in names), Column("note")]
    values = (_values(rows[step], columns) for step in sorted(rows))
    about = {key: each for key, each in (lines[0] if lines else {}).items() if key != "run"}
    found: list[Row] = list(values)  # type: ignore[arg-type]
    about["running"] = not any("end" in line for line in lines[-1:])
    history = Table("Run", tuple(columns), tuple(found), _notes(lines), about)
    return history, _times(lines, about)


def _column(name: str, shown: Sequence[str]) -> Column:
    kind: Kind = "share" if name.startswith(SHARES) else KINDS.get(name, "number")
    return Column(name, kind, shown=name in ("loss", "cost", *shown))


def _values(line: Line, columns: Sequence[Column]) -> tuple[Any, ...]:
    texts = [str(line.get(each.name, "" if each.kind == "text" else nan)) for each in columns[1:]]
    cells = (text if c.kind == "text" else float(text) for text, c in zip(texts, columns[1:]))
    return int(line["step"]), *cells


def _notes(lines: Sequence[Line]) -> tuple[str, ...]:
    found = [str(line["note"]) for line in lines if line.get("note") and "loss" not in line]
    return tuple(dict.fromkeys(found))


def _times(lines: Sequence[Line], about: Line) -> Table:
    each = [line["times"] for line in lines if "times" in line]
    times = {first + n: s for first, *seconds in each for n, s in enumerate(seconds)}
    columns = Column("step", "count"), Column("seconds", "number", "s")
    steps = sorted(times)
    rows: Any = tuple((step, times[step]) for step in steps)
    words, facts = trend(steps, [times[step] for step in steps]), dict[str, Any](grows=None)
    if words:
        slope, changes = slope_of(steps, [times[step] for step in steps])
        facts = {"slope": slope, "grows": changes and slope > 0}
    return Table("Time per step", columns, rows, (words,) if words else (), {**about, **facts})


def trend(steps: Sequence[int], seconds: Sequence[float]) -> str:
    """How long steps take, and whether that changes: by the slope of Theil and Sen over medians of
    neighbouring steps, and the test of Mann and Kendall.

    >>> trend(range(100), [0.01 + 0.0001 * n for n in range(100)])
    'a step takes 14.9 ms (median), and 10 ms more each 100 steps'
    """
    if len(steps) < 10:
        return ""
    slope, changes = slope_of(steps, seconds)
    per = 10 ** (len(str(len(steps))) - 1)
    words = f"a step takes {1000 * median(seconds):.3g} ms (median), and"
    if not changes:
        return f"{words} no more or less as the run goes on"
    more = "more" if slope > 0 else "less"
    return f"{words} {1000 * abs(slope) * per:.2g} ms {more} each {per:,} steps"


def slope_of(steps: Sequence[int], seconds: Sequence[float]) -> tuple[float, bool]:
    """Seconds a step more with each step, and whether that is more than chance."""
    size = -(-len(steps) // TREND_POINTS)
    cut = [slice(n, n + size) for n in range(0, len(steps), size)]
    points = [(median(steps[each]), median(seconds[each])) for each in cut]
    pairs = [(b[0] - a[0], b[1] - a[1]) for a, b in combinations(points, 2)]
    sign, n = sum((rise > 0) - (rise < 0) for _, rise in pairs), len(points)
    certain = abs(sign) > TREND_SIGMAS * sqrt(n * (n - 1) * (2 * n + 5) / 18)
    return median(rise / run for run, rise in pairs) if pairs else 0.0, certain and n > 9


def _steps(lines: Sequence[Line]) -> list[Line]:
    ends = (
        {"step": line["times"][0] + len(line["times"]) - 2} for line in lines if "times" in line
    )
    return [*(line for line in lines if "step" in line), *ends]


def _checked(path: str | os.PathLike[str]) -> list[Any]:
    """The lines of a file, if a Monitor wrote it."""
    lines = [line for line in read_lines(path) if isinstance(line, dict)]
    if not lines or lines[0].get("run") != "gradtrace":
        raise BadFile(f"{os.fspath(path)!r} is no run of a gradtrace.Monitor: give another file")
    if lines[0].get("version") != 1:
        raise BadFile(f"{os.fspath(path)!r} is of a newer gradtrace: update gradtrace")
    return lines
