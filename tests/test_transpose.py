"""The transpose of every map against its matrix, by the independent definitions of ``oracle``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracle import matrix_of
from test_maps import TABLE, Make, close, maker
from torch import Tensor

from gradtrace.errors import GradtraceError
from gradtrace.linops import Index, Map, Normaliser, column_sums, transposed
from gradtrace.linops import tuning as linops_tuning
from gradtrace.linops.low_rank_sums import sums_of_others
from gradtrace.linops.transpose import Transposed
from gradtrace.semirings import ABS, COUNT, ENTROPY, MAX, SUM, Abs, Semiring

SEMIRINGS = [SUM, ABS, Abs(p=2), Abs(p=3.5), COUNT, ENTROPY, MAX]


@pytest.fixture(params=TABLE)
def m(request: pytest.FixtureRequest) -> Map:
    build: Callable[[Make], Map] = TABLE[request.param]
    return build(maker())


def lifted(matrix: Tensor, x: Tensor, semiring: Semiring) -> list[Tensor]:
    """The product with an explicit matrix in a semiring, by its own operations."""
    product = semiring.times(semiring.weigh(matrix), semiring.weigh(x.reshape(1, -1)))
    product = tuple(part.expand(matrix.shape) for part in product)
    return list(semiring.fold(product, 1))


def test_transpose_is_that_of_the_matrix(m: Map) -> None:
    x, t, matrix = maker(seed=1)(*m.out_shape), transposed(m), matrix_of(m)
    assert (t.in_shape, t.out_shape) == (m.out_shape, m.in_shape)
    for semiring in SEMIRINGS:
        found = t.apply_in(semiring.weigh(x), semiring)
        for part, wanted in zip(found, lifted(matrix.T, x, semiring)):
            assert tuple(part.shape) == m.in_shape
            close(part.reshape(-1), wanted)


def test_rows_of_the_transpose(m: Map) -> None:
    """Of the kind that ``transposed`` gives, and of the generic one."""
    for t in (transposed(m), Transposed(m)):
        source, weight = t.rows(torch.arange(t.outputs))
        weight = weight.double().expand(source.shape)
        found = torch.zeros(t.outputs, t.inputs + 1, dtype=torch.float64)
        found.scatter_add_(1, source % (t.inputs + 1), torch.where(source >= 0, weight, 0))
        close(found[:, :-1], matrix_of(m).T)


def test_other_methods_of_the_transpose(m: Map) -> None:
    x, t, matrix = maker(seed=1)(*m.out_shape), transposed(m), matrix_of(m).T
    close(t.apply(x).reshape(-1), matrix @ x.reshape(-1))
    close(Transposed(m).apply(x).reshape(-1), matrix @ x.reshape(-1))
    close(transposed(t).apply(x.new_ones(m.in_shape)).reshape(-1), matrix.sum(0))
    size = (matrix * x.reshape(1, -1)).abs()
    best = t.best(x).value.reshape(-1)
    close(best, size.amax(1) if size.numel() else torch.zeros(t.outputs))
    numbers = torch.arange(1, t.inputs + 1).reshape(t.in_shape)
    bound = t.max_source(numbers).reshape(-1)
    there = (matrix != 0) * torch.arange(1, t.inputs + 1)
    assert not bound.numel() or not there.numel() or bool((bound >= there.amax(1)).all())


def test_column_sums(m: Map) -> None:
    ones, matrix = torch.ones(m.outputs, dtype=torch.float64), matrix_of(m)
    for semiring in (SUM, ABS, Abs(p=2), ENTROPY):
        one = semiring.weigh(torch.ones((), dtype=torch.float64))
        found = column_sums(m, semiring, one)
        for part, wanted in zip(found, lifted(matrix.T, ones, semiring)):
            assert tuple(part.shape) == m.in_shape
            close(part.reshape(-1), wanted)


def test_weights_of_a_pair_are_added_before_they_are_lifted() -> None:
    """A letter of the weight alone."""
    from gradtrace.linops import Contract

    m = Contract("mk,kna->mn", maker()(3, 2, 4), (2, 3), (2, 2))
    one = (torch.ones((), dtype=torch.float64),)
    wanted = matrix_of(m).abs().sum(0)
    close(column_sums(m, ABS, one)[0].reshape(-1), wanted)
    ones = torch.ones(m.out_shape, dtype=torch.float64)
    close(transposed(m).apply_in((ones,), ABS)[0].reshape(-1), wanted)


def test_generic_transpose_in_chunks(m: Map, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linops_tuning, "ROWS_MAX_ENTRIES", 2)
    x = maker(seed=1)(*m.out_shape)
    (found,) = Transposed(m).apply_in((x.abs(),), ABS)
    close(found.reshape(-1), matrix_of(m).T.abs() @ x.abs().reshape(-1))


VIEWS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "overlapping": (lambda x: x.unfold(1, 3, 1), (2, 5)),
    "apart": (lambda x: x.unfold(1, 2, 2), (2, 5)),
    "expanded twice": (lambda x: x[:, None, :, None].expand(2, 3, 4, 2), (2, 4)),
    "backwards": (lambda x: x.flip(0).t(), (3, 2)),
    "offset": (lambda x: x[1:, ::2].t(), (3, 5)),
    "size one": (lambda x: x[:, :1].expand(3, 4), (3, 2)),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("semiring", [SUM, Abs(p=2), MAX], ids=lambda s: s.name)
def test_views(name: str, semiring: Semiring) -> None:
    move, shape = VIEWS[name]
    out = tuple(move(torch.zeros(shape)).shape)
    m = Index(move, shape, out)
    for x in (maker(seed=1)(*out), torch.ones(()).double().expand(out)):
        found = transposed(m).apply_in(semiring.weigh(x), semiring)
        for part, wanted in zip(found, lifted(matrix_of(m).T, x, semiring)):
            close(part.reshape(-1), wanted)


@pytest.mark.parametrize("p", [0, -1, float("nan"), float("inf")])
def test_powers_that_are_none(p: float) -> None:
    with pytest.raises(GradtraceError, match="p is a positive number"):
        Abs(p=p)


def test_powers_of_small_weights_do_not_vanish() -> None:
    weight = torch.tensor(1e-3)
    assert float(Abs(p=32).weigh(weight)[0]) == pytest.approx(1e-96, rel=1e-5)
    assert float(Abs(p=2).weigh(weight.half())[0]) == pytest.approx(1e-6, rel=1e-2)


# Norms in |weight|**p ----------------------------------------------------------------------------


def norm(n: int, lines: int = 2, degenerate: bool = False) -> Normaliser:
    make = maker(seed=n)
    u, v = make(lines, n), make(lines, n)
    if degenerate:  # zeros, and lines of which all ratios are the same
        u[0, ::2], v[0, ::3], u[1], v[1] = 0, 0, 0, 1
    return Normaliser(make(lines, n), [(u, v), (make(1, n), make(lines, 1))], [1], (lines, n))


@pytest.mark.parametrize("degenerate", [False, True])
@pytest.mark.parametrize("p", [1, 2, 3, 8, 2.5])
@pytest.mark.parametrize("n", [5, 70])
def test_norms_without_all_pairs(n: int, p: float, degenerate: bool) -> None:
    """Sorted prefix sums and explicit pairs are the matrix' sums; also of single precision."""
    m = norm(n, degenerate=degenerate)
    x, semiring = maker(seed=1)(*m.in_shape).abs(), Abs(p=p)
    for t, matrix in ((m, matrix_of(m)), (transposed(m), matrix_of(m).T)):
        wanted = matrix.abs().pow(p) @ x.reshape(-1)
        least = 1e-13 * float(wanted.max())  # where all weights of a line are next to 0
        (found,) = t.apply_in((x,), semiring)
        torch.testing.assert_close(found.reshape(-1), wanted, rtol=1e-10, atol=least)
        (single,) = t.apply_in((x.float(),), semiring)
        torch.testing.assert_close(single.reshape(-1).double(), wanted, rtol=1e-5, atol=least)


def test_softmax_of_one_large_element() -> None:
    """All others together are far below the rounding of the whole."""
    x = torch.tensor([[1e-12, 1.0, 3e-12, 0.0], [2.0, 2.0, 0.0, 1e-9]])
    wanted = x.double().sum(1, keepdim=True) - x.double()
    wanted[0, 1] = 4e-12
    torch.testing.assert_close(sums_of_others(x).double(), wanted, rtol=1e-6, atol=0)
    assert sums_of_others(torch.tensor([[3.0]])).tolist() == [[0.0]]


@pytest.mark.parametrize("p", [1, 2.5])
def test_norms_in_chunks(p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    m, x = norm(7), maker(seed=1)(2, 7).abs()
    wanted = matrix_of(m).abs().pow(p) @ x.reshape(-1)
    for entries in (1, 14, 60, 100, 1 << 20):
        monkeypatch.setattr(linops_tuning, "ROWS_MAX_ENTRIES", entries)
        (found,) = m.apply_in((x,), Abs(p=p))
        close(found.reshape(-1), wanted)
