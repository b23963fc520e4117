"""The laws of every semiring, and its fast methods against folds of ⊕ and ⊗.

Values are sums of products of lifted whole numbers in float64, so that laws are tested for
equality; only ENTROPY, which takes logarithms, is compared to rounding.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import programs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import few
from torch import Tensor

import gradtrace
from gradtrace import semirings
from gradtrace.errors import GradtraceError, NonFinite, OutOfRange
from gradtrace.ir.interpreter import run
from gradtrace.semirings import (
    ABS,
    BOOL,
    COUNT,
    ENTROPY,
    EXTREMES,
    MAX,
    SUM,
    Abs,
    Count,
    Max,
    Semiring,
    TopK,
    Value,
)
from gradtrace.semirings.base import UNTARGETED, places

INF, NAN = math.inf, math.nan
BUILT_IN: list[Semiring] = [
    SUM, ABS, MAX, EXTREMES, COUNT, Count(exact=True), ENTROPY, TopK(1), TopK(3), BOOL,
    Max(log=True), TopK(2, log=True),
]  # fmt: skip


# Semirings as a user would write them: five operations, and a zero that is not 0 ------------------


@dataclass(frozen=True)
class LogMax(Semiring):
    """(max, +): the logarithm of the largest path."""

    name: str = "LOGMAX"
    zero: tuple[float, ...] = (-INF,)
    one: tuple[float, ...] = (0.0,)

    def lift(self, weight: Tensor) -> Value:
        return (weight.abs().log2(),)

    def plus(self, a: Value, b: Value) -> Value:
        return (torch.maximum(a[0], b[0]),)

    def times(self, a: Value, b: Value) -> Value:
        return (a[0] + b[0],)


@dataclass(frozen=True)
class LogMin(Semiring):
    """(min, +): the logarithm of the smallest path that is not 0."""

    name: str = "LOGMIN"
    zero: tuple[float, ...] = (INF,)
    one: tuple[float, ...] = (0.0,)

    def lift(self, weight: Tensor) -> Value:
        return (torch.where(weight == 0, INF, weight.abs().log2()).to(weight.dtype),)

    def plus(self, a: Value, b: Value) -> Value:
        return (torch.minimum(a[0], b[0]),)

    def times(self, a: Value, b: Value) -> Value:
        return (a[0] + b[0],)


@dataclass(frozen=True)
class Longest(Semiring):
    """(max, +) of lengths: a derivative that is not 0 is of length 0."""

    name: str = "LONGEST"
    zero: tuple[float, ...] = (-INF,)
    one: tuple[float, ...] = (0.0,)

    def lift(self, weight: Tensor) -> Value:
        return (torch.where(weight == 0, -INF, 0.0).to(weight.dtype),)

    def plus(self, a: Value, b: Value) -> Value:
        return (torch.maximum(a[0], b[0]),)

    def times(self, a: Value, b: Value) -> Value:
        return (a[0] + b[0],)


@dataclass(frozen=True)
class Both(Semiring):
    """Two parts with two zeros: the logarithm of the largest path, and how many there are."""

    name: str = "BOTH"
    zero: tuple[float, ...] = (-INF, 0.0)
    one: tuple[float, ...] = (0.0, 1.0)

    def lift(self, weight: Tensor) -> Value:
        return weight.abs().log2(), (weight != 0).to(weight.dtype)

    def plus(self, a: Value, b: Value) -> Value:
        return torch.maximum(a[0], b[0]), a[1] + b[1]

    def times(self, a: Value, b: Value) -> Value:
        return a[0] + b[0], a[1] * b[1]


OWN: list[Semiring] = [LogMax(), LogMin(), Longest(), Both()]
EVERY = [*BUILT_IN, *OWN]


def title(semiring: Semiring) -> str:
    options = [name for name in ("exact", "log") if getattr(semiring, name, False)]
    return " ".join([semiring.name, *options])


every = pytest.mark.parametrize("semiring", EVERY, ids=title)


# Values ------------------------------------------------------------------------------------------


def pool(semiring: Semiring) -> list[float]:
    """Derivatives whose values add and multiply without rounding."""
    whole = [0.0, 1.0, -1.0, 2.0, -2.0, 4.0, -8.0]
    logarithms = semiring in OWN or getattr(semiring, "log", False)
    return whole if logarithms else [*whole, 3.0, -3.0, 5.0]


def derivatives(semiring: Semiring, *shape: int) -> st.SearchStrategy[Tensor]:
    n = math.prod(shape)
    return st.lists(st.sampled_from(pool(semiring)), min_size=n, max_size=n).map(
        lambda drawn: torch.tensor(drawn, dtype=torch.float64).reshape(shape)
    )


def made(semiring: Semiring, weights: Tensor) -> Value:
    """``⊕ₜ ⊗ᶠ lift(weights[t, f])``: a sum of products of lifts."""
    terms = [reduce(semiring.times, map(semiring.lift, term)) for term in weights]
    return reduce(semiring.plus, terms)


def values(semiring: Semiring, *shape: int) -> st.SearchStrategy[Value]:
    return derivatives(semiring, 2, 2, *shape).map(lambda weights: made(semiring, weights))


def some_value(semiring: Semiring, *shape: int, seed: int = 0) -> Value:
    """A value of the semiring, of any shape, from a seed."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.tensor(pool(semiring), dtype=torch.float64)
    chosen = torch.randint(len(numbers), (2, 2, *shape), generator=generator)
    return made(semiring, numbers[chosen])


def constant(semiring: Semiring, numbers: Sequence[float], shape: Sequence[int] = ()) -> Value:
    """``zero`` or ``one`` as a value."""
    like = semiring.lift(torch.ones((), dtype=torch.float64))
    return tuple(part.new_full(tuple(shape), n) for part, n in zip(like, numbers))


def at(x: Value, *place: Any) -> Value:
    return tuple(part[place] for part in x)


def total(semiring: Semiring, some: Iterable[Value]) -> Value:
    """⊕, one by one from the left."""
    return reduce(semiring.plus, some, constant(semiring, semiring.zero))


def assert_same(semiring: Semiring, a: Value, b: Value) -> None:
    assert len(a) == len(b)
    for x, y in zip(a, b):
        assert x.shape == y.shape
        assert x.dtype == y.dtype
        if semiring == ENTROPY:
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12 * (1 + float(largest(a, b))))
        else:
            assert torch.equal(x, y), (a, b)


def largest(*some: Value) -> Tensor:
    return torch.cat(
        [part.abs().double().reshape(-1) for x in some for part in x] + [torch.zeros(1)]
    ).max()


# Laws --------------------------------------------------------------------------------------------

Sides = tuple[Value, Value]
LAWS: dict[str, Callable[[Semiring, Value, Value, Value], Sides]] = {
    "plus is associative": lambda s, a, b, c: (
        s.plus(s.plus(a, b), c), s.plus(a, s.plus(b, c))
    ),
    "plus is commutative": lambda s, a, b, c: (s.plus(a, b), s.plus(b, a)),
    "zero is neutral": lambda s, a, b, c: (s.plus(a, zero(s)), a),
    "times is associative": lambda s, a, b, c: (
        s.times(s.times(a, b), c), s.times(a, s.times(b, c))
    ),
    "times is commutative": lambda s, a, b, c: (s.times(a, b), s.times(b, a)),
    "one is neutral": lambda s, a, b, c: (s.times(a, one(s)), a),
    "one is neutral on the left": lambda s, a, b, c: (s.times(one(s), a), a),
    "times distributes": lambda s, a, b, c: (
        s.times(a, s.plus(b, c)), s.plus(s.times(a, b), s.times(a, c))
    ),
    "times distributes on the right": lambda s, a, b, c: (
        s.times(s.plus(b, c), a), s.plus(s.times(b, a), s.times(c, a))
    ),
    "zero annihilates": lambda s, a, b, c: (s.times(a, zero(s)), zero(s, a[0].shape)),
    "zero annihilates on the left": lambda s, a, b, c: (
        s.times(zero(s), a), zero(s, a[0].shape)
    ),
}  # fmt: skip


def zero(semiring: Semiring, shape: Sequence[int] = ()) -> Value:
    return constant(semiring, semiring.zero, shape)


def one(semiring: Semiring, shape: Sequence[int] = ()) -> Value:
    return constant(semiring, semiring.one, shape)


@every
@pytest.mark.parametrize("law", LAWS)
@settings(max_examples=few(5, 12))
@given(st.data())
def test_laws(semiring: Semiring, law: str, data: st.DataObject) -> None:
    a, b, c = (data.draw(values(semiring, 4)) for _ in range(3))
    assert_same(semiring, *LAWS[law](semiring, a, b, c))


@every
@settings(max_examples=few(15, 40))
@given(st.data())
def test_lift_multiplies(semiring: Semiring, data: st.DataObject) -> None:
    a, b = (data.draw(derivatives(semiring, 6)) for _ in range(2))
    lift = semiring.lift
    assert_same(semiring, lift(a * b), semiring.times(lift(a), lift(b)))


@every
def test_lift_of_one_and_of_zero(semiring: Semiring) -> None:
    ones = torch.ones(3, dtype=torch.float64)
    assert_same(semiring, semiring.lift(ones), one(semiring, [3]))
    assert_same(semiring, semiring.lift(ones * 0), zero(semiring, [3]))
    assert_same(semiring, semiring.lift(ones * -0.0), zero(semiring, [3]))


def test_entropy_of_nothing_is_zero() -> None:
    """0·log 0 = 0, and no path has no entropy."""
    none = ENTROPY.lift(torch.zeros(2))
    assert torch.equal(none[1], torch.zeros(2))
    assert torch.equal(ENTROPY.entropy(none), torch.zeros(2))
    with_zero = ENTROPY.plus(ENTROPY.lift(torch.tensor([0.25, -8.0])), none)
    assert torch.equal(ENTROPY.entropy(with_zero), torch.zeros(2))


@settings(max_examples=few(15, 50))
@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8))
def test_entropy_is_that_of_the_distribution_of_paths(weights: list[float]) -> None:
    w = torch.tensor(weights, dtype=torch.float64)
    value = ENTROPY.fold(ENTROPY.lift(-w), 0)
    p = w / w.sum()
    assert float(ENTROPY.entropy(value)) == pytest.approx(float(-(p * p.log()).sum()), abs=1e-9)


def test_extremes_keep_both_ends() -> None:
    """A signed maximum alone loses the path that a negative derivative would make largest."""
    value = EXTREMES.plus(EXTREMES.lift(torch.tensor(2.0)), EXTREMES.lift(torch.tensor(-5.0)))
    assert value == (torch.tensor(2.0), torch.tensor(-5.0))
    turned = EXTREMES.times(EXTREMES.lift(torch.tensor(-3.0)), value)
    assert turned == (torch.tensor(15.0), torch.tensor(-6.0))


# What follows from plus and times: of the class, of the base class, and by hand ------------------


def each_way(semiring: Semiring, name: str, *arguments: Any) -> Value:
    """The result of an operation, after a look at that of the base class."""
    found: Value = getattr(semiring, name)(*arguments)
    assert_same(semiring, found, getattr(Semiring, name)(semiring, *arguments))
    return found


@every
@pytest.mark.parametrize("n", [0, 1, 2, 3, 7, 8])
def test_fold(semiring: Semiring, n: int) -> None:
    for dim in (0, 1, -1, -3):
        shape = [2, 3, 2]
        shape[dim] = n
        x = some_value(semiring, *shape, seed=n)
        found = each_way(semiring, "fold", x, dim)
        lines = tuple(part.movedim(dim, 0) for part in x)
        assert found[0].shape == lines[0].shape[1:]
        for place in itertools.product(*map(range, found[0].shape)):
            wanted = total(semiring, (at(lines, j, *place) for j in range(n)))
            assert_same(semiring, at(found, *place), wanted)


@every
@settings(max_examples=few(5, 12))
@given(st.data(), st.sets(st.integers(0, 2)), st.booleans())
def test_reduce(semiring: Semiring, data: st.DataObject, dims: set[int], negative: bool) -> None:
    x = data.draw(values(semiring, 2, 3, 2))
    found = each_way(semiring, "reduce", x, [d - 3 if negative else d for d in sorted(dims)])
    assert found[0].shape == tuple(1 if d in dims else n for d, n in enumerate((2, 3, 2)))
    for place in itertools.product(*map(range, found[0].shape)):
        over = [range(n) if d in dims else [place[d]] for d, n in enumerate((2, 3, 2))]
        wanted = total(semiring, (at(x, *line) for line in itertools.product(*over)))
        assert_same(semiring, at(found, *place), wanted)


@every
@pytest.mark.parametrize("shape", [(2, 0), (0, 2), (0, 0)])
def test_reduce_of_nothing_is_zero(semiring: Semiring, shape: tuple[int, int]) -> None:
    for dims in ([0], [1], [0, 1], []):
        kept = [1 if d in dims else n for d, n in enumerate(shape)]
        found = each_way(semiring, "reduce", some_value(semiring, *shape), dims)
        assert_same(semiring, found, zero(semiring, kept))


@every
@settings(max_examples=few(10, 25))
@given(st.data(), st.integers(0, 9), st.integers(0, 4))
def test_scatter(semiring: Semiring, data: st.DataObject, n: int, size: int) -> None:
    x = data.draw(values(semiring, n))
    target = data.draw(st.lists(st.integers(-1, size - 1), min_size=n, max_size=n))
    places = torch.tensor(target, dtype=torch.int64)
    found = each_way(semiring, "scatter", x, places, size)
    assert found[0].shape == (size,)
    for i in range(size):
        wanted = total(semiring, (at(x, j) for j in range(n) if target[j] == i))
        assert_same(semiring, at(found, i), wanted)


@every
@pytest.mark.parametrize("n", [0, 1, 2, 5, 8])
def test_scan(semiring: Semiring, n: int) -> None:
    for dim in (0, 1, -1, -2):
        shape = [3, 3]
        shape[dim] = n
        x = some_value(semiring, *shape, seed=n)
        found = each_way(semiring, "scan", x, dim)
        lines, sums = (tuple(part.movedim(dim, 0) for part in value) for value in (x, found))
        for i, other in itertools.product(range(n), range(3)):
            wanted = total(semiring, (at(lines, j, other) for j in range(i + 1)))
            assert_same(semiring, at(sums, i, other), wanted)


SPECS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "mk,kn->mn": ((2, 3), (3, 2)),
    "kn,mk->mn": ((3, 2), (2, 3)),
    "bmk,bkn->bmn": ((2, 1, 2), (2, 2, 2)),
    "bkm,nbk->mnb": ((2, 3, 2), (2, 2, 3)),
    "k,k->": ((4,), (4,)),
    "mk,k->m": ((2, 3), (3,)),
    "j,ij->i": ((3,), (2, 3)),
    "m,n->mn": ((2,), (2,)),
    "n,n->n": ((3,), (3,)),
    ",->": ((), ()),
    ",k->k": ((), (3,)),
    "jmk,kj->m": ((2, 2, 3), (3, 2)),
    "mk,n->mn": ((2, 3), (2,)),
}
EMPTY: dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]] = {
    "nothing to sum": ("mk,kn->mn", (2, 0), (0, 2)),
    "no lines": ("mk,kn->mn", (0, 2), (2, 3)),
    "no columns": ("mk,kn->mn", (2, 2), (2, 0)),
    "no batch": ("bmk,bkn->bmn", (0, 2, 2), (0, 2, 3)),
    "nothing at all": ("mk,kn->mn", (0, 0), (0, 0)),
}


def contracted(semiring: Semiring, spec: str, x: Value, w: Tensor) -> Value:
    """One product after the other, summed one by one from the left."""
    a, rest = spec.split(",")
    b, out = rest.split("->")
    size = dict(zip(a, x[0].shape)) | dict(zip(b, w.shape))
    inner = sorted({*a, *b} - {*out})
    shape = [size[letter] for letter in out]
    found = zero(semiring, shape)
    for place in itertools.product(*map(range, shape)):
        parts = []
        for under in itertools.product(*(range(size[letter]) for letter in inner)):
            where = dict(zip([*out, *inner], [*place, *under]))
            i, j = (tuple(where[c] for c in word) for word in (a, b))
            parts.append(semiring.times(at(x, *i), semiring.lift(w[j])))
        for part, number in zip(found, total(semiring, parts)):
            part[place] = number
    return found


@every
@pytest.mark.parametrize("spec", SPECS)
@settings(max_examples=4)
@given(st.data())
def test_contract(semiring: Semiring, spec: str, data: st.DataObject) -> None:
    x, w = (data.draw(f(semiring, *s)) for f, s in zip((values, derivatives), SPECS[spec]))
    assert_same(
        semiring, each_way(semiring, "contract", spec, x, w), contracted(semiring, spec, x, w)
    )


@every
@pytest.mark.parametrize("case", EMPTY)
def test_contract_of_nothing(semiring: Semiring, case: str) -> None:
    spec, x_shape, w_shape = EMPTY[case]
    x, w = some_value(semiring, *x_shape), torch.ones(w_shape, dtype=torch.float64)
    assert_same(
        semiring, each_way(semiring, "contract", spec, x, w), contracted(semiring, spec, x, w)
    )


@pytest.mark.parametrize("limit", [1, 5, 12, 40])
@every
def test_contract_in_chunks(
    semiring: Semiring, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = some_value(semiring, 2, 3, 4)
    w = derivatives_of(semiring, 2, 4, 5)
    wanted = Semiring.contract(semiring, "bmk,bkn->bmn", x, w)
    monkeypatch.setattr("gradtrace.semirings.base.CHUNK_PRODUCTS", limit)
    assert_same(semiring, Semiring.contract(semiring, "bmk,bkn->bmn", x, w), wanted)


def derivatives_of(semiring: Semiring, *shape: int, seed: int = 1) -> Tensor:
    numbers = torch.tensor(pool(semiring), dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    return numbers[torch.randint(len(numbers), shape, generator=generator)]


@every
def test_letters_of_the_weight_alone_are_summed_first(semiring: Semiring) -> None:
    """Two elements have one weight: the derivative, whatever it is a sum of."""
    x = some_value(semiring, 3)
    w = torch.tensor([[1.0, -1.0], [2.0, 2.0], [3.0, -1.0]], dtype=torch.float64)
    wanted = semiring.times(x, semiring.lift(w.sum(1)))
    assert_same(semiring, semiring.contract("m,mk->m", x, w), wanted)


@every
def test_linear_is_times(semiring: Semiring) -> None:
    x, w = some_value(semiring, 5), derivatives_of(semiring, 5)
    pieces = semiring.linear(w)
    if pieces is None:
        return
    out = [torch.zeros_like(part) for part in x]
    for i, o, weight in pieces:
        out[o] = out[o] + x[i] * weight
    assert_same(semiring, tuple(out), semiring.times(x, semiring.lift(w)))


@pytest.mark.parametrize("semiring", [SUM, ABS, COUNT, Count(exact=True), ENTROPY], ids=title)
def test_sums_are_linear(semiring: Semiring) -> None:
    assert semiring.linear(torch.ones(2)) is not None


@every
def test_zeros(semiring: Semiring) -> None:
    like = some_value(semiring, 2)
    for shape in ([], [3], [0, 2], torch.Size([2, 1])):
        assert_same(semiring, each_way(semiring, "zeros", shape, like), zero(semiring, shape))


@every
def test_arguments_are_left_alone(semiring: Semiring) -> None:
    x, w = some_value(semiring, 3, 4), derivatives_of(semiring, 4, 2)
    before = tuple(part.clone() for part in x), w.clone()
    semiring.plus(x, x)
    semiring.times(x, x)
    semiring.reduce(x, [0])
    semiring.scan(x, 1)
    semiring.fold(x, 0)
    semiring.scatter(at(x, 0), torch.tensor([0, 0, -1, 1]), 2)
    semiring.contract("mk,kn->mn", x, w)
    semiring.weigh(w)
    semiring.finish(x, 0)
    assert_same(semiring, x, before[0])
    assert torch.equal(w, before[1])


@every
def test_lines_in_any_layout(semiring: Semiring) -> None:
    """Transposed and strided values are the same values."""
    x = some_value(semiring, 3, 4)
    turned = tuple(part.t().contiguous().t() for part in x)
    apart = tuple(torch.stack([part, part], -1)[..., 0] for part in x)
    w = derivatives_of(semiring, 4, 2)
    for other in (turned, apart):
        for name, arguments in (("fold", (0,)), ("fold", (1,)), ("scan", (1,)), ("reduce", ([0],))):
            op = getattr(semiring, name)
            assert_same(semiring, op(other, *arguments), op(x, *arguments))
        found = semiring.contract("mk,kn->mn", other, w.t().contiguous().t())
        assert_same(semiring, found, semiring.contract("mk,kn->mn", x, w))


# What a semiring is as an object -----------------------------------------------------------------


@every
def test_a_semiring_is_a_frozen_value(semiring: Semiring) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        semiring.zero = (1.0,)
    again = dataclasses.replace(semiring)  # type: ignore[type-var]
    assert again == semiring
    assert hash(again) == hash(semiring)
    assert {semiring: 1}[again] == 1
    assert len(semiring.zero) == len(semiring.one) == len(semiring.lift(torch.ones(1)))


def test_semirings_differ() -> None:
    different = [*EVERY, Abs(log=True), Count(log=True), TopK(2), TopK(3, log=True)]
    assert len(set(different)) == len(different)


def test_every_semiring_of_the_module_is_tested() -> None:
    found = [value for value in vars(semirings).values() if isinstance(value, Semiring)]
    assert all(value in BUILT_IN for value in found)
    classes = {getattr(semirings, name) for name in semirings.__all__}
    concrete = {c for c in classes if isinstance(c, type) and issubclass(c, Semiring)} - {Semiring}
    assert concrete == {type(semiring) for semiring in BUILT_IN}


def test_five_operations_must_be_there() -> None:
    class Half(Semiring):
        name, zero, one = "HALF", (0.0,), (1.0,)

        def lift(self, weight: Tensor) -> Value:
            return (weight,)

    with pytest.raises(TypeError, match="plus"):
        Half()  # type: ignore[abstract]


@pytest.mark.parametrize("k", [0, -1, 1.5, "2", None])
def test_topk_of_no_number_is_refused(k: Any) -> None:
    with pytest.raises(GradtraceError, match="from 1 on"):
        TopK(k)


# TopK against all products -----------------------------------------------------------------------


@settings(max_examples=few(25, 60))
@given(st.integers(1, 6), st.data())
def test_topk_is_the_k_largest_of_all_paths(k: int, data: st.DataObject) -> None:
    """Fewer paths than k leave zeros; equal ones count one by one."""
    top = TopK(k)
    paths = st.lists(st.sampled_from([0.0, 1.0, -1.0, 2.0, -3.0, 5.0]), max_size=7)
    left, right = (
        torch.tensor(data.draw(paths), dtype=torch.float64).reshape(-1) for _ in range(2)
    )
    a, b = (top.fold(top.lift(w), 0) for w in (left, right))

    def best(weights: Tensor) -> list[float]:
        ordered = sorted(weights.abs().tolist(), reverse=True)
        return [*ordered, *[0.0] * k][:k]

    assert torch.stack(a).tolist() == best(left)
    assert torch.stack(top.plus(a, b)).tolist() == best(torch.cat([left, right]))
    assert torch.stack(top.times(a, b)).tolist() == best(torch.outer(left, right).reshape(-1))


def test_topk_of_a_small_graph() -> None:
    x = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    loss = 2 * x + 3 * x - 5 * x
    found = gradtrace.backward(loss, TopK(2), names={"x": x})["x"]
    assert [float(part) for part in found] == [5.0, 3.0]
    found = gradtrace.backward(loss, TopK(5), names={"x": x})["x"]
    assert [float(part) for part in found] == [5.0, 3.0, 2.0, 0.0, 0.0]


# NaN and infinity --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "semiring", [MAX, Max(log=True), TopK(1), TopK(3), EXTREMES, SUM, ABS], ids=title
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_nan_wins(semiring: Semiring, place: int) -> None:
    """NaN is never lost: what it takes part in is NaN."""
    weight = torch.tensor([1.0, -7.0, 0.5])
    weight[place] = NAN
    x = semiring.lift(weight)
    where = torch.tensor([1, 1, 1])
    assert semiring.plus(at(x, place), semiring.lift(torch.tensor(9.0)))[0].isnan()
    assert semiring.plus(semiring.lift(torch.tensor(9.0)), at(x, place))[0].isnan()
    assert semiring.times(at(x, place), semiring.lift(torch.tensor(2.0)))[0].isnan()
    assert semiring.fold(x, 0)[0].isnan()
    assert semiring.reduce(x, [0])[0].isnan().all()
    assert semiring.scatter(x, where, 2)[0].isnan().tolist() == [False, True]
    assert semiring.scan(x, 0)[0].isnan().tolist() == [n >= place for n in range(3)]
    assert semiring.contract("k,k->", x, torch.tensor([2.0, 2.0, 2.0]))[0].isnan()
    assert semiring.contract("k,k->", semiring.lift(torch.ones(3)), weight)[0].isnan()


@pytest.mark.parametrize("semiring", [MAX, TopK(1), TopK(3), ABS], ids=title)
def test_infinity_is_largest(semiring: Semiring) -> None:
    x = semiring.lift(torch.tensor([1.0, -INF, 3.0]))
    for found in (
        semiring.fold(x, 0),
        semiring.plus(at(x, 1), at(x, 2)),
        at(semiring.scatter(x, torch.tensor([0, 0, 0]), 1), 0),
        at(semiring.scan(x, 0), 2),
    ):
        assert float(found[0]) == INF


def test_infinities_of_either_sign() -> None:
    x = EXTREMES.lift(torch.tensor([1.0, -INF, 3.0]))
    assert EXTREMES.fold(x, 0) == (torch.tensor(3.0), torch.tensor(-INF))


INFINITE = [pytest.param(s, id=title(s)) for s in (SUM, ABS, MAX, TopK(1), TopK(3), EXTREMES)]


@pytest.mark.parametrize("semiring", INFINITE)
def test_infinity_times_a_number_is_infinite(semiring: Semiring) -> None:
    for weight in (torch.tensor(2.0), torch.tensor(-2.0)):
        found = semiring.times(semiring.lift(torch.tensor(-INF)), semiring.lift(weight))
        wanted = semiring.lift(weight * -INF)
        assert [float(part) for part in found] == [float(part) for part in wanted]


# Precision ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@every
def test_half_precision_is_computed_in_single(semiring: Semiring, dtype: torch.dtype) -> None:
    weight = torch.tensor([3.0, -0.25, 0.0], dtype=dtype)
    found = semiring.weigh(weight)
    wanted = semiring.lift(weight if semiring == SUM else weight.float())
    for a, b in zip(found, wanted):
        assert a.dtype is b.dtype
        assert torch.equal(a, b)
    half = {torch.float16, torch.bfloat16}
    assert semiring == SUM or not half & {part.dtype for part in found}


@pytest.mark.parametrize("semiring", [ABS, MAX, EXTREMES, TopK(2), ENTROPY, *OWN], ids=title)
def test_products_of_half_precision_do_not_overflow(semiring: Semiring) -> None:
    weight = torch.full((2, 2), 256.0, dtype=torch.float16)  # 256² is beyond float16
    x = semiring.weigh(weight)
    for name in ("contract", "Semiring"):
        op = semiring.contract if name == "contract" else lambda *a: Semiring.contract(semiring, *a)
        found = op("mk,kn->mn", x, weight)
        wanted = contracted(semiring, "mk,kn->mn", semiring.lift(weight.double()), weight.double())
        for a, b in zip(found, wanted):
            assert a.dtype is torch.float32
            torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("semiring", [SUM, ABS, MAX, EXTREMES, TopK(2), ENTROPY, *OWN], ids=title)
def test_the_precision_of_the_value_is_kept(semiring: Semiring, dtype: torch.dtype) -> None:
    x, w = semiring.lift(torch.ones(2, 3, dtype=dtype)), torch.ones(3, 2, dtype=dtype)
    for found in (
        semiring.fold(x, 0),
        semiring.reduce(x, [0]),
        semiring.scan(x, 1),
        semiring.scatter(at(x, 0), torch.tensor([0, 0, -1]), 2),
        semiring.contract("mk,kn->mn", x, w),
        semiring.zeros([2], x),
    ):
        assert {part.dtype for part in found} == {dtype}


def test_sum_settles_in_the_dtype_of_the_step() -> None:
    x = (torch.ones(2, dtype=torch.float32),)
    assert SUM.settle(x, torch.float16)[0].dtype is torch.float16
    assert MAX.settle(x, torch.float16)[0].dtype is torch.float32


# Ranges ------------------------------------------------------------------------------------------

SCALED: list[Semiring] = [ABS, MAX, EXTREMES, TopK(1), TopK(3), ENTROPY, COUNT]
scaled = pytest.mark.parametrize("semiring", SCALED, ids=title)


@scaled
@pytest.mark.parametrize("shift", [1, -1, 24, -24, 97, -97, 300, -300, 700])
def test_scaling_is_exact_and_goes_back(semiring: Semiring, shift: int) -> None:
    x = some_value(semiring, 5)
    there = semiring.scale(x, shift)
    for part, moved in list(zip(x, there))[: 1 if semiring == ENTROPY else None]:
        assert torch.equal(moved, part * 2.0**shift)
    if semiring != ENTROPY or abs(shift) < 100:
        assert_same(semiring, semiring.scale(there, -shift), x)


@scaled
@pytest.mark.parametrize("shift", [1, -3, 20])
def test_scaling_goes_through_plus_and_times(semiring: Semiring, shift: int) -> None:
    """What the engine relies on: 2ⁿ·(a ⊕ b) = 2ⁿ·a ⊕ 2ⁿ·b, and 2ⁿ·(a ⊗ b) = (2ⁿ·a) ⊗ b."""
    a, b = some_value(semiring, 5), some_value(semiring, 5, seed=1)
    scale, plus, times = semiring.scale, semiring.plus, semiring.times
    assert_same(semiring, scale(plus(a, b), shift), plus(scale(a, shift), scale(b, shift)))
    assert_same(semiring, scale(times(a, b), shift), times(scale(a, shift), b))
    if semiring != COUNT:  # a number of paths has nothing to do with their weight
        two = semiring.lift(torch.tensor(2.0**shift, dtype=torch.float64))
        assert_same(semiring, scale(a, shift), times(a, two))


@scaled
def test_size_is_the_largest_magnitude(semiring: Semiring) -> None:
    weight = torch.tensor([0.0, -6.0, 4.0], dtype=torch.float64)
    x = semiring.lift(weight)
    assert semiring.size(x) == (1.0 if semiring == COUNT else 6.0)
    assert semiring.size(semiring.scale(x, 10)) == semiring.size(x) * 1024
    assert semiring.size(semiring.lift(weight * 0)) == 0.0
    assert semiring.size(semiring.lift(weight[:0])) == 1.0


@pytest.mark.parametrize("semiring", [SUM, BOOL, Count(exact=True), *OWN], ids=title)
def test_what_cannot_be_scaled_has_size_one(semiring: Semiring) -> None:
    assert semiring.size(semiring.lift(torch.tensor([1e30, 1e-30]))) == 1.0


def test_a_semiring_without_scale_says_so() -> None:
    with pytest.raises(NotImplementedError, match="LOGMAX cannot be scaled"):
        LogMax().scale((torch.ones(1),), 3)


@every
def test_finish_without_exponent_changes_nothing(semiring: Semiring) -> None:
    x = some_value(semiring, 4)
    if semiring != Count(exact=True):
        assert_same(semiring, semiring.finish(x, 0), x)


@pytest.mark.parametrize("semiring", [ABS, MAX, EXTREMES, TopK(2), ENTROPY], ids=title)
def test_finish_takes_double_precision_where_single_ends(semiring: Semiring) -> None:
    for power in (200, -200):
        found = semiring.finish(semiring.lift(torch.tensor([0.75, 0.0, -0.5])), power)
        wanted = semiring.lift(torch.tensor([0.75, 0.0, -0.5], dtype=torch.float64) * 2.0**power)
        for a, b in zip(found, wanted):
            assert a.dtype is torch.float64
            torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


def test_finish_keeps_all_digits() -> None:
    x = torch.tensor([1.2345678])
    found = MAX.finish((x,), -140)[0]
    assert torch.equal(found.double() * 2.0**140, x.double())


def test_finish_of_entropy_is_right_where_it_is_zero() -> None:
    """One path of weight 1, held as a half: (1, 0) is no value that got lost."""
    half = torch.tensor([0.5], dtype=torch.float64)
    mass, spread = ENTROPY.finish(ENTROPY.lift(half), 1)
    assert (float(mass), float(spread)) == (1.0, 0.0)


def test_a_path_of_weight_one_that_was_small_on_the_way() -> None:
    x, loss = repeated([2.0**-12, 2.0**-12, 2.0**12, 2.0**12], torch.float64)
    mass, spread = gradtrace.backward(loss, ENTROPY, names={"x": x})["x"]
    assert float(mass) == 1.0
    assert float(spread) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("semiring", [Abs(log=True), Count(log=True)], ids=title)
@pytest.mark.parametrize("power", [0, 5, -3000, 10**6])
def test_finish_gives_logarithms(semiring: Semiring, power: int) -> None:
    x = semiring.zeros([3], semiring.lift(torch.ones(1)))
    x[0][:2] = torch.tensor([8.0, 0.5])
    found = semiring.finish(x, power)
    assert found[0].tolist() == [power + 3.0, power - 1.0, -INF]
    assert {part.dtype for part in found} == {torch.float64}


@pytest.mark.parametrize("semiring", [Max(log=True), TopK(2, log=True)], ids=title)
def test_logarithms_from_the_start(semiring: Semiring) -> None:
    """Element by element, in float64, whatever the derivatives are in."""
    found = semiring.lift(torch.tensor([8.0, -0.5, 0.0], dtype=torch.float32))
    assert found[0].tolist() == [3.0, -1.0, -INF]
    assert {part.dtype for part in found} == {torch.float64}
    assert semiring.size(found) == 1.0
    assert_same(semiring, semiring.finish(found, 0), found)


@pytest.mark.parametrize("semiring", [ABS, MAX, COUNT, EXTREMES, ENTROPY, TopK(2)], ids=title)
@pytest.mark.parametrize("power", [5000, -5000])
def test_finish_beyond_every_float_says_what_to_do(semiring: Semiring, power: int) -> None:
    x = semiring.lift(torch.tensor([0.75, 0.0], dtype=torch.float64))
    with pytest.raises(OutOfRange) as caught:
        semiring.finish(x, power)
    text = str(caught.value)
    assert semiring.name in text
    assert str(power) in text
    advised = re.search(r"gradtrace\.semirings\.\w+\(.*?\)", text)
    assert advised
    assert eval(advised.group(), {"gradtrace": gradtrace}).log


def test_infinite_values_stay_infinite() -> None:
    found = MAX.finish((torch.tensor([INF, NAN, 1.0]),), 3)[0]
    assert found[0] == INF
    assert found[1].isnan()
    assert found[2] == 8.0


# Counting ----------------------------------------------------------------------------------------


def doubled(times: int) -> tuple[Tensor, Tensor]:
    """A leaf with 2 to this power paths to the loss."""
    x = torch.tensor(1.0, requires_grad=True)
    y: Tensor = x
    for _ in range(times % 8):
        y = (y + y) * 0.5
    for _ in range(times // 8):
        y = y.expand(256).mean()
    return x, y


@pytest.mark.parametrize("power", [1, 24, 52, 53, 62])
def test_counts_are_exact_as_far_as_they_go(power: int) -> None:
    x, loss = doubled(power)
    found = gradtrace.backward(loss, Count(exact=True), names={"x": x})["x"]
    assert found.dtype is torch.int64
    assert int(found) == 2**power
    assert float(gradtrace.backward(loss, COUNT, names={"x": x})["x"]) == 2.0**power


def test_exact_counts_have_all_digits() -> None:
    """2⁶¹ + 3, which no float64 is."""
    x, y = doubled(61)
    loss = y + x + x + x
    found = gradtrace.backward(loss, Count(exact=True), names={"x": x})["x"]
    assert int(found) == 2**61 + 3


@pytest.mark.parametrize("power", [63, 64, 65, 1000])
def test_more_than_64_bits_of_paths_are_refused(power: int) -> None:
    x, loss = doubled(power)
    with pytest.raises(OutOfRange, match=r"paths.*COUNT.*Count\(log=True\)"):
        gradtrace.backward(loss, Count(exact=True), names={"x": x})
    assert float(gradtrace.backward(loss, COUNT, names={"x": x})["x"]) == 2.0**power


def test_counts_beyond_float64() -> None:
    x, loss = doubled(3000)
    with pytest.raises(OutOfRange, match="COUNT"):
        gradtrace.backward(loss, COUNT, names={"x": x})
    assert float(gradtrace.backward(loss, Count(log=True), names={"x": x})["x"]) == 3000.0


def test_exact_counts_through_a_convolution() -> None:
    x = torch.ones(1, 1, 3, requires_grad=True)
    y: Tensor = x
    for _ in range(5):
        y = y.expand(256, 1, 1, 3).sum(0)
    loss = torch.conv1d(y, torch.ones(1, 1, 3), padding=1).sum() + x.sum()
    found = gradtrace.backward(loss, Count(exact=True), names={"x": x})["x"]
    assert found.dtype is torch.int64
    assert found.flatten().tolist() == [2 * 2**40 + 1, 3 * 2**40 + 1, 2 * 2**40 + 1]


# Deep graphs -------------------------------------------------------------------------------------

DEEP = few(4_000, 10_000)


def repeated(factors: Iterable[float], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """A leaf and what becomes of it, times each of these in turn."""
    x = torch.tensor(1.0, dtype=dtype, requires_grad=True)
    y: Tensor = x
    for factor in factors:
        y = y * factor
    return x, y


def parts_of(found: Any) -> Value:
    return found if isinstance(found, tuple) else (found,)


DEPTHS: dict[str, tuple[Semiring, tuple[float, ...]]] = {
    "MAX": (Max(log=True), (-DEEP,)),
    "TopK": (TopK(2, log=True), (-DEEP, -INF)),
    "COUNT": (COUNT, (1.0,)),
    "COUNT log": (Count(log=True), (0.0,)),
    "LOGMAX": (LogMax(), (-DEEP,)),
}


def test_a_deep_chain() -> None:
    x, loss = repeated([0.5] * DEEP)
    program = programs.program(loss, names={"x": x})
    for name, (semiring, wanted) in DEPTHS.items():
        found = parts_of(run(program, semiring)[x])
        assert tuple(float(part) for part in found) == wanted, name
    with pytest.raises(OutOfRange, match=r"Max\(log=True\)"):
        run(program, MAX)


def test_backward_of_a_deep_chain() -> None:
    x, loss = repeated([0.5] * DEEP)
    assert float(gradtrace.backward(loss, Max(log=True), names={"x": x})["x"]) == -DEEP


@pytest.mark.parametrize("semiring", [Max(log=True), Abs(log=True)], ids=title)
def test_a_chain_that_grows(semiring: Semiring) -> None:
    x, loss = repeated([-(3.0**9), 2.0**10] * 200, torch.float64)
    found = gradtrace.backward(loss, semiring, names={"x": x})["x"]
    assert float(found) == pytest.approx(200 * (9 * math.log2(3.0) + 10), rel=1e-9)


def test_a_chain_out_and_back() -> None:
    """2⁻²⁰⁰⁰ on the way, 1 at the end: no float64 holds what lies between."""
    x, loss = repeated([2.0**-10] * 200 + [2.0**10] * 200)
    for semiring in (MAX, ABS, ENTROPY, TopK(2), EXTREMES):
        found = parts_of(gradtrace.backward(loss, semiring, names={"x": x})["x"])
        assert float(found[0]) == 1.0
        if semiring == ENTROPY:
            assert float(ENTROPY.entropy(found)) == pytest.approx(0.0, abs=1e-3)


@pytest.mark.parametrize("power", [-40, 40])
@pytest.mark.parametrize("short_first", [False, True])
def test_a_long_way_and_a_short_one_meet(power: int, short_first: bool) -> None:
    """Two values of unequal exponents are added up."""
    x = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    long = -(x * 2.0 ** (power // 2)) * 2.0 ** (power // 2)
    loss = 3 * x + long if short_first else long + 3 * x
    weights = sorted([3.0, 2.0**power], reverse=True)
    wanted: list[tuple[Semiring, tuple[float, ...]]] = [
        (MAX, (weights[0],)),
        (ABS, (3.0 + 2.0**power,)),
        (TopK(2), tuple(weights)),
        (EXTREMES, (3.0, -(2.0**power))),
        (COUNT, (2.0,)),
        (Max(log=True), (math.log2(weights[0]),)),
    ]
    for semiring, numbers in wanted:
        found = parts_of(gradtrace.backward(loss, semiring, names={"x": x})["x"])
        assert tuple(float(part) for part in found) == numbers
    value = gradtrace.backward(loss, ENTROPY, names={"x": x})["x"]
    both = ENTROPY.fold(ENTROPY.lift(torch.tensor(weights, dtype=torch.float64)), 0)
    for a, b in zip(value, both):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)


def layers(depth: int, kind: str) -> tuple[Tensor, Tensor, list[Tensor]]:
    """20 units a layer, weights small; the derivatives of each layer, in float64."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(20, generator=generator, dtype=torch.float32).requires_grad_()
    y, matrices = x, []
    for _ in range(depth):
        w = torch.randn(20, 20, generator=generator) / 20
        w[torch.rand(20, 20, generator=generator) < 0.1] = 0.0
        y = y @ w.T
        matrix = w.double()
        if kind == "tanh":
            y = y.tanh()
            slope = (1 - y.detach() ** 2).double()
            matrix = slope.unsqueeze(1) * matrix
        matrices.append(matrix)
    return x, y.sum(), matrices


@pytest.mark.parametrize("kind", ["linear", "tanh"])
def test_a_thousand_layers(kind: str) -> None:
    """Logarithms against (max, +) and whole numbers, layer by layer in Python's own arithmetic."""
    x, loss, matrices = layers(1000, kind)
    most = torch.zeros(20, dtype=torch.float64)
    count = [1] * 20
    for matrix in reversed(matrices):
        most = (matrix.abs().log2() + most.unsqueeze(1)).amax(0)
        there = (matrix != 0).tolist()
        count = [sum(c for c, row in zip(count, there) if row[j]) for j in range(20)]
    program = programs.program(loss, names={"x": x})
    found = run(program, Max(log=True))[x]
    torch.testing.assert_close(found, most, rtol=0, atol=1e-3)
    assert float(found.max()) < -1500
    first, second = run(program, TopK(2, log=True))[x]
    torch.testing.assert_close(first, most, rtol=0, atol=1e-3)
    assert bool((second <= first).all())
    assert bool((second > first - 20).all())
    found = run(program, Count(log=True))[x]
    wanted = torch.tensor([math.log2(c) for c in count], dtype=torch.float64)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    with pytest.raises(OutOfRange, match=r"Count\(log=True\)"):
        run(program, COUNT)


@pytest.mark.parametrize("semiring", [Max(log=True), TopK(2, log=True), LogMax()], ids=title)
@pytest.mark.parametrize("depth", [300, 5000])
def test_elements_that_decay_at_different_rates(semiring: Semiring, depth: int) -> None:
    assert rates_of(semiring, depth, 2.0**-10) == [0.0, -float(depth)]


def rates_of(semiring: Semiring, depth: int, rate: float) -> list[float]:
    """Two elements of one tensor, of which one stays as it is."""
    x = torch.ones(2, requires_grad=True)
    y: Tensor = x
    for _ in range(depth // 10):
        y = y * torch.tensor([1.0, rate])
    found = parts_of(gradtrace.backward(y.sum(), semiring, names={"x": x})["x"])
    return [float(number) for number in found[0]]


PER_TENSOR = "one exponent a tensor: what is far below the largest becomes 0, without notice"


@pytest.mark.xfail(reason=PER_TENSOR, strict=True)
@pytest.mark.parametrize("rate", [-10, 10])
def test_sums_of_elements_at_different_rates(rate: int) -> None:
    assert rates_of(Abs(log=True), 2000, 2.0**rate) == [0.0, rate * 200.0]


@pytest.mark.xfail(reason=PER_TENSOR, strict=True)
def test_counts_of_elements_at_different_rates() -> None:
    """One path to the first element, 2¹²⁰⁰ to the second."""
    x = torch.ones(2, requires_grad=True)
    y = x[1]
    for _ in range(150):
        y = y.expand(256).mean()
    found = gradtrace.backward(x[0] + y, Count(log=True), names={"x": x})["x"]
    assert found.tolist() == [0.0, 1200.0]


def test_elements_without_a_target_do_not_all_go_to_one_place() -> None:
    target = torch.tensor([2, 0, -1, 2]).repeat(5000)
    at = places(target, 3)
    assert torch.equal(at[target >= 0], target[target >= 0])
    away = at[target < 0]
    assert away.min() >= 3 and away.max() < 3 + UNTARGETED
    assert away.bincount().max() <= 5000 // UNTARGETED * 4 + 4


@pytest.mark.parametrize("f", [torch.round, torch.sign, torch.floor], ids=lambda f: f.__name__)
def test_leaves_behind_steps_have_no_path(f: Callable[[Tensor], Tensor]) -> None:
    """They take part, as in SUM: their value is the semiring's zero."""
    a, b = (torch.tensor([1.5, -2.5], requires_grad=True) for _ in range(2))
    loss = (f(a * 2) * b + 0 * b).sum()
    found = gradtrace.backward(loss, names={"a": a, "b": b})
    for semiring in (MAX, ABS, COUNT, BOOL, EXTREMES, ENTROPY, TopK(2)):
        values = gradtrace.backward(loss, semiring, names={"a": a, "b": b}, leaves=["b", "a"])
        assert set(values) == set(found)
        for part in values["a"] if isinstance(values["a"], tuple) else (values["a"],):
            assert part.shape == a.shape and not part.any()
    for rule in ("greedy", "edge", "viterbi"):
        trace = gradtrace.trace(loss, names={"a": a, "b": b}, rule=rule)
        assert torch.equal(trace.gradients["a"], found["a"]) and not found["a"].any()
        assert trace.path("b", 0).weight == found["b"][0]
        with pytest.raises(GradtraceError, match=r"a\[1\] has no path: every contribution to its"):
            trace.path("a", 1)
        assert trace.influence().about["losses"] == 1
    both = gradtrace.backward((a + f(a)).sum(), MAX, names={"a": a})
    assert both["a"].tolist() == [1.0, 1.0]


LEAVES_WITHOUT_A_WAY: dict[str, Callable[[Tensor], Tensor]] = {
    "an empty part, rounded": lambda a: a[:0].round(),
    "an empty part, joined": lambda a: torch.cat([torch.zeros(2), a[:0]]),
    "a hook that gives zeros": lambda a: (a.register_hook(torch.zeros_like), a * 2)[1],
    "a hook that gives zeros in between": lambda a: _hooked(a * 2),
}


def _hooked(x: Tensor) -> Tensor:
    x.register_hook(torch.zeros_like)
    return x.tanh()


@pytest.mark.parametrize("f", LEAVES_WITHOUT_A_WAY.values(), ids=LEAVES_WITHOUT_A_WAY)
def test_leaves_without_a_way_take_part(f: Callable[[Tensor], Tensor]) -> None:
    a, b = torch.randn(2, requires_grad=True), torch.randn(2, requires_grad=True)
    loss = f(a).sum() + (b * 3).sum()
    wanted = gradtrace.backward(loss, names={"a": a, "b": b})
    assert not wanted["a"].any()
    for semiring in (MAX, COUNT, TopK(2)):
        assert set(gradtrace.backward(loss, semiring, names={"a": a, "b": b})) == {"a", "b"}
    for _ in range(3):  # recorded, replayed, by a kept plan
        trace = gradtrace.trace(loss, names={"a": a, "b": b})
        assert torch.equal(trace.gradients["a"], wanted["a"])
        assert trace.influence("operators").about["losses"] == 1


BAD: dict[str, Callable[[Tensor], Tensor]] = {
    "a number": lambda a: a * math.nan,
    "a root of 0": lambda a: (a * 0).sqrt(),
    "softmax": lambda a: (a * math.inf).softmax(0),
    "a loss": lambda a: a.log() - a.log(),
    "activations": lambda a: (a * 1e30) * (a * 1e30) * a,
}


@pytest.mark.parametrize("f", BAD.values(), ids=BAD)
def test_nan_is_told_in_every_semiring(f: Callable[[Tensor], Tensor]) -> None:
    """In the words of SUM; COUNT and BOOL have no NaN in their values."""
    a = torch.tensor([0.0, 2.0], requires_grad=True)
    with pytest.raises(NonFinite) as plain:
        gradtrace.backward(f(a).sum(), names={"a": a})
    for semiring in (MAX, ABS, COUNT, BOOL, EXTREMES, ENTROPY, TopK(2), Max(log=True)):
        with pytest.raises(NonFinite) as found:
            gradtrace.backward(f(a).sum(), semiring, names={"a": a})
        assert str(found.value) == str(plain.value)
        gradtrace.backward(f(a).sum(), semiring, nonfinite="allow")


def test_numbers_that_are_not_finite_and_do_no_harm_are_allowed() -> None:
    """What no gradient is made of, and zeros of a semiring of logarithms."""
    a = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    masked = a.masked_fill(torch.tensor([False, True, False]), -math.inf)
    for semiring in (SUM, MAX, COUNT, Max(log=True)):
        gradtrace.backward(masked.log_softmax(0)[0], semiring)
        gradtrace.backward(a.sum() + math.inf, semiring)
        if semiring != SUM:  # whose gradient overflows, and no factor does
            assert gradtrace.backward((a[0] * 1e30) * 1e30, semiring)
