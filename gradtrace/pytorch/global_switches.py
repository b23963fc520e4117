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
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from torch.backends import cuda, cudnn, mha

Change: TypeAlias = Generator[None, None, None]
"""Changes a setting, yields, and restores it in a ``finally``."""


class Switch:
    """A process-wide setting: the first context changes it, the last restores it.

    Ctrl-C may strike inside ``__enter__`` of a context, or before an ``ExitStack`` knows it; then
    ``__exit__`` is never called. So each call makes a context of its own, a generator, which is
    left when it is freed.

    >>> from types import SimpleNamespace
    >>> lamp = SimpleNamespace(on=False)
    >>> def light():
    ...     lamp.on = True
    ...     try:
    ...         yield
    ...     finally:
    ...         lamp.on = False
    >>> switch = Switch(light)
    >>> with switch():
    ...     with switch():
    ...         pass
    ...     print(lamp.on)
    True
    >>> lamp.on
    False
    """

    def __init__(self, change: Callable[[], Change]) -> None:
        self._change = change
        self._lock = threading.RLock()  # reentrant: garbage collection inside may close a context
        self._holders: set[object] = set()
        self._changed: Change | None = None

    @contextlib.contextmanager
    def __call__(self) -> Change:
        """A context in which the setting is changed."""
        holder = object()
        try:
            self._hold(holder)
            yield
        finally:
            try:
                self._release(holder)
            except BaseException:  # Ctrl-C: what it has cut short is done again
                self._release(holder)
                raise

    def _hold(self, holder: object) -> None:
        with self._lock:
            self._holders.add(holder)
            if self._changed is None:
                self._changed = self._change()
                next(self._changed)

    def _release(self, holder: object) -> None:
        with self._lock:
            if self._changed is not None and self._holders <= {holder}:
                self._changed.close()
                self._changed = None
            self._holders.discard(holder)


Setting: TypeAlias = tuple[Callable[[], Any], Callable[[Any], object], Any]
"""What reads a setting, what changes it, and its value meanwhile."""


def changed(*settings: Setting) -> Change:
    """Changes several settings; Ctrl-C while they are restored does not stop that."""
    before = [(change, get()) for get, change, _ in settings]
    try:
        for _, change, value in settings:
            change(value)
        yield
    finally:
        try:
            _restore(before)
        except BaseException:
            _restore(before)
            raise


def _restore(before: list[tuple[Callable[[Any], object], Any]]) -> None:
    for change, value in before:
        change(value)


def _stance() -> Any:
    return sys.modules["torch._dynamo.eval_frame"]._stance


def _set_stance(stance: Any) -> None:
    if stance == "force_eager":
        torch.compiler.set_stance(stance)
    else:
        sys.modules["torch._dynamo.eval_frame"]._set_stance(stance)


EAGER = Switch(lambda: changed((_stance, _set_stance, "force_eager")))
"""Compiled modules run eagerly."""

_ATTENTION: tuple[Setting, ...] = (
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp, False),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp, False),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp, False),
    (cuda.math_sdp_enabled, cuda.enable_math_sdp, True),
)


def _enable_cudnn(enabled: bool) -> None:
    cudnn.set_flags(_enabled=enabled)  # type: ignore[no-untyped-call]


_CUDNN: Setting = (lambda: cudnn.enabled, _enable_cudnn, False)

COMPOSED = Switch(lambda: changed(*_ATTENTION, *([_CUDNN] if torch.cuda.is_available() else [])))
"""Attention, and on GPUs recurrent layers, are computed by elementary operators, not fused."""

UNFUSED = Switch(lambda: changed((mha.get_fastpath_enabled, mha.set_fastpath_enabled, False)))
"""PyTorch's transformer layers call their submodules, instead of the fused fast path."""

DOUBLE = Switch(lambda: changed((torch.get_default_dtype, torch.set_default_dtype, torch.float64)))
"""The default dtype is float64."""


def eager() -> AbstractContextManager[None]:
    """``EAGER`` if ``torch._dynamo`` is imported; importing it takes seconds, and without it
    nothing is compiled.
    """
    return EAGER() if compiler_loaded() else contextlib.nullcontext()


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
def uncompiled() -> Change:
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
