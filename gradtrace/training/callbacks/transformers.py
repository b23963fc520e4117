"""transformers: ``Trainer(..., callbacks=[GradTrace()])``."""

from __future__ import annotations

from traceback import walk_stack
from typing import Any

from torch import Tensor
from transformers import Trainer, TrainerCallback

from gradtrace.errors import GradtraceError
from gradtrace.training.callbacks import Traced


class GradTrace(Traced, TrainerCallback):  # type: ignore[misc]
    """Trace training with transformers: ``Trainer(..., callbacks=[GradTrace()])``.

    Steps are the trainer's ``global_step``; the loss is what the trainer passes to ``backward``,
    however it is computed. Curves go to the trainer's own log, and the file, the page and the
    incidents to ``output_dir``. After training, ``callback.monitor.history`` has the results.

    Args:
        options: Arguments of ``gradtrace.Monitor``.
    """

    _trainer: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make the Monitor, and listen to the trainer: callbacks get neither batch nor loss."""
        self._close()
        self._trainer, passes = (trainer := _trainer()), args.gradient_accumulation_steps
        model, log = trainer.model_wrapped, lambda _, values: trainer.log(values)
        self._make(model, args.output_dir, [log], state.global_step, passes)
        self._step_of, self._backward_of = trainer.training_step, trainer.accelerator.backward
        trainer.training_step = self._training_step
        trainer.accelerator.backward = self._backward

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the Monitor, which writes the page."""
        self._close()

    def _training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self._begin(self._trainer.state.global_step, inputs)
        try:
            return self._step_of(model, inputs, *args, **kwargs)
        except BaseException as error:
            self._close(type(error).__name__)
            raise

    def _backward(self, loss: Tensor, **kwargs: Any) -> Any:
        """The trainer has divided the loss by the passes of a step, or by the items in all."""
        passes = getattr(self._trainer, "current_gradient_accumulation_steps", 1)
        self._unscaled(loss, self._trainer.accelerator.scaler, passes)
        return self._backward_of(loss, **kwargs)

    def _close(self, error: str = "") -> None:
        super()._close(error)
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            vars(trainer).pop("training_step", None)
            vars(trainer.accelerator).pop("backward", None)


def _trainer() -> Trainer:
    """The trainer that calls a callback, found on the stack: callbacks do not receive it."""
    callers = (frame.f_locals.get("self") for frame, _ in walk_stack(None))
    found = next((each for each in callers if isinstance(each, Trainer)), None)
    if found is None:
        raise GradtraceError(
            "GradTrace is called by no transformers.Trainer: use Trainer(callbacks=[GradTrace()])"
        )
    return found
