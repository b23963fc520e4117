"""Append-only files of JSON lines, readable while they grow and after a kill.

A line is on disk before ``append`` returns. A killed process may leave a torn last line, without a
line end: readers leave it out, and whoever continues the file begins a new line after it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from gradtrace.errors import caution
from gradtrace.io import tuning
from gradtrace.io.atomic_files import (
    WRITER_HINT,
    BadFile,
    content,
    lock,
    opened,
    put,
    reading,
    replacing,
    sync,
)


def line_of(data: Mapping[str, Any], nan: bool = False) -> bytes:
    """An object as a line; NaN and infinities raise an error unless ``nan``."""
    return json.dumps(data, allow_nan=nan, separators=(",", ":")).encode() + b"\n"


def lines(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """The lines of a regular file, read lazily."""
    with reading(path) as file:
        yield from split(file)


def split(file: BinaryIO) -> Iterator[bytes]:
    """Lines with their line ends; the last may have none."""
    number, most = 0, tuning.LINE_MAX_BYTES
    while line := file.readline(most + 1):
        number += 1
        if len(line) > most:
            raise BadFile(f"has more than {most:,} bytes in line {number}: {WRITER_HINT}")
        yield line


def append(file: BinaryIO, text: bytes | memoryview) -> None:
    """Write to the end of an unbuffered file, and to disk."""
    put(file, text)
    sync(file)


class AppendFile:
    """A file that one process appends lines to, while others may delete, replace or truncate it.

    Lines that cannot be written, or not whole (a full disk, Ctrl-C), are kept and completed by the
    next ``append`` or ``close``; without a path all are. A file that others have changed is
    restored as far as possible: lines go on after those that ``restart`` returns for what is left
    of it.
    """

    def __init__(
        self, path: Path | None, restart: Callable[[bytes], Iterable[bytes]] = lambda left: ()
    ) -> None:
        self.path, self.restart = path, restart
        self.pending: list[bytes] = []  # lines that are not on disk, or not whole
        self.size = 0  # of the file, without these lines
        self.file = None if path is None else _opened_locked(path)
        self._warned: set[str] = set()
        if self.file is not None and (size := os.fstat(self.file.fileno()).st_size):
            self.file.seek(size - 1)
            self.size, self.pending = size, _line_end(self.file.read(1))

    def append(self, line: bytes) -> None:
        """Write a line to disk, or keep it until that is possible, with a warning."""
        self.pending.append(line)
        if failed := self._complete():
            self._warn_once(
                "kept",
                f"gradtrace cannot write to {str(self.path)!r} ({failed}): training goes on, what "
                "is found is kept in memory until there is room again",
            )

    def _complete(self) -> str:
        """Write the lines that are kept; the reason if that fails."""
        if self.file is not None and self.pending:
            try:
                self._check(self.file)
                self._write(self.file)  # which may be another one now
            except (OSError, BadFile) as error:
                return getattr(error, "strerror", None) or str(error)
        return ""

    def content(self) -> bytes:
        """All lines that were in the file when it was closed, also those that are not on disk."""
        if self.path is None:
            there = b""
        else:
            there = content(self.path) if self.file is None else _whole(self.file)
        return there[: self.size] + b"".join(self.pending)

    def close(self) -> bool:
        """Close the file if all lines are on disk; whether it is closed. Else it stays open, and
        the next ``close`` tries again.
        """
        if failed := self._complete():
            self._warn_once(
                "left",
                f"the last {len(self.pending):,} lines of {str(self.path)!r} are not written "
                f"({failed}): they are in memory until the program ends, and are written when "
                "results are asked for, or at its end, if there is room by then",
            )
            return False
        self.abandon()
        return True

    def abandon(self) -> None:
        """Close the file, whatever is on disk."""
        if self.file is not None:
            file, self.file = self.file, None
            with suppress(OSError):
                file.close()

    def _write(self, file: BinaryIO) -> None:
        text = b"".join(self.pending)
        done = os.fstat(file.fileno()).st_size - self.size  # not 0 after an interrupted write
        append(file, memoryview(text)[done:])
        self.size, self.pending = self.size + len(text), []

    # A file that was changed by others -----------------------------------------------------------

    def _check(self, file: BinaryIO) -> None:
        """Restore the file if it is gone, or not as it was written."""
        assert self.path is not None
        mine = os.fstat(file.fileno())
        try:
            there = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            self._copy(file, self.path)
            self._warn_once(
                "gone",
                f"{str(self.path)!r} was deleted while the run goes on: it is written again, with "
                "all that it held",
            )
            return
        except OSError:
            there = mine  # cannot be determined: assume that it is unchanged
        if not os.path.samestat(there, mine):
            self._handle_replaced(file, self.path)
        elif mine.st_size != self.size:
            self._handle_changed(_whole(file))

    def _copy(self, file: BinaryIO, path: Path) -> None:
        """Copy the open file, which may have been deleted, to ``path``, and go on there."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as new:
            put(new, _whole(file))
        self._switch_to(path)

    def _switch_to(self, path: Path) -> None:
        file = opened(path, os.O_RDWR | os.O_APPEND)
        lock(file)
        self.abandon()
        self.file, self.path = file, path

    def _handle_replaced(self, file: BinaryIO, path: Path) -> None:
        """Another file has the name: use it if its content is the same (an editor has saved it, or
        it is a copy); otherwise write to a file of another name.
        """
        whole = _whole(file)
        with suppress(BadFile):
            if content(path, len(whole)) == whole:
                self._switch_to(path)
                return
        number = 2
        while (new := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
            number += 1
        self._copy(file, new)
        self._warn_once(
            str(new),
            f"{str(path)!r} was replaced by another file while the run goes on, and is left as it "
            f"is: the run is written to {str(new)!r}",
        )

    def _handle_changed(self, left: bytes) -> None:
        """The file has another size: part of a pending line was written, or others changed it."""
        cut = len(left) < self.size
        if not cut and b"".join(self.pending).startswith(left[self.size :]):
            return
        self.pending = [*_line_end(left), *self.restart(left), *self.pending]
        self.size = len(left)
        if cut:
            self._warn_once(
                "cut",
                f"{str(self.path)!r} was cut short while the run goes on: what is missing is lost, "
                "and what is found from now on is added",
            )

    def _warn_once(self, what: str, text: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            caution(text)


def _opened_locked(path: Path) -> BinaryIO:
    """A file to append to, which no other process has opened so."""
    try:
        file = opened(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    except BadFile as error:
        raise BadFile(
            f"{str(path)!r} cannot be written to: it {error}; give a file in a folder that exists "
            "and that you may write to"
        ) from error.__cause__
    if lock(file) is False:
        file.close()
        raise BadFile(f"{str(path)!r} is being written by another run; give this one another file")
    return file


def _whole(file: BinaryIO) -> bytes:
    """The content of an open file, which may have been deleted; writes still go to its end."""
    parts = []
    os.lseek(file.fileno(), 0, os.SEEK_SET)
    while part := os.read(file.fileno(), tuning.CHUNK_BYTES):
        parts.append(part)
    return b"".join(parts)


def _line_end(text: bytes) -> list[bytes]:
    """The line end that is missing after a torn line."""
    return [b"\n"] if text and not text.endswith(b"\n") else []
