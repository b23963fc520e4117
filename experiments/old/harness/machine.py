"""Describes the machine: processor, versions, load."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import gradtrace
from gradtrace import kernels

PACKAGES = ("numpy", "transformers", "torch-semiring-einsum", "matplotlib")


def machine() -> dict[str, str | int]:
    """The system, processor, cores and threads of this machine."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
    }


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """The versions of Python, torch, gradtrace, its kernels and some packages."""
    found = {
        "Python": platform.python_version(),
        "torch": str(torch.__version__),
        "gradtrace": gradtrace.__version__,
        "kernels": kernels.instruction_set() or "plain torch",
    }
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def gpu(device: torch.device) -> str:
    """A description of a device: name, memory, driver; for a CPU, the processor."""
    if device.type != "cuda":
        return _processor()
    about = torch.cuda.get_device_properties(device)
    return (
        f"{about.name}, {about.total_memory / 2**30:.0f} GiB, "
        f"{about.multi_processor_count} multiprocessors, driver {_driver()}, "
        f"CUDA {torch.version.cuda}"
    )


def _driver() -> str:
    """The version of the GPU's driver."""
    if shutil.which("nvidia-smi"):
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        told = subprocess.run(asked, capture_output=True, text=True, check=False)
        if told.returncode == 0 and told.stdout.strip():
            return told.stdout.split()[0]
    with contextlib.suppress(OSError, IndexError):
        line = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
        return line.split("Module")[-1].split()[0]
    return "unknown"


def load() -> float:
    """The system's load average over the last minute; -1 if unknown."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else -1.0


def _processor() -> str:
    if shutil.which("lscpu"):
        told = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout
        for line in told.splitlines():
            if line.startswith("Model name:"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "processor unknown"
