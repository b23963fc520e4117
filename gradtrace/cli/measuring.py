"""Implements ``gradtrace influence``: a script's model over its data, on one or more processes."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import typer
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from gradtrace.cli.codes import WRONG
from gradtrace.cli.printing import write, write_table
from gradtrace.cli.target import Target
from gradtrace.cli.tracing import DEFAULT_TOP, chosen, rows
from gradtrace.distributed.dataset_influence import influence
from gradtrace.errors import GradtraceError, RankFailed
from gradtrace.experiments.harness.ranks import Ranks, joined
from gradtrace.tracing.components import Components
from gradtrace.tracing.influence import Influence

RETURNS = "return (model, loss_fn, loader), where loss_fn(model, batch) gives a loss"


@dataclass(frozen=True)
class InfluenceOptions:
    """The options of the command."""

    rule: str = "greedy"
    granularity: str = "scalar"
    components: Components = None
    weight: str = "count"
    journal: Path | None = None


class InfluenceOutcome(NamedTuple):
    """The table, and whether this process prints it (``spoken``)."""

    table: Influence
    spoken: bool


def found(target: Target, args: Sequence[str], asked: InfluenceOptions) -> InfluenceOutcome:
    """Run the script's function, and measure the model that it returned.

    Under torchrun the process group is initialised first, so that the script may wrap its model. An
    error that all ranks share is printed by rank 0; if rank 0 is gone, by the others.
    """
    with joined() as ranks, _sigterm_as_failure(ranks):
        try:
            with target.running(args) as script:
                model, loss_fn, loader = _made(ranks, target, script, args)
                table = influence(
                    model,
                    loss_fn,
                    loader,
                    components=asked.components,
                    weight=asked.weight,
                    rule=asked.rule,
                    granularity=asked.granularity,
                    checkpoint=asked.journal,
                )
        except RankFailed as error:
            if ranks.first or str(error).startswith("rank 0 ended"):
                raise
            raise typer.Exit(WRONG) from error
        return InfluenceOutcome(table, ranks.first)


@contextmanager
def _sigterm_as_failure(ranks: Ranks) -> Iterator[None]:
    """Turn SIGTERM, by which torchrun stops all ranks after one has ended, into RankFailed."""
    if ranks.world == 1:
        yield
        return

    def stop(*_: object) -> None:
        raise RankFailed("torchrun stopped this rank, as another one ended")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _made(
    ranks: Ranks, target: Target, script: ModuleType, args: Sequence[str]
) -> tuple[nn.Module, Any, Iterable[Any]]:
    """The function's return value; if it fails on one rank, it fails on all."""
    try:
        made = parts(target.call(script, args), target.name)
    except (Exception, SystemExit) as error:
        with suppress(GradtraceError):
            ranks.end(f"{type(error).__name__}: {error}")
        raise
    try:
        ranks.end(None)
    except GradtraceError as error:
        raise RankFailed(str(error)) from error
    return made


def parts(made: Any, name: str) -> tuple[nn.Module, Any, Iterable[Any]]:
    """The model, the loss function and the loader that a function returned, in any order."""
    if not isinstance(made, (tuple, list)) or len(made) != 3:
        size = f" of {len(made)}" if isinstance(made, (tuple, list)) else ""
        raise GradtraceError(f"{name} returned a {type(made).__name__}{size}; {RETURNS}")
    models = [x for x in made if isinstance(x, nn.Module)]
    others = [x for x in made if not any(x is model for model in models)]
    loaders = [x for x in others if isinstance(x, Iterable) or hasattr(x, "__getitem__")]
    functions = [x for x in others if callable(x) and not any(x is one for one in loaders)]
    if not (len(models) == len(functions) == len(loaders) == 1):
        kinds = ", ".join(type(x).__name__ for x in made)
        raise GradtraceError(f"{name} returned ({kinds}); {RETURNS}")
    if isinstance(loaders[0], Dataset) and not isinstance(loaders[0], IterableDataset):
        raise GradtraceError(
            f"{name} returned a {type(loaders[0]).__name__}, which has samples and no batches: "
            "return DataLoader(data, batch_size=...)"
        )
    return models[0], functions[0], loaders[0]


def show(table: Influence, top: int | None) -> None:
    """Print the table as text."""
    shown = chosen(table, top or DEFAULT_TOP).table()
    more = len(table) - len(shown.rows)
    left = (f"… and {more:,} more components (--top {len(table)} shows all)",) if more else ()
    write_table(replace(shown, notes=(*left, *shown.notes)))
    if table.interrupted:
        write("Stopped before all batches were counted")


def data(table: Influence, asked: InfluenceOptions, top: int | None) -> dict[str, Any]:
    """The results for ``--json``."""
    return {
        "rule": table.rule,
        "granularity": asked.granularity,
        "weight": table.weight,
        "pairs": table.pairs,
        "influence": rows(chosen(table, top).table()),
        "notes": list(table.notes),
        "interrupted": table.interrupted,
        "journal": None if asked.journal is None else str(asked.journal),
    }
