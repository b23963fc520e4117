"""Process-wide settings of PyTorch, changed by reference-counted context managers.

If two threads, or two blocks that are not nested, each save, change and restore such a setting, one
restores it while the other still needs it, or it stays changed for good. So each setting is one
object here: the first context that is entered changes it, the last that is left restores it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch


class Switch:
    """A process-wide setting: the first context changes it, the last restores it.

    ``throw`` makes the context manager that changes the setting.
    """

    def __init__(self, throw: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        self._throw = throw
        self._lock = threading.RLock()  # reentrant: garbage collection inside may close a context
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
def _composed() -> Iterator[None]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with contextlib.ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if torch.cuda.is_available():
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        yield


@contextlib.contextmanager
def _changed(get: Callable[[], Any], change: Callable[[Any], None], value: Any) -> Iterator[None]:
    before = get()
    change(value)
    try:
        yield
    finally:
        change(before)


EAGER = Switch(lambda: torch.compiler.set_stance("force_eager"))
"""Compiled modules run eagerly."""

COMPOSED = Switch(_composed)
"""Attention, and on GPUs recurrent layers, are computed by elementary operators, not fused."""

UNFUSED = Switch(
    lambda: _changed(
        torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False
    )
)
"""PyTorch's transformer layers call their submodules, instead of the fused fast path."""

DOUBLE = Switch(lambda: _changed(torch.get_default_dtype, torch.set_default_dtype, torch.float64))
"""The default dtype is float64."""


def eager() -> contextlib.AbstractContextManager[None]:
    """``EAGER`` if ``torch._dynamo`` is imported; importing it takes seconds, and without it
    nothing is compiled.
    """
    return EAGER if compiler_loaded() else contextlib.nullcontext()


def compiler_loaded() -> bool:
    """Whether anything could be compiled."""
    return "torch._dynamo" in sys.modules


def load_compiler() -> None:
    """Import ``torch._dynamo`` on a thread of its own: a reference cycle made by its import holds
    the frames of all that wait for it, with their tensors.
    """
    if not compiler_loaded():
        thread = threading.Thread(target=importlib.import_module, args=("torch._dynamo",))
        thread.start()
        thread.join()


DISABLE_VARIABLE = "TORCH_COMPILE_DISABLE"


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Disables ``torch.compile``, whose single node for a whole graph would hide the operators.

    Importing ``torch._dynamo`` takes seconds, so if it is not imported yet, the environment
    variable that it reads is set.
    """
    variable = os.environ.get(DISABLE_VARIABLE)
    before = variable == "1"
    os.environ[DISABLE_VARIABLE] = "1"
    config: Any = sys.modules.get("torch._dynamo.config")
    if config is not None:
        before, config.disable = config.disable, True
    try:
        yield
    finally:
        os.environ.pop(DISABLE_VARIABLE)
        if variable is not None:
            os.environ[DISABLE_VARIABLE] = variable
        config = sys.modules.get("torch._dynamo.config")
        if config is not None:
            config.disable = before
