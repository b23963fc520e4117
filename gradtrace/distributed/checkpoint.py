"""What was counted of a data set, kept between runs: a table, and which batches it is of.

One process keeps all in one file. Of many, each keeps what it counted in a file beside that one,
``run.gradtrace.rank0``, ``run.gradtrace.rank1``, and so on; when all is counted they become one.
Tables add up exactly, so a run may go on with more processes, with fewer, or with one.

A file knows what it is of: the settings, the model with its weights, the loss function, and a
digest of each batch. What differs is refused, and the file is left as it is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from gradtrace.distributed.batches import Batch, BatchEntry
from gradtrace.distributed.identity import RunIdentity
from gradtrace.distributed.process_group import merged
from gradtrace.errors import GradtraceError
from gradtrace.io import container, schemas
from gradtrace.tracing.influence import Influence

SHARED = ""
"""The loader that all ranks have alike. One that is rank 2's own, of four, is called ``2/4``."""

AGAIN = "pass another checkpoint file, or delete it to begin again"


ENTRY = re.compile("([0-9a-f]{1,12}):([0-9a-f]{16}):((?:[0-9a-f]{16})?)")
SLOW = 0.05
"""A file that takes longer to write than these seconds is not written after every batch."""

SHARE = 20
"""It is written when as many times as long has passed."""


@dataclass(frozen=True)
class PartialResult:
    """A table, and the batches it is of: for each loader their entries by name."""

    table: Influence | None = None
    batches: Mapping[str, Mapping[str, BatchEntry]] = field(default_factory=dict)

    def of(self, loader: str) -> Mapping[str, BatchEntry]:
        """The batches of one loader."""
        return self.batches.get(loader, {})

    def add(self, loader: str, batch: Batch, part: Influence) -> PartialResult:
        """With one batch more."""
        entry = BatchEntry(batch.number, batch.content)
        return self.join(PartialResult(part, {loader: {batch.name: entry}}))

    def join(self, other: PartialResult) -> PartialResult:
        """With what another has; both have no batch in common."""
        names = sorted(self.batches.keys() | other.batches.keys())
        batches = {name: {**self.of(name), **other.of(name)} for name in names}
        return PartialResult(merged([self.table, other.table]), batches)

    def meets(self, other: PartialResult) -> bool:
        """Whether both count one and the same batch."""
        return any(
            not self.of(name).keys().isdisjoint(some) for name, some in other.batches.items()
        )

    def covers(self, other: PartialResult) -> bool:
        """Whether every batch of the other is counted here too."""
        return all(self.of(name).keys() >= some.keys() for name, some in other.batches.items())

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: of a batch ``number:name:content``, in hexadecimal."""
        table = None if self.table is None else self.table.to_dict()
        batches = {
            loader: " ".join(f"{e.number:x}:{name}:{e.content}" for name, e in some.items())
            for loader, some in self.batches.items()
        }
        return {"influence": table, "batches": batches}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PartialResult:
        """What ``to_dict`` gave."""
        table = data["influence"]
        found = {str(loader): dict(_entries(text)) for loader, text in data["batches"].items()}
        return cls(None if table is None else Influence.from_dict(table), found)


def _entries(text: str) -> Iterator[tuple[str, BatchEntry]]:
    for word in text.split():
        match = ENTRY.fullmatch(word)
        if match is None:
            raise ValueError(f"{word[:40]!r} is no batch")
        number, name, content = match.groups()
        yield name, BatchEntry(int(number, 16), content)


class CheckpointFiles:
    """The files of one checkpoint, as one rank sees them; without a path, nothing is kept.

    ``identity`` is what the files must be of, and ``names`` are those of the model's tensors.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None, settings: dict[str, Any], rank: int, world: int
    ) -> None:
        self.path = None if path is None else Path(path).expanduser()
        self.settings = settings
        self.identity: RunIdentity | None = None
        self.names: list[str] = []
        self.own = self.path
        self._unwritten: PartialResult | None = None
        self._next = 0.0
        if self.path is not None and world > 1:
            self.own = self.path.with_name(f"{self.path.name}.rank{rank}")

    def read(self) -> PartialResult:
        """What this rank counted before."""
        return PartialResult() if self.own is None else self._read(self.own)

    def whole(self) -> PartialResult:
        """What all ranks counted before, if they came to an end."""
        return (
            PartialResult() if self.path is None or self.own == self.path else self._read(self.path)
        )

    def parts(self) -> list[PartialResult]:
        """What is in files of parts, of any rank."""
        return [self._read(path) for path in self._files() if path not in (self.own, self.path)]

    def keep(self, counted: PartialResult) -> None:
        """Write down what this rank counted; where that takes long, now and then."""
        self._unwritten = counted
        begun = perf_counter()
        if begun >= self._next:
            self.flush()
            took = perf_counter() - begun
            self._next = begun + SHARE * took if took > SLOW else 0.0

    def flush(self) -> None:
        """Write down what was counted last, if it is not."""
        if self.own is not None and self._unwritten is not None:
            self._write(self.own, self._unwritten)
        self._unwritten = None

    def close(self, whole: PartialResult) -> None:
        """Write down that all is counted; files of parts go."""
        if self.path is not None:
            self._write(self.path, whole)
            for path in self._files():
                if path != self.path:
                    path.unlink(missing_ok=True)

    def forget(self) -> None:
        """All is counted and written down by rank 0: a part of it on another machine goes too."""
        if self.own is not None and self.own != self.path:
            with suppress(OSError):
                self.own.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        if self.path is None or not self.path.parent.is_dir():
            return []
        start = f"{self.path.name}.rank"
        parts = [
            path
            for path in self.path.parent.iterdir()
            if path.name.startswith(start) and path.name[len(start) :].isdecimal()
        ]
        return [self.path, *sorted(parts, key=lambda path: int(path.name[len(start) :]))]

    def _write(self, path: Path, counted: PartialResult) -> None:
        assert self.identity is not None
        meta = {"settings": self.settings, "identity": self.identity.to_dict()}
        container.write(path, "influence", {**meta, **counted.to_dict()}, {})

    def _read(self, path: Path) -> PartialResult:
        if not path.exists():
            return PartialResult()
        meta = container.read(path, "influence", schemas.JOURNAL).meta
        if meta["settings"] != self.settings:
            changed = [k for k in self.settings if meta["settings"].get(k) != self.settings[k]]
            raise GradtraceError(
                f"{path} was made with another {' and '.join(changed) or 'setting'}; {AGAIN}"
            )
        if "identity" not in meta:
            raise GradtraceError(
                f"{path} was written by an older gradtrace, which did not note its model and its "
                f"data; {AGAIN}"
            )
        assert self.identity is not None
        changed = RunIdentity.from_dict(meta["identity"]).differences(self.identity, self.names)
        if changed:
            raise GradtraceError(
                f"{path} does not belong to this call, so what it counts cannot be added to: "
                f"{' and '.join(changed)} changed since it was begun; {AGAIN}"
            )
        return PartialResult.from_dict(meta)


def pooled(
    whole: PartialResult, owns: Iterable[PartialResult], parts: Iterable[PartialResult]
) -> tuple[PartialResult, list[PartialResult]]:
    """What files other than the ranks' own count, and what is left of the ranks' own.

    A run that was killed while it put parts together leaves parts that the whole has already; and
    the parts that one rank finds are those of others, or of ranks that are no more.
    """
    rest, known, left = whole, whole, []
    for own in owns:
        left.append(PartialResult() if known.covers(own) else own)
        known = _apart(known, left[-1])
    for part in parts:
        if not known.covers(part):
            rest, known = _apart(rest, part), _apart(known, part)
    return rest, left


def _apart(first: PartialResult, second: PartialResult) -> PartialResult:
    if first.meets(second):
        raise GradtraceError(f"files of this checkpoint count the same batches twice; {AGAIN}")
    return first.join(second)


def fits(counted: PartialResult, streams: Iterable[str]) -> None:
    """Refuse to go on with what was counted from loaders of other ranks than there are now."""
    odd = sorted(set(counted.batches) - set(streams))
    if odd:
        was = f"{odd[0].split('/')[1]} ranks with loaders of their own" if odd[0] else "one loader"
        raise GradtraceError(
            f"the checkpoint counts batches of {was}, which are not those of now: start it as it "
            f"was, or {AGAIN}"
        )
