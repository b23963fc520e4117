"""The compiled kernels: found, checked and called. Without them plain torch serves.

``GRADTRACE_NATIVE=0`` in the environment leaves them out; a path takes the library from there.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from functools import cache
from pathlib import Path

import torch

from gradtrace.errors import GradtraceError

ABI = 7
"""What the library must answer, so that one of another version is not called."""

FILE = "lib/gradtrace_cpu.so"  # in a folder of its own: it is no Python module
_log = logging.getLogger("gradtrace")


@cache
def library() -> ctypes.CDLL | None:
    """The library, or None; says once if it is missing."""
    asked = os.environ.get("GRADTRACE_NATIVE", "")
    if asked == "0":
        return None
    places = [Path(asked)] if asked else [Path(p) / FILE for p in _package_path()]
    reason = "it was not built (no C++ compiler when gradtrace was installed?)"
    for place in places:
        if place.exists():
            try:
                found = ctypes.CDLL(str(place))
                answer = found.gradtrace_abi()
            except (OSError, AttributeError) as error:
                reason = f"{place.name} cannot be loaded ({error})"
                continue
            if answer == ABI:
                _use_threads(found)
                return found
            reason = f"{place.name} is of another version ({answer}, not {ABI}); install again"
    _log.warning(
        "gradtrace runs without its compiled kernels, many times slower: %s. To build them, "
        "install a C++ compiler and then gradtrace again; GRADTRACE_NATIVE=0 silences this line.",
        reason,
    )
    return None


def _package_path() -> list[str]:
    return list(sys.modules[__package__].__path__) if __package__ else []


def _use_threads(found: ctypes.CDLL) -> None:
    """Hand the library the OpenMP runtime that torch has loaded."""
    folder = Path(torch.__file__).parent
    for place in sorted([*folder.glob("lib/lib*omp*"), *folder.parent.glob("torch.libs/lib*omp*")]):
        try:
            runtime = ctypes.CDLL(str(place))
            start = ctypes.cast(runtime.GOMP_parallel, ctypes.c_void_p)
        except (OSError, AttributeError):
            continue
        found.gradtrace_use(start)
        return


def checked(status: int) -> None:
    """Raise what a kernel could not do."""
    if status == 1:
        raise MemoryError("a kernel of gradtrace could not get the memory it needs")
    if status == 3:
        raise GradtraceError(
            "a kernel of gradtrace was given operands that it cannot read: a null pointer, sizes "
            "out of range, or an index beside the data"
        )
    if status:
        raise RuntimeError("a kernel of gradtrace failed")
