"""Writes the file of a monitored run, whose lines are described in ``history``."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any
from weakref import WeakMethod

import torch

from gradtrace.io import jsonl
from gradtrace.io.atomic_files import BadFile
from gradtrace.io.strict_json import json_value
from gradtrace.runs import history
from gradtrace.runs.history import History, HistoryReader, StepIncident, StepRecord
from gradtrace.runs.influence import Influence, Moments, Row


class Writer:
    """Appends lines to the file of a run; without a file, they are kept in memory.

    Nothing that happens to the file during the run ends the program (see ``jsonl.AppendFile``).
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        settings: Mapping[str, Any],
        start: int | None = None,
    ) -> None:
        restart = WeakMethod(self._restart)  # the file must not hold its writer in a cycle
        self._file = jsonl.AppendFile(
            None if path is None else Path(path).expanduser(),
            lambda left: again(left) if (again := restart()) is not None else (),
        )
        self._names: dict[str, Any] | None = None  # the line of the last table's components
        try:
            self._header = self._begin(json.loads(json.dumps(json_value(settings))), start)
            self.first = self._next = int(self._header["step"])
            self._put(self._header)
        except BaseException:
            self.abandon()
            raise

    @property
    def path(self) -> Path | None:
        """The file; another one if others have replaced it."""
        return self._file.path

    def _begin(self, settings: dict[str, Any], start: int | None) -> dict[str, Any]:
        """The header of a new file, or the line that continues an existing one."""
        first, there = start or 0, HistoryReader(repr(str(self.path)))
        if self.path is not None:
            there.take_all(jsonl.lines(self.path))
        if there.whole:  # if not, it is new, or a run was killed while it wrote the header
            found = there.done()
            known = found.header["settings"]
            if other := [key for key in settings if known.get(key) != settings[key]]:
                raise BadFile(
                    f"{str(self.path)!r} holds a run of another {' and '.join(other)}; give "
                    "another file, or delete it to begin again"
                )
            first = start if start is not None else 0 if found.last is None else found.last + 1
        return {
            "kind": "resume" if there.whole or there.unfinished else "run",
            "schema_version": history.SCHEMA,
            "step": first,
            "settings": settings,
            "versions": {
                "gradtrace": sys.modules["gradtrace"].__version__,
                "torch": torch.__version__,
            },
        }

    def _restart(self, left: bytes) -> list[bytes]:
        """The lines that later ones need, if others have changed the file to ``left``."""
        again = [{**self._header, "kind": "resume" if left else "run", "step": self._next}]
        if self._names is not None:
            again.append(self._names)
        return list(map(jsonl.line_of, again))

    def record(self, record: StepRecord) -> None:
        """Append a traced step."""
        line = {"kind": "step", **vars(record)}
        if record.influence is None:
            del line["influence"]
        else:
            line["influence"] = self._table(record.influence)
        self._put({k: v for k, v in line.items() if k not in ("choices", "terms") or v})
        self._next = max(self._next, record.step + 1)

    def times(self, first: int, seconds: Sequence[float | None]) -> None:
        """Append how long steps took, from step ``first`` on; None for steps that do not count."""
        if seconds:
            rounded = [None if each is None else round(each, 7) for each in seconds]
            self._put({"kind": "times", "step": first, "seconds": rounded})
            self._next = max(self._next, first + len(seconds))

    def skipped(self, step: int, count: int, every: int, budget: float) -> None:
        """Append how many steps after the traced ``step`` were due and not traced."""
        line = {"kind": "skipped", "step": step, "count": count, "every": every, "budget": budget}
        self._put(line)

    def incident(self, found: StepIncident) -> None:
        """Append a step at which a trigger fired."""
        self._put({"kind": "incident", **found._asdict()})

    def end(self, step: int, error: str = "", share: float = math.nan) -> None:
        """Append the end line, with the name of the error that ended the run, if one did."""
        self._put({"kind": "end", "step": step, "error": error, "share": share})

    def close(self) -> bool:
        """Close the file, unless lines are left that cannot be written (see ``AppendFile``)."""
        return self._file.close()

    def abandon(self) -> None:
        """Close the file, whatever is on disk."""
        self._file.abandon()

    def read(self) -> History:
        """The history so far: lines in the file, and lines kept in memory."""
        if self.path is not None and self._file.file is None and not self._file.pending:
            return history.read(self.path)
        return history.parse(self._file.content(), str(self.path or "this run"))

    def _table(self, table: Influence) -> dict[str, Any]:
        names = {
            "kind": "names",
            "names": [row.name for row in table],
            "alternative": [row.alternative for row in table],
            **({"components": table.kind} if table.kind else {}),
        }
        if self._names != names:
            self._put(names)
            self._names = names
        return {
            "rows": [_packed(row) for row in table],
            "pairs": table.pairs,
            "weight": table.weight,
            "rule": table.rule,
            "notes": list(table.notes),
            "interrupted": table.interrupted,
        }

    def _put(self, line: Mapping[str, Any]) -> None:
        self._file.append(jsonl.line_of(json_value(line)))


def _packed(row: Row) -> list[Any]:
    both = row.count, row.gradient
    sums, errors = [_two_sums(m) for m in both], [_floats(m.sampling or ()) for m in both]
    if any(each is None for each in (*sums, *errors)):
        return [row.own, row.unreached, *(m.to_json() for m in both)]
    return [row.own, row.unreached, *chain.from_iterable(filter(None, (*sums, *errors)))]


def _two_sums(moments: Moments) -> list[float] | None:
    """Σt and Σe if all five sums follow from them, as for a single loss; else None."""
    single = moments.single()
    if single is not None and all(map(math.isfinite, single)):
        return [*single]
    two = _floats((moments.t, moments.e))
    return two if two and Moments.of(*two).parts() == moments.parts() else None


def _floats(numbers: Iterable[Fraction]) -> list[float] | None:
    """Fractions as floats, if these are the same numbers; else None."""
    try:
        found = [(float(each), each) for each in numbers]
    except OverflowError:
        return None
    exact = all(x.as_integer_ratio() == each.as_integer_ratio() for x, each in found)
    return [x for x, _ in found] if exact else None
