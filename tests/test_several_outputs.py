"""Greedy inside operators that sum up more than once: the largest single contribution is followed.

Operators with several outputs add up what comes back from each; other formulas sum in stages. The
choice is among all elements of all outputs, as docs/tracing.md says and brute force does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import pytest
import torch
from against_bruteforce import check_paths
from bruteforce import ScalarGraph
from randomgraphs import Sample
from torch import Tensor, nn

import gradtrace as gt

Leaves: TypeAlias = dict[str, Tensor]
Made: TypeAlias = tuple[Sequence[Tensor], Leaves]

AFTER = (torch.tanh, torch.sin, torch.exp, torch.sigmoid)
"""Each output goes another way, so that operators tell which output a path came from."""


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def leaf(*shape: int) -> Tensor:
    return rand(*shape).requires_grad_()


class Sums(torch.autograd.Function):
    """Two plain sums, of one output each."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(a)
        return a * b, a + b

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        (a,) = ctx.saved_tensors
        return None, (g * a).sum(0) + h.sum(0)


class Three(torch.autograd.Function):
    """A sum of a sum and another, products, movements; one output goes to one argument only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, m: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(m)
        return x @ m, y @ m + x.sum(0), y * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor, k: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        (m,) = ctx.saved_tensors
        return g @ m.T + h.sum(0).expand(3, 3), h @ m.T + k * 2, None


class Staged(torch.autograd.Function):
    """One output, summed in stages that have a product between them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a[:, None, None] * (x * b).expand(2, 3, 4)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        a, b = ctx.saved_tensors
        inner = (g * a[:, None, None]).sum(0) * b
        return inner.sum(0), None, None


class Mixed(torch.autograd.Function):
    """An argument that is only handed on, beside one that is summed up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + y, y * torch.ones(3, 1, dtype=y.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return g, g.sum(0) + h.sum(0)


class Fused(torch.autograd.Function):
    """Several functions of an argument as one operator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parts: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x)
        ctx.parts = parts
        return tuple(part(x) for part in parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            outs = [part(inner) for part in ctx.parts]
        (found,) = torch.autograd.grad(outs, inner, grads)
        return found, *[None] * len(ctx.parts)


def fused() -> Made:
    """An operator of two to four outputs, drawn at random."""
    x = leaf(3, 4)
    a, b, c, d = rand(2, 3), rand(4, 3), rand(3, 4), rand(5, 1, 1)
    choices: list[Callable[[Tensor], Tensor]] = [
        lambda x: (a @ x).tanh(),
        lambda x: (x @ b) * 0.3,
        lambda x: (x * c).sum(1),
        lambda x: x.square().mean(0),
        lambda x: x * d,
        lambda x: (a @ x @ b).exp(),
        lambda x: x.T * 0.5,
        lambda x: x[1:] - x[:-1],
        lambda x: x.cumsum(1),
    ]
    count = int(torch.randint(2, 5, ()))
    parts = [choices[n] for n in torch.randperm(len(choices))[:count].tolist()]
    return Fused.apply(x, *parts), {"x": x}  # type: ignore[no-untyped-call]


def sums() -> Made:
    b = leaf(2)
    return Sums.apply(rand(5, 2), b), {"b": b}  # type: ignore[no-untyped-call]


def three() -> Made:
    x, y = leaf(3, 3), leaf(3, 3)
    return Three.apply(x, y, rand(3, 3)), {"x": x, "y": y}  # type: ignore[no-untyped-call]


def staged() -> Made:
    x = leaf(4)
    return [Staged.apply(x, rand(2), rand(3, 4))], {"x": x}  # type: ignore[no-untyped-call]


def mixed() -> Made:
    x, y = leaf(3, 2), leaf(2)
    return Mixed.apply(x, y), {"x": x, "y": y}  # type: ignore[no-untyped-call]


def group_norm() -> Made:
    x, w, b = leaf(2, 4, 3), leaf(4), leaf(4)
    return torch.native_group_norm(x, w, b, 2, 4, 3, 2, 1e-5), {"x": x, "w": w, "b": b}


def layer_norm() -> Made:
    x, w, b = leaf(3, 4), leaf(4), leaf(4)
    return torch.native_layer_norm(x, (4,), w, b, 1e-5), {"x": x, "w": w, "b": b}


def batch_norm() -> Made:
    x, w, b = leaf(4, 3), leaf(3), leaf(3)
    return torch.native_batch_norm(x, w, b, None, None, True, 0.1, 1e-5)[:1], {
        "x": x,
        "w": w,
        "b": b,
    }


def eigh() -> Made:
    x = leaf(3, 3)
    return torch.linalg.eigh(x + x.T), {"x": x}


def qr() -> Made:
    x = leaf(4, 3)
    return torch.linalg.qr(x), {"x": x}


def svd() -> Made:
    x = leaf(4, 3)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    return [u.square(), s, v.square()], {"x": x}


def lu() -> Made:
    x = leaf(3, 3)
    return torch.linalg.lu(x)[1:], {"x": x}


def inverse() -> Made:
    x = leaf(3, 3)
    return torch.linalg.inv_ex(x)[:1], {"x": x}


def split(how: str) -> Made:
    x = leaf(4, 3)
    parts = {
        "unbind": lambda: x.unbind(0)[:3],
        "split": lambda: x.split([1, 3]),
        "chunk": lambda: x.chunk(2),
        "tensor_split": lambda: x.tensor_split(3),
    }[how]()
    return parts, {"x": x}


def var_mean() -> Made:
    x = leaf(3, 4)
    return torch.var_mean(x, 1), {"x": x}


def std_mean() -> Made:
    x = leaf(3, 4)
    return torch.std_mean(x, 0), {"x": x}


def aminmax() -> Made:
    x = leaf(3, 4)
    return torch.aminmax(x, dim=1), {"x": x}


def lstm() -> Made:
    layer = nn.LSTM(2, 2, dtype=torch.float64)
    x = leaf(3, 2, 2)
    out, (h, c) = layer(x)
    return [out, h, c], {"x": x, **dict(layer.named_parameters())}


def cell() -> Made:
    layer = nn.LSTMCell(2, 3, dtype=torch.float64)
    x = leaf(2, 2)
    return layer(x), {"x": x, **dict(layer.named_parameters())}


CASES: dict[str, Callable[[], Made]] = {
    "sums": sums,
    "three": three,
    "staged": staged,
    "mixed": mixed,
    "fused": fused,
    "native_group_norm": group_norm,
    "native_layer_norm": layer_norm,
    "native_batch_norm": batch_norm,
    "eigh": eigh,
    "qr": qr,
    "svd": svd,
    "lu": lu,
    "inv_ex": inverse,
    "unbind": lambda: split("unbind"),
    "split": lambda: split("split"),
    "chunk": lambda: split("chunk"),
    "tensor_split": lambda: split("tensor_split"),
    "var_mean": var_mean,
    "std_mean": std_mean,
    "aminmax": aminmax,
    "lstm": lstm,
    "lstm_cell": cell,
}

SEEDS = {"fused": 15, "lstm": 2}
"""How many of each are drawn; of the others, 5."""


def loss_of(outputs: Sequence[Tensor]) -> Tensor:
    """A sum of all outputs, each weighed by numbers of either sign and any size."""
    used = [y for y in outputs if y.requires_grad]
    parts = [(AFTER[n % 4](y) * rand(*y.shape) ** 3).sum() for n, y in enumerate(used)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


@pytest.mark.parametrize("name", CASES)
def test_greedy_follows_the_largest_contribution(name: str) -> None:
    for seed in range(SEEDS.get(name, 5)):
        torch.manual_seed(seed)
        outputs, leaves = CASES[name]()
        loss = loss_of(outputs)
        if any(type(y.grad_fn).__name__ == "NotImplemented" for y in outputs):
            pytest.skip(f"torch {torch.__version__} cannot differentiate {name}")
        graph = ScalarGraph.of(loss, leaves)
        sample = Sample(seed, loss, leaves, [name], graph, frozenset())
        trace = gt.trace(loss, names=leaves)
        check_paths(trace, sample, 20)
        check_marks(trace)


def check_marks(trace: gt.Trace) -> None:
    """Influence of operators is what the paths say."""
    paths = trace.paths(sample=10**9)
    for row in trace.influence("operators").rows:
        through = sum(row.name in path.operators for path in paths)
        assert row.through == through, row.name


class PerSample(torch.autograd.Function):
    """A weight that all samples share: the samples are added up after a product of each."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, x: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, m)
        return x[:, :1] * (m @ w), x * w

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        x, m = ctx.saved_tensors
        return (x[:, :1].T @ (g @ m)).reshape(3) + (h * x).sum(0), None, None


def samples(x: Tensor, w: Tensor, m: Tensor) -> Tensor:
    """A loss for each sample."""
    p, q = PerSample.apply(w, x, m)  # type: ignore[no-untyped-call]
    return ((p.tanh() * x).sum(1) + (q.sin() * x**3).sum(1)).sigmoid()


@pytest.mark.parametrize("rule", ["greedy", "edge", "viterbi"])
def test_each_loss_of_a_vector_chooses_as_it_would_alone(rule: str) -> None:
    torch.manual_seed(0)
    x, w, m = rand(4, 3), leaf(3), rand(3, 3)
    whole = gt.trace(samples(x, w, m), names={"w": w}, rule=rule)
    table = whole.influence("operators")
    alone = [
        gt.trace(samples(x[n : n + 1], w, m)[0], names={"w": w}, rule=rule).influence("operators")
        for n in range(4)
    ]
    for row in table:
        mine = [each[row.name] for each in alone]
        assert row.through == sum(each.through for each in mine), row.name
        assert row.eligible == sum(each.eligible for each in mine), row.name


def test_paths_are_the_same_where_values_are_computed_again() -> None:
    torch.manual_seed(1)
    outputs, leaves = three()
    trace = gt.trace(loss_of(outputs), names=leaves)
    short = dataclasses.replace(trace, budget=1)
    assert [*map(str, trace.paths(sample=99))] == [*map(str, short.paths(sample=99))]
