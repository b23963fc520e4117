"""Selects the batches of a loader that a process is to trace, and numbers and names them."""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from gradtrace.distributed import digests
from gradtrace.errors import GradtraceError

START_OVER_HINT = "pass another checkpoint file, or delete it to begin again"
SHUFFLE = (
    "a loader that shuffles must do so alike in every run: DataLoader(..., shuffle=False), or "
    "shuffle=True with generator=torch.Generator().manual_seed(0); for other data"
)


class BatchEntry(NamedTuple):
    """A batch that was counted: its number at that time, and a digest of its data."""

    number: int
    content: str


class Batch(NamedTuple):
    """A batch of this process. ``name`` identifies it within its loader: a digest of its indices if
    it is loaded by index, else of its data.
    """

    number: int
    name: str
    content: str
    data: Any
    counted: bool = False  # in the checkpoint already


class Journaled(NamedTuple):
    """The batches of a loader in a checkpoint file, by name."""

    file: str
    batches: Mapping[str, BatchEntry]


class Batches:
    """The batches of a loader for whose numbers ``turn`` is true.

    A DataLoader does not load the others; of any other iterable they are skipped. ``digest`` covers
    the names of all batches so far, also of the skipped ones. Ranks compare it: if a loader
    shuffled differently on each of them, some samples would be counted twice and others never.

    Batches in the ``journal`` are recognised by their names, in any order, and their data are
    compared with the digests there. If all names are known beforehand (a list; a DataLoader by
    index), an error is raised at once if the loader does not give all counted batches; otherwise as
    soon as a batch is not the one that was counted under its number.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        turn: Callable[[int], bool],
        journal: Journaled | None = None,
        named: bool = True,
    ) -> None:
        self.loader, self.turn, self.journal = loader, turn, journal
        self.named = named  # whether names are needed; if not, they are just numbers
        self.total = _length(loader)
        self.seen = 0
        self._known = {} if journal is None else dict(journal.batches)
        self._numbers = {entry.number for entry in self._known.values()}
        self._left = set(self._known)
        self._times: Counter[str] = Counter()
        self._digest = digests.new()

    @property
    def digest(self) -> str:
        """The number of batches seen and a digest of their names."""
        return f"{self.seen}:{self._digest.hexdigest()}"

    def __len__(self) -> int:
        return sum(map(self.turn, range(self.total or 0)))

    def __iter__(self) -> Iterator[Batch]:
        loader: Any = self.loader
        if not by_index(loader):
            for number, name, data in self._picked(loader):
                yield Batch(number, name, "", data, name in self._known)
            return
        waiting: deque[tuple[int, str]] = deque()
        copied = copy.copy(loader)
        copied.__dict__.update(batch_sampler=self._indices(loader, waiting), _iterator=None)
        for data in copied:
            number, name = waiting.popleft()
            content = digests.digest(data) if self.journal is not None else ""
            self._compare(number, name, content)
            yield Batch(number, name, content, data, name in self._known)

    def _indices(self, loader: DataLoader[Any], waiting: deque[tuple[int, str]]) -> Iterator[Any]:
        """The lists of indices of this process's batches, from the loader's batch sampler.

        They are drawn at the same times as by the loader itself, so random numbers are those of a
        run over all batches; with a journal to compare, all are drawn at the first.
        """
        sampler: Any = loader.batch_sampler
        items = list(sampler) if self._known and self.total is not None else sampler
        for number, name, indices in self._picked(items):
            waiting.append((number, name))
            yield indices

    def _picked(self, items: Iterable[Any]) -> Iterator[tuple[int, str, Any]]:
        """Number, name and item of this process's items: batches, or their lists of indices."""
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
        """A digest of the item; repetitions of the same item get different names."""
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
                f"changed alike in every run, so seed that; for other data {START_OVER_HINT}"
            )

    def _refuse(self, missing: int) -> None:
        """Raise an error if the loader does not give ``missing`` of the counted batches."""
        if missing and self.journal is not None:
            raise GradtraceError(
                f"{self.journal.file} counts {len(self._known):,} batches, and the loader does not "
                f"give {missing:,} of them again, so samples would be counted twice: {SHUFFLE} "
                f"{START_OVER_HINT}"
            )

    def end(self) -> None:
        """Call after the last batch: check that all batches of the journal were seen."""
        self._refuse(len(self._left))


def _length(loader: Iterable[Any]) -> int | None:
    """The number of batches; None if unknown, as for an IterableDataset."""
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except TypeError:
        return None


def by_index(loader: Any) -> bool:
    """Whether batches can be skipped before they are loaded."""
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
        and getattr(loader, "in_order", True)
    )


# Loaders that give each rank its own part ---------------------------------------------------------


def distributed(loader: Any) -> Any:
    """The DistributedSampler of a loader, if it has one."""
    outer = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), outer, getattr(outer, "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            return sampler
    return None


def sharded(loader: Any, world: int) -> bool:
    """Whether a loader gives each rank its own part: it has a DistributedSampler."""
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
    """Notes on samples that a DistributedSampler repeats or drops to make all parts equal."""
    sampler = distributed(loader)
    if sampler is None:
        return ()
    size = len(sampler.dataset)
    more = sampler.total_size - size
    if not more:
        return ()
    what = f"{more} samples twice" if more > 0 else f"{-more} samples not at all"
    return (f"DistributedSampler gives {what}, to even out {sampler.num_replicas} ranks",)
