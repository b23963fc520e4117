"""``gradtrace influence``: measures the influence of components over a data set."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Option

from gradtrace.cli.app import INTERRUPTED, app, examples
from gradtrace.cli.output import Json, Top, records, write_json, write_table
from gradtrace.cli.script import Arguments, loaded, script_function

KINDS = ("modules", "layers", "heads", "experts", "steps", "forks", "labels", "operators")

Rule = Annotated[
    Literal["greedy", "edge", "viterbi"],
    Option(
        help="Which path an element has: step by step to the operator that hands back most "
        "(greedy), along the largest single edge (edge), or the heaviest of all (viterbi)."
    ),
]
By = Annotated[
    list[str] | None,
    Option(
        help=f"Components: {', '.join(KINDS)}; or a name or pattern; or a group: "
        "NAME=PATTERN,PATTERN. May be given again."
    ),
]
Of = Annotated[
    list[str] | None,
    Option(help="Only the paths of these parameters: names or patterns. May be given again."),
]
Sample = Annotated[
    int | None,
    Option(help="Follow so many elements, drawn at random; by default all, or 10,000.", min=1),
]
Seed = Annotated[int, Option(help="For the sample.")]
Journal = Annotated[
    Path | None, Option(help="Keep what is counted in this file; a run that finds it goes on.")
]
PartsFunction = Annotated[
    str,
    script_function(
        "A function that returns (model, loss_fn, loader); loss_fn(model, batch) gives a loss."
    ),
]


@app.command(
    epilog=examples(
        "gradtrace influence train.py:parts --by 'encoder.*' --journal counts.jsonl",
        "gradtrace influence train.py:parts --sample 10000",
        "torchrun --nproc-per-node=4 -m gradtrace influence train.py:parts --json -- tiny 3",
        "where train.py has: def parts(size='base', layers='2'): ... "
        "return model, lambda model, batch: model(**batch).loss, loader",
    )
)
def influence(
    target: PartsFunction,
    args: Arguments = None,
    by: By = None,
    of: Of = None,
    rule: Rule = "greedy",
    sample: Sample = None,
    seed: Seed = 0,
    per_sample: Annotated[
        bool, Option("--per-sample", help="The loss is a vector: trace each of its elements.")
    ] = False,
    journal: Journal = None,
    key: Annotated[str, Option(help="Names the data in the journal.")] = "",
    top: Top = 20,
    as_json: Json = False,
) -> int:
    """Measure influence over a data set; under torchrun, many processes do it together."""
    import gradtrace
    from gradtrace.cli.returned import parts

    with _ranks() as first, loaded(target, args, journal) as (call, _):
        found = parts(call(), target, ("model", "loss_fn", "loader"))
        table = gradtrace.influence(
            found["model"], found["loss_fn"], found["loader"], by=components(by), of=of or None,
            rule=rule, sample=sample or "auto", seed=seed, per_sample=per_sample, journal=journal,
            key=key,
        )  # fmt: skip
    if first and as_json:
        write_json(records(table))
    elif first:
        write_table(table, top)
    return INTERRUPTED if table.about.get("interrupted") else 0


def components(given: Sequence[str] | None) -> Any:
    """A kind of component, or names, patterns and groups of them.

    >>> components(["heads"]), components(["lstm", "rest=gru,out"])
    ('heads', {'lstm': ['lstm'], 'rest': ['gru', 'out']})
    """
    if not given:
        return "modules"
    if len(given) == 1 and "=" not in given[0]:
        return given[0]
    groups: dict[str, list[str]] = {}
    for text in given:
        name, equals, parts = text.partition("=")
        groups[name] = parts.split(",") if equals else [text]
    return groups


@contextmanager
def _ranks() -> Iterator[bool]:
    """Join the processes of torchrun, if there are any; whether this is the one that prints."""
    import torch.distributed as dist

    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield True
        return
    dist.init_process_group("gloo")
    try:
        yield dist.get_rank() == 0
    finally:
        dist.destroy_process_group()
