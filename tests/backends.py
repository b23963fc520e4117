"""Other backends in the place of a device's own: plain torch, or one that imitates a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from gradtrace import kernels
from gradtrace.kernels import Backend, Cpu, Cuda, Reference, cpu_library

CPU = torch.device("cpu")
HAS_LIBRARY = cpu_library.library() is not None


class Unread(Cpu if HAS_LIBRARY else Reference):  # type: ignore[misc]
    """The CPU's kernels, but reading an element counts as a synchronisation, as on a GPU."""

    synchronises = True
    finite_sums = Cuda.finite_sums


def unread() -> Backend:
    library = cpu_library.library()
    return Unread(CPU) if library is None else Unread(CPU, library)


def use(patch: pytest.MonkeyPatch, backend: Backend, device: torch.device = CPU) -> None:
    """The backend of a device, until the patch is undone."""
    patch.setitem(kernels._BACKENDS, device, backend)


def imitate_gpu(patch: pytest.MonkeyPatch, waits: bool = True) -> None:
    """CPU tensors are not read where those on a GPU would not be; or they are, if not ``waits``."""
    backend = unread()
    if not waits:
        patch.setattr(backend, "synchronises", False)
    use(patch, backend)


@contextmanager
def using(backend: Backend) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        use(patch, backend)
        yield


def plainly(f: Callable[..., Any], *given: Any, **more: Any) -> Any:
    """In plain torch: neither compiled nor on a GPU."""
    with using(Reference(CPU)):
        return f(*given, **more)


class Operations:
    """``ops.merge(...)`` is ``merge`` of the backend of the first tensor that it is given."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def run(*given: Any, **more: Any) -> Any:
            first = next(x for x in tree_leaves((given, more)) if isinstance(x, Tensor))
            return getattr(kernels.backend_of(first), name)(*given, **more)

        return run


ops = Operations()
