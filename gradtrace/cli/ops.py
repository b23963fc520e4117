"""``gradtrace ops``: lists how ATen operations are handled."""

from __future__ import annotations

from typing import Annotated

from typer import Argument

from gradtrace.cli.app import app, examples
from gradtrace.cli.printing import Json, console, table, write_json


@app.command(
    epilog=examples("gradtrace ops", "gradtrace ops mul tanh_backward", "gradtrace ops --json")
)
def ops(
    names: Annotated[
        list[str] | None, Argument(metavar="[NAME]...", help="Such as mul.Tensor.")
    ] = None,
    as_json: Json = False,
) -> None:
    """What is known of each ATen operation that backward formulas are made of."""
    from gradtrace.tools import op_catalogue

    found = (
        [op for name in names for op in op_catalogue.named(name)]
        if names
        else op_catalogue.listed()
    )
    counts = op_catalogue.kinds()
    if as_json:
        write_json({"operations": [op._asdict() for op in found], "kinds": dict(counts)})
        return
    out = console()
    out.print(table([op_catalogue.Op._fields, *found]))
    if not names:
        listing = ", ".join(f"{count:,} {kind}" for kind, count in counts.most_common())
        out.print(f"All {counts.total():,} functional ATen overloads: {listing}")
