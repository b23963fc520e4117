"""What ``gradtrace influence`` does: a script's model over its data, on one process or on many."""

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
from gradtrace.cli.tracing import SHOWN, chosen, rows
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
    """The table, and whether this process is the one that shows it."""

    table: Influence
    spoken: bool


def found(target: Target, args: Sequence[str], asked: InfluenceOptions) -> InfluenceOutcome:
    """Run the script's function, and measure what it returned.

    Under torchrun its ranks are joined before, so that it may wrap its model. Of an error that all
    ranks share, rank 0 speaks; if that is what is gone, the others do.
    """
    with joined() as ranks, _told_to_stop(ranks):
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
def _told_to_stop(ranks: Ranks) -> Iterator[None]:
    """When a process ends, torchrun stops all others: say so, and what is known of it."""
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
    """What the function returned; where it fails on one rank, the others do not wait for it."""
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
    """For a reader."""
    shown = chosen(table, top or SHOWN).table()
    more = len(table) - len(shown.rows)
    left = (f"… and {more:,} more components (--top {len(table)} shows all)",) if more else ()
    write_table(replace(shown, notes=(*left, *shown.notes)))
    if table.interrupted:
        write("Stopped before all batches were counted")


def data(table: Influence, asked: InfluenceOptions, top: int | None) -> dict[str, Any]:
    """For a program."""
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
