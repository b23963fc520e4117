"""Loads the compiled CPU kernels. Without them, the CPU's backend is plain torch.

``GRADTRACE_NATIVE=0`` in the environment disables them; a path there names the library to load.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gradtrace.errors import GradtraceError
from gradtrace.kernels import pointers, tuning
from gradtrace.kernels.operands import Whole
from gradtrace.kernels.plain_contraction import widened
from gradtrace.kernels.strides import is_dense

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

ADDED = {
    "first_nonfinite": "np",
    "low_rank": "innnippi",
    "sizes": "nppi",
    "zeros": "inpnppi",
    "run_plan": "ppp",
    "end_plan": "p",
}
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


# How large elements are ---------------------------------------------------------------------------


def sizes(library: ctypes.CDLL, xs: Sequence[Tensor]) -> Tensor | None:
    """``Backend.sizes``, of float32 without gaps in memory; None if there are others."""
    call = getattr(library, "gradtrace_sizes", None)  # an older library has none
    if call is None or not all(map(_is_plain, xs)):
        return None
    found = torch.empty((len(xs), 4), dtype=torch.float64, device="cpu")
    for x, row in zip(xs, range(found.data_ptr(), found.data_ptr() + 32 * len(xs), 32)):
        n = x.numel()
        checked(call(n, pointers.address(x, x.dtype, n), row, threads_for(n)))
    return found


def _is_plain(x: Tensor) -> bool:
    return x.dtype is torch.float32 and x.is_cpu and not x.is_neg() and is_dense(x)


def zeros(library: ctypes.CDLL, x: Tensor) -> Tensor | None:
    """``Backend.zeros``, of contiguous tensors of float32 or float64; None of others."""
    call = getattr(library, "gradtrace_zeros", None)
    if call is None or not (_is_searched(x) and x.is_contiguous()):
        return None
    n, count = x.numel(), ctypes.c_int64()
    place, room = pointers.flat(x, x.dtype, n), tuning.ZEROS_ROOM
    while True:
        found = torch.empty(room, dtype=torch.int64, device="cpu")
        given = (x.dtype is torch.float64, n, place, room, found.data_ptr(), ctypes.byref(count))
        checked(call(*given, threads_for(n)))
        if count.value <= room:
            return found[: count.value]
        room = count.value


def has_zeros(library: ctypes.CDLL, x: Tensor) -> bool | None:
    """``Backend.has_zeros``, of tensors of float32 or float64 without gaps in memory, in one pass
    where ``x.all()`` takes three; None of others.
    """
    call = getattr(library, "gradtrace_zeros", None)
    if call is None or not (_is_searched(x) and is_dense(x)):
        return None
    n, count = x.numel(), ctypes.c_int64()
    given = x.dtype is torch.float64, n, pointers.address(x, x.dtype, n), 0, None
    checked(call(*given, ctypes.byref(count), threads_for(n)))
    return count.value > 0


def _is_searched(x: Tensor) -> bool:
    return x.dtype in (torch.float32, torch.float64) and x.is_cpu


def rows(library: ctypes.CDLL, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """``Backend.measure_rows``, of rows that are worth a call each; None of others."""
    x, count = widened(x), len(x)
    size = x.numel() // max(1, count)
    if not (tuning.MEASURED_MIN_ELEMENTS <= size <= tuning.PIECE_ELEMENTS and x.is_cpu):
        return None
    if x.dtype not in (torch.float32, torch.float64):
        return None
    if not (x.stride(0) == size and is_dense(x[0])):  # each row in one place
        x = x.contiguous()
    items = np.empty((count, 3), np.int64)
    first = pointers.address(x, x.dtype, count * size)
    items[:, 0] = first + np.arange(count) * (size * x.itemsize)
    items[:, 1:] = size, x.dtype is torch.float64
    return magnitudes(library, items)


def magnitudes(library: ctypes.CDLL, items: Whole) -> tuple[Tensor, Tensor]:
    """The number of nonzero elements and ``Σ |x[i]|`` of tensors, given the address, the size and
    whether it is float64 of each.
    """
    counts = torch.empty(len(items), dtype=torch.int64, device="cpu")
    sums = torch.empty(len(items), dtype=torch.float64, device="cpu")
    found = counts.data_ptr(), sums.data_ptr()  # just made
    threads = threads_for(int(items[:, 1].sum()))
    checked(library.gradtrace_magnitudes(len(items), items.ctypes.data, *found, threads))
    return counts, sums
