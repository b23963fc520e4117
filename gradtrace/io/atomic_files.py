"""Regular files: opened once, replaced atomically, and no temporary files left by killed processes.

A pipe or a device where a file is expected could block for ever or never end, so anything but a
regular file is refused, for reading and for writing, before it is opened and again afterwards.

A file is written as a temporary file beside it, which is renamed when it is complete::

    .gradtrace-<machine>-<boot>-<process>-<random>.tmp

The process that writes it holds a lock on it (``flock``), which the kernel releases when the
process ends, for whatever reason. The first time a process writes to a folder it removes temporary
files of this machine, of this boot or an earlier one, that are not locked. Those of other machines
(on a shared file system) are never touched, nor any where the file system has no locks.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

from gradtrace.errors import GradtraceError

try:
    from fcntl import LOCK_EX, LOCK_NB, flock
except ImportError:  # not on Windows
    LOCKS = False
else:
    LOCKS = True

SPACE_HINT = "free some space, or choose a folder that you may write to"
WRITER_HINT = "give a file that gradtrace wrote"
NO_FSYNC_ERRORS = {errno.EINVAL, errno.ENOTSUP}
"""Errors of file systems that do not support fsync."""

IRREGULAR_KINDS = (
    (stat.S_ISDIR, "a folder", "name a file in it"),
    (stat.S_ISFIFO, "a device or a pipe", "copy it to a file first"),
    (stat.S_ISSOCK, "a socket", "give the name of a file"),
)
OPEN_FLAGS = sum(getattr(os, flag, 0) for flag in ("O_NONBLOCK", "O_BINARY", "O_NOCTTY"))
DEVICE = ("a device or a pipe", "copy it to a file first")
TEMPORARY = re.compile(r"\.gradtrace-([0-9a-f]{12})-([0-9a-f]{12})-[0-9]+-[0-9a-f]{16}\.tmp")
MACHINE_ID_FILES = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))
BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")


class BadFile(GradtraceError):
    """A file that cannot be read or written: missing, damaged, of another kind, no space left."""


class NoFile(BadFile):
    """The file does not exist."""


# Reading and appending ---------------------------------------------------------------------------


def _refuse_irregular(mode: int) -> None:
    """Raise an error if a mode is not that of a regular file."""
    if stat.S_ISREG(mode):
        return
    what, instead = next((rest for is_it, *rest in IRREGULAR_KINDS if is_it(mode)), DEVICE)
    raise BadFile(f"is {what}: {instead}")


def opened(path: Path, flags: int = os.O_RDONLY) -> BinaryIO:
    """Open a regular file; unbuffered if it is opened for writing."""
    try:
        with suppress(FileNotFoundError):
            _refuse_irregular(os.stat(path).st_mode)
        number = os.open(path, flags | OPEN_FLAGS, 0o666)
    except FileNotFoundError:
        if os.path.islink(path):
            raise NoFile("is a link to a file that does not exist: check where it leads") from None
        raise NoFile("does not exist: check the name and the folder") from None
    except OSError as error:
        raise BadFile(f"cannot be opened ({error.strerror}): check its permissions") from error
    try:
        _refuse_irregular(os.fstat(number).st_mode)  # it may have been replaced since
        if flags & (os.O_WRONLY | os.O_RDWR):
            return os.fdopen(number, "r+b" if flags & os.O_RDWR else "wb", buffering=0)
        return os.fdopen(number, "rb")
    except BaseException:
        os.close(number)
        raise


@contextmanager
def naming(path: str | os.PathLike[str], otherwise: str) -> Iterator[Path]:
    """The expanded path; errors inside the context become a ``BadFile`` that names the file, with
    the text ``otherwise`` if they are of no known kind.
    """
    called = repr(os.fspath(path))
    try:
        at = Path(path).expanduser()
    except (OSError, RuntimeError, ValueError) as error:
        raise BadFile(f"{called} leads nowhere ({error}): give another path") from error
    try:
        yield at
    except BadFile as error:
        raise type(error)(f"{called} {error}") from error.__cause__
    except MemoryError as error:
        raise BadFile(
            f"{called} does not fit in memory: free some, or take a larger machine"
        ) from error
    except Exception as error:  # libraries raise many kinds of errors for malformed files
        raise BadFile(f"{called} {otherwise.format(repr(str(error)[:200]))}") from error


@contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A regular file, open for reading; errors name it."""
    with naming(path, "cannot be read ({}): give another path") as at, opened(at) as file:
        yield file


def content(path: str | os.PathLike[str], most: int | None = None) -> bytes:
    """All bytes of a regular file; raises if there are more than ``most``."""
    with reading(path) as file:
        if most is not None and os.fstat(file.fileno()).st_size > most:
            raise BadFile(f"has more than {most:,} bytes: {WRITER_HINT}")
        return file.read()


def put(file: BinaryIO, data: bytes | memoryview) -> None:
    """Write all bytes to an unbuffered file, which may take several writes."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def sync(file: BinaryIO) -> None:
    """Flush an unbuffered file to disk, if the file system supports fsync."""
    try:
        os.fsync(file.fileno())
    except OSError as error:
        if error.errno not in NO_FSYNC_ERRORS:
            raise


def make_folder(path: Path) -> None:
    """Make a folder and those above it, if they do not exist."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadFile(
            f"the folder {str(path)!r} cannot be made ({error.strerror or error}): choose a place "
            "that you may write to"
        ) from error


# Replacing ---------------------------------------------------------------------------------------


@contextmanager
def replacing(at: Path) -> Iterator[BinaryIO]:
    """A temporary file to write to; it replaces ``at`` at the end, unless an error is raised."""
    _permit(at)
    _sweep(at.parent)
    temporary = at.with_name(_name())
    try:
        while (file := _created(temporary)) is None:
            temporary = at.with_name(_name())
        with file:
            mode = stat.S_IMODE((at if at.exists() else temporary).stat().st_mode)
            yield file
            sync(file)
            with suppress(OSError):  # some file systems have no modes
                os.chmod(temporary, mode)
            if not LOCKS:
                file.close()  # Windows renames no open file; elsewhere keep the lock until then
            os.replace(temporary, at)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _permit(at: Path) -> None:
    """Raise an error for a device or a read-only file, which ``os.replace`` would replace."""
    if not at.parent.is_dir():
        raise BadFile("is in a folder that does not exist: make the folder first")
    if at.exists() and not at.is_file():
        raise BadFile("is a folder or a device: give the name of a file to write")
    if at.exists() and not os.access(at, os.W_OK):
        raise BadFile("is read-only: make it writable, or choose another name")


def _created(path: Path) -> BinaryIO | None:
    """A new file, locked; None if another process's ``_sweep`` removed it before it was locked."""
    file: Any = open(path, "x+b", buffering=0)  # noqa: SIM115
    try:
        lock(file, wait=True)
        there = os.stat(path).st_ino == os.fstat(file.fileno()).st_ino
    except FileNotFoundError:
        there = False
    except BaseException:
        file.close()
        raise
    if not there:
        file.close()
    return file if there else None


def lock(file: BinaryIO, wait: bool = False) -> bool | None:
    """Lock a file; False if another process has locked it, None where there are no locks."""
    try:
        if not LOCKS:
            return None
        flock(file, LOCK_EX | (0 if wait else LOCK_NB))
        return True
    except BlockingIOError:
        return False
    except OSError:
        return None


def _name() -> str:
    machine, boot = origin()
    return f".gradtrace-{machine}-{boot}-{os.getpid()}-{secrets.token_hex(8)}.tmp"


@cache
def origin() -> tuple[str, str]:
    """Short identifiers of this machine and of its current boot.

    If the system provides none they are random, so that no other process's files match them.
    """
    machine = next((text for path in MACHINE_ID_FILES if (text := _line(path))), "")
    boot = _line(BOOT_ID_FILE)
    whole = f"{machine} {platform.node()}" if machine else secrets.token_hex(16)
    return _short(whole), _short(boot or secrets.token_hex(16))


def _line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


def _short(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:12]


_swept: set[str] = set()


def _sweep(folder: Path) -> None:
    """Remove temporary files of killed processes of this machine; once for each folder."""
    key = str(folder)
    if key in _swept:
        return
    _swept.add(key)
    machine, boot = origin()
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            match = TEMPORARY.fullmatch(entry.name)
            ours = match and (match[1] == machine or match[2] == boot)
            if ours and entry.is_file(follow_symlinks=False):
                _remove(Path(entry.path))


def _remove(path: Path) -> None:
    """Remove a temporary file if it is not locked: the process that wrote it is gone."""
    with suppress(OSError, BadFile), opened(path, os.O_RDWR) as file:  # NFS: locks need write mode
        if lock(file) and os.stat(path).st_ino == os.fstat(file.fileno()).st_ino:
            path.unlink()
