"""``gradtrace influence``: measures the influence of components over a data set.

Also what ``gradtrace trace`` shares with it: the options, and the table that is printed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from typer import Exit, Option

from gradtrace.cli.app import app, examples
from gradtrace.cli.codes import INTERRUPTED, WRONG
from gradtrace.cli.printing import Json, write, write_json, write_table
from gradtrace.cli.target import Arguments, Target, kind_of, script_function
from gradtrace.errors import GradtraceError, RankFailed

if TYPE_CHECKING:
    from gradtrace.components import components as component_names
    from gradtrace.runs.influence import Influence

Table = TypeVar("Table")

DEFAULT_TOP = 20
KINDS = (
    *("modules", "classes", "operators", "labels", "arguments"),
    *("heads", "experts", "layers", "steps"),
)
RETURNS = "return (model, loss_fn, loader), where loss_fn(model, batch) gives a loss"


def kinds(incomplete: str) -> list[str]:
    """Shell completion."""
    return [kind for kind in KINDS if kind.startswith(incomplete)]


Rule = Annotated[
    Literal["greedy", "edge", "viterbi"],
    Option(
        help="Which path an element has: step by step to the operator that hands back most "
        "(greedy), along the largest single edge (edge), or the heaviest of all (viterbi)."
    ),
]
Granularity = Annotated[
    Literal["scalar", "operator"], Option(help="Follow elements, or whole tensors.")
]
Components = Annotated[
    list[str] | None,
    Option(
        help="Influence of modules, classes, operators, labels, arguments (of sums); or of a "
        "module by name or pattern; or of a group: NAME=PATTERN,PATTERN. May be given again.",
        autocompletion=kinds,
    ),
]
Of = Annotated[
    list[str] | None,
    Option(
        help="Influence on these parameters alone: names, patterns or modules. May be given again."
    ),
]
Weight = Annotated[
    Literal["count", "gradient"],
    Option(help="Count every element as one, or with its |gradient|."),
]
Sample = Annotated[
    int | None,
    Option(help="Measure influence on so many elements only, drawn at random.", min=1),
]
Seed = Annotated[int, Option(help="For the sample.")]
Top = Annotated[int | None, Option(help="Show so many components, those that tell most.", min=1)]
Journal = Annotated[
    Path | None, Option(help="Keep what is counted in this file; a run that finds it goes on.")
]
PartsFunction = Annotated[
    str,
    script_function(
        "A function that returns (model, loss_fn, loader); loss_fn(model, batch) gives a loss, or "
        "one for each sample."
    ),
]


@app.command(
    epilog=examples(
        "gradtrace influence train.py:parts --components 'encoder.*' --journal counts.gradtrace",
        "gradtrace influence train.py:parts --sample 10000",
        "torchrun --nproc-per-node=4 -m gradtrace influence train.py:parts --json -- tiny 3",
        "where train.py has: def parts(size='base', layers='2'): ... "
        "return model, lambda model, batch: model(**batch).loss, loader",
    )
)
def influence(
    target: PartsFunction,
    args: Arguments = None,
    rule: Rule = "greedy",
    granularity: Granularity = "scalar",
    components: Components = None,
    weight: Weight = "count",
    of: Of = None,
    sample: Sample = None,
    seed: Seed = 0,
    top: Top = None,
    journal: Journal = None,
    as_json: Json = False,
) -> None:
    """Measure influence over a data set; under torchrun, many processes do it together."""
    options = {
        "components": parsed(components or []),
        "weight": weight,
        "of": of or None,
        "rule": rule,
        "granularity": granularity,
        "checkpoint": journal,
        "sample": sample,
        "seed": seed,
    }
    from gradtrace.distributed import dataset_influence

    wanted = Target.of(target, args, journal)
    table, spoken = over_data(wanted, dataset_influence.influence, options)
    if spoken and as_json:
        file = None if journal is None else str(journal)
        write_json({**_data(table, granularity, top), "journal": file})
    elif spoken:
        write_influence(table, top)
        if table.interrupted:
            write("Stopped before all batches were counted")
    raise Exit(INTERRUPTED if table.interrupted else 0)


def _data(table: Influence, granularity: str, top: int | None) -> dict[str, Any]:
    """The table for ``--json``."""
    return {
        "rule": table.rule,
        "granularity": granularity,
        "weight": table.weight,
        "pairs": table.pairs,
        "influence": rows(table, top),
        "notes": list(table.notes),
        "interrupted": table.interrupted,
    }


def parsed(given: Sequence[str]) -> component_names.Components:
    """A kind of component, or names, patterns and groups of them."""
    if not given:
        return None
    if len(given) == 1 and given[0] in KINDS:
        return given[0]
    groups: dict[str, list[str]] = {}
    for text in given:
        name, equals, parts = text.partition("=")
        groups[name] = parts.split(",") if equals else [text]
    return groups


# The table ---------------------------------------------------------------------------------------


def write_influence(found: Influence, top: int | None) -> None:
    """Print the components that tell most: by information, those in series last."""
    table = found.top(top or DEFAULT_TOP).table()
    more = len(found) - len(table.rows)
    left = (f"… and {more:,} more components (--top {len(found)} shows all)",) if more else ()
    write_table(replace(table, notes=(*left, *table.notes, *found.explained())))


def rows(found: Influence, top: int | None) -> list[dict[str, Any]]:
    """The rows of the components that tell most (None: all, in the model's order), for
    ``--json``.
    """
    table = replace(found, order="rows") if top is None else found.top(top)
    return [
        {key.removeprefix("± "): value for key, value in row.items()}
        for row in table.table().to_dicts()
    ]


# Measuring ---------------------------------------------------------------------------------------


def over_data(
    target: Target, measure: Callable[..., Table], options: dict[str, Any]
) -> tuple[Table, bool]:
    """Run the script's function and measure the model that it returned: the table, and whether this
    process prints it.

    Under torchrun the process group is initialised first, so that the script may wrap its model. An
    error that all ranks share is printed by rank 0; if rank 0 is gone, by the others.
    """
    from gradtrace.distributed.process_group import joined, launched

    with launched() as rank, _sigterm_as_failure():
        try:
            with ExitStack() as stack:
                with joined() as ranks:  # if the script fails on one rank, it fails on all
                    script = stack.enter_context(target.running())
                    parts = _parts(target.call(script), target.name)
                    ranks.meet({}, lambda said: None)
                return measure(*parts, **options), rank == 0
        except RankFailed as error:
            if rank == 0 or str(error).startswith("rank 0 ended"):
                raise
            raise Exit(WRONG) from error


@contextmanager
def _sigterm_as_failure() -> Iterator[None]:
    """Turn SIGTERM, by which torchrun stops all ranks after one has ended, into RankFailed."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield
        return

    def stop(*_: object) -> None:
        raise RankFailed("torchrun stopped this rank, as another one ended")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _parts(made: Any, name: str) -> tuple[Any, Any, Any]:
    """The model, the loss function and the loader that a function returned, in any order."""
    from torch import nn
    from torch.utils.data import Dataset, IterableDataset

    if not isinstance(made, (tuple, list)) or len(made) != 3:
        size = f" of {len(made)}" if isinstance(made, (tuple, list)) else ""
        raise GradtraceError(f"{name} returned a {type(made).__name__}{size}; {RETURNS}")
    found: dict[str, list[Any]] = {"model": [], "function": [], "loader": []}
    for x in made:
        if isinstance(x, nn.Module):
            found["model"].append(x)
        elif isinstance(x, Iterable) or hasattr(x, "__getitem__"):
            found["loader"].append(x)
        elif callable(x):
            found["function"].append(x)
    if any(len(some) != 1 for some in found.values()):
        raise GradtraceError(f"{name} returned {kind_of(tuple(made))}; {RETURNS}")
    ((model,), (function,), (loader,)) = found.values()
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise GradtraceError(
            f"{name} returned a {type(loader).__name__}, which has samples and no batches: "
            "return DataLoader(data, batch_size=...)"
        )
    return model, function, loader
