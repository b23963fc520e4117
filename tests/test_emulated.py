"""The CUDA sources, run on the processor, give the bits of plain torch: cases of ``devices``."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path

import devices
import pytest
import torch
from emulated import Emulator, compiler
from test_maps import KINDS

from gradtrace.kernels import between, contract, gpu, launch, top
from gradtrace.semirings import TopK


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    found = compiler()
    if found is None:
        pytest.skip("THE CUDA SOURCES ARE NOT TESTED: there is no C++ compiler (g++ or clang++)")
    return Emulator(tmp_path_factory.mktemp("emulated"), found)


@pytest.fixture
def emulator(built: Emulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulator]:
    built.use(monkeypatch)
    yield built
    assert built.launches, "nothing was launched"


# The contraction ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", devices.SMALL, ids=str)
@pytest.mark.parametrize("name", devices.DATA)
def test_contraction(name: str, shape: tuple[int, int, int, int], emulator: Emulator) -> None:
    devices.contraction("cpu", shape, name, torch.float32)


@pytest.mark.parametrize("dtype", devices.FLOATS[2:], ids=str)
def test_contraction_of_half_precision(dtype: torch.dtype, emulator: Emulator) -> None:
    for name in ("Gaussian", "ties", "NaN"):
        devices.contraction("cpu", (2, 9, 37, 33), name, dtype)
    devices.mixed("cpu")


def test_long_contractions_are_split(emulator: Emulator) -> None:
    """K in parts, and in larger blocks."""
    assert gpu.plan(1, 3, 5, 700, 5).splits > 1
    assert gpu.plan(1, 3, 5, 4200, 5).block == 32
    devices.contraction("cpu", (1, 3, 700, 5), "ties", torch.float32)
    devices.contracted("cpu", torch.randn(1, 3, 4200), torch.randn(1, 4200, 5), index=True)


def test_windows_are_read_where_they_lie(emulator: Emulator) -> None:
    devices.windows("cpu")


def test_a_contraction_too_large_for_the_room_goes_in_pieces(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of matrices, rows and columns."""
    monkeypatch.setattr(gpu, "SMALL", 0)
    a, b = (torch.randn(2, 300, 20).round(), torch.randn(2, 20, 270).round())
    marks = torch.randint(1, 99, (2, 20, 270)).int()
    for room, pieces in ((1 << 40, 1), (2_000_000, 2), (1_000_000, 8), (1, 18)):
        emulator.room = room
        emulator.launches.clear()
        devices.contracted("cpu", a, b, index=True)
        assert emulator.launches.count("pack") == pieces
        devices.contracted("cpu", a, b, marks=marks, of_b=True)
        devices.contracted("cpu", a, b)
    devices.windows("cpu")


def test_contraction_of_nothing(built: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    built.use(monkeypatch)
    devices.nothing("cpu")
    assert not built.launches


def test_the_order_of_threads_and_blocks_does_not_matter(emulator: Emulator) -> None:
    emulator.backwards = True
    devices.contraction("cpu", (2, 130, 37, 33), "ties", torch.float32)
    devices.contraction("cpu", (1, 3, 700, 5), "NaN", torch.float32)
    devices.tally_of_matrices("cpu")
    devices.reduce("cpu", False)
    devices.scatter("cpu", False)
    devices.normalise("cpu", "ties", (17,), (65,))


def test_what_is_asked_of_the_kernels_reaches_them(emulator: Emulator) -> None:
    a, b = torch.randn(1, 20, 30), torch.randn(1, 30, 10)
    assert torch.equal(
        contract.largest(a, b), (a.mT[0, :, :, None] * b[0, :, None]).abs().amax(0)[None]
    )
    assert emulator.launches == ["pack", "contract", "rescan"]


def test_the_largest_few(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    devices.top("cpu", 3, [(2, 3, 5, 4), (1, 18, 20, 70), (1, 2, 0, 3), (0, 2, 3, 1)])
    monkeypatch.setattr(top, "MANY", 2)
    devices.top("cpu", 3, [(5, 3, 2, 4)])
    assert set(emulator.launches) == {"top_float", "top_double"}


def test_too_many_of_the_largest_are_left_to_torch(emulator: Emulator) -> None:
    x, weight = torch.rand(9, 1, 2, 3).sort(0, descending=True).values.unbind(), torch.rand(1, 3, 2)
    assert not top.serves(x, weight)
    assert not top.serves(x[:2], weight.double())
    assert top.serves(x[:2], weight)
    assert len(TopK(9).contract("imk,ikn->imn", x, weight)) == 9
    assert not emulator.launches
    TopK(3).contract("imk,ikn->imn", x[:3], weight)


# Steps -------------------------------------------------------------------------------------------


def test_merge(emulator: Emulator) -> None:
    devices.merge("cpu", False)


def test_tally(emulator: Emulator) -> None:
    devices.tally("cpu", False)
    devices.tally_of_matrices("cpu")


def test_a_mark_that_is_not_in_the_table_is_left_out(emulator: Emulator) -> None:
    """As no GPU is waited for; the compiled kernels of the CPU refuse it."""
    marks = torch.tensor([-1, 0, 2, 5, 130], dtype=torch.int32)
    counts, _ = between.tally(marks, torch.ones(5), 3, (32, 8192, 1))
    assert counts.tolist() == [1, 0, 1]


def test_reduce(emulator: Emulator) -> None:
    devices.reduce("cpu", False)


def test_long_lines_are_cut() -> None:
    for reduced, results, beside in ((70_001, 1, False), (600, 3, True), (1, 10**6, True)):
        columns, rows, cuts, length = between.divided(reduced, results, beside, 5)
        assert columns * rows == 256
        assert cuts * length >= reduced > (cuts - 1) * length
    assert between.divided(70_001, 1, False, 5)[2] > 1


def test_scatter(emulator: Emulator) -> None:
    devices.scatter("cpu", False)


def test_gather(emulator: Emulator) -> None:
    devices.gather("cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_normalise(kind: str, emulator: Emulator) -> None:
    devices.normalise("cpu", kind, (1, 2, 17), (65, 300))


def test_normalise_long_lines(emulator: Emulator) -> None:
    devices.normalise("cpu", "norm with ties", (), (1100,))


def test_normalise_what_is_not_finite(emulator: Emulator) -> None:
    devices.normalise_odd("cpu", 1)


def test_normalise_expanded(emulator: Emulator) -> None:
    devices.normalise_expanded("cpu")


def test_most_elements_of_long_lines_are_left_out(emulator: Emulator) -> None:
    """But where that cannot be: nearly all are corners, or products may leave the range."""
    left = torch.zeros(3, dtype=torch.int32)
    for kind, over in (("gaussian", 0), ("circle", 1)):
        how = devices.lines_of(kind, 300, torch.float32)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "zeros", lambda *_, **__: left.zero_())
            between.normalise(how.diagonal, how.left, how.right, how.x, None)
        assert left.tolist() == [over] * 3, kind


# The emulator, and the compiler ------------------------------------------------------------------


def test_the_emulator_tells_what_cannot_work(emulator: Emulator) -> None:
    kernel = launch.kernel(torch.device("cpu"), "steps.cu", "gather")
    with pytest.raises(AssertionError, match="another number of words"):
        kernel((1, 1, 1), (1, 1, 1), (0,))
    with pytest.raises(AssertionError, match="too large"):
        kernel((1, 70_000, 1), (1, 1, 1), (0,) * 5)
    with pytest.raises(AssertionError, match="no such kernel"):
        launch.kernel(torch.device("cpu"), "steps.cu", "nobody")((1, 1, 1), (1, 1, 1), ())
    kernel((1, 1, 1), (1, 1, 1), (0,) * 5)


def nvrtc() -> ctypes.CDLL | None:
    """NVIDIA's run-time compiler, which needs no GPU, where torch or the system has it."""
    folders = [Path(path) / "nvidia" for path in [*sys.path, str(Path(torch.__file__).parents[1])]]
    libraries = [each for folder in folders for each in folder.glob("**/libnvrtc.so.*")]
    for place in libraries:
        for more in place.parent.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(more), mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(place))
    return None


SOURCES = [
    ("contract.cu", ("KB 16", "INDEX")),
    ("contract.cu", ("KB 128",)),
    ("steps.cu", ()),
    ("top.cu", ("TOP 8",)),
    ("larger.cu", ()),
]


def test_the_larger_of_two_terms(emulator: Emulator) -> None:
    devices.duel("cpu")


@pytest.mark.parametrize("file, defines", SOURCES, ids=str)
def test_the_sources_compile_for_a_gpu(file: str, defines: tuple[str, ...]) -> None:
    library = nvrtc()
    if library is None:
        pytest.skip("there is no NVRTC here")
    program, text = ctypes.c_void_p(), launch.source(file, defines)
    created = library.nvrtcCreateProgram(
        ctypes.byref(program), text.encode(), b"source.cu", 0, None, None
    )
    assert created == 0
    options = (ctypes.c_char_p * 2)(b"--gpu-architecture=sm_90", b"--ptxas-options=-v")
    code = library.nvrtcCompileProgram(program, 2, options)
    length = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(length))
    log = ctypes.create_string_buffer(length.value)
    library.nvrtcGetProgramLog(program, log)
    told = log.value.decode()
    library.nvrtcDestroyProgram(ctypes.byref(program))
    assert code == 0, told
    spills = [line for line in told.splitlines() if "spill" in line]
    assert len(spills) == len(launch.names(text))
    assert all(" 0 bytes spill stores" in line for line in spills), told
