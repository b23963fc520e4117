"""TensorBoard without a writer of one's own: ``Monitor(loggers=[TensorBoard("runs/a")])``.

A ``SummaryWriter`` that is there already can be handed to ``Monitor(loggers=[writer])`` as it is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from gradtrace.errors import GradtraceError, needs


class TensorBoard:
    """Writes numbers to a folder that TensorBoard reads."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise GradtraceError(
                needs("gradtrace.integrations.tensorboard", "tensorboard")
            ) from error
        self._writer: Any = SummaryWriter(os.fspath(folder))

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take the numbers of a step."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
