"""``gradtrace influence``: measures the influence of components over a data set."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradtrace.cli.app import app, examples
from gradtrace.cli.codes import INTERRUPTED
from gradtrace.cli.options import Components, Granularity, Rule, Top, Weight
from gradtrace.cli.printing import Json, write_json
from gradtrace.cli.target import Arguments, Target, functions


@app.command(
    epilog=examples(
        "gradtrace influence train.py:parts --components 'encoder.*' --journal run.gradtrace",
        "torchrun --nproc-per-node=4 -m gradtrace influence train.py:parts --json -- tiny 3",
        "where train.py has: def parts(size='base', layers='2'): ... "
        "return model, lambda model, batch: model(**batch).loss, loader",
    )
)
def influence(
    target: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT.py:FUNCTION",
            help="A function that returns (model, loss_fn, loader); loss_fn(model, batch) gives a "
            "loss, or one for each sample.",
            autocompletion=functions,
        ),
    ],
    args: Arguments = None,
    rule: Rule = "greedy",
    granularity: Granularity = "scalar",
    components: Components = None,
    weight: Weight = "count",
    top: Top = None,
    journal: Annotated[
        Path | None,
        typer.Option(help="Keep what is counted in this file; a run that finds it goes on."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure influence over a data set; under torchrun, many processes do it together."""
    from gradtrace.cli import measuring, tracing

    asked = measuring.InfluenceOptions(
        rule=rule,
        granularity=granularity,
        components=tracing.components(components or []),
        weight=weight,
        journal=journal,
    )
    found = measuring.found(Target.of(target), args or [], asked)
    if found.spoken and as_json:
        write_json(measuring.data(found.table, asked, top))
    elif found.spoken:
        measuring.show(found.table, top)
    raise typer.Exit(INTERRUPTED if found.table.interrupted else 0)
