"""``gradtrace check``: compares gradients with finite differences of the loss."""

from __future__ import annotations

from typing import Annotated

from typer import Exit, Option

from gradtrace.cli.app import app, examples
from gradtrace.cli.codes import FAILED
from gradtrace.cli.printing import STYLES, Json, console, table, working, write_json
from gradtrace.cli.target import Arguments, Target, script_function
from gradtrace.errors import GradtraceError


@app.command(
    epilog=examples(
        "gradtrace check train.py:loss",
        "gradtrace check train.py:loss --sample 20 -- tiny 3",
        "where train.py has: def loss(size='base', layers='2'): ... return loss_fn, model",
    )
)
def check(
    target: Annotated[str, script_function("A function that returns (loss_fn, model).")],
    args: Arguments = None,
    sample: Annotated[
        int | None, Option(help="Elements to check of each parameter.", min=1)
    ] = None,
    seed: Annotated[int, Option(help="For the sample and for dropout.")] = 0,
    tolerance: Annotated[float, Option(help="The relative error allowed.")] = 1e-4,
    as_json: Json = False,
) -> None:
    """Compare gradients with differences of the loss; exit code 1 if one is wrong."""
    from gradtrace.tools.gradcheck import check as check_gradients

    wanted = Target.of(target, args)
    with working(f"running {wanted.name}") as work, wanted.running() as script:
        made = wanted.call(script)
        if not isinstance(made, (tuple, list)) or len(made) != 2:
            kind = type(made).__name__
            raise GradtraceError(f"{wanted.name} returned {kind}; return (loss_fn, model)")
        work.begin("checking")
        result = check_gradients(
            *made, sample=sample, seed=seed, tolerance=tolerance, progress=work.advance
        )
    if as_json:
        write_json(result.to_dict())
    else:
        out = console()
        out.print(table(result.lines(), right=(1, 2, 4, 5), styles=STYLES))
        out.print(result.verdict, style=STYLES["ok" if result.ok else "wrong"])
    raise Exit(0 if result.ok else FAILED)
