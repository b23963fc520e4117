"""``gradtrace check``: compares gradients with finite differences of the loss."""

from __future__ import annotations

from typing import Annotated

from typer import Exit, Option

from gradtrace.cli.app import FAILED, app, examples
from gradtrace.cli.output import Json, records, working, write, write_json
from gradtrace.cli.script import Arguments, Script, script_function

WHAT = "A function that returns (model, loss_fn), in any order; loss_fn is called many times."


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
) -> None:
    """Compare gradients with differences of the loss; exit code 1 if one is wrong."""
    import gradtrace
    from gradtrace.cli.returned import model_and_loss_fn

    wanted = Script.of(target, args)
    with working(f"running {wanted.name}") as begin, wanted.running() as script:
        model, loss_fn = model_and_loss_fn(wanted.call(script), wanted.name)
        begin("checking")
        found = gradtrace.check(model, loss_fn, sample=sample, seed=seed, tolerance=tolerance)
    if as_json:
        write_json({"ok": found.ok, **records(found)})
    else:
        write(found.text(None))
    raise Exit(0 if found.ok else FAILED)
