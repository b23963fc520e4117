"""``Monitor``: traces influence and gradient flow at intervals while a model trains."""

from __future__ import annotations

import atexit
import math
import os
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NamedTuple, TypeAlias

import torch.distributed as dist
from torch import Tensor, nn

from gradtrace.distributed import process_group
from gradtrace.distributed.rank_exchange import RankExchange
from gradtrace.errors import GradtraceError, caution, not_one_of
from gradtrace.pytorch.fsdp import ShardedModel
from gradtrace.pytorch.module_calls import listen
from gradtrace.pytorch.wrapped_modules import is_tensor_parallel, unwrapped
from gradtrace.runs.history import History, StepRecord
from gradtrace.runs.step_results import StepResult, merged
from gradtrace.runs.writer import Writer
from gradtrace.trace import Trace
from gradtrace.tracing.components import Components, spelt
from gradtrace.tracing.sampling import seed_of
from gradtrace.training import gathering, run_report, tuning
from gradtrace.training.gathering import Gathering
from gradtrace.training.loggers import Loggers
from gradtrace.training.overhead_budget import Budget
from gradtrace.training.run_report import ViewCache
from gradtrace.training.sampled_watch import SampledWatch
from gradtrace.training.schedule import Schedule
from gradtrace.training.step_tracer import Scaler, StepTracer
from gradtrace.types import RULES

File: TypeAlias = "str | os.PathLike[str] | None"


class Cost(NamedTuple):
    """The cost of monitoring: number of traces, seconds, and their share of training time."""

    traces: int
    seconds: float
    share: float

    def __str__(self) -> str:
        share = "" if math.isnan(self.share) else f", {self.share:.1%} of training time"
        return f"{self.traces:,} traces took {self.seconds:.3g} s{share}"


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

    Every ``every`` steps the influence of the model's modules (or of ``components``, as in
    ``trace.influence``) is measured, with the verdict on the gradient's flow and its norms. Only
    the paths of ``sample`` random elements are counted, with standard errors (``"auto"``: all of a
    model of up to 30 million elements, else 10,000; None: all). Other steps cost some microseconds.
    All traces take at most ``budget`` of training time in total (None: no bound): the next one is
    deferred until it is affordable, with one warning, and ``history.skipped`` counts the steps that
    were due. The first step is always traced. ``monitor.cost`` is what tracing took so far.

    Results go to the append-only ``file`` (an existing file is continued, from step ``start`` if
    given), to ``loggers`` (see ``gradtrace.training.loggers``), and into ``monitor.history``. A
    view of a traced step is stored beside the file, as ``run.gradtrace``.
    ``monitor.report("run.html")`` writes them as a page, at any time.

    A step is an optimiser step: ``accumulate`` is its number of backward passes, of which the first
    is traced. Under ``torch.distributed`` each process traces its own part of the batch and sends
    the result to rank 0, which writes the sum: no process waits for another, and they may have
    different numbers of steps. Make a Monitor in every process, or pass ``distributed=False``. A
    model that is sharded (``fully_shard``, tensor parallel) is traced together, at the same steps:
    there is no ``budget`` then, all elements are followed, and no view is stored.

    Training is not disturbed: weights are bitwise the same as without a Monitor, unless fused
    kernels have to be replaced by ``composed`` ones (on GPUs) or compiled modules run eagerly; both
    happen in traced steps only.

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
        budget: float | None = 0.03,
        view: bool = True,
        report: str | os.PathLike[str] | None = None,
        composed: bool | None = None,
        distributed: bool | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        _check(model, budget, rule, every=every, accumulate=accumulate, sample=sample)
        if together := ranks_trace_together(model):
            sample, budget, view = None, None, False
        if together == "each loss":  # the same result on all ranks: the first writes it
            distributed, file, loggers = False, *_of_first_rank(file, loggers)
        self.model, self.every, self.accumulate = model, every, accumulate
        self._page, self._budget = report, Budget(budget, clock)
        name, sinks = type(unwrapped(model)).__name__, Loggers(loggers)
        group = process_group.chosen(False if distributed is False else None)
        self._exchange = RankExchange(group, f"monitor/{name}")
        own_seed = seed_of(seed, self._exchange.rank)  # samples of ranks are independent
        self._tracer = StepTracer(model, sample, components, rule, own_seed)
        settings = {**vars(self._tracer), "model": name, "components": spelt(components)}
        self._gathering = _opened(self._exchange, sinks, file, settings, start)
        self._schedule = Schedule(every, accumulate, self._budget, self._exchange)
        self._schedule.base = self._gathering.base if self._gathering else start or 0
        self._views = ViewCache(self._gathering.writer.path if self._gathering else None, view)
        self._sampled = SampledWatch(model, composed, clock)
        self._unlisten = weakref.finalize(self, listen(self._sampled, [model]))
        self._open_explicitly = getattr(model, "_compiled_call_impl", None) is not None
        self._times, self._times_from = list[float | None](), 0  # of steps not in the file yet
        self._process, self._open = os.getpid(), True
        self._decide_next()
        _OPEN.add(self)

    # The loop -----------------------------------------------------------------------------------

    def begin(self, step: int | None = None) -> None:
        """Begin a step, or one of its backward passes; ``step`` is the number of the step.

        Needed only where submodules are called and not the model itself, where the loss function is
        compiled too, or where steps have numbers of their own, as in a callback.
        """
        if not self._usable():
            return
        if step is not None and self._schedule.jump(step):
            self._decide_next()
        self._open_explicitly = True
        if self._sampled.wanted:
            self._sampled.open()

    def step(self, loss: Tensor, *, scale: float | Scaler = 1.0) -> StepRecord | None:
        """Call with the loss of this backward pass, before ``backward``; the record, if traced.

        ``scale`` is what the loss was multiplied by (``GradScaler.scale``, 1/k where gradients of k
        passes are accumulated), as a number or as the scaler: losses and gradients are reported
        without it. Influence does not depend on it. Each of several processes gets the record of
        its own part of the batch.
        """
        now, schedule = self._budget.clock(), self._schedule
        if not self._usable():
            return None
        begins = schedule.micro == 0 and schedule.at != schedule.last
        took = self._tick(now) if begins else None
        schedule.last = schedule.at
        record = self._traced(loss, scale, now, took) if self._sampled.wanted else None
        schedule.advance()
        self._decide_next()
        return record

    def pause(self) -> None:
        """Leave this step out of the timing, because of an evaluation, for example.

        Evaluations that call the model itself without gradients are detected automatically.
        """
        self._sampled.idle = True

    def _usable(self) -> bool:
        """False for a copy of the Monitor in a forked process, where it does nothing."""
        if not self._open:
            raise GradtraceError("this Monitor is closed; make another one to go on")
        return os.getpid() == self._process

    def _tick(self, now: float) -> float | None:
        """Record how long the previous step took; ``now`` is when this one began."""
        took = self._budget.tick(now, clean=not self._sampled.idle)
        self._sampled.idle = False
        if self._schedule.last is not None:
            last = self._schedule.base + self._schedule.last
            if self._times_from + len(self._times) != last:
                self._flush()
                self._times_from = last
            self._times.append(took)
            if len(self._times) >= tuning.FLUSH_STEPS:
                self._flush()
        return took

    def _flush(self) -> None:
        if self._gathering is not None:
            self._gathering.writer.times(self._times_from, self._times)
        self._times_from += len(self._times)
        self._times = []

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
        self, loss: Tensor, scale: float | Scaler, now: float, took: float | None
    ) -> StepRecord | None:
        schedule = self._schedule
        try:
            watched = self._sampled.take()
            if watched is None:  # the model itself is not called
                self._open_explicitly, schedule.due = True, schedule.at + 1
                return None
            trace, result = self._tracer.result(loss, scale, watched)
            if result.error is not None:
                self._raise_or_warn(result.error, result.note)
            self._note_skipped()
            schedule.traced()
            return self._publish(result, trace, now, took)
        finally:
            self._sampled.seconds = 0.0

    def _raise_or_warn(self, error: Exception, note: str) -> None:
        """Raise the error of a failed first trace; of later traces, warn and let training go on."""
        if self._schedule.traces:
            number = self._schedule.number
            caution(f"step {number:,} could not be traced ({note}); training goes on", stacklevel=4)
            return
        if isinstance(error, GradtraceError):
            where = f"process {self._exchange.rank}: " if self._exchange.world > 1 else ""
            raise type(error)(f"{where}{error}") from error
        raise error

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
            self._flush()
        budget.last += budget.clock() - begun
        if self._gathering is not None and trace is not None:
            self._views.keep(trace, number, budget)
        budget.spend(budget.clock() - begun)
        return record

    def _note_skipped(self) -> None:
        """Write how many steps were due since the last trace and not traced."""
        schedule, share = self._schedule, self._budget.share
        if self._gathering is not None and share is not None and schedule.skipped:
            traced = schedule.base + schedule.traced_at
            self._gathering.writer.skipped(traced, schedule.skipped, schedule.every, share)

    # Results ------------------------------------------------------------------------------------

    @property
    def cost(self) -> Cost:
        """The cost of monitoring so far."""
        return Cost(self._schedule.traces, self._budget.spent, self._budget.used)

    @property
    def history(self) -> History:
        """The results so far, on rank 0; with those that other processes have sent by now."""
        if self._gathering is None:
            raise GradtraceError("the first process (rank 0) has the history of this run")
        if self._open:
            self._flush()
            self._note_skipped()
        return self._gathering.read()

    def report(self, path: str | os.PathLike[str], *, name: str | None = None) -> None:
        """Write an HTML page with influence over training, loss, time per step and the last stored
        view. Can be called at any time, also during training.
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
        """Write what is unwritten and the end line, and stop listening to the model."""
        if not self._open:
            return
        self._open = False
        _OPEN.discard(self)
        self._sampled.take()
        self._unlisten()
        if os.getpid() != self._process:
            return  # the file belongs to the process this one was forked from
        if self._gathering is None:
            self._exchange.send(self._schedule.message("end"))
            self._exchange.close(gathering.GRACE_SECONDS)
            return
        self._flush()
        self._note_skipped()
        page = partial(run_report.report_at_end, self._gathering.read, self._views, self._page)
        self._gathering.close(self._schedule.number, error, self._budget.used, page)
        page()


_OPEN: weakref.WeakSet[Monitor] = weakref.WeakSet()


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
            f"budget is the share of training time that traces may take, such as 0.03, not "
            f"{budget}; None for no bound"
        )
    if rule not in RULES:
        raise GradtraceError(not_one_of("rule", rule, RULES))
    for name, number in counts.items():
        if name == "sample" and number in ("auto", None):
            continue
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise GradtraceError(f"{name} is a whole number from 1 on, not {number!r}")
