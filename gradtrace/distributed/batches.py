"""The batches of a loader that a process is to trace, each with its number."""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from gradtrace.distributed import digests
from gradtrace.errors import GradtraceError

SHUFFLE = (
    "a loader that shuffles must do so alike in every run: DataLoader(..., shuffle=False), or "
    "shuffle=True with generator=torch.Generator().manual_seed(0); for other data"
)


class BatchEntry(NamedTuple):
    """A batch that was counted: its number at that time, and a digest of its data."""

    number: int
    content: str


class Batch(NamedTuple):
    """A batch of this process. ``name`` tells it from the others of its loader: a digest of its
    indices where it is loaded by index, else of its data.
    """

    number: int
    name: str
    content: str
    data: Any
    counted: bool = False  # before


class Journaled(NamedTuple):
    """What a journal counts of a loader's batches, by name; and what to say if they are others."""

    file: str
    batches: Mapping[str, BatchEntry]
    again: str


class Batches:
    """The batches whose numbers are this process's ``turn``.

    A DataLoader loads no others; of any other iterable they are passed over. ``digest`` is of the
    names of all batches so far, also of those passed over: ranks compare it, as a loader that
    shuffles differently on each of them would have some samples counted twice and others never.

    Batches that a journal counts are recognised by their names, in whatever order they come, and
    their data are compared with what was counted. Where all names can be known beforehand (a list;
    a DataLoader by index) a loader that does not give all counted batches is refused at once; where
    they cannot, as soon as a batch is not that which was counted under its number.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        turn: Callable[[int], bool],
        journal: Journaled | None = None,
        named: bool = True,
    ) -> None:
        self.loader, self.turn, self.journal = loader, turn, journal
        self.named = named  # whether anybody asks for names
        self.total = _length(loader)
        self.seen = 0
        self._known = {} if journal is None else dict(journal.batches)
        self._numbers = {entry.number for entry in self._known.values()}
        self._left = set(self._known)
        self._times: Counter[str] = Counter()
        self._digest = digests.new()

    @property
    def digest(self) -> str:
        """Of what was seen."""
        return f"{self.seen}:{self._digest.hexdigest()}"

    @property
    def missing(self) -> int:
        """How many batches the journal counts that were not seen."""
        return len(self._left)

    def __len__(self) -> int:
        return sum(map(self.turn, range(self.total or 0)))

    def __iter__(self) -> Iterator[Batch]:
        loader: Any = self.loader
        if not by_index(loader):
            for number, name, data in self._picked(loader):
                yield Batch(number, name, "", data, name in self._known)
            return
        waiting: deque[tuple[int, str]] = deque()
        for data in _with(loader, Sampler(self, loader.batch_sampler, waiting)):
            number, name = waiting.popleft()
            content = digests.digest(data) if self.journal is not None else ""
            self._compare(number, name, content)
            yield Batch(number, name, content, data, name in self._known)

    def _picked(self, items: Iterable[Any]) -> Iterator[tuple[int, str, Any]]:
        """Those of this process, of batches or of their lists of indices, with their names."""
        listed = bool(self._known) and isinstance(items, (list, tuple))
        ahead = [self._name(n, item) for n, item in enumerate(items)] if listed else []
        if listed:
            self._refuse(len(self._left.difference(ahead)))
        for number, item in enumerate(items):
            name = ahead[number] if listed else self._name(number, item)
            self.seen = number + 1
            self._digest.update(name.encode())
            if name in self._known:
                self._left.discard(name)
            elif number in self._numbers and not listed:
                self._refuse(len(self._left))
            if self.turn(number):
                yield number, name, item

    def _name(self, number: int, item: Any) -> str:
        """A digest, another one for each time that the same comes."""
        if not self.named:
            return f"{number:016x}"
        name = digests.digest(item)
        self._times[name] += 1
        return name if self._times[name] == 1 else digests.digest(name, self._times[name])

    def _compare(self, number: int, name: str, content: str) -> None:
        before = self._known.get(name)
        if before is not None and self.journal is not None and before.content != content:
            raise GradtraceError(
                f"batch {number} has the samples of a batch that {self.journal.file} counts, but "
                "their data are others: samples that are changed at random (augmentation) must be "
                f"changed alike in every run, so seed that; for other data {self.journal.again}"
            )

    def _refuse(self, missing: int) -> None:
        """Refuse a loader that does not give so many batches that are counted."""
        if missing and self.journal is not None:
            raise GradtraceError(
                f"{self.journal.file} counts {len(self._known):,} batches, and the loader does not "
                f"give {missing:,} of them again, so samples would be counted twice: {SHUFFLE} "
                f"{self.journal.again}"
            )

    def end(self) -> None:
        """See that all batches that the journal counts were there; after the last one."""
        self._refuse(self.missing)


class Sampler:
    """The lists of indices of this process, in the place of the batch sampler that gives them all.

    It draws from it at the same moments, so that random numbers are those of a run of all batches;
    where a journal has to be compared, all at the moment of the first.
    """

    def __init__(
        self, batches: Batches, sampler: Iterable[Any], waiting: deque[tuple[int, str]]
    ) -> None:
        self.batches, self.sampler, self.waiting = batches, sampler, waiting

    def __iter__(self) -> Iterator[Any]:
        known = self.batches.journal is not None and self.batches.journal.batches
        items = list(self.sampler) if known and self.batches.total is not None else self.sampler
        for number, name, indices in self.batches._picked(items):
            self.waiting.append((number, name))
            yield indices

    def __len__(self) -> int:
        return len(self.batches)


def _length(loader: Iterable[Any]) -> int | None:
    """How many batches there are; None if that is not known, as of an IterableDataset."""
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except TypeError:
        return None


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
