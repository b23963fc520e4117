"""Traces a step of a training loop without disturbing it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, ClassVar, Literal, Protocol

from torch import Tensor, nn

from gradtrace.autodiff.hooks import SilencedHooks, silenced
from gradtrace.components.components import Components
from gradtrace.errors import GradtraceError, NonFinite, caution, listed, reason_of
from gradtrace.flow import TOP
from gradtrace.measures.conflicts import MOST_COLUMNS
from gradtrace.pytorch.function_modes import paused
from gradtrace.pytorch.side_effects import restored, same_draws
from gradtrace.pytorch.wrapped_modules import named_parameters, unwrapped
from gradtrace.runs.history import Norms
from gradtrace.runs.step_results import StepResult, unscaled
from gradtrace.traced import Trace
from gradtrace.tracing.choices import Choices
from gradtrace.training import tuning
from gradtrace.training.overhead_budget import Budget
from gradtrace.watch import watch

HOOKED = (
    "hooks on gradients do not run in a trace of a Monitor, since they run in backward: gradients, "
    "flow and influence are those before hooks"
)


class Scaler(Protocol):
    """The part of ``torch.amp.GradScaler`` that is used here."""

    def get_scale(self) -> float:
        """The factor that losses are multiplied by."""


@dataclass
class StepTracer:
    """What is measured of a traced step, as in ``Trace.influence``."""

    model: nn.Module
    sample: int | Literal["auto"] | None
    components: Components
    rule: str
    seed: int
    told: ClassVar[bool] = False  # whether it has been said that elements are sampled

    def result(
        self,
        loss: Tensor,
        scale: float | Scaler,
        watched: watch,
        choices: bool = False,
        terms: Mapping[str, Tensor] | None = None,
    ) -> tuple[Trace | None, StepResult]:
        """The trace of a loss and its result; errors are stored in the result.

        ``choices`` says whether forks are measured, ``terms`` are the loss terms to compare.
        """
        value, by = math.nan, 1.0
        try:
            with undisturbed(self.model) as silence:  # while a GPU is still at the forward pass
                value, by = loss_value(loss), _scale(scale)
                trace, found = self.measured(loss, watched)
                divided = self._choices(trace) if choices else None
                compared = None if terms is None else _compared(watched, terms, by)
            note = HOOKED if silence.hooked else ""
            found = replace(found, loss=value, scale=by, note=note, choices=divided, terms=compared)
            return trace, unscaled(found)
        except NonFinite as error:
            return None, StepResult(value / by, by, note=reason_of(error))
        except Exception as error:  # no error of tracing may end a long training run
            note = f"{type(error).__name__}: {reason_of(error)}"
            return None, StepResult(value / by, by, note=note, error=error)

    def measured(self, loss: Tensor, watched: watch) -> tuple[Trace, StepResult]:
        """The trace, and its influence and flow."""
        trace = watched.trace(loss, rule=self.rule)
        if trace.gradients.keys().isdisjoint(name for name, _ in named_parameters(self.model)):
            raise GradtraceError(
                f"no parameter of the {type(unwrapped(self.model)).__name__} that is monitored "
                "takes part in this loss; pass the loss of the model that Monitor was made with, "
                "computed from its output without detach() and with parameters that require grad"
            )
        table = trace.influence(self.components, sample=self._sample(trace), seed=self.seed)
        table = replace(table, source=None)  # which may keep activations
        found = trace.norms()
        norms = {"" if row.name == TOP else row.name: Norms(row.norm, row.own) for row in found}
        return trace, StepResult(0.0, 1.0, table, " ".join(found.notes), norms)

    def _choices(self, trace: Trace) -> Choices | None:
        """How paths divide; None where that is not known, or other components are asked for."""
        if self.components is not None:
            return None
        try:
            return trace.choices(sample=self._sample(trace), seed=self.seed)
        except GradtraceError:  # there are too many forks
            return None

    def _sample(self, trace: Trace) -> int | None:
        """How many elements are followed; None: all are counted, as they are few enough."""
        if self.sample != "auto":
            return self.sample
        elements = sum(leaf.tensor.numel() for leaf in trace.leaves.values())
        if elements <= tuning.EXACT_MAX_ELEMENTS:
            return None
        if not self.told:
            StepTracer.told = True
            print(
                f"gradtrace: the Monitor follows the paths of {tuning.SAMPLED_ELEMENTS:,} of "
                f"{elements:,} elements, so its shares have standard errors; sample=None counts "
                "all, which costs more",
                file=sys.stderr,
            )
        return tuning.SAMPLED_ELEMENTS


def _compared(watched: watch, terms: Mapping[str, Tensor], scale: float) -> dict[str, float]:
    """Norms and cosines of terms, compared at the scale of the loss and reported without it. Of
    many terms the lowest cosine alone.
    """
    if isinstance(terms, Mapping) and scale != 1.0:
        terms = {n: t * scale if isinstance(t, Tensor) else t for n, t in terms.items()}
    table = watched.conflicts(terms, nonfinite="allow")
    found = {f"norm {name}": table.norm(name) / abs(scale) for name in table.terms}
    cosines = {(a, b): table.cosine(a, b) for a, b in combinations(table.terms, 2)}
    if len(table.terms) > MOST_COLUMNS:
        known = filter(math.isfinite, cosines.values())
        return {**found, "lowest cosine": min(known, default=math.nan)}
    return found | {f"cosine {a} {b}": cosine for (a, b), cosine in cosines.items()}


def warn_of_silent(model: nn.Module, trace: Trace) -> None:
    """Warn of parameters that require grad and get none, by name."""
    reached = {*trace.gradients, *getattr(trace.gradients, "aliases", {})}
    trained = [name for name, parameter in named_parameters(model) if parameter.requires_grad]
    silent = [name for name in trained if name not in reached]
    if silent:
        shown = listed(silent, 4)
        caution(
            f"{len(silent):,} of {len(trained):,} parameters get no gradient in this step: {shown}."
            " To see why: with gt.watch(model, diagnose=True) as watch: ...; "
            "print(watch.diagnose(loss))"
        )


def diagnosed(watched: watch, loss: Tensor, budget: Budget, say: Callable[[str], object]) -> float:
    """Diagnose the first step: say what is found, and warn if it is not healthy.

    Returns the seconds it took, which are counted as spent, and not as what a trace costs.
    """
    begun = budget.clock()
    try:
        with undisturbed(watched.model):
            found = watched.diagnose(loss)
        say(str(found))
        if not found.healthy:
            lines = str(found).splitlines()
            caution("the first step is not healthy", *lines)
    except Exception as error:  # no error of a diagnosis may end a long training run
        caution(f"the first step was not diagnosed: {reason_of(error)}; training goes on")
    seconds = budget.clock() - begun
    budget.spend(seconds)
    return seconds


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[SilencedHooks]:
    """Within this context, tracing has no side effects on training.

    The state of random number generators, tensors and the attributes of modules are restored
    afterwards; hooks on gradients do not run, and modes of PyTorch's functions are off.

    Checkpointed parts of a model run again when they are traced: batch norms would count the batch
    once more, and a dropout without ``preserve_rng_state`` would draw random numbers.
    """
    with paused(), same_draws(model), restored(model, lazily=True), silenced() as hooks:
        yield hooks


def loss_value(loss: Any) -> float:
    """The value of a loss; the mean of several."""
    if type(loss) is Tensor and loss.numel() == 1:
        return loss.item()
    if not isinstance(loss, Tensor):
        raise GradtraceError(
            f"monitor.step takes the loss before loss.backward(), a tensor, not a "
            f"{type(loss).__name__}; not loss.item()"
        )
    return float(loss.item() if loss.numel() == 1 else loss.detach().double().mean().item())


def _scale(scale: float | Scaler) -> float:
    found = float(scale.get_scale() if hasattr(scale, "get_scale") else scale)
    if not math.isfinite(found) or found == 0:
        raise GradtraceError(f"scale is what the loss was multiplied by, not {found}")
    return found
