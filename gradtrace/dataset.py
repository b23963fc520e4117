"""Influence over a data set: batch by batch, resumable, interruptible."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from gradtrace import files
from gradtrace.components import Components, spelt
from gradtrace.errors import GradtraceError
from gradtrace.influence import Influence
from gradtrace.watching import watch

LossFn = Callable[[Any, Any], Tensor]


def influence(
    model: nn.Module,
    loss_fn: LossFn,
    loader: Iterable[Any],
    *,
    components: Components = None,
    weight: str = "count",
    rule: str = "greedy",
    granularity: str = "scalar",
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> Influence:
    """The influence of a model's components over a data set.

    ``loss_fn(model, batch)`` returns one loss, or a vector with a loss for each sample; each counts
    as a pair, and the table has the standard error of every share over pairs. Batches are traced
    one after the other and only counts are kept. The model, its mode and its gradients stay as
    they are.

    With ``checkpoint`` what was counted is written to that file after every batch, and a run that
    finds it there goes on after the batches it has; the loader must give the same batches again.
    Ctrl-C ends the run with what was counted (``result.interrupted``). A progress bar is shown on a
    terminal, or as ``progress`` says.

    >>> import torch, gradtrace as gt
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    >>> def losses(model, x):
    ...     return model(x).square().squeeze(1)
    >>> table = gt.influence(model, losses, [torch.randn(4, 2) for _ in range(3)])
    >>> table.pairs, table.shares["2"], table.errors["2"]
    (12, 1.0, 0.0)
    """
    settings = {
        "components": spelt(components),
        "weight": weight,
        "rule": rule,
        "granularity": granularity,
    }
    total, done = _resumed(checkpoint, settings)
    number = done
    try:
        for number, batch in _batches(loader, done, progress):
            part = _traced(model, loss_fn, batch, number, settings | {"components": components})
            total = part if total is None else total.merge(part)
            if checkpoint is not None:
                _keep(checkpoint, settings, total, number + 1)
    except KeyboardInterrupt:
        if total is None:
            raise
        print(
            f"gradtrace: stopped in batch {number}; {total.pairs:,} pairs counted", file=sys.stderr
        )
        return replace(total, interrupted=True)
    if total is None:
        raise GradtraceError("the loader gave no batch, so there is nothing to measure")
    return total


def _traced(
    model: nn.Module, loss_fn: LossFn, batch: Any, number: int, settings: dict[str, Any]
) -> Influence:
    try:
        with watch(model) as watched:
            loss = loss_fn(model, batch)
        if not isinstance(loss, Tensor):
            raise GradtraceError(
                f"loss_fn returned a {type(loss).__name__}; return a loss, or a vector of losses"
            )
        trace = watched.trace(loss, rule=settings["rule"], granularity=settings["granularity"])
        return trace.influence(settings["components"], settings["weight"])
    except GradtraceError as error:
        raise type(error)(f"batch {number}: {error}") from error


def _batches(loader: Iterable[Any], done: int, progress: bool | None) -> Iterator[tuple[int, Any]]:
    """The batches that are not counted yet, with their numbers."""
    size = len(loader) if isinstance(loader, Sized) else None
    with bar(size, done, progress) as step:
        for number, batch in enumerate(loader):
            if number >= done:
                yield number, batch
                step()


@contextmanager
def bar(size: int | None, done: int, wanted: bool | None) -> Iterator[Callable[[], None]]:
    """A progress bar on standard error, if that is a terminal, or as ``wanted``."""
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("tracing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("tracing", total=size, completed=done)
        yield lambda: progress.advance(task)


# What is kept between runs ------------------------------------------------------------------------


def _keep(
    path: str | os.PathLike[str], settings: dict[str, Any], total: Influence, batches: int
) -> None:
    meta = {"settings": settings, "batches": batches, "influence": total.to_dict()}
    files.write(path, "influence", meta, {})


def _resumed(
    path: str | os.PathLike[str] | None, settings: dict[str, Any]
) -> tuple[Influence | None, int]:
    """What a file has, if there is one: the table and how many batches it counts."""
    if path is None or not os.path.exists(os.path.expanduser(path)):
        return None, 0
    meta = files.read(path, "influence").meta
    if meta["settings"] != settings:
        changed = [key for key in settings if meta["settings"].get(key) != settings[key]]
        raise GradtraceError(
            f"{path} was made with another {' and '.join(changed)}; pass another checkpoint file, "
            "or delete it to begin again"
        )
    return Influence.from_dict(meta["influence"]), int(meta["batches"])
