"""The contraction on a GPU gives the bits of the reference. Skipped where there is none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradtrace.kernels import gpu, reference
from gradtrace.kernels.reference import Contraction, Operand

SHAPES = [
    (1, 128, 128, 300),
    (2, 130, 257, 170),
    (1, 300, 1096, 20),
    (1, 64, 9000, 16),
    (12, 100, 64, 100),
    (1, 3, 40_000, 64),
    (3, 2, 1, 5),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def spoilt(x: Tensor, number: float) -> Tensor:
    x = x.clone()
    x[0, 0, x.shape[2] // 2] = number
    return x


DATA: dict[str, Callable[[Tensor], Tensor]] = {
    "Gaussian": lambda x: x,
    "ties": lambda x: (2 * x).round(),
    "zeros": lambda x: torch.where(x > 1, x, 0),
    "NaN": lambda x: spoilt(x, float("nan")),
    "infinite": lambda x: spoilt(x, float("inf")),
    "denormal": lambda x: x * 1e-20,
    "turned": lambda x: x.mT.contiguous().mT,
    "apart": lambda x: torch.stack([x, x], -1)[..., 0],
}


def same(found: Contraction, wanted: Contraction) -> bool:
    assert found.value is not None and wanted.value is not None
    there = wanted.value != 0
    if not torch.equal(found.value.nan_to_num(7), wanted.value.nan_to_num(7)):
        return False
    if found.index is not None and wanted.index is not None:
        return torch.equal(found.index[there], wanted.index[there])
    assert found.marks is not None and wanted.marks is not None
    return torch.equal(found.marks, wanted.marks)


def test_a_plan_covers_all_k_in_parts_of_whole_blocks() -> None:
    for k in (1, 15, 16, 17, 768, 4096, 4097, 40_000, 10_000_000):
        for tiles in (1, 100, 10_000):
            found = gpu.plan(1, 128 * tiles, 128, k, 132)
            assert found.padded >= k > found.padded - found.block
            assert found.part % found.block == 0
            assert found.part <= gpu.BLOCKS * found.block
            assert found.splits * found.part >= found.padded > (found.splits - 1) * found.part


def test_cpu_tensors_are_not_served() -> None:
    assert not gpu.served(torch.ones(1, 2, 2), torch.ones(1, 2, 2))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", DATA)
def test_the_bits_are_those_of_the_reference(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    i, m, k, n = shape
    monkeypatch.setattr(reference, "LIMIT", 1 << 29)
    draw = torch.Generator("cuda").manual_seed(0)
    a = DATA[name](torch.randn(i, m, k, device="cuda", generator=draw)).to(dtype)
    b = DATA[name](torch.randn(i, k, n, device="cuda", generator=draw)).to(dtype)
    assert same(gpu.contraction(a, b, index=True), reference.contraction(a, b, index=True))
    for of_b, size in ((False, (i, m, k)), (True, (i, k, n))):
        marks = torch.randint(1, 1 << 20, size, dtype=torch.int32, device="cuda", generator=draw)
        found = gpu.contraction(a, b, marks=marks, of_b=of_b)
        assert same(found, reference.contraction(a, b, marks=marks, of_b=of_b))
    value = gpu.contraction(a, b).value
    wanted = reference.contraction(a, b).value
    assert value is not None and wanted is not None
    assert torch.equal(value.nan_to_num(7), wanted.nan_to_num(7))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_windows_are_read_where_they_lie() -> None:
    data = torch.randn(40_000, device="cuda")
    words = torch.randint(1, 999, (40_000,), dtype=torch.int32, device="cuda")
    tables = [torch.arange(n, device="cuda") * step for n, step in ((2, 500), (300, 7), (300, 3))]
    windows, b = Operand(data, *tables), torch.randn(2, 300, 400, device="cuda")
    marks = windows._replace(data=words)
    found = gpu.contraction(windows, b, marks=marks)
    assert same(found, reference.contraction(windows, b, marks=marks))
    a = torch.randn(2, 200, 300, device="cuda")
    found = gpu.contraction(a, windows, marks=marks, of_b=True)
    assert same(found, reference.contraction(a, windows, marks=marks, of_b=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_matrix_too_large_to_lay_out_goes_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.randn(2, 700, 64, device="cuda"), torch.randn(2, 64, 300, device="cuda")
    wanted = gpu.contraction(a, b, index=True)
    monkeypatch.setattr(gpu, "PACKED", 256 * 128)
    assert same(gpu.contraction(a, b, index=True), wanted)
