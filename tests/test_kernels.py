"""The contraction in (max, ×) against three loops, to the bit."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import few
from torch import Tensor

from gradtrace import kernels
from gradtrace.kernels import argmax, largest, plain_contraction, tuning, winner

INF, NAN = math.inf, math.nan
SMALLEST = 5e-324  # a denormal


def three_loops(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The largest ``|a[i, m, k]·b[i, k, n]|``, and the first k that has it; NaN is largest."""
    single = torch.float32 in (a.dtype, b.dtype) or a.dtype.itemsize == 2 or b.dtype.itemsize == 2
    double = torch.float64 in (a.dtype, b.dtype)
    kind = torch.float32 if single and not double else torch.float64
    (batch, rows, inner), columns = a.shape, b.shape[2]
    value = torch.zeros(batch, rows, columns, dtype=kind)
    index = torch.zeros(batch, rows, columns, dtype=torch.int64)
    for i, m, n in product(range(batch), range(rows), range(columns)):
        for k in range(inner):
            size = (a[i, m, k].to(kind) * b[i, k, n].to(kind)).abs()
            best = value[i, m, n]
            if bool(size > best) or (bool(size.isnan()) and not bool(best.isnan())):
                value[i, m, n], index[i, m, n] = size, k
    return value, index


def check(a: Tensor, b: Tensor) -> None:
    value, index = three_loops(a, b)
    found, place = winner(a, b)
    for got in (found, largest(a, b)):
        assert got.dtype is value.dtype
        torch.testing.assert_close(got, value, rtol=0, atol=0, equal_nan=True)
    assert place.dtype is torch.int64
    there = value != 0  # where all is 0, the place means nothing
    assert torch.equal(place[there], index[there])


def random(kind: str, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "normal":
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    pools = {
        "ties": [-2.0, -1.0, 1.0, 2.0],
        "zeros": [0.0, -0.0, 1.0],
        "all zero": [0.0, -0.0],
        "nan": [1.0, -3.0, 0.0, NAN],
        "infinite": [1.0, -3.0, INF, -INF],
        "infinite and zero": [0.0, -3.0, INF, NAN],
        "denormal": [SMALLEST, -3 * SMALLEST, 1.0, 0.0, 1e-310],
        "huge": [1e300, -1e200, 1.0, 1e-200],
    }
    pool = torch.tensor(pools[kind], dtype=torch.float64)
    return pool[torch.randint(len(pool), shape, generator=generator)].to(dtype)


KINDS = (
    "normal", "ties", "zeros", "all zero", "nan", "infinite", "infinite and zero", "denormal",
    "huge",
)  # fmt: skip
SHAPES = [(1, 1, 1, 1), (2, 3, 4, 2), (1, 5, 7, 3), (3, 1, 2, 1), (1, 2, 9, 2)]  # i, m, k, n
EMPTY = [(0, 2, 2, 2), (2, 0, 2, 2), (2, 2, 0, 2), (2, 2, 2, 0), (0, 0, 0, 0)]


def pair(kind: str, shape: tuple[int, int, int, int]) -> tuple[Tensor, Tensor]:
    i, m, k, n = shape
    return random(kind, i, m, k), random(kind, i, k, n, seed=1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_three_loops(kind: str, shape: tuple[int, int, int, int]) -> None:
    check(*pair(kind, shape))


@settings(max_examples=few(25, 60))
@given(st.data(), *[st.integers(0, 3)] * 4)
def test_any_numbers(data: st.DataObject, i: int, m: int, k: int, n: int) -> None:
    numbers = st.one_of(
        st.integers(-3, 3).map(float), st.floats(), st.sampled_from([0.0, -0.0, NAN, INF, SMALLEST])
    )

    def tensor(*shape: int) -> Tensor:
        size = math.prod(shape)
        drawn = data.draw(st.lists(numbers, min_size=size, max_size=size))
        return torch.tensor(drawn, dtype=torch.float64).reshape(shape)

    check(tensor(i, m, k), tensor(i, k, n))


@pytest.mark.parametrize("shape", EMPTY)
def test_nothing(shape: tuple[int, int, int, int]) -> None:
    """No k has the value 0; no m, n or i has no value."""
    a, b = pair("normal", shape)
    check(a, b)
    i, m, _, n = shape
    assert torch.equal(largest(a, b), torch.zeros(i, m, n, dtype=torch.float64))


def apart(x: Tensor) -> Tensor:
    """The same numbers, with others between them."""
    return torch.stack([x, torch.full_like(x, 99.0)], -1)[..., 0]


@pytest.mark.parametrize("kind", ["normal", "ties", "nan"])
def test_any_layout(kind: str) -> None:
    a, b = pair(kind, (2, 3, 4, 5))
    layouts = [
        (a.transpose(1, 2).contiguous().transpose(1, 2), b),
        (a, b.transpose(1, 2).contiguous().transpose(1, 2)),
        (apart(a), apart(b)),
        (a[:1].expand(2, 3, 4), b[:1].expand(2, 4, 5)),
        (a[:, :, :1].expand(2, 3, 4), b[:, :1].expand(2, 4, 5)),
        (a.permute(2, 0, 1).contiguous().permute(1, 2, 0), apart(b).flip(0).flip(0)),
    ]
    for left, right in layouts:
        check(left, right)


@pytest.mark.parametrize("limit", [1, 3, 8, 9, 20, 39, 40, 41, 119, 120, 121])
@pytest.mark.parametrize("kind", ["normal", "ties", "nan"])
def test_borders_of_chunks(kind: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 · 3 · 4 · 5 products, a few at a time."""
    monkeypatch.setattr(tuning, "MAX_PRODUCTS", limit)
    check(*pair(kind, (2, 3, 4, 5)))


def test_more_products_than_fit_at_a_time() -> None:
    a, b = random("normal", 1, 130, 100), random("normal", 1, 100, 110, seed=1)
    assert tuning.MAX_PRODUCTS < 130 * 100 * 110
    products = (a[0, :, :, None] * b[0, None]).abs()
    value, index = winner(a, b)
    assert torch.equal(value[0], products.amax(1))
    assert torch.equal(index[0], products.max(1).indices)
    assert torch.equal(largest(a, b), value)


HALF = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("left", [*HALF, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("right", [*HALF, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["normal", "ties", "nan", "zeros"])
def test_precisions(left: torch.dtype, right: torch.dtype, kind: str) -> None:
    a, b = pair(kind, (2, 3, 4, 2))
    check(a.to(left), b.to(right))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_half_precision_is_multiplied_in_single(dtype: torch.dtype) -> None:
    """256² and 2⁻³⁰ are outside the range of float16; 255² needs more digits than bfloat16 has."""
    a = torch.tensor([[[256.0, 2.0**-15, 255.0]]], dtype=dtype)
    for k in range(3):
        one = a[:, :, k : k + 1]
        value, index = winner(one, one)
        assert value.dtype is torch.float32
        assert float(value) == float(one) ** 2
        assert int(index) == 0
    assert float(largest(a, a.transpose(1, 2))) == 65536.0


@pytest.mark.parametrize("value", [NAN, INF])
def test_the_first_of_equals_wins(value: float) -> None:
    a = torch.tensor([[[1.0, value, -value, value]]])
    assert int(winner(a, torch.ones(1, 4, 1))[1]) == 1
    assert int(winner(torch.ones(1, 1, 4), a.transpose(1, 2))[1]) == 1


def test_nan_wins_against_infinity() -> None:
    a = torch.tensor([[[INF, 1.0, NAN, INF, NAN]]])
    value, index = winner(a, torch.ones(1, 5, 1))
    assert value.isnan().all()
    assert int(index) == 2
    assert int(winner(torch.tensor([[[1.0, INF]]]), torch.tensor([[[1.0], [0.0]]]))[1]) == 1


def test_arguments_are_left_alone() -> None:
    a, b = pair("normal", (2, 3, 4, 5))
    before = a.clone(), b.clone()
    winner(a, b)
    largest(a, b)
    assert torch.equal(a, before[0])
    assert torch.equal(b, before[1])


# argmax ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("kind", KINDS)
def test_argmax(kind: str, dim: int) -> None:
    x = random(kind, 3, 6, 4)
    value, index = argmax(x, dim)
    lines = x.movedim(dim, -1)
    for place in product(*map(range, lines.shape[:-1])):
        line = lines[place].tolist()
        best = 0
        for k, number in enumerate(line):
            if number > line[best] or (math.isnan(number) and not math.isnan(line[best])):
                best = k
        assert int(index[place]) == best
        torch.testing.assert_close(float(value[place]), line[best], equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("n", [1, 33, 1000, 40_000])
@pytest.mark.parametrize("fill", [0.0, 1.0, NAN, INF, -INF])
def test_argmax_of_long_lines_of_equals(n: int, fill: float) -> None:
    """Vectorised or in parts, the first wins."""
    x = torch.full((2, n), fill)
    assert argmax(x, 1)[1].tolist() == [0, 0]
    assert argmax(x.t().contiguous(), 0)[1].tolist() == [0, 0]
    x[:, n // 2 :] = NAN
    assert argmax(x, 1)[1].tolist() == [0 if math.isnan(fill) else n // 2] * 2


@pytest.mark.parametrize("dim", [0, 1, -2])
def test_argmax_of_nothing(dim: int) -> None:
    shape = [2, 3]
    shape[dim] = 0
    value, index = argmax(torch.zeros(shape), dim)
    assert value.tolist() == [0.0] * len(value)
    assert index.tolist() == [-1] * len(index)
    assert index.dtype is torch.int64


def test_what_is_used_is_what_is_tested() -> None:
    """Whatever takes the place of the reference gives the same bits."""
    a, b = pair("ties", (2, 3, 7, 4))
    value, index, _ = plain_contraction.contraction(a, b, index=True)
    assert value is not None and index is not None
    assert torch.equal(kernels.largest(a, b), value)
    for found, wanted in zip(kernels.winner(a, b), (value, index)):
        assert torch.equal(found, wanted)
