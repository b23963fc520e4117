"""Paths that a kernel follows in one launch are those that are followed element by element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import architectures
import numpy as np
import pytest
import randomgraphs
import torch
from emulated import Emulator, compiler
from thorough import few
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.components.components import Components
from gradtrace.paths.path_machine import PathMachine
from gradtrace.traced import Trace
from gradtrace.tracing.counting import chosen_components
from gradtrace.tracing.followed import (
    FollowedPaths,
    drawn_sample,
    ends_of,
    follow_elements,
    follow_paths,
)
from gradtrace.tracing.kept_plans import forget

RULES = ("greedy", "viterbi", "edge")


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    found = compiler()
    if found is None:
        pytest.skip("THE CUDA SOURCES ARE NOT TESTED: there is no C++ compiler (g++ or clang++)")
    return Emulator(tmp_path_factory.mktemp("emulated"), found)


def compare(
    built: Emulator, trace: Trace, sample: int = 60, components: Components = "modules"
) -> bool:
    """Compare paths of a sample; False if no kernel can follow them."""
    chosen = chosen_components(trace, components)
    launched = False
    for pair, drawn in drawn_sample(trace, sample, 0, 2):
        wanted = ends_of(trace, follow_elements(trace, drawn, pair), chosen.component_bits)
        with pytest.MonkeyPatch.context() as patch:
            built.use(patch)
            found = follow_paths(trace, drawn, pair, chosen)
            launched = built.launches == ["follow"]
        assert_equal(found, wanted)
    return launched


def assert_equal(found: FollowedPaths, wanted: FollowedPaths) -> None:
    np.testing.assert_array_equal(found.whole, wanted.whole)
    sets, others = ([x.sets[n] for n in x.number.tolist()] for x in (found[-1], wanted[-1]))
    assert sets == others
    whole = wanted.whole
    power = np.clip(wanted.exponent[whole] - found.exponent[whole], -9, 9)
    weights = np.ldexp(wanted.mantissa[whole], power)
    np.testing.assert_allclose(found.mantissa[whole], weights, rtol=1e-12)
    np.testing.assert_array_equal(found.gradient, wanted.gradient)


def traced(model: nn.Module, loss: Callable[[], Tensor], **given: Any) -> Trace:
    with gt.watch(model) as watch:
        result = loss()
    return watch.trace(result, **given)


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "mixtral"])
def test_of_transformers(name: str, built: Emulator) -> None:
    pytest.importorskip("transformers")
    model, loss = architectures.ARCHITECTURES[name]()
    torch.manual_seed(0)
    assert compare(built, traced(model, lambda: loss(model)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_of_other_precisions(dtype: torch.dtype, built: Emulator) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 7), nn.LayerNorm(7), nn.GELU(), nn.Linear(7, 3), nn.Softmax(-1)]
    model = nn.Sequential(*layers).to(dtype)
    x = torch.randn(4, 5, dtype=dtype)
    assert compare(built, traced(model, lambda: (model(x) * x[:, :3]).sum()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_of_long_rows_with_ties(dtype: torch.dtype, built: Emulator) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(300, 260), nn.LayerNorm(260), nn.Linear(260, 140), nn.Softmax(-1)
    )
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randint(-2, 3, weight.shape))
    model, x = model.to(dtype), torch.randint(-1, 2, (150, 300)).to(dtype)
    loss = torch.randint(-1, 2, (150, 140))
    assert compare(built, traced(model, lambda: (model(x) * loss).sum()))


def test_of_random_graphs(built: Emulator) -> None:
    found = 0
    for seed in range(few(40, 2000)):
        rule = RULES[seed % 3]
        trace = gt.trace(randomgraphs.build(seed).loss, rule=rule)
        found += compare(built, trace, 25, "operators")
    assert found > few(10, 500)


def test_of_many_losses_and_labels(built: Emulator) -> None:
    torch.manual_seed(0)
    model, words = nn.Embedding(9, 6), torch.tensor([[1, 2, 2], [8, 0, 1]])

    def loss() -> Tensor:
        x = gt.label(model(words), 2, ["a", "b", "c", "d", "e", "f"])
        return (x @ x.mT).softmax(-1).square().sum((1, 2))

    assert compare(built, traced(model, loss), 54, "labels")


def test_of_more_components_than_a_word_has_bits(built: Emulator) -> None:
    x = torch.randn(3, requires_grad=True)
    y = x
    for n in range(90):
        y = y * 1.01 + (y.tanh() if n % 2 else y.sin())
    trace = gt.trace(y.sum())
    assert compare(built, trace, 3, "operators")


def test_of_gradients_that_are_zero_nan_or_infinite(built: Emulator) -> None:
    x = torch.tensor([0.0, 1.0, torch.nan, torch.inf, -2.0], requires_grad=True)
    w = torch.tensor([[1.0, 0.0, 2.0], [torch.nan, 1.0, 0.0]], requires_grad=True)
    loss = ((x.relu() * x)[:3] @ w.T).relu().sum() + x[1:2].sum() * 0
    assert compare(built, gt.trace(loss, nonfinite="allow"), 50, "operators")


def test_of_a_loss_without_elements(built: Emulator) -> None:
    empty = torch.zeros(0, requires_grad=True)
    assert not compare(built, gt.trace(empty.sum() + torch.ones(2, requires_grad=True)[:0].sum()))


def test_a_map_without_a_kernel_is_followed_all_the_same(built: Emulator) -> None:
    torch.manual_seed(0)
    model, x = nn.Conv1d(2, 3, 2), torch.randn(1, 2, 5)
    assert not compare(built, traced(model, lambda: model(x).tanh().sum()))


# Tables that are kept ----------------------------------------------------------------------------


def test_a_table_is_kept_for_losses_of_the_same_structure(
    built: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And written anew where operands lie otherwise in memory, or views are others."""
    torch.manual_seed(0)
    model, written = nn.Linear(6, 6), list[int]()
    table = PathMachine.table
    monkeypatch.setattr(PathMachine, "table", lambda *a: written.append(1) or table(*a))
    forget()

    def loss(scale: float = 2.0, turned: bool = False) -> Tensor:
        x = torch.randn(3, 6)
        if turned:
            x = x.T.contiguous().T
        return (model(x).reshape(3, 3, 2).transpose(0, 1).tanh() * scale).square().sum()

    for given, times in (({}, 1), ({"scale": -3.0}, 1), ({"turned": True}, 2), ({}, 3)):
        with torch.no_grad():
            model.weight += 0.1
        assert compare(built, traced(model, lambda given=given: loss(**given)), 42)
        assert len(written) == times, given


def test_views_of_the_same_shape_are_told_apart(built: Emulator) -> None:
    """Programs of equal structure may move elements differently."""
    w = torch.randn(3, 3, 3, requires_grad=True)
    factor = torch.randn(3, 3, 3)
    for order in ((1, 0, 2), (2, 1, 0), (1, 2, 0), (1, 0, 2)):
        trace = gt.trace((w.permute(order) * factor).cumsum(0)[-1].exp().sum(), names={"w": w})
        compare(built, trace, 27, "operators")
        trace = gt.trace((w.permute(order) * factor).exp().sum(), names={"w": w})
        assert compare(built, trace, 27, "operators")
