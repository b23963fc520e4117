"""Lightning: ``Trainer(callbacks=[GradTrace()])``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from gradtrace.training.callbacks import Traced

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:  # under its older name
        from pytorch_lightning import Callback


class GradTrace(Traced, Callback):  # type: ignore[misc]
    """Trace training with Lightning: ``Trainer(callbacks=[GradTrace()])``.

    Steps are the trainer's ``global_step``; of the losses of a step the first is traced. Curves go
    to the trainer's loggers, and the file, the page and the incidents to its ``log_dir``. After
    training, ``callback.monitor.history`` has the results.

    Args:
        options: Arguments of ``gradtrace.Monitor``.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the Monitor."""
        self._close()
        folder = trainer.log_dir or trainer.default_root_dir
        passes = trainer.accumulate_grad_batches
        self._make(pl_module, folder, trainer.loggers, trainer.global_step, passes)
        self._begun = False

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin a pass: Lightning calls ``training_step``, and not the model."""
        self._begin(trainer.global_step, batch)
        self._begun = True

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """Hand on the first loss of a batch, which a scaler has multiplied already."""
        if self._begun:
            self._begun = False
            passes = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            self._step(loss, loss, scaler, passes)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the Monitor, which writes the page."""
        self._close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Close the Monitor, and record the error."""
        self._close(type(exception).__name__)
