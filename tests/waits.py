"""Sees every place at which a program with tensors on a GPU would wait for it, without a GPU."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gradtrace.autodiff.nodes import is_number
from gradtrace.pytorch import function_modes

_SEEN = (
    "_local_scalar_dense nonzero nonzero_static masked_select equal allclose unique_dim "
    "unique_consecutive _unique2 _unique bincount is_nonzero item histc"
)
SEEN = frozenset(_SEEN.split())
"""ATen operations whose result, or its shape, is read from the elements of a tensor."""

_CALLED = (
    "__bool__ __float__ __int__ __index__ __contains__ item tolist cpu numpy __array__ nonzero "
    "masked_select equal allclose unique bincount is_nonzero __repr__ __format__"
)
CALLED = frozenset(_CALLED.split())
"""The same by the names of functions, for where dispatch modes are switched off."""

MADE = frozenset({"tensor", "as_tensor", "from_numpy"})
"""Functions that copy from Python's memory to the device."""


class Waits:
    """Counts, while open, the looks at elements that would each wait for a GPU; more than ``most``
    fail the test there and then. All tensors count as ones on a GPU.

    >>> with Waits(most=1) as waits:
    ...     held = bool(torch.ones(3).all())
    >>> waits.count
    1
    """

    def __init__(self, most: int | None = None) -> None:
        self.most = most
        self.places: list[str] = []
        self._inside = False
        self._modes = ExitStack()

    @property
    def count(self) -> int:
        """How many there were."""
        return len(self.places)

    def __enter__(self) -> Waits:
        self._modes.enter_context(pytest.MonkeyPatch.context()).setattr(
            function_modes, "STAYING", (*function_modes.STAYING, _Called)
        )
        self._modes.enter_context(_Called(self))
        self._modes.enter_context(_Dispatched(self))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._modes.close()

    def note(self, what: str) -> None:
        """One more, here."""
        self.places.append(f"{what} at {_where()}")
        if self.most is not None and self.count > self.most:
            raise AssertionError(f"waits more than {self.most} times:\n" + "\n".join(self.places))


def _where() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and "gradtrace" not in frame.f_globals.get("__name__", ""):
        frame = frame.f_back
    return f"{frame.f_globals.get('__name__')}:{frame.f_lineno} {frame.f_code.co_name}"


def _is_mask(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8)


def _masked(args: Any) -> bool:
    """Whether something is indexed with a mask."""
    at = args[1] if len(args) > 1 else None
    return _is_mask(at) or (isinstance(at, (list, tuple)) and any(map(_is_mask, at)))


def _of_python(x: Any) -> bool:
    """Whether a tensor was a number in Python, so that it never lies on a GPU."""
    return isinstance(x, Tensor) and is_number(x)


class _Dispatched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, waits: Waits) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        masked = name in ("index", "index_put", "index_put_") and _masked(args)
        if not self.waits._inside and (masked or (name in SEEN and not _of_python(args[0]))):
            self.waits.note(name)
        return func(*args, **(kwargs or {}))


class _Called(TorchFunctionMode):
    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if self._waits(name, args, kwargs or {}) and not self.waits._inside:
            self.waits.note(name)
            self.waits._inside = True  # what it is made of is not another
            try:
                return func(*args, **(kwargs or {}))
            finally:
                self.waits._inside = False
        return func(*args, **(kwargs or {}))

    def _waits(self, name: str, args: Any, kwargs: Any) -> bool:
        if name in ("__getitem__", "__setitem__"):
            return _masked(args)
        if name in MADE:
            return kwargs.get("device") is not None and not isinstance(args[0], Tensor)
        if name == "to":
            return "cpu" in (str(a) for a in (*args[1:], *kwargs.values()))
        if name == "where":
            return len(args) == 1
        return name in CALLED and not _of_python(args[0])
