"""transformers: ``Trainer(..., callbacks=[GradTrace()])``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gradtrace.errors import GradtraceError, needs
from gradtrace.training.callbacks import Traced

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback
else:
    try:
        from transformers import Trainer, TrainerCallback
    except ImportError as error:
        what = "gradtrace.training.callbacks.transformers"
        raise GradtraceError(needs(what, "transformers", "accelerate")) from error


class GradTrace(Traced, TrainerCallback):  # type: ignore[misc]
    """Trace training with transformers: ``Trainer(..., callbacks=[GradTrace()])``.

    Steps are the trainer's ``global_step``; the loss is what the trainer passes to ``backward``,
    however it is computed. Curves go to the trainer's own log, and the file, the page and the
    incidents to ``output_dir``. After training, ``callback.monitor.history`` has the results.

    Args:
        options: Arguments of ``gradtrace.Monitor``.
    """

    _trainer: Trainer | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make the Monitor, and listen to the trainer: callbacks get neither batch nor loss."""
        self._close()
        self._trainer = trainer = _trainer_of(self)
        self._waiting, self._batch = list[dict[str, float]](), None
        self._make(
            trainer.model_wrapped,
            args.output_dir,
            [self._log],
            state.is_world_process_zero,
            start=state.global_step,
            accumulate=args.gradient_accumulation_steps,
        )
        self._step_of, self._backward_of = trainer.training_step, trainer.accelerator.backward
        trainer.training_step = self._training_step
        trainer.accelerator.backward = self._backward

    def _log(self, step: int, values: dict[str, float]) -> None:
        self._waiting.append({**values, "gradtrace/step": step})

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write what was measured to the trainer's log, which within a step it does not take."""
        while self._trainer is not None and self._waiting:
            self._trainer.log(self._waiting.pop(0))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the Monitor, which writes the page."""
        self._close()

    def _training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self.monitor is not None and self._trainer is not None:
            self.monitor.begin(self._trainer.state.global_step)
        self._batch = inputs
        try:
            return self._step_of(model, inputs, *args, **kwargs)
        except BaseException as error:
            self._close(type(error).__name__)
            raise

    def _backward(self, loss: Tensor, **kwargs: Any) -> Any:
        """The trainer has divided the loss by the passes of a step, or by the items in all."""
        trainer: Any = self._trainer
        passes = getattr(trainer, "current_gradient_accumulation_steps", 1)
        batch, self._batch = self._batch, None
        self._step(loss, trainer.accelerator.scaler, passes, batch)
        return self._backward_of(loss, **kwargs)

    def _close(self, error: str = "") -> None:
        super()._close(error)
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            vars(trainer).pop("training_step", None)
            vars(trainer.accelerator).pop("backward", None)


def _trainer_of(callback: TrainerCallback) -> Trainer:
    """The trainer that calls a callback, found on the stack: callbacks do not receive it."""
    frame: Any = sys._getframe()
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, Trainer) and callback in found.callback_handler.callbacks:
            return found
        frame = frame.f_back
    raise GradtraceError(
        "GradTrace is called by no transformers.Trainer: pass it as "
        "Trainer(callbacks=[GradTrace()]), or use gradtrace.Monitor in a loop of your own"
    )
