"""Reports of training runs, from a run's file and the view of a traced step stored beside it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from gradtrace.errors import GradtraceError, caution, printable, reason_of
from gradtrace.io import container, schemas
from gradtrace.io.validation import unfit
from gradtrace.pytorch.function_modes import paused
from gradtrace.report import View, loaded, report, saved, write
from gradtrace.report.trace_view import is_large
from gradtrace.report.training import timing, training
from gradtrace.runs import history
from gradtrace.runs.history import History
from gradtrace.traced import Trace
from gradtrace.training.overhead_budget import Budget
from gradtrace.training.tuning import VIEW_SAMPLE_PATHS

KIND = VIEW = "view"


class StoredView(NamedTuple):
    """The view of a traced step that a report shows."""

    step: int
    view: View


def beside(run: str | os.PathLike[str]) -> Path:
    """The path of a run's view: ``run.gradtrace`` beside ``run.jsonl``."""
    return Path(run).expanduser().with_suffix(".gradtrace")


def keep(path: str | os.PathLike[str], found: StoredView) -> None:
    """Write a view to a file, replacing an older one atomically; a file of another kind is left."""
    if (held := container.kind_of(path)) not in (None, KIND):
        raise GradtraceError(
            f"{os.fspath(path)!r} holds a {held}, which is left as it is: move it, or give the run "
            "another name"
        )
    container.write(path, KIND, {"step": found.step}, {VIEW: saved(found.view)})


def kept(path: str | os.PathLike[str]) -> StoredView | None:
    """Read the view in a file; None if the file does not exist, or is of another kind."""
    if container.kind_of(path) not in (None, KIND):
        return None
    try:
        with container.about(path):
            contents = container.read(path, KIND, schemas.VIEW)
            if contents.tensors.keys() != {VIEW}:
                unfit("its tensors are others")
            return StoredView(contents.meta["step"], loaded(contents.tensors[VIEW]))
    except container.NoFile:
        return None


class ViewCache:
    """The latest view of a traced step, in a file beside the run's file, or in memory."""

    def __init__(self, run: Path | None, wanted: bool) -> None:
        self.path = None if run is None else beside(run)
        self._wanted = wanted
        self._seen: StoredView | None = None
        self._cost: float | None = None
        self._spent = 0.0

    @paused()
    def keep(self, trace: Trace, step: int, budget: Budget) -> None:
        """Store a view of a trace: of the first one, and of later ones that are affordable."""
        if not self._wanted or not self._affordable(budget):
            return
        begun = budget.clock()
        try:
            small = is_large(trace.program)
            found = StoredView(step, trace._view(VIEW_SAMPLE_PATHS, small=small))
            if self.path is None:
                self._seen = found
            else:
                keep(self.path, found)
        except Exception as error:  # no error of a view may end a long training run
            self._wanted = False
            caution(f"no view was kept: {reason_of(error)}; training goes on")
        self._cost = budget.clock() - begun
        self._spent += self._cost

    def _affordable(self, budget: Budget) -> bool:
        """Whether the budget allows for a view; without one, views take no longer than traces."""
        if self._cost is None:
            return True
        if budget.share is None:
            return 2 * self._spent + self._cost <= budget.spent
        return not budget.wait(self._cost)

    def last(self) -> StoredView | None:
        """The stored view, if there is one."""
        return self._seen if self.path is None else kept(self.path)


def write_report(
    run: History, view: StoredView | None, path: str | os.PathLike[str], name: str | None = None
) -> None:
    """Write an HTML page with influence over a run, its time per step, and the view."""
    title = name or str(run.header.get("settings", {}).get("model", "training"))
    views = []
    if view is not None:
        title, views = f"{title}, step {view.step:,}", [view.view]
    write(path, report(views, title, training(run), timing(run)))


def report_run(
    run: str | os.PathLike[str], path: str | os.PathLike[str], name: str | None = None
) -> History:
    """Write the HTML page of a run's file and its view; the run may still be going on."""
    found = history.read(run)
    write_report(found, kept(beside(run)), path, name)
    return found


def report_at_end(
    run: Callable[[], History], views: ViewCache, path: str | os.PathLike[str] | None
) -> None:
    """Write the page, if a path is given. An error becomes a warning: what the program does after
    training matters more.
    """
    if path is None:
        return
    try:
        write_report(run(), views.last(), path)
    except Exception as error:
        caution(f"the report was not written: {reason_of(error)}")


def tell_where(
    run: Callable[[], History],
    page: str | os.PathLike[str] | None,
    file: Path | None,
    say: Callable[[str], object],
) -> None:
    """Print how much was traced and where the results are, unless they are nowhere."""
    report = page if page is not None and os.path.exists(Path(page).expanduser()) else None
    places = [f"{what}: {os.fspath(at)}" for what, at in (("report", report), ("file", file)) if at]
    if not places:
        return
    with suppress(GradtraceError):  # a file that others have damaged, of which report_at_end warns
        found = run()
        skipped = f", {found.skipped:,} that were due are not (budget)" if found.skipped else ""
        places.insert(0, f"{len(found):,} of {found.until or 0:,} steps are traced{skipped}")
        places += [f"incident at step {each.step:,}: {each.file}" for each in found.incidents]
    text = printable("; ".join(places))
    print(f"gradtrace: {text}", file=sys.stderr)
    say(text)
