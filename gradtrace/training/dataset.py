"""``influence`` and ``decompose`` over a data set: resumable, shared out to ranks."""

from __future__ import annotations

import hashlib
import json
import reprlib
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from glob import escape
from os import PathLike, fspath
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data.distributed import DistributedSampler

from gradtrace.components.components import spelt
from gradtrace.errors import BadFile, GradtraceError, NotScalar, RankFailed, reason_of
from gradtrace.files import append_line, json_value, read_lines
from gradtrace.pytorch.wrapped_modules import named_parameters, unwrapped
from gradtrace.table import Table
from gradtrace.tracing.counting import taking_part
from gradtrace.tracing.influence import ordered
from gradtrace.training.state import seed_all, undisturbed
from gradtrace.training.unwrap import apart
from gradtrace.watching import watch

Journal: TypeAlias = str | PathLike[str] | None
LossFn = Callable[[Any, Any], Tensor]
Measure = Callable[[watch, Tensor, int], Table | None]
"""The table of a loss of this batch; None where nothing that was asked for takes part in it."""

Found: TypeAlias = dict[int, list[dict[str, Any] | None]]
"""The tables of each batch that is done, by its number, as JSON values."""

WAIT = timedelta(days=1)  # of ranks that are done, for the slowest
UNSEEDED = ": is it shuffled? Then give it generator=torch.Generator().manual_seed(0)"

End: TypeAlias = tuple[str, str, Found, bool]
"""What a rank knows in the end: digests of its weights and settings, and of the first batch; what
was found, by it and in journals; and whether it was stopped.
"""


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
    journal: Journal = None,
    key: str = "",
    progress: bool | None = None,
) -> Table:
    """The influence of a model's components over a data set: ``trace.influence`` of every loss,
    added up in the order of the loader, with standard errors over losses.

    With ``journal`` each batch is a line in a file, and the same call goes on from there: for the
    same weights, settings, ``key`` and first batch, in the same order. Ctrl-C ends the run with the
    table so far. Under ``torch.distributed`` all ranks call this with the same loader: batch n is
    traced by rank n modulo their number, and each gets the whole table. What a loss draws (dropout)
    follows from ``seed`` and the number of its batch; buffers, modes and generators are put back.

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

    settings = [json.dumps(json_value([by, spelt(of), index, per_sample, rule, sample, seed, key]))]
    run = _Run(model, loss_fn, loader, measure, settings, seed, per_sample)
    return ordered(run.table(journal, progress))


def decompose(
    model: nn.Module,
    loss_fn: LossFn,
    loader: Iterable[Any],
    *,
    by: Any = "modules",
    seed: int = 0,
    journal: Journal = None,
    key: str = "",
    progress: bool | None = None,
) -> Table:
    """The gradient through each component over a data set: ``trace.decompose`` of every loss,
    added up. Arguments are those of ``gradtrace.influence``.
    """
    by = spelt(by)  # an iterator is read once

    def measure(watched: watch, loss: Tensor, number: int) -> Table:
        return watched.trace(loss).decompose(by)

    settings = ["decompose", json.dumps(json_value([by, seed, key]))]
    return _Run(model, loss_fn, loader, measure, settings, seed, False).table(journal, progress)


@dataclass
class _Run:
    """One measurement, on one rank."""

    model: nn.Module
    loss_fn: LossFn
    loader: Iterable[Any]
    measure: Measure
    settings: list[str]
    seed: int
    per_sample: bool

    def table(self, journal: Journal, progress: bool | None) -> Table:
        """The sum of the tables of all batches, the same on all ranks."""
        several = dist.is_available() and dist.is_initialized()
        rank, world = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
        shown = rank == 0 and (sys.stderr.isatty() if progress is None else progress)
        file = None if journal is None else Path(fspath(journal)).expanduser()
        with apart(self.model), undisturbed(self.model), torch.enable_grad():
            return _total(_gathered(lambda: self._counted(file, rank, world, shown), rank, world))

    def _counted(self, file: Path | None, rank: int, world: int, shown: bool) -> End:
        """Trace the batches of this rank that no journal has; others only add those of others."""
        if world > 1 and isinstance(getattr(self.loader, "sampler", 0), DistributedSampler):
            raise GradtraceError("the loader has a DistributedSampler: give all ranks all batches")
        facts, model = list[Any](self.settings), unwrapped(self.model)
        if file or world > 1:  # what counts depend on
            facts += [each.training for each in model.modules()]
            facts += [x for pair in model.named_parameters() for x in pair]
            facts += [x for pair in model.named_buffers() for x in pair]
        run, first = _digest(facts), ""
        found, kept = _read(file, run) if file else (Found(), "")
        own = file and file.with_name(f"{file.name}.rank{rank}")
        try:
            for number, batch in enumerate(_shown(self.loader, shown)):
                if number == 0:
                    first = _digest(tree_leaves(batch))
                    if kept not in ("", first):
                        raise BadFile(f"the first batch is another than that of '{file}'{UNSEEDED}")
                if number not in found and number % world == rank:
                    found[number] = self._traced(batch, number)
                    if own is not None:
                        known = {"run": run, "first": first, "batch": number}
                        append_line(own, {**known, "tables": found[number]})
        except KeyboardInterrupt:
            return run, first, found, True
        return run, first, found, False

    def _traced(self, batch: Any, number: int) -> list[dict[str, Any] | None]:
        """The tables of a batch's losses, each traced by itself."""
        with undisturbed(self.model):
            seed_all(self.seed + 1_000_003 * number)
            try:
                with watch(self.model, diagnose=False) as watched:
                    losses = self._losses(self.loss_fn(self.model, batch))
                tables = [self.measure(watched, each, number) for each in losses]
            except GradtraceError as error:
                raise type(error)(f"batch {number}: {error}") from error
            except Exception as error:
                shapes = reprlib.repr(tree_map_only(Tensor, lambda x: tuple(x.shape), batch))
                text = f"{type(batch).__name__} of {shapes}: {type(error).__name__}"
                raise GradtraceError(f"batch {number}, a {text}: {reason_of(error)}") from error
        return [table if table is None else table.to_dict() for table in tables]

    def _losses(self, loss: Any) -> list[Tensor]:
        """The losses of a batch, one by one."""
        if not isinstance(loss, Tensor):
            raise GradtraceError(f"loss_fn returned a {type(loss).__name__}; return the loss")
        if self.per_sample and loss.dim() == 1 and len(loss):
            return [loss[n] for n in range(len(loss))]
        if self.per_sample or loss.numel() != 1:
            one = "return one loss (.mean()), or say per_sample=True to trace each of a vector"
            wanted = "return a vector, as per_sample=True says" if self.per_sample else one
            raise NotScalar(f"the loss has shape {tuple(loss.shape)}; {wanted}")
        return [loss]


def _total(ends: list[End]) -> Table:
    """The sum of what all ranks have found, in the order of batches."""
    runs, firsts, founds, stops = zip(*ends)
    if len({*runs}) > 1:
        raise GradtraceError("the ranks differ in weights or settings: load or seed them alike")
    if len({*firsts} - {""}) > 1:
        raise GradtraceError(f"the loaders of the ranks do not give the same batches{UNSEEDED}")
    found = {number: tables for some in founds for number, tables in some.items()}
    kept = [each for number in sorted(found) for each in found[number]]
    known = [Table.from_dict(each) for each in kept if each is not None]
    if any(stops) and not known:
        raise KeyboardInterrupt
    if not known:
        none = "no leaf of of= takes part in any loss" if kept else "the loader gave no batch"
        raise GradtraceError(f"{none}, so there is nothing to measure")
    without = replace(known[0], rows=(), notes=())  # these losses count, too
    table = Table.total([*known, *[without] * kept.count(None)])
    if not any(stops):
        return table
    note = f"Stopped by Ctrl-C: {len(found):,} batches were counted"
    return replace(table, notes=(*table.notes, note), about={**table.about, "interrupted": True})


def _gathered(call: Callable[[], End], rank: int, world: int) -> list[End]:
    """What ``call`` gives on each of the ranks; if it fails on one, an error on all."""
    if world == 1:
        return [call()]
    group = dist.new_group(backend="gloo", timeout=WAIT)
    mine, failed, cause, said = None, "", None, list[Any]([None] * world)
    try:
        mine = call()
    except Exception as error:
        failed, cause = f"rank {rank}: {reason_of(error)}", error
    try:
        dist.all_gather_object(said, (mine, failed), group=group)
    except RuntimeError as error:
        raise RankFailed(f"another rank ended, or did not answer: {error}") from error
    finally:
        with suppress(RuntimeError):
            dist.destroy_process_group(group)
    if any(text for _, text in said):
        raise RankFailed("; ".join(text for _, text in said if text)) from cause
    return [each for each, _ in said]


def _read(journal: Path, run: str) -> tuple[Found, str]:
    """The batches that were counted, by any rank, and the digest of the first one."""
    found, first = Found(), ""
    for path in sorted(journal.parent.glob(f"{escape(journal.name)}.rank*[0-9]")):
        for line in read_lines(path):
            if not isinstance(line, dict) or line.get("run") != run:
                other = "of other weights, settings or another key=, or no journal"
                raise BadFile(f"'{path}' is {other}: choose another, or remove it")
            found[line["batch"]], first = line["tables"], line["first"]
    return found, first


def _digest(values: Iterable[Any]) -> str:
    """A digest of tensors, numbers and texts; of anything else its type."""
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


def _shown(loader: Iterable[Any], wanted: bool) -> Iterable[Any]:
    """The loader, with a progress bar on standard error."""
    if not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
        raise GradtraceError(f"loader gives batches one by one; a {type(loader).__name__} does not")
    if not wanted:
        return loader
    from rich.console import Console
    from rich.progress import track

    return track(loader, "tracing", console=Console(stderr=True), transient=True)
