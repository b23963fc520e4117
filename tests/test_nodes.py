"""Nodes that need not be watched: every row gives what watching its formula gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from agreement import assert_agree
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import gradtrace
from gradtrace import capture, engine
from gradtrace.nodes import NODES, summed

a = torch.linspace(0.2, 1.7, 12, dtype=torch.float64).reshape(3, 4)
b = torch.linspace(-1.0, 0.9, 20, dtype=torch.float64).reshape(4, 5)
bias = torch.linspace(-0.5, 0.5, 5, dtype=torch.float64)
batch = torch.linspace(-1.0, 2.0, 24, dtype=torch.float64).reshape(2, 3, 4)

words = torch.tensor([[0, 2, 2], [1, 0, 2]])

CASES: dict[str, list[tuple[Callable[..., Tensor], tuple[Tensor, ...]]]] = {
    "T": [(torch.t, (a,))],
    "Transpose": [(lambda x: x.transpose(0, 2), (batch,)), (lambda x: x.transpose(-1, -2), (a,))],
    "Permute": [(lambda x: x.permute(2, 0, 1), (batch,))],
    "View": [(lambda x: x.view(2, 6), (a,)), (lambda x: x.view(-1), (a,))],
    "UnsafeView": [(lambda x: torch.ops.aten._unsafe_view(x, [6, 2]), (a,))],
    "ReshapeAlias": [(lambda x: torch.ops.aten._reshape_alias(x, [12], [1]), (a,))],
    "Unsqueeze": [(lambda x: x.unsqueeze(1), (a,))],
    "Clone": [(torch.clone, (a,)), (lambda x: x.t().clone(), (a,))],
    "Tanh": [(torch.tanh, (a,)), (torch.tanh, (torch.tensor(0.3, dtype=torch.float64),))],
    "Sigmoid": [(torch.sigmoid, (a,))],
    "Gelu": [(F.gelu, (a,))],
    "Silu": [(F.silu, (a,))],
    "Exp": [(torch.exp, (a,))],
    "Pow": [(lambda x: x**3, (a,)), (lambda x: x**0, (a,)), (lambda x: x**-0.5, (a,))],
    "Sqrt": [(torch.sqrt, (a,))],
    "Rsqrt": [(torch.rsqrt, (a,))],
    "Sin": [(torch.sin, (a,))],
    "Cos": [(torch.cos, (a,))],
    "Neg": [(torch.neg, (a,))],
    "Log": [(torch.log, (a,))],
    "Mm": [(torch.mm, (a, b)), (lambda x: torch.mm(x, b), (a,)), (lambda w: torch.mm(a, w), (b,))],
    "Bmm": [(lambda x, y: torch.bmm(x, y.mT), (batch, batch + 1))],
    "Embedding": [
        (lambda w: F.embedding(words, w), (b,)),
        (lambda w: F.embedding(words, w, padding_idx=2), (b,)),
        (lambda w: F.embedding(words, w, scale_grad_by_freq=True), (b,)),
        (lambda w: F.embedding(words[0, 0], w), (b,)),
    ],
    "Addmm": [
        (torch.addmm, (bias, a, b)),
        (lambda c, x: torch.addmm(c, x, b), (torch.ones(3, 5, dtype=torch.float64), a)),
        (lambda c, w: torch.addmm(c, a, w), (torch.ones(1, 5, dtype=torch.float64), b)),
        (lambda c, x, w: torch.addmm(c, x, w, beta=2, alpha=0.5), (bias, a, b)),
        (lambda w: torch.addmm(bias, a, w), (b,)),
    ],
}
ROWS = [(name, n) for name, cases in CASES.items() for n in range(len(cases))]


def loss_of(name: str, n: int) -> tuple[Tensor, list[Tensor]]:
    f, inputs = CASES[name][n]
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = f(*leaves)
    weights = torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).reshape(out.shape)
    return (out * weights).sum(), leaves


def test_every_row_has_a_case() -> None:
    assert {kind.rstrip("0123456789").removesuffix("Backward") for kind in NODES} == set(CASES)


@pytest.fixture(params=[1, 1 << 40], ids=["later", "at once"], autouse=True)
def _large(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the gradients of all leaves put off, and of none."""
    monkeypatch.setattr(capture, "LARGE", request.param)


@pytest.mark.parametrize(("name", "n"), ROWS)
def test_a_row_gives_what_its_formula_gives(
    name: str, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, leaves = loss_of(name, n)
    kinds = {operator.name for operator in gradtrace.graph(loss)}
    assert any(kind.startswith(f"{name}Backward") for kind in kinds)
    wanted = torch.autograd.grad(loss, leaves, retain_graph=True)
    short = gradtrace.program(loss)
    monkeypatch.setattr(capture, "NODES", {})
    watched = gradtrace.program(loss)
    assert_agree(engine.run(short, gradtrace.SUM), leaves, wanted)
    assert_agree({leaf.tensor: leaf.compute() for leaf in short.leaves}, leaves, wanted)
    assert_agree(engine.run(watched, gradtrace.SUM), leaves, wanted)
    for one, other in zip(short.blocks, watched.blocks):
        assert one.operator == other.operator
        assert set(one.gives) >= set(other.gives)  # x**0 gives zeros, or nothing


@pytest.mark.parametrize(("name", "n"), ROWS)
def test_a_row_asks_for_each_saved_value_once(name: str, n: int) -> None:
    f, inputs = CASES[name][n]
    leaves = [x.clone().requires_grad_() for x in inputs]
    loss = checkpoint(f, *leaves, use_reentrant=False).sum()
    wanted = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert_agree(engine.run(gradtrace.program(loss), gradtrace.SUM), leaves, wanted)


@pytest.mark.parametrize("wanted", [(4,), (1, 4), (3, 1), (1, 1), (1,), (), (3, 4), (2, 3, 4)])
def test_undoing_of_broadcasting(wanted: tuple[int, ...]) -> None:
    shape = (2, 3, 4)
    torch.manual_seed(0)
    y = torch.rand(shape, dtype=torch.float64)
    z = y
    for step in summed(shape, wanted):
        z = step.apply(z)
    torch.testing.assert_close(z, y.sum_to_size(wanted))
