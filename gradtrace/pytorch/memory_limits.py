"""The CPU memory that this process may still allocate, under all limits that apply to it.

These are the free memory of the machine; the limits of the process's cgroup (a container, a SLURM
job, ``systemd-run``) and of all its ancestors; and ``ulimit -v`` and ``ulimit -d``. Beyond a
cgroup's limit the process is killed, so the estimate for a pass is compared with ``available``
before it begins.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import cache
from mmap import PAGESIZE as PAGE
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import torch

from gradtrace.errors import reason_of

ROOT = Path("/")
"""The folder that contains ``proc`` and ``sys``."""


def available(root: Path | None = None) -> int | None:
    """The number of bytes that can still be allocated; None if no limit is known."""
    root = ROOT if root is None else root
    found = [*_machine(root), *_cgroups(root), *_ulimits(root)]
    answer = max(0, min(found)) if found else None
    _last[root] = monotonic(), answer
    return answer


RECENT_SECONDS = 0.05
"""How long ``recently_available`` gives the same answer: a trace of a small model takes less."""

_last: dict[Path, tuple[float, int | None]] = {}  # when ``available`` was read, and its answer


def recently_available() -> int | None:
    """``available``, read anew if the last answer is older than ``RECENT_SECONDS``: to read all
    limits takes a third of a millisecond, and a trace asks twice.
    """
    when, answer = _last.get(ROOT, (-RECENT_SECONDS, None))
    return answer if 0 <= monotonic() - when < RECENT_SECONDS else available()


def _text(path: Path | str) -> str:
    """The text of a file; empty if it cannot be read."""
    try:
        file = os.open(path, os.O_RDONLY)  # several times as fast as open(), for a small file
    except OSError:
        return ""
    try:
        return b"".join(iter(lambda: os.read(file, 1 << 16), b"")).decode("ascii", "replace")
    except OSError:
        return ""
    finally:
        os.close(file)


def _number(path: Path | str) -> int | None:
    """The number in a file; None if there is no file or it contains ``max``."""
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _entry(path: Path | str, name: str) -> int | None:
    """A number of a file, from a line such as ``MemFree: 12 kB`` (in bytes) or ``inactive 12``."""
    found = re.search(rf"^{name}:?\s+(\d+)( kB)?$", _text(path), re.MULTILINE)
    return None if found is None else int(found[1]) << (10 if found[2] else 0)


def _machine(root: Path) -> Iterator[int]:
    """The available memory of the machine and, without overcommit, what it may still commit."""
    meminfo = root / "proc/meminfo"
    if (free := _entry(meminfo, "MemAvailable")) is not None:
        yield free
    if _strict(root) and (limit := _entry(meminfo, "CommitLimit")) is not None:
        yield limit - (_entry(meminfo, "Committed_AS") or 0)


@cache
def _strict(root: Path) -> bool:
    """Whether overcommit is disabled (``vm.overcommit_memory = 2``); read once."""
    return _number(root / "proc/sys/vm/overcommit_memory") == 2


class CgroupFiles(NamedTuple):
    """The files of a cgroup version: limits, memory in use, and the key of the file cache in it."""

    limits: tuple[str, ...]
    used: str
    cached: str


CGROUP_FILES = {
    "cgroup2": CgroupFiles(("memory.max", "memory.high"), "memory.current", "inactive_file"),
    "cgroup": CgroupFiles(
        ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"
    ),
}


def _cgroups(root: Path) -> Iterator[int]:
    """The memory left in the process's cgroup and in each of its ancestors, unless unlimited; its
    file cache counts as free.
    """
    for files, folder in _groups(root):
        limits = [n for name in files.limits if (n := _number(f"{folder}/{name}")) is not None]
        if not limits or min(limits) >= 1 << 60:  # version 1 writes "no limit" as a huge number
            continue
        used = _number(f"{folder}/{files.used}")
        if used is not None:
            yield min(limits) - used + (_entry(f"{folder}/memory.stat", files.cached) or 0)


def _groups(root: Path) -> Iterator[tuple[CgroupFiles, str]]:
    """The folders of the process's memory cgroup and of its ancestors, from each mount down.

    A container often sees its own group as the root of the mount, whatever its path outside.
    """
    ours: dict[str, str] = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers:
            ours["cgroup2"] = path
        elif "memory" in controllers.split(","):
            ours["cgroup"] = path
    for kind, inside, folder in _mounted(root):
        path = ours.get(kind, "/")
        below = path.removeprefix(inside) if f"{path}/".startswith(f"{inside}/") else ""
        yield CGROUP_FILES[kind], folder
        for part in below.split("/"):
            if part not in ("", "..", "."):
                folder = f"{folder}/{part}"
                yield CGROUP_FILES[kind], folder


@cache
def _mounted(root: Path) -> list[tuple[str, str, str]]:
    """Mounts of memory cgroups (version, root within the hierarchy, path); read once, since the
    list of mounts may be long.
    """
    found = []
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        words, kinds = before.split(), after.split()
        if len(words) < 5 or not kinds or kinds[0] not in CGROUP_FILES:
            continue
        if kinds[0] == "cgroup2" or "memory" in kinds[-1].split(","):
            found.append((kinds[0], words[3].rstrip("/"), str(root / words[4].lstrip("/"))))
    return found


def _ulimits(root: Path) -> Iterator[int]:
    """The address space and data size left under ``ulimit -v`` and ``ulimit -d``."""
    try:
        import resource
    except ImportError:  # Windows has none
        return
    for limit, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        most, _ = resource.getrlimit(limit)
        if most != resource.RLIM_INFINITY:
            used = _entry(root / "proc/self/status", name)
            if used is not None:
                yield most - used


def resident(root: Path | None = None) -> int | None:
    """The resident set size of this process in bytes; None if it is unknown."""
    words = _text((ROOT if root is None else root) / "proc/self/statm").split()
    return int(words[1]) * PAGE if len(words) > 1 and words[1].isdigit() else None


REQUESTED_BYTES = re.compile(r"(?:tried|trying) to allocate ([\d,]+)")


def ran_out(error: BaseException) -> bool:
    """Whether an error is an out-of-memory error.

    >>> ran_out(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ...")), ran_out(
    ...     RuntimeError("shapes differ"))
    (True, False)
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = reason_of(error)
    return isinstance(error, RuntimeError) and (
        "can't allocate memory" in text or "not enough memory" in text or "std::bad_alloc" in text
    )


def shortfall(error: BaseException) -> str:
    """For error messages: how much memory was requested and is free, as far as known."""
    requested = REQUESTED_BYTES.search(reason_of(error))
    parts = (
        [f"{spelt(int(requested[1].replace(',', '')))} more were asked for"] if requested else []
    )
    if not isinstance(error, torch.OutOfMemoryError) and (free := _left()) is not None:
        parts.append(f"{spelt(free)} are free")
    return f" ({', and '.join(parts)})" if parts else ""


def _left() -> int | None:
    """``available``, or None if there is not even the memory to ask."""
    try:
        return available()
    except MemoryError:
        return None


def spelt(size: int) -> str:
    """A number of bytes in a readable unit.

    >>> spelt(3 << 29), spelt(1000)
    ('1.5 GiB', '1000 bytes')
    """
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << power:
            return f"{size / (1 << power):.1f} {unit}"
    return f"{size} bytes"
