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
from typing import NamedTuple

import torch

ROOT = Path("/")
"""The folder that contains ``proc`` and ``sys``."""


def available(root: Path | None = None) -> int | None:
    """The number of bytes that can still be allocated; None if no limit is known."""
    root = ROOT if root is None else root
    found = [*_machine(root), *_cgroups(root), *_ulimits(root)]
    return max(0, min(found)) if found else None


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


def _table(path: Path | str) -> dict[str, int]:
    """Numbers by name, from lines such as ``MemFree: 12 kB`` (in bytes) or ``inactive_file 12``."""
    found = {}
    for line in _text(path).splitlines():
        words = line.replace(":", " ").split()
        if len(words) > 1 and words[1].isdigit():
            found[words[0]] = int(words[1]) << (10 if words[2:] == ["kB"] else 0)
    return found


def _machine(root: Path) -> Iterator[int]:
    """The available memory of the machine and, without overcommit, what it may still commit."""
    found = {
        word: int(number) << 10
        for word, number in MEMINFO_LINE.findall(_text(root / "proc/meminfo"))
    }
    if "MemAvailable" in found:
        yield found["MemAvailable"]
    if _strict(root) and "CommitLimit" in found:
        yield found["CommitLimit"] - found.get("Committed_AS", 0)


@cache
def _strict(root: Path) -> bool:
    """Whether overcommit is disabled (``vm.overcommit_memory = 2``); read once."""
    return _number(root / "proc/sys/vm/overcommit_memory") == 2


MEMINFO_LINE = re.compile(r"^(MemAvailable|CommitLimit|Committed_AS): +(\d+) kB", re.MULTILINE)


class LimitKind(NamedTuple):
    """The files of a cgroup version: limits, memory in use, and the key of the file cache in it."""

    limits: tuple[str, ...]
    used: str
    cached: str


CGROUP_FILES = {
    "cgroup2": LimitKind(("memory.max", "memory.high"), "memory.current", "inactive_file"),
    "cgroup": LimitKind(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
}


def _cgroups(root: Path) -> Iterator[int]:
    """The memory left in the process's cgroup and in each of its ancestors."""
    for kind, mount, inside in _mounts(root):
        folder = str(mount)
        yield from _cgroup_left(folder, CGROUP_FILES[kind])
        for name in inside:
            folder = f"{folder}/{name}"
            yield from _cgroup_left(folder, CGROUP_FILES[kind])


def _cgroup_left(folder: str, kind: LimitKind) -> Iterator[int]:
    """The memory left in one cgroup, with its file cache counted as free; nothing if unlimited."""
    limits = [n for name in kind.limits if (n := _number(f"{folder}/{name}")) is not None]
    if not limits or min(limits) >= 1 << 60:  # version 1 writes "no limit" as a huge number
        return
    used = _number(f"{folder}/{kind.used}")
    if used is not None:
        cached = _table(f"{folder}/memory.stat").get(kind.cached, 0)
        yield min(limits) - used + cached


def _mounts(root: Path) -> Iterator[tuple[str, Path, tuple[str, ...]]]:
    """For each mount of memory cgroups: its version, its path, and the folders down to our group.

    A container often sees its own group as the root of the mount, whatever its path outside.
    """
    ours: dict[str, str] = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers:
            ours["cgroup2"] = path
        elif "memory" in controllers.split(","):
            ours["cgroup"] = path
    for kind, inside, mount in _mounted(root):
        path = ours.get(kind, "/")
        below = path.removeprefix(inside) if f"{path}/".startswith(f"{inside}/") else ""
        parts = tuple(part for part in below.split("/") if part not in ("", "..", "."))
        yield kind, mount, parts


@cache
def _mounted(root: Path) -> list[tuple[str, str, Path]]:
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
            found.append((kinds[0], words[3].rstrip("/"), root / words[4].lstrip("/")))
    return found


def _ulimits(root: Path) -> Iterator[int]:
    """The address space and data size left under ``ulimit -v`` and ``ulimit -d``."""
    try:
        import resource
    except ImportError:  # Windows has none
        return
    for limit, used in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        most, _ = resource.getrlimit(limit)
        if most != resource.RLIM_INFINITY:
            found = _table(root / "proc/self/status")
            if used in found:
                yield most - found[used]


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
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "can't allocate memory" in text or "not enough memory" in text or "std::bad_alloc" in text
    )


def shortfall(error: BaseException) -> str:
    """For error messages: how much memory was requested and is free, as far as known."""
    requested = REQUESTED_BYTES.search(str(error))
    parts = (
        [f"{spelt(int(requested[1].replace(',', '')))} more were asked for"] if requested else []
    )
    if not isinstance(error, torch.OutOfMemoryError) and (free := available()) is not None:
        parts.append(f"{spelt(free)} are free")
    return f" ({', and '.join(parts)})" if parts else ""


def spelt(size: int) -> str:
    """A number of bytes in a readable unit.

    >>> spelt(3 << 29), spelt(1000)
    ('1.5 GiB', '1000 bytes')
    """
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << power:
            return f"{size / (1 << power):.1f} {unit}"
    return f"{size} bytes"
