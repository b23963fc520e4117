"""A TensorBoard logger: ``Monitor(loggers=[TensorBoard("runs/a")])``.

An existing ``SummaryWriter`` can be passed directly: ``Monitor(loggers=[writer])``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from gradtrace.errors import GradtraceError, needs


class TensorBoard:
    """Writes scalars to a folder that TensorBoard reads."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise GradtraceError(
                needs("gradtrace.integrations.tensorboard", "tensorboard")
            ) from error
        self._writer: Any = SummaryWriter(os.fspath(folder))

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the scalars of a step."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
