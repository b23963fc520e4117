"""Compiles the CUDA sources in ``cuda/`` on first use, and launches their kernels.

The compiler is NVRTC, which ships with torch, so that users need no CUDA toolkit.
"""

from __future__ import annotations

import ctypes
import logging
import re
import struct
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, wraps
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeAlias

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from gradtrace.kernels import cuda_cache, tuning

SOURCES = Path(__file__).with_name("cuda")
MAX_DYNAMIC_SHARED_BYTES_ATTRIBUTE = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"""

CUDA_ERROR_INVALID_CONTEXT = 201
"""Returned by the driver in a thread that has no current CUDA context yet."""

Grid: TypeAlias = tuple[int, int, int]
MAX_BLOCKS_YZ = 65_535
"""The most thread blocks of a grid in its second and third dimension."""

P = ParamSpec("P")
_log = logging.getLogger("gradtrace")


STEPS = "steps.cu"
"""The source of all kernels but the contractions."""

KINDS = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
"""Codes of the dtypes that kernels read; the same as in ``prelude.cu``."""

WIDE = {torch.float32: "float", torch.float64: "double"}
"""Names of the dtypes that kernels compute in."""

THREADS, TALLY_THREADS = (256, 1, 1), (512, 1, 1)
"""Threads per block: of most kernels, and of those that count in shared memory."""

UNUSED_WORDS = (0,) * 512
"""Argument words of unused job slots."""


def as_one_call(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """A function that launches kernels by address, so that modes which watch PyTorch's functions
    see it as one of them.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        if torch._C._is_torch_function_mode_enabled():
            found: Tensor = handle_torch_function(call, (), *args, **kwargs)
            return found
        return function(*args, **kwargs)

    return call


def blocks(n: int) -> Grid:
    """Grid with one thread per element up to 2²⁰ blocks, then a grid-stride loop."""
    return min(-(-n // 256), 1 << 20), 1, 1


def serves(file: str, *tensors: Tensor) -> bool:
    """Whether the kernels of a file support these tensors: all are on one GPU, for which the file
    compiles.
    """
    if not tensors[0].is_cuda:
        return False
    device = tensors[0].device
    for x in tensors[1:]:
        if x.device != device:
            return False
    return _compiles(device.index, file)


def compiles(device: torch.device, file: str) -> bool:
    """Whether a file compiles for a GPU."""
    return _compiles(device.index, file)


def at(device: torch.device) -> AbstractContextManager[object]:
    """Context in which to launch on a device: makes it current if it is not."""
    if _single_gpu() or device.index == torch.cuda.current_device():
        return CURRENT_DEVICE
    return torch.cuda.device(device)


CURRENT_DEVICE = nullcontext()


@cache
def _single_gpu() -> bool:
    """Whether there is only one GPU, so that the current device need not be checked."""
    return torch.cuda.device_count() == 1


@cache
def processors(device: torch.device) -> int:
    """The number of multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def allocated_and_reserved(device: torch.device) -> tuple[int, int]:
    """Bytes allocated to tensors on a GPU, and bytes reserved by PyTorch's allocator. Faster than
    ``torch.cuda.memory_allocated`` and its like, which first flatten all statistics into a dict.
    """
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    kinds = ("allocated_bytes", "reserved_bytes")
    used, reserved = (int(stats[kind]["all"]["current"]) if stats else 0 for kind in kinds)
    return used, reserved


def available_bytes(device: torch.device) -> int:
    """Bytes available for more tensors: free on the device, or reserved and unused."""
    free, _ = torch.cuda.mem_get_info(device)
    used, reserved = allocated_and_reserved(device)
    return int(free) + reserved - used


def stream(device: torch.device) -> int:
    """The raw handle of the current stream of a device."""
    return int(torch._C._cuda_getCurrentRawStream(device.index))


class WorkspaceCache(threading.local):
    """Per-thread cache of one workspace per stream. Reuse is safe because launches on a stream run
    in order; allocating a tensor each time would cost more than a launch.
    """

    def __init__(self) -> None:
        self.tensors: dict[tuple[int | None, int], tuple[int, Tensor]] = {}

    def memory(self, device: torch.device, size: int) -> Tensor:
        """A workspace of at least ``size`` bytes for launches on the current stream."""
        key = device.index, stream(device)
        there, found = self.tensors.get(key, (-1, None))
        if found is None or there < size:
            found = torch.empty(max(size, 1), dtype=torch.uint8, device=device)
            if size <= tuning.CACHED_WORKSPACE_MAX_BYTES:
                self.tensors[key] = size, found
        return found

    def taken(self, device: torch.device, stream: int) -> Tensor | None:
        """The workspace of a stream, which is not cached any more."""
        return self.tensors.pop((device.index, stream), (0, None))[1]


WORKSPACES = WorkspaceCache()


class Kernel(NamedTuple):
    """A compiled kernel, whose only argument is a structure of 64-bit words."""

    function: ctypes.c_void_p
    device: int

    def __call__(self, grid: Grid, block: Grid, words: tuple[int, ...], shared: int = 0) -> None:
        """Launch it on the current stream, with ``shared`` bytes of dynamic shared memory."""
        _packer(len(words))(_ARGUMENTS.words, 0, *words)  # copied by the driver at launch
        stream = _stream(torch._C._cuda_getCurrentRawStream(self.device))
        how = (*grid, *block, shared, stream, _ARGUMENTS.place, None)
        code = _driver().cuLaunchKernel(self.function, *how)
        if code == CUDA_ERROR_INVALID_CONTEXT:
            torch.zeros((), device=f"cuda:{self.device}")  # torch makes the context current
            code = _driver().cuLaunchKernel(self.function, *how)
        if code:
            raise _failure(code)


class _ArgumentBuffer(threading.local):
    """Per-thread buffer for the argument words of a launch; allocating one per launch would cost
    more than the launch.
    """

    def __init__(self) -> None:
        self.words = (ctypes.c_longlong * 512)()
        self.pointer = ctypes.c_void_p(ctypes.addressof(self.words))
        self.place = ctypes.byref(self.pointer)


_ARGUMENTS = _ArgumentBuffer()


@cache
def _packer(count: int) -> Callable[..., None]:
    return struct.Struct(f"{count}q").pack_into


@cache
def _stream(number: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(number)


@cache
def kernel(
    device: torch.device, file: str, name: str, defines: tuple[str, ...] = (), shared: int = 0
) -> Kernel:
    """A kernel of a file compiled with these macros, which may be launched with up to ``shared``
    bytes of dynamic shared memory.
    """
    function, driver = ctypes.c_void_p(), _driver()
    module = _module(device.index, file, defines)
    _checked(driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
    if shared:
        _checked(driver.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED_BYTES_ATTRIBUTE, shared))
    return Kernel(function, device.index)


def source(file: str, defines: tuple[str, ...] = ()) -> str:
    """The source passed to the compiler: macros, the prelude and the file."""
    parts = [(SOURCES / each).read_text("utf-8") for each in ("prelude.cu", file)]
    return "\n".join([*(f"#define {line}" for line in defines), *parts])


def names(text: str) -> list[str]:
    """The names of the kernels in a source."""
    return re.findall(r"^KERNEL\(\w+, (\w+),", text, re.MULTILINE)


PROBE_MACROS = {
    "contract.cu": ("KB 16", "BM 128", "BN 128", "INDEX"),
    "rescan.cu": ("KB 16",),
    "top.cu": ("TOP 2",),
}
"""The macros with which ``_compiles`` tries a file."""


@cache
def _compiles(device: int, file: str) -> bool:
    if torch.version.hip:
        return False
    try:
        _module(device, file, PROBE_MACROS.get(file, ()))
    except Exception as error:  # driver, compiler, or a torch with another private API
        _log.warning("gradtrace runs without its CUDA kernels of %s, slower: %s", file, error)
        return False
    return True


@cache
def _module(device: int, file: str, defines: tuple[str, ...]) -> ctypes.c_void_p:
    """All kernels of a file, compiled as one module."""
    text, module = source(file, defines), ctypes.c_void_p()
    about = (
        torch.__version__,
        str(torch.version.cuda),
        str(torch.cuda.get_device_capability(device)),
    )
    with torch.cuda.device(device):
        torch.zeros((), device=f"cuda:{device}")  # creates the CUDA context
        for again in (False, True):
            binary = cuda_cache.binary((text, *about), lambda: _compiled(text), again)
            code = _driver().cuModuleLoadData(ctypes.byref(module), binary)
            if not code:
                break
        _checked(code)
    return module


def _compiled(text: str) -> bytes:
    from torch.cuda._utils import _nvrtc_compile

    return _binary(_nvrtc_compile(text, names(text)[0]))


def _binary(result: bytes | tuple[bytes, str]) -> bytes:
    """The compiled binary; since torch 2.10 the result is a pair of it and a name."""
    return result if isinstance(result, bytes) else result[0]


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def _failure(code: int) -> RuntimeError:
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(code, ctypes.byref(text))
    return RuntimeError(f"CUDA: {text.value.decode() if text.value else code}")


def _checked(code: int) -> None:
    if code:
        raise _failure(code)
