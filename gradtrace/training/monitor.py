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
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from gradtrace.distributed import process_group
from gradtrace.distributed.rank_exchange import RankExchange
from gradtrace.distributed.tuning import MESSAGE_SECONDS
from gradtrace.errors import GradtraceError, NonFinite, caution
from gradtrace.flow import Flow
from gradtrace.pytorch.wrapped_modules import named_parameters, unwrapped
from gradtrace.runs.history import History, Norms, StepRecord
from gradtrace.runs.step_results import StepResult, merged, unscaled
from gradtrace.runs.writer import Writer
from gradtrace.session import watch
from gradtrace.trace import Trace
from gradtrace.tracing.components import Components, spelt
from gradtrace.training import gathering, run_report
from gradtrace.training.gathering import Gathering
from gradtrace.training.loggers import Loggers
from gradtrace.training.overhead_budget import MAX_RUN_STEPS, Budget, deferral_message
from gradtrace.training.run_report import StoredView
from gradtrace.training.sampled_watch import SampledWatch, undisturbed

HOOKED = (
    "hooks on gradients do not run in a trace of a Monitor, since they run in backward: gradients, "
    "flow and influence are those before hooks"
)

FLUSH_STEPS = 1_000
"""Step times are written to the file at least every this many steps, traced or not."""


class Scaler(Protocol):
    """The part of ``torch.amp.GradScaler`` that is used here."""

    def get_scale(self) -> float:
        """The factor that losses are multiplied by."""


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
    ``trace.influence``) is measured with the paths of ``sample`` elements (None: of all), with the
    verdict on the gradient's flow and its norms. Other steps cost some microseconds. All traces
    take at most ``budget`` of training time in total (None: no bound): the next one is deferred
    until it is affordable, with one warning, and ``history.skipped`` counts the steps that were
    due. The first step is always traced. ``monitor.cost`` is what tracing took so far.

    Results go to the append-only ``file`` (an existing file is continued, from step ``start`` if
    given), to ``loggers`` (see ``gradtrace.training.loggers``), and into ``monitor.history``. A
    view of a traced step is stored beside the file, as ``run.gradtrace``.
    ``monitor.report("run.html")`` writes them as a page, at any time.

    A step is an optimiser step: ``accumulate`` is its number of backward passes, of which the first
    is traced. Under ``torch.distributed`` each process traces its own part of the batch and sends
    the result to rank 0, which writes the sum: no process waits for another, and they may have
    different numbers of steps. Make a Monitor in every process, or pass ``distributed=False``.

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
        sample: int | None = 10_000,
        components: Components = None,
        rule: str = "greedy",
        seed: int = 0,
        accumulate: int = 1,
        file: str | os.PathLike[str] | None = None,
        start: int | None = None,
        loggers: Iterable[Any] = (),
        budget: float | None = 0.03,
        view: bool = True,
        report: str | os.PathLike[str] | None = None,
        composed: bool | None = None,
        distributed: bool | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        _check(model, budget, rule)
        for name, number in (("every", every), ("accumulate", accumulate), ("sample", sample)):
            _positive(name, number)
        self.model = model
        self.every, self.accumulate = every, accumulate
        self._options: dict[str, Any] = {
            "sample": sample,
            "components": components,
            "rule": rule,
            "seed": seed,
        }
        self._budget = Budget(budget, clock)
        group = process_group.chosen(False if distributed is False else None)
        self._shards = RankExchange(group, f"monitor/{type(unwrapped(model)).__name__}")
        self._gathering, self._number = self._opened(file, start, Loggers(loggers))
        self._base: int | None = (
            self._number
        )  # number of the first step; None if steps were numbered by ``begin``
        self._page = report
        self._views = ViewCache(self._gathering.writer.path if self._gathering else None, view)
        self._sampled = SampledWatch(model, composed, clock)
        self._process = os.getpid()
        self._due, self._micro = self._number, 0
        self._open_explicitly = getattr(model, "_compiled_call_impl", None) is not None
        self._ticked: float | None = None
        self._last: int | None = None  # the step that the last call was for
        self._times: list[float | None] = []
        self._first = self._number  # the step of the first of these times
        self._traces = 0
        self._traced_at = self._number  # the last traced step
        self._lead_steps = (
            0  # how many steps ahead the next trace is decided, so that all ranks know
        )
        self._announced = self._cautioned = self._disconnect_warned = False
        self._open = True
        self._decide_next()
        _OPEN.add(self)

    def _opened(
        self, file: str | os.PathLike[str] | None, start: int | None, loggers: Loggers
    ) -> tuple[Gathering | None, int]:
        """The file of the run (on rank 0, else None), and the number of the first step."""
        if not self._shards.first:
            return None, start or 0
        settings = {
            "model": type(unwrapped(self.model)).__name__,
            **self._options,
            "components": spelt(self._options["components"]),
        }
        try:
            if file is not None:
                gathering.release(Path(file).expanduser())
            found = Gathering(Writer(file, settings, start), loggers, self._shards)
        except BaseException:
            self._shards.close(0)
            raise
        found.base = found.writer.first
        self._shards.send({"first": found.base})
        return found, found.base

    # The loop -----------------------------------------------------------------------------------

    def begin(self, step: int | None = None) -> None:
        """Begin a step, or one of its backward passes; ``step`` is the number of the step.

        Needed only where submodules are called and not the model itself, where the loss function is
        compiled too, or where steps have numbers of their own, as in a callback.
        """
        self._require_open()
        if os.getpid() != self._process:
            return
        if step is not None:
            self._base = None
        if step is not None and step != self._number:
            again = step == self._last
            self._number, self._micro = step, 1 if again else 0
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
        now = self._budget.clock()
        self._require_open()
        if os.getpid() != self._process:
            return None  # a copy of the Monitor in a forked process
        took = self._tick(now) if self._micro == 0 and self._number != self._last else None
        self._last = self._number
        record = self._traced(loss, scale, now, took) if self._sampled.wanted else None
        self._advance()
        return record

    def pause(self) -> None:
        """Leave this step out of the timing, because of an evaluation, for example.

        Evaluations that call the model itself without gradients are detected automatically.
        """
        self._sampled.idle = True

    def _require_open(self) -> None:
        if not self._open:
            raise GradtraceError("this Monitor is closed; make another one to go on")

    def _tick(self, now: float) -> float | None:
        """Record how long the previous step took; ``now`` is when this one began."""
        took = self._budget.tick(now, self._ticked, clean=not self._sampled.idle)
        if self._last is not None:
            if self._first + len(self._times) != self._last:
                self._flush()
                self._first = self._last
            self._times.append(took)
            if len(self._times) >= FLUSH_STEPS:
                self._flush()
        self._ticked, self._sampled.idle = now, False
        return took

    def _advance(self) -> None:
        """Advance to the next backward pass."""
        self._micro += 1
        if self._micro >= self.accumulate:
            self._micro = 0
            self._number += 1
        self._decide_next()

    def _decide_next(self) -> None:
        """Decide whether the next backward pass is to be traced."""
        sampled = self._sampled
        sampled.wanted = False
        if self._shards.world > 1:
            self._listen()
        if self._micro or self._number < self._due - self._lead_steps:
            return
        if self._traces and self._budget.share is not None and self._shards.first:
            self._plan()
        sampled.wanted = self._number >= self._due
        if sampled.wanted and self._open_explicitly:
            sampled.open()

    def _plan(self) -> None:
        """Defer the next trace until it is affordable, and send its step to the other processes."""
        wait = self._budget.wait()
        if wait > self._lead_steps or not self._lead_steps:
            self._due = max(self._due, self._number + wait)
            if wait and self._number >= self._traced_at + self.every:
                self._warn_deferred()
        elif not self._announced:
            self._due = max(self._due, self._number + self._lead_steps)
            self._announced = True
            self._shards.send({"due": self._due - (self._base or 0)})

    def _warn_deferred(self) -> None:
        if not self._cautioned and not math.isnan(self._budget.typical):
            self._cautioned = True
            caution(
                deferral_message(self._budget, self.every, self._traced_at + self.every),
                stacklevel=5,
            )

    def _listen(self) -> None:
        """Take the messages of other processes; warn once if they cannot be reached."""
        others = self._shards
        if others.failed and not self._disconnect_warned:
            self._disconnect_warned = True
            caution(
                f"process {others.rank} cannot reach the others any more ({others.failed}); "
                "training goes on, and what they find is not added up",
                stacklevel=5,
            )
        if not others.inbox:
            return
        if self._gathering is not None:
            begun = self._budget.clock()
            self._gathering.pump()
            self._budget.spend(self._budget.clock() - begun)
            return
        for _, message in others.received():
            if "first" in message and self._base is not None:
                more = message["first"] - self._base
                self._base += more
                self._number += more
                self._due += more
                self._first += more
                self._traced_at += more
                self._last = None if self._last is None else self._last + more
            if "due" in message:
                # A step that has passed is traced now: processes may be at different steps.
                self._due = max(self._number, message["due"] + (self._base or 0))

    # A traced step ------------------------------------------------------------------------------

    def _traced(
        self, loss: Tensor, scale: float | Scaler, now: float, took: float | None
    ) -> StepRecord | None:
        try:
            watched = self._sampled.take()
            if watched is None:
                self._open_explicitly, self._due = (
                    True,
                    self._number + 1,
                )  # the model itself is not called
                return None
            trace, result = self._result_of(loss, scale, watched)
            self._raise_or_warn(result)
            self._note_skipped()
            self._traces += 1
            self._traced_at = self._number
            self._due = self._number + self.every
            self._announced = False
            record = self._publish(result, trace, now, took)
            self._schedule()
            return record
        finally:
            self._sampled.seconds = 0.0

    def _result_of(
        self, loss: Tensor, scale: float | Scaler, watched: watch
    ) -> tuple[Trace | None, StepResult]:
        """The trace and the result of this process; errors are stored in the result.

        ``_raise_or_warn`` raises an error of the first trace, and warns of later ones.
        """
        value, by = math.nan, 1.0
        try:
            value, by = _value(loss), _scale(scale)
            with undisturbed(self.model) as silence:
                trace, found = self._measured(loss, watched)
            if silence.hooked:
                found = replace(found, note=HOOKED)
            return trace, unscaled(replace(found, loss=value, scale=by))
        except NonFinite as error:
            return None, StepResult(value / by, by, note=str(error))
        except Exception as error:  # no error of tracing may end a long training run
            note = f"{type(error).__name__}: {error}"
            return None, StepResult(value / by, by, note=note, error=error)

    def _measured(self, loss: Tensor, watched: watch) -> tuple[Trace, StepResult]:
        options = self._options
        trace = watched.trace(loss, rule=options["rule"])
        if trace.gradients.keys().isdisjoint(name for name, _ in named_parameters(self.model)):
            raise GradtraceError(
                f"no parameter of the {type(unwrapped(self.model)).__name__} that is monitored "
                "takes part in this loss; pass the loss of the model that Monitor was made with, "
                "computed from its output without detach() and with parameters that require grad"
            )
        table = trace.influence(
            options["components"], sample=options["sample"], seed=options["seed"]
        )
        flow = trace.flow()
        return trace, StepResult(0.0, 1.0, table, flow.verdict, _norms(flow))

    def _raise_or_warn(self, result: StepResult) -> None:
        """Raise the error of a failed first trace; of later traces, warn and let training go on."""
        if result.error is None:
            return
        if not self._traces:
            if isinstance(result.error, GradtraceError):
                where = f"process {self._shards.rank}: " if self._shards.world > 1 else ""
                raise type(result.error)(f"{where}{result.error}") from result.error
            raise result.error
        caution(
            f"step {self._number:,} could not be traced ({result.note}); training goes on",
            stacklevel=4,
        )

    def _publish(
        self, result: StepResult, trace: Trace | None, now: float, took: float | None
    ) -> StepRecord:
        """Write the result to the file, or send it to rank 0; and account for the time it took."""
        budget = self._budget
        slowed = budget.slowed(took)
        budget.spend(self._sampled.seconds + slowed, within=False)
        seconds = budget.clock() - now
        budget.spend(seconds)
        budget.last = seconds + self._sampled.seconds + slowed
        result = replace(result, error=None, seconds=budget.last, share=budget.ratio)
        begun = budget.clock()
        if self._gathering is None:
            record = merged(self._number, {0: result}, 1)
            self._shards.send(
                {"result": result.to_dict(), **self._step_field("step", self._number)}
            )
        else:
            record = self._gathering.add_own(self._number, result)
            self._flush()
        written = budget.clock()
        budget.last += written - begun
        if self._gathering is not None and trace is not None:
            self._views.keep(trace, record.step, budget)
        budget.spend(budget.clock() - begun)
        return record

    def _step_field(self, field: str, step: int) -> dict[str, Any]:
        """A message field with a step number, as rank 0 expects it: relative, or absolute."""
        if self._base is None:
            return {field: step, "absolute": True}
        return {field: step - self._base}

    def _schedule(self) -> None:
        """Set how many steps ahead rank 0 decides on the next trace; other ranks wait for it."""
        if self._shards.world == 1 or self._budget.share is None:
            return
        if not self._shards.first:
            self._due = MAX_RUN_STEPS  # until rank 0 sends the step
            return
        typical = self._budget.typical
        self._lead_steps = (
            2 if math.isnan(typical) else 1 + math.ceil(MESSAGE_SECONDS / (typical or 1))
        )

    def _note_skipped(self) -> None:
        """Write how many steps were due since the last trace and not traced."""
        share = self._budget.share
        if self._gathering is None or share is None or not self._traces:
            return
        count = (self._number - 1 - self._traced_at) // self.every
        if count > 0:
            self._gathering.writer.skipped(self._traced_at, count, self.every, share)

    def _flush(self) -> None:
        if self._gathering is not None:
            self._gathering.writer.times(self._first, self._times)
        self._first += len(self._times)
        self._times = []

    # Results ------------------------------------------------------------------------------------

    @property
    def cost(self) -> Cost:
        """The cost of monitoring so far."""
        return Cost(self._traces, self._budget.spent, self._budget.used)

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
        return f"Monitor({self._traces:,} traces, step {self._number:,}, every {self.every:,})"

    # The end ------------------------------------------------------------------------------------

    def __enter__(self) -> Monitor:
        self._require_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close("" if kind is None else kind.__name__)

    def close(self, error: str = "") -> None:
        """Write what is unwritten and the end line, and stop listening to the model."""
        if not self._open:
            return
        self._open = False
        _OPEN.discard(self)
        self._sampled.remove()
        if os.getpid() != self._process:
            return  # the file belongs to the process this one was forked from
        if self._gathering is None:
            self._shards.send(self._step_field("end", self._number))
            self._shards.close(gathering.GRACE_SECONDS)
            return
        self._flush()
        self._note_skipped()
        page = partial(_written_page, self._gathering, self._views, self._page)
        self._gathering.close(self._number, error, self._budget.used, page)
        page()


def _written_page(found: Gathering, views: ViewCache, path: str | os.PathLike[str] | None) -> None:
    """Write the report to ``path``, if given. An error becomes a warning: what the program does
    after training matters more.
    """
    if path is None:
        return
    try:
        run_report.write_report(found.read(), views.last(), path)
    except Exception as error:
        caution(f"the report was not written: {error}", stacklevel=5)


class ViewCache:
    """The latest view of a traced step, in a file beside the run's file, or in memory."""

    def __init__(self, run: Path | None, wanted: bool) -> None:
        self.path = None if run is None else run_report.beside(run)
        self._wanted = wanted
        self._seen: StoredView | None = None
        self._cost: float | None = None

    def keep(self, trace: Trace, step: int, budget: Budget) -> None:
        """Store a view of a trace: of the first one, and of later ones that are affordable."""
        if not self._wanted or (self._cost is not None and budget.wait(self._cost)):
            return
        begun = budget.clock()
        try:
            found = run_report.seen(trace, step)
            if self.path is None:
                self._seen = found
            else:
                run_report.keep(self.path, found)
        except Exception as error:  # no error of a view may end a long training run
            self._wanted = False
            caution(f"no view was kept: {error}; training goes on", stacklevel=6)
        self._cost = budget.clock() - begun

    def last(self) -> StoredView | None:
        """The stored view, if there is one."""
        return self._seen if self.path is None else run_report.kept(self.path)


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


# Results ------------------------------------------------------------------------------------------


def _norms(flow: Flow) -> dict[str, Norms]:
    return {row.module: Norms(row.norm, row.own) for row in flow}


# Arguments ----------------------------------------------------------------------------------------


def _value(loss: Tensor) -> float:
    if not isinstance(loss, Tensor):
        raise GradtraceError(
            f"monitor.step takes the loss before loss.backward(), a tensor, not a "
            f"{type(loss).__name__}; not loss.item()"
        )
    return float(loss.detach().double().mean())


def _scale(scale: float | Scaler) -> float:
    found = float(scale.get_scale() if hasattr(scale, "get_scale") else scale)
    if not math.isfinite(found) or found == 0:
        raise GradtraceError(f"scale is what the loss was multiplied by, not {found}")
    return found


def _check(model: nn.Module, budget: float | None, rule: str) -> None:
    if not isinstance(model, nn.Module):
        raise GradtraceError(f"Monitor takes a torch.nn.Module, got {type(model).__name__}")
    if budget is not None and not 0 < budget <= 1:
        raise GradtraceError(
            f"budget is the share of training time that traces may take, such as 0.03, not "
            f"{budget}; None for no bound"
        )
    if rule not in ("greedy", "viterbi"):
        raise GradtraceError(f"rule is 'greedy' or 'viterbi', not {rule!r}")


def _positive(name: str, number: int | None) -> None:
    allowed = number is None and name == "sample"
    if not allowed and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
        raise GradtraceError(f"{name} is a whole number from 1 on, not {number!r}")
