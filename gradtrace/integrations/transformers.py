"""transformers: ``Trainer(..., callbacks=[GradTrace()])``."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gradtrace.errors import GradtraceError, needs
from gradtrace.integrations.making import Divided, checked, placed
from gradtrace.runs.history import StepRecord, scalars
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

LOG_MAX_DEPTH = 2
"""Modules down to this depth are in the trainer's log, which is printed; the file has all."""


class GradTrace(TrainerCallback):  # type: ignore[misc]
    """Trace training with transformers: ``Trainer(..., callbacks=[GradTrace(every=100)])``.

    Takes the arguments of ``gradtrace.Monitor``. ``every`` counts the trainer's ``global_step``; of
    the backward passes of a step the first is traced, with the loss that the trainer passes to
    ``backward``, however it is computed (label smoothing, ``compute_loss_func``,
    ``num_items_in_batch``). Some scalars go to the trainer's own log; the file and the page are
    ``gradtrace.jsonl`` and ``gradtrace.html`` in ``output_dir``, unless ``file`` and ``report`` are
    given. After training, ``callback.monitor.history`` has the results.
    """

    def __init__(self, **options: Any) -> None:
        self._options = checked(options)
        self.monitor: Monitor | None = None
        self._hooks: TrainerHooks | None = None
        self._record: StepRecord | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make the Monitor."""
        self._close("")
        trainer = trainer_of(self, sys._getframe())
        options = placed(self._options, lambda: args.output_dir, state.is_world_process_zero)
        self.monitor = Monitor(
            trainer.model_wrapped,
            start=state.global_step,
            accumulate=args.gradient_accumulation_steps,
            **options,
        )
        self._hooks = TrainerHooks(self, trainer)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the scalars of a traced step to the trainer's log."""
        if self._record is not None and self._hooks is not None:
            record, self._record = self._record, None
            self._hooks.log(shallow(scalars(record), LOG_MAX_DEPTH))

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
            self._record = self.monitor.step(loss, scale=scale) or self._record

    def _close(self, error: str) -> None:
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None
        if self.monitor is not None:
            self.monitor.close(error)


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

    def log(self, numbers: dict[str, float]) -> None:
        """Write to the trainer's log."""
        self._trainer.log(numbers)

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


def shallow(numbers: Mapping[str, float], depth: int) -> dict[str, float]:
    """The numbers of modules at most ``depth`` levels deep.

    >>> shallow({"gradtrace/loss": 2.0, "gradtrace/share/h.0.attn": 0.5}, 2)
    {'gradtrace/loss': 2.0}
    """
    return {name: value for name, value in numbers.items() if name.count(".") < depth}
