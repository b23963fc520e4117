"""``Monitor``: traces influence and gradient flow at intervals while a model trains."""

from __future__ import annotations

import atexit
import math
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NamedTuple, TypeAlias

import torch.distributed as dist
from torch import Tensor, nn

from gradtrace.autodiff.saved_hooks import UNPACKED_ONCE
from gradtrace.components.components import Components, spelt
from gradtrace.distributed import process_group
from gradtrace.distributed.rank_exchange import RankExchange
from gradtrace.errors import GradtraceError, caution, not_one_of
from gradtrace.pytorch.fsdp import ShardedModel
from gradtrace.pytorch.module_calls import listen
from gradtrace.pytorch.wrapped_modules import is_tensor_parallel, unwrapped
from gradtrace.runs.history import History, StepIncident, StepRecord
from gradtrace.runs.step_results import StepResult, merged
from gradtrace.runs.writer import Writer
from gradtrace.traced import Trace
from gradtrace.tracing.moments import seed_of
from gradtrace.training import gathering, run_report, tuning
from gradtrace.training.gathering import Gathering
from gradtrace.training.loggers import Curves, Loggers
from gradtrace.training.overhead_budget import Budget
from gradtrace.training.rerun import LossOf
from gradtrace.training.run_report import ViewCache
from gradtrace.training.sampled_watch import SampledWatch
from gradtrace.training.schedule import Schedule, StepClock, StepTimes
from gradtrace.training.step_tracer import Scaler, StepTracer, diagnosed, warn_of_silent
from gradtrace.training.triggers import NO_BATCH, Trigger
from gradtrace.types import RULES

File: TypeAlias = "str | os.PathLike[str] | None"


class Cost(NamedTuple):
    """The cost of monitoring: number of traces, seconds, and their share of training time."""

    traces: int
    seconds: float
    share: float

    def __str__(self) -> str:
        share = "" if math.isnan(self.share) else f", {self.share:.1%} of training time"
        many = "1 trace" if self.traces == 1 else f"{self.traces:,} traces"
        return f"{many} took {self.seconds:.3g} s{share}"


class Monitor:
    """Trace a training loop at intervals: one line in the loop, before ``backward``.

    ::

        with gt.Monitor(model, every=100, file="run.jsonl") as monitor:
            for x, y in loader:
                loss = loss_fn(model(x), y)
                monitor.step(loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    At intervals the influence of the model's modules is measured, with the verdict on the
    gradient's flow and its norms. Other steps cost some microseconds. The first step is always
    traced; a later one is deferred until the ``budget`` allows it, with one warning, and
    ``history.skipped`` counts the steps that were due. ``monitor.cost`` is what tracing took so
    far.

    Results go to the append-only ``file``, to ``loggers``, and into ``monitor.history``.
    ``monitor.report("run.html")`` writes them as a page, at any time.

    A step is an optimiser step; of its backward passes the first is traced. Under
    ``torch.distributed`` each process traces its own part of the batch and sends the result to rank
    0, which writes the sum: no process waits for another, and they may have different numbers of
    steps. Make a Monitor in every process, or pass ``distributed=False``. A model that is sharded
    (``fully_shard``, tensor parallel) is traced together, at the same steps: there is no ``budget``
    then, all elements are followed, and no view is stored.

    With ``trigger="nonfinite"``, ``"spike"`` or both, every step is looked at: if its loss or
    gradient is NaN or infinite, or its loss far above the recent ones (``spike`` standard
    deviations above their median), it is run again in a watch before the optimiser moves, and a
    file of at most ``incident_bytes`` beside ``file`` gets the diagnosis and all that is needed to
    run the step again (``monitor.incidents``, ``gradtrace.load_incident``). See docs/training.md.

    Training is not disturbed: weights are bitwise the same as without a Monitor, unless fused
    kernels have to be replaced by ``composed`` ones (on GPUs) or compiled modules run eagerly; both
    happen in traced steps only.

    Args:
        model: The model that is trained.
        every: Steps from one trace to the next.
        sample: How many random elements' paths are counted, with standard errors; ``"auto"``: all
            of a model of up to 30 million elements, else 10,000; None: all.
        components: Modules, groups or kinds of parts, as for ``Trace.influence``.
        rule: ``"greedy"``, ``"edge"`` or ``"viterbi"``.
        seed: Draws the sample.
        accumulate: Number of backward passes of a step.
        file: File to append results to; an existing one is continued. None keeps them in memory.
        start: Number of the first step; by default, of a file that is continued, the next one.
        loggers: Receive the scalars of each traced step, see ``gradtrace.training.loggers``.
        curves: The most shares that loggers get, of branches where paths have a choice.
        diagnose: Whether the first step is diagnosed; None: if there are loggers.
        budget: The most of training time that all traces take; None is no bound.
        view: Whether to store a traced step beside the file, as ``run.gradtrace``, for the page.
        report: File to which ``close`` writes the page.
        composed: Whether fused kernels are replaced in traced steps; None decides by device.
        distributed: Whether results of all ranks are summed; None asks ``torch.distributed``.
        trigger: ``"nonfinite"``, ``"spike"`` or both: which steps are run again and kept.
        spike: How many standard deviations above the median of recent losses a spike is.
        incident_bytes: The most bytes of a file that a trigger writes.
        clock: Seconds as a float; for tests.

    >>> import torch, gradtrace as gt
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    >>> with gt.Monitor(model, every=5, budget=None) as monitor:
    ...     for _ in range(11):
    ...         loss = model(torch.randn(4, 2)).square().mean()
    ...         _ = monitor.step(loss)
    ...         loss.backward()
    >>> monitor.history.steps, monitor.history.influences[-1].shares["2"]
    ((0, 5, 10), 1.0)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 100,
        sample: int | Literal["auto"] | None = "auto",
        components: Components = None,
        rule: str = "greedy",
        seed: int = 0,
        accumulate: int = 1,
        file: File = None,
        start: int | None = None,
        loggers: Iterable[Any] = (),
        curves: int = tuning.LOGGED_SHARES,
        diagnose: bool | None = None,
        budget: float | None = 0.01,
        view: bool = True,
        report: str | os.PathLike[str] | None = None,
        composed: bool | None = None,
        distributed: bool | None = None,
        trigger: str | Iterable[str] = (),
        spike: float = tuning.SPIKE_FACTOR,
        incident_bytes: int = tuning.INCIDENT_BYTES,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        counts = {"every": every, "accumulate": accumulate, "sample": sample, "curves": curves}
        _check(model, budget, rule, **counts)
        asked = Trigger.of(trigger, spike, incident_bytes, file)
        if together := asked.unless_sharded(ranks_trace_together(model)):
            sample, budget, view = None, None, False
        if together == "each loss":  # the same result on all ranks: the first writes it
            distributed, file, loggers = False, *_of_first_rank(file, loggers)
        self.model, self.every, self.accumulate = model, every, accumulate
        self._page, self._budget = report, Budget(budget, clock)
        self._loggers = Loggers(loggers, Curves(curves, components is not None))
        self._exchange = _exchange(distributed, model)
        seed = seed_of(seed, self._exchange.rank)  # samples of ranks are independent
        self._tracer = StepTracer(model, sample, spelt(components), rule, seed)
        settings = {**vars(self._tracer), "model": _name(model)}
        self._gathering = _opened(self._exchange, self._loggers, file, settings, start)
        self._schedule = Schedule(every, accumulate, self._budget, self._exchange)
        self._forks = bool(self._loggers) and not together
        wanted = self._exchange.first and (self._forks if diagnose is None else diagnose)
        self._sampled = SampledWatch(model, composed, clock, wanted and not together)
        self._listen(asked, composed, view, start or 0)

    def _listen(self, asked: Trigger, composed: bool | None, view: bool, start: int) -> None:
        """Listen to the model, and begin."""
        model = self.model
        self._schedule.base = self._gathering.base if self._gathering else start
        self._views = ViewCache(self._gathering.writer.path if self._gathering else None, view)
        self._open_explicitly = getattr(model, "_compiled_call_impl", None) is not None
        self._times = StepTimes(self._gathering.writer.times if self._gathering else None)
        most = min(tuning.COUNTED_TOGETHER, tuning.FLUSH_STEPS) if self._exchange.world == 1 else 0
        self._clock = StepClock(self._budget, self._times, self._schedule, most)
        note = partial(_note, self._gathering, self._schedule, self._exchange)
        self._triggers = asked.looking(model, composed, self._exchange.rank, self._sampled, note)
        told = self._sampled if self._triggers is None else self._triggers.keeper
        with ExitStack() as opened:
            opened.enter_context(UNPACKED_ONCE())
            opened.callback(listen(told, [model]))
            self._unlisten = weakref.finalize(self, opened.pop_all().close)
        self._here = self._open = True
        self._decide_next()
        _OPEN.add(self)

    # The loop -----------------------------------------------------------------------------------

    def begin(self, step: int | None = None) -> None:
        """Begin a step, or one of its backward passes.

        Needed only where submodules are called and not the model itself, where the loss function is
        compiled too, or where steps have numbers of their own, as in a callback.

        Args:
            step: Number of the step; by default one more than the last.
        """
        if self._usable() and self._triggers is not None:
            self._triggers.begin()
        self._number(step)

    def _number(self, step: int | None) -> None:
        """Begin a step, and keep for triggers what the model's next call begins with, not what
        there is now.
        """
        if not self._usable():
            return
        if step is not None and self._schedule.jump(step):
            if self._triggers is not None:
                self._triggers.revoke()
            self._decide_next()
        self._open_explicitly = True
        if self._sampled.wanted:
            self._sampled.open()

    def step(
        self,
        loss: Tensor,
        *,
        scale: float | Scaler = 1.0,
        terms: Mapping[str, Tensor] | None = None,
        rerun: LossOf | None = None,
        batch: Any = NO_BATCH,
    ) -> StepRecord | None:
        """Call with the loss of this backward pass, before ``backward``; the record, if traced.

        Args:
            loss: Loss of this backward pass.
            scale: What the loss was multiplied by (``GradScaler.scale``, 1/k where gradients of k
                passes are accumulated), as a number or as the scaler: reported values are unscaled.
            terms: What the loss is the sum of, by name, to compare as ``watch.conflicts`` does.
            rerun: Computes this loss again if a ``trigger`` fires: ``rerun(*batch)`` of a tuple,
                else ``rerun(batch)``, or ``rerun()`` without a batch.
            batch: What ``rerun`` is called with; the file holds it.

        Returns:
            The record of a traced step, else None; each of several processes gets that of its own
            part of the batch.
        """
        now, schedule, sampled = self._budget.clock(), self._schedule, self._sampled
        triggers = self._triggers
        if triggers is not None and triggers.plain and scale == 1 and not sampled.idle:
            at = schedule.at
            if triggers.fine(loss, schedule.base + at, rerun, batch):
                self._clock.began.append((schedule.last, now))
                schedule.last, schedule.at = at, at + 1
                return None
        took = record = None
        if not (self._open and self._here) and not self._usable():
            return None
        if schedule.micro == 0 and schedule.at != schedule.last:
            if self._clock.room <= 0 or sampled.wanted or sampled.idle:
                took = self._clock.tick(now, clean=not sampled.idle)
                sampled.idle = False
            else:
                self._clock.began.append((schedule.last, now))
            schedule.last = schedule.at
        if sampled.wanted:
            record = self._traced(loss, scale, terms, now, took)
        if triggers is not None:
            took_long = triggers.look(loss, scale, schedule, rerun, batch)
            if took_long:
                self._clock.count()
                self._budget.spend(took_long)
        if schedule.advance() or self._clock.room <= 0:
            self._clock.count()
            self._decide_next()
        else:
            sampled.wanted = False
        if triggers is not None and not sampled.wanted:
            triggers.grant(min(self._clock.room - 1, schedule.idle))
        return record

    @property
    def due(self) -> bool:
        """Whether the next loss is traced."""
        return self._sampled.wanted

    def pause(self) -> None:
        """Leave this step out of the timing, because of an evaluation, for example.

        Evaluations that call the model itself without gradients are detected automatically.
        """
        self._sampled.idle = True

    def _usable(self) -> bool:
        """False for a copy of the Monitor in a forked process, where it does nothing."""
        if not self._open:
            raise GradtraceError("this Monitor is closed; make another one to go on")
        return self._here

    def _decide_next(self) -> None:
        """Decide whether the next backward pass is to be traced."""
        self._sampled.wanted = False
        if self._exchange.world > 1:
            self._schedule.listen(self._gathering)
        self._sampled.wanted = self._schedule.decide()
        if self._sampled.wanted and self._open_explicitly:
            self._sampled.open()

    # A traced step ------------------------------------------------------------------------------

    def _traced(
        self,
        loss: Tensor,
        scale: float | Scaler,
        terms: Mapping[str, Tensor] | None,
        now: float,
        took: float | None,
    ) -> StepRecord | None:
        schedule, result = self._schedule, None
        try:
            watched = self._sampled.take()
            if watched is None:  # the model itself is not called
                self._open_explicitly, schedule.due = True, schedule.at + 1
                return None
            if first := self._sampled.diagnose:
                self._sampled.diagnose = False
                say = partial(self._loggers.say, schedule.number, "diagnosis")
                now += diagnosed(watched, loss, self._budget, say)
            trace, result = self._tracer.result(loss, scale, watched, self._forks, terms)
            if result.error is not None:
                _raise_or_warn(result.error, result.note, schedule, self._exchange)
            if trace is not None and not schedule.traces and not first:
                warn_of_silent(self.model, trace)
            self._schedule.note_skipped(self._gathering)
            schedule.traced()
            return self._publish(result, trace, now, took)
        finally:
            self._sampled.seconds, result = 0.0, None  # an error in it refers to this frame

    def _publish(
        self, result: StepResult, trace: Trace | None, now: float, took: float | None
    ) -> StepRecord:
        """Write the result to the file, or send it to rank 0; and account for the time it took."""
        budget, number = self._budget, self._schedule.number
        watching = self._sampled.seconds + budget.slowed(took)
        budget.spend(watching, within=False)
        seconds = budget.clock() - now
        budget.spend(seconds)
        budget.last = seconds + watching
        result = replace(result, error=None, seconds=budget.last, share=budget.ratio)
        begun = budget.clock()
        if self._gathering is None:
            record = merged(number, {0: result}, 1)
            self._exchange.send({**self._schedule.message("step"), "result": result.to_dict()})
        else:
            record = self._gathering.add_own(number, result)
            self._times.flush()
        budget.last += budget.clock() - begun
        if self._gathering is not None and trace is not None:
            self._views.keep(trace, number, budget)
        budget.spend(budget.clock() - begun)
        return record

    # Results ------------------------------------------------------------------------------------

    @property
    def cost(self) -> Cost:
        """The cost of monitoring so far."""
        self._clock.count()
        return Cost(self._schedule.traces, self._budget.spent, self._budget.used)

    @property
    def incidents(self) -> tuple[Path, ...]:
        """The files that triggers have written, on this process; ``gradtrace.load_incident`` reads
        them.
        """
        return tuple(self._triggers.files) if self._triggers is not None else ()

    @property
    def history(self) -> History:
        """The results so far, on rank 0; with those that other processes have sent by now."""
        if self._gathering is None:
            raise GradtraceError("the first process (rank 0) has the history of this run")
        if self._open:
            self._clock.count()
            self._times.flush()
            self._schedule.note_skipped(self._gathering)
        return self._gathering.read()

    def report(self, path: str | os.PathLike[str], *, name: str | None = None) -> None:
        """Write an HTML page with influence over training, loss, time per step and the last stored
        view. Can be called at any time, also during training.

        Args:
            path: File to write.
            name: Title of the page.
        """
        run_report.write_report(self.history, self._views.last(), path, name)

    def __repr__(self) -> str:
        found = self._schedule
        return f"Monitor({found.traces:,} traces, step {found.number:,}, every {found.every:,})"

    # The end ------------------------------------------------------------------------------------

    def __enter__(self) -> Monitor:
        self._usable()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close("" if kind is None else kind.__name__)

    def close(self, error: str = "") -> None:
        """Write what is unwritten and the end line, and stop listening to the model.

        Args:
            error: Why the run ended early; written into the file.
        """
        if not self._open:
            return
        self._open = False
        _OPEN.discard(self)
        self._sampled.take()
        self._unlisten()
        if self._triggers is not None:
            self._triggers.close()
        if not self._here:
            return  # the file belongs to the process this one was forked from
        if self._gathering is None:
            self._exchange.send(self._schedule.message("end"))
            self._exchange.close(gathering.GRACE_SECONDS)
            return
        self._clock.count()
        self._times.flush()
        self._schedule.note_skipped(self._gathering)
        page = partial(run_report.report_at_end, self._gathering.read, self._views, self._page)
        self._gathering.close(self._schedule.number, error, self._budget.used, page)
        page()
        read, file = self._gathering.read, self._gathering.writer.path
        say = partial(self._loggers.say, self._schedule.number, "report")
        run_report.tell_where(read, self._page, file, say)


_OPEN: weakref.WeakSet[Monitor] = weakref.WeakSet()


def _forked() -> None:
    """In a forked process Monitors do nothing."""
    for monitor in list(_OPEN):
        monitor._here = False
        if monitor._triggers is not None:
            monitor._triggers.revoke()


os.register_at_fork(after_in_child=_forked)


@atexit.register
def _close_all() -> None:
    """Close all open Monitors at program exit, which may be due to an error."""
    error = getattr(sys, "last_type", None)
    for monitor in list(_OPEN):
        try:
            monitor.close("" if error is None else error.__name__)
        except Exception as failed:  # must not replace the program's own exit
            print(f"gradtrace: a Monitor was not closed: {failed}", file=sys.stderr)
    gathering.end_all(gathering.GRACE_SECONDS)


def _name(model: nn.Module) -> str:
    return type(unwrapped(model)).__name__


def _exchange(distributed: bool | None, model: nn.Module) -> RankExchange:
    """The exchange of messages with the other processes."""
    group = process_group.chosen(False if distributed is False else None)
    return RankExchange(group, f"monitor/{_name(model)}")


def _opened(
    exchange: RankExchange,
    loggers: Loggers,
    file: str | os.PathLike[str] | None,
    settings: dict[str, Any],
    start: int | None,
) -> Gathering | None:
    """The file of the run, on rank 0, which sends its first step to the other processes."""
    if not exchange.first:
        return None
    try:
        if file is not None:
            gathering.release(Path(file).expanduser())
        found = Gathering(Writer(file, settings, start), loggers, exchange)
    except BaseException:
        exchange.close(0)
        raise
    found.base = found.writer.first
    exchange.send({"first": found.base})
    return found


def _note(
    gathering: Gathering | None, schedule: Schedule, exchange: RankExchange, found: StepIncident
) -> None:
    """Write an incident to the run's file, or send it to rank 0, which does."""
    if gathering is not None:
        gathering.note(found)
    else:
        exchange.send({**schedule.message("step", found.step), "incident": found._asdict()})


def _raise_or_warn(error: Exception, note: str, at: Schedule, exchange: RankExchange) -> None:
    """Raise the error of a failed first trace; of later traces, warn and let training go on."""
    if at.traces:
        text = f"step {at.number:,} could not be traced ({note}); training goes on"
        caution(text)
        return
    if isinstance(error, GradtraceError):
        where = f"process {exchange.rank}: " if exchange.world > 1 else ""
        raise type(error)(f"{where}{error}") from error
    raise error


def ranks_trace_together(model: nn.Module) -> str:
    """What the ranks of a sharded model trace together, as they gather weights together: "a step"
    (``fully_shard``: each its own loss) or "each loss" (tensor parallel); else an empty string.
    """
    if is_tensor_parallel(model):
        return "each loss"
    return "" if ShardedModel.of(model) is None else "a step"


def _of_first_rank(file: File, loggers: Iterable[Any]) -> tuple[File, Iterable[Any]]:
    return (None, ()) if dist.get_rank() else (file, loggers)


def _check(model: nn.Module, budget: float | None, rule: str, **counts: object) -> None:
    """Check the arguments of a Monitor."""
    if not isinstance(model, nn.Module):
        raise GradtraceError(f"Monitor takes a torch.nn.Module, got {type(model).__name__}")
    if budget is not None and not 0 < budget <= 1:
        raise GradtraceError(
            f"budget is the share of training time that traces may take, such as 0.01, not "
            f"{budget}; None for no bound"
        )
    if rule not in RULES:
        raise GradtraceError(not_one_of("rule", rule, RULES))
    for name, number in counts.items():
        if name == "sample" and number in ("auto", None):
            continue
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise GradtraceError(f"{name} is a whole number from 1 on, not {number!r}")
