"""Peak memory of a piece of work: measured by the operating system, in a separate process."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

STATUS = Path("/proc/self/status")
REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"

EXACT = {
    "MALLOC_MMAP_THRESHOLD_": "65536",  # the GNU library
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MIMALLOC_PURGE_DELAY": "0",  # torch's allocator on ARM
}
"""Environment variables by which freed memory is returned to the system at once, so that resident
memory is memory in use.
"""

CHILD = f"import sys; from {__name__} import answer; answer(*sys.argv[1:])"


def resident() -> float:
    """Resident MiB of this process now (the peak so far, if the system does not report that)."""
    return _status("VmRSS") or _peak_ever()


def peak() -> float:
    """Peak resident MiB of this process, since the last successful ``forget_peak``."""
    return _status("VmHWM") or _peak_ever()


def forget_peak() -> bool:
    """Return unused memory to the system and reset ``peak``; whether the system supports it."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # not the GNU library
        ctypes.CDLL(None).malloc_trim(0)
    try:
        REFS.write_text(RESET_PEAK)
    except OSError:
        return False
    return True


def beyond(run: Callable[[], object]) -> tuple[float, float]:
    """Resident MiB before ``run()``, and by how much the peak in it exceeds them."""
    gc.collect()
    forget_peak()
    before, highest = resident(), peak()
    start = before if forget_peak() else highest
    result = run()  # the result counts: it is alive until the peak is read
    most = peak()
    del result
    return before, max(most - start, 0.0)  # the system may have evicted pages of code


def _status(word: str) -> float | None:
    if not STATUS.exists():
        return None
    lines = STATUS.read_text().splitlines()
    return next((int(x.split()[1]) / 1024 for x in lines if x.startswith(f"{word}:")), None)


def _peak_ever() -> float:
    import resource  # not on Windows

    unit = 2**20 if platform.system() == "Darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


# A separate process ------------------------------------------------------------------------------


def apart(function: str, *arguments: Any, exact: bool = True) -> Any:
    """Call ``"module:function"`` in a new process. If ``exact``, freed memory is returned to the
    system at once, which costs time: turn it off where time is measured.

    Arguments and the result are JSON. The new process ends with this one, even if this one is
    killed: an orphan would disturb the next measurement.
    """
    command = [sys.executable, "-c", CHILD, function, json.dumps(arguments)]
    own = {**(EXACT if exact else {}), "OMP_NUM_THREADS": str(torch.get_num_threads())}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env={**os.environ, **own}
    ) as child:
        try:
            out, errors = _said(child)
        except BaseException:
            child.kill()
            raise
    if child.returncode:
        raise RuntimeError(f"{function}{arguments}: {errors.strip().splitlines()[-1:]}")
    return json.loads(out.splitlines()[-1])


def _said(child: subprocess.Popen[str]) -> tuple[str, str]:
    """The output of a process. Its stdin stays open until then: the child exits when it closes."""
    leash, child.stdin = child.stdin, None  # otherwise communicate would close it
    try:
        return child.communicate()
    finally:
        if leash is not None:
            leash.close()


def answer(function: str, arguments: str) -> None:
    """Runs in the new process: call the function and print its result."""
    threading.Thread(target=_watch, daemon=True).start()
    module, name = function.split(":")
    print(json.dumps(getattr(importlib.import_module(module), name)(*json.loads(arguments))))


def _watch() -> None:
    """Exit when stdin is closed: nothing is ever sent, so the parent process has ended."""
    os.read(0, 1)
    os._exit(1)
