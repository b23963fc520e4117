"""``gradtrace check``: compares gradients with finite differences of the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradtrace.cli.app import app, examples
from gradtrace.cli.codes import FAILED
from gradtrace.cli.printing import STYLES, Json, console, table, working, write_json
from gradtrace.cli.target import Arguments, Target, functions
from gradtrace.errors import GradtraceError

if TYPE_CHECKING:
    from gradtrace.tools.gradcheck import Check


@app.command(
    epilog=examples(
        "gradtrace check train.py:loss",
        "gradtrace check train.py:loss --sample 20 -- tiny 3",
        "where train.py has: def loss(size='base', layers='2'): ... return loss_fn, model",
    )
)
def check(
    target: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT.py:FUNCTION",
            help="A function that returns (loss_fn, model).",
            autocompletion=functions,
        ),
    ],
    args: Arguments = None,
    sample: Annotated[
        int | None, typer.Option(help="Elements to check of each parameter.", min=1)
    ] = None,
    seed: Annotated[int, typer.Option(help="For the sample and for dropout.")] = 0,
    tolerance: Annotated[float, typer.Option(help="The relative error allowed.")] = 1e-4,
    as_json: Json = False,
) -> None:
    """Compare gradients with differences of the loss; exit code 1 if one is wrong."""
    from gradtrace.tools.gradcheck import check as check_gradients

    wanted = Target.of(target)
    with working(f"running {wanted.name}") as work, wanted.running(args or []) as script:
        loss_fn, model = _pair(wanted.call(script, args or []), wanted.name)
        work.begin("checking")
        result = check_gradients(
            loss_fn, model, sample=sample, seed=seed, tolerance=tolerance, progress=work.advance
        )
    if as_json:
        write_json(result.to_dict())
    else:
        _write(result)
    raise typer.Exit(0 if result.ok else FAILED)


def _pair(made: Any, name: str) -> tuple[Any, Any]:
    """``(loss_fn, model)`` from the function's return value."""
    if not isinstance(made, (tuple, list)) or len(made) != 2:
        raise GradtraceError(f"{name} returned {type(made).__name__}; return (loss_fn, model)")
    return made[0], made[1]


def _write(result: Check) -> None:
    out = console()
    out.print(table(result.table(), right=(1, 2, 4, 5), styles=STYLES))
    out.print(result.verdict, style=STYLES["ok" if result.ok else "wrong"])
