"""``gradtrace demo``: finds bugs that were planted in a small network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from gradtrace.cli.app import app, examples
from gradtrace.cli.output import Json, records, write, write_json, write_table
from gradtrace.files import made_folder


@app.command(epilog=examples("gradtrace demo", "gradtrace demo --out out/demo.html --json"))
def demo(
    out: Annotated[Path, Option(help="The HTML file to write.")] = Path("gradtrace-demo.html"),
    as_json: Json = False,
) -> None:
    """Find bugs that were planted in a small network."""
    from gradtrace.cli.planted import look

    table, trace, diagnosis = look()
    made_folder(out.parent)
    trace.report(out)
    if as_json:
        rows = records(table)["rows"]
        write_json({"planted": rows, "diagnosis": diagnosis.to_dict(), "report": str(out)})
        return
    right = sum(row["found"].startswith(row["planted"]) for row in table)
    write(f"gradtrace found {right} of the {len(table)} things that were planted.")
    write_table(table, len(table))
    write(f"The report of this network is in {out}")
