"""Implements ``gradtrace report``: from files to a page, once or whenever they change."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from gradtrace.errors import GradtraceError
from gradtrace.io import atomic_files
from gradtrace.report.saving import Saved, load
from gradtrace.runs.history import History
from gradtrace.training.run_report import beside, report_run

RUN = ".jsonl"


@dataclass(frozen=True)
class ReportOptions:
    """The input files, the output file, and the names in the report."""

    file: Path
    other: Path | None
    out: Path
    names: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, file: Path, other: Path | None, out: Path | None, names: tuple[str, ...]
    ) -> ReportOptions:
        """Check the arguments of the command."""
        runs = [each for each in (file, other) if each is not None and each.suffix == RUN]
        if other is not None and runs:
            raise GradtraceError(
                f"{runs[0]} is a training run, and only traces are compared; give it alone, or two "
                ".gradtrace files"
            )
        if len(names) > (1 if other is None else 2):
            raise GradtraceError(f"{len(names)} names; give --name once for each file")
        page = out or Path(file.with_suffix(".html").name)
        if page.resolve() in [each.resolve() for each in (file, other) if each is not None]:
            raise GradtraceError(f"--out {page} is the file that is read; give another name")
        return cls(file, other, page, names)

    @property
    def sources(self) -> list[Path]:
        """The input files that exist."""
        also = beside(self.file) if self.file.suffix == RUN else self.other
        return [each for each in (self.file, also) if each is not None and each.exists()]

    @property
    def titles(self) -> list[str]:
        """A name for each trace."""
        files = [each for each in (self.file, self.other) if each is not None]
        return [*self.names, *(each.stem for each in files[len(self.names) :])]


class WrittenReport(NamedTuple):
    """A summary of the page written, and the state of the files it was made from."""

    summary: str
    running: bool | None  # None for traces
    state: tuple[object, ...]


def make(asked: ReportOptions) -> WrittenReport:
    """Write the page."""
    state = _state(asked)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    if asked.file.suffix == RUN:
        run = report_run(asked.file, asked.out, asked.names[0] if asked.names else None)
        return WrittenReport(_run(run), run.running, state)
    trace = load(asked.file)
    other = None if asked.other is None else load(asked.other)
    trace.report(asked.out, compare=other, name=asked.titles)
    summaries = [_trace(each) for each in (trace, other) if each is not None]
    return WrittenReport(
        "; ".join(f"{name}: {text}" for name, text in zip(asked.titles, summaries)), None, state
    )


def _run(run: History) -> str:
    state = "goes on, or was stopped" if run.running else "has ended"
    return f"{len(run):,} traced steps, up to step {run.last or 0:,}; training {state}"


def _trace(trace: Saved) -> str:
    elements = sum(gradient.numel() for gradient in trace.gradients.values())
    return f"{trace.rule}, {len(trace.gradients):,} leaves of {elements:,} elements"


# While training goes on --------------------------------------------------------------------------


def wait(asked: ReportOptions, every: float, say: Callable[[str], None]) -> None:
    """Wait until the files have content."""
    wanted = [each for each in (asked.file, asked.other) if each is not None]
    if not all(map(_begun, wanted)):
        say(f"waiting for {' and '.join(map(str, wanted))}")
    while not all(map(_begun, wanted)):
        time.sleep(every)


def _begun(path: Path) -> bool:
    """Whether a file has content; raises for a pipe or a device, which never have a size."""
    try:
        with atomic_files.opened(path) as file:
            return bool(file.read(1))
    except atomic_files.NoFile:
        return False
    except atomic_files.BadFile as error:
        raise atomic_files.BadFile(f"{str(path)!r} {error}") from error.__cause__


def follow(asked: ReportOptions, every: float, done: WrittenReport) -> WrittenReport:
    """Write the page whenever a file has changed, until training has ended."""
    while done.running is not False:
        time.sleep(every)
        if _state(asked) != done.state:
            done = make(asked)
    return done


def _state(asked: ReportOptions) -> tuple[object, ...]:
    """Modification time, size and inode of the files, to detect changes."""
    stats = [each.stat() for each in asked.sources]
    return tuple((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in stats)
