"""Traces a step of a training loop without disturbing it."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol

from torch import Tensor, nn

from gradtrace.autodiff.hooks import SilencedHooks, silenced
from gradtrace.errors import GradtraceError, NonFinite
from gradtrace.pytorch.side_effects import restored, same_draws
from gradtrace.pytorch.wrapped_modules import named_parameters, unwrapped
from gradtrace.runs.history import Norms
from gradtrace.runs.step_results import StepResult, unscaled
from gradtrace.trace import Trace
from gradtrace.tracing.components import Components
from gradtrace.training import tuning
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
        self, loss: Tensor, scale: float | Scaler, watched: watch
    ) -> tuple[Trace | None, StepResult]:
        """The trace of a loss and its result; errors are stored in the result."""
        value, by = math.nan, 1.0
        try:
            value, by = _value(loss), _scale(scale)
            with undisturbed(self.model) as silence:
                trace, found = self.measured(loss, watched)
            note = HOOKED if silence.hooked else ""
            return trace, unscaled(replace(found, loss=value, scale=by, note=note))
        except NonFinite as error:
            return None, StepResult(value / by, by, note=str(error))
        except Exception as error:  # no error of tracing may end a long training run
            note = f"{type(error).__name__}: {error}"
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
        flow = trace.flow()
        norms = {row.module: Norms(row.norm, row.own) for row in flow}
        return trace, StepResult(0.0, 1.0, table, flow.verdict, norms)

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


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[SilencedHooks]:
    """Within this context, tracing has no side effects on training.

    The state of random number generators, tensors and the attributes of modules are restored
    afterwards, and hooks on gradients do not run.

    Checkpointed parts of a model run again when they are traced: batch norms would count the batch
    once more, and a dropout without ``preserve_rng_state`` would draw random numbers.
    """
    with same_draws(model), restored(model), silenced() as hooks:
        yield hooks


def _value(loss: Any) -> float:
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
