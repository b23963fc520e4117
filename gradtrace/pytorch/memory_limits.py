"""How much of the CPU's memory this process may still take, by every limit that holds for it.

What the machine has free is one of them. A cgroup (a container, a SLURM job, ``systemd-run``)
limits the process too, by its own group and by every group around it; and so do ``ulimit -v`` and
``ulimit -d``. Past a cgroup's limit the process is killed, so what a pass takes is compared with
``available`` before it begins.
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
"""Where ``proc`` and ``sys`` are found."""


def available(root: Path | None = None) -> int | None:
    """The bytes that can still be had; None if nobody tells."""
    root = ROOT if root is None else root
    found = [*_machine(root), *_groups(root), *_own(root)]
    return max(0, min(found)) if found else None


def _text(path: Path | str) -> str:
    """What a file says; nothing where there is none."""
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
    """The number in a file; None where there is no file, or it says ``max``."""
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _table(path: Path | str) -> dict[str, int]:
    """Lines such as ``MemFree: 12 kB`` or ``inactive_file 12``."""
    found = {}
    for line in _text(path).splitlines():
        words = line.replace(":", " ").split()
        if len(words) > 1 and words[1].isdigit():
            found[words[0]] = int(words[1]) << (10 if words[2:] == ["kB"] else 0)
    return found


def _machine(root: Path) -> Iterator[int]:
    """What the system has left; where it promises no more than it has, what it may promise."""
    found = {
        word: int(number) << 10 for word, number in MEMORY.findall(_text(root / "proc/meminfo"))
    }
    if "MemAvailable" in found:
        yield found["MemAvailable"]
    if _strict(root) and "CommitLimit" in found:
        yield found["CommitLimit"] - found.get("Committed_AS", 0)


@cache
def _strict(root: Path) -> bool:
    """Whether the system promises no more than it has, which is set once and for all."""
    return _number(root / "proc/sys/vm/overcommit_memory") == 2


MEMORY = re.compile(r"^(MemAvailable|CommitLimit|Committed_AS): +(\d+) kB", re.MULTILINE)


class LimitKind(NamedTuple):
    """The files of a version of cgroups: limits, what is used, what of it only caches files."""

    limits: tuple[str, ...]
    used: str
    cached: str


KINDS = {
    "cgroup2": LimitKind(("memory.max", "memory.high"), "memory.current", "inactive_file"),
    "cgroup": LimitKind(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
}


def _groups(root: Path) -> Iterator[int]:
    """What the process's cgroup leaves, and every group that this one lies in."""
    for kind, mount, inside in _mounts(root):
        folder = str(mount)
        yield from _left(folder, KINDS[kind])
        for name in inside:
            folder = f"{folder}/{name}"
            yield from _left(folder, KINDS[kind])


def _left(folder: str, kind: LimitKind) -> Iterator[int]:
    limits = [n for name in kind.limits if (n := _number(f"{folder}/{name}")) is not None]
    if not limits or min(limits) >= 1 << 60:  # which says that there is none
        return
    used = _number(f"{folder}/{kind.used}")
    if used is not None:
        cached = _table(f"{folder}/memory.stat").get(kind.cached, 0)
        yield min(limits) - used + cached


def _mounts(root: Path) -> Iterator[tuple[str, Path, tuple[str, ...]]]:
    """Where cgroups that limit memory are mounted, and the folders below that lead to ours.

    A container often sees its own group as the mount's root, whatever its path is outside.
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
    """Which cgroup, what of it, and where; read once, since the list may be long."""
    found = []
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        words, kinds = before.split(), after.split()
        if len(words) < 5 or not kinds or kinds[0] not in KINDS:
            continue
        if kinds[0] == "cgroup2" or "memory" in kinds[-1].split(","):
            found.append((kinds[0], words[3].rstrip("/"), root / words[4].lstrip("/")))
    return found


def _own(root: Path) -> Iterator[int]:
    """What ``ulimit`` leaves of address space and of data."""
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
    """The bytes that this process has in memory; None if nobody tells."""
    words = _text((ROOT if root is None else root) / "proc/self/statm").split()
    return int(words[1]) * PAGE if len(words) > 1 and words[1].isdigit() else None


ASKED = re.compile(r"(?:tried|trying) to allocate ([\d,]+)")


def ran_out(error: BaseException) -> bool:
    """Whether an error says that memory was not to be had.

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
    """How much was asked for and how much there is, as far as that is known."""
    asked = ASKED.search(str(error))
    parts = [f"{spelt(int(asked[1].replace(',', '')))} more were asked for"] if asked else []
    if not isinstance(error, torch.OutOfMemoryError) and (free := available()) is not None:
        parts.append(f"{spelt(free)} are free")
    return f" ({', and '.join(parts)})" if parts else ""


def spelt(size: int) -> str:
    """A number of bytes as people say it.

    >>> spelt(3 << 29), spelt(1000)
    ('1.5 GiB', '1000 bytes')
    """
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << power:
            return f"{size / (1 << power):.1f} {unit}"
    return f"{size} bytes"
