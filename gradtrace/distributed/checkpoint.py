"""Checkpoints over a data set: the table counted so far, and the batches it covers.

A single process writes one file. Each of several writes its own counts to a file beside that one,
``run.gradtrace.rank0``, ``run.gradtrace.rank1``, and so on; at the end these are merged into one.
Tables are added exactly, so a run may continue with any number of processes.

A file stores the settings, the identity of the model, its weights and the loss function, and a
digest of each batch. If one of these differs, an error is raised and the file is not changed. A
further digest is of all of them and the table: counts that were edited, which can be as plausible
as those that were made, are not added to, even if the checksum of the file was made right again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias

from gradtrace.distributed import tuning
from gradtrace.distributed.batches import START_OVER_HINT, Batch, BatchEntry
from gradtrace.distributed.identity import RunIdentity
from gradtrace.distributed.summed_tables import SummedTables
from gradtrace.errors import GradtraceError, caution
from gradtrace.io import container, schemas
from gradtrace.io.atomic_files import BadFile, NoFile
from gradtrace.tracing.influence import Influence

Result: TypeAlias = Influence | SummedTables
"""What is measured over a data set: tables that can be merged."""

KINDS: dict[str, type[Influence] | type[SummedTables]] = {
    "influence": Influence,
    "decomposition": SummedTables,
}
"""Results by the kind of their checkpoints, which is also the name of their field there."""

SHARED = ""
"""The name of a loader that is the same on all ranks. That of rank 2 of four is called ``2/4``."""


@dataclass(frozen=True)
class PartialResult:
    """A table, and the batches it covers: by loader and by the name of the batch. ``draws`` is what
    the random numbers of its losses follow from (``random_draws``), empty if nothing was counted.
    """

    table: Result | None = None
    batches: Mapping[tuple[str, str], BatchEntry] = field(default_factory=dict)
    draws: str = ""

    def of(self, loader: str) -> dict[str, BatchEntry]:
        """The batches of one loader."""
        return {name: entry for (one, name), entry in self.batches.items() if one == loader}

    def add(self, loader: str, batch: Batch, part: Result) -> PartialResult:
        """A result with one more batch, whose table is ``part``."""
        entry = BatchEntry(batch.number, batch.content)
        return self.join(PartialResult(part, {(loader, batch.name): entry}))

    def join(self, other: PartialResult) -> PartialResult:
        """The sum of two results that have no batch in common."""
        tables: list[Any] = [each.table for each in (self, other) if each.table is not None]
        table = tables[0].merge(*tables[1:]) if tables else None
        return PartialResult(table, {**self.batches, **other.batches}, self.draws or other.draws)

    def covers(self, other: PartialResult) -> bool:
        """Whether this result contains every batch of the other."""
        return self.batches.keys() >= other.batches.keys()

    def to_dict(self) -> dict[str, Any]:
        """JSON values; a batch is ``number:name:content``, in hexadecimal."""
        words: dict[str, list[str]] = {}
        for (loader, name), entry in self.batches.items():
            words.setdefault(loader, []).append(f"{entry.number:x}:{name}:{entry.content}")
        table = self.table
        tables = {k: table.to_dict() for k, kind in KINDS.items() if isinstance(table, kind)}
        found = {loader: " ".join(some) for loader, some in words.items()}
        return {**tables, "batches": found, "draws": self.draws}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PartialResult:
        """The inverse of ``to_dict``."""
        tables = [k.from_dict(data[key]) for key, k in KINDS.items() if data.get(key) is not None]
        found = {}
        for loader, text in data["batches"].items():
            for word in text.split():
                number, name, content = word.split(":")
                found[loader, name] = BatchEntry(int(number, 16), content)
        return cls(tables[0] if tables else None, found, data["draws"])


class CheckpointFiles:
    """The files of one checkpoint, as used by one rank; without a path, nothing is written. They
    are of one kind, see ``KINDS``.

    ``identity`` is the identity that files must match, and ``names`` are the names of the model's
    tensors, for error messages.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        settings: dict[str, Any],
        rank: int,
        world: int,
        kind: str = "influence",
    ) -> None:
        self.kind = kind
        self.path = None if path is None else Path(path).expanduser()
        self.settings = settings
        self.identity: RunIdentity | None = None
        self.names: list[str] = []
        self.own = self.path
        self._unwritten: PartialResult | None = None
        self._next = 0.0
        self._begun = self._failed = False  # whether a result was written, or the last was not
        if self.path is not None and world > 1:
            self.own = self.path.with_name(f"{self.path.name}.rank{rank}")

    def read(self) -> PartialResult:
        """The result in this rank's own file."""
        return PartialResult() if self.own is None else self._read(self.own)

    def whole(self) -> PartialResult:
        """The merged result of all ranks, if an earlier run finished."""
        return (
            PartialResult() if self.path is None or self.own == self.path else self._read(self.path)
        )

    def parts(self) -> list[PartialResult]:
        """The results in the files of other ranks, of this run or an earlier one."""
        return [self._read(path) for path in self._files() if path not in (self.own, self.path)]

    def keep(self, counted: PartialResult) -> None:
        """Write this rank's result; if writing is slow, only at intervals. Where the file cannot be
        written, that is told once, and tried again with the next result.
        """
        self._unwritten = counted
        begun = perf_counter()
        if begun >= self._next:
            self.flush()
            took = perf_counter() - begun
            self._next = (
                begun + tuning.WRITE_INTERVAL_FACTOR * took
                if took > tuning.SLOW_WRITE_SECONDS
                else 0.0
            )

    def flush(self) -> None:
        """Write the last result, if it is not written yet."""
        if self.own is not None and self._unwritten is not None:
            if self._begun:
                self._try_to_write(self.own, self._unwritten)
            else:  # a wrong path is told before much is computed
                self._write(self.own, self._unwritten)
                self._begun = True
        self._unwritten = None

    def close(self, whole: PartialResult) -> bool:
        """Write the merged result, and delete the files of single ranks; whether it was written."""
        if self.path is None or not self._try_to_write(self.path, whole):
            return False
        with suppress(OSError, BadFile):  # those that stay are known to be merged
            for path in self._files():
                if path != self.path:
                    path.unlink(missing_ok=True)
        return True

    def _try_to_write(self, path: Path, counted: PartialResult) -> bool:
        """Write a result; if that fails, what was counted is still in memory, and that is told."""
        try:
            self._write(path, counted)
        except (BadFile, OSError) as error:
            if not self._failed:
                caution(
                    f"{error}. The run goes on, and its result will be returned; but what is "
                    "counted from now on is lost if the process ends before"
                )
            self._failed = True
            return False
        self._failed = False
        return True

    def forget(self) -> None:
        """Delete this rank's file after rank 0 has written the merged one; it may be on another
        machine, where rank 0 cannot delete it.
        """
        if self.own is not None and self.own != self.path:
            with suppress(OSError):
                self.own.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        if self.path is None or not os.path.isdir(folder := self.path.parent):
            return []
        pattern = re.compile(re.escape(self.path.name) + r"\.rank([0-9]+)")
        try:
            matches = [(path, pattern.fullmatch(path.name)) for path in folder.iterdir()]
        except OSError as error:
            raise BadFile(
                f"the folder {str(folder)!r}, which may hold other ranks' results, cannot be read "
                f"({error.strerror or error}): check its permissions, or choose another"
            ) from error
        parts = {int(match[1]): path for path, match in matches if match is not None}
        return [self.path, *(path for _, path in sorted(parts.items()))]

    def _write(self, path: Path, counted: PartialResult) -> None:
        assert self.identity is not None
        meta: dict[str, Any] = {"settings": self.settings, "identity": asdict(self.identity)}
        meta |= {self.kind: None, **counted.to_dict()}
        container.write(path, self.kind, {**meta, "digest": container.digest(meta)}, {})

    def _read(self, path: Path) -> PartialResult:
        try:
            meta = container.read(path, self.kind, schemas.JOURNALS[self.kind]).meta
        except NoFile:
            return PartialResult()
        if meta["settings"] != self.settings:
            mine, theirs = self.settings, meta["settings"]
            changed = [k for k in {**mine, **theirs} if mine.get(k) != theirs.get(k)]
            raise GradtraceError(
                f"{path} was made with another {' and '.join(changed)}; {START_OVER_HINT}"
            )
        if not {"identity", "digest", "draws"} <= meta.keys():
            raise GradtraceError(
                f"{path} was written by an older gradtrace, which did not note its model, its data "
                f"and its random numbers; {START_OVER_HINT}"
            )
        if meta.pop("digest") != container.digest(meta):
            raise GradtraceError(
                f"{path} was changed since it was written, so what it counts cannot be trusted; "
                f"{START_OVER_HINT}"
            )
        assert self.identity is not None
        changed = RunIdentity(**meta["identity"]).differences(self.identity, self.names)
        if changed:
            raise GradtraceError(
                f"{path} does not belong to this call, so what it counts cannot be added to: "
                f"{' and '.join(changed)} changed since it was begun; {START_OVER_HINT}"
            )
        return PartialResult.from_dict(meta)


def pooled(
    whole: PartialResult, owns: Iterable[PartialResult], parts: Iterable[PartialResult]
) -> tuple[PartialResult, list[PartialResult]]:
    """The result in files other than the ranks' own, and the results left in the ranks' own files.

    Batches that the merged file ``whole`` has already are dropped: a run that was killed while it
    merged leaves such files. ``parts``, which one rank finds, belong to other ranks of this run, or
    to ranks of an earlier run with more of them.
    """
    rest, known, left = whole, whole, []
    for own in owns:
        left.append(PartialResult() if known.covers(own) else own)
        known = _disjoint_join(known, left[-1])
    for part in parts:
        if not known.covers(part):
            rest, known = _disjoint_join(rest, part), _disjoint_join(known, part)
    return rest, left


def _disjoint_join(first: PartialResult, second: PartialResult) -> PartialResult:
    if not first.batches.keys().isdisjoint(second.batches):
        raise GradtraceError(
            f"files of this checkpoint count the same batches twice; {START_OVER_HINT}"
        )
    if first.draws and second.draws and first.draws != second.draws:
        raise GradtraceError(
            "files of this checkpoint are of several runs, whose random numbers were others; "
            f"{START_OVER_HINT}"
        )
    return first.join(second)


def check_loaders(counted: PartialResult, streams: Iterable[str]) -> None:
    """Raise an error if batches were counted from loaders other than ``streams``, those of now."""
    odd = sorted({loader for loader, _ in counted.batches} - set(streams))
    if odd:
        was = f"{odd[0].split('/')[1]} ranks with loaders of their own" if odd[0] else "one loader"
        raise GradtraceError(
            f"the checkpoint counts batches of {was}, which are not those of now: start it as it "
            f"was, or {START_OVER_HINT}"
        )
