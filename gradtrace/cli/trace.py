"""``gradtrace trace``: traces the gradient of a script's loss."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gradtrace.cli.app import app, examples
from gradtrace.cli.options import Components, Granularity, Rule, Top, Weight
from gradtrace.cli.printing import Json, working, write_json
from gradtrace.cli.target import Arguments, Target, functions


@app.command(
    epilog=examples(
        "gradtrace trace train.py:loss --report loss.html",
        "gradtrace trace train.py:loss --components 'encoder.*' --weight gradient --top 5",
        "gradtrace trace train.py:loss --path 'embed.weight[23,3]' --json -- tiny 3",
        "gradtrace trace train.py:loss --granularity operator --out before.gradtrace",
        "where train.py has: def loss(size='base', layers='2'): ... return model(batch).loss",
    )
)
def trace(
    target: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT.py:FUNCTION",
            help="A function that returns a loss, a model and a loss, or (model, loss_fn), in any "
            "order; with the model, modules have the names that it has for them.",
            autocompletion=functions,
        ),
    ],
    args: Arguments = None,
    rule: Rule = "greedy",
    granularity: Granularity = "scalar",
    components: Components = None,
    weight: Weight = "count",
    sample: Annotated[
        int | None,
        typer.Option(help="Measure influence on so many elements only, drawn at random.", min=1),
    ] = None,
    seed: Annotated[int, typer.Option(help="For the sample.")] = 0,
    top: Top = None,
    path: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[INDEX]",
            help="Show the path of an element, as 'embed.weight[23,3]'; without an index the "
            "largest path from any element. May be given again.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Save the trace, to read it with gradtrace report.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write a report, one HTML file.")] = None,
    as_json: Json = False,
) -> None:
    """Trace the gradient of a loss: through which modules does most of it come?"""
    from gradtrace.cli import tracing
    from gradtrace.tools.discovery import uncompiled

    asked = tracing.TraceOptions(
        rule=rule,
        granularity=granularity,
        components=tracing.components(components or []),
        weight=weight,
        sample=sample,
        seed=seed,
        paths=tuple(map(tracing.Element.of, path or ())),
        out=out,
        report=report,
    )
    wanted = Target.of(target)
    with (
        working(f"running {wanted.name}") as work,
        uncompiled(),
        wanted.running(args or []) as script,
    ):
        made = tracing.made(lambda: wanted.call(script, args or []), wanted.name, vars(script))
        found = tracing.found(made, asked, work)
    if as_json:
        write_json(tracing.data(found, asked, top))
    else:
        tracing.show(found, asked, top)
