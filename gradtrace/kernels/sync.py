"""How not to wait for a GPU.

Python runs ahead of a GPU: what it calls is put in a queue. To look at a single element of a
result (``bool(x)``, ``float(x)``, ``x.tolist()``, ``x.nonzero()``, ``x.cpu()``) waits until the
queue is empty, and to copy from memory that is not pinned to the GPU does so too. So nobody looks
at a tensor that ``would_sync`` names but through ``fetch_scalars``, which waits once for many.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def would_sync(x: Tensor) -> bool:
    """Whether to look at the elements of this tensor would make Python wait.

    Callers write ``waiting.avoid(x)``, so that tests can put another answer in its place.
    """
    return x.is_cuda


def fetch_scalars(numbers: Sequence[Tensor]) -> list[float]:
    """The elements of tensors that have one each, as floats, with one wait for each device.

    >>> fetch_scalars([torch.tensor(2), torch.tensor([0.5]), torch.tensor(True)])
    [2.0, 0.5, 1.0]
    """
    found = [0.0] * len(numbers)
    alike: dict[torch.device, dict[torch.dtype, list[int]]] = {}
    for n, number in enumerate(numbers):
        alike.setdefault(number.device, {}).setdefault(number.dtype, []).append(n)
    for kinds in alike.values():
        parts = [torch.stack([_flat(numbers[n]) for n in some]) for some in kinds.values()]
        line = torch.cat([part.double() for part in parts])
        for n, value in zip([n for some in kinds.values() for n in some], line.tolist()):
            found[n] = value
    return found


def _flat(x: Tensor) -> Tensor:
    return x.reshape(()) if x.dim() else x


class AsyncCopy:
    """A small tensor on its way to the CPU: nobody waits for it until it is read."""

    def __init__(self, x: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        self._here = x
        if x.is_cuda:
            self._here = torch.empty(x.shape, dtype=x.dtype, pin_memory=True, device="cpu")
            self._here.copy_(x, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record(torch.cuda.current_stream(x.device))

    def read(self) -> Tensor:
        """The tensor, on the CPU."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
        return self._here


class DeferredChecks:
    """Conditions that should hold, noted when they come up and looked at once, later."""

    def __init__(self) -> None:
        self._flags: list[Tensor] = []
        self._true = True

    def add(self, holds: Tensor) -> None:
        """A condition: all elements of this tensor are true."""
        self._flags.append(holds if not holds.dim() else holds.all())

    def fulfilled(self) -> bool:
        """Whether all held so far; to find out waits once, if there are new ones."""
        if self._flags:
            self._true &= all(fetch_scalars(self._flags))
            self._flags.clear()
        return self._true
