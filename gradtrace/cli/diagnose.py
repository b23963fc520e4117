"""``gradtrace diagnose``: says why a model does not learn."""

from __future__ import annotations

from typing import Annotated

from typer import Exit

from gradtrace.cli.app import FAILED, app, examples
from gradtrace.cli.output import Json, working, write, write_json
from gradtrace.cli.script import Arguments, Script, script_function

What = Annotated[
    str,
    script_function(
        "A function that returns a loss, a model and its loss, or (model, loss_fn); an optimiser "
        "beside them is looked at, too."
    ),
]


@app.command(
    epilog=examples(
        "gradtrace diagnose train.py:loss",
        "gradtrace diagnose train.py:loss --json -- tiny 3",
        "where train.py has: def loss(size='base', layers='2'): ... return model, loss, optimizer",
    )
)
def diagnose(target: What, args: Arguments = None, as_json: Json = False) -> None:
    """Find parameters without a gradient, NaN and their causes, with the lines of the script; exit
    code 1 if something is found.
    """
    from gradtrace.cli.returned import watched
    from gradtrace.pytorch.global_switches import uncompiled

    wanted = Script.of(target, args)
    with working(f"running {wanted.name}") as begin, uncompiled(), wanted.running() as script:
        seen = watched(lambda: wanted.call(script), wanted.name, vars(script), diagnose=True)
        begin("diagnosing")
        found = seen.watch.diagnose(seen.loss, optimizer=seen.optimizers)
    if as_json:
        write_json(found.to_dict())
    else:
        write(found)
    raise Exit(0 if found.healthy else FAILED)
