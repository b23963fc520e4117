"""``gradtrace diagnose``: says why a model does not learn."""

from __future__ import annotations

from typing import Annotated

from gradtrace.cli.app import FAILED, app, examples
from gradtrace.cli.output import Json, progress, write, write_json
from gradtrace.cli.script import Arguments, loaded, script_function

WHAT = (
    "A function that returns a loss, a model and its loss, or (model, loss_fn); an optimiser "
    "beside them is looked at, too."
)


@app.command(
    epilog=examples(
        "gradtrace diagnose train.py:loss",
        "gradtrace diagnose train.py:loss --json -- tiny 3",
        "where train.py has: def loss(size='base', layers='2'): ... return model, loss, optimizer",
    )
)
def diagnose(
    target: Annotated[str, script_function(WHAT)], args: Arguments = None, as_json: Json = False
) -> int:
    """Find parameters without a gradient, NaN and their causes; exit code 1 if there are any.

    What is found comes with the lines of the script that are to be changed.
    """
    from gradtrace.cli.returned import watched

    with loaded(target, args) as (call, known):
        loss, watch, optimizers = watched(call, target, known, diagnose=True)
        progress("diagnosing")
        found = watch.diagnose(loss, optimizer=optimizers)
    if as_json:
        write_json(found.to_dict())
    else:
        write(found)
    return 0 if found.healthy else FAILED
