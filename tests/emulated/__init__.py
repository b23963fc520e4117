"""The CUDA sources of gradtrace run on the processor: compiled as C++ against ``device.h``.

``Emulator.use`` puts this in the place of a GPU: CPU tensors go through the same Python (what is
served, plans, packing, launches) and the same kernels as CUDA tensors would.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from backends import CPU, use
from torch import Tensor

from gradtrace.kernels import Cuda, Reference, cuda_contraction, cuda_launch, cuda_pair_contraction

HEADER = Path(__file__).with_name("device.h")
FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-shared")
QUIET = ("-U_FORTIFY_SOURCE", "-w")
HIDDEN = "-fvisibility=hidden"  # else libraries would share the static variables of templates
PROCESSORS = 5


class Emulated:
    """A kernel of a compiled library, called as ``launch.Kernel`` is."""

    def __init__(self, library: ctypes.CDLL, name: str, emulator: Emulator) -> None:
        self.library, self.name, self.emulator = library, name.encode(), emulator

    def __call__(
        self,
        grid: cuda_launch.Grid,
        block: cuda_launch.Grid,
        words: tuple[int, ...],
        shared: int = 0,
    ) -> None:
        given = (ctypes.c_longlong * len(words))(*words)
        shape = (ctypes.c_uint * 6)(*grid, *block)
        backwards = self.emulator.backwards
        fault = self.library.emulate(
            self.name, shape, ctypes.c_int64(shared), given, ctypes.c_int64(len(words)), backwards
        )
        assert fault is None, f"{self.name.decode()}{grid}{block}: {fault.decode()}"
        self.emulator.launches.append(self.name.decode())


class EmulatedGpu(Cuda):
    """Kernels of a GPU for CPU tensors, which may be read and whose memory is that of the CPU."""

    synchronises = False
    add_rows = Reference.add_rows
    label = Reference.label
    free_bytes = Reference.free_bytes
    held_bytes = Reference.held_bytes
    spare_bytes = Reference.spare_bytes
    workspace_max_bytes = Reference.workspace_max_bytes


class Emulator:
    """Compiles sources once, into a folder."""

    def __init__(self, folder: Path, compiler: str) -> None:
        self.folder, self.compiler = folder, compiler
        shutil.copy(HEADER, folder)
        if "clang" not in Path(compiler).name:  # g++ finds what it has made of a header beside it
            header = folder / HEADER.name
            self.compile("-x", "c++-header", "-o", f"{header}.gch", str(header))
        self.libraries: dict[tuple[str, tuple[str, ...]], ctypes.CDLL] = {}
        self.backwards = False  # blocks and threads in reverse: who races is found out
        self.launches: list[str] = []
        self.room = 1 << 40

    def library(self, file: str, defines: tuple[str, ...]) -> ctypes.CDLL:
        found = self.libraries.get((file, defines))
        if found is None:
            found = self.libraries[file, defines] = self.compiled(file, defines)
        return found

    def compiled(self, file: str, defines: tuple[str, ...]) -> ctypes.CDLL:
        source = cuda_launch.source(file, defines)
        tells = "".join(
            f'  if (!strcmp(name, "{name}"))'
            f" return emulated::launch({name}, shape, shared, words, count, backwards);\n"
            for name in cuda_launch.names(source)
        )
        entry = (
            'extern "C" __attribute__((visibility("default")))'
            " const char* emulate(const char* name, const unsigned* shape,"
            " int64_t shared, const void* words, int64_t count, int backwards) {\n"
            f'{tells}  return "there is no such kernel";\n}}\n'
        )
        number = len(self.libraries)
        place = self.folder / f"{number}.cpp"
        place.write_text(f'#include "{HEADER.name}"\n{source}\n{entry}')
        library = self.folder / f"{number}.so"
        self.compile("-o", str(library), str(place))
        found = ctypes.CDLL(str(library))
        found.emulate.restype = ctypes.c_char_p
        return found

    def compile(self, *words: str) -> None:
        """Call the compiler."""
        command = [self.compiler, *FLAGS, *QUIET, HIDDEN, *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert not done.returncode, done.stderr

    def use(self, patch: pytest.MonkeyPatch) -> None:
        """Serve CPU tensors."""

        def serves(file: str, *tensors: Tensor) -> bool:
            return all(x.device.type == "cpu" for x in tensors)

        def kernel(
            device: torch.device,
            file: str,
            name: str,
            defines: tuple[str, ...] = (),
            shared: int = 0,
        ) -> Emulated:
            return Emulated(self.library(file, defines), name, self)

        self.launches.clear()
        self.backwards, self.room = False, 1 << 40
        patch.setattr(cuda_launch, "serves", serves)
        patch.setattr(cuda_launch, "kernel", kernel)
        patch.setattr(cuda_pair_contraction, "available", lambda device: True)
        patch.setattr(cuda_launch, "processors", lambda device: PROCESSORS)
        patch.setattr(cuda_launch, "stream", lambda device: 0)
        patch.setattr(cuda_launch, "available_bytes", lambda device: self.room)
        patch.setattr(cuda_launch, "at", lambda device: nullcontext())
        patch.setattr(cuda_contraction, "triton", lambda: False)
        cuda_contraction.ready.cache_clear()
        cuda_contraction._ready.cache_clear()
        cuda_pair_contraction.prepared.cache_clear()
        use(patch, EmulatedGpu(CPU))


def compiler() -> str | None:
    """A C++ compiler, if there is one."""
    return next((path for name in ("g++", "clang++", "c++") if (path := shutil.which(name))), None)
