"""Lightning: ``Trainer(callbacks=[GradTrace()])``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gradtrace.errors import GradtraceError, needs
from gradtrace.integrations.making import Divided, LossTerms, checked, placed
from gradtrace.training.monitor import Monitor

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        try:
            from pytorch_lightning import Callback
        except ImportError as error:
            raise GradtraceError(needs("gradtrace.integrations.lightning", "lightning")) from error


class GradTrace(LossTerms, Callback):  # type: ignore[misc]
    """Trace training with Lightning: ``Trainer(callbacks=[GradTrace(every=100)])``.

    ``every`` counts the trainer's ``global_step``; of
    the backward passes of a step, or of a batch with several losses, the first is traced. The
    trainer's loggers get the shares of branches where paths have a choice, and the diagnosis of the
    first step, which is also a warning if something is wrong. The file and the page are
    ``gradtrace.jsonl`` and ``gradtrace.html`` in its ``log_dir``, unless ``file`` and ``report``
    are given; a line at the end says where they are. With ``trigger``, ``training_step`` is run
    again with its batch, where nothing that it logs is logged, unless optimisation is manual: it
    would move the model. After training, ``callback.monitor.history``
    has the results.

    Args:
        options: Arguments of ``gradtrace.Monitor``.
    """

    def __init__(self, **options: Any) -> None:
        self._options = checked(options)
        self._begun = False
        self._batch: tuple[Any, ...] = ()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the Monitor."""
        self._close("")
        options = placed(self._options, lambda: _folder(trainer), trainer.is_global_zero)
        loggers = [*options.pop("loggers", ()), *trainer.loggers]
        self.monitor = Monitor(
            pl_module,
            start=trainer.global_step,
            accumulate=trainer.accumulate_grad_batches,
            loggers=loggers,
            **options,
        )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Watch the next forward pass, if it is to be traced."""
        if self.monitor is not None:
            self.monitor.begin(trainer.global_step)
            self._begun, self._batch = True, (batch, batch_idx)

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """Trace the first loss of a batch, if the step is due."""
        if self.monitor is None or not self._begun:
            return
        self._begun = False
        whole = pl_module.automatic_optimization
        passes = trainer.accumulate_grad_batches if whole else 1
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        batch, self._batch = self._batch, ()
        again = partial(_step_again, trainer, pl_module)
        given: dict[str, Any] = {"rerun": again, "batch": batch} if whole else {}
        scale, terms = Divided(scaler, passes), self._take_terms()
        self.monitor.step(loss, scale=scale, terms=terms, **given)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Exclude validation from the step time."""
        if self.monitor is not None and not trainer.sanity_checking:
            self.monitor.pause()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the Monitor, which writes the report."""
        self._close("")

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Close the Monitor, and record the error."""
        self._close(type(exception).__name__)

    def _close(self, error: str) -> None:
        if self.monitor is not None:
            self.monitor.close(error)


def _step_again(trainer: Trainer, module: LightningModule, *batch: Any) -> Tensor:
    """The loss of ``training_step``, run again without logging."""
    muted = {"log": _nothing, "log_dict": _nothing}
    before = {name: vars(module).get(name) for name in muted}
    vars(module).update(muted)
    try:
        with trainer.precision_plugin.train_step_context():
            count = sum(
                each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
                for each in inspect.signature(module.training_step).parameters.values()
            )
            found: Any = module.training_step(*batch[:count])
    finally:
        for name, value in before.items():
            vars(module).pop(name) if value is None else vars(module).update({name: value})
    loss: Tensor = found["loss"] if isinstance(found, Mapping) else found
    return loss


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _folder(trainer: Trainer) -> str | None:
    folder: str | None = trainer.log_dir or trainer.default_root_dir
    return folder
