"""The history of a monitored training run: an append-only file, its writer and its reader.

Each line is a JSON object with a ``kind``. The first is the header; nothing is ever rewritten::

    {"kind": "run", "schema_version": 1, "step": 0, "settings": {...}, "versions": {...}}
    {"kind": "names", "names": ["encoder", "head"]}
    {"kind": "step", "step": 0, "loss": 2.3, "influence": {...}, "norms": {...}, ...}
    {"kind": "times", "step": 0, "seconds": [0.012, 0.011, null]}
    {"kind": "skipped", "step": 0, "count": 4, "every": 20, "budget": 0.03}
    {"kind": "end", "step": 250, "share": 0.02}

``skipped`` counts the steps after that one that were due and not traced, for lack of budget. Of two
lines of one kind and step the later one counts. A line is on disk before training goes on. A torn
last line (the process was killed while it wrote) is left out with a note; a run that continues the
file writes a ``resume`` line after it. A ``gap`` line marks where the disk was full for a while.
Without an ``end`` line the run goes on, or was killed. NaN and infinities, which JSON does not
have, are the strings "nan", "inf" and "-inf".

Tables are exact. For a single pair, the sums over pairs follow from two numbers, so only these are
stored: a row is ``[own, unreached, through, eligible, through, eligible]``, by count and by
|gradient|.
"""

from __future__ import annotations

import io
import json
import math
import os
import sys
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from gradtrace.errors import caution
from gradtrace.io import atomic_files, schemas, strict_json
from gradtrace.io.container import BadFile
from gradtrace.io.strict_json import json_value
from gradtrace.io.validation import SchemaMismatch, unfit
from gradtrace.tracing.influence import Influence, Moments, Row

SCHEMA = 1
AFTER_TORN_KINDS = ("resume", "gap")
"""Kinds of lines that may follow a torn line."""

MAX_UNREADABLE_LINES = 1000
"""The most consecutive torn or empty lines that are accepted: a killed process leaves one."""


class Norms(NamedTuple):
    """Gradient norms of a module: the largest one at its output, and that of its own parameters."""

    output: float
    own: float | None


@dataclass(frozen=True)
class StepRecord:
    """The result of one traced step, of all processes.

    ``loss`` and ``norms`` are without the ``scale`` that the loss was multiplied by. ``influence``
    is None if it could not be measured, and ``notes`` say why. ``seconds`` is what this trace took,
    and ``share`` the share of training time that all traces had taken by then.
    """

    step: int
    loss: float
    influence: Influence | None
    verdict: str = ""
    norms: Mapping[str, Norms] = field(default_factory=dict)
    scale: float = 1.0
    seconds: float = 0.0
    share: float = math.nan
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class History:
    """A training run as far as it was recorded.

    ``records`` are the traced steps. ``timed`` and ``seconds`` are steps and how long each took,
    without tracing; steps with an evaluation in between are left out. ``running`` means that there
    is no end line: training goes on, or was killed.
    """

    header: Mapping[str, Any]
    records: tuple[StepRecord, ...] = ()
    timed: tuple[int, ...] = ()
    seconds: tuple[float, ...] = ()
    running: bool = True
    notes: tuple[str, ...] = ()
    until: int | None = None  # number of steps, if the run has ended
    skipped: int = 0  # steps that were due and not traced, because the budget was used up
    share: float = math.nan  # of training time that all traces took, if the run has ended

    @property
    def steps(self) -> tuple[int, ...]:
        """The traced steps."""
        return tuple(record.step for record in self.records)

    @property
    def losses(self) -> tuple[float, ...]:
        """The loss at each traced step."""
        return tuple(record.loss for record in self.records)

    @property
    def influences(self) -> tuple[Influence | None, ...]:
        """The table of each traced step."""
        return tuple(record.influence for record in self.records)

    @property
    def components(self) -> tuple[str, ...]:
        """The names of all components of all steps, each once."""
        tables = (table for table in self.influences if table is not None)
        return tuple(dict.fromkeys(name for table in tables for name in table.names))

    @property
    def cost(self) -> float:
        """The share of training time that tracing has taken; NaN if unknown."""
        if math.isfinite(self.share):
            return self.share
        if len(self.records) != 1:
            return self.records[-1].share if self.records else math.nan
        trained = sum(self.seconds)  # in the first step there was no training time yet
        return self.records[0].seconds / trained if trained else math.nan

    @property
    def last(self) -> int | None:
        """The last known step."""
        ended = () if not self.until else (self.until - 1,)
        return max((*self.steps[-1:], *self.timed[-1:], *ended), default=None)

    def __len__(self) -> int:
        return len(self.records)

    def __repr__(self) -> str:
        state = "running" if self.running else "ended"
        return f"History({len(self.records):,} traced steps of {(self.last or 0) + 1:,}, {state})"


# Writing ------------------------------------------------------------------------------------------


def header(step: int, settings: Mapping[str, Any], kind: str = "run") -> dict[str, Any]:
    """The first line of a file (``run``), or of a run that continues it (``resume``)."""
    versions = {"gradtrace": sys.modules["gradtrace"].__version__, "torch": torch.__version__}
    return {
        "kind": kind,
        "schema_version": SCHEMA,
        "step": step,
        "settings": dict(settings),
        "versions": versions,
    }


class Writer:
    """Appends lines to a file; keeps them in memory if there is no file or the disk is full.

    A file that is deleted, replaced or truncated during a run is restored as far as possible:
    nothing that happens to it ends the program.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        settings: Mapping[str, Any],
        start: int | None = None,
    ) -> None:
        self.path = None if path is None else Path(path).expanduser()
        self.kept: list[bytes] = []  # lines that are not in the file yet
        self._names: list[list[str]] = []
        self._torn = False
        self._warned: set[str] = set()  # keys of warnings that were given
        self._size = 0  # bytes of the file as this process knows it
        self._header: dict[str, Any] = {}
        self._file = self._opened()
        try:
            self.first = self._begin(settings, start)
        except BaseException:
            self.close()
            raise

    def _opened(self) -> Any:
        if self.path is None:
            return None
        try:
            file = atomic_files.opened(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        except BadFile as error:
            raise BadFile(
                f"{str(self.path)!r} cannot be written to: it {error}; give a file in a folder "
                "that exists and that you may write to"
            ) from error.__cause__
        if not _locked(file):
            file.close()
            raise BadFile(
                f"{str(self.path)!r} is being written by another run; give this one another file"
            )
        self._size = os.fstat(file.fileno()).st_size
        return file

    def _begin(self, settings: Mapping[str, Any], start: int | None) -> int:
        """Write the header, or continue an existing file; returns the number of the next step."""
        settings = json.loads(json.dumps(json_value(dict(settings))))
        there = HistoryReader(repr(str(self.path)))
        if self.path is not None:
            there.take_all(atomic_files.lines(self.path))
        self._torn = there.unfinished
        if not there.whole:  # a new file, or a run that was killed while it wrote the header
            first = start or 0
            self._header = header(first, settings, "resume" if there.unfinished else "run")
            self._put(self._header)
            return first
        found = there.done()
        if other := _differences(found.header["settings"], settings):
            raise BadFile(
                f"{str(self.path)!r} holds a run of another {' and '.join(other)}; give another "
                "file, or delete it to begin again"
            )
        first = start if start is not None else 0 if found.last is None else found.last + 1
        self._header = header(first, settings, "resume")
        self._put(self._header)
        return first

    def record(self, record: StepRecord) -> None:
        """Append a traced step."""
        line: dict[str, Any] = {"kind": "step", "step": record.step, "loss": record.loss}
        if record.influence is not None:
            line["influence"] = self._table(record.influence)
        line |= {
            "verdict": record.verdict,
            "norms": {name: list(norms) for name, norms in record.norms.items()},
            "scale": record.scale,
            "seconds": record.seconds,
            "share": record.share,
            "notes": list(record.notes),
        }
        self._put(line)

    def times(self, first: int, seconds: Sequence[float | None]) -> None:
        """Append how long steps took, from step ``first`` on; None for steps that do not count."""
        if seconds:
            rounded = [None if each is None else round(each, 7) for each in seconds]
            self._put({"kind": "times", "step": first, "seconds": rounded})

    def skipped(self, step: int, count: int, every: int, budget: float) -> None:
        """Append how many steps after the traced ``step`` were due and not traced."""
        line = {"kind": "skipped", "step": step, "count": count, "every": every, "budget": budget}
        self._put(line)

    def end(self, step: int, error: str = "", share: float = math.nan) -> None:
        """Append the end line, with the name of the error that ended the run, if one did."""
        self._put({"kind": "end", "step": step, "error": error, "share": share})

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            file, self._file = self._file, None
            with suppress(OSError):
                file.close()

    def read(self) -> History:
        """The history so far: lines in the file, and lines kept in memory."""
        if self.path is None:
            there = b""
        elif self._file is None:
            return read(self.path)
        else:
            there = _whole(self._file)
        if self._torn:
            there += b"\n" + _line({"kind": "gap"})
        return parse(there + b"".join(self.kept), str(self.path or "this run"))

    def _table(self, table: Influence) -> dict[str, Any]:
        names = [row.name for row in table]
        if not self._names or self._names[-1] != names:
            self._names = [names]
            self._put({"kind": "names", "names": names})
        return {
            "rows": [_packed(row) for row in table],
            "pairs": table.pairs,
            "weight": table.weight,
            "rule": table.rule,
            "notes": list(table.notes),
            "interrupted": table.interrupted,
        }

    def _put(self, line: Mapping[str, Any]) -> None:
        self.kept.append(_line(line))
        if self._file is None:
            return
        text, start, done = b"", 0, 0
        try:
            self._check_file(line)
            before = b"\n" if self._torn else b""
            if self._torn and line["kind"] != "resume":
                before += _line({"kind": "gap"})
            text, start = before + b"".join(self.kept), len(before)
            while done < len(text):
                done += self._file.write(text[done:])
            atomic_files.sync(self._file)
        except OSError as error:
            self._size += done
            self._keep(text or b"".join(self.kept), done, start, error)
        else:
            self._size += done
            self._torn = False
            self.kept.clear()

    def _keep(self, text: bytes, done: int, start: int, error: OSError) -> None:
        """After a failed write: keep the lines that are not in the file, and warn once.

        ``done`` bytes of ``text`` were written; its lines begin at ``start``.
        """
        whole = text.rfind(b"\n", 0, done) + 1
        self._torn = done > whole or (self._torn and whole < start)
        self.kept = text[max(whole, start) :].splitlines(keepends=True)
        self._warn_once(
            "kept",
            f"gradtrace cannot write to {str(self.path)!r} ({error.strerror or error}): training "
            "goes on, what is found is kept in memory until there is room again",
        )

    def _warn_once(self, what: str, text: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            caution(text, stacklevel=7)

    # A file that was changed by others -----------------------------------------------------------

    def _check_file(self, line: Mapping[str, Any]) -> None:
        """Check that the file exists, is the open one, and has its size; if not, restore it."""
        assert self.path is not None
        mine = os.fstat(self._file.fileno())
        try:
            there: os.stat_result | None = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            there = None
        except OSError:
            there = mine  # cannot be determined: assume that it is unchanged
        if there is None:
            self._recreate(self.path)
            self._warn_once(
                "gone",
                f"{str(self.path)!r} was deleted while the run goes on: it is written again, with "
                "all that it held",
            )
        elif (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino):
            self._handle_replaced(self.path)
        elif mine.st_size < self._size:
            self._handle_truncated(line)
        elif mine.st_size > self._size:  # a write was interrupted, as by Ctrl-C
            self._torn = not _whole(self._file).endswith(b"\n")
            self._size = mine.st_size

    def _recreate(self, path: Path) -> None:
        """Copy the open file, which may have been deleted, to a new file at ``path``."""
        content = _whole(self._file)
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "x+b", buffering=0)  # noqa: SIM115  # as long as the run
        try:
            done = 0
            while done < len(content):
                done += file.write(content[done:])
            atomic_files.sync(file)
        except BaseException:
            file.close()
            path.unlink(missing_ok=True)
            raise
        file.close()
        self._switch_to(path, len(content))

    def _switch_to(self, path: Path, size: int) -> None:
        file = open(path, "a+b", buffering=0)  # noqa: SIM115  # as long as the run
        _locked(file)
        before, self._file, self.path, self._size = self._file, file, path, size
        before.close()

    def _handle_replaced(self, path: Path) -> None:
        """Another file has the name: use it if its content is the same (an editor has saved it, or
        it is a copy); otherwise write to a file of another name.
        """
        content = _whole(self._file)
        with suppress(OSError, BadFile):
            if atomic_files.content(path) == content:
                self._switch_to(path, len(content))
                return
        number = 2
        while (new := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
            number += 1
        self._recreate(new)
        self._warn_once(
            str(new),
            f"{str(path)!r} was replaced by another file while the run goes on, and is left as it "
            f"is: the run is written to {str(new)!r}",
        )

    def _handle_truncated(self, line: Mapping[str, Any]) -> None:
        """The file was truncated: repeat the header and names that the next lines need."""
        left = _whole(self._file)
        self._size, self._torn = len(left), bool(left) and not left.endswith(b"\n")
        again: list[dict[str, Any]] = []
        if b"\n" not in left:
            kind = "resume" if left else "run"
            again.append({**self._header, "kind": kind, "step": line.get("step", 0)})
        if self._names and line["kind"] != "names":
            again.append({"kind": "names", "names": self._names[-1]})
        if self._torn and b"\n" in left:
            again.insert(0, {"kind": "gap"})
        self._prepend(again)
        self._warn_once(
            "cut",
            f"{str(self.path)!r} was cut short while the run goes on: what is missing is lost, and "
            "what is found from now on is added",
        )

    def _prepend(self, lines: Sequence[Mapping[str, Any]]) -> None:
        start = b"\n" if self._torn and lines else b""
        self.kept = [*(_line(line) for line in lines), *self.kept]
        if start:
            self._size += self._file.write(start)
            self._torn = False


def _whole(file: Any) -> bytes:
    """The content of an open file, which may have been deleted."""
    parts = []
    os.lseek(file.fileno(), 0, os.SEEK_SET)  # writes still go to the end: O_APPEND
    while part := os.read(file.fileno(), 1 << 24):
        parts.append(part)
    return b"".join(parts)


def _locked(file: Any) -> bool:
    """Take an exclusive lock; whether we have it. True also where there are no locks."""
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _line(data: Mapping[str, Any]) -> bytes:
    return json.dumps(json_value(data), allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _packed(row: Row) -> list[Any]:
    sums = [_two_sums(moments) for moments in (row.count, row.gradient)]
    if any(two is None for two in sums):
        full = (
            [[f.numerator, f.denominator] for f in m.parts()] for m in (row.count, row.gradient)
        )
        return [row.own, row.unreached, *full]
    return [row.own, row.unreached, *(number for two in sums if two for number in two)]


def _two_sums(moments: Moments) -> tuple[float, float] | None:
    """Σt and Σe if all five sums follow from them, as for a single pair; else None."""
    try:
        two = float(moments.t), float(moments.e)
        return two if Moments.of(*two) == moments else None
    except OverflowError:
        return None


def _differences(there: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    return [key for key in wanted if there.get(key) != wanted[key]]


# Reading ------------------------------------------------------------------------------------------


def read(path: str | os.PathLike[str]) -> History:
    """Read the file of a run, during the run or after it."""
    reading = HistoryReader(repr(str(path)))
    reading.take_all(atomic_files.lines(path))
    return reading.done()


def parse(content: bytes, called: str) -> History:
    """Parse the content of a file; ``called`` is its name in errors."""
    reading = HistoryReader(called)
    reading.take_all(atomic_files.split(io.BytesIO(content)))
    return reading.done()


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        found = strict_json.parse(line)
    except SchemaMismatch:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("kind"), str) else None


def damaged(called: str, number: int, why: object = "") -> BadFile:
    """The error for a line that cannot be read."""
    reason = f" ({why})" if why else ""
    return BadFile(
        f"{called} is damaged in line {number}{reason}; delete that line to read the others, or "
        "take the file from where it is whole"
    )


LINE_READERS = {
    "run": "_run",
    "resume": "_resume",
    "names": "_named",
    "step": "_step",
    "times": "_times",
    "gap": "_gap",
    "skipped": "_skipped",
    "end": "_end",
}
"""The method of ``HistoryReader`` for each kind of line."""

T = TypeVar("T")


class Timeline(Generic[T]):
    """Values by step, in the order of steps; the last value of a step counts.

    Steps nearly always come in order. Those that do not are kept on a heap, so that none of them
    costs time linear in the number of steps, whatever their order.
    """

    def __init__(self) -> None:
        self._values: dict[int, T] = {}
        self._ascending: list[int] = []
        self._others: list[int] = []  # a heap of -step

    def put(self, step: int, value: T) -> None:
        """Set the value of a step; fast if the step is after all others."""
        if step not in self._values:
            if self._ascending and step < self._ascending[-1]:
                heappush(self._others, -step)
            else:
                self._ascending.append(step)
        self._values[step] = value

    def cut(self, first: int) -> int:
        """Drop step ``first`` and all after it; returns how many were dropped."""
        at = bisect_left(self._ascending, first)
        gone = self._ascending[at:]
        del self._ascending[at:]
        while self._others and -self._others[0] >= first:
            gone.append(-heappop(self._others))
        for step in gone:
            del self._values[step]
        return len(gone)

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps, in ascending order."""
        return tuple(sorted(self._values) if self._others else self._ascending)

    def all(self) -> tuple[T, ...]:
        """The values, in the order of steps."""
        return tuple(map(self._values.__getitem__, self.steps))


class HistoryReader:
    """Builds a History from the lines of a file; ``called`` is the file's name in errors."""

    def __init__(self, called: str) -> None:
        self.called = called
        self.whole = self.unfinished = (
            False  # whether there are complete lines, and whether the last one is torn
        )
        self.header: dict[str, Any] | None = None
        self.records: Timeline[StepRecord] = Timeline()
        self.seconds: Timeline[float] = Timeline()
        self.names: list[str] | None = None
        self.running = True
        self.until: int | None = None
        self.share = math.nan
        self.skipped: Timeline[dict[str, Any]] = Timeline()
        self.notes: list[str] = []

    def take_all(self, lines: Iterable[bytes]) -> None:
        """Read all lines; torn ones become notes."""
        held: list[int] = []  # numbers of unreadable lines since the last readable one
        number = unreadable = 0
        for number, line in enumerate(lines, 1):
            self.unfinished = not line.endswith(b"\n")
            if self.unfinished:
                break
            self.whole = True
            found = None if line == b"\n" else _object(line)
            if found is None:
                held += [number] if line != b"\n" else []
                unreadable += 1
                if unreadable > MAX_UNREADABLE_LINES:
                    raise damaged(
                        self.called,
                        number - MAX_UNREADABLE_LINES,
                        f"{MAX_UNREADABLE_LINES:,} lines say nothing",
                    )
                continue
            if held and found["kind"] not in AFTER_TORN_KINDS:
                break
            for each in held:
                self.torn(each)
            held.clear()
            unreadable = 0
            self.take(number, found)
        if held:
            raise damaged(self.called, held[0])
        if self.unfinished:
            self.torn(number)

    def torn(self, number: int) -> None:
        """Note a torn line."""
        self.notes.append(f"line {number} was cut short, as by a killed process, and is left out")

    def take(self, number: int, line: dict[str, Any]) -> None:
        """Check and read one line."""
        kind = line["kind"]
        if self.header is None and kind not in ("run", "resume"):
            raise BadFile(
                f"{self.called} does not begin as a run of gradtrace.Monitor; give the file that "
                "Monitor(file=...) writes"
            )
        if kind in ("run", "resume"):
            self._known(line.get("schema_version"))
        try:
            if kind not in LINE_READERS:
                unfit(f"is of an unknown kind {kind[:40]!r}")
            schemas.LINES[kind](line)
            getattr(self, LINE_READERS[kind])(line)
        except SchemaMismatch as error:
            raise damaged(self.called, number, error) from error

    def _known(self, version: object) -> None:
        if type(version) is int and version != SCHEMA:
            raise BadFile(
                f"{self.called} was written by another version of gradtrace (schema "
                f"{str(version)[:20]}, not {SCHEMA}); read it with that one"
            )

    def _run(self, line: dict[str, Any]) -> None:
        if self.header is not None:
            unfit("is a second header")
        self.header = line

    def _resume(self, line: dict[str, Any]) -> None:
        """The run was continued; steps that it repeats replace the earlier ones."""
        if self.header is None:
            self._run(line)
            return
        first = line["step"]
        again = self.records.cut(first)
        self.seconds.cut(first)
        if again:
            self.notes.append(
                f"the run went on from step {first:,} again: {again:,} traced steps from before "
                "are left out"
            )
        self.skipped.cut(first)
        self.names, self.running, self.until, self.share = None, True, None, math.nan

    def _gap(self, line: dict[str, Any]) -> None:
        """Nothing to do: the torn line before it has become a note."""

    def _named(self, line: dict[str, Any]) -> None:
        self.names = line["names"]

    def _step(self, line: dict[str, Any]) -> None:
        table, step = line.get("influence"), line["step"]
        record = StepRecord(
            step,
            float(line["loss"]),
            None if table is None else self._table(table),
            line["verdict"],
            {name: Norms(float(a), _maybe(b)) for name, (a, b) in line["norms"].items()},
            float(line["scale"]),
            float(line["seconds"]),
            float(line["share"]),
            tuple(line["notes"]),
        )
        self.records.put(step, record)

    def _table(self, table: dict[str, Any]) -> Influence:
        if self.names is None or len(self.names) != len(table["rows"]):
            unfit("has a table whose components have no names")
        names, rows = self.names, table["rows"]
        return Influence.later(
            names,
            lambda: tuple(map(_unpacked, names, rows)),
            pairs=table["pairs"],
            weight=table["weight"],
            rule=table["rule"],
            notes=tuple(table["notes"]),
            interrupted=table["interrupted"],
        )

    def _times(self, line: dict[str, Any]) -> None:
        for step, each in enumerate(line["seconds"], line["step"]):
            if each is not None:
                self.seconds.put(step, float(each))

    def _skipped(self, line: dict[str, Any]) -> None:
        self.skipped.put(line["step"], line)

    def _skipped_note(self, count: int) -> str:
        """The note on steps that were due and not traced."""
        last = self.skipped.all()[-1]
        return (
            f"{count:,} steps that were due (every={last['every']:,}) were not traced, as traces "
            f"would have taken more than budget={last['budget']:g} of training time; budget=None "
            "traces all of them, a larger budget more"
        )

    def _end(self, line: dict[str, Any]) -> None:
        self.share = float(line.get("share", math.nan))
        self.running, self.until = False, line["step"]
        if line.get("error"):
            self.notes.append(f"the run was ended by {line['error']} at step {line['step']:,}")

    def done(self) -> History:
        """The history of the lines read."""
        if self.header is None:
            raise BadFile(
                f"{self.called} is empty: the run has not begun to write; look again later"
            )
        count = sum(each["count"] for each in self.skipped.all())
        if count:
            self.notes.append(self._skipped_note(count))
        return History(
            self.header,
            self.records.all(),
            self.seconds.steps,
            self.seconds.all(),
            self.running,
            tuple(self.notes),
            self.until,
            count,
            self.share,
        )


def _maybe(value: Any) -> float | None:
    return None if value is None else float(value)


def _unpacked(name: str, row: Sequence[Any]) -> Row:
    """The inverse of ``_packed``."""
    own, unreached, *sums = row
    if len(sums) == 4:
        t, e, gt, ge = map(float, sums)
        return Row(name, own, unreached, Moments.of(t, e), Moments.of(gt, ge))
    count, gradient = (Moments(*(Fraction(*pair) for pair in five)) for five in sums)
    return Row(name, own, unreached, count, gradient)


def scalars(record: StepRecord, prefix: str = "gradtrace/") -> dict[str, float]:
    """The main numbers of a record by name, for a logger; non-finite ones are left out."""
    found = {"loss": record.loss, "cost": record.share}
    for name, share in (record.influence.shares if record.influence else {}).items():
        found[f"share/{name}"] = share
    for name, norms in record.norms.items():
        if norms.own is not None:
            found[f"norm/{name}"] = norms.own
    return {prefix + name: value for name, value in found.items() if math.isfinite(value)}
