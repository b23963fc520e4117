"""Accelerate: ``with GradTrace(accelerator, model): ...`` around a training loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from gradtrace.training.callbacks import Traced

if TYPE_CHECKING:
    from accelerate import Accelerator


class GradTrace(Traced):
    """Trace a loop with Accelerate::

        with GradTrace(accelerator, model):
            for x, y in loader:
                with accelerator.accumulate(model):
                    loss = loss_fn(model(x), y)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()

    Losses that are handed to ``accelerator.backward`` are traced at intervals. Curves go to the
    accelerator's trackers, and the file, the page and the incidents to ``project_dir``.

    Args:
        accelerator: The Accelerator, after ``prepare`` and ``init_trackers``.
        model: The prepared model.
        start: Number of the first step, where a run goes on.
        options: Arguments of ``gradtrace.Monitor``.
    """

    def __init__(
        self, accelerator: Accelerator, model: nn.Module, *, start: int = 0, **options: Any
    ) -> None:
        super().__init__(**options)
        self._accelerator, self._at = accelerator, start
        self._passes = passes = accelerator.gradient_accumulation_steps
        self._make(model, accelerator.project_dir, accelerator.trackers, start, passes)

    def __enter__(self) -> GradTrace:
        self._backward = self._accelerator.backward
        self._accelerator.backward = self._traced
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        vars(self._accelerator).pop("backward", None)
        self._close("" if kind is None else kind.__name__)

    def _traced(self, loss: Tensor, **kwargs: Any) -> Any:
        """The accelerator divides the loss by the passes of a step, and so does the trace."""
        scaled = loss if self._passes == 1 else loss / self._passes
        self._unscaled(scaled, self._accelerator.scaler, self._passes)
        found = self._backward(loss, **kwargs)
        self._at += bool(self._accelerator.sync_gradients)  # else a pass of this step follows
        if self.monitor is not None:
            self.monitor._number(self._at)
        return found
