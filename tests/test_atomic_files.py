"""Only regular files are opened, a file is replaced whole, and dead processes leave nothing."""

from __future__ import annotations

import os
import secrets
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch
from gradtrace.cli.report import wait
from gradtrace.runs import history
from gradtrace.runs.writer import Writer
from torch import nn

import gradtrace as gt
from gradtrace.io import atomic_files, container
from gradtrace.io.atomic_files import BadFile
from gradtrace.training import run_report

pytestmark = pytest.mark.skipif(os.name != "posix", reason="files of POSIX")


def fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


def bound(path: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as made:
        here = os.getcwd()
        os.chdir(path.parent)  # such names are short
        try:
            made.bind(path.name)
        finally:
            os.chdir(here)
    return path


def link(path: Path, to: str) -> Path:
    path.symlink_to(to)
    return path


IRREGULAR: dict[str, Callable[[Path], Path]] = {
    "folder": lambda folder: folder,
    "pipe": lambda folder: fifo(folder / "pipe.jsonl"),
    "link to a pipe": lambda folder: link(folder / "a.jsonl", str(fifo(folder / "pipe"))),
    "socket": lambda folder: bound(folder / "s.jsonl"),
    "zero": lambda folder: link(folder / "zero.jsonl", "/dev/zero"),
    "full": lambda folder: Path("/dev/full"),
    "null": lambda folder: Path("/dev/null"),
    "a folder's link": lambda folder: link(folder / "b.jsonl", str(folder)),
}

READERS: dict[str, Callable[[Path], object]] = {
    "load": gt.load,
    "files.read": container.read,
    "history": history.read,
    "view": run_report.kept,
    "influence": lambda path: counted(path),
    "report of a run": lambda path: run_report.report_run(path, path.parent / "x.html"),
    "report --watch": lambda path: wait([path], 0.01),
}

WRITERS: dict[str, Callable[[Path], object]] = {
    "files.write": lambda path: container.write(path, "trace", {}, {}),
    "files.put": lambda path: container.put(path, "text"),
    "Monitor": lambda path: gt.Monitor(nn.Linear(2, 2), file=path),
    "Writer": lambda path: Writer(path, {}),
    "draw": lambda path: gt.graph(torch.ones(1, requires_grad=True).sum()).draw(str(path)),
    "report": lambda path: gt.trace(torch.ones(1, requires_grad=True).sum()).report(path),
}


def counted(path: Path) -> Any:
    loss = lambda model, x: model(x).sum()  # noqa: E731
    return gt.influence(nn.Linear(2, 2), loss, [torch.ones(1, 2)], checkpoint=path, progress=False)


@pytest.fixture(autouse=True)
def alarm() -> Any:
    """What hangs fails."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it hangs"))
    signal.alarm(fresh.LONG)  # a machine may have much else to do
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("make", IRREGULAR.values(), ids=IRREGULAR)
@pytest.mark.parametrize("use", [*READERS.values(), *WRITERS.values()], ids=[*READERS, *WRITERS])
def test_what_is_no_file_is_refused(tmp_path: Path, use: Any, make: Any) -> None:
    path = make(tmp_path)
    if not path.exists():
        pytest.skip(f"no {path}")
    with pytest.raises(BadFile, match=r"folder|device|pipe|socket"):
        use(path)
    assert path.exists()


@pytest.mark.parametrize("read", [gt.load, container.read, history.read, atomic_files.content])
def test_a_link_that_leads_nowhere(tmp_path: Path, read: Any) -> None:
    with pytest.raises(
        atomic_files.NoFile, match="a link to a file that does not exist: check where"
    ):
        read(link(tmp_path / "x", "nowhere"))


def test_standard_input_is_read_if_it_is_a_file(tmp_path: Path) -> None:
    Writer(tmp_path / "run.jsonl", {}).close()
    code = "from gradtrace.runs import history; print(len(history.read('/dev/stdin')))"
    assert fresh.python("-c", code, stdin=tmp_path / "run.jsonl").stdout == "0\n"
    assert "device or a pipe: copy it to a file first" in fresh.python("-c", code).stderr


def test_a_file_replaced_meanwhile_is_read_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is opened once, so that another one of its name does not matter."""
    at, other = tmp_path / "x", tmp_path / "y"
    container.write(at, "view", {"step": 1}, {"view": torch.zeros(100)})
    container.write(other, "view", {"step": 2}, {"view": torch.ones(777)})
    opened: list[str] = []
    real = os.open

    def spy(path: Any, *rest: Any, **more: Any) -> int:
        found = real(path, *rest, **more)
        opened.append(os.fspath(path))
        os.replace(other, at) if other.exists() else None
        return found

    monkeypatch.setattr(os, "open", spy)
    found = container.read(at, "view")
    assert found.meta == {"step": 1} and found.tensors["view"].sum() == 0
    assert opened == [str(at)]
    assert container.read(at, "view").meta == {"step": 2}


# What killed processes leave ----------------------------------------------------------------------


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic_files, "_swept", set())


KILLED = """
import os, signal, sys
from gradtrace.io import atomic_files, container
atomic_files.sync = lambda file: os.kill(os.getpid(), signal.SIGKILL)
container.put(sys.argv[1], "new")
"""


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith(".gradtrace"))


def test_the_next_run_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    at = tmp_path / "x"
    at.write_text("old")
    done = fresh.python("-c", KILLED, str(at))
    assert done.returncode == -signal.SIGKILL and at.read_text() == "old"
    assert len(left(tmp_path)) == 1
    container.put(tmp_path / "y", "text")
    assert left(tmp_path) == [] and at.read_text() == "old"


def name(machine: str | None = None, boot: str | None = None, pid: int = 1) -> str:
    ours = atomic_files.origin()
    return f".gradtrace-{machine or ours[0]}-{boot or ours[1]}-{pid}-{secrets.token_hex(8)}.tmp"


def test_of_others_nothing_is_removed(tmp_path: Path) -> None:
    """Neither what lives, nor what other machines left, nor what only looks like ours."""
    kept = [
        name("0" * 12, "1" * 12),  # of another machine, on a shared file system
        ".gradtrace-0123456789abcdef.tmp",
        ".gradtrace-notes.tmp",
        f"{name()}.bak",
        name().removesuffix(".tmp"),
    ]
    for each in kept:
        (tmp_path / each).touch()
    folder = tmp_path / name()
    folder.mkdir()
    aside = link(tmp_path / name(), str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").write_text("text")
    with atomic_files.replacing(tmp_path / "mine") as file:
        (mine,) = set(left(tmp_path)) - {*kept, folder.name, aside.name}
        atomic_files._swept.clear()
        container.put(tmp_path / "other", "text")
        assert mine in left(tmp_path), "a process that lives holds its lock"
        atomic_files.put(file, b"whole")
    assert left(tmp_path) == sorted([*kept, folder.name, aside.name])
    assert (tmp_path / "mine").read_bytes() == b"whole"


@pytest.mark.parametrize(
    "of",
    [{}, {"boot": "1" * 12}, {"machine": "1" * 12}, {"pid": os.getpid()}],
    ids=["", "boot", "machine", "process"],
)
def test_what_nobody_holds_is_removed(tmp_path: Path, of: dict[str, Any]) -> None:
    """Of this boot or an earlier one, of this machine or a container on it, of any process."""
    (tmp_path / name(**of)).write_text("half")
    container.put(tmp_path / "x", "text")
    assert left(tmp_path) == []


def test_without_locks_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / (old := name())).touch()
    monkeypatch.setattr(atomic_files, "LOCKS", False)
    container.put(tmp_path / "x", "text")
    assert left(tmp_path) == [old] and (tmp_path / "x").read_text() == "text"


def test_a_temporary_that_is_swept_too_early_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its making and its lock another process may take it for a dead one's."""
    lock = atomic_files.lock
    made: list[Path] = []

    def swept(file: Any, wait: bool = False) -> bool:
        if not made:
            made.extend(tmp_path.glob(".gradtrace-*"))
            made[0].unlink()
        return lock(file, wait)

    monkeypatch.setattr(atomic_files, "lock", swept)
    container.put(tmp_path / "x", "text")
    assert made and (tmp_path / "x").read_text() == "text" and left(tmp_path) == []


def test_a_folder_is_swept_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[object] = []
    real = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: looked.append(path) or real(path))
    for n in range(3):
        container.put(tmp_path / str(n), "text")
    assert len(looked) == 1
