"""Kernels equal their definitions, over the operators and architectures of the other tests.

In CI a sample of them on the CPU; all of them, on any device, by ``GRADTRACE_DEVICE=cuda``.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import equality
import pytest
import torch
from equality import (
    CHECKS,
    DEFINITIONS,
    DEVICE,
    NONE,
    SAME,
    Checked,
    Defined,
    NotHere,
    assert_equal,
    cases,
    check_operator,
    defined,
    exactly,
    moved,
    same,
)
from torch import Tensor, nn

import gradtrace
from gradtrace import kernels
from gradtrace.kernels import Backend
from gradtrace.traced import Trace

SAMPLE = ("gpt2", "resnet", "mamba2"), 24
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
        loss = loss + nn.functional.avg_pool1d(hidden, 3, 1, 1).square().sum()
    return watch.trace(loss)


def test_every_operation_has_a_definition() -> None:
    every = {name for name in {*vars(Backend), *Backend.__annotations__} if name[0] != "_"}
    assert not {*DEFINITIONS} & SAME and not {*DEFINITIONS, *SAME} & NONE
    assert every == {*DEFINITIONS, *SAME, *NONE}, "add it to equality.DEFINITIONS"


def test_definitions_take_the_place_of_all_kernels_and_leave_it() -> None:
    before = kernels.backend_of(DEVICE)
    used = assert_equal(small(), paths=20)
    assert {
        "contract_strided", "merge", "tally", "reduce", "scatter", "normalise", "measure",
    } <= set(used)  # fmt: skip
    with pytest.raises(KeyError), defined():
        assert isinstance(kernels.backend_of(DEVICE), Defined)
        raise KeyError
    assert kernels.backend_of(DEVICE) is before


UNUSED = (
    *("contract_lines", "measure_many", "measure_rows", "normalise_at", "sparse_sum"),
    "has_zeros",  # of which there are none
    "masked",  # where elements are looked at, as on the CPU
)
"""Operations that this trace does without, or that tell nothing of it."""

BROKEN = [kernel for kernel in DEFINITIONS if kernel not in UNUSED]


@pytest.mark.parametrize("kernel", BROKEN)
def test_a_kernel_that_is_wrong_is_found(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other way round: the definition is spoilt, by one element at a time."""
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
    def fails(name: str, device: torch.device) -> Checked:
        if name == "a":
            raise AssertionError("not equal")
        if name == "b":
            raise NotHere("no kernel\nat all")
        return Checked(Counter({"steps.merge": 2}), ["no way"] * 3 if name == "c" else [])

    monkeypatch.setitem(CHECKS, "operator", fails)
    monkeypatch.setattr(equality, "cases", lambda _: [("operator", n) for n in "abcd"])
    assert equality.run(DEVICE) == (2, 1, 1, 3)
    told = capsys.readouterr().out
    assert (
        "FAILED operator a" in told and "not equal" in told and "not here: b: no kernel\n" in told
    )
    assert "not here: c, 3 of its samples: no way" in told
    assert "{'steps.merge': 4}" in told
    assert "2 passed (3 samples of them not here), 1 failed, 1 not here, of 4" in told


def problem() -> tuple[Tensor, list[Tensor]]:
    x = torch.ones(3, requires_grad=True)
    return (x * 2).sum(), [x]


def picky() -> tuple[Tensor, list[Tensor]]:
    """What PyTorch cannot run by deterministic algorithms."""
    if torch.are_deterministic_algorithms_enabled():
        raise IndexError("too many indices for tensor of dimension 0 (got 1)")
    return problem()


def impossible() -> None:
    raise RuntimeError("not on a GPU")


ELSEWHERE = torch.device("meta")


def test_a_sample_that_is_not_deterministic_is_run_by_other_algorithms() -> None:
    with exactly():
        with ExitStack() as stack:
            assert equality._sample(picky, ELSEWHERE, stack) is not None
            assert not torch.are_deterministic_algorithms_enabled()
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        with ExitStack() as stack, pytest.raises(IndexError):  # on the CPU that is an error
            equality._sample(picky, torch.device("cpu"), stack)
        with ExitStack() as stack, pytest.raises(NotHere, match="on meta: RuntimeError: not on a"):
            equality._sample(impossible, ELSEWHERE, stack)


def only_one(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the only operator there is."""
    first = equality.entries()[0]
    monkeypatch.setattr(equality, "entries", lambda _: [first])
    return equality.label(first)


def test_samples_are_left_out_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = [impossible, problem, lambda: None, picky, impossible]
    monkeypatch.setattr(equality, "makers", lambda *_: given)
    name = only_one(monkeypatch)
    with exactly():
        found = check_operator(name, ELSEWHERE)
        assert len(found.left) == 2 and found.used
        assert not check_operator(name, ELSEWHERE, most=1).left[1:]
        given[:] = [impossible]
        with pytest.raises(NotHere, match="not on a GPU"):
            check_operator(name, ELSEWHERE)
        given[:] = []
        with pytest.raises(AssertionError):
            check_operator(name, ELSEWHERE)


def test_what_gradtrace_does_wrong_is_never_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **named: object) -> None:
        raise IndexError("too many indices for tensor of dimension 0 (got 1)")

    monkeypatch.setattr(equality, "makers", lambda *_: [problem])
    monkeypatch.setattr(gradtrace, "trace", broken)
    name = only_one(monkeypatch)
    with exactly(), pytest.raises(IndexError):
        check_operator(name, ELSEWHERE)


def test_a_process_that_dies_has_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Dead:
        def __init__(self, command: list[str], env: dict[str, str]) -> None:
            if env["GRADTRACE_SHARD"] == "0/2":
                Path(command[-1]).write_text("[5, 0, 1, 2]")

        def wait(self) -> int:
            return -9

    monkeypatch.setattr(equality.subprocess, "Popen", Dead)
    assert equality.shared("cpu", 2) == (5, 1, 1, 2)
    assert "FAILED shard 1: its process ended with status -9" in capsys.readouterr().out
