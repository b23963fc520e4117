"""``influence`` and ``decompose`` over a data set: resumable, shared out to ranks."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from glob import escape
from os import PathLike, fspath
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data.distributed import DistributedSampler

from gradtrace.components.components import spelt
from gradtrace.errors import BadFile, GradtraceError, NotScalar, RankFailed, reason_of
from gradtrace.files import append_line, json_value, read_lines
from gradtrace.pytorch.wrapped_modules import named_parameters, unwrapped
from gradtrace.table import Table
from gradtrace.tracing.counting import taking_part
from gradtrace.training.state import seed_all, undisturbed
from gradtrace.training.unwrap import apart
from gradtrace.watching import watch

T = TypeVar("T")
LossFn = Callable[[Any, Any], Tensor]
Measure = Callable[[watch, Tensor, int], Table | None]
"""The table of a loss of this batch; None where nothing that was asked for takes part in it."""

Found: TypeAlias = dict[int, list[dict[str, Any] | None]]
"""The tables of each batch that is done, by its number, as JSON values."""

Begun = tuple[str, Found, str]
"""The digest of a run, and of its journals what they have and the digest of the first batch."""

WAIT = timedelta(days=1)
"""How long ranks that are done wait for the slowest."""


def influence(
    model: nn.Module,
    loss_fn: LossFn,
    loader: Iterable[Any],
    *,
    by: Any = "modules",
    of: Any = None,
    index: int | Sequence[int] | None = None,
    per_sample: bool = False,
    rule: str = "greedy",
    sample: Any = "auto",
    seed: int = 0,
    journal: str | PathLike[str] | None = None,
    key: str = "",
    progress: bool | None = None,
) -> Table:
    """The influence of a model's components over a data set: ``trace.influence`` of every loss,
    added up in the order of the loader, with standard errors over losses.

    With ``journal`` each batch is a line in a file, and the same call goes on from there: for the
    same weights, settings and ``key``, which may name the data and the loss. The loader must give
    the same batches in the same order; that its first is the same is checked. Ctrl-C ends the run
    with the table so far. Where ``torch.distributed`` is initialised all ranks call this with the
    same loader: batch n is traced by rank n modulo their number, and each gets the whole table.
    What a loss draws (dropout) follows from ``seed`` and the number of its batch; buffers, modes
    and random generators are put back.

    Args:
        model: The model. DistributedDataParallel and ``fully_shard`` are unwrapped meanwhile.
        loss_fn: ``loss_fn(model, batch)`` returns one loss; or a vector, with ``per_sample``.
        loader: Batches.
        by: Components, as for ``Trace.influence``.
        of: Leaves to trace alone, as for ``Trace.influence``.
        index: Of one element of that leaf: over how many losses its path passes each component.
        per_sample: ``loss_fn`` returns a vector; each ``loss[i]`` is traced by itself.
        rule: ``"greedy"``, ``"edge"`` or ``"viterbi"``.
        sample: As for ``Trace.influence``; of each loss other elements.
        seed: Of what losses draw, and of the sample.
        journal: Path of the journal; each rank writes its own, ``journal.rank0`` and so on.
        key: Names what the journal cannot know: the data, the loss function.
        progress: Whether to show a progress bar; by default on a terminal.

    Returns:
        The table; ``about["interrupted"]`` if it was stopped by Ctrl-C.

    >>> import torch, gradtrace as gt
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    >>> batches = [torch.randn(4, 2) for _ in range(3)]
    >>> table = gt.influence(model, lambda model, x: model(x).square().mean(), batches)
    >>> table.about["losses"], table.shares["2"], table.errors["2"]
    (3, 1.0, 0.0)
    """
    parameters = [name for name, _ in named_parameters(model)]

    by = spelt(by)  # an iterator is read once

    def measure(watched: watch, loss: Tensor, number: int) -> Table | None:
        trace = watched.trace(loss, rule=rule)
        leaves = None if of is None else taking_part(trace, of, parameters)
        if leaves == []:  # an expert that no token went to, say
            return None
        return trace.influence(by, of=leaves, index=index, sample=sample, seed=seed + number)

    settings = ["influence", by, spelt(of), index, per_sample, rule, sample, seed, key]
    run = _Run(model, loss_fn, loader, measure, settings, seed, per_sample)
    return run.table(journal, progress)


def decompose(
    model: nn.Module,
    loss_fn: LossFn,
    loader: Iterable[Any],
    *,
    by: Any = "modules",
    seed: int = 0,
    journal: str | PathLike[str] | None = None,
    key: str = "",
    progress: bool | None = None,
) -> Table:
    """The gradient through each component over a data set: ``trace.decompose`` of every loss,
    added up. Arguments are those of ``gradtrace.influence``.

    Args:
        model: The model.
        loss_fn: ``loss_fn(model, batch)`` returns one loss.
        loader: Batches.
        by: Components, as for ``Trace.influence``.
        seed: Of what losses draw.
        journal: Path of the journal.
        key: Names what the journal cannot know.
        progress: Whether to show a progress bar; by default on a terminal.

    Returns:
        The table, with standard errors over losses.
    """
    by = spelt(by)  # an iterator is read once

    def measure(watched: watch, loss: Tensor, number: int) -> Table:
        return watched.trace(loss).decompose(by)

    settings = ["decompose", by, seed, key]
    return _Run(model, loss_fn, loader, measure, settings, seed, False).table(journal, progress)


@dataclass
class _Run:
    """One measurement, on one rank."""

    model: nn.Module
    loss_fn: LossFn
    loader: Iterable[Any]
    measure: Measure
    settings: list[Any]
    seed: int
    per_sample: bool

    def table(self, journal: str | PathLike[str] | None, progress: bool | None) -> Table:
        """The sum of the tables of all batches, the same on all ranks."""
        ranks = _Ranks()
        file = None if journal is None else Path(fspath(journal)).expanduser()
        try:
            with apart(self.model), undisturbed(self.model), torch.enable_grad():
                told = ranks.gather(lambda: self._begin(file, ranks))
                if len({run for run, _, _ in told}) > 1:
                    raise GradtraceError(
                        "the ranks differ in weights or settings: load the same weights on all of "
                        "them, or seed them alike before the model is made"
                    )
                done = {number for _, known, _ in told for number in known}
                shown = ranks.rank == 0 and (sys.stderr.isatty() if progress is None else progress)
                own = file and file.with_name(f"{file.name}.rank{ranks.rank}")
                ends = ranks.gather(lambda: self._count(own, told[ranks.rank], ranks, done, shown))
        finally:
            ranks.close()
        return _total(ends)

    def _begin(self, file: Path | None, ranks: _Ranks) -> Begun:
        """What must be equal on all ranks, and what the journals have."""
        if ranks.world > 1 and isinstance(getattr(self.loader, "sampler", 0), DistributedSampler):
            raise GradtraceError(
                "the loader has a DistributedSampler, and batches are shared out to ranks here: "
                "give all ranks the same loader, without one"
            )
        known = ranks.world > 1 or file is not None
        facts = _facts(unwrapped(self.model)) if known else ()
        run = _digest([json.dumps(json_value(self.settings)), *facts])
        return (run, *((Found(), "") if file is None else _read(file, run)))

    def _count(
        self, own: Path | None, begun: Begun, ranks: _Ranks, done: set[int], shown: bool
    ) -> tuple[Found, str, bool]:
        """Trace the batches of this rank; what it knows, a digest of the first one, if stopped."""
        run, found, kept = begun
        first = ""
        try:
            for number, batch in enumerate(_shown(self.loader, shown)):
                if number == 0:
                    first = _digest(tree_leaves(batch))
                    _write_head(own, run, first, kept)
                if number not in done and number % ranks.world == ranks.rank:
                    found[number] = self._traced(batch, number)
                    if own is not None:
                        append_line(own, {"batch": number, "tables": found[number]})
        except KeyboardInterrupt:
            return found, first, True
        return found, first, False

    def _traced(self, batch: Any, number: int) -> list[dict[str, Any] | None]:
        with undisturbed(self.model):
            seed_all(self.seed + 1_000_003 * number)
            with watch(self.model, diagnose=False) as watched:
                try:
                    loss = self.loss_fn(self.model, batch)
                except GradtraceError:
                    raise
                except Exception as error:
                    raise GradtraceError(
                        f"batch {number}, {_described(batch)}, cannot be given to loss_fn(model, "
                        f"batch): {type(error).__name__}: {reason_of(error)}"
                    ) from error
                losses = self._losses(loss, number)
            try:
                tables = [self.measure(watched, each, number) for each in losses]
            except GradtraceError as error:
                raise type(error)(f"batch {number}: {error}") from error
        return [table if table is None else table.to_dict() for table in tables]

    def _losses(self, loss: Any, number: int) -> list[Tensor]:
        """The losses of a batch, one by one."""
        if not isinstance(loss, Tensor):
            kind = type(loss).__name__
            raise GradtraceError(f"batch {number}: loss_fn returned a {kind}; return the loss")
        if self.per_sample and loss.dim() == 1 and len(loss):
            return [loss[n] for n in range(len(loss))]
        if self.per_sample or loss.numel() != 1:
            wanted = (
                "return a vector with a loss for each sample, as per_sample=True says"
                if self.per_sample
                else "return one loss (.mean()), or say per_sample=True to trace each of a vector"
            )
            raise NotScalar(f"batch {number}: the loss has shape {tuple(loss.shape)}; {wanted}")
        return [loss]


def _total(ends: list[tuple[Found, str, bool]]) -> Table:
    """The sum of what all ranks have found, in the order of batches."""
    if len({first for _, first, _ in ends if first}) > 1:
        raise GradtraceError(
            "the loaders of the ranks do not give the same batches, so some samples were counted "
            "twice and others never: seed them alike (generator=torch.Generator().manual_seed(0))"
        )
    found = {number: tables for some, _, _ in ends for number, tables in some.items()}
    kept = [each for number in sorted(found) for each in found[number]]
    tables = [each if each is None else Table.from_dict(each) for each in kept]
    stopped = any(stopped for _, _, stopped in ends)
    known = [table for table in tables if table is not None]
    if not known:
        if stopped:
            raise KeyboardInterrupt
        none = "no leaf of of= takes part in any loss" if tables else "the loader gave no batch"
        raise GradtraceError(f"{none}, so there is nothing to measure")
    without = replace(known[0], rows=(), notes=())
    table = Table.total([without if each is None else each for each in tables])
    if not stopped:
        return table
    note = f"Stopped by Ctrl-C: {len(found):,} batches were counted"
    about = {**table.about, "interrupted": True}
    return replace(table, notes=(*table.notes, note), about=about)


# Journals ----------------------------------------------------------------------------------------


def _read(journal: Path, run: str) -> tuple[Found, str]:
    """The batches that were counted, by any rank, and the digest of the first one."""
    found, first = Found(), ""
    for path in sorted(journal.parent.glob(f"{escape(journal.name)}.rank*[0-9]")):
        head, *lines = read_lines(path) or [{"run": run, "first": first}]
        if not isinstance(head, dict) or "run" not in head:
            raise BadFile(f"'{path}' is no journal: choose another name")
        if head["run"] != run:
            raise BadFile(
                f"'{path}' is of other weights, settings or another key=: choose another journal, "
                "or remove it"
            )
        first, found = head["first"], found | {line["batch"]: line["tables"] for line in lines}
    return found, first


def _write_head(own: Path | None, run: str, first: str, kept: str) -> None:
    """Begin a rank's journal; its first batch must be that of those that there are."""
    if kept and kept != first:
        raise BadFile(
            f"the first batch is another than that of '{own}': give the loader a seed "
            "(generator=torch.Generator().manual_seed(0)), or choose another journal"
        )
    if own is not None and not (own.exists() and read_lines(own)):
        append_line(own, {"run": run, "first": first})


def _facts(model: nn.Module) -> list[Any]:
    """What counts depend on: modes, weights, buffers."""
    named = (*model.named_parameters(), *model.named_buffers())
    return [*(module.training for module in model.modules()), *(x for pair in named for x in pair)]


def _digest(values: Iterable[Any]) -> str:
    found = hashlib.sha256()
    for value in values:
        if isinstance(value, Tensor):
            found.update(f"{value.dtype} {tuple(value.shape)}".encode())
            flat = value.detach().cpu().flatten().clone()  # numpy() would fix a storage's size
            found.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
        else:
            plain = value is None or isinstance(value, (bool, int, float, str, bytes))
            found.update(repr(value if plain else type(value).__name__).encode())
    return found.hexdigest()


# Ranks -------------------------------------------------------------------------------------------


class _Ranks:
    """The processes of ``torch.distributed``; alone if it is not initialised."""

    def __init__(self) -> None:
        joined = dist.is_available() and dist.is_initialized()
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)
        many = self.world > 1
        self._group = dist.new_group(backend="gloo", timeout=WAIT) if many else None

    def gather(self, call: Callable[[], T]) -> list[T]:
        """What ``call`` gives on each rank; if it fails on one, an error on all."""
        if self.world == 1:
            return [call()]
        mine, failed, cause = None, "", None
        try:
            mine = call()
        except Exception as error:
            kind = "" if isinstance(error, GradtraceError) else f"{type(error).__name__}: "
            failed, cause = f"rank {self.rank}: {kind}{reason_of(error)}", error
        said: list[Any] = [None] * self.world
        try:
            dist.all_gather_object(said, (mine, failed), group=self._group)
        except RuntimeError as error:
            raise RankFailed(f"another rank ended, or did not answer: {error}") from error
        if any(text for _, text in said):
            raise RankFailed("; ".join(text for _, text in said if text)) from cause
        return [each for each, _ in said]

    def close(self) -> None:
        """Leave the group that was made for this."""
        if self._group is not None:
            with suppress(RuntimeError):
                dist.destroy_process_group(self._group)


# What is shown -----------------------------------------------------------------------------------


def _shown(loader: Iterable[Any], wanted: bool) -> Iterable[Any]:
    """The loader, with a progress bar on standard error."""
    if not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
        raise GradtraceError(f"loader gives batches one by one; a {type(loader).__name__} does not")
    if not wanted:
        return loader
    from rich.console import Console
    from rich.progress import track

    return track(loader, "tracing", console=Console(stderr=True), transient=True)


def _described(batch: Any) -> str:
    """What a batch is, in a few words."""
    if isinstance(batch, Tensor):
        return f"a tensor of shape {tuple(batch.shape)}"
    kind = type(batch).__name__
    if isinstance(batch, dict):
        return f"a {kind} with {', '.join(map(repr, batch))}"
    if isinstance(batch, (list, tuple)):
        return f"a {kind} of {', '.join(map(_described, batch)) or 'nothing'}"
    return f"a {kind}"
