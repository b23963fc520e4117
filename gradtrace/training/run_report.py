"""Reports of training runs, from a run's file and the view of a traced step stored beside it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from gradtrace.io import container, schemas
from gradtrace.io.validation import unfit
from gradtrace.report import View, loaded, report, saved, write
from gradtrace.report.training import timing, training
from gradtrace.runs import history
from gradtrace.runs.history import History
from gradtrace.trace import Trace

KIND = "view"
VIEW = "view"


class StoredView(NamedTuple):
    """The view of a traced step that a report shows."""

    step: int
    view: View


def beside(run: str | os.PathLike[str]) -> Path:
    """The path of a run's view: ``run.gradtrace`` beside ``run.jsonl``."""
    return Path(run).expanduser().with_suffix(".gradtrace")


def seen(trace: Trace, step: int, sample: int = 1000) -> StoredView:
    """A view of a trace; it does not keep the trace alive."""
    return StoredView(step, trace._view(sample))


def keep(path: str | os.PathLike[str], found: StoredView) -> None:
    """Write a view to a file, replacing an older one atomically."""
    container.write(path, KIND, {"step": found.step}, {VIEW: saved(found.view)})


def kept(path: str | os.PathLike[str]) -> StoredView | None:
    """Read the view in a file; None if the file does not exist."""
    try:
        with container.about(path):
            contents = container.read(path, KIND, schemas.VIEW)
            if contents.tensors.keys() != {VIEW}:
                unfit("its tensors are others")
            return StoredView(contents.meta["step"], loaded(contents.tensors[VIEW]))
    except container.NoFile:
        return None


def write_report(
    run: History, view: StoredView | None, path: str | os.PathLike[str], name: str | None = None
) -> None:
    """Write an HTML page with influence over a run, its time per step, and the view."""
    model = str(run.header.get("settings", {}).get("model", "training"))
    called = name or model
    views = [] if view is None else [view.view]
    titled = f"{called}, step {view.step:,}" if view is not None else called
    write(path, report(views, titled, training(run), timing(run)))


def report_run(
    run: str | os.PathLike[str], path: str | os.PathLike[str], name: str | None = None
) -> History:
    """Write the HTML page of a run's file and its view; the run may still be going on."""
    found = history.read(run)
    write_report(found, kept(beside(run)), path, name)
    return found
