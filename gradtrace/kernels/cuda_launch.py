"""CUDA sources of ``cuda/``, compiled when first used, and launched.

The compiler is NVRTC, which torch brings along, so that users need none of their own.
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
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

SOURCES = Path(__file__).with_name("cuda")
LARGE = 8
"""The driver's name for the limit of the shared memory that a launch asks for."""

LOST = 201
"""The driver's word for a thread that has not been told of its device yet."""

Grid: TypeAlias = tuple[int, int, int]
_log = logging.getLogger("gradtrace")


def serves(file: str, *tensors: Tensor) -> bool:
    """Whether the kernels of a file can work on these: all of them on one GPU, and compilable."""
    if not tensors[0].is_cuda:
        return False
    device = tensors[0].device
    for x in tensors[1:]:
        if x.device != device:
            return False
    return _compiles(device.index, file)


def at(device: torch.device) -> AbstractContextManager[object]:
    """What launches on a device stand in."""
    if _alone() or device.index == torch.cuda.current_device():
        return HERE
    return torch.cuda.device(device)


HERE = nullcontext()


@cache
def _alone() -> bool:
    """Whether there is no other GPU to be at."""
    return torch.cuda.device_count() == 1


@cache
def processors(device: torch.device) -> int:
    """How many multiprocessors a GPU has."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def held(device: torch.device) -> tuple[int, int]:
    """How many bytes tensors have on a GPU, and PyTorch; ``memory_allocated`` and its like make a
    list of all that can be told first.
    """
    told = torch.cuda.memory_stats_as_nested_dict(device)
    kinds = ("allocated_bytes", "reserved_bytes")
    used, reserved = (int(told[kind]["all"]["current"]) if told else 0 for kind in kinds)
    return used, reserved


def room(device: torch.device) -> int:
    """How many bytes there are for more tensors."""
    free, _ = torch.cuda.mem_get_info(device)
    used, reserved = held(device)
    return int(free) + reserved - used


def stream(device: torch.device) -> int:
    """What is launched on a device now goes there."""
    return int(torch._C._cuda_getCurrentRawStream(device.index))


class Kernel(NamedTuple):
    """A compiled function, which takes one structure of 64-bit words."""

    function: ctypes.c_void_p
    device: int

    def __call__(self, grid: Grid, block: Grid, words: tuple[int, ...], shared: int = 0) -> None:
        """Launch it on the current stream, with so many bytes of shared memory more."""
        _packer(len(words))(_GIVEN.words, 0, *words)  # the driver copies them
        stream = _stream(torch._C._cuda_getCurrentRawStream(self.device))
        how = (*grid, *block, shared, stream, _GIVEN.place, None)
        code = _driver().cuLaunchKernel(self.function, *how)
        if code == LOST:
            torch.zeros((), device=f"cuda:{self.device}")  # a launch of torch's own tells it
            code = _driver().cuLaunchKernel(self.function, *how)
        if code:
            raise _failure(code)


class _Given(threading.local):
    """Where each thread puts the words of a launch: new memory for each would cost more than the
    launch.
    """

    def __init__(self) -> None:
        self.words = (ctypes.c_longlong * 512)()
        self.pointer = ctypes.c_void_p(ctypes.addressof(self.words))
        self.place = ctypes.byref(self.pointer)


_GIVEN = _Given()


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
    """A kernel of a file compiled with macros, which may be launched with so much shared memory."""
    function, driver = ctypes.c_void_p(), _driver()
    module = _module(device.index, file, defines)
    _checked(driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
    if shared:
        _checked(driver.cuFuncSetAttribute(function, LARGE, shared))
    return Kernel(function, device.index)


def source(file: str, defines: tuple[str, ...] = ()) -> str:
    """What is compiled."""
    parts = [(SOURCES / each).read_text("utf-8") for each in ("prelude.cu", file)]
    return "\n".join([*(f"#define {line}" for line in defines), *parts])


def names(text: str) -> list[str]:
    """The kernels in a source."""
    return re.findall(r"^KERNEL\(\w+, (\w+),", text, re.MULTILINE)


FIRST = {
    "contract.cu": ("KB 16", "BM 128", "BN 128", "INDEX"),
    "rescan.cu": ("KB 16",),
    "top.cu": ("TOP 2",),
}
"""With which macros it is tried whether a file compiles."""


@cache
def _compiles(device: int, file: str) -> bool:
    if torch.version.hip:
        return False
    try:
        _module(device, file, FIRST.get(file, ()))
    except Exception as error:  # the driver, the compiler, or a torch that has it not or otherwise
        _log.warning("gradtrace runs without its CUDA kernels of %s, slower: %s", file, error)
        return False
    return True


@cache
def _module(device: int, file: str, defines: tuple[str, ...]) -> ctypes.c_void_p:
    """All kernels of a file, in one compilation."""
    from torch.cuda._utils import _nvrtc_compile

    text = source(file, defines)
    with torch.cuda.device(device):
        torch.zeros((), device=f"cuda:{device}")  # there is a context then
        binary = _binary(_nvrtc_compile(text, names(text)[0]))
        module = ctypes.c_void_p()
        _checked(_driver().cuModuleLoadData(ctypes.byref(module), binary))
    return module


def _binary(made: bytes | tuple[bytes, str]) -> bytes:
    """What was compiled; since torch 2.10 a name comes with it."""
    return made if isinstance(made, bytes) else made[0]


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
