"""``gradtrace bench``: times tracing and PyTorch's own passes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Exit, Option

from gradtrace.cli.app import app, examples
from gradtrace.cli.codes import FAILED
from gradtrace.cli.printing import Json, write_json


def sections(incomplete: str) -> list[str]:
    """Shell completion."""
    from gradtrace.benchmarks.table import SECTIONS

    return [name for name in SECTIONS if name.startswith(incomplete)]


@app.command(
    epilog=examples(
        "gradtrace bench --quick",
        "gradtrace bench --only models --only peak --out bench.md",
        "gradtrace bench --out docs/benchmarks.md --figures docs/figures",
    )
)
def bench(
    only: Annotated[
        list[str] | None,
        Option(
            help="Run this section only, and keep the others of the page; may be given again.",
            autocompletion=sections,
        ),
    ] = None,
    rounds: Annotated[
        int | None, Option(help="Rounds, in place of each section's own.", min=1)
    ] = None,
    quick: Annotated[
        bool, Option("--quick", help="Small cases, under a minute: to try the tool.")
    ] = False,
    out: Annotated[
        Path | None, Option(help="Write a Markdown page, and beside it the same as JSON.")
    ] = None,
    figures: Annotated[Path | None, Option(help="Draw the curves into this folder.")] = None,
    device: Annotated[
        str | None,
        Option(help="Where sections for a GPU run, in place of the first; cpu to try them."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Time tracing beside PyTorch's own passes; takes up to 20 minutes."""
    from gradtrace.benchmarks import page
    from gradtrace.benchmarks.results import Setting
    from gradtrace.benchmarks.run import Places, known, run

    found = run(known(only or ()), Setting(quick, rounds, device), Places(out, figures))
    if as_json:
        write_json(found.data())
    else:
        print(page.markdown(found.data()))
    raise Exit(FAILED if found.failed else 0)
