"""Checkpoints made while kernels are composed: they are composed when they are computed again.

A watch composes attention and LSTMs in the forward pass. What a non-reentrant checkpoint left out
is computed in the backward pass, when the watch is closed. Fused kernels would save other tensors
than composed ones, which ``torch.utils.checkpoint`` refuses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils import checkpoint

from gradtrace.pytorch import composed_lstm
from gradtrace.pytorch.global_switches import COMPOSED, Change, Switch

_FRAME: Any = vars(checkpoint)["_CheckpointFrame"]


class _ComposedFrame(_FRAME):  # type: ignore[misc]
    """A part of a graph to compute again, with the kernels of the first time."""

    def __init__(self, recompute: Callable[..., None], *given: Any, **named: Any) -> None:
        def composed(*args: Any) -> None:
            with composed_lstm.composed(), COMPOSED():
                recompute(*args)

        super().__init__(composed, *given, **named)


def _patched() -> Change:
    names = vars(checkpoint)
    try:
        names["_CheckpointFrame"] = _ComposedFrame
        yield
    finally:
        names["_CheckpointFrame"] = _FRAME


COMPOSED_CHECKPOINTS = Switch(_patched)
"""Checkpoints that are made are computed again with composed kernels."""
