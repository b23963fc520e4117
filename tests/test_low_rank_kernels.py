"""The compiled product with a diagonal plus low rank, against rows that are added one by one."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from backends import CPU
from torch import Tensor

from gradtrace.kernels import Reference, backend_of, cpu_library
from gradtrace.kernels.operands import ColumnLayout, LowRankLines
from gradtrace.linops import Normaliser, tuning
from gradtrace.linops.columns import column_layout

pytestmark = pytest.mark.skipif(
    not hasattr(cpu_library.library(), "gradtrace_low_rank"), reason="the library has none"
)


@pytest.fixture(params=product(cpu_library.isas(), (1, 2)), ids=lambda p: f"{p[0]} {p[1]}")
def instructions(request: pytest.FixtureRequest) -> Iterator[None]:
    before, threads = cpu_library.isa(), torch.get_num_threads()
    cpu_library.use_isa(request.param[0])
    torch.set_num_threads(request.param[1])
    yield
    cpu_library.use_isa(before)
    torch.set_num_threads(threads)


def added_up(rows: Tensor) -> Tensor:
    """The sum over dimension 1: blocks of 16 rows in order, then blocks of as many blocks. Few
    enough rows that blocks have 16, and that there are three levels of them.
    """
    levels = [torch.zeros_like(rows[:, 0]) for _ in range(3)]
    for i, row in enumerate(rows.unbind(1), 1):
        levels[0] = levels[0] + row
        if i % 16 == 0:
            levels[1], levels[0] = levels[1] + levels[0], torch.zeros_like(row)
        if i % 256 == 0:
            levels[2], levels[1] = levels[2] + levels[1], torch.zeros_like(row)
    return (levels[0] + levels[1] + levels[2]).unsqueeze(1)


def made(count: int, n: int, columns: int, rank: int, dtype: torch.dtype) -> LowRankLines:
    """As batch norm makes them: some factors are the same for all rows."""
    generator = torch.Generator().manual_seed(n)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    left, right = [some(1, columns), some(n, columns)], [some(1, columns), some(count, n, columns)]
    return LowRankLines(some(n, columns), left[:rank], right[:rank], some(count, n, columns))


def layout_of(shape: tuple[int, ...], *parts: Tensor) -> ColumnLayout:
    found = column_layout(shape, (1,), *[(part.shape, part.stride()) for part in parts])
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.usefixtures("instructions")
def test_products_add_up_blocks_of_rows(dtype: torch.dtype) -> None:
    for n, rank in product((1, 15, 16, 50, 300), (1, 2)):
        lines = made(3, n, 64, rank, dtype)
        d, left, right, x = lines
        wanted = d * x
        for u, v in zip(left, right):
            wanted = wanted + u * added_up(v * x)
        found = backend_of(x).low_rank(lines, layout_of(x.shape, d, x, *left, *right))
        assert found is not None and torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.usefixtures("instructions")
def test_sums_are_spread_over_rows(dtype: torch.dtype) -> None:
    for columns, rank in product((2, 31, 32, 70), (1, 2)):
        _, left, _, x = made(3, 9, columns, rank, dtype)
        sums = [x[:, n : n + 1] for n in range(rank)]
        wanted = torch.zeros_like(x)
        for u, total in zip(left, sums):
            wanted = wanted + u * total
        found = backend_of(x).low_rank_sums(left, sums, layout_of(x.shape, *left, *sums))
        assert found is not None and torch.equal(found, wanted)


def test_what_the_kernels_do_not_support_is_left_to_torch() -> None:
    d, left, right, x = made(3, 9, 32, 2, torch.float32)
    layout = layout_of(x.shape, d, x, *left, *right)
    backend = backend_of(x)
    assert backend.low_rank(LowRankLines(d, left, right, x), layout) is not None
    assert Reference(CPU).low_rank(LowRankLines(d, left, right, x), layout) is None
    assert backend.low_rank(LowRankLines(d, left, right, x.double()), layout) is None
    assert backend.low_rank(LowRankLines(d, left, right, x.requires_grad_()), layout) is None
    few = made(3, 9, 20, 2, torch.float32)
    parts = (few.diagonal, few.x, *few.left, *few.right)
    assert backend.low_rank(few, layout_of(few.x.shape, *parts)) is None
    for shape, dims, strides in (
        ((4, 5), (1,), (5, 1)),  # a line is a row
        ((4, 5, 6), (0, 2), (30, 6, 1)),  # rows of a line are not side by side
        ((4, 5, 6), (1,), (30, 1, 5)),  # columns are not
    ):
        assert column_layout(shape, dims, (shape, strides)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_maps_are_the_same_with_the_kernels(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    d, left, right, x = made(2, 130, 32, 2, dtype)
    one = Normaliser(d, list(zip(left, [right[0], right[1][0]])), [0], (130, 32))
    places = torch.tensor([[3, 5], [0, 129]])
    cases = [(one.copies(2), x), (one, x[0]), (one.narrow(0, places), x[:, :2].contiguous())]
    found = [m.apply(given) for m, given in cases]
    monkeypatch.setattr(tuning, "KERNEL_MIN_ELEMENTS", 1 << 40)
    for (m, given), mine in zip(cases, found):
        torch.testing.assert_close(mine, m.apply(given))


def test_bad_operands_are_refused() -> None:
    library, out = cpu_library.library(), torch.zeros(2 * 3 * 32)
    assert library is not None
    place = out.data_ptr()
    for rank, columns, numbers in (
        (1, 32, [0] * 12),
        (3, 32, [place, 0, 0] * 8),
        (1, 20, [place, 0, 0] * 4),
        (1, 32, [place, 0, 0, 0, 0, 0] + [place, 0, 0] * 2),
    ):
        given = (ctypes.c_int64 * len(numbers))(*numbers)
        assert library.gradtrace_low_rank(0, 2, 3, columns, rank, given, place, 1) == 3
    assert library.gradtrace_low_rank(0, 2, -3, 32, 1, (ctypes.c_int64 * 12)(), place, 1) == 3
