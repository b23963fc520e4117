"""Triggers of a ``Monitor``: steps that go wrong are run again before the optimiser moves."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from math import inf, isfinite, isinf
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradtrace.diagnosis.forward_record import extent_of
from gradtrace.errors import GradtraceError, caution, not_one_of, reason_of
from gradtrace.kernels.finite_gradients import FiniteGradients
from gradtrace.pytorch.nested import tensors_in
from gradtrace.pytorch.random_state import RandomState, cuda_devices
from gradtrace.pytorch.wrapped_modules import named_modules, named_parameters
from gradtrace.runs.history import StepIncident
from gradtrace.training import tuning
from gradtrace.training.forward_keeper import Call, ForwardKeeper, Kept, batch_size, named_buffers
from gradtrace.training.incident import Incident
from gradtrace.training.rerun import Beginning, LossOf, Rerun, outputs_in, seeds_of, stand_in
from gradtrace.training.sampled_watch import SampledWatch
from gradtrace.training.schedule import Schedule
from gradtrace.training.spike_rule import SpikeRule
from gradtrace.training.step_tracer import loss_value

Note: TypeAlias = Callable[[StepIncident], object]
SPIKE, NONFINITE = "spike", "nonfinite"
TRIGGERS = (SPIKE, NONFINITE)
NO_BATCH = object()
"""Stands for no batch: None may be one."""

SHOWN_TENSORS = 4
WHY = (
    "it depends on more than batch, weights and random numbers (a compiled model's kernels, numbers"
    " drawn before the model was called: call monitor.begin() before them)."
)
UNDRAWN = (
    "it depends on more than batch and weights. The steps before it drew no random numbers, so "
    "their state was not kept."
)
UNCALLED = (
    "the model itself was not called in this step, so that nothing was kept of what it began with: "
    "call monitor.begin() there."
)
AFTER = (
    "The model's outputs are finite: the loss is made of them by code that could not be run again."
    " Pass it: monitor.step(loss, rerun=loss_of, batch=(x, y))."
)


@dataclass(eq=False)
class Pass:
    """A backward pass of the loop, with what its forward pass began with."""

    step: int
    micro: int
    loss: float
    scale: float
    kept: Kept
    rerun: LossOf | None
    batch: Any


@dataclass(frozen=True)
class Trigger:
    """What a Monitor is asked for."""

    wanted: tuple[str, ...]
    spike: float
    most_bytes: int
    file: Path | None

    @classmethod
    def of(
        cls,
        trigger: str | Iterable[str],
        spike: float,
        most_bytes: int,
        file: str | os.PathLike[str] | None,
    ) -> Trigger:
        """The arguments of a Monitor, checked."""
        wanted = (trigger,) if isinstance(trigger, str) else tuple(trigger or ())
        for each in wanted:
            if each not in TRIGGERS:
                raise GradtraceError(not_one_of("trigger", each, TRIGGERS))
        if not isinstance(spike, (int, float)) or not 0 < spike < inf:
            raise GradtraceError(
                "spike is how many standard deviations above the median a loss must be, such as "
                f"10, not {spike!r}"
            )
        if not isinstance(most_bytes, int) or most_bytes < 0:
            raise GradtraceError(f"incident_bytes is a number of bytes, not {most_bytes!r}")
        return cls(wanted, spike, most_bytes, None if file is None else Path(file).expanduser())

    def unless_sharded(self, together: str) -> str:
        """Refuse a model that several processes hold together (``together``: how), if there are
        triggers.
        """
        if self.wanted and together:
            raise GradtraceError(
                "trigger= runs a step again on one process, which needs the whole model there, and "
                "this one is sharded; leave trigger out"
            )
        return together

    def looking(
        self,
        model: nn.Module,
        composed: bool | None,
        rank: int,
        watched: SampledWatch,
        note: Note | None,
    ) -> Triggers | None:
        """What looks at the steps of a model; None without triggers."""
        return Triggers(model, self, composed, rank, watched, note) if self.wanted else None


class Triggers:
    """Looks at every loss, and at gradients when an optimiser is about to move the model."""

    def __init__(
        self,
        model: nn.Module,
        settings: Trigger,
        composed: bool | None,
        rank: int,
        watched: SampledWatch,
        note: Note | None = None,
    ) -> None:
        _refuse_collectives(model)
        self.model, self.settings = model, settings
        self._composed, self._rank = composed, rank
        self._watched = watched  # suspended while a step is run again
        self._note = note  # writes to the run's file, which the first process has
        self._seconds = 0.0  # that incidents took since the last ``look``
        self.files: list[Path] = []
        self.keeper = ForwardKeeper(model, watched)  # is told of the model's calls
        self._rule = SpikeRule(settings.spike, batch_size)
        self._choose_gradients()
        self._nonfinite, self._spike = NONFINITE in settings.wanted, SPIKE in settings.wanted
        self._pending: tuple[Any, ...] | None = None  # a Pass whose gradient is not checked yet
        self._counts = dict.fromkeys(TRIGGERS, 0)
        self._lasting = ""  # the trigger of the pass before: what lasts is told once
        self._gradient_lasting = False
        self._own: weakref.ref[Optimizer] | None = None  # the last that moves the model
        self._stop = [_OPTIMISERS.add(self)] if self._nonfinite else []
        self.plain = 0  # how many of the next passes ``fine`` is enough for
        self._granted = 0  # how many those were

    def begin(self) -> None:
        """A step begins."""
        self.keeper.begin()

    def close(self) -> None:
        """Stop listening."""
        while self._stop:
            self._stop.pop()()
        self._pending = None
        self.revoke()

    def fine(self, loss: Tensor, step: int, rerun: LossOf | None, batch: Any) -> bool:
        """Look at the loss of one of the ``plain`` passes, as ``look`` would; False if that has to
        be called. Costs are counted in microseconds here: this runs in every step.
        """
        keeper = self.keeper
        kept = keeper.kept
        if kept is None or type(loss) is not Tensor or loss.ndim:
            return False
        value = loss.item()
        if not -inf < value < self._rule.below:
            return False
        self.plain -= 1
        keeper.kept, keeper.depth = None, 0
        if self._spike:
            self._rule.add(value)
        if self._nonfinite:
            self._pending = step, 0, value, 1.0, kept, rerun, batch
        kept.outputs.clear()
        return True

    def grant(self, most: int) -> None:
        """Let ``fine`` look at the next passes, at most so many."""
        self._granted = self.plain = 0
        if not self._lasting and not self._gradient_lasting:
            idle = min(most, self.keeper.idle, self._rule.idle if self._spike else most)
            self._granted = self.plain = max(0, idle)

    def revoke(self) -> None:
        """Count the passes that ``fine`` has looked at; it looks at no more."""
        count = self._granted - self.plain
        self._granted = self.plain = 0
        if count:
            self.keeper.skip(count)
            self._rule.skip(count)

    def look(
        self, loss: Tensor, scale: Any, at: Schedule, rerun: LossOf | None, batch: Any
    ) -> float:
        """Look at the loss of a backward pass. Returns the seconds that incidents have taken since
        the last call.
        """
        if self._granted:
            self.revoke()
        kept = self.keeper.take() or Kept(None, {}, {}, [], [])
        if self._pending is not None:
            if at.micro:  # of the same step as the pass before, so no optimiser has moved
                self._check_gradients()
            self._pending = None
        by, scaled = scale, False
        if type(scale) is not float and hasattr(scale, "get_scale"):
            by, scaled = float(scale.get_scale()), getattr(scale, "dynamic", True)
        value = loss_value(loss) / by
        finite = isfinite(value)
        said = self._rule.exceeded(value, kept) if self._spike and finite else ""
        fired = ""
        if said or not finite or self._lasting:
            fired, said = self._new(value, said)
        if fired:
            one = Pass(at.number, at.micro, value, by, kept, rerun, batch)
            self._handle(fired, "loss", said, one, loss)
        elif self._nonfinite and finite and (by == 1 or not scaled):  # a scaler looks itself
            self._pending = at.base + at.at, at.micro, value, by, kept, rerun, batch
        kept.outputs.clear()
        if not self._seconds:
            return 0.0
        took, self._seconds = self._seconds, 0.0
        return took

    def _new(self, loss: float, said: str) -> tuple[str, str]:
        """The trigger that a loss fires, and why; empty if none, or if it did at the pass before.
        ``said`` is what there is to say of a spike.
        """
        found = SPIKE if said else ""
        if not isfinite(loss):
            found, said = NONFINITE, f"the loss is {loss}"
            self._gradient_lasting = True  # that of this step will be: it is told once
        before, self._lasting = self._lasting, found
        new = found != before and found in self.settings.wanted
        return (found, said) if new else ("", "")

    # Gradients -----------------------------------------------------------------------------------

    def before_optimiser(self, optimizer: Optimizer) -> None:
        """An optimiser is about to step."""
        own = self._own
        if (own is None or own() is not optimizer) and not self._moves_the_model(optimizer):
            return
        if self._pending is None or "found_inf" in optimizer.__dict__:
            return
        if self._gradient_lasting or not self._finite():
            self._check_gradients()
        self._pending = None

    def _moves_the_model(self, optimizer: Optimizer) -> bool:
        mine = {id(each) for each in self.model.parameters()}
        groups = optimizer.param_groups
        if not any(id(each) in mine for group in groups for each in group["params"]):
            return False
        self._own = weakref.ref(optimizer)
        if self._gradients.lazy:  # by now they have shapes
            self._choose_gradients()
        return True

    def _choose_gradients(self) -> None:
        self._gradients = SmallGradients(self.model)
        self._finite = self._gradients.check.finite

    def _check_gradients(self) -> None:
        """Whether the gradient of the last pass is finite, as far as small parameters tell."""
        bad = self._gradients.bad()
        before, self._gradient_lasting = self._gradient_lasting, bool(bad)
        if bad and self._pending is not None:
            one = Pass(*self._pending)
            self._lasting = NONFINITE  # the next loss will be
            if not before:
                evidence = f"the loss is {one.loss:.4g} and the gradient of {bad} is not finite"
                self._handle(NONFINITE, "gradient", evidence, one, None)

    # Incidents -----------------------------------------------------------------------------------

    def _handle(self, trigger: str, of: str, evidence: str, one: Pass, loss: Tensor | None) -> None:
        """Run a step again, diagnose it, and write the file. Whatever fails, training goes on."""
        self._counts[trigger] += 1
        most = tuning.INCIDENT_FILES
        if self._counts[trigger] > most:
            if self._counts[trigger] == most + 1:
                _tell(one, evidence, f"There are {most} files of {trigger!r}; no more are written")
            return
        begun = perf_counter()
        self.revoke()  # so that the seconds are those of this step
        with self._watched.suspended():
            self._keep(trigger, of, evidence, one, loss)
        self._seconds += perf_counter() - begun

    def _keep(self, trigger: str, of: str, evidence: str, one: Pass, loss: Tensor | None) -> None:
        try:
            found = self._incident(trigger, of, evidence, one, loss)
            again = self._run_again(found, one)
            overflow = isinf(one.loss) and one.scale > 1
            if overflow and again is not None and isfinite(again.loss):
                self._counts[trigger] -= 1  # only the scaled loss is infinite: for the scaler
                return
            path = self._path(found)
            found.save(path, self.settings.most_bytes)
            self.files.append(path)
            if self._note is not None:
                cause = cause_of(found)
                what = found.step, trigger, evidence, *cause, str(path), self._rank
                self._note(StepIncident(*what))
            _tell(one, evidence, f"{_headline(found)}. To read it: gradtrace diagnose {path}")
        except Exception as error:  # nothing that happens here may end a long training run
            _tell(one, evidence, f"No file was written: {reason_of(error)}; training goes on")

    def _incident(
        self, trigger: str, of: str, evidence: str, one: Pass, loss: Tensor | None
    ) -> Incident:
        kept, results = one.kept, one.kept.outputs
        seeds, expected = None, one.loss
        if one.rerun is None and loss is not None and outputs_in(results):
            seeds = seeds_of(loss, outputs_in(results))
            expected = loss_value(stand_in(results, seeds))
        has_batch = one.batch is not NO_BATCH
        return Incident(
            one.step,
            one.micro,
            self._rank,
            trigger,
            of,
            evidence,
            one.loss,
            one.scale,
            Beginning(
                RandomState.now(cuda_devices(self.model))
                if kept.random is None
                else kept.random.completed(),
                kept.autocast,
                self._state(kept),
                evaluating(self.model),
            ),
            [Call(*each) for each in kept.calls],
            has_batch,
            one.batch if has_batch else None,
            seeds,
            expected,
            notes=tuple(ranges([one.batch if has_batch else None, *kept.calls])),
        )

    def _state(self, kept: Kept) -> dict[str, Tensor]:
        """Parameters and buffers, each once, as they were when the forward pass began."""
        now = [*named_parameters(self.model), *named_buffers(self.model)]
        first = {id(tensor): (name, tensor) for name, tensor in reversed(now)}
        return {name: kept.buffers.get(name, tensor) for name, tensor in first.values()}

    def _run_again(self, found: Incident, one: Pass) -> Rerun | None:
        try:
            again = found.rerun(self.model, one.rerun, composed=self._composed)
        except Exception as error:
            found.notes += (f"The step could not be run again: {reason_of(error)}",)
            return None
        found.found(again)
        if one.rerun is None and found.of == "loss" and not isfinite(one.loss):
            found.notes += (AFTER,) if isfinite(again.loss) else ()
        elif not again.same:
            unseen = UNDRAWN if one.kept.calls else UNCALLED
            why = WHY if one.kept.random is not None else unseen
            found.notes += (
                f"In training the loss was {one.loss!r}, run again {again.loss!r}: {why}",
            )
        return again

    def _path(self, found: Incident) -> Path:
        base = self.settings.file or Path("gradtrace")
        rank = f"-rank{found.rank}" if found.rank else ""
        name = f"{base.stem}-step{found.step}-{found.trigger}{rank}.gradtrace"
        return base.with_name(name)


class SmallGradients:
    """The gradients of parameters with few elements (biases, norms, small weights): of all in a
    large model, of some in a small one, the first and others evenly behind it.

    What is not finite spreads towards the input, so the first ones tell of nearly all.
    """

    def __init__(self, model: nn.Module) -> None:
        named = list(named_parameters(model))
        every = [(name, each) for name, each in named if not is_lazy(each)]
        self.lazy = len(every) < len(named)  # parameters without a shape, which are left out
        small = [
            (name, each)
            for name, each in every
            if each.requires_grad and 0 < each.numel() <= tuning.CHECKED_ELEMENTS
        ]
        elements = sum(each.numel() for _, each in every)
        by_size, by_count = tuning.ELEMENTS_PER_CHECK, tuning.PARAMETERS_PER_CHECK
        count = max(1, elements // by_size, len(every) // by_count)
        small = [(name, each) for name, each in small if each.device == small[0][1].device]
        self._small = small[:: max(1, -(-len(small) // count))]
        self.check = FiniteGradients([each for _, each in self._small])

    def bad(self) -> str:
        """The name of the first whose gradient is not finite; empty if none is."""
        if self.check.finite():
            return ""
        for name, each in self._small:  # the sum of finite numbers may be infinite
            if each.grad is not None and not bool(_values(each.grad).isfinite().all()):
                return name
        return ""


def _values(grad: Tensor) -> Tensor:
    return grad if grad.layout is torch.strided else grad.coalesce().values()


class _OptimiserHook:
    """Calls ``before_optimiser`` of all open triggers before every step of an optimiser.

    PyTorch goes over its table of such hooks while they run, so an entry that comes or goes
    meanwhile ends the step of another thread: this one stays, once there are triggers.
    """

    def __init__(self) -> None:
        self._open: tuple[weakref.ref[Triggers], ...] = ()
        self._registered = False
        self._lock = threading.Lock()

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        for known in self._open:
            found = known()
            if found is not None and found._pending is not None:
                found.before_optimiser(optimizer)

    def add(self, triggers: Triggers) -> Callable[[], None]:
        """Call it from now on; returns a function to stop."""
        known = weakref.ref(triggers)
        with self._lock:
            if not self._registered:
                register_optimizer_step_pre_hook(self)
                self._registered = True
            self._open = (*self._open, known)
        return partial(self._remove, known)

    def _remove(self, known: weakref.ref[Triggers]) -> None:
        with self._lock:
            self._open = tuple(each for each in self._open if each is not known and each())


_OPTIMISERS = _OptimiserHook()


def _refuse_collectives(model: nn.Module) -> None:
    """Refuse models whose forward pass waits for other processes, which do not run it again."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    for name, module in named_modules(model):
        if isinstance(module, nn.SyncBatchNorm):
            raise GradtraceError(
                f"trigger= runs a step again on one process, and '{name}' (SyncBatchNorm) would "
                "wait for the others; leave trigger out"
            )


def evaluating(model: nn.Module) -> list[str]:
    """The modules in evaluation mode."""
    return [name for name, module in named_modules(model) if not module.training]


def ranges(values: Iterable[Any]) -> Iterator[str]:
    """A line on the numbers of each tensor of a batch, of the first few."""
    seen: dict[int, Tensor] = {id(each): each for each in tensors_in(list(values))}
    for tensor in list(seen.values())[:SHOWN_TENSORS]:
        extent = extent_of(tensor)
        if extent is not None:
            kind = str(tensor.dtype).removeprefix("torch.")
            yield f"Of the batch: {kind} of shape {tuple(tensor.shape)}, {extent}."


def cause_of(found: Incident) -> tuple[str, str, str]:
    """What the rerun found, its module and its source line; the latter empty where unknown."""
    bad = found.diagnosis.get("nonfinite")
    findings = [x for x in found.diagnosis.get("findings", ()) if x.get("severity") != "note"]
    if bad and bad["operator"]:
        return f"It begins with {bad['operator']}", bad["module"], bad["line"]
    if findings:
        first = findings[0]
        return f"Run again: {first['title']}", first.get("module") or "", first["line"]
    if not found.words:
        return "The step could not be run again", "", ""
    return "It was run again, and nothing else was found", "", ""


def _headline(found: Incident) -> str:
    """The same in a line."""
    cause, module, line = cause_of(found)
    where = f" in '{module}'" if module else ""
    return f"{cause}{where}: {line}".rstrip(" :")


def _tell(one: Pass, evidence: str, more: str) -> None:
    caution(f"step {one.step:,}: {evidence}. {more}")
