"""``gradtrace check``: compares gradients with finite differences of the loss."""

from __future__ import annotations

from typing import Annotated, Any

from typer import Exit, Option

from gradtrace.cli.app import app, examples
from gradtrace.cli.codes import FAILED
from gradtrace.cli.printing import STYLES, Json, console, working, write_json
from gradtrace.cli.target import (
    Arguments,
    Target,
    kind_of,
    script_function,
    without_optimizers,
)
from gradtrace.errors import GradtraceError

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
    from gradtrace.training.gradcheck import check as check_gradients

    wanted = Target.of(target, args)
    with working(f"running {wanted.name}") as work, wanted.running() as script:
        model, loss_fn = _parts(wanted.call(script), wanted.name)
        work.begin("checking")
        result = check_gradients(
            model, loss_fn, sample=sample, seed=seed, tolerance=tolerance, progress=work.advance
        )
    if as_json:
        write_json({"ok": result.ok, "verdict": result.verdict, **result.to_dict()})
    else:
        console().print(str(result), style=STYLES["ok" if result.ok else "wrong"], markup=False)
    raise Exit(0 if result.ok else FAILED)


def _parts(returned: Any, name: str) -> tuple[Any, Any]:
    """The model and the loss function among what a function returned."""
    from torch import nn

    _, made = without_optimizers(returned)
    if type(made) not in (tuple, list) or len(made) != 2 or not all(map(callable, made)):
        raise GradtraceError(
            f"{name} returned {kind_of(returned)}; return (model, loss_fn): the loss is computed "
            "many times"
        )
    first, second = made
    return (first, second) if isinstance(first, nn.Module) else (second, first)
