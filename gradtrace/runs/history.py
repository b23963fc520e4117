"""The history of a monitored training run, and the reader of its append-only file.

Each line is a JSON object with a ``kind``. The first is the header; nothing is ever rewritten::

    {"kind": "run", "schema_version": 1, "step": 0, "settings": {...}, "versions": {...}}
    {"kind": "names", "names": ["encoder", "head"], "alternative": [true, false]}
    {"kind": "step", "step": 0, "loss": 2.3, "influence": {...}, "norms": {...}, ...}
    {"kind": "times", "step": 0, "seconds": [0.012, 0.011, null]}
    {"kind": "skipped", "step": 0, "count": 4, "every": 20, "budget": 0.03}
    {"kind": "incident", "step": 40, "trigger": "spike", "evidence": "the loss is 9", ...}
    {"kind": "end", "step": 250, "share": 0.02}

``names`` are the components of the tables after it; ``alternative`` says which of them a path can
go around (not in older files), ``components`` of which kind they are, if the Monitor was told one.
``incident`` tells of a step at which a trigger fired, and on which process. ``skipped`` counts the
steps after that one that were due and not traced, for lack of budget. Of two lines of one kind and
step the later one counts. A line is on disk before training goes on. A torn last line (the process
was killed while it wrote) is left out with a note; a run that continues the file writes a
``resume`` line after it. Without an ``end`` line the run goes on, or was killed. NaN and
infinities, which JSON does not have, are the strings "nan", "inf" and "-inf". Older files may have
a ``gap`` line after a line that was torn because the disk was full.

Tables are exact. For a single loss, the sums over losses follow from two numbers, so only these are
stored: a row is ``[own, unreached, through, eligible, through, eligible]``, by count and by
|gradient|.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from heapq import heappop, heappush
from typing import Any, NamedTuple, TypeVar

from gradtrace.errors import UnknownName, did_you_mean
from gradtrace.io import jsonl, plotting, schemas, strict_json
from gradtrace.io.atomic_files import BadFile
from gradtrace.io.table import Summarised, TextColumn, TextTable
from gradtrace.io.validation import SchemaMismatch, unfit
from gradtrace.runs import tuning
from gradtrace.runs.influence import Influence, Moments, Row
from gradtrace.tracing.moments import SamplingVariance

SCHEMA = 1
AFTER_TORN_KINDS = ("resume", "gap")
"""Kinds of lines that may follow a torn line."""


class Norms(NamedTuple):
    """Gradient norms of a module: the largest one at its output, and that of its own parameters."""

    output: float
    own: float | None


@dataclass(frozen=True)
class StepRecord:
    """The result of one traced step, of all processes.

    ``loss`` and ``norms`` are without the ``scale`` that the loss was multiplied by. ``influence``
    is None if it could not be measured, and ``notes`` say why. ``seconds`` is what this trace took,
    and ``share`` the share of training time that all traces had taken by then. If the Monitor has
    loggers, ``choices`` are the shares of branches at forks between modules
    (``Choices.between_modules``). ``terms`` are the norms and cosines of the loss terms that the
    step was given (``Conflicts``), over all parameters: ``"norm ce"``, ``"cosine ce kl"``.
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
    choices: Mapping[str, float] = field(default_factory=dict)
    terms: Mapping[str, float] = field(default_factory=dict)


class StepIncident(NamedTuple):
    """A step at which a trigger fired: what was seen, and what a rerun found: the cause, its module
    and source line (empty where unknown). ``file`` has all of it (``gradtrace.load_incident``).
    ``rank`` is the process whose loss or gradient it was.
    """

    step: int
    trigger: str
    evidence: str
    cause: str
    module: str
    line: str
    file: str
    rank: int = 0

    def __str__(self) -> str:
        process = f" of process {self.rank}" if self.rank else ""
        module = f" in '{self.module}'" if self.module else ""
        line = f" ({self.line})" if self.line else ""
        return (
            f"step {self.step:,}{process}: {self.evidence}. {self.cause}{module}{line}; to read "
            f"it: gradtrace diagnose {self.file}"
        )


@dataclass(frozen=True, repr=False)
class History(Summarised):
    """A training run as far as it was recorded.

    ``records`` are the traced steps. ``timed`` and ``seconds`` are steps and how long each took,
    without tracing; steps with an evaluation in between are left out. ``running`` means that there
    is no end line: training goes on, or was killed. ``incidents`` are the steps at which a trigger
    fired; ``notes`` begin with them.
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
    incidents: tuple[StepIncident, ...] = ()

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

    def table(self) -> TextTable:
        """One row per traced step: loss, what it took, and what flow says."""
        columns = (
            TextColumn("step", "count"),
            TextColumn("loss", "number"),
            TextColumn("seconds", "number"),
            TextColumn("cost", "share"),
            TextColumn("verdict"),
        )
        rows = tuple(  # at the first step there was no training time yet
            (r.step, r.loss, r.seconds, None if math.isinf(r.share) else r.share, r.verdict)
            for r in self.records
        )
        return TextTable(repr(self), columns, rows, self.notes)

    def to_pandas(self) -> Any:
        """One row per traced step: those of ``table``, then a column ``share/…`` for a component,
        ``norm/…`` for each module's own parameters, ``choice/…`` for each branch and ``terms/…``
        for norms and cosines of loss terms.
        """
        plain, more = self.table(), self._curves()
        columns = (*plain.columns, *(TextColumn(name, "number") for name in more))
        rows = zip(plain.rows, *more.values())
        return TextTable("", columns, tuple((*row, *rest) for row, *rest in rows)).to_pandas()

    def _curves(self) -> dict[str, list[float]]:
        """Shares and norms over the traced steps, by name; NaN where there is none."""
        wide = [scalars(record, "") for record in self.records]
        names = dict.fromkeys(name for found in wide for name in found)
        more = [name for name in names if "/" in name]
        return {name: [found.get(name, math.nan) for found in wide] for name in more}

    def plot(self, by: str | None = None, *, most: int = 8, ax: Any = None) -> Any:
        """A line over steps for each component's share, at most ``most``: those that move most.

        Args:
            by: Name of a column of ``to_pandas`` to draw alone, such as ``"loss"``.
            most: The most lines.
            ax: ``Axes`` to draw on; new ones by default.

        Returns:
            matplotlib's ``Axes``.
        """
        lines = self._lines(by, most)
        ax = plotting.axes(4.0, ax)
        for name, values in lines.items():
            ax.plot(self.steps, values, label=plotting.literal(name.removeprefix("share/")))
        ax.set_xlabel("step")
        ax.set_ylabel(by or "share")
        if by is None and lines:
            plotting.percent(ax.yaxis)
            ax.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
        ax.set_title(plotting.literal(repr(self)), fontsize="medium")
        return ax

    def _lines(self, by: str | None, most: int) -> dict[str, list[float]]:
        """What a plot shows: one column, or the shares with the largest range over steps."""
        curves = self._curves()
        if by is not None:
            plain = self.table()
            kinds = {c.name: plain.column(c.name) for c in plain.columns if c.kind != "text"}
            if by not in (known := {**kinds, **curves}):
                raise UnknownName(f"no curve {by!r} in this run{did_you_mean(by, known)}")
            return {by: known[by]}
        shares = {name: line for name, line in curves.items() if name.startswith("share/")}
        finite = {name: list(filter(math.isfinite, line)) for name, line in shares.items()}
        moved = sorted(finite, key=lambda name: min(finite[name]) - max(finite[name]))
        return {name: shares[name] for name in shares if name in moved[: max(most, 1)]}

    def __repr__(self) -> str:
        state = "running" if self.running else "ended"
        many = "step" if len(self.records) == 1 else "steps"
        return f"History({len(self.records):,} traced {many} of {(self.last or 0) + 1:,}, {state})"


# Reading ------------------------------------------------------------------------------------------


def read(path: str | os.PathLike[str]) -> History:
    """Read the file of a run, during the run or after it."""
    reading = HistoryReader(repr(str(path)))
    reading.take_all(jsonl.lines(path))
    return reading.done()


def parse(content: bytes, called: str) -> History:
    """Parse the content of a file; ``called`` is its name in errors."""
    reading = HistoryReader(called)
    reading.take_all(jsonl.split(io.BytesIO(content)))
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


T = TypeVar("T")


class Timeline(dict[int, T]):
    """Values by step; the last value of a step counts.

    ``cut`` takes time for what it drops, not for what is there, whatever the order of steps.
    """

    def __init__(self) -> None:
        super().__init__()
        self._latest: list[int] = []  # a heap of -step

    def put(self, step: int, value: T) -> None:
        """Set the value of a step."""
        if step not in self:
            heappush(self._latest, -step)
        self[step] = value

    def cut(self, first: int) -> int:
        """Drop step ``first`` and all after it; returns how many were dropped."""
        before = len(self)
        while self._latest and -self._latest[0] >= first:
            del self[-heappop(self._latest)]
        return before - len(self)

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps, in ascending order."""
        return tuple(sorted(self))

    def all(self) -> tuple[T, ...]:
        """The values, in the order of steps."""
        return tuple(map(self.__getitem__, self.steps))


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
        self.alternative: list[bool | None] = []
        self.components = ""
        self.running = True
        self.until: int | None = None
        self.share = math.nan
        self.skipped: Timeline[dict[str, Any]] = Timeline()
        self.incidents: Timeline[tuple[StepIncident, ...]] = Timeline()
        self.notes: list[str] = []

    def take_all(self, lines: Iterable[bytes]) -> None:
        """Read all lines; torn ones become notes."""
        most = tuning.MAX_UNREADABLE_LINES
        unread: list[int] = []  # lines since the last readable one, empty ones as 0
        number = 0
        for number, line in enumerate(lines, 1):
            self.unfinished = not line.endswith(b"\n")
            if self.unfinished:
                break
            self.whole = True
            found = _object(line)
            if found is None:
                unread.append(0 if line == b"\n" else number)
                if len(unread) > most:
                    raise damaged(self.called, number - most, f"{most:,} lines say nothing")
            else:
                self._note_torn(unread, found["kind"] in AFTER_TORN_KINDS)
                unread.clear()
                self.take(number, found)
        self._note_torn(unread, False)
        if self.unfinished:
            self._note_torn([number], True)

    def _note_torn(self, numbers: Iterable[int], allowed: bool) -> None:
        for number in filter(None, numbers):
            if not allowed:
                raise damaged(self.called, number)
            self.notes.append(
                f"line {number} was cut short, as by a killed process, and is left out"
            )

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
            if kind not in schemas.LINES:
                unfit(f"is of an unknown kind {kind[:40]!r}")
            schemas.LINES[kind](line)
            getattr(self, f"_take_{kind}")(line)
        except SchemaMismatch as error:
            raise damaged(self.called, number, error) from error

    def _known(self, version: object) -> None:
        if type(version) is int and version != SCHEMA:
            raise BadFile(
                f"{self.called} was written by another version of gradtrace (schema "
                f"{str(version)[:20]}, not {SCHEMA}); read it with that one"
            )

    def _take_run(self, line: dict[str, Any]) -> None:
        if self.header is not None:
            unfit("is a second header")
        self.header = line

    def _take_resume(self, line: dict[str, Any]) -> None:
        """The run was continued; steps that it repeats replace the earlier ones."""
        if self.header is None:
            self._take_run(line)
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
        self.incidents.cut(first)
        self.names, self.running, self.until, self.share = None, True, None, math.nan

    def _take_gap(self, line: dict[str, Any]) -> None:
        """Nothing to do: the torn line before it has become a note."""

    def _take_names(self, line: dict[str, Any]) -> None:
        self.names = line["names"]
        self.alternative = line.get("alternative", [None] * len(line["names"]))
        self.components = line.get("components", "")

    def _take_step(self, line: dict[str, Any]) -> None:
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
            {name: float(share) for name, share in line.get("choices", {}).items()},
            {name: float(number) for name, number in line.get("terms", {}).items()},
        )
        self.records.put(step, record)

    def _table(self, table: dict[str, Any]) -> Influence:
        if self.names is None or len(self.names) != len(table["rows"]):
            unfit("has a table whose components have no names")
        names, rows, alternative = self.names, table["rows"], self.alternative
        return Influence.later(
            names,
            lambda: tuple(map(_unpacked, names, rows, alternative)),
            kind=self.components,
            pairs=table["pairs"],
            weight=table["weight"],
            rule=table["rule"],
            notes=tuple(table["notes"]),
            interrupted=table["interrupted"],
        )

    def _take_times(self, line: dict[str, Any]) -> None:
        for step, each in enumerate(line["seconds"], line["step"]):
            if each is not None:
                self.seconds.put(step, float(each))

    def _take_skipped(self, line: dict[str, Any]) -> None:
        self.skipped.put(line["step"], line)

    def _take_incident(self, line: dict[str, Any]) -> None:
        found = StepIncident(**{name: line[name] for name in StepIncident._fields if name in line})
        others = self.incidents.get(found.step, ())
        self.incidents.put(found.step, tuple(sorted({*others, found}, key=lambda one: one.rank)))

    def _skipped_note(self, count: int) -> str:
        """The note on steps that were due and not traced."""
        last = self.skipped.all()[-1]
        return (
            f"{count:,} steps that were due (every={last['every']:,}) were not traced, as traces "
            f"would have taken more than budget={last['budget']:g} of training time; budget=None "
            "traces all of them, a larger budget more"
        )

    def _take_end(self, line: dict[str, Any]) -> None:
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
        incidents = tuple(each for of_step in self.incidents.all() for each in of_step)
        return History(
            self.header,
            self.records.all(),
            self.seconds.steps,
            self.seconds.all(),
            self.running,
            (*map(str, incidents), *self.notes),
            self.until,
            count,
            self.share,
            incidents,
        )


def _maybe(value: Any) -> float | None:
    return None if value is None else float(value)


def _unpacked(name: str, row: Sequence[Any], alternative: bool | None) -> Row:
    """The inverse of ``_packed``."""
    own, unreached, *sums = row
    if len(sums) == 2:
        count, gradient = map(Moments.from_json, sums)
        return Row(name, own, unreached, count, gradient, alternative)
    t, e, gt, ge = map(float, sums[:4])
    count, gradient = Moments.of(t, e), Moments.of(gt, ge)
    if len(sums) > 4:
        count.sampling = SamplingVariance(*map(Fraction, sums[4:9]))
        gradient.sampling = SamplingVariance(*map(Fraction, sums[9:]))
    return Row(name, own, unreached, count, gradient, alternative)


def scalars(record: StepRecord, prefix: str = "gradtrace/") -> dict[str, float]:
    """The numbers of a record by name; non-finite ones are left out."""
    found = {"loss": record.loss, "cost": record.share}
    for name, share in (record.influence.shares if record.influence else {}).items():
        found[f"share/{name}"] = share
    for name, norms in record.norms.items():
        if norms.own is not None:
            found[f"norm/{name}"] = norms.own
    found |= {f"choice/{name}": share for name, share in record.choices.items()}
    found |= {f"terms/{name}": number for name, number in record.terms.items()}
    return {prefix + name: value for name, value in found.items() if math.isfinite(value)}
