"""``gradtrace doctor``: checks that gradtrace works with the installed torch."""

from __future__ import annotations

from typer import Exit

from gradtrace.cli.app import app, examples
from gradtrace.cli.codes import FAILED
from gradtrace.cli.printing import STYLES, Json, console, table, write_json


@app.command(epilog=examples("gradtrace doctor", "gradtrace doctor --json"))
def doctor(as_json: Json = False) -> None:
    """Check that gradtrace works here: gradients, hooks and kernels against PyTorch's own."""
    from gradtrace.tools import doctor as checks

    found = checks.diagnosis()
    if as_json:
        write_json({"findings": [finding._asdict() for finding in found]})
    else:
        console().print(table([checks.CheckResult._fields, *found], styles=STYLES))
    if any(finding.verdict == "wrong" for finding in found):
        raise Exit(FAILED)
