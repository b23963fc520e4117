"""Provenance that every map hands on is that of the elements that ``best`` names; convolutions as
products of windows give what their rows give, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from backends import CPU, use
from hypothesis import given, settings
from hypothesis import strategies as st
from test_maps import TABLE, Make, apart, convolve, maker, whole, windows
from thorough import THOROUGH, few
from torch import Tensor

from gradtrace.kernels import Reference, cpu_library
from gradtrace.linops import Map, Windows
from gradtrace.semirings import MAX

INF, NAN = math.inf, math.nan
HALVES = (torch.float16, torch.bfloat16)


def odd(seed: int = 0, dtype: torch.dtype = torch.float64) -> Make:
    """Makes zeros, equal numbers, infinities and NaN."""
    generator = torch.Generator().manual_seed(seed)
    pool = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0, 3.0, INF, -INF, NAN], dtype=dtype)

    def make(*shape: int) -> Tensor:
        return pool[torch.randint(len(pool), shape, generator=generator)]

    return make


MAKERS: dict[str, Callable[..., Make]] = {"generic": maker, "ties": whole, "odd": odd}


@pytest.fixture(params=["native", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The compiled kernels, and plain torch in their place."""
    if request.param == "torch":
        use(monkeypatch, Reference(CPU))
    elif cpu_library.library() is None:
        pytest.skip("without compiled kernels")
    yield


def some_marks(m: Map, seed: int = 7) -> Tensor:
    """Marks that tell elements apart; a few are 0."""
    generator = torch.Generator().manual_seed(seed)
    marks = torch.randperm(m.inputs, generator=generator).reshape(m.in_shape) - m.inputs // 8
    return marks.clamp(min=0).int()


def same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def handed_on(marks: Tensor, source: Tensor) -> Tensor:
    """The mark of each source, one after the other."""
    flat = marks.reshape(-1).tolist()
    found = [flat[j] if j >= 0 else 0 for j in source.reshape(-1).tolist()]
    return torch.tensor(found, dtype=torch.int32).reshape(source.shape)


def check(m: Map, x: Tensor, marks: Tensor) -> None:
    """``select`` is ``best`` and a look at the marks there."""
    best = m.best(x)
    expected = handed_on(marks, best.source)
    value, found = m.select(x, marks, value=True)
    assert value is not None and found.dtype is torch.int32
    assert value.dtype is best.value.dtype or not m.outputs
    same(value, best.value.to(value.dtype))
    same(found, expected)
    nothing, again = m.select(x, marks)
    assert nothing is None
    same(again, expected)


def in_turn(kinds: Iterable[Any]) -> list[tuple[str, Any, str]]:
    """Every map with every kind by the compiled kernels; by plain torch, which is what they are
    compared with elsewhere, with a kind that they take in turn; with all in the thorough run, and
    where nothing is compiled.
    """
    kinds, found = list(kinds), list[tuple[str, Any, str]]()
    every = THOROUGH or cpu_library.library() is None
    for n, name in enumerate(TABLE):
        mine = kinds if every else [kinds[n % len(kinds)]]
        found += [(name, kind, "native") for kind in kinds]
        found += [(name, kind, "torch") for kind in mine]
    return found


@pytest.mark.parametrize(("name", "kind", "kernels"), in_turn(MAKERS), indirect=["kernels"])
def test_hands_on_the_mark_of_the_best(name: str, kind: str, kernels: None) -> None:
    for dtype in (torch.float64, torch.float32):
        m = TABLE[name](MAKERS[kind](1, dtype))
        for seed in range(few(1, 3)):
            x = MAKERS[kind](seed + 2, dtype)(*m.in_shape)
            check(m, x, some_marks(m))
            check(m, apart(x), apart(some_marks(m)))


@pytest.mark.parametrize(
    ("name", "dtype", "kernels"), in_turn(HALVES), indirect=["kernels"], ids=str
)
def test_half_precision(name: str, dtype: torch.dtype, kernels: None) -> None:
    for make in MAKERS.values():
        m = TABLE[name](make(1, dtype))
        check(m, make(2, dtype)(*m.in_shape), some_marks(m))


@pytest.mark.parametrize("name", TABLE)
def test_weights_of_another_precision(name: str, kernels: None) -> None:
    for weights, values in ((torch.float32, torch.float64), (torch.float64, torch.float32)):
        m = TABLE[name](whole(1, weights))
        check(m, whole(2, values)(*m.in_shape), some_marks(m))


@pytest.mark.parametrize(
    "name", [n for n in TABLE if n.split()[0] in ("Convolve", "Dense", "Contract")]
)
@pytest.mark.parametrize("kind", MAKERS)
def test_products_are_what_rows_say(name: str, kind: str, kernels: None) -> None:
    m = TABLE[name](MAKERS[kind](1))
    x = MAKERS[kind](2)(*m.in_shape)
    check_rows(m, x)


def check_rows(m: Map, x: Tensor) -> None:
    """``best`` and the pull in MAX are what the rows give."""
    value, source = m.largest(x)
    best = m.best(x)
    same(best.value, value)
    assert torch.equal(best.source, source)
    same(m.apply_in((x.abs(),), MAX)[0], value)


# Convolutions of any geometry --------------------------------------------------------------------


@st.composite
def geometries(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], Windows]:
    """Shapes of input and kernel, and how windows lie."""
    d = draw(st.integers(1, 3))
    most = (9, 5, 3)[d - 1]

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(d))

    stride, dilation, taps = each(1, 4), each(1, 3), each(1, 4)
    transposed, groups = draw(st.booleans()), draw(st.integers(1, 3))
    ins, outs = draw(st.integers(1, 2)) * groups, draw(st.integers(1, 2)) * groups
    batch = draw(st.integers(1, 2))
    span = [(t - 1) * k + 1 for t, k in zip(taps, dilation)]
    if transposed:
        size = each(1, most)
        padding = tuple(
            draw(st.integers(0, ((n - 1) * s + k - 1) // 2)) for n, s, k in zip(size, stride, span)
        )
        extra = tuple(draw(st.integers(0, max(s, k) - 1)) for s, k in zip(stride, dilation))
        kernel = (ins, outs // groups, *taps)
    else:
        padding = each(0, 3)
        size = tuple(max(1, k - 2 * p) + draw(st.integers(0, most)) for k, p in zip(span, padding))
        extra, kernel = (0,) * d, (outs, ins // groups, *taps)
    how = windows(stride, padding, dilation, transposed, extra, groups)
    return (batch, ins, *size), kernel, how


@settings(max_examples=few(40, 150), deadline=None)
@given(geometries(), st.booleans(), st.sampled_from(sorted(MAKERS)), st.integers(0, 9))
def test_any_convolution(
    geometry: tuple[tuple[int, ...], tuple[int, ...], Windows],
    to_kernel: bool,
    kind: str,
    seed: int,
) -> None:
    m = convolve(MAKERS[kind](seed), *geometry, to_kernel)
    x = MAKERS[kind](seed + 1)(*m.in_shape)
    check_rows(m, x)
    check(m, x, some_marks(m))
