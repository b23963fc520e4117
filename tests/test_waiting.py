"""What would wait for a GPU is seen without one, and looked at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from gradtrace import waiting
from gradtrace.waiting import Hopes, look
from tests.waits import Waits

X = torch.tensor([1.0, 2.0, 3.0])

LOOKS: dict[str, Callable[[], object]] = {
    "bool": lambda: bool(X[0]),
    "float": lambda: float(X[0]),
    "int": lambda: int(X[0]),
    "item": lambda: X[0].item(),
    "tolist": lambda: X.tolist(),
    "nonzero": lambda: X.nonzero(),
    "where": lambda: torch.where(X > 1),
    "mask": lambda: X[X > 1],
    "cpu": lambda: X.cpu(),
    "to": lambda: X.to("cpu"),
    "equal": lambda: torch.equal(X, X),
    "allclose": lambda: torch.allclose(X, X),
    "unique": lambda: X.unique(),
    "tensor": lambda: torch.tensor([1.0], device=X.device),
    "if": lambda: 1 if (X > 0).all() else 0,
}


@pytest.mark.parametrize("name", LOOKS)
def test_each_look_counts_once(name: str) -> None:
    with Waits() as waits:
        LOOKS[name]()
    assert waits.count == 1
    with Waits() as waits, _disable_current_modes():
        LOOKS[name]()
    assert waits.count == 1


def test_a_look_too_many_fails_where_it_is() -> None:
    with pytest.raises(AssertionError, match="more than 1 times"), Waits(most=1):
        float(X.sum())
        float(X.sum())


def test_what_only_computes_does_not_count() -> None:
    with Waits(most=0):
        torch.where(X > 1, X, 0).cumsum(0)[torch.tensor([0, 2])].to(torch.float64)
        X[1:].expand(2, 2).contiguous().view(-1).index_add(0, torch.tensor([1]), X[:1])


def test_many_numbers_are_one_look() -> None:
    given = [
        X.sum(),
        torch.tensor([True]),
        torch.tensor(7),
        torch.tensor(0.1),
        torch.tensor(0.1).half(),
    ]
    with Waits(most=1):
        found = look(given)
    assert found == [float(x) for x in given]
    assert look([]) == []
    assert all(map(torch.isnan, map(torch.tensor, look([torch.tensor(float("nan"))]))))


def test_hopes_are_looked_at_once() -> None:
    hopes = Hopes()
    with Waits(most=0):
        assert hopes.fulfilled()
        hopes.add(X > 0)
        hopes.add((X > 0).all())
        hopes.add(X[:0] > 0)
    with Waits(most=1):
        assert hopes.fulfilled()
    hopes.add(X > 1)
    assert not hopes.fulfilled()
    hopes.add(X > 0)
    assert not hopes.fulfilled()  # what was dashed stays so


def test_tensors_of_the_cpu_are_looked_at_as_one_likes() -> None:
    assert not waiting.avoid(X)
