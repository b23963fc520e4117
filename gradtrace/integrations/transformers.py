"""transformers: ``Trainer(..., callbacks=[GradTrace()])``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gradtrace.errors import GradtraceError, needs
from gradtrace.integrations.making import Divided, LossTerms, checked, placed
from gradtrace.training.loggers import speaking
from gradtrace.training.monitor import Monitor

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback
else:
    try:
        from transformers import Trainer, TrainerCallback
    except ImportError as error:
        raise GradtraceError(
            needs("gradtrace.integrations.transformers", "transformers", "accelerate")
        ) from error


class GradTrace(LossTerms, TrainerCallback):  # type: ignore[misc]
    """Trace training with transformers: ``Trainer(..., callbacks=[GradTrace(every=100)])``.

    ``every`` counts the trainer's ``global_step``; of
    the backward passes of a step the first is traced, with the loss that the trainer passes to
    ``backward``, however it is computed (label smoothing, ``compute_loss_func``,
    ``num_items_in_batch``). The trainer's own log gets the shares of branches where paths have a
    choice; the diagnosis of the first step is a warning if something is wrong, and goes to
    TensorBoard and W&B if the trainer reports to them. The file and the page are
    ``gradtrace.jsonl`` and ``gradtrace.html`` in ``output_dir``, unless ``file`` and ``report`` are
    given; a line at the end says where they are. With ``trigger`` the model is called again with
    the arguments that it had. After training, ``callback.monitor.history`` has
    the results.

    Args:
        options: Arguments of ``gradtrace.Monitor``.
    """

    def __init__(self, **options: Any) -> None:
        self._options = checked(options)
        self._hooks: TrainerHooks | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make the Monitor."""
        self._close("")
        trainer = trainer_of(self, sys._getframe())
        options = placed(self._options, lambda: args.output_dir, state.is_world_process_zero)
        self._log = TrainerLog(trainer)
        self.monitor = Monitor(
            trainer.model_wrapped,
            start=state.global_step,
            accumulate=args.gradient_accumulation_steps,
            loggers=[*options.pop("loggers", ()), self._log],
            **options,
        )
        self._hooks = TrainerHooks(self, trainer)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the scalars of a traced step to the trainer's log."""
        if self._hooks is not None:
            self._log.flush()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Exclude evaluation from the step time."""
        if self.monitor is not None and self._hooks is not None:
            self.monitor.pause()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the Monitor, which writes the report."""
        self._close("")

    def begin(self, step: int) -> None:
        """Called before a forward and backward pass of this step."""
        if self.monitor is not None:
            self.monitor.begin(step)

    def found(self, loss: Tensor, scale: Divided) -> None:
        """Called with the loss that is passed to ``backward``."""
        if self.monitor is not None:
            self.monitor.step(loss, scale=scale, terms=self._take_terms())

    def _close(self, error: str) -> None:
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None
        if self.monitor is not None:
            self.monitor.close(error)
            self._log.flush()


class TrainerLog:
    """Writes to a trainer's log, and texts to the TensorBoard and W&B runs that it reports to.

    Scalars wait for the end of the step: within it the trainer does not log.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._waiting: list[dict[str, float]] = []

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Keep the scalars of a step until the trainer can log."""
        self._waiting.append({**scalars, "gradtrace/step": step})

    def flush(self) -> None:
        """Log what waits."""
        waiting, self._waiting = self._waiting, []
        for numbers in waiting:
            self._trainer.log(numbers)

    def say(self, step: int, name: str, text: str) -> None:
        """Give a text to the runs that the trainer reports to."""
        callbacks = self._trainer.callback_handler.callbacks
        sinks = [getattr(each, "tb_writer", None) for each in callbacks]
        if "wandb" in (self._trainer.args.report_to or ()):
            sinks.append(getattr(sys.modules.get("wandb"), "run", None))
        for sink in sinks:
            if sink is not None and (speak := speaking(sink)) is not None:
                speak(step, name, text)


class TrainerHooks:
    """Intercepts the beginning of a trainer's steps, and its losses: callbacks receive neither.

    Wraps ``training_step`` of this trainer and ``backward`` of its accelerator while it trains.
    """

    def __init__(self, callback: GradTrace, trainer: Trainer) -> None:
        self._callback, self._trainer = callback, trainer
        self._step, self._backward = trainer.training_step, trainer.accelerator.backward
        trainer.training_step = self._stepped
        trainer.accelerator.backward = self._backwards

    def _stepped(self, *args: Any, **kwargs: Any) -> Any:
        self._callback.begin(self._trainer.state.global_step)
        try:
            return self._step(*args, **kwargs)
        except BaseException as error:
            self._callback._close(type(error).__name__)
            raise

    def _backwards(self, loss: Tensor, **kwargs: Any) -> Any:
        """Report the loss. The trainer has divided it by the passes of a step, or by the items in
        all of them; the accelerator multiplies it by the scale of half precision.
        """
        trainer = self._trainer
        scaler = trainer.accelerator.scaler
        passes = getattr(trainer, "current_gradient_accumulation_steps", 1)
        scaled = loss if scaler is None else scaler.scale(loss)
        self._callback.found(scaled, Divided(scaler, passes))
        return self._backward(loss, **kwargs)

    def remove(self) -> None:
        """Restore the trainer's methods."""
        vars(self._trainer).pop("training_step", None)
        vars(self._trainer.accelerator).pop("backward", None)


def trainer_of(callback: TrainerCallback, frame: FrameType | None) -> Trainer:
    """The trainer that calls a callback, found on the call stack: callbacks do not receive it."""
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, Trainer) and callback in found.callback_handler.callbacks:
            return found
        frame = frame.f_back
    raise GradtraceError(
        "GradTrace is called by no transformers.Trainer; pass it as "
        "Trainer(callbacks=[GradTrace()]), or use gradtrace.Monitor in a loop of your own"
    )
