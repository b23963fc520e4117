"""Accelerate: ``with GradTrace(accelerator, model): ...`` around a training loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from gradtrace.errors import GradtraceError, needs
from gradtrace.integrations.making import Divided, LossTerms, checked, placed
from gradtrace.training.monitor import Monitor

if TYPE_CHECKING:
    from accelerate import Accelerator
else:
    try:
        from accelerate import Accelerator
    except ImportError as error:
        raise GradtraceError(needs("gradtrace.integrations.accelerate", "accelerate")) from error


class GradTrace(LossTerms):
    """Trace a loop with Accelerate::

        with GradTrace(accelerator, model, every=100):
            for x, y in loader:
                with accelerator.accumulate(model):
                    loss = loss_fn(model(x), y)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()

    Within it, losses that are handed to ``accelerator.backward`` are traced at intervals, as by
    ``gradtrace.Monitor``, whose arguments it takes. The accelerator's trackers get the shares of
    branches where paths have a choice, and the diagnosis of the first step, which is also a warning
    if something is wrong. The file and the page are ``gradtrace.jsonl`` and ``gradtrace.html`` in
    ``project_dir``, unless ``file`` and ``report`` are given; a line at the end says where they
    are. With ``trigger`` the model is called again with the arguments that it had. After training,
    ``.monitor.history`` has the results.

    Args:
        accelerator: The Accelerator, after ``prepare`` and ``init_trackers``.
        model: The prepared model.
        start: Number of the first step, where a run goes on.
        options: Arguments of ``gradtrace.Monitor``.
    """

    def __init__(
        self, accelerator: Accelerator, model: nn.Module, *, start: int = 0, **options: Any
    ) -> None:
        if not isinstance(accelerator, Accelerator):
            raise GradtraceError(
                "GradTrace takes the Accelerator, then the model: GradTrace(accelerator, model); "
                f"the first is a {type(accelerator).__name__}"
            )
        self._accelerator, self._step = accelerator, start
        found = placed(
            checked(options), lambda: accelerator.project_dir, accelerator.is_main_process
        )
        self.monitor: Monitor = Monitor(
            model,
            start=start,
            accumulate=accelerator.gradient_accumulation_steps,
            loggers=[*found.pop("loggers", ()), *accelerator.trackers],
            **found,
        )

    def __enter__(self) -> GradTrace:
        self._backward = self._accelerator.backward
        self._accelerator.backward = self._traced_backward
        self.monitor._number(self._step)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        vars(self._accelerator).pop("backward", None)
        self.monitor.close("" if kind is None else kind.__name__)

    def _traced_backward(self, loss: Tensor, **kwargs: Any) -> Any:
        """Trace the loss as the accelerator propagates it: divided by the passes of a step, and
        multiplied by the scale of half precision.
        """
        scaler, passes = self._accelerator.scaler, self._accelerator.gradient_accumulation_steps
        scaled = loss if passes == 1 else loss / passes
        scaled = scaled if scaler is None else scaler.scale(scaled)
        self.monitor.step(scaled, scale=Divided(scaler, passes), terms=self._take_terms())
        found = self._backward(loss, **kwargs)
        self._step += bool(self._accelerator.sync_gradients)  # else a pass of this step follows
        self.monitor._number(self._step)  # a batch is drawn before the model is called
        return found
