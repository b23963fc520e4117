"""Work of a device that is noted once and made again without Python: what a backend offers."""

from __future__ import annotations

from typing import Protocol


class NotCapturable(Exception):
    """The work depends on elements, or on more than its tensors; the message says on what."""


class Captured(Protocol):
    """Launches that were noted; ``nbytes`` is the memory that is reserved for their results."""

    nbytes: int

    def replay(self) -> None:
        """Make them again, on the same memory, in order with the current stream."""
