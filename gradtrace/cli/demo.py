"""``gradtrace demo``: the main features on embedded data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from gradtrace.cli.app import app, examples
from gradtrace.cli.printing import Json, console, say, table, write, write_json


@app.command(epilog=examples("gradtrace demo", "gradtrace demo --out out/demo.html --json"))
def demo(
    out: Annotated[Path, Option(help="The HTML file to write.")] = Path("gradtrace-demo.html"),
    as_json: Json = False,
) -> None:
    """Find what was planted in a network, let RNN, LSTM and GRU compete, write a report."""
    from gradtrace.experiments import demo as demonstration

    found = demonstration.demo(out, say)
    if as_json:
        write_json(found)
        return
    screen = console()
    screen.print(demonstration.verdict(found))
    screen.print(table(demonstration.table(found)))
    write(f"The report of this network, the diagnosis and the competition are in {out}")
