"""The batches of a loader that a process is to trace, each with its number."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from gradtrace.errors import GradtraceError

LOOKED = 1024
"""How many elements of a tensor to look at, to tell it from others."""


class Batches:
    """The batches with the numbers that are ``wanted``.

    A DataLoader loads no others; of any other iterable they are passed over. ``digest`` is of all
    batches so far, also of those passed over: ranks compare it, as a loader that shuffles
    differently on each of them would have some samples counted twice and others never.
    """

    def __init__(self, loader: Iterable[Any], wanted: Callable[[int], bool]) -> None:
        self.loader, self.wanted = loader, wanted
        self.total = len(loader) if isinstance(loader, Sized) else None
        self.seen = 0
        self._digest = blake2b(digest_size=16)

    @property
    def digest(self) -> str:
        """Of what was seen."""
        return f"{self.seen}:{self._digest.hexdigest()}"

    def __len__(self) -> int:
        return sum(map(self.wanted, range(self.total or 0)))

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        loader: Any = self.loader
        if not by_index(loader):
            yield from self._picked(loader)
            return
        numbers: deque[int] = deque()
        for batch in _with(loader, Sampler(self, loader.batch_sampler, numbers)):
            yield numbers.popleft(), batch

    def _picked(self, items: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        for number, item in enumerate(items):
            self.seen = number + 1
            digested(self._digest, item)
            if self.wanted(number):
                yield number, item


class Sampler:
    """The wanted ones of a batch sampler's lists of indices, in the place of that sampler.

    It draws from it at the same moments, so that random numbers are those of a run of all batches.
    """

    def __init__(self, batches: Batches, sampler: Iterable[Any], numbers: deque[int]) -> None:
        self.batches, self.sampler, self.numbers = batches, sampler, numbers

    def __iter__(self) -> Iterator[Any]:
        for number, indices in self.batches._picked(self.sampler):
            self.numbers.append(number)
            yield indices

    def __len__(self) -> int:
        return len(self.batches)


def by_index(loader: Any) -> bool:
    """Whether batches can be left out before they are loaded."""
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
        and getattr(loader, "in_order", True)
    )


def _with(loader: DataLoader[Any], sampler: Sampler) -> DataLoader[Any]:
    """The same loader with another batch sampler; the user's own stays as it is."""
    found = copy.copy(loader)
    found.__dict__.update(batch_sampler=sampler, _iterator=None)
    return found


# Loaders of which each rank has its own -----------------------------------------------------------


def distributed(loader: Any) -> Any:
    """The DistributedSampler of a loader, if it has one."""
    outer = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), outer, getattr(outer, "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            return sampler
    return None


def sharded(loader: Any, world: int) -> bool:
    """Whether a loader gives each rank its own part already."""
    sampler = distributed(loader)
    if sampler is None:
        return False
    if sampler.num_replicas != world:
        raise GradtraceError(
            f"the loader's DistributedSampler is for {sampler.num_replicas} ranks, and "
            f"{world} measure together: pass num_replicas={world}, or a loader without one"
        )
    return True


def remarks(loader: Any) -> tuple[str, ...]:
    """What a DistributedSampler does to the counts: it evens out parts."""
    sampler = distributed(loader)
    if sampler is None:
        return ()
    size = len(sampler.dataset)
    more = sampler.total_size - size
    if not more:
        return ()
    what = f"{more} samples twice" if more > 0 else f"{-more} samples not at all"
    return (f"DistributedSampler gives {what}, to even out {sampler.num_replicas} ranks",)


# Telling things apart ----------------------------------------------------------------------------


def digested(into: Any, item: Any) -> None:
    """Add to a digest what tells an item from others: of a large tensor, some of its elements."""
    if isinstance(item, Tensor):
        into.update(f"{item.dtype}{tuple(item.shape)}".encode())
        flat = item.detach()
        if flat.layout is torch.strided and not flat.is_meta and flat.numel():
            flat = flat.reshape(-1)
            # A copy, as memory that NumPy has seen can never be freed by FSDP again.
            some = flat[:: max(1, len(flat) // LOOKED)].cpu().clone()
            into.update(some.view(torch.uint8).numpy().tobytes())
    elif isinstance(item, dict) or hasattr(item, "items"):
        for key, value in item.items():
            digested(into, str(key))
            digested(into, value)
    elif isinstance(item, (list, tuple)):
        into.update(f"[{len(item)}".encode())
        for value in item:
            digested(into, value)
    elif isinstance(item, (str, bytes, int, float, bool, complex)) or item is None:
        into.update(f"{item!r},".encode())
    else:
        into.update(type(item).__name__.encode())
