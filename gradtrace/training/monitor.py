"""``Monitor``: traces a model at intervals while it trains, and keeps the steps that go wrong."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from math import inf, nan
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from gradtrace.autodiff.hooks import silenced
from gradtrace.autodiff.saved_hooks import UNPACKED_ONCE
from gradtrace.errors import GradtraceError, caution, not_one_of, reason_of
from gradtrace.files import made_folder
from gradtrace.kernels.sync import AsyncCopy
from gradtrace.pytorch.function_modes import paused
from gradtrace.pytorch.wrapped_modules import unwrapped
from gradtrace.table import Table
from gradtrace.traced import Trace
from gradtrace.training.forwards import Forwards
from gradtrace.training.gradients import Gradients, Pass
from gradtrace.training.history import RunLog
from gradtrace.training.incident import beginning, made
from gradtrace.training.measured import compared, measured, silent
from gradtrace.training.ranks import Ranks
from gradtrace.training.state import undisturbed
from gradtrace.training.writers import Writers
from gradtrace.types import RULES

File: TypeAlias = "str | os.PathLike[str] | None"


class Cost(NamedTuple):
    """What tracing has cost: traces and their seconds, without the first, whose share of the time
    that is, and how many steps there are to a trace.
    """

    traces: int
    seconds: float
    share: float
    steps: float

    def __str__(self) -> str:
        if not self.steps < inf:
            return "the first steps are traced"
        often = f"traces one step in {max(1, round(self.steps)):,}"
        return f"{often}: {self.share:.1%} of the time" if self.traces > 2 else often


class Monitor:
    """Trace a training loop at intervals: one line in the loop, before ``backward``.

    ::

        with gt.Monitor(model, file="run.jsonl") as monitor:
            for x, y in loader:
                loss = loss_fn(model(x), y)
                monitor.step(loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    A traced step measures the influence of the model's parts and the norms of the gradient. The
    first two steps are traced, and then as many as ``cost`` allows; ``print(monitor.cost)`` says
    how often that is. What is measured goes to ``monitor.history``, the ``file``, which is appended
    to, the ``writers``, and a page (``report``).

    With ``folder``, a step whose loss or gradient is not finite, or whose gradient is ``spike``
    times as long as usual, is kept as an *incident*: batch, weights, random states, and what is
    known of the cause. ``gt.load(path).diagnose(model, loss_fn)`` looks at it again.

    Training has the same bits as without a Monitor, if the forward pass changes nothing but
    buffers and random numbers: these are put back after a trace. On a GPU, fused kernels are
    replaced in traced steps, and compiled models run eagerly. Of several processes the first one
    traces its own part of the batch and writes.

    Args:
        model: The model that is trained.
        every: Trace each so many steps, exactly; None: as ``cost`` allows.
        by: Parts, as for ``Trace.influence``.
        rule: ``"greedy"``, ``"edge"`` or ``"viterbi"``.
        sample: How many random elements are followed; ``"auto"``: all, unless there are many.
        seed: Draws them.
        file: File to append results to; a run that goes on is continued there.
        folder: Where incidents are kept; None keeps none.
        writers: Get the numbers of traced steps: TensorBoard's ``SummaryWriter``, a W&B run, an
            object with ``log(values, step)``.
        report: File to which ``close`` writes a page.
        cost: The share of training time that traces may take, after the first.
        spike: How many times the median of the last 100 norms is a spike.
        most: The most incidents to keep.
        accumulate: Number of backward passes of a step; the first is traced.
        start: Number of the first step; None: 0, or the next one of ``file``.

    >>> import torch, gradtrace as gt
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    >>> with gt.Monitor(model, every=5) as monitor:
    ...     for _ in range(11):
    ...         loss = model(torch.randn(4, 2)).square().mean()
    ...         monitor.step(loss)
    ...         loss.backward()
    >>> monitor.history.column("step"), monitor.history.rows[-1]["share 2"]
    ([0, 5, 10], 1.0)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int | None = None,
        by: Any = "modules",
        rule: str = "greedy",
        sample: int | Literal["auto"] | None = "auto",
        seed: int = 0,
        file: File = None,
        folder: File = None,
        writers: Iterable[Any] = (),
        report: File = None,
        cost: float = 0.01,
        spike: float = 10.0,
        most: int = 10,
        accumulate: int = 1,
        start: int | None = None,
    ) -> None:
        _check(model, rule, cost, spike, every=every, most=most, accumulate=accumulate)
        self.model, self.every, self.accumulate = model, every, accumulate
        self.incidents = list[Path]()
        self._own, self._rule, self._most, self._share = unwrapped(model), rule, most, cost
        self._ranks = Ranks(model, every, folder is not None)
        first = not self._ranks.rank
        self._traces_here = first or self._ranks.sharded
        about = {"model": type(self._own).__name__, "every": every, "rule": rule}
        self._log, self._page = RunLog(file if first else None, about), report if first else None
        self._writers = Writers(writers if first else ())
        parts = by if isinstance(by, (str, type, Mapping)) or by is None else [*by]
        self._asked = partial(measured, by=parts, sample=sample, seed=seed, forks=bool(writers))
        self._first = self._at = self._log.next if start is None else start
        self._micro, self._open, self._told = 0, True, set[str]()
        self._traces, self._took, self._last = 0, 0.0, 0.0  # traces, seconds, of the last one
        self._since = self._ticked = perf_counter()  # the first trace's end; when a step began
        self._next = -inf  # when to trace again
        self._gradients: Gradients | None = None
        if folder is not None:
            keep = partial(self._keep, made_folder(folder))
            self._gradients = Gradients(self._own, spike, keep)
        self._forwards = Forwards(model, folder is not None)  # listens: nothing fails after it
        end = ExitStack()
        end.enter_context(UNPACKED_ONCE())  # saved tensors serve the trace and training
        end.callback(self._log.flush)
        end.callback(self._forwards.close)
        self._end = weakref.finalize(self, end.close)
        self._decide()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close("" if kind is None else kind.__name__)

    # The loop -------------------------------------------------------------------------------------

    def begin(self, step: int | None = None) -> None:
        """Begin a step, or one of its backward passes.

        Needed only where submodules are called and not the model itself, or where steps have
        numbers of their own.

        Args:
            step: Number of the step; by default one more than the last.
        """
        self._number(step)
        self._forwards.begin()

    def _number(self, step: int | None) -> None:
        if step is not None and step != self._at:
            self._at, self._micro = step, 0
            self._decide()

    def step(
        self,
        loss: Tensor,
        *,
        batch: Any = None,
        terms: Mapping[str, Tensor] | None = None,
        scale: Any = 1.0,
    ) -> None:
        """Call with the loss of this backward pass, before ``backward``.

        Args:
            loss: The loss.
            batch: What an incident keeps, if this step becomes one: tensors, numbers, text, and
                dicts and lists of these.
            terms: What the loss is the sum of, by name: norms of their gradients, and cosines.
            scale: What the loss was multiplied by, as a number or a ``GradScaler``.
        """
        self._pass(loss, loss, batch, terms, scale)

    def _pass(self, loss: Tensor, heard: Tensor, batch: Any, terms: Any, scale: Any) -> None:
        """As ``step``; ``heard`` is the loss, or what a trainer will yet multiply to get it."""
        if not self._open:
            raise GradtraceError("this Monitor is closed; make another one to go on")
        if not isinstance(loss, Tensor):
            raise GradtraceError(
                f"monitor.step takes the loss, a tensor, before loss.backward(), not a "
                f"{type(loss).__name__}; not loss.item()"
            )
        if not isinstance(scale, (int, float, Tensor)):  # a scaler; on the device nothing waits
            scale = scale.scale(torch.ones((), device=loss.device))
        began, self._forwards.began = self._forwards.began, None
        if not self._micro:
            self._tick()
        if self._forwards.wanted:
            self._traced(loss, terms, scale)
        if self._gradients is not None:
            began = beginning(self.model) if began is None else began
            value, scaled = loss.detach().double().mean(), isinstance(scale, Tensor)
            factor = scale.detach() if scaled else torch.full((), float(scale), device="cpu")
            one = Pass(
                self._at, self._micro, batch, began, AsyncCopy(value), AsyncCopy(factor), scaled
            )
            self._gradients.follow(heard, one)
        self._micro = (self._micro + 1) % self.accumulate
        self._at += not self._micro
        self._decide()

    def _tick(self) -> None:
        """A step begins, and the one before has ended."""
        now = perf_counter()
        if self._at > self._first:
            self._log.time(self._at - 1, now - self._ticked)
            if not self._ranks.told:
                self._ranks.tell()
        self._ticked = now

    def _decide(self) -> None:
        """Decide whether the next backward pass is traced."""
        wanted = not self._micro and self._traces_here and self._due()
        if wanted != self._forwards.wanted:
            self._forwards.want(wanted)

    def _due(self) -> bool:
        if self.every is not None:
            return (self._at - self._first) % self.every == 0
        return self._ticked >= self._next

    # A traced step --------------------------------------------------------------------------------

    def _traced(self, loss: Tensor, terms: Any, scale: Any) -> None:
        """Trace a loss and write what is found. Whatever fails, training goes on."""
        begun, watch = perf_counter(), self._forwards.take()
        line: dict[str, Any] = {"step": self._at, "loss": nan}
        try:
            with paused(), undisturbed(self._own), silenced():
                factor = float(scale)
                line["loss"] = float(loss.detach().double().mean()) / factor
                trace = self._followed(watch, loss)
                line |= self._asked(trace, factor)
                line |= compared(watch, terms, factor) if terms else {}
                if not self._traces and (text := silent(self._own, trace)):
                    caution(text)
        except Exception as error:
            line["note"] = reason = reason_of(error)
            if reason not in self._told:
                caution(f"step {self._at:,} was not traced: {reason}; training goes on")
            self._told.add(reason)
        self._ticked = perf_counter()
        self._spent(self._ticked - begun)
        self._log.add({**line, "cost": self.cost.share})
        self._writers.write(self._log.lines[-1])

    def _followed(self, watch: Any, loss: Tensor) -> Trace:
        if watch is None:
            raise GradtraceError(
                "the model itself was not called in this step: call monitor.begin() where a step "
                "begins, or give Monitor the module that is called"
            )
        found: Trace = watch.trace(loss, rule=self._rule)
        return found

    def _spent(self, seconds: float) -> None:
        self._traces += 1
        if self._traces > 1:
            self._took, self._last = self._took + seconds, seconds
            training = (self._took + self._last) / self._share
            self._next = self._since + self._took + training
        else:  # which warms up; the next one tells what a trace costs
            self._since = self._ticked

    # Incidents ------------------------------------------------------------------------------------

    def _keep(self, folder: Path, one: Pass, why: str, *more: Any) -> None:
        """Keep a pass as an incident. Whatever fails, training goes on."""
        if len(self.incidents) >= self._most:
            return
        try:
            rank = f"-rank{self._ranks.rank}" if self._ranks.rank else ""
            path = folder / f"step{one.step}{rank}.pt"
            made(self.model, one, why, *more).save(path)
            self.incidents.append(path)
            note = f"step {one.step:,}: {why}; {path}"
            self._log.add({"note": note})
            caution(f"{note}; gt.load(path).diagnose(model, loss_fn) looks at it again")
        except Exception as error:
            where = f"step {one.step:,}, {why}, was not kept"
            caution(f"{where}: {reason_of(error)}; training goes on")

    # Results --------------------------------------------------------------------------------------

    @property
    def cost(self) -> Cost:
        """What tracing has cost, and how often a step is traced."""
        training, steps = perf_counter() - self._since - self._took, float(self.every or inf)
        if self.every is None and self._traces > 1:
            steps = self._last / (self._share * training / (self._at - self._first))
        return Cost(self._traces, self._took, self._took / training, steps)

    @property
    def history(self) -> Table:
        """A row for each traced step, with those of the file."""
        return self._log.tables()[0]

    @property
    def times(self) -> Table:
        """The seconds of each step, without traces, and whether they grow."""
        return self._log.tables()[1]

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write the run as a page.

        Args:
            path: HTML file to write.
        """
        from gradtrace.report.training import write_run

        write_run(path, *self._log.tables())

    def close(self, error: str = "") -> None:
        """End the run: judge the last step, write the page, and stop listening.

        Args:
            error: What has ended the run, if it was cut short.
        """
        if not self._open:
            return
        self._open = False
        with suppress(Exception):
            if self._gradients is not None:
                self._gradients.read()
            if note := self._ranks.note():
                caution(note)
                self._log.add({"note": note})
        self._end()
        self._log.add({"end": self._at, "note": f"ended by {error}" if error else ""})
        if self._page is not None:
            try:
                self.report(self._page)
            except Exception as failure:
                caution(f"the page was not written: {reason_of(failure)}")
        if self.every is None and not self._ranks.rank:
            places = {"page": self._page, "file": self._log.path}
            where = [f"{what}: {os.fspath(at)}" for what, at in places.items() if at]
            print("; ".join([f"gradtrace: {self.cost}", *where]), file=sys.stderr)


def _check(model: Any, rule: str, cost: float, spike: float, **counts: int | None) -> None:
    """Refuse arguments that mean nothing."""
    if not isinstance(model, nn.Module):
        raise GradtraceError(f"Monitor takes a torch.nn.Module, got {type(model).__name__}")
    if rule not in RULES:
        raise GradtraceError(not_one_of("rule", rule, RULES))
    if not isinstance(cost, (int, float)) or not 0 < cost <= 1:
        raise GradtraceError(f"cost is a share of the time, such as 0.01, not {cost!r}")
    if not isinstance(spike, (int, float)) or not 1 < spike < inf:
        raise GradtraceError(f"spike is a factor above 1, such as 10, not {spike!r}")
    for name, count in counts.items():
        if count is not None and (not isinstance(count, int) or count is True or count < 1):
            raise GradtraceError(f"{name} is a whole number from 1 on, not {count!r}")
