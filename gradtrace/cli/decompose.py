"""``gradtrace decompose``: the gradient through components, over a data set."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typer import Exit

from gradtrace.cli.app import app, examples
from gradtrace.cli.codes import INTERRUPTED
from gradtrace.cli.influence import Components, Journal, PartsFunction, Top, over_data, parsed
from gradtrace.cli.measures import data, write_measure
from gradtrace.cli.printing import Json, as_text, write, write_json
from gradtrace.cli.target import Arguments, Target

if TYPE_CHECKING:
    from gradtrace.table import Table


@app.command(
    epilog=examples(
        "gradtrace decompose train.py:parts --components 'encoder.*'",
        "torchrun --nproc-per-node=4 -m gradtrace decompose train.py:parts --journal sum.gradtrace",
    )
)
def decompose(
    target: PartsFunction,
    args: Arguments = None,
    components: Components = None,
    top: Top = None,
    journal: Journal = None,
    as_json: Json = False,
) -> None:
    """The gradient through each component over a data set, exactly and with its sign."""
    from gradtrace.distributed import dataset_decompose

    options = {"components": parsed(components or []), "checkpoint": journal}
    wanted = Target.of(target, args, journal)
    found: Table
    found, spoken = over_data(wanted, dataset_decompose.decompose, options)
    if spoken and as_json:
        more = {
            "interrupted": found.about["interrupted"],
            "journal": str(journal) if journal else None,
        }
        write_json({"pairs": found.about["losses"], "decompose": data(as_text(found), top), **more})
    elif spoken:
        write_measure(as_text(found), top)
        if found.about["interrupted"]:
            write("Stopped before all batches were counted")
    raise Exit(INTERRUPTED if found.about["interrupted"] else 0)
