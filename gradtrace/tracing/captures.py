"""Which plans have a captured pass, what memory these take, and why others have none."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from itertools import count
from threading import Lock
from typing import Protocol

from torch import Tensor

from gradtrace.kernels import tuning


class Pass(Protocol):
    """A captured pass, or one that will be; ``nbytes`` is its memory on the device."""

    @property
    def nbytes(self) -> int:
        """The bytes of its memory on the device."""


_NUMBERS = count()


@dataclass(eq=False)
class Slot:
    """The captured pass of one plan, if there is one, or why not. ``replays`` counts the losses
    that were executed by it; ``off``: there will be none.
    """

    runs: int = 0
    replays: int = 0
    misses: int = 0
    reason: str = ""
    off: bool = False
    made: Pass | None = None
    lock: Lock = field(default_factory=Lock)
    _number: int = 0
    _model: weakref.ref[Tensor] | None = None

    def drop(self, reason: str, off: bool = False) -> None:
        """Free the memory of the pass."""
        self.made, self.reason, self.off = None, reason, off

    def used(self) -> None:
        """Now; free the memory of others, if there are too many."""
        self._number = next(_NUMBERS)
        _make_room(self)

    def drop_with(self, weight: Tensor) -> None:
        """Free the memory when a tensor goes."""
        mine = weakref.ref(self)

        def gone(_: object) -> None:
            slot = mine()
            if slot is not None:
                slot.runs = 0
                slot.drop("the model has gone")

        self._model = weakref.ref(weight, gone)


_SLOTS: weakref.WeakSet[Slot] = weakref.WeakSet()
_LOCK = Lock()


def _make_room(slot: Slot) -> None:
    with _LOCK:
        _SLOTS.add(slot)
        others = [each for each in _SLOTS if each.made is not None and each is not slot]
        others.sort(key=lambda each: each._number, reverse=True)
        for each in others[tuning.CAPTURED_MAX_PASSES - 1 :]:
            if each.lock.acquire(blocking=False):
                try:
                    each.runs = -tuning.CAPTURED_AGAIN_AFTER_LOSSES
                    each.drop("other passes took its memory")
                finally:
                    each.lock.release()
