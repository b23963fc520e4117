"""``gradtrace demo``: finds bugs that were planted in a small network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from gradtrace.cli.app import app, examples
from gradtrace.cli.output import Json, write, write_json, write_table
from gradtrace.errors import GradtraceError
from gradtrace.table import Column, Table


@app.command(epilog=examples("gradtrace demo", "gradtrace demo --out out/demo.html --json"))
def demo(
    out: Annotated[Path, Option(help="The HTML file to write.")] = Path("gradtrace-demo.html"),
    as_json: Json = False,
) -> None:
    """Find bugs that were planted in a small network."""
    from gradtrace.cli.planted import look

    if out.is_dir():
        raise GradtraceError(f"--out {str(out)!r} is a folder: give the name of a file to write")
    found = look()
    out.parent.mkdir(parents=True, exist_ok=True)
    found.trace.report(out)
    if as_json:
        rows = [row._asdict() for row in found.rows]
        write_json({"planted": rows, "diagnosis": found.diagnosis.to_dict(), "report": str(out)})
        return
    right = sum(row.found.startswith(row.planted) for row in found.rows)
    write(f"gradtrace found {right} of the {len(found.rows)} things that were planted.")
    columns = tuple(map(Column, ("question", "planted", "found", "seen")))
    write_table(Table("", columns, tuple(found.rows)), len(found.rows))  # type: ignore[arg-type]
    write(f"The report of this network is in {out}")
