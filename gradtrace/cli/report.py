"""``gradtrace report``: writes the page of a saved trace or a training run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradtrace.cli.app import app, examples
from gradtrace.cli.printing import Json, say, working, write, write_json


@app.command(
    epilog=examples(
        "gradtrace report run.gradtrace --open",
        "gradtrace report before.gradtrace after.gradtrace --out compared.html",
        "gradtrace report run.jsonl --watch --open",
        "where trace.save('run.gradtrace') or gt.Monitor(model, file='run.jsonl') wrote the file",
    )
)
def report(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="A .gradtrace file, or the .jsonl file of a gt.Monitor."
        ),
    ],
    other: Annotated[
        Path | None,
        typer.Argument(metavar="[OTHER]", help="A second .gradtrace file, to compare with."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The HTML file to write; FILE.html, here, if not said.")
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(help="What the report calls FILE; given again, what it calls OTHER."),
    ] = None,
    opened: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
    watched: Annotated[
        bool,
        typer.Option(
            "--watch",
            help="Write it again when a file changes, until training ends or Ctrl-C.",
        ),
    ] = False,
    every: Annotated[
        float, typer.Option(help="Seconds between looks at the file.", min=0.05)
    ] = 2.0,
    as_json: Json = False,
) -> None:
    """Write a report, one HTML file, of a saved trace, of two, or of a monitored training."""
    from gradtrace.cli import reporting

    asked = reporting.ReportOptions.of(file, other, out, tuple(name or ()))
    with working(f"writing {asked.out}"):
        if watched:
            reporting.wait(asked, every, say)
        done = reporting.make(asked)
    if opened:
        typer.launch(asked.out.resolve().as_uri())
    if watched and done.running is not False:
        with working(f"watching {file}; Ctrl-C ends it"):
            done = reporting.follow(asked, every, done)
    if as_json:
        write_json({"report": str(asked.out), "running": done.running, "summary": done.summary})
        return
    write(done.summary)
    write(f"The report is in {asked.out}")
