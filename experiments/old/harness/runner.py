"""Runs an experiment: measures the cells that are not in its journal, then concludes.

A killed run continues when the same command is given again; a run whose cells are all measured only
concludes and draws again, which takes seconds.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from gradtrace.distributed.process_group import ProcessGroup
from gradtrace.errors import GradtraceError, printable
from gradtrace.experiments.harness import machine, pools, published_rows, results
from gradtrace.experiments.harness.code import code
from gradtrace.experiments.harness.findings import Cell, Plot, Row
from gradtrace.experiments.harness.journal import Journal, key
from gradtrace.experiments.harness.loading import ExperimentSource, about, load
from gradtrace.experiments.harness.work import Failed, TaskSpec
from gradtrace.io import atomic_files

PACKAGES = ("numpy",)
PATIENCE = 3
"""The number of failed cells after which a run is aborted."""

Say = Callable[[str], None]


class Stopped(KeyboardInterrupt):
    """Ctrl-C, with a message on what is kept and how to continue."""


@dataclass(frozen=True)
class RunPlan:
    """An experiment to run, with its settings and output folder."""

    source: ExperimentSource
    form: str  # quick or full
    settings: Mapping[str, Any]
    seeds: int
    out: Path
    workers: int | None = None
    ray: bool = False
    restart: bool = False
    ranks: ProcessGroup = field(default_factory=ProcessGroup)
    name: str = ""  # if it differs from the experiment's
    command: str = ""  # the command that reproduces the run

    @property
    def title(self) -> str:
        """The name of the run."""
        return self.name or self.source.name

    @property
    def folder(self) -> Path:
        """The folder of this experiment's files."""
        return self.out / self.title

    def header(self) -> dict[str, Any]:
        """The header of the journal's files."""
        return {
            "experiment": self.source.name,
            "form": self.form,
            "settings": dict(self.settings),
            "files": _digests(self.settings),
            "code": code(self.source),
            "versions": machine.versions(PACKAGES),
            "machine": _where(),
        }


class Outcome(NamedTuple):
    """The content of ``results.json``, the plots to draw, and the rows to publish, packed."""

    data: dict[str, Any]
    plots: tuple[Plot, ...]
    rows: bytes


def run(plan: RunPlan, say: Say) -> Outcome | None:
    """Run an experiment; None on ranks that do not conclude."""
    header = plan.header()  # before the code is loaded, since it may be edited at any time
    load(plan.source)
    if plan.ray:
        pools.needs_ray()
    journal = Journal(plan.folder, header)
    cells = _cells(plan.source, plan.settings, plan.seeds)
    todo = plan.ranks.meet({}, lambda _: _todo(plan, journal, cells, say))
    try:
        error = _measure(plan, TaskSpec(plan.source, journal), todo, say)
    finally:
        journal.close()
    plan.ranks.meet({"error": error}, _raise_errors)
    return _concluded(plan, journal, cells) if plan.ranks.first else None


def _raise_errors(said: list[dict[str, Any]]) -> None:
    """Raise the errors of all ranks that failed."""
    texts = [(rank, each["error"]) for rank, each in enumerate(said) if each["error"] is not None]
    if texts and len(said) == 1:
        raise GradtraceError(texts[0][1])
    if texts:
        raise GradtraceError("; ".join(f"rank {rank}: {text}" for rank, text in texts))


def _concluded(plan: RunPlan, journal: Journal, cells: list[Cell]) -> Outcome:
    name = plan.source.name
    entries, headers = journal.read()
    missing = sum(key(cell) not in entries for cell in cells)
    if missing:
        raise GradtraceError(
            f"{missing} of {len(cells)} rows are not in {journal.rows}: --out must be one folder "
            "that all machines share, and all must have the same code and versions"
        )
    ran = {
        "schema": results.SCHEMA,
        "experiment": name,
        "name": plan.title,
        "command": plan.command,
        "form": plan.form,
        "settings": dict(plan.settings),
        "seeds": plan.seeds,
        "cells": len(cells),
        "seconds": round(sum(entries[key(cell)].seconds for cell in cells), 2),
        "machines": published_rows.distinct(h["machine"] for h in headers if "machine" in h),
        "versions": published_rows.distinct(h["versions"] for h in headers if "versions" in h),
        "date": time.strftime("%Y-%m-%d"),
    }
    made = [(cell, entries[key(cell)]) for cell in cells]
    rows = [Row(cell, entry.result) for cell, entry in made]
    return _outcome(plan.source, ran, rows, published_rows.packed(ran, made))


def recomputed(source: ExperimentSource, path: Path, *more: Path) -> Outcome:
    """What files of published rows say, by the code as it is now; nothing is measured.

    Rows of later files take the place of earlier ones.
    """
    runs = [published_rows.unpacked(each) for each in (path, *more)]
    for each, run in zip((path, *more), runs):
        if run.ran["experiment"] != source.name:
            raise GradtraceError(
                f"{each} has rows of {run.ran['experiment']}, not of {source.name}"
            )
    if not more:
        kept = atomic_files.content(path, published_rows.MOST)
        return _outcome(source, runs[0].ran, runs[0].rows, kept)
    ran = runs[0].ran
    one = published_rows.merged(runs, _cells(source, ran["settings"], ran["seeds"]))
    return _outcome(source, one.ran, one.rows, published_rows.packed(one.ran, one.made))


def _outcome(
    source: ExperimentSource, ran: Mapping[str, Any], rows: list[Row], kept: bytes
) -> Outcome:
    experiment = load(source)
    with source.running():
        findings = experiment.conclude(rows)
    told = {"about": about(experiment, source.name), **results.found(findings, source.name)}
    made = {**ran, **told}
    with source.running():
        return Outcome(made | results.lead(experiment, made), findings.plots, kept)


def _cells(source: ExperimentSource, settings: Mapping[str, Any], seeds: int) -> list[Cell]:
    """All cells, as JSON values."""
    experiment, name = load(source), source.name
    with source.running():
        cells = experiment.cells(settings, seeds)
    try:
        cells = [json.loads(key(cell)) for cell in cells]
    except (TypeError, ValueError) as error:
        raise GradtraceError(f"{name}: a cell is not JSON: {error}") from error
    if not cells:
        raise GradtraceError(f"{name}: these settings leave nothing to measure")
    twice = len(cells) - len({key(cell) for cell in cells})
    if twice:
        raise GradtraceError(f"{name}: {twice} of its {len(cells)} cells are there twice")
    return cells


def _todo(plan: RunPlan, journal: Journal, cells: list[Cell], say: Say) -> list[Cell]:
    """The cells that have no row yet."""
    if plan.restart and (aside := journal.set_aside()):
        say(f"{plan.source.name}: earlier rows are set aside in {aside}")
    known, _ = journal.read()
    todo = [cell for cell in cells if key(cell) not in known]
    if again := sum(key(cell) in journal.stale for cell in todo):
        say(
            f"{plan.source.name}: {again} cells are measured again, as the code of the experiment "
            "(or the version of gradtrace or torch) has changed since; their old rows are kept"
        )
    if len(todo) < len(cells):
        say(f"{plan.source.name}: {len(cells) - len(todo)} of {len(cells)} cells are there already")
    return todo


def _measure(plan: RunPlan, work: TaskSpec, todo: list[Cell], say: Say) -> str | None:
    """Measure this rank's cells; the text of what went wrong, or None."""
    name, ranks, many = plan.source.name, plan.ranks, plan.workers or 1
    timed = load(plan.source).TIMED
    if timed and (many > 1 or plan.ray or ranks.world > 1) and ranks.first:
        say(f"{name} measures time: one process does all, so that nothing runs beside it")
    mine = todo[ranks.rank :: ranks.world] if not timed else todo if ranks.first else []
    failed: list[Failed] = []
    done = 0
    with _bar(name, len(mine), ranks.first) as bar:
        if plan.ray and not timed:
            found = pools.clustered(work, mine, plan.workers)
        elif many > 1 and len(mine) > 1 and not timed:
            found = pools.processes(work, mine, many)
        else:
            found = pools.serial(work, mine, bar.tick)
        try:
            for cell in found:
                bar.step()
                if cell.error is None:
                    done += 1
                    continue
                failed.append(cell.error)
                say(f"{name}: failed: {cell.error}")
                if len(failed) >= PATIENCE:
                    break
        except KeyboardInterrupt:
            raise Stopped(
                f"stopped; {name} has {done} more rows in {plan.folder}, and the same command "
                "goes on from there"
            ) from None
        except GradtraceError as error:
            if ranks.world == 1:
                raise
            return str(error)
        finally:
            found.close()
    if not failed:
        return None
    return f"{name}: {len(failed)} cells failed, the first: {failed[0]}; all other rows are kept"


def _where() -> dict[str, Any]:
    """The machine, without torch's number of threads, since a cell uses one."""
    return {name: value for name, value in machine.machine().items() if name != "threads"}


def _digests(settings: Mapping[str, Any]) -> dict[str, str]:
    """The digest of the text file in the settings: its content matters, not only its name."""
    path = settings.get("text")
    if not isinstance(path, str) or not Path(path).is_file():
        return {}
    return {"text": sha256(atomic_files.content(path)).hexdigest()}


# Progress -----------------------------------------------------------------------------------------


class Bar:
    """A progress bar that shows nothing."""

    def step(self) -> None:
        """Count a finished cell."""

    def tick(self, text: str) -> None:
        """Show a text beside the bar."""


class Shown(Bar):
    """A progress bar on a terminal."""

    def __init__(self, progress: Any, task: Any) -> None:
        self.progress, self.task = progress, task

    def step(self) -> None:
        """Count a finished cell."""
        self.progress.advance(self.task)

    def tick(self, text: str) -> None:
        """Show a text beside the bar."""
        self.progress.update(self.task, text=printable(str(text)[:40]))


@contextmanager
def _bar(name: str, total: int, wanted: bool) -> Iterator[Bar]:
    """A progress bar on stderr, if that is a terminal."""
    if not wanted or not total or not sys.stderr.isatty():
        yield Bar()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeElapsedColumn as Elapsed

    columns = (
        *(TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn()),
        *(Elapsed(), TextColumn("{task.fields[text]}", markup=False)),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True) as progress:
        yield Shown(progress, progress.add_task(printable(name), total=total, text=""))
