"""Switches of the whole process, shared by all who need them thrown at the same time.

Whoever saves such a switch, throws it and puts it back leaves it thrown for good, or puts it back
under another's feet, as soon as two threads, or two blocks that are not nested, do so at once. So
each switch is one object here: the first who needs it throws it, the last puts it back.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch


class Switch:
    """A switch of the whole process, which the first context throws and the last puts back."""

    def __init__(self, throw: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        self._throw = throw
        self._lock = threading.RLock()  # the collector may close a context in here
        self._held = 0
        self._thrown = contextlib.ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._held:
                self._thrown.enter_context(self._throw())
            self._held += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._held -= 1
            if not self._held:
                self._thrown.close()


@contextlib.contextmanager
def _eager() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


@contextlib.contextmanager
def _composed() -> Iterator[None]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with contextlib.ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if torch.cuda.is_available():
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        yield


@contextlib.contextmanager
def _unfused() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextlib.contextmanager
def _double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


EAGER = Switch(_eager)
"""Compiled modules run eagerly."""

COMPOSED = Switch(_composed)
"""Attention, and on GPUs recurrent layers, are made of operators that can be opened."""

UNFUSED = Switch(_unfused)
"""PyTorch's transformer layers call all that is inside them."""

DOUBLE = Switch(_double)
"""New tensors are of float64."""


def eager() -> contextlib.AbstractContextManager[None]:
    """``EAGER``, if anything can be compiled: to import what compiles takes seconds."""
    return EAGER if "torch._dynamo" in sys.modules else contextlib.nullcontext()
