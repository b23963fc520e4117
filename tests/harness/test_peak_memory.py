"""Memory by the system's count, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pytest
import torch
from sanitized import UNSANITIZED
from torch import nn

from gradtrace.experiments.harness import peak_memory
from gradtrace.experiments.harness.peak_memory import apart


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new process finds this file, and what it imports."""
    for folder in (Path(__file__).parents[1], Path(__file__).parent):
        monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)


LINUX = pytest.mark.skipif(not peak_memory.REFS.exists(), reason="told by Linux")


def rises(*sizes: int) -> list[tuple[bool, float, float]]:
    """Of tensors of so many MiB: whether the peak begins anew, the peak, what stays."""
    found = []
    for size in (1, *sizes):  # the first operation of a process brings in code and threads
        reset, before = peak_memory.forget_peak(), peak_memory.resident()
        gone = torch.ones(size << 18)
        del gone
        found.append((reset, peak_memory.peak() - before, peak_memory.resident() - before))
    return found[1:]


def wide() -> float:
    """A wide layer on one sample: its gradient is all that its backward pass needs."""
    x = torch.randn(1, 4096)
    more = [
        peak_memory.beyond(nn.Linear(4096, size)(x).sum().backward)[1]
        for size in (2, 4096, 4096, 4096)
    ]
    return median(more[1:])


@LINUX
@UNSANITIZED
def test_peak_memory_is_that_of_the_time_since_and_of_what_was_freed() -> None:
    """Medians: the system may take away or bring back pages of code at any time."""
    found = apart(f"{__name__}:rises", *[64, 32] * 5)
    if not all(reset for reset, *_ in found):
        pytest.skip("the system does not allow it")
    for some, size in ((found[::2], 64), (found[1::2], 32)):
        assert median(rise for _, rise, _ in some) == pytest.approx(size, abs=4)
        assert median(stays for *_, stays in some) == pytest.approx(0, abs=4)


@LINUX
def test_the_memory_of_a_pass() -> None:
    if not peak_memory.forget_peak():
        pytest.skip("the system does not allow it")
    assert apart(f"{__name__}:wide") == pytest.approx(64, abs=4)  # 4096² floats


def test_what_fails_in_the_new_process_is_told() -> None:
    with pytest.raises(RuntimeError, match=r"ValueError.*of course"):
        apart(f"{__name__}:failing")


def test_the_new_process_ends_with_the_one_that_waits(tmp_path: Path) -> None:
    """Killed with -9, a run leaves nothing behind that would disturb the next measurement."""
    told = tmp_path / "pid"
    call = f"apart({__name__ + ':long'!r}, {str(told)!r})"
    code = f"from gradtrace.experiments.harness.peak_memory import apart; {call}"
    waiting = subprocess.Popen([sys.executable, "-c", code])
    try:
        assert _within(300, lambda: told.exists() and told.read_text().endswith("."))
        child = int(told.read_text().rstrip("."))
        assert _lives(child)
    finally:
        waiting.kill()
        waiting.wait()
    assert _within(60, lambda: not _lives(child))


def long(told: str) -> None:
    Path(told).write_text(f"{os.getpid()}.")
    time.sleep(600)


def _within(seconds: float, true: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.05)
    return true()


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{process}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def failing() -> None:
    raise ValueError("of course")
