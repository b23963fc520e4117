"""``gradtrace report``: a page of what was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradtrace.cli.app import app, examples


@app.command(
    epilog=examples(
        "gradtrace report run.gradtrace --open",
        "gradtrace report before.gradtrace after.gradtrace --out compared.html",
        "gradtrace report runs/gpt2.jsonl --watch --open",
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
) -> None:
    """Write a report, one HTML file, of a saved trace, of two, or of a monitored training."""
