"""Where sections for a GPU run, how they are timed there, and what memory they take."""

from __future__ import annotations

import gc
import os
import platform
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from gradtrace.benchmarks.results import Absent, Section, Setting
from gradtrace.experiments.harness import machine
from gradtrace.experiments.harness.interleaved_timing import Clock, Way

PACKAGES = ("triton", "numpy", "transformers")


def place(setting: Setting) -> torch.device:
    """The device that was asked for, or the first GPU."""
    if setting.device is not None:
        try:
            return torch.empty(0, device=setting.device).device
        except (RuntimeError, AssertionError) as error:
            raise Absent(f"no device {setting.device!r} here") from error
    if not torch.cuda.is_available():
        raise Absent("no GPU here")
    return torch.device("cuda", torch.cuda.current_device())


def told(section: Section, device: torch.device, setting: Setting) -> Section:
    """The section, which says where it was taken."""
    versions = ", ".join(f"{name} {n}" for name, n in machine.versions(PACKAGES).items())
    section.where = (
        f"On {machine.gpu(device)}; {platform.system()} {platform.machine()}, "
        f"{os.cpu_count()} cores; {versions}."
    )
    if device.type != "cuda":
        section.note("Not on a GPU: a trial of the benchmark.")
    elif setting.quick:
        section.note("On small cases: a trial of the benchmark.")
    return section


def settle(device: torch.device) -> None:
    """Wait until all work is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def tidy(device: torch.device) -> None:
    """Give back what nobody uses."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# Clocks ------------------------------------------------------------------------------------------


def waited(device: torch.device) -> Clock:
    """The wall clock, from when the device is idle to when it is again."""

    def clock(run: Callable[[], object]) -> float:
        settle(device)
        start = time.perf_counter()
        result = run()
        settle(device)
        taken = time.perf_counter() - start
        del result
        return taken

    return clock


def counted(device: torch.device, times: int) -> Clock:
    """The GPU's own clock (CUDA events) over several runs, so that Python's part overlaps."""

    def clock(run: Callable[[], object]) -> float:
        def often() -> None:
            for _ in range(times):
                run()

        if device.type != "cuda":
            return waited(device)(often) / times
        first = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        last = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        settle(device)
        with torch.cuda.device(device):
            first.record()
            often()
            last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3 / times

    return clock


# Memory ------------------------------------------------------------------------------------------


class Peak(NamedTuple):
    """Bytes on the device: before, and the most."""

    before: int
    most: int


def peak(way: Way, device: torch.device) -> Peak | None:
    """What a way takes, beginning after its preparation; None where nobody counts."""
    if device.type != "cuda":
        way()()
        return None
    run = way()
    gc.collect()
    settle(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = run()
    settle(device)
    most = torch.cuda.max_memory_allocated(device)
    del result
    return Peak(before, most)
