"""Loads the compiled CPU kernels. Without them, the CPU's backend is plain torch.

``GRADTRACE_NATIVE=0`` in the environment disables them; a path there names the library to load.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

from gradtrace.errors import GradtraceError
from gradtrace.kernels import tuning

ABI = 8
"""The ABI version that the library must report; libraries of other versions are not used."""

FILE = "lib/gradtrace_cpu.so"  # in its own folder, because it is not a Python module

CTYPES = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "i": ctypes.c_int, "w": ctypes.c_int32}
SIGNATURES = {
    "contract": "p",
    "merge": "inppppwwi",
    "tally": "inppnppi",
    "magnitude": "inpppi",
    "magnitudes": "npppi",
    "reduce": "ipppppi",
    "normalise": "innippppi",
    "scatter": "inpppnpp",
    "sparse": "ippppppppi",
    "products_float": "ppnnppnnnnppi",
    "products_double": "ppnnppnnnnppi",
    "others_float": "pppppnnnppi",
    "others_double": "pppppnnnppi",
    "use_isa": "p",
}
"""The arguments of the library's functions: pointers (p), int64 (n), int (i) and int32 (w)."""

ADDED = {"first_nonfinite": "np", "sizes": "nppi", "zeros": "inpnppi"}
"""The same of functions that were added since: a library without them is used, too."""

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
                _declare(found)
                _use_threads(found)
                return found
            reason = f"{place.name} is of another version ({answer}, not {ABI}); install again"
    _log.warning(
        "gradtrace runs without its compiled kernels, many times slower: %s. To build them, "
        "install a C++ compiler and then gradtrace again; GRADTRACE_NATIVE=0 silences this line.",
        reason,
    )
    return None


def brief(name: str) -> Any:
    """A function of the library for short calls: it keeps the interpreter's lock, and takes ctypes
    objects of the right types. None if the library has none of this name.
    """
    found = library()
    if found is None or not hasattr(found, f"gradtrace_{name}"):
        return None
    return ctypes.PyDLL(found._name)[f"gradtrace_{name}"]


def _declare(found: ctypes.CDLL) -> None:
    for name, codes in SIGNATURES.items():
        getattr(found, f"gradtrace_{name}").argtypes = [CTYPES[code] for code in codes]
    for name, codes in ADDED.items():
        if (function := getattr(found, f"gradtrace_{name}", None)) is not None:
            function.argtypes = [CTYPES[code] for code in codes]
    found.gradtrace_isa.restype = found.gradtrace_current_isa.restype = ctypes.c_char_p


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


def threads_for(n: int) -> int:
    """How many threads an elementwise kernel takes for n elements."""
    return 1 if n <= tuning.SINGLE_THREAD_MAX_ELEMENTS else torch.get_num_threads()


def isas() -> list[str]:
    """The instruction sets of the library that this processor supports, best last."""
    found, out = library(), list[str]()
    while found is not None and (name := found.gradtrace_isa(len(out))) is not None:
        out.append(name.decode())
    return out


def isa() -> str:
    """The instruction set in use: the best, or the one that ``GRADTRACE_ISA`` names; empty without
    the library.
    """
    found = library()
    return "" if found is None else str(found.gradtrace_current_isa().decode())


def use_isa(name: str) -> None:
    """Use one of ``isas`` from now on."""
    found = library()
    if found is None or not found.gradtrace_use_isa(name.encode()):
        raise ValueError(f"no instruction set {name!r} here; there are {isas()}")
