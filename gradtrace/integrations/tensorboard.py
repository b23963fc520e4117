"""A TensorBoard logger: ``Monitor(loggers=[TensorBoard("runs/a")])``.

The diagnosis of the first step is among its texts.

An existing ``SummaryWriter`` can be passed directly: ``Monitor(loggers=[writer])``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from gradtrace.errors import GradtraceError, needs
from gradtrace.training.loggers import speaking


class TensorBoard:
    """Writes scalars to a folder that TensorBoard reads.

    Args:
        folder: Where event files are written.
    """

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

    def say(self, step: int, name: str, text: str) -> None:
        """Write a text, as it is.

        Args:
            step: Number of the step.
            name: Name of the text.
            text: The text.
        """
        speak = speaking(self._writer)
        assert speak is not None
        speak(step, name, text)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
