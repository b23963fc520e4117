"""Switches off modes of PyTorch's functions (``TorchFunctionMode``) that the caller has entered.

Such a mode is asked about every function of PyTorch, may run another in its place, and may count.
What gradtrace computes for itself is none of its business.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import overrides
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

_ALL: Any = vars(overrides)["_get_current_function_mode_stack"]
_INNERMOST: Any = vars(overrides)["_get_current_function_mode"]
_POP: Any = vars(overrides)["_pop_mode"]
_PUSH: Any = vars(overrides)["_push_mode"]


STAYING: tuple[type[TorchFunctionMode], ...] = (DeviceContext,)
"""Modes that stay active in passes: a default device."""


class _ThreadState(threading.local):
    before: Sequence[TorchFunctionMode] | None = None  # what ``paused`` found; None: it is not on


_HERE = _ThreadState()


@contextmanager
def paused() -> Iterator[None]:
    """Within, no mode that the caller has entered is active on this thread, but for the default
    device. Also usable as a decorator. Modes that are entered within are active, also in a
    ``paused`` in there.
    """
    if _HERE.before is not None:
        yield
        return
    before = _ALL()
    try:
        _settle([mode for mode in before if isinstance(mode, STAYING)], before)
        yield
    finally:
        try:
            _settle(before, None)
        except BaseException:  # Ctrl-C: what it has cut short is done again
            _settle(before, None)
            raise


@contextmanager
def resumed() -> Iterator[None]:
    """Within, modes that ``paused`` has switched off are active again, for code of the user's that
    must compute what it computed in the forward pass.
    """
    before, now = _HERE.before, _ALL()
    if not before:
        yield
        return
    try:
        _settle(before, None)
        yield
    finally:
        try:
            _settle(now, before)
        except BaseException:
            _settle(now, before)
            raise


def _settle(modes: Sequence[TorchFunctionMode], before: Sequence[TorchFunctionMode] | None) -> None:
    """Let exactly these modes be active, and note what there was before ``paused``."""
    _HERE.before = before
    if _ALL() != modes:
        while _INNERMOST() is not None:
            _POP()
        for mode in modes:
            _PUSH(mode)


class ForgivingMode(TorchFunctionMode):
    """A mode that can be left although Ctrl-C inside of a function of PyTorch has taken it off."""

    def __exit__(self, *error: Any) -> None:
        """Take it off, if any mode is active."""
        if _INNERMOST() is not None:
            super().__exit__(*error)  # type: ignore[no-untyped-call]
