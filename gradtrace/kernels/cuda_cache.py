"""Compiled CUDA kernels, kept in a folder of the user's: compiling takes seconds in every process.

The folder is ``GRADTRACE_CACHE``, or ``gradtrace`` in the system's folder for caches; nothing is
kept if that variable is empty, or if others could write there. What cannot be read or written is
compiled again.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from gradtrace.kernels.tuning import CACHED_BINARIES

SUFFIX = ".cubin"
DIGEST_BYTES = 32


def binary(given: tuple[str, ...], compile: Callable[[], bytes], again: bool = False) -> bytes:
    """What ``compile`` returns, or returned before for what was ``given`` then: the source and all
    that its binary depends on. ``again``: what is kept cannot be used.
    """
    folder = _folder()
    if folder is None:
        return compile()
    name = sha256("\0".join(given).encode()).hexdigest() + SUFFIX
    found = None if again else _read(folder / name)
    if found is None:
        found = compile()
        _write(folder, name, found)
    return found


def _folder() -> Path | None:
    """The folder, made if it is missing; None if nothing is kept."""
    chosen = os.environ.get("GRADTRACE_CACHE")
    if chosen == "":
        return None
    try:
        found = _default() if chosen is None else Path(chosen)
        found.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = found.stat()
    except (OSError, RuntimeError):  # without a home
        return None
    private = os.name == "nt" or (about.st_uid == os.getuid() and not about.st_mode & 0o022)
    return found if private else None  # code of others must not run as ours


def _default() -> Path:
    if os.name == "nt":
        return Path(
            os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local", "gradtrace"
        )
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "gradtrace"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "gradtrace")


def _read(path: Path) -> bytes | None:
    """What is kept in a file; None if there is none, or if it is damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, found = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    return found if sha256(found).digest() == digest else None


def _write(folder: Path, name: str, found: bytes) -> None:
    """Keep a binary, under its name when it is complete; the oldest of too many go."""
    try:
        handle, written = tempfile.mkstemp(dir=folder)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(sha256(found).digest() + found)
            os.replace(written, folder / name)
        except BaseException:
            os.unlink(written)
            raise
        kept = sorted(folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime)
        for path in kept[:-CACHED_BINARIES]:
            path.unlink(missing_ok=True)
    except OSError:  # a full disk, or another process clears the folder
        return
