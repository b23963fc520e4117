"""Counts the bytes of live tensors by intercepting every operation: exact, without noise."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within this mode, the storage of every operation's output is recorded.

    ``now`` is the number of bytes that are alive; ``peak`` the maximum after any operation;
    ``held`` the same without the gradients (``.grad``) of ``known``. The storages of ``known``
    tensors do not count, and views do not count twice.

    >>> x = torch.ones(4)
    >>> with LiveBytes([x]) as live:
    ...     y = (x + 1) + x.view(2, 2).flatten()
    >>> live.now(), live.peak
    (16, 32)
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = list(known)
        self.peak = self.held = 0
        self._given = {tensor.untyped_storage()._cdata for tensor in self.known}
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        now = self.now()
        self.peak = max(self.peak, now)
        self.held = max(self.held, now - self._gradients())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        # A weak reference prevents the address from being reused.
        if storage._cdata not in self._given:
            weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._seen[storage._cdata] = (weak, storage.nbytes())

    def note_all(self) -> None:
        """Record all live Python tensors, also those made by operations that no mode intercepts,
        such as gradtrace's passes, which run without the caller's modes.

        >>> y = torch.ones(3)
        >>> live = LiveBytes(tensors_alive())
        >>> z = torch.ones(4)
        >>> live.note_all()
        >>> live.now()
        16
        """
        for tensor in tensors_alive():
            self._note(tensor.untyped_storage())

    def now(self) -> int:
        """The number of live bytes."""
        gone = [key for key, (weak, _) in self._seen.items() if weak.expired()]  # type: ignore[no-untyped-call]
        for key in gone:
            del self._seen[key]
        return sum(size for _, size in self._seen.values())

    def _gradients(self) -> int:
        found = (tensor.grad for tensor in self.known if tensor.is_leaf)
        storages = (g.untyped_storage() for g in found if g is not None)
        return sum(s.nbytes() for s in storages if s._cdata in self._seen)


def tensors_alive() -> list[Tensor]:
    """All live strided tensors, by the garbage collector."""
    kinds = (Tensor, torch.nn.Parameter)
    return [x for x in gc.get_objects() if type(x) in kinds and x.layout is torch.strided]
