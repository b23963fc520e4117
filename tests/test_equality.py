"""Kernels equal their definitions, over the operators and architectures of the other tests.

In CI a sample of them on the CPU; all of them, on any device, by ``GRADTRACE_DEVICE=cuda``.
"""

from __future__ import annotations

import inspect
import os
import random
from collections import Counter
from typing import Any

import equality
import pytest
import torch
from equality import (
    CHECKS,
    DEFINITIONS,
    DERIVED,
    DEVICE,
    NotHere,
    assert_equal,
    cases,
    defined,
    exactly,
    moved,
    same,
)
from torch import nn

import gradtrace
from gradtrace.kernels import contract, reference, rows, steps
from gradtrace.trace import Trace

SAMPLE = ("gpt2", "resnet"), 24
"""How many are tried where no device is named: these architectures, and so many operators."""


def sample() -> list[tuple[str, str]]:
    every = cases()
    if "GRADTRACE_DEVICE" in os.environ:
        return every
    models, operators = SAMPLE
    rest = [case for case in every if case[0] == "operator"]
    some = random.Random(1).sample(rest, min(operators, len(rest)))
    return [case for case in every if case[1] in models or case in some]


@pytest.mark.parametrize(("kind", "name"), sample())
def test_kernels_equal_their_definitions(kind: str, name: str) -> None:
    with exactly():
        try:
            CHECKS[kind](name)
        except NotHere as reason:
            pytest.skip(str(reason))


# The seam -----------------------------------------------------------------------------------------


def small() -> Trace:
    """A trace in which every kernel that chooses has a say."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(7, 6), nn.LayerNorm(6), nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 4)
    ).to(DEVICE)
    ids = torch.tensor([[1, 2, 2, 5], [0, 1, 3, 3]], device=DEVICE)
    with gradtrace.watch(model) as watch:
        hidden = model(ids).cumsum(1)
        loss = (hidden.softmax(-1) @ hidden.mT.softmax(-1)).square().mean() + hidden.sum()
    return watch.trace(loss)


def test_every_kernel_has_a_definition() -> None:
    for module in (contract, steps, rows):
        for name, value in vars(module).items():
            own = inspect.isfunction(value) and value.__module__ == module.__name__
            if own and not name.startswith("_") and name not in DERIVED:
                assert value in DEFINITIONS, f"{name}: add it to equality.DEFINITIONS"


def test_definitions_take_the_place_of_all_kernels_and_leave_it() -> None:
    names = {module: dict(vars(module)) for module in (contract, steps, rows, reference)}
    used = assert_equal(small(), paths=20)
    assert {
        "contract.contraction", "steps.merge", "steps.tally", "steps.reduce", "steps.scatter",
        "steps.normalise", "steps.measured",
    } <= set(used)  # fmt: skip
    for module, before in names.items():
        assert all(vars(module)[name] is value for name, value in before.items())
    with pytest.raises(KeyError), defined():
        assert steps.merge not in DEFINITIONS
        raise KeyError
    assert steps.merge in DEFINITIONS


UNUSED = ("argmax", "gather", "products", "others")
"""Kernels that this trace does without."""

BROKEN = [kernel for kernel in DEFINITIONS if kernel.__name__ not in UNUSED]


@pytest.mark.parametrize("kernel", BROKEN, ids=lambda kernel: kernel.__name__)
def test_a_kernel_that_is_wrong_is_found(kernel: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other way round: the definition is spoilt, by one element at a time."""
    assert callable(kernel)
    right = DEFINITIONS[kernel]

    def wrong(*args: Any, **named: Any) -> Any:
        found = right(*args, **named)
        outputs = args[:2] if found is None else found
        for x in [outputs] if isinstance(outputs, torch.Tensor) else outputs:
            if isinstance(x, torch.Tensor) and x.numel():
                spoilt = x.clone().reshape(-1)
                spoilt[-1] += 1
                x.copy_(spoilt.reshape(x.shape))
        return found

    monkeypatch.setitem(DEFINITIONS, kernel, wrong)
    with pytest.raises((AssertionError, IndexError)):
        assert_equal(small())


def test_copies_lie_as_what_they_copy() -> None:
    x = torch.arange(24.0).reshape(2, 3, 4)
    for view in (x, x.mT, x[:, 1:, ::2], x[:1].expand(5, 3, 4), x[0, 0, 0], x[:0], x[1]):
        copy = moved(view, torch.device("cpu"))
        assert same(copy, view) and copy.stride() == view.stride()
        assert not view.numel() or copy.data_ptr() != view.data_ptr()


def test_same_is_to_the_bit() -> None:
    nan, one = torch.tensor([float("nan"), 1.0]), torch.tensor([1.0, 1.0])
    assert same(nan, nan.clone()) and not same(nan, one)
    assert not same(one, one.nextafter(one + 1)) and not same(one, one.double())
    assert not same(one, one[:1]) and same(one.int(), one.int())


def test_shards_are_all_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRADTRACE_SHARD", raising=False)
    every = cases()
    parts = []
    for n in range(3):
        monkeypatch.setenv("GRADTRACE_SHARD", f"{n}/3")
        parts += cases()
    assert Counter(parts) == Counter(every) and len(set(every)) == len(every) > 500


def test_the_runner_tells_what_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(name: str, device: torch.device) -> Counter[str]:
        if name == "a":
            raise AssertionError("not equal")
        if name == "b":
            raise NotHere("no kernel")
        return Counter({"steps.merge": 2})

    monkeypatch.setitem(CHECKS, "operator", fails)
    monkeypatch.setattr(equality, "cases", lambda _: [("operator", n) for n in "abcd"])
    assert equality.run(DEVICE) == 1
    told = capsys.readouterr().out
    assert "FAILED operator a" in told and "not equal" in told and "not here: b: no kernel" in told
    assert "{'steps.merge': 4}" in told and "2 passed, 1 failed, 1 not here, of 4" in told
