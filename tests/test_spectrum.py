"""Mass and gradient by path length and by residual branches: against all paths, and by hand."""

from __future__ import annotations

import warnings
from math import fsum
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, in_float64
from randomgraphs import build
from test_mass import POWERS, listed, traced
from thorough import THOROUGH, few, some
from torch import nn

import gradtrace as gt
from gradtrace.errors import GradtraceError, UnknownName
from gradtrace.ir.passes.residuals import residual_branches
from gradtrace.measures.spectrum import Spectrum

GRAPHS, EACH = few(80, 2000), 40


def check(seed: int) -> None:
    """By length: masses and parts of the gradient, leaf by leaf and over all."""
    sample = build(seed)
    trace = gt.trace(sample.loss, names=sample.leaves)
    if any(block.opened for block in trace.program.blocks):
        return
    paths = listed(sample)
    for p in POWERS if THOROUGH else POWERS[seed % 3 :][:1]:
        wanted: dict[int, list[float]] = {}
        for path in (path for several in paths.values() for path in several):
            wanted.setdefault(len(path.edges), []).append(abs(path.weight) ** p)
        found, least = trace.spectrum(p=p).masses, 1e-9 * max(1e-30, sample.graph.largest**p)
        for length in wanted.keys() | found.keys():
            mass = fsum(wanted.get(length, []))
            assert found.get(length, 0.0) == pytest.approx(mass, rel=1e-8, abs=least), (seed, p)
    for name, several in list(paths.items())[:2]:
        parts = trace.spectrum(of=name).gradients
        for length in parts.keys() | {len(path.edges) for path in several}:
            mine = fsum(path.weight for path in several if len(path.edges) == length)
            there = float(parts[length].sum()) if length in parts else 0.0
            assert there == pytest.approx(mine, rel=1e-7, abs=1e-8 * sample.graph.largest), seed


@pytest.mark.parametrize("first", range(0, GRAPHS, EACH))
def test_random_graphs(first: int) -> None:
    for seed in range(first, first + EACH):
        check(seed)


@pytest.mark.parametrize("by", ["length", "branches"])
@pytest.mark.parametrize("name", ["Residual", "Recurrent", "Tied", "Branches"])
def test_parts_add_up(name: str, by: str) -> None:
    trace = traced(name)
    found = trace.spectrum(by)
    assert fsum(found.masses.values()) == pytest.approx(trace.mass().total, rel=1e-12)
    assert fsum(found.shares.values()) == pytest.approx(1, abs=1e-12)
    assert fsum(found.gradient_shares.values()) == pytest.approx(1, abs=1e-12)
    mass = dict.fromkeys(found.masses, 0.0)
    for leaf, gradient in trace.gradients.items():
        one = trace.spectrum(by, of=leaf)
        torch.testing.assert_close(sum(one.gradients.values()), gradient)
        for grade, part in one.masses.items():
            mass[grade] += part
    assert mass == pytest.approx(found.masses)


def test_branches_by_hand() -> None:
    """``(1 + a)(1 + b)``: no branch, one of two, both."""
    x = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    y = x + 3 * x
    loss = y - (2 * y).view(1).view(())
    trace = gt.trace(loss, names={"x": x})
    found = trace.spectrum("branches", of="x")
    assert found.masses == {0: 1.0, 1: 3.0 + 2.0, 2: 6.0}
    assert {n: float(part) for n, part in found.gradients.items()} == {0: 1.0, 1: 1.0, 2: -6.0}
    assert found.mean == pytest.approx((5 + 12) / 12)
    assert trace.spectrum("branches", p=2).masses == {0: 1.0, 1: 13.0, 2: 36.0}
    assert {row.grade: row.gradient for row in found} == {0: -0.25, 1: -0.25, 2: 1.5}


def test_which_sums_are_residual() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)

    def branches(loss: torch.Tensor) -> int:
        return len(residual_branches(gt.program(loss.sum())))

    assert branches(x.sin() + x) == 1
    assert branches(x.sin() + 2 * x) == 0  # both do work
    y = x.exp()
    assert branches(y.sin() + y) == 1
    assert branches(y + y) == 0
    assert branches(y.clone() + y.sin()) == 1  # a copy is no work
    assert branches(y + y.sin() + y.cos()) == 2  # side by side
    z = y + y.sin()
    assert branches(z + z.cos()) == 2


def test_transformer_blocks_have_two_branches_each() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(3, 4), encoder).double()
    with gt.watch(model) as watch:
        loss = model(torch.tensor([[0, 1]])).square().sum()
    found = watch.trace(loss).spectrum("branches", of="0.weight")
    assert list(found.masses) == [0, 1, 2, 3, 4]


def test_pairs_are_summed() -> None:
    x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    losses = x.exp() + 2 * x.exp().sin()
    found = gt.trace(losses, names={"x": x}).spectrum()
    one, two = (gt.trace(loss, names={"x": x}).spectrum() for loss in losses)
    lengths = [n - 1 for n in one.masses]  # one more operator picks a loss
    assert list(found.masses) == lengths
    wanted = [a + b for a, b in zip(one.masses.values(), two.masses.values())]
    assert list(found.masses.values()) == pytest.approx(wanted)


@pytest.mark.parametrize("name", some(ARCHITECTURES, 3))
def test_architectures(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, loss_of = in_float64(name)
        torch.manual_seed(0)
        with gt.watch(model) as watch:
            loss = loss_of(model)
    trace = watch.trace(loss)
    found = trace.spectrum("branches")
    assert fsum(found.gradient_shares.values()) == pytest.approx(1, abs=1e-11)
    assert fsum(found.masses.values()) == pytest.approx(trace.mass().total, rel=1e-12)
    assert len(found) > (1 if name == "resnet" else 2)  # its shortcuts are convolutions


def test_it_prints() -> None:
    trace = traced("Residual")
    found = trace.spectrum("branches")
    assert "share of gradient" in str(found) and "Spectrum by branches (p = 1)" in str(found)
    assert repr(found) == "Spectrum(by='branches', 3 grades, p=1)"
    assert "of='stem.bias'" in repr(trace.spectrum(of="stem.bias"))
    assert list(found.to_pandas()["branches"]) == [0, 1, 2]
    assert "<table" in found._repr_html_()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"by": "depth"}, "by 'length' or 'branches', not 'depth'"),
        ({"p": 0}, "p is a positive number"),
        ({"of": "stem.wait"}, r"stem\.wait"),
    ],
)
def test_bad_input(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((UnknownName, GradtraceError), match=message):
        traced("Residual").spectrum(**arguments)


def test_several_losses_are_summed() -> None:
    """The gradient by grade is that of their sum, and the table says so."""
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    found = gt.trace(torch.stack([x[0] * 3, (x * x).sum()]), names={"x": x}).spectrum(of="x")
    assert sum(found.gradients.values()).tolist() == [5.0, 4.0]
    assert "of the sum of 2 losses" in str(found)


def test_a_leaf_without_gradient_has_no_share() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    found = gt.trace((x * 0).sum(), names={"x": x}).spectrum()
    assert isinstance(found, Spectrum)
    assert "–" in str(found) and "nan" not in str(found)
