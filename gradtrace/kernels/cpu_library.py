"""Loads the compiled CPU kernels. Without them, callers fall back to plain torch.

``GRADTRACE_NATIVE=0`` in the environment disables them; a path there names the library to load.
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
"""The ABI version that the library must report; libraries of other versions are not used."""

FILE = "lib/gradtrace_cpu.so"  # in its own folder, because it is not a Python module
_log = logging.getLogger("gradtrace")


@cache
def library() -> ctypes.CDLL | None:
    """The loaded library, or None; logs one warning if it is missing."""
    setting = os.environ.get("GRADTRACE_NATIVE", "")
    if setting == "0":
        return None
    places = [Path(setting)] if setting else [Path(p) / FILE for p in _package_path()]
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
    """Pass the library the ``GOMP_parallel`` of the OpenMP runtime that torch has loaded."""
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
    """Raise the error that a kernel's status code stands for; 0 is success."""
    if status == 1:
        raise MemoryError("a kernel of gradtrace could not get the memory it needs")
    if status == 3:
        raise GradtraceError(
            "a kernel of gradtrace was given operands that it cannot read: a null pointer, sizes "
            "out of range, or an index beside the data"
        )
    if status:
        raise RuntimeError("a kernel of gradtrace failed")
