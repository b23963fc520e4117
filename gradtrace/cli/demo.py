"""``gradtrace demo``: the main features on embedded data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from gradtrace.cli.app import app, examples
from gradtrace.cli.experiment import write_found
from gradtrace.cli.printing import Json, console, say, table, write, write_json


@app.command(epilog=examples("gradtrace demo", "gradtrace demo --out out/demo.html --json"))
def demo(
    out: Annotated[Path, Option(help="The HTML file to write.")] = Path("gradtrace-demo.html"),
    as_json: Json = False,
) -> None:
    """Let an RNN, an LSTM and a GRU compete, look at a small network, and write a report."""
    from gradtrace.experiments import demo as demonstration

    found = demonstration.demo(out, say)
    if as_json:
        write_json(found)
        return
    write_found({"competition": found["competition"]})
    screen = console()
    screen.print("A two-layer tanh network:")
    for name, value in demonstration.facts(found):
        screen.print(f"  {name:18} {value}")
    screen.print(table(demonstration.table(found), right=range(2, 5)))
    screen.print("Two branches on one embedding; of its paths, there run through")
    for name, share in found["influence"].items():
        screen.print(f"  {name:18} {share:.1%}")
    write(f"All figures and tables, the graph and a path are in {out}")
