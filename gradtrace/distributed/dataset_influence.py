"""Influence over a data set: batch by batch, resumable, interruptible."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from gradtrace.autodiff.loss_checks import grad_mode_restored
from gradtrace.components.components import Components, spelt
from gradtrace.distributed import batches, unwrap
from gradtrace.distributed.checkpoint import (
    SHARED,
    CheckpointFiles,
    PartialResult,
    Result,
    check_loaders,
    pooled,
)
from gradtrace.distributed.identity import RunIdentity, identity
from gradtrace.distributed.process_group import ProcessGroup, joined
from gradtrace.distributed.random_draws import RandomDraws
from gradtrace.distributed.rank_exchange import Message
from gradtrace.errors import GradtraceError, RankFailed
from gradtrace.pytorch.function_modes import paused
from gradtrace.pytorch.side_effects import restored, same_draws
from gradtrace.pytorch.wrapped_modules import is_tensor_parallel
from gradtrace.runs.influence import Influence, checked_weight, of_counts
from gradtrace.tracing.counting import Leaves, counts_of, positive, taking_part
from gradtrace.tracing.moments import loss_count, seed_of
from gradtrace.tracing.traced_program import indices
from gradtrace.watch import watch

LossFn = Callable[[Any, Any], Tensor]
Measure = Callable[[watch, Tensor, int], Result]
"""Measures a loss, given the watch of its forward pass and the number of the batch."""

COVERED_BATCHES, COVERED_ELEMENTS = 10, 100
"""Coverage is measured for the first batches, each time for that many elements of one loss: every
loss needs the values of its own backward pass.
"""


def influence(
    model: nn.Module,
    loss_fn: LossFn,
    loader: Iterable[Any],
    *,
    components: Components = None,
    weight: str = "count",
    of: Leaves | None = None,
    index: int | Sequence[int] | None = None,
    sample: int | None = None,
    seed: int = 0,
    rule: str = "greedy",
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
    group: Any = None,
    sharded: bool | None = None,
) -> Influence:
    """The influence of a model's components over a data set.

    The table has the standard error of every share over losses.
    Batches are traced one after the other and only counts are kept.

    With ``sample`` only the paths of that many random elements are followed, of others for every
    loss, drawn with ``seed``. What differs between losses then includes the error of their samples,
    so that the standard error, over losses, is that of both together.

    With ``checkpoint`` the counts are written to that file after every batch, and a run that finds
    the file continues with the batches that are not in it. The file identifies the weights, the
    code of ``loss_fn``, the settings and the data of each batch: if one differs, an error is raised
    and the file is not changed. So the loader must give the same batches again, in any order.
    Ctrl-C ends the run with the counts so far (``result.interrupted``).

    Where ``torch.distributed`` is initialised, all ranks call this: each traces every n-th batch of
    a loader that is the same on all of them, and each gets the table of all batches, with exactly
    the counts of a single process. If a rank fails, all do (RankFailed), and a run with the same
    ``checkpoint`` continues, with any number of ranks. DistributedDataParallel and ``fully_shard``
    are unwrapped for the duration; the ranks of a tensor-parallel model trace all batches together.
    See docs/distributed.md.

    Args:
        model: The model; it, its mode and its gradients are not changed. Random generators are put
            back, too: what is drawn here (dropout, shuffling) does not change what is drawn after.
            Each batch has random numbers of its own, whichever run or rank counts it.
        loss_fn: ``loss_fn(model, batch)`` returns one loss, or a vector with a loss for each
            sample.
        loader: Batches.
        components: Modules, groups or kinds of parts, as for ``Trace.influence``.
        weight: ``"count"``: every element counts 1; ``"gradient"``: its |gradient|.
        of: Leaves to trace alone, as for ``Trace.influence``.
        index: Of one element of that leaf.
        sample: Follow the paths of that many random elements only, of others for every loss.
        seed: Draws the same elements for the same number, on every device.
        rule: ``"greedy"``, ``"edge"`` or ``"viterbi"``.
        checkpoint: File to write to after every batch; a run that finds it continues.
        progress: Whether to show a progress bar; by default on a terminal.
        group: Process group whose ranks share the batches; False is this process alone.
        sharded: Whether the loader gives each rank its own part, as one with a DistributedSampler
            does.

    Returns:
        The table; ``interrupted`` says whether it was stopped with Ctrl-C.

    >>> import torch, gradtrace as gt
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    >>> def losses(model, x):
    ...     return model(x).square().squeeze(1)
    >>> table = gt.influence(model, losses, [torch.randn(4, 2) for _ in range(3)])
    >>> table.pairs, table.shares["2"], table.errors["2"]
    (12, 1.0, 0.0)
    """
    components = spelt(components)
    settings = {
        "components": components,
        "weight": weight,
        "rule": rule,
        **_elements(of, index, sample, seed),
    }

    def measure(watched: watch, loss: Tensor, number: int) -> Influence:
        trace = watched.trace(loss, rule=rule)
        wanted = of if of is None else taking_part(trace, of, _parameters(model))
        if wanted == []:  # none of them takes part in this loss, so there are no paths
            return Influence((), trace.pairs, checked_weight(weight), rule)
        seeded = seed_of(seed, number)
        counts, _ = counts_of(trace, components, wanted, index, sample, seeded)
        return of_counts(counts, rule).by(checked_weight(weight))

    options = RunOptions(checkpoint, progress, group, sharded)
    measured = over_batches("influence", settings, (model, loss_fn, loader), measure, options)
    assert isinstance(measured, Influence)
    return measured


def _elements(
    of: Leaves | None, index: int | Sequence[int] | None, sample: int | None, seed: int
) -> dict[str, Any]:
    """Which elements are counted, as settings of a run; empty if all are."""
    found: dict[str, Any] = {}
    if of is not None:
        found["of"] = of if isinstance(of, str) else list(of)
    if index is not None:
        found["index"] = list(indices(index))
    if sample is not None:
        found |= {"sample": positive("sample", sample), "seed": seed}
    return found


class RunOptions(NamedTuple):
    """How a data set is gone over; see ``influence``."""

    checkpoint: str | os.PathLike[str] | None
    progress: bool | None
    group: Any
    sharded: bool | None


def over_batches(
    kind: str,
    settings: dict[str, Any],
    given: tuple[nn.Module, LossFn, Iterable[Any]],
    measure: Measure,
    options: RunOptions,
) -> Result:
    """The sum of what ``measure`` finds of each batch: a result of this kind (``KINDS``).

    ``settings`` are those that a checkpoint must have been made with; ``given`` are the model, the
    loss function and the loader.
    """
    model, loss_fn, loader = given
    checkpoint, progress, group, sharded = options
    if not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
        raise GradtraceError(f"loader must give batches one by one, got {type(loader).__name__}")
    if is_tensor_parallel(model):
        group = _together(group, checkpoint)
    try:
        with grad_mode_restored(), joined(group) as ranks, unwrap.apart(model), same_draws(model):
            own = batches.sharded(loader, ranks.world) if sharded is None else sharded
            files = CheckpointFiles(checkpoint, settings, ranks.rank, ranks.world, kind)
            run = InfluenceRun(ranks, files, own)
            run.begin(model, loss_fn)
            run.count(
                loader,
                progress,
                lambda batch, number: _traced(model, loss_fn, batch, number, measure),
            )
            return run.conclude(batches.remarks(loader) if own else ())
    except RankFailed as error:
        if checkpoint is None:
            raise
        raise RankFailed(
            f"{error}; what was counted is kept beside {os.fspath(checkpoint)}, and the same call "
            "goes on from there"
        ) from error


def _together(group: Any, checkpoint: object) -> bool:
    """The group of a tensor-parallel model: none, since its ranks trace each batch together."""
    if group or checkpoint is not None:
        raise GradtraceError(
            "the ranks of a tensor-parallel model trace all batches together, and each gets the "
            "whole table: leave out group= and checkpoint=, and give all of them the same loader"
        )
    return False


NOTHING = PartialResult()


@dataclass
class InfluenceRun:
    """One rank's part of a measurement."""

    ranks: ProcessGroup
    files: CheckpointFiles
    own: bool  # whether each rank's loader gives a part of its own
    mine: PartialResult = NOTHING
    rest: PartialResult = NOTHING  # from files that belong to no rank of this run; on rank 0
    done: PartialResult = NOTHING  # the batches of all files, without the table
    part: batches.Batches | None = None
    random: RandomDraws | None = None
    number: int = 0

    @property
    def loader(self) -> str:
        """The name of the loader that batch numbers refer to; see ``checkpoint.SHARED``."""
        return f"{self.ranks.rank}/{self.ranks.world}" if self.own else SHARED

    @paused()
    def begin(self, model: nn.Module, loss_fn: LossFn) -> None:
        """Check that all ranks have the same arguments and model; read what is counted already."""
        self.ranks.stoppable = True
        said: Message = {
            "settings": self.files.settings,
            "model": unwrap.digest(model) if self.ranks.world > 1 else {},
            "loader": self.own,
        }
        if self.files.path is not None:
            found, self.files.names = identity(model, loss_fn)
            said["identity"] = asdict(found)
        self.random = RandomDraws(model, loss_fn)
        said["draws"] = self.random.start()
        agreed = self.ranks.meet(said, self._agreed)
        if "identity" in agreed:
            self.files.identity = RunIdentity(**agreed["identity"])
        counted = self.files.read().to_dict()
        plan = self.ranks.meet({"counted": counted, "draws": agreed["draws"]}, self._plan)
        self.mine = PartialResult.from_dict(plan["owns"][self.ranks.rank])
        self.done = PartialResult.from_dict(plan["done"])

    def _agreed(self, said: list[Message]) -> Message:
        for rank, other in enumerate(said):
            _check_arguments(rank, other, said[0])
        return said[0]

    def _plan(self, said: list[Message]) -> Message:
        owns = [PartialResult.from_dict(each["counted"]) for each in said]
        self.rest, left = pooled(self.files.whole(), owns, self.files.parts())
        done = self.rest
        for each in left:
            done = done.join(each)
        world = self.ranks.world
        check_loaders(done, [f"{k}/{world}" for k in range(world)] if self.own else [SHARED])
        draws = done.draws or said[0]["draws"]
        return {
            "owns": [replace(each, draws=draws).to_dict() for each in left],
            "done": PartialResult(None, done.batches, draws).to_dict(),
        }

    def count(
        self, loader: Iterable[Any], progress: bool | None, trace: Callable[[Any, int], Result]
    ) -> None:
        """Trace the batches of this rank, until all are done or the ranks are halted."""
        own, rank, world = self.own, self.ranks.rank, self.ranks.world
        assert self.random is not None
        journal = None
        if self.files.path is not None:
            journal = batches.Journaled(str(self.files.path), self.done.of(self.loader))
        self.part = batches.Batches(
            loader,
            lambda number: own or number % world == rank,
            journal,
            named=journal is not None or world > 1,
        )
        try:
            with bar(self.part, progress if rank == 0 else False) as step:
                for batch in self.part:
                    if self.ranks.halted:
                        return
                    self.number = batch.number
                    if not batch.counted:
                        with self.random.of_batch(self.done.draws, self.loader, batch.number):
                            part = trace(batch.data, batch.number)
                        self.mine = self.mine.add(self.loader, batch, part)
                        self.files.keep(self.mine)
                    step()
                self.part.end()
        except KeyboardInterrupt:
            self.ranks.interrupt()
        finally:
            self.files.flush()

    def conclude(self, notes: tuple[str, ...]) -> Result:
        """Merge the tables of all ranks; the same table on each of them."""
        assert self.part is not None
        said = {
            "counted": self.mine.to_dict(),
            "digest": self.part.digest,
            "stopped": self.ranks.halted,
        }
        verdict = self.ranks.meet(said, lambda all_said: self._verdict(all_said, notes))
        table = PartialResult.from_dict(verdict).table
        if table is None:
            raise KeyboardInterrupt
        if table.interrupted and self.ranks.rank == 0:
            many = f" of {self.ranks.world} ranks" if self.ranks.world > 1 else ""
            counted = f"{loss_count(table.pairs)}{many} counted"
            print(f"gradtrace: stopped in batch {self.number}; {counted}", file=sys.stderr)
        elif verdict.get("written"):
            self.files.forget()
        return table

    def _verdict(self, said: list[Message], notes: tuple[str, ...]) -> Message:
        whole = self.rest
        for each in said:
            whole = whole.join(PartialResult.from_dict(each["counted"]))
        table = whole.table
        if any(each["stopped"] for each in said):
            return PartialResult(table and replace(table, interrupted=True)).to_dict()
        if not self.own:
            for rank, each in enumerate(said):
                _check_batches(rank, each["digest"], said[0]["digest"])
        if table is None:
            raise GradtraceError("the loader gave no batch, so there is nothing to measure")
        if notes:
            table = replace(table, notes=tuple(sorted({*table.notes, *notes})))
        return {**PartialResult(table).to_dict(), "written": self.files.close(whole)}


def _check_arguments(rank: int, other: Message, first: Message) -> None:
    """Raise an error if a rank has other settings, another kind of loader or another model."""
    for key in {**first["settings"], **other["settings"]}:
        mine, theirs = first["settings"].get(key), other["settings"].get(key)
        if mine != theirs:
            raise GradtraceError(
                f"rank {rank} has {key}={theirs!r}, and rank 0 has {mine!r}: "
                "call it with the same arguments on all ranks"
            )
    if other["loader"] != first["loader"]:
        raise GradtraceError(
            f"rank {rank}'s loader {'is' if other['loader'] else 'is not'} a part of its own, and "
            f"rank 0's {'is' if first['loader'] else 'is not'}: give all ranks loaders of a kind"
        )
    names = first["model"].keys() | other["model"].keys()
    odd = sorted(n for n in names if first["model"].get(n) != other["model"].get(n))
    if odd:
        raise GradtraceError(
            f"the model of rank {rank} is not that of rank 0: {odd[0]} differs; load the same "
            "weights on all ranks, or seed them alike before the model is made"
        )


def _check_batches(rank: int, digest: str, first: str) -> None:
    """Raise an error if the ranks' loaders gave different batches under the same number."""
    if digest == first:
        return
    raise GradtraceError(
        f"the loader of rank {rank} did not give the batches that rank 0's gave "
        f"({digest.split(':')[0]} and {first.split(':')[0]} in all), so some samples were counted "
        "twice and others never: seed all ranks alike before the loader shuffles, or pass "
        "sharded=True if it gives each rank a part of its own; a checkpoint of this run is of no "
        "use"
    )


def _called(loss_fn: LossFn, model: nn.Module, batch: Any) -> Any:
    """The loss; if ``loss_fn`` takes something else, an error that says what it is given."""
    try:
        inspect.signature(loss_fn).bind(model, batch)
    except TypeError as error:
        raise GradtraceError(
            f"loss_fn is called as loss_fn(model, batch), and does not take that: {error}"
        ) from None
    except ValueError:  # a builtin, whose signature is not known
        pass
    return loss_fn(model, batch)


def _traced(model: nn.Module, loss_fn: LossFn, batch: Any, number: int, measure: Measure) -> Result:
    try:
        with restored(model) as undo:
            with watch(model, diagnose=False) as watched, undo:
                loss = _called(loss_fn, model, batch)
            if not isinstance(loss, Tensor):
                raise GradtraceError(
                    f"loss_fn returned a {type(loss).__name__}; return a loss, or a vector of "
                    "losses"
                )
            return measure(watched, loss, number)
    except GradtraceError as error:
        raise type(error)(f"batch {number}: {error}") from error


def _parameters(model: nn.Module) -> list[str]:
    """The names of all parameters, also of those that take no part in a loss."""
    names = (name for name, _ in model.named_parameters(remove_duplicate=False))
    return [name.removeprefix("module.") for name in names]


@contextmanager
def bar(part: batches.Batches, wanted: bool | None) -> Iterator[Callable[[], None]]:
    """A progress bar on standard error, if ``wanted``; None means if that is a terminal."""
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
        task = progress.add_task("tracing", total=None if part.total is None else len(part))
        yield lambda: progress.advance(task)
