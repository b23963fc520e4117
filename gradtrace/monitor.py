"""``Monitor``: which way gradient flows, now and then while a model trains."""

from __future__ import annotations

import atexit
import math
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from gradtrace import history, runs
from gradtrace.budget import Budget
from gradtrace.components import Components, spelt
from gradtrace.errors import GradtraceError, NonFinite
from gradtrace.flow import Flow
from gradtrace.history import History, Norms, Record, Writer
from gradtrace.influence import Influence, Moments
from gradtrace.loggers import Loggers
from gradtrace.lookout import Lookout, undisturbed
from gradtrace.runs import Seen
from gradtrace.shards import Shards
from gradtrace.trace import Trace
from gradtrace.watching import named_parameters, unwrapped, watch

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


@dataclass(frozen=True)
class Look:
    """What one process found at a step; an error, if it could not."""

    loss: float
    scale: float
    influence: Influence | None = None
    verdict: str = ""
    norms: Mapping[str, Norms] | None = None
    note: str = ""
    error: Exception | None = None


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
    until it can be afforded. The first step is always traced. ``monitor.cost`` says what it took.

    Results go to the append-only ``file`` (a run that finds it there goes on with it, from step
    ``start`` if given), to ``loggers`` (see ``gradtrace.loggers``), and into
    ``monitor.history``; beside the file lies a view of a traced step, ``run.gradtrace``.
    ``monitor.report("run.html")`` writes them as a page, at any time.

    A step is one of the optimiser: ``accumulate`` says how many backward passes it has, of which
    the first is traced. Under ``torch.distributed`` each process traces its own part of the batch
    and the first one writes the sum; make a Monitor in every process, or say ``distributed=False``.
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
        self._loggers = Loggers(loggers)
        self._shards = Shards(distributed)
        self._writer, self._number = self._opened(file, start)
        self._page = report
        self._views = Views(self._writer.path if self._writer else None, view)
        self._look = Lookout(model, composed, clock)
        self._due, self._micro = self._number, 0
        self._steady = getattr(model, "_compiled_call_impl", None) is not None
        self._ticked: float | None = None
        self._last: int | None = None  # the step that the last call was for
        self._times: list[float | None] = []
        self._first = self._number  # of these times
        self._traces = 0
        self._open = True
        self._next_look()
        atexit.register(_closed, weakref.ref(self))

    def _opened(
        self, file: str | os.PathLike[str] | None, start: int | None
    ) -> tuple[Writer | None, int]:
        """The file, in the process that writes, and the number of the first step."""
        writer, error = None, None
        settings = {
            "model": type(unwrapped(self.model)).__name__,
            **self._how,
            "components": spelt(self._how["components"]),
        }
        if self._shards.first:
            try:
                writer = Writer(file, settings, start)
            except GradtraceError as found:
                error = found
        first, error = self._shards.agree((writer.first if writer else 0, error))
        if error is not None:
            raise error
        return writer, first

    # The loop -----------------------------------------------------------------------------------

    def begin(self, step: int | None = None) -> None:
        """A step begins, or one of its backward passes; ``step`` is its number.

        Needed only where the model itself is not called (its parts are), where the loss function is
        compiled too, or where steps have numbers of their own, as in a callback.
        """
        self._alive()
        if step is not None and step != self._number:
            again = step == self._last
            self._number, self._micro = step, 1 if again else 0
            self._next_look()
        self._steady = True
        if self._look.wanted:
            self._look.open()

    def step(self, loss: Tensor, *, scale: float | Scaler = 1.0) -> Record | None:
        """Hand over the loss of this backward pass, before ``backward``; the record, if traced.

        ``scale`` is what the loss was multiplied by (``GradScaler.scale``, 1/k where gradients of k
        passes are added up), as a number or as the scaler: losses and gradients are told without
        it. Influence does not depend on it.
        """
        now = self._budget.clock()
        self._alive()
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
        if self._micro or self._number < self._due:
            return
        if self._traces:
            self._due = self._shards.agree(self._number + self._budget.wait())
        look.wanted = self._number >= self._due
        if look.wanted and self._steady:
            look.open()

    # A traced step ------------------------------------------------------------------------------

    def _traced(
        self, loss: Tensor, scale: float | Scaler, now: float, took: float | None
    ) -> Record | None:
        try:
            watched = self._look.take()
            if watched is None:
                self._steady, self._due = True, self._number + 1  # the model itself is not called
                return None
            trace, mine = self._looked(loss, scale, watched)
            looks = self._shards.gather(mine)
            self._refused(looks)
            self._traces += 1
            self._due = self._number + self.every
            return self._told(looks, trace, now, took)
        finally:
            self._look.seconds = 0.0

    def _looked(
        self, loss: Tensor, scale: float | Scaler, watched: watch
    ) -> tuple[Trace | None, Look]:
        """What this process finds. The first time errors are the caller's; later ones are told."""
        value, by = math.nan, 1.0
        try:
            value, by = _value(loss), _scale(scale)
            with undisturbed(self.model):
                trace, found = self._found(loss, watched)
            return trace, unscaled(replace(found, loss=value, scale=by))
        except NonFinite as error:
            return None, Look(value / by, by, note=str(error))
        except (GradtraceError, RuntimeError, MemoryError) as error:
            return None, Look(value / by, by, note=str(error), error=error)

    def _found(self, loss: Tensor, watched: watch) -> tuple[Trace, Look]:
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
        return trace, Look(0.0, 1.0, table, flow.verdict, _norms(flow))

    def _refused(self, looks: Sequence[Look]) -> None:
        """Raise what went wrong at the first trace; later, training goes on with a warning."""
        failed = [(rank, look) for rank, look in enumerate(looks) if look.error is not None]
        if not failed:
            return
        rank, look = failed[0]
        assert look.error is not None
        if not self._traces:
            if isinstance(look.error, GradtraceError):
                where = f"process {rank}: " if len(looks) > 1 else ""
                raise type(look.error)(f"{where}{look.error}") from look.error
            raise look.error
        warnings.warn(
            f"step {self._number:,} could not be traced ({look.note}); training goes on",
            stacklevel=4,
        )

    def _told(
        self, looks: Sequence[Look], trace: Trace | None, now: float, took: float | None
    ) -> Record:
        """Write down what was found."""
        budget = self._budget
        slowed = budget.slowed(took)
        budget.spend(self._look.seconds + slowed, within=False)
        seconds = budget.clock() - now
        budget.spend(seconds)
        budget.last = seconds + self._look.seconds + slowed
        record = replace(merged(self._number, looks), seconds=budget.last, share=budget.used)
        begun = budget.clock()
        if self._writer is not None:
            self._writer.record(record)
            self._flush()
            if self._loggers:
                self._loggers.log(record.step, history.scalars(record))
        written = budget.clock()
        budget.last += written - begun
        if self._writer is not None and trace is not None:
            self._views.keep(trace, record.step, budget)
        budget.spend(budget.clock() - begun)
        return record

    def _flush(self) -> None:
        if self._writer is not None:
            self._writer.times(self._first, self._times)
        self._first += len(self._times)
        self._times = []

    # What came out ------------------------------------------------------------------------------

    @property
    def cost(self) -> Cost:
        """What monitoring has taken so far."""
        return Cost(self._traces, self._budget.spent, self._budget.used)

    @property
    def history(self) -> History:
        """What was found so far; in the process that writes."""
        if self._writer is None:
            raise GradtraceError("the first process (rank 0) has the history of this run")
        if self._open:
            self._flush()
        return self._writer.read()

    def report(self, path: str | os.PathLike[str], *, name: str | None = None) -> None:
        """Write a page with influence over training, loss, time per step and the last view kept;
        at any time, while training goes on.
        """
        runs.write_report(self.history, self._views.last(), path, name)

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
        self._look.remove()
        self._shards.close()
        if self._writer is not None:
            self._flush()
            self._writer.end(self._number, error)
            self._writer.close()
            self._last_page()

    def _last_page(self) -> None:
        """Write the report that was asked for. What comes after training matters more than it."""
        if self._page is None:
            return
        try:
            self.report(self._page)
        except GradtraceError as error:
            warnings.warn(f"the report was not written: {error}", stacklevel=4)


class Views:
    """A view of a traced step, in a file beside that of the run, or in memory; later ones replace
    it.
    """

    def __init__(self, run: Path | None, wanted: bool) -> None:
        self.path = None if run is None else runs.beside(run)
        self._wanted = wanted
        self._seen: Seen | None = None
        self._cost: float | None = None

    def keep(self, trace: Trace, step: int, budget: Budget) -> None:
        """Make a view of a trace: of the first, and of others that can be afforded."""
        if not self._wanted or (self._cost is not None and budget.wait(self._cost)):
            return
        begun = budget.clock()
        try:
            found = runs.seen(trace, step)
            if self.path is None:
                self._seen = found
            else:
                runs.keep(self.path, found)
        except (GradtraceError, RuntimeError, MemoryError) as error:
            self._wanted = False
            warnings.warn(f"no view was kept: {error}; training goes on", stacklevel=6)
        self._cost = budget.clock() - begun

    def last(self) -> Seen | None:
        """The last one."""
        return self._seen if self.path is None else runs.kept(self.path)


def _closed(monitor: weakref.ref[Monitor]) -> None:
    """At the end of the program."""
    found = monitor()
    if found is not None:
        found.close()


# What is found ------------------------------------------------------------------------------------


def _norms(flow: Flow) -> dict[str, Norms]:
    return {row.module: Norms(row.norm, row.own) for row in flow}


def unscaled(look: Look) -> Look:
    """The same, of the loss before it was multiplied by its scale."""
    if look.scale == 1.0:
        return look
    by = look.scale
    norms = {
        # Outside of modules stands the loss itself, whose own gradient is 1 with any scale.
        name: Norms(each.output / (by if name else 1), None if each.own is None else each.own / by)
        for name, each in (look.norms or {}).items()
    }
    table = look.influence
    if table is not None:
        table = replace(
            table, rows=tuple(replace(r, gradient=_over(r.gradient, by)) for r in table)
        )
    return replace(look, loss=look.loss / by, influence=table, norms=norms)


def _over(moments: Moments, by: float) -> Moments:
    """The moments of gradients that are so many times smaller."""
    one = abs(Fraction(by))
    t, e, *squares = moments.parts()
    return Moments(t / one, e / one, *(each / one**2 for each in squares))


def merged(step: int, looks: Sequence[Look]) -> Record:
    """What all processes found, as one: exact sums of counts, means of losses and norms."""
    tables = [look.influence for look in looks if look.influence is not None]
    norms: dict[str, list[Norms]] = {}
    for name, each in chain.from_iterable((look.norms or {}).items() for look in looks):
        norms.setdefault(name, []).append(each)
    return Record(
        step,
        sum(look.loss for look in looks) / len(looks),
        tables[0].merge(*tables[1:]) if tables else None,
        " ".join(dict.fromkeys(look.verdict for look in looks if look.verdict)),
        {name: Norms(*map(_mean, zip(*some))) for name, some in norms.items()},
        looks[0].scale,
        notes=tuple(dict.fromkeys(look.note for look in looks if look.note)),
    )


def _mean(values: Sequence[float | None]) -> Any:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


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
