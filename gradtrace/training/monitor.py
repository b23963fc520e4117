"""``Monitor``: which way gradient flows, now and then while a model trains."""

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

from gradtrace.distributed.rank_exchange import RankExchange, RankThread
from gradtrace.errors import GradtraceError, NonFinite, caution
from gradtrace.flow import Flow
from gradtrace.runs.history import History, Norms, StepRecord, Writer
from gradtrace.runs.step_results import StepResult, merged, unscaled
from gradtrace.session import named_parameters, unwrapped, watch
from gradtrace.trace import Trace
from gradtrace.tracing.components import Components, spelt
from gradtrace.training import gathering, run_report
from gradtrace.training.gathering import Gathering
from gradtrace.training.loggers import Loggers
from gradtrace.training.overhead_budget import LATER, Budget, told
from gradtrace.training.run_report import StoredView
from gradtrace.training.sampled_watch import SampledWatch, undisturbed

HOOKED = (
    "hooks on gradients do not run in a trace of a Monitor, since they run in backward: gradients, "
    "flow and influence are those before hooks"
)

FLUSH = 1_000
"""After so many steps their times are written down, traced or not."""


class Scaler(Protocol):
    """What ``torch.amp.GradScaler`` is here."""

    def get_scale(self) -> float:
        """What losses are multiplied by."""


class Cost(NamedTuple):
    """What monitoring took: how many traces, how many seconds, which share of training time."""

    traces: int
    seconds: float
    share: float

    def __str__(self) -> str:
        share = "" if math.isnan(self.share) else f", {self.share:.1%} of training time"
        return f"{self.traces:,} traces took {self.seconds:.3g} s{share}"


class Monitor:
    """Trace a training loop now and then: one line in the loop, before ``backward``.

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
    together take ``budget`` of training time at most (None: no bound): the next one is put off
    until it can be afforded, which is said once, and ``history.skipped`` counts the steps that were
    due. The first step is always traced. ``monitor.cost`` says what it took.

    Results go to the append-only ``file`` (a run that finds it there goes on with it, from step
    ``start`` if given), to ``loggers`` (see ``gradtrace.training.loggers``), and into
    ``monitor.history``; beside the file lies a view of a traced step, ``run.gradtrace``.
    ``monitor.report("run.html")`` writes them as a page, at any time.

    A step is one of the optimiser: ``accumulate`` says how many backward passes it has, of which
    the first is traced. Under ``torch.distributed`` each process traces its own part of the batch
    and the first one writes the sum, as the others tell of theirs: no process waits for another,
    and they may have different numbers of steps. Make a Monitor in every process, or say
    ``distributed=False``.
    Training is not disturbed: weights come out as without a Monitor, to the last bit, unless
    kernels that cannot be opened have to be ``composed`` (on GPUs) or compiled modules run eagerly,
    which they do in traced steps only.

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
        for word, number in (("every", every), ("accumulate", accumulate), ("sample", sample)):
            _positive(word, number)
        self.model = model
        self.every, self.accumulate = every, accumulate
        self._how: dict[str, Any] = {
            "sample": sample,
            "components": components,
            "rule": rule,
            "seed": seed,
        }
        self._budget = Budget(budget, clock)
        self._shards = RankExchange(type(unwrapped(model)).__name__, distributed)
        self._gathering, self._number = self._opened(file, start, Loggers(loggers))
        self._base: int | None = self._number  # of the numbers of steps; None if they were given
        self._page = report
        self._views = ViewCache(self._gathering.writer.path if self._gathering else None, view)
        self._look = SampledWatch(model, composed, clock)
        self._process = os.getpid()
        self._due, self._micro = self._number, 0
        self._steady = getattr(model, "_compiled_call_impl", None) is not None
        self._ticked: float | None = None
        self._last: int | None = None  # the step that the last call was for
        self._times: list[float | None] = []
        self._first = self._number  # of these times
        self._traces = 0
        self._traced_at = self._number  # the last traced step
        self._ahead = 0  # how many steps before it the next trace is decided upon
        self._announced = self._cautioned = self._unheard = False
        self._open = True
        self._next_look()
        _OPEN.add(self)

    def _opened(
        self, file: str | os.PathLike[str] | None, start: int | None, loggers: Loggers
    ) -> tuple[Gathering | None, int]:
        """The file, in the process that writes, and the number of the first step."""
        if not self._shards.first:
            return None, start or 0
        settings = {
            "model": type(unwrapped(self.model)).__name__,
            **self._how,
            "components": spelt(self._how["components"]),
        }
        try:
            if file is not None:
                gathering.release(Path(file).expanduser())
            found = Gathering(Writer(file, settings, start), loggers, self._shards)
        except BaseException:
            self._shards.close()
            raise
        found.base = found.writer.first
        self._shards.tell({"first": found.base})
        return found, found.base

    # The loop -----------------------------------------------------------------------------------

    def begin(self, step: int | None = None) -> None:
        """A step begins, or one of its backward passes; ``step`` is its number.

        Needed only where the model itself is not called (its parts are), where the loss function is
        compiled too, or where steps have numbers of their own, as in a callback.
        """
        self._alive()
        if os.getpid() != self._process:
            return
        if step is not None:
            self._base = None
        if step is not None and step != self._number:
            again = step == self._last
            self._number, self._micro = step, 1 if again else 0
            self._next_look()
        self._steady = True
        if self._look.wanted:
            self._look.open()

    def step(self, loss: Tensor, *, scale: float | Scaler = 1.0) -> StepRecord | None:
        """Hand over the loss of this backward pass, before ``backward``; the record, if traced.

        ``scale`` is what the loss was multiplied by (``GradScaler.scale``, 1/k where gradients of k
        passes are added up), as a number or as the scaler: losses and gradients are told without
        it. Influence does not depend on it. Of several processes, each gets what it found itself.
        """
        now = self._budget.clock()
        self._alive()
        if os.getpid() != self._process:
            return None  # a copy of the Monitor, in a process that was forked
        took = self._tick(now) if self._micro == 0 and self._number != self._last else None
        self._last = self._number
        record = self._traced(loss, scale, now, took) if self._look.wanted else None
        self._advance()
        return record

    def pause(self) -> None:
        """Something else than a step happens now, such as an evaluation: do not time this step.

        Evaluations that call the model itself without gradients are seen without it.
        """
        self._look.idle = True

    def _alive(self) -> None:
        if not self._open:
            raise GradtraceError("this Monitor is closed; make another one to go on")

    def _tick(self, now: float) -> float | None:
        """Note how long the step before took."""
        took = self._budget.tick(now, self._ticked, clean=not self._look.idle)
        if self._last is not None:
            if self._first + len(self._times) != self._last:
                self._flush()
                self._first = self._last
            self._times.append(took)
            if len(self._times) >= FLUSH:
                self._flush()
        self._ticked, self._look.idle = now, False
        return took

    def _advance(self) -> None:
        """On to the next backward pass."""
        self._micro += 1
        if self._micro >= self.accumulate:
            self._micro = 0
            self._number += 1
        self._next_look()

    def _next_look(self) -> None:
        """Whether the coming backward pass is to be traced."""
        look = self._look
        look.wanted = False
        if self._shards.line is not None:
            self._listen(self._shards.line)
        if self._micro or self._number < self._due - self._ahead:
            return
        if self._traces and self._budget.share is not None and self._shards.first:
            self._plan()
        look.wanted = self._number >= self._due
        if look.wanted and self._steady:
            look.open()

    def _plan(self) -> None:
        """Put the next trace off until it can be afforded, and say when it will be."""
        wait = self._budget.wait()
        if wait > self._ahead or not self._ahead:
            self._due = max(self._due, self._number + wait)
            if wait and self._number >= self._traced_at + self.every:
                self._put_off()
        elif not self._announced:
            self._due = max(self._due, self._number + self._ahead)
            self._announced = True
            self._shards.tell({"due": self._due - (self._base or 0)})

    def _put_off(self) -> None:
        if not self._cautioned and not math.isnan(self._budget.typical):
            self._cautioned = True
            caution(told(self._budget, self.every, self._traced_at + self.every), stacklevel=5)

    def _listen(self, line: RankThread) -> None:
        """Take what other processes have told."""
        if line.failed and not self._unheard:
            self._unheard = True
            caution(
                f"process {self._shards.rank} cannot reach the others any more ({line.failed}); "
                "training goes on, and what they find is not added up",
                stacklevel=5,
            )
        if not line.inbox:
            return
        if self._gathering is not None:
            begun = self._budget.clock()
            self._gathering.pump()
            self._budget.spend(self._budget.clock() - begun)
            return
        for _, message in line.heard():
            if "first" in message and self._base is not None:
                more = message["first"] - self._base
                self._base += more
                self._number += more
                self._due += more
                self._first += more
                self._traced_at += more
                self._last = None if self._last is None else self._last + more
            if "due" in message:
                # One that has passed is made up for at once: processes may be at different steps.
                self._due = max(self._number, message["due"] + (self._base or 0))
        line.eager = self._budget.share is not None  # else there is nothing more to come

    # A traced step ------------------------------------------------------------------------------

    def _traced(
        self, loss: Tensor, scale: float | Scaler, now: float, took: float | None
    ) -> StepRecord | None:
        try:
            watched = self._look.take()
            if watched is None:
                self._steady, self._due = True, self._number + 1  # the model itself is not called
                return None
            trace, look = self._looked(loss, scale, watched)
            self._refused(look)
            self._note_skipped()
            self._traces += 1
            self._traced_at = self._number
            self._due = self._number + self.every
            self._announced = False
            record = self._told(look, trace, now, took)
            self._schedule()
            return record
        finally:
            self._look.seconds = 0.0

    def _looked(
        self, loss: Tensor, scale: float | Scaler, watched: watch
    ) -> tuple[Trace | None, StepResult]:
        """What this process finds. The first time errors are the caller's; later ones are told."""
        value, by = math.nan, 1.0
        try:
            value, by = _value(loss), _scale(scale)
            with undisturbed(self.model) as silence:
                trace, found = self._found(loss, watched)
            if silence.hooked:
                found = replace(found, note=HOOKED)
            return trace, unscaled(replace(found, loss=value, scale=by))
        except NonFinite as error:
            return None, StepResult(value / by, by, note=str(error))
        except Exception as error:  # whatever it is, it must not end a long training
            note = f"{type(error).__name__}: {error}"
            return None, StepResult(value / by, by, note=note, error=error)

    def _found(self, loss: Tensor, watched: watch) -> tuple[Trace, StepResult]:
        how = self._how
        trace = watched.trace(loss, rule=how["rule"])
        if trace.gradients.keys().isdisjoint(name for name, _ in named_parameters(self.model)):
            raise GradtraceError(
                f"no parameter of the {type(unwrapped(self.model)).__name__} that is monitored "
                "takes part in this loss; pass the loss of the model that Monitor was made with, "
                "computed from its output without detach() and with parameters that require grad"
            )
        table = trace.influence(how["components"], sample=how["sample"], seed=how["seed"])
        flow = trace.flow()
        return trace, StepResult(0.0, 1.0, table, flow.verdict, _norms(flow))

    def _refused(self, look: StepResult) -> None:
        """Raise what went wrong at the first trace; later, training goes on with a warning."""
        if look.error is None:
            return
        if not self._traces:
            if isinstance(look.error, GradtraceError):
                where = f"process {self._shards.rank}: " if self._shards.world > 1 else ""
                raise type(look.error)(f"{where}{look.error}") from look.error
            raise look.error
        caution(
            f"step {self._number:,} could not be traced ({look.note}); training goes on",
            stacklevel=4,
        )

    def _told(
        self, look: StepResult, trace: Trace | None, now: float, took: float | None
    ) -> StepRecord:
        """Write down what was found, or tell it to the process that writes."""
        budget = self._budget
        slowed = budget.slowed(took)
        budget.spend(self._look.seconds + slowed, within=False)
        seconds = budget.clock() - now
        budget.spend(seconds)
        budget.last = seconds + self._look.seconds + slowed
        look = replace(look, error=None, seconds=budget.last, share=budget.ratio)
        begun = budget.clock()
        if self._gathering is None:
            record = merged(self._number, {0: look}, 1)
            self._shards.tell({"look": look.to_dict(), **self._placed("step", self._number)})
        else:
            record = self._gathering.own(self._number, look)
            self._flush()
        written = budget.clock()
        budget.last += written - begun
        if self._gathering is not None and trace is not None:
            self._views.keep(trace, record.step, budget)
        budget.spend(budget.clock() - begun)
        return record

    def _placed(self, word: str, step: int) -> dict[str, Any]:
        """A step as the first process understands it."""
        if self._base is None:
            return {word: step, "absolute": True}
        return {word: step - self._base}

    def _schedule(self) -> None:
        """See when the next trace has to be decided upon, and by whom."""
        if self._shards.world == 1 or self._budget.share is None:
            return
        if not self._shards.first:
            self._due = LATER  # until the first process says
            return
        typical = self._budget.typical
        self._ahead = (
            2 if math.isnan(typical) else 1 + math.ceil(self._shards.lead / (typical or 1))
        )

    def _note_skipped(self) -> None:
        """Write down how many steps were due since the last trace and not traced."""
        share = self._budget.share
        if self._gathering is None or share is None or not self._traces:
            return
        count = (self._number - 1 - self._traced_at) // self.every
        if count > 0:
            self._gathering.skipped(self._traced_at, count, self.every, share)

    def _flush(self) -> None:
        if self._gathering is not None:
            self._gathering.times(self._first, self._times)
        self._first += len(self._times)
        self._times = []

    # What came out ------------------------------------------------------------------------------

    @property
    def cost(self) -> Cost:
        """What monitoring has taken so far."""
        return Cost(self._traces, self._budget.spent, self._budget.used)

    @property
    def history(self) -> History:
        """What was found so far; in the process that writes, and of other processes what they have
        told.
        """
        if self._gathering is None:
            raise GradtraceError("the first process (rank 0) has the history of this run")
        if self._open:
            self._flush()
            self._note_skipped()
        return self._gathering.read()

    def report(self, path: str | os.PathLike[str], *, name: str | None = None) -> None:
        """Write a page with influence over training, loss, time per step and the last view kept;
        at any time, while training goes on.
        """
        run_report.write_report(self.history, self._views.last(), path, name)

    def __repr__(self) -> str:
        return f"Monitor({self._traces:,} traces, step {self._number:,}, every {self.every:,})"

    # The end ------------------------------------------------------------------------------------

    def __enter__(self) -> Monitor:
        self._alive()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close("" if kind is None else kind.__name__)

    def close(self, error: str = "") -> None:
        """Write what is left with the end mark, and leave the model as it was."""
        if not self._open:
            return
        self._open = False
        _OPEN.discard(self)
        self._look.remove()
        if os.getpid() != self._process:
            return  # the file is that of the process this one was forked from
        if self._gathering is None:
            self._shards.tell(self._placed("end", self._number))
            self._shards.close(gathering.GRACE)
            return
        self._flush()
        self._note_skipped()
        page = partial(_written_page, self._gathering, self._views, self._page)
        self._gathering.close(self._number, error, self._budget.used, page)
        page()


def _written_page(found: Gathering, views: ViewCache, path: str | os.PathLike[str] | None) -> None:
    """Write the report that was asked for. What comes after training matters more than it."""
    if path is None:
        return
    try:
        run_report.write_report(found.read(), views.last(), path)
    except Exception as error:
        caution(f"the report was not written: {error}", stacklevel=5)


class ViewCache:
    """A view of a traced step, in a file beside that of the run, or in memory; later ones replace
    it.
    """

    def __init__(self, run: Path | None, wanted: bool) -> None:
        self.path = None if run is None else run_report.beside(run)
        self._wanted = wanted
        self._seen: StoredView | None = None
        self._cost: float | None = None

    def keep(self, trace: Trace, step: int, budget: Budget) -> None:
        """Make a view of a trace: of the first, and of others that can be afforded."""
        if not self._wanted or (self._cost is not None and budget.wait(self._cost)):
            return
        begun = budget.clock()
        try:
            found = run_report.seen(trace, step)
            if self.path is None:
                self._seen = found
            else:
                run_report.keep(self.path, found)
        except Exception as error:  # whatever it is, it must not end a long training
            self._wanted = False
            caution(f"no view was kept: {error}; training goes on", stacklevel=6)
        self._cost = budget.clock() - begun

    def last(self) -> StoredView | None:
        """The last one."""
        return self._seen if self.path is None else run_report.kept(self.path)


_OPEN: weakref.WeakSet[Monitor] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """At the end of the program, which an error may have brought about."""
    error = getattr(sys, "last_type", None)
    for monitor in list(_OPEN):
        try:
            monitor.close("" if error is None else error.__name__)
        except Exception as failed:  # the program's own end is what counts
            print(f"gradtrace: a Monitor was not closed: {failed}", file=sys.stderr)
    gathering.end_all(gathering.GRACE)


# What is found ------------------------------------------------------------------------------------


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


def _positive(word: str, number: int | None) -> None:
    allowed = number is None and word == "sample"
    if not allowed and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
        raise GradtraceError(f"{word} is a whole number from 1 on, not {number!r}")
