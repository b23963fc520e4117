"""Where it ran: machine, versions, load, and how much memory is in use."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import gradtrace
from gradtrace.kernels import contract

PACKAGES = ("numpy", "transformers", "torch-semiring-einsum", "matplotlib")
STATUS = Path("/proc/self/status")
REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"


def machine() -> dict[str, str | int]:
    """The computer."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
    }


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Of Python and of all packages that take part."""
    found = {
        "Python": platform.python_version(),
        "torch": str(torch.__version__),
        "gradtrace": gradtrace.__version__,
        "kernels": contract.isa() or "plain torch",
    }
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def load() -> float:
    """How many processes wanted to run, over the last minute."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else -1.0


def _processor() -> str:
    if shutil.which("lscpu"):
        told = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout
        for line in told.splitlines():
            if line.startswith("Model name:"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "processor unknown"


# Memory ------------------------------------------------------------------------------------------


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


def _status(word: str) -> float | None:
    if not STATUS.exists():
        return None
    lines = STATUS.read_text().splitlines()
    return next((int(x.split()[1]) / 1024 for x in lines if x.startswith(f"{word}:")), None)


def _peak_ever() -> float:
    import resource  # not on Windows

    unit = 2**20 if platform.system() == "Darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
