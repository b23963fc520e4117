"""``gradtrace check``: compares gradients with finite differences of the loss."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from gradtrace.cli.app import FAILED, app, examples
from gradtrace.cli.output import Json, progress, records, write, write_json
from gradtrace.cli.script import Arguments, loaded, script_function

WHAT = "A function that returns (model, loss_fn); loss_fn is called many times."


@app.command(
    epilog=examples(
        "gradtrace check train.py:loss",
        "gradtrace check train.py:loss --sample 20 -- tiny 3",
        "where train.py has: def loss(size='base', layers='2'): ... return model, loss_fn",
    )
)
def check(
    target: Annotated[str, script_function(WHAT)],
    args: Arguments = None,
    sample: Annotated[
        int | None, Option(help="Elements to check of each parameter.", min=1)
    ] = None,
    seed: Annotated[int, Option(help="For the sample and for dropout.")] = 0,
    tolerance: Annotated[float, Option(help="The relative error allowed.")] = 1e-4,
    as_json: Json = False,
) -> int:
    """Compare gradients with differences of the loss; exit code 1 if one is wrong."""
    import gradtrace
    from gradtrace.cli.returned import parts

    with loaded(target, args) as (call, _):
        found = parts(call(), target, ("model", "loss_fn"))
        progress("checking")
        table = gradtrace.check(
            found["model"], found["loss_fn"], sample=sample, seed=seed, tolerance=tolerance
        )
    if as_json:
        write_json({"ok": table.ok, **records(table)})
    else:
        write(table.text(None))
    return 0 if table.ok else FAILED
