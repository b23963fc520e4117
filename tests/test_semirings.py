"""The laws of every semiring, and its fast methods against folds of ⊕ and ⊗.

Values are small whole numbers in float64, so that SUM is exact and laws are tested for equality.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import reduce
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradtrace import semirings
from gradtrace.semirings import SUM, Semiring

SEMIRINGS: list[Semiring] = [SUM]

numbers = st.integers(-16, 16)


def tensors(*shape: int) -> st.SearchStrategy[Tensor]:
    n = torch.Size(shape).numel()
    return st.lists(numbers, min_size=n, max_size=n).map(
        lambda values: torch.tensor(values, dtype=torch.float64).reshape(shape)
    )


def fold(semiring: Semiring, values: Iterable[Tensor]) -> Tensor:
    return reduce(semiring.plus, values, constant(semiring.zero))


def constant(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


every = pytest.mark.parametrize("semiring", SEMIRINGS, ids=lambda s: s.name)
values = tensors(5)


@every
@settings(max_examples=50, deadline=None)
@given(values, values, values)
def test_plus_is_a_commutative_monoid(semiring: Semiring, a: Tensor, b: Tensor, c: Tensor) -> None:
    plus = semiring.plus
    assert torch.equal(plus(plus(a, b), c), plus(a, plus(b, c)))
    assert torch.equal(plus(a, b), plus(b, a))
    assert torch.equal(plus(a, constant(semiring.zero)), a)


@every
@settings(max_examples=50, deadline=None)
@given(values, values, values)
def test_times_is_a_monoid(semiring: Semiring, a: Tensor, b: Tensor, c: Tensor) -> None:
    times = semiring.times
    assert torch.equal(times(times(a, b), c), times(a, times(b, c)))
    assert torch.equal(times(a, constant(semiring.one)), a)
    assert torch.equal(times(constant(semiring.one), a), a)


@every
@settings(max_examples=50, deadline=None)
@given(values, values, values)
def test_times_distributes_over_plus(semiring: Semiring, a: Tensor, b: Tensor, c: Tensor) -> None:
    plus, times = semiring.plus, semiring.times
    assert torch.equal(times(a, plus(b, c)), plus(times(a, b), times(a, c)))
    assert torch.equal(times(plus(b, c), a), plus(times(b, a), times(c, a)))


@every
@settings(max_examples=50, deadline=None)
@given(values, values)
def test_zero_absorbs_and_lift_multiplies(semiring: Semiring, a: Tensor, b: Tensor) -> None:
    zero = constant(semiring.zero)
    times, lift = semiring.times, semiring.lift
    assert torch.equal(times(a, zero), zero.expand(5))
    assert torch.equal(times(zero, a), zero.expand(5))
    assert torch.equal(lift(a * b), times(lift(a), lift(b)))
    assert torch.equal(lift(constant(1.0)), constant(semiring.one))
    assert torch.equal(lift(constant(0.0)), zero)


@every
@settings(max_examples=25, deadline=None)
@given(tensors(2, 3, 2), st.sets(st.integers(0, 2)))
def test_reduce_is_a_fold(semiring: Semiring, x: Tensor, dims: set[int]) -> None:
    over = sorted(dims)
    found = semiring.reduce(x, over)
    assert found.shape == tuple(1 if d in dims else n for d, n in enumerate(x.shape))
    for at in product(*map(range, found.shape)):
        lines = product(*(range(x.shape[d]) if d in dims else [at[d]] for d in range(3)))
        assert torch.equal(found[at], fold(semiring, (x[place] for place in lines)))


@every
def test_reduce_of_nothing_is_zero(semiring: Semiring) -> None:
    empty = torch.zeros(2, 0, dtype=torch.float64)
    assert torch.equal(semiring.reduce(empty, [1]), constant(semiring.zero).expand(2, 1))
    assert torch.equal(semiring.reduce(constant(4.0), []), constant(4.0))


@every
@settings(max_examples=50, deadline=None)
@given(tensors(6), st.lists(st.integers(-1, 3), min_size=6, max_size=6))
def test_scatter_is_a_fold(semiring: Semiring, x: Tensor, target: list[int]) -> None:
    found = semiring.scatter(x, torch.tensor(target), 4)
    assert found.shape == (4,)
    for i in range(4):
        sent = (x[j] for j in range(6) if target[j] == i)
        assert torch.equal(found[i], fold(semiring, sent))


@every
@settings(max_examples=25, deadline=None)
@given(tensors(3, 4), st.integers(0, 1))
def test_scan_is_a_fold(semiring: Semiring, x: Tensor, dim: int) -> None:
    found = semiring.scan(x, dim)
    for at in product(range(3), range(4)):
        line = (x.movedim(dim, -1)[at[1 - dim]][j] for j in range(at[dim] + 1))
        assert torch.equal(found[at], fold(semiring, line))


@every
@pytest.mark.parametrize(
    ("spec", "x_shape", "w_shape"),
    [
        ("mk,kn->mn", (2, 3), (3, 2)),
        ("kn,mk->mn", (3, 2), (2, 3)),
        ("bmk,bkn->bmn", (2, 1, 2), (2, 2, 2)),
        ("k,k->", (4,), (4,)),
        ("mk,k->m", (2, 3), (3,)),
        ("j,ij->i", (3,), (2, 3)),
        ("m,n->mn", (2,), (2,)),
        ("n,n->n", (3,), (3,)),
        ("mk,kn->mn", (2, 0), (0, 2)),
    ],
)
@settings(max_examples=10, deadline=None)
@given(st.data())
def test_contract_is_a_fold(
    semiring: Semiring,
    spec: str,
    x_shape: tuple[int, ...],
    w_shape: tuple[int, ...],
    data: st.DataObject,
) -> None:
    x, w = data.draw(tensors(*x_shape)), data.draw(tensors(*w_shape))
    a, rest = spec.split(",")
    b, out = rest.split("->")
    size = dict(zip(a, x_shape)) | dict(zip(b, w_shape))
    found = semiring.contract(spec, x, w)
    assert found.shape == tuple(size[letter] for letter in out)
    inner = sorted({*a, *b} - {*out})
    for at in product(*(range(size[letter]) for letter in out)):
        parts = []
        for under in product(*(range(size[letter]) for letter in inner)):
            where: dict[str, Any] = dict(zip([*out, *inner], [*at, *under]))
            value, weight = (t[tuple(where[c] for c in word)] for t, word in ((x, a), (w, b)))
            parts.append(semiring.times(value, semiring.lift(weight)))
        assert torch.equal(found[at], fold(semiring, parts))


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_the_precision_of_the_value_is_kept(semiring: Semiring, dtype: torch.dtype) -> None:
    x = torch.ones(2, 3, dtype=dtype)
    assert semiring.reduce(x, [0]).dtype is dtype
    assert semiring.scan(x, 1).dtype is dtype
    assert semiring.scatter(x[0], torch.tensor([0, 0, -1]), 2).dtype is dtype
    assert semiring.contract("mk,kn->mn", x, torch.ones(3, 2, dtype=torch.float64)).dtype is dtype


@every
def test_a_semiring_is_a_frozen_value(semiring: Semiring) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        semiring.zero = 1.0  # type: ignore[misc]
    assert semiring == type(semiring)()  # type: ignore[call-arg]
    assert hash(semiring) == hash(type(semiring)())  # type: ignore[call-arg]


def test_every_semiring_of_the_module_is_tested() -> None:
    needed = ("lift", "plus", "times", "reduce", "scatter", "scan", "contract")
    found = [
        value
        for value in vars(semirings).values()
        if not isinstance(value, type) and all(hasattr(value, name) for name in needed)
    ]
    assert all(any(value is s for s in SEMIRINGS) for value in found)
