"""``gradtrace diagnose``: says why a model does not learn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Exit

from gradtrace.cli.app import app, examples
from gradtrace.cli.codes import FAILED
from gradtrace.cli.printing import Json, working, write, write_json
from gradtrace.cli.target import Arguments, Target, functions, without_optimizers
from gradtrace.cli.trace import watched_loss

if TYPE_CHECKING:
    from torch.optim import Optimizer


What = Annotated[
    str,
    Argument(
        metavar="SCRIPT.py:FUNCTION|FILE.gradtrace",
        help="Returns a loss, a model and its loss, or (model, loss_fn); with an optimiser beside "
        "them, this is looked at, too. Or the file of a Monitor's trigger.",
        autocompletion=functions,
    ),
]


@app.command(
    epilog=examples(
        "gradtrace diagnose train.py:loss",
        "gradtrace diagnose train.py:loss --json -- tiny 3",
        "gradtrace diagnose run-step500-nonfinite.gradtrace",
        "where train.py has: def loss(size='base', layers='2'): ... return model, loss, optimizer",
    )
)
def diagnose(target: What, args: Arguments = None, as_json: Json = False) -> None:
    """Find parameters without a gradient, NaN and their causes, with the lines of the script, or
    show what a Monitor's trigger found; exit code 1 if something is found.
    """
    text, found, healthy = diagnosed(target, args)
    if as_json:
        write_json(found)
    else:
        for line in text.split("\n"):
            write(line)
    raise Exit(0 if healthy else FAILED)


def diagnosed(target: str, args: list[str] | None) -> tuple[str, dict[str, Any], bool]:
    """The same of the loss of a script's function."""
    from gradtrace.pytorch.global_switches import uncompiled

    wanted = Target.of(target, args)
    optimizers: list[Optimizer] = []

    def call() -> Any:
        found, rest = without_optimizers(wanted.call(script))
        optimizers.extend(found)
        return rest

    with working(f"running {wanted.name}") as work, uncompiled(), wanted.running() as script:
        loss, watched = watched_loss(call, wanted.name, vars(script), diagnose=True, numbers=True)
        work.begin("diagnosing")
        found = watched.diagnose(loss, optimizer=optimizers)
    return str(found), found.to_dict(), found.healthy
