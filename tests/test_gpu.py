"""The kernels on a GPU give the bits of plain torch on the CPU. Skipped where there is none.

``test_emulated`` runs the same cases, and the same sources, on the processor.
"""

from __future__ import annotations

import devices
import pytest
import torch
from test_maps import KINDS

from gradtrace.kernels import gpu, reference

SHAPES = [
    (1, 128, 128, 300),
    (2, 130, 257, 170),
    (1, 300, 1096, 20),
    (1, 64, 9000, 16),
    (12, 100, 64, 100),
    (1, 3, 40_000, 64),
    (3, 2, 1, 5),
]
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def test_a_plan_covers_all_k_in_parts_of_whole_blocks() -> None:
    for k in (1, 15, 16, 17, 768, 4096, 4097, 40_000, 10_000_000):
        for tiles in (1, 100, 10_000):
            found = gpu.plan(1, 128 * tiles, 128, k, 132)
            assert found.padded >= k > found.padded - found.block
            assert found.part % found.block == 0
            assert found.part <= gpu.BLOCKS * found.block
            assert found.splits * found.part >= found.padded > (found.splits - 1) * found.part


def test_a_workspace_holds_all_and_nothing_overlaps() -> None:
    for m, n, k in ((1, 1, 1), (130, 257, 40_000)):
        for searched in (False, True):
            how = gpu.plan(3, m, n, k, 132)
            where = gpu.space(how, 3, m, n, searched)
            assert list(where) == sorted(where)
            assert all(start % 16 == 0 for start in where)
            high, wide = -(-m // 128) * 128, -(-n // 128) * 128
            assert where.across - where.turned >= 4 * 3 * how.padded * high
            assert where.blocks - where.parts >= 4 * how.splits * 3 * high * wide


def test_cpu_tensors_are_not_served() -> None:
    assert not gpu.served(torch.ones(1, 2, 2), torch.ones(1, 2, 2))


@on_a_gpu
@pytest.mark.parametrize("shape", [*SHAPES, *devices.SMALL], ids=str)
@pytest.mark.parametrize("dtype", devices.FLOATS, ids=str)
@pytest.mark.parametrize("name", devices.DATA)
def test_contraction(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reference, "LIMIT", 1 << 26)
    devices.contraction("cuda", shape, name, dtype)


@on_a_gpu
@pytest.mark.parametrize("worth", [0, 1 << 62], ids=["CUDA", "Triton"])
def test_windows_are_read_where_they_lie(worth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "WORTH", worth)
    devices.windows("cuda", 10)
    devices.mixed("cuda")
    devices.nothing("cuda")


@on_a_gpu
def test_a_contraction_too_large_for_the_room_goes_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu, "SMALL", 0)
    monkeypatch.setattr(gpu, "WORTH", 0)
    for most in (3_000_000, 700_000, 1):
        monkeypatch.setattr(gpu, "WORKSPACE", most)
        devices.contraction("cuda", (2, 700, 64, 300), "ties", torch.float32)


@on_a_gpu
@pytest.mark.parametrize("many", [1, 2, 5, 8])
def test_the_largest_few(many: int) -> None:
    devices.top("cuda", many, [(2, 3, 5, 4), (1, 2, 0, 3), (3, 130, 257, 170)])


@on_a_gpu
def test_merge() -> None:
    devices.merge("cuda", True)


@on_a_gpu
def test_the_larger_of_two_terms() -> None:
    devices.duel("cuda")


@on_a_gpu
def test_tally() -> None:
    devices.tally("cuda", True)
    devices.tally_of_matrices("cuda")


@on_a_gpu
def test_reduce() -> None:
    devices.reduce("cuda", True)


@on_a_gpu
def test_scatter() -> None:
    devices.scatter("cuda", True)


@on_a_gpu
def test_gather() -> None:
    devices.gather("cuda")


@on_a_gpu
@pytest.mark.parametrize("kind", KINDS)
def test_normalise(kind: str) -> None:
    devices.normalise("cuda", kind, (1, 2, 17, 65, 127, 300, 768, 1100), (4097,))


@on_a_gpu
def test_normalise_what_is_not_finite() -> None:
    devices.normalise_odd("cuda", 10)
    devices.normalise_expanded("cuda")
