"""Every limit of memory that holds for the process is seen, and running out of it is said."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch
from sanitized import UNSANITIZED
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.errors import GradtraceError, TooLarge
from gradtrace.ir import interpreter, memory
from gradtrace.paths.path_search import PathFollower
from gradtrace.pytorch import memory_limits

GIB = 1 << 30
V2 = "/sys/fs/cgroup"
V1 = "/sys/fs/cgroup/memory"


class Tree:
    """Files of ``/proc`` and ``/sys`` as a kernel would show them."""

    def __init__(self, root: Path, free: int = 64 * GIB) -> None:
        self.root = root
        self.mounts: list[str] = []
        self.write("/proc/meminfo", f"MemTotal:   99 kB\nMemAvailable:   {free >> 10} kB\n")

    def write(self, path: str, text: str) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def mount(self, at: str, kind: str, inside: str = "/", options: str = "rw") -> None:
        self.mounts.append(f"31 23 0:28 {inside} {at} rw,relatime - {kind} {kind} {options}")
        self.write("/proc/self/mountinfo", "\n".join(self.mounts))
        memory_limits._mounted.cache_clear()

    def group(self, folder: str, limit: object, used: int, cached: int = 0) -> None:
        self.write(f"{folder}/memory.max", f"{limit}\n")
        self.write(f"{folder}/memory.current", f"{used}\n")
        self.write(f"{folder}/memory.stat", f"anon 5\ninactive_file {cached}\n")

    def old_group(self, folder: str, limit: int, used: int, cached: int = 0) -> None:
        self.write(f"{folder}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{folder}/memory.usage_in_bytes", f"{used}\n")
        self.write(f"{folder}/memory.stat", f"cache 5\ntotal_inactive_file {cached}\n")

    def available(self) -> int | None:
        return memory_limits.available(self.root)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_the_machine_alone(tree: Tree) -> None:
    assert tree.available() == 64 * GIB
    tree.mount(V2, "cgroup2")  # the root group has no files
    tree.write("/proc/self/cgroup", "0::/\n")
    assert tree.available() == 64 * GIB


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    assert memory_limits.available(tmp_path) is None
    assert memory_limits.resident(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_bytes(b"\xff\xfe nonsense\nMemAvailable: many kB")
    assert memory_limits.available(tmp_path) is None


def test_a_group_of_its_own(tree: Tree) -> None:
    """As ``systemd-run --scope -p MemoryMax=4G`` makes it; what only caches files can be had."""
    tree.mount(V2, "cgroup2")
    tree.write("/proc/self/cgroup", "0::/user.slice/run-1.scope\n")
    tree.group(f"{V2}/user.slice/run-1.scope", 4 * GIB, 3 * GIB, GIB // 2)
    assert tree.available() == GIB + GIB // 2
    tree.write(f"{V2}/user.slice/run-1.scope/memory.high", f"{7 * GIB // 2}\n")
    assert tree.available() == GIB


def test_groups_around_it(tree: Tree) -> None:
    tree.mount(V2, "cgroup2")
    tree.write("/proc/self/cgroup", "0::/job/step/task\n")
    tree.group(f"{V2}/job", 8 * GIB, 6 * GIB)
    tree.group(f"{V2}/job/step", "max", 5 * GIB)
    tree.group(f"{V2}/job/step/task", 9 * GIB, 4 * GIB)
    assert tree.available() == 2 * GIB
    tree.group(f"{V2}/job", 8 * GIB, 9 * GIB)
    assert tree.available() == 0


def test_a_container_sees_its_group_as_the_root(tree: Tree) -> None:
    tree.mount(V2, "cgroup2")
    tree.write("/proc/self/cgroup", "0::/\n")
    tree.group(V2, 2 * GIB, GIB)
    assert tree.available() == GIB


def test_version_1(tree: Tree) -> None:
    tree.mount("/sys/fs/cgroup/cpu", "cgroup", options="rw,cpu")
    tree.mount(V1, "cgroup", options="rw,memory")
    tree.mount("/sys/fs/cgroup/unified", "cgroup2")
    tree.write("/proc/self/cgroup", "4:memory:/slurm/job_7\n1:cpu:/elsewhere\n0::/\n")
    tree.old_group(V1, (1 << 63) - 4096, 30 * GIB)  # none
    tree.old_group(f"{V1}/slurm", 16 * GIB, 9 * GIB)
    tree.old_group(f"{V1}/slurm/job_7", 4 * GIB, 2 * GIB, GIB)
    assert tree.available() == 3 * GIB


def test_version_1_in_a_container(tree: Tree) -> None:
    """The path is that of the host, which is mounted as the root."""
    tree.mount(V1, "cgroup", inside="/docker/abc", options="rw,memory")
    tree.write("/proc/self/cgroup", "4:cpu,memory:/docker/abc/inner\n")
    tree.old_group(V1, 8 * GIB, GIB)
    tree.old_group(f"{V1}/inner", 5 * GIB, GIB)
    assert tree.available() == 4 * GIB
    tree.write("/proc/self/cgroup", "4:memory:/a/path/of/the/host\n")
    assert tree.available() == 7 * GIB


def test_a_system_that_promises_no_more_than_it_has(tree: Tree) -> None:
    text = f"MemAvailable: {8 << 20} kB\nCommitLimit: {4 << 20} kB\nCommitted_AS: {3 << 20} kB\n"
    tree.write("/proc/meminfo", text)
    assert tree.available() == 8 * GIB
    tree.write("/proc/sys/vm/overcommit_memory", "2\n")
    memory_limits._strict.cache_clear()
    assert tree.available() == GIB


def test_a_recent_answer_is_given_again(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limits, "ROOT", tree.root)
    now = [100.0]
    monkeypatch.setattr(memory_limits, "monotonic", lambda: now[0])
    tree.write("/proc/meminfo", f"MemAvailable: {8 << 20} kB\n")
    assert memory_limits.recently_available() == 8 * GIB
    tree.write("/proc/meminfo", f"MemAvailable: {4 << 20} kB\n")
    assert memory_limits.recently_available() == 8 * GIB
    now[0] += 2 * memory_limits.RECENT_SECONDS
    assert memory_limits.recently_available() == 4 * GIB
    tree.write("/proc/meminfo", f"MemAvailable: {2 << 20} kB\n")
    assert memory_limits.available() == memory_limits.recently_available() == 2 * GIB


SCRIPT = """
import resource, sys, torch, gradtrace as gt
from gradtrace.ir import memory
from gradtrace.pytorch import memory_limits as limits
from torch import nn
class MeanSquare(nn.Module):
    def forward(self, x):
        return x.square().mean()
layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())]
model = nn.Sequential(*layers, MeanSquare())  # any of its operators may be the one that fails
gt.trace(model(torch.randn(2, 64))).influence("operators")
with gt.watch(model) as watch:
    loss = model(torch.randn(60_000, 64))  # 15 MB a layer
kind = getattr(resource, sys.argv[1])
used = limits._entry(limits.ROOT / "proc/self/status", "Vm" + sys.argv[2])
limit = (used + (48 << 20),) * 2
resource.setrlimit(kind, limit)
if resource.getrlimit(kind) != limit:
    sys.exit(print("ignored"))
assert limits.available() <= 48 << 20
if sys.argv[3] == "unseen":
    memory.available = lambda device: None
try:
    watch.trace(loss).influence("operators")
except gt.errors.TooLarge as error:
    print(error)
"""


def limited(*words: str) -> str:
    said = fresh.python("-c", SCRIPT, *words, check=True).stdout
    if said == "ignored\n":
        pytest.skip("limits of memory cannot be set here: an emulator of processors ignores them")
    return said


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
def test_ulimit_is_seen_before_the_work_begins() -> None:
    said = limited("RLIMIT_AS", "Size", "seen")
    assert "recording the backward pass takes about" in said and "MiB are free" in said


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
@UNSANITIZED
def test_an_allocation_that_fails_says_what_was_asked_and_what_there_is() -> None:
    said = limited("RLIMIT_DATA", "Data", "unseen")
    assert "ran out of memory" in said and "MiB more were asked for" in said
    assert "MiB are free); trace fewer samples" in said and "Backward0 (in " in said


def test_an_error_is_told_where_there_is_no_memory_to_ask_how_much_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> bytes:
        raise MemoryError

    monkeypatch.setattr(memory_limits.os, "read", full)
    error = RuntimeError("can't allocate memory: you tried to allocate 2048 bytes")
    assert memory_limits.shortfall(error) == " (2.0 KiB more were asked for)"
    assert memory_limits.shortfall(MemoryError()) == ""


class Script(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x) + self.inner.bias).sum()


@pytest.mark.parametrize("semiring", [gt.semirings.SUM, gt.semirings.MAX], ids=lambda s: s.name)
def test_an_error_in_a_node_is_told_as_what_it_is(semiring: Any, monkeypatch: Any) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the disk is on fire")

    model = Script()
    with gt.watch(model) as watch:
        loss = model(torch.ones(3, 2))
    monkeypatch.setattr(Tensor, "sum", fail)
    with pytest.raises(GradtraceError, match=r"^AddBackward0 failed: the disk is on fire$"):
        watch.backward(loss, semiring)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("kernel"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_memory_that_runs_out_anywhere_is_told(error: Exception, monkeypatch: Any) -> None:
    x = torch.ones(3, requires_grad=True)
    trace = gt.trace((x * x).sum(), names={"x": x})

    def full(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(sys.modules["gradtrace.traced"], "norms_of", full)
    monkeypatch.setattr(PathFollower, "follow", full)
    monkeypatch.setattr(interpreter, "run", full)
    for ask in (
        trace.norms,
        lambda: trace.path("x", 0),
        lambda: gt.backward((x * x).sum(), gt.semirings.MAX),
    ):
        with pytest.raises(TooLarge, match=r"memory ran out.*; trace fewer samples"):
            ask()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often it was asked what is free."""
    calls: list[int] = []

    def available() -> int:
        calls.append(1)
        return 50 * GIB

    monkeypatch.setattr(memory_limits, "recently_available", available)
    return calls


def test_what_is_free_is_asked_once(asked: list[int]) -> None:
    x = torch.ones(3, requires_grad=True)
    trace = gt.trace((x * x).sum(), names={"x": x})
    assert len(asked) == 1
    for ask in (
        lambda: trace.influence("operators"),
        lambda: trace.path("x", 0),
        trace.norms,
        lambda: gt.backward((x * x).sum(), gt.semirings.MAX),
    ):
        asked.clear()
        ask()
        assert len(asked) == 1


def test_recording_and_norms_are_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh())))
    with gt.watch(model) as watch:
        loss = model(torch.randn(5000, 32)).square().mean()
    trace = watch.trace(loss)
    monkeypatch.setattr(memory, "available", lambda device: 1 << 20)
    for ask in (
        lambda: watch.trace(loss),
        lambda: gt.trace(loss),
        lambda: gt.backward(loss, gt.semirings.MAX),
    ):
        with pytest.raises(TooLarge, match=r"recording the backward pass takes about .* MiB, and"):
            ask()
    with pytest.raises(TooLarge, match="measuring norms takes about"):
        trace.norms()
    assert gt.backward(loss)  # holds no more than loss.backward() does


def test_recording_is_estimated_once_for_losses_of_one_structure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))
    made: list[int] = []
    estimate = memory.recording

    def recording(loss: Tensor) -> memory.RecordingBytes:
        made.append(0)
        return estimate(loss)

    monkeypatch.setattr(memory, "recording", recording)
    monkeypatch.setattr(memory, "available", lambda device: 1 << 30)

    def traced(rows: int) -> int:
        made.clear()
        with gt.watch(model) as watch:
            loss = model(torch.randn(rows, 32)).square().mean()
        watch.trace(loss)
        return len(made)

    assert [traced(50) for _ in range(4)] == [1, 1, 0, 0]  # recorded, replayed, and known
    assert traced(500) == 1  # shapes differ
    assert traced(50) == 0
    monkeypatch.setattr(memory, "available", lambda device: 1 << 10)
    with pytest.raises(TooLarge, match="recording the backward pass"):
        traced(50)
