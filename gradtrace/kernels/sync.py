"""Avoiding device synchronisation.

Python queues GPU work and runs ahead of it. Reading an element of a result (``bool(x)``,
``float(x)``, ``x.tolist()``, ``x.nonzero()``, ``x.cpu()``) blocks until the queue is empty, and so
does copying from unpinned host memory to the GPU. Code therefore reads a tensor whose backend
``synchronises`` only through ``fetch_scalars``, which synchronises once for many tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def fetch_scalars(numbers: Sequence[Tensor]) -> list[float]:
    """The values of one-element tensors as floats, with one synchronisation per device.

    >>> fetch_scalars([torch.tensor(2), torch.tensor([0.5]), torch.tensor(True)])
    [2.0, 0.5, 1.0]
    """
    found = [0.0] * len(numbers)
    by_device: dict[torch.device, dict[torch.dtype, list[int]]] = {}
    for n, number in enumerate(numbers):
        by_device.setdefault(number.device, {}).setdefault(number.dtype, []).append(n)
    for by_dtype in by_device.values():
        parts = [torch.stack([_flat(numbers[n]) for n in indices]) for indices in by_dtype.values()]
        joined = torch.cat([part.double() for part in parts])
        for n, value in zip([n for indices in by_dtype.values() for n in indices], joined.tolist()):
            found[n] = value
    return found


def _flat(x: Tensor) -> Tensor:
    return x.reshape(()) if x.dim() else x


class AsyncCopy:
    """Asynchronous device-to-host copy of a small tensor; ``read`` synchronises."""

    def __init__(self, x: Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        self._host = x
        if x.is_cuda:
            self._host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True, device="cpu")
            self._host.copy_(x, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(x.device))

    def read(self) -> Tensor:
        """The tensor on the CPU, once its copy has finished."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        return self._host


class DeferredChecks:
    """Conditions on device tensors, collected without a sync and fetched in one batch later."""

    def __init__(self) -> None:
        self._flags: list[Tensor] = []
        self._held = True

    def add(self, holds: Tensor) -> None:
        """Add the condition that all elements of this tensor are true."""
        self._flags.append(holds if not holds.dim() else holds.all())

    def fulfilled(self) -> bool:
        """Whether all conditions so far held; synchronises once if some were added since."""
        if self._flags:
            self._held &= all(fetch_scalars(self._flags))
            self._flags.clear()
        return self._held
