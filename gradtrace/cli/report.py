"""``gradtrace report``: the page of saved traces or of a training run, once or at every change."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from os.path import realpath
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from gradtrace.cli.app import app, examples
from gradtrace.cli.printing import Json, say, working, write, write_json
from gradtrace.errors import GradtraceError

RUN = ".jsonl"

Input = Annotated[
    Path,
    Argument(metavar="FILE", help="A .gradtrace file, or the .jsonl file of a gt.Monitor."),
]
OtherInput = Annotated[
    Path | None,
    Argument(metavar="[OTHER]", help="A second .gradtrace file, to compare with."),
]
Page = Annotated[Path | None, Option(help="The HTML file to write; FILE.html, here, if not said.")]
Names = Annotated[
    list[str] | None,
    Option(help="What the report calls FILE; given again, what it calls OTHER."),
]
Watched = Annotated[
    bool,
    Option("--watch", help="Write it again when a file changes, until training ends or Ctrl-C."),
]
Every = Annotated[float, Option(help="Seconds between looks at the file.", min=0.05)]


@app.command(
    epilog=examples(
        "gradtrace report mine.gradtrace --open",
        "gradtrace report before.gradtrace after.gradtrace --out compared.html",
        "gradtrace report run.jsonl --watch --open",
        "where trace.save('mine.gradtrace') or gt.Monitor(model, file='run.jsonl') wrote the file",
    )
)
def report(
    file: Input,
    other: OtherInput = None,
    out: Page = None,
    name: Names = None,
    opened: Annotated[bool, Option("--open", help="Open it in a browser.")] = False,
    watched: Watched = False,
    every: Every = 2.0,
    as_json: Json = False,
) -> None:
    """Write a report, one HTML file, of a saved trace, of two, or of a monitored training."""
    files, names = [file] if other is None else [file, other], name or []
    from gradtrace.io.atomic_files import NoFile

    page = out or Path(f"{file.stem or 'report'}.html")
    _check(files, page, names)
    with working(f"writing {page}"):
        if watched:
            wait(files, every)
        state = _state(files)
        summary, running = write_page(files, page, names)
    if opened:
        typer.launch(Path(realpath(page)).as_uri())
    if watched and running is not False:
        with working(f"watching {file}; Ctrl-C ends it"):
            while running is not False:
                time.sleep(every)
                before, state = state, _state(files)
                if state != before and all(map(_begun, files)):
                    with suppress(NoFile):  # it is written again, or another takes its place
                        summary, running = write_page(files, page, names)
    if as_json:
        write_json({"report": str(page), "running": running, "summary": summary})
        return
    write(summary)
    write(f"The report is in {page}")


def _check(files: Sequence[Path], page: Path, names: Sequence[str]) -> None:
    runs = [each for each in files if each.suffix == RUN]
    if runs and len(files) > 1:
        raise GradtraceError(
            f"{runs[0]} is a training run, and only traces are compared; give it alone, or two "
            ".gradtrace files"
        )
    if len(names) > len(files):
        raise GradtraceError(f"{len(names)} names; give --name once for each file")
    if realpath(page) in map(realpath, files):
        raise GradtraceError(f"--out {page} is the file that is read; give another name")


def write_page(files: Sequence[Path], page: Path, names: Sequence[str]) -> tuple[str, bool | None]:
    """Write the page: a summary of it, and whether training goes on (None for traces)."""
    from gradtrace.io.atomic_files import make_folder
    from gradtrace.report.saving import load
    from gradtrace.report.training import write_run
    from gradtrace.training import history

    make_folder(page.parent)
    if files[0].suffix == RUN:
        run, times = history.read(files[0])
        write_run(page, run, times, names[0] if names else "")
        running = bool(run.about["running"])
        state = "goes on, or was stopped" if running else "has ended"
        return f"{len(run):,} traced steps; training {state}", running
    traces = [load(each) for each in files]
    titles = [*names, *(each.stem for each in files[len(names) :])]
    traces[0].report(page, compare=traces[1] if len(traces) > 1 else None, name=titles)
    summaries = []
    for title, trace in zip(titles, traces):
        elements = sum(gradient.numel() for gradient in trace.gradients.values())
        leaves = f"{len(trace.gradients):,} leaves of {elements:,} elements"
        summaries.append(f"{title}: {trace.rule}, {leaves}")
    return "; ".join(summaries), None


# While training goes on --------------------------------------------------------------------------


def wait(files: Sequence[Path], every: float) -> None:
    """Wait until the files have content."""
    if not all(map(_begun, files)):
        say(f"waiting for {' and '.join(map(str, files))}")
    while not all(map(_begun, files)):
        time.sleep(every)


def _begun(path: Path) -> bool:
    """Whether a file has content; raises for a pipe or a device, which never have a size."""
    from gradtrace.io import atomic_files

    try:
        with atomic_files.opened(path) as file:
            return bool(file.read(1))
    except atomic_files.NoFile:
        return False
    except atomic_files.BadFile as error:
        raise atomic_files.BadFile(f"{str(path)!r} {error}") from error.__cause__


def _state(files: Sequence[Path]) -> list[tuple[int, ...]]:
    """Modification time, size and inode of the files that there are, to detect changes."""
    found: list[tuple[int, ...]] = []
    for each in files:
        with suppress(OSError):
            stat = each.stat()
            found.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
    return found
