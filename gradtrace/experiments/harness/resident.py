"""How much memory a piece of work takes: by the system's own count, in a process of its own."""

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
    "MIMALLOC_PURGE_DELAY": "0",  # what torch brings along on ARM
}
"""Settings by which freed memory goes back to the system at once, so that what a process has in
memory is what it uses.
"""

CHILD = (
    "import sys; from gradtrace.experiments.harness.resident import answer; answer(*sys.argv[1:])"
)


def resident() -> float:
    """MiB of this process in memory now (where that cannot be told: at most so far)."""
    return _status("VmRSS") or _peak_ever()


def peak() -> float:
    """The most MiB this process had in memory, since ``forget_peak`` where that worked."""
    return _status("VmHWM") or _peak_ever()


def forget_peak() -> bool:
    """Let ``peak`` begin anew, after giving unused memory back; whether the system allows it."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # not the GNU library
        ctypes.CDLL(None).malloc_trim(0)
    try:
        REFS.write_text(RESET_PEAK)
    except OSError:
        return False
    return True


def beyond(run: Callable[[], object]) -> tuple[float, float]:
    """MiB in memory before ``run()``, and how far the peak rises above them in it."""
    gc.collect()
    forget_peak()
    before, highest = resident(), peak()
    start = before if forget_peak() else highest
    result = run()  # what it hands over counts
    most = peak()
    del result
    return before, max(most - start, 0.0)  # the system may have taken pages of code away


def _status(word: str) -> float | None:
    if not STATUS.exists():
        return None
    lines = STATUS.read_text().splitlines()
    return next((int(x.split()[1]) / 1024 for x in lines if x.startswith(f"{word}:")), None)


def _peak_ever() -> float:
    import resource  # not on Windows

    unit = 2**20 if platform.system() == "Darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


# A new process -----------------------------------------------------------------------------------


def apart(function: str, *arguments: Any, exact: bool = True) -> Any:
    """Call ``"module:function"`` in a new process, where freed memory is given back at once, unless
    it is not ``exact``: that costs time, which matters where time is measured.

    Arguments and the result are JSON. The new process ends with this one, however that ends: one
    that was left behind would run beside what is measured next.
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
    """All that a process says; its input, on which it hangs, stays open until then."""
    leash, child.stdin = child.stdin, None  # or communicate would close it
    try:
        return child.communicate()
    finally:
        if leash is not None:
            leash.close()


def answer(function: str, arguments: str) -> None:
    """In the new process: call, and print what came out."""
    threading.Thread(target=_watch, daemon=True).start()
    module, name = function.split(":")
    print(json.dumps(getattr(importlib.import_module(module), name)(*json.loads(arguments))))


def _watch() -> None:
    """Nothing is ever sent: the end of the input is the end of the process that waits."""
    os.read(0, 1)
    os._exit(1)
