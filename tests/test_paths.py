"""Paths as a user sees them: single ones, the largest, samples, all; and that influence counts them.

What a path claims is held against the autograd nodes themselves, called on unit cotangents.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradtrace as gt
from gradtrace.errors import GradtraceError, TooLarge, UnknownName
from gradtrace.semirings import COUNT, MAX, TopK

RULES = ("greedy", "viterbi")


def near(wanted: Any) -> Any:
    return pytest.approx(wanted, rel=1e-9, abs=1e-12)


def leaf(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


# Models ------------------------------------------------------------------------------------------


class Branch(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up = nn.Linear(size, 2 * size)
        self.down = nn.Linear(2 * size, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


class Residual(nn.Module):
    """``x + branch(x)``, the sum inside."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.branch = Branch(size)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


class Recurrent(nn.Module):
    """A cell that is called once a time step, each state labelled with its time."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self.cell = getattr(nn, unit)(3, 4)
        self.read = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[1], 4)
        for t in range(len(x)):
            h = gt.label(self.cell(x[t], h), 1, [f"time {t}"] * 4)
        return self.read(h)


class Layered(nn.Module):
    """PyTorch's own recurrent layers, then a linear map."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self.rnn = getattr(nn, unit)(3, 4, num_layers=2)
        self.read = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.rnn(x)[0][-1])


class Attention(nn.Module):
    """Two heads, labelled where they are put together again."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(size, size) for _ in range(3))
        self.mix = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        n, t, size = x.shape
        q, k, v = (f(x).view(n, t, 2, size // 2).transpose(1, 2) for f in (self.q, self.k, self.v))
        weights = (q @ k.transpose(2, 3) / math.sqrt(size / 2)).softmax(-1)
        out = gt.label(weights @ v, 1, "head")
        return self.mix(out.transpose(1, 2).reshape(n, t, size))


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.attention = Attention()
        self.norm = nn.LayerNorm(4)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        return self.norm(x + self.attention(x))


class Tied(nn.Module):
    """One matrix in the embedding and in the head, and a module that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.block = Branch(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.block(self.block(self.embed(words))))


class Joined(nn.Module):
    """Branches side by side, concatenated; a third subtracted."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.less = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 4)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([self.left(x).tanh(), self.right(x).relu()], 1)
        return self.out(both - self.less(x).sigmoid())


def convolutions(norm: bool) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, stride=2),
        nn.BatchNorm2d(4) if norm else nn.Identity(),
        nn.ReLU(),
        nn.Conv2d(4, 4, 2, groups=2, dilation=2),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.LazyLinear(2),
    )


def squared(*shape: int) -> Callable[[nn.Module], Tensor]:
    def loss(model: nn.Module) -> Tensor:
        x = torch.randn(shape)
        y = model(x)
        return (y - torch.randn_like(y)).square().mean()

    return loss


def on_words(model: nn.Module) -> Tensor:
    y = model(torch.randint(6, (2, 3)))
    return F.cross_entropy(y.flatten(0, 1), torch.randint(y.shape[-1], (6,)))


def with_leaf(model: nn.Module) -> Tensor:
    """The input needs a gradient too."""
    return model(torch.randn(2, 4, requires_grad=True)).square().sum()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor]]] = {
    "residual": (lambda: nn.Sequential(*(Residual(4) for _ in range(3))), squared(2, 4)),
    "residual with input": (lambda: nn.Sequential(Residual(4), Residual(4)), with_leaf),
    "cell": (lambda: Recurrent("RNNCell"), squared(4, 2, 3)),
    "gru cell": (lambda: Recurrent("GRUCell"), squared(3, 2, 3)),
    "rnn": (lambda: Layered("RNN"), squared(3, 2, 3)),
    "gru": (lambda: Layered("GRU"), squared(3, 1, 3)),
    "lstm": (lambda: Layered("LSTM"), squared(3, 1, 3)),
    "attention": (Attending, on_words),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True),
        squared(2, 3, 4),
    ),
    "conv": (lambda: convolutions(norm=False), squared(2, 2, 7, 7)),
    "batch norm": (lambda: convolutions(norm=True), squared(2, 2, 7, 7)),
    "tied": (Tied, on_words),
    "joined": (Joined, squared(3, 3)),
}
"""How to make a model, and a loss of it."""


@dataclass
class Made:
    """A model, its forward pass and its loss."""

    model: nn.Module
    watch: Any
    loss: Tensor

    @staticmethod
    def of(name: str) -> Made:
        torch.manual_seed(len(name))
        make, loss_of = MODELS[name]
        model = make()
        if name in ("conv", "batch norm"):
            model(torch.randn(2, 2, 7, 7))
        with gt.watch(model) as watch:
            loss = loss_of(model)
        return Made(model, watch, loss)


# What a path claims, held against the nodes --------------------------------------------------------


class Nodes:
    """The autograd nodes behind a loss, and the gradient that arrives at each."""

    def __init__(self, loss: Tensor) -> None:
        self.root = loss.grad_fn
        found: dict[Any, None] = {}
        stack = [self.root]
        while stack:
            node = stack.pop()
            if node is not None and node not in found:
                found[node] = None
                stack += [child for child, _ in node.next_functions]
        leaves = [node for node in found if node.name().endswith("AccumulateGrad")]
        self.grads: dict[Any, tuple[Any, ...]] = {}
        handles = [
            node.register_prehook(lambda grads, node=node: self.grads.update({node: grads}))
            for node in found
            if node not in leaves
        ]
        variables = [node.variable for node in leaves]
        grads = torch.autograd.grad(loss, variables, retain_graph=True, allow_unused=True)
        for handle in handles:
            handle.remove()
        self.grads |= {node: (grad,) for node, grad in zip(leaves, grads)}

    @staticmethod
    def name(node: Any) -> str:
        name = str(node.name()).rsplit("::", 1)[-1]
        return "leaf" if name == "AccumulateGrad" else name

    def at(self, node: Any, step: Any) -> list[int]:
        """The slots of a node that a step of a path may stand for."""
        if self.name(node) != step.operator:
            return []
        return [
            slot
            for slot, grad in enumerate(self.grads.get(node, ()))
            if grad is not None
            and tuple(grad.shape) == step.shape
            and float(grad[step.index]) == near(step.gradient)
        ]

    def derivatives(self, node: Any, slot: int, step: Any, child: Any, below: Any) -> list[float]:
        """``∂ node's element / ∂ child's element``, one for each way from child into node."""
        grads = self.grads[node]
        units: list[Any] = [None if g is None else torch.zeros_like(g) for g in grads]
        units[slot][step.index] = 1.0
        python = isinstance(node, torch.autograd.function.BackwardCFunction)
        with torch.no_grad():
            outs = node.apply(*units) if python else node(*units)
        outs = outs if isinstance(outs, tuple) else (outs,)
        found = []
        for (other, to), out in zip(node.next_functions, outs):
            if other is child and out is not None:
                shape = tuple(child._input_metadata[to].shape)
                if shape == below.shape:
                    found.append(float(out.sum_to_size(shape)[below.index]))
        return found

    def fault(self, path: Any) -> str | None:
        """What of a path is wrong: every step must be a node, each an argument of the next."""
        *rest, last = path.steps
        here = [(self.root, slot) for slot in self.at(self.root, last)]
        if not here:
            return f"the last step is not the loss: {last}"
        for below, above in zip(rest[::-1], path.steps[::-1]):
            found = []
            for node, slot in here:
                for child in {child for child, _ in node.next_functions if child is not None}:
                    slots = self.at(child, below)
                    if slots:
                        values = self.derivatives(node, slot, above, child, below)
                        if any(value == near(below.derivative) for value in values):
                            found += [(child, slot) for slot in slots]
            if not found:
                return f"no node fits {below}, below {above}"
            here = found
        return None


def claims(path: Any) -> None:
    """The steps fit together."""
    steps = path.steps
    assert steps[0].operator == "leaf" and steps[0].module == "" and steps[0].call == 0
    assert steps[0].index == path.index
    assert path.gradient == steps[0].gradient
    assert math.prod(step.derivative for step in steps) == near(path.weight)
    assert path.log_weight == near(math.log(abs(path.weight)))
    assert all(step.derivative for step in steps)
    for step, after in zip(steps, steps[1:]):
        assert step.share * step.gradient == near(step.derivative * after.gradient)
        assert len(step.index) == len(step.shape)
        assert all(0 <= i < n for i, n in zip(step.index, step.shape))
    assert (steps[-1].derivative, steps[-1].gradient, steps[-1].share) == (1.0, 1.0, 1.0)
    assert steps[-1].shape == steps[-1].index == ()
    assert len(path) == len(steps) == len(path.operators) + 1
    assert path.operators == [step.operator for step in steps[1:]]
    if path.gradient:
        assert path.share == near(path.weight / path.gradient)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", MODELS)
def test_every_step_is_what_it_says(name: str, rule: str) -> None:
    made = Made.of(name)
    trace = made.watch.trace(made.loss, rule=rule)
    paths = trace.paths(sample=25, seed=3)
    assert 15 < len(paths) <= 25
    nodes = Nodes(made.loss)
    for path in paths:
        claims(path)
        assert nodes.fault(path) is None
        assert path.gradient == near(float(trace.gradients[path.name][path.index]))


def test_gradients_of_activations_are_those_autograd_retains() -> None:
    w, v, x = leaf([[0.5, -1.0], [2.0, 0.3]]), leaf([1.5, -0.7]), torch.tensor([0.4, 0.9])
    a = w @ x
    b = a.tanh()
    c = b * v
    d = c.exp()
    loss = (d * b).sum()
    kept = {"MvBackward0": a, "TanhBackward0": b, "ExpBackward0": d, "SumBackward0": loss}
    grads = torch.autograd.grad(loss, list(kept.values()), retain_graph=True)
    wanted = dict(zip(kept, grads))
    for tensor in kept.values():
        tensor.retain_grad()
    loss.backward(retain_graph=True)
    assert all(torch.equal(kept[name].grad, wanted[name]) for name in kept)
    for rule in RULES:
        trace = gt.trace(loss, rule=rule, names={"w": w, "v": v})
        for name, size in (("w", (2, 2)), ("v", (2,))):
            for index in torch.cartesian_prod(*map(torch.arange, size)).reshape(-1, len(size)).tolist():
                path = trace.path(name, index)
                seen = [step for step in path.steps if step.operator in kept]
                assert len(seen) >= 2
                for step in seen:
                    assert step.gradient == near(float(wanted[step.operator][step.index]))
                    assert step.shape == tuple(kept[step.operator].shape)


@pytest.mark.xfail(strict=True, reason="where hooks are looked for, retained gradients are added to")
def test_retained_gradients_are_left_alone() -> None:
    x = leaf(1.0)
    a = x * 2
    a.retain_grad()
    x.register_hook(lambda grad: None)
    gt.trace(a * a.sin(), names={"x": x}).path("x")
    assert a.grad is None


# Asking ------------------------------------------------------------------------------------------


def test_any_index() -> None:
    w, b, s = leaf([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), leaf([0.5, 0.25]), leaf(2.0)
    loss = ((w.sum(1) + b) * torch.tensor([1.0, 3.0])).sum() * s
    trace = gt.trace(loss, names={"w": w, "b": b, "s": s})
    for index in ((1, 2), [1, 2], (-1, -1), (1, -1), torch.Size([1, 2]), torch.tensor([1, 2])):
        path = trace.path("w", index)
        assert (path.name, path.index, path.pair) == ("w", (1, 2), 0)
        assert path.weight == near(6.0)
    for index in (1, (1,), [1], -1, (-1,)):
        assert trace.path("b", index).index == (1,)
    for path in (trace.path("s"), trace.path("s", ()), trace.path("s", [])):
        assert path.index == () and path.steps[0].shape == ()
        assert path.weight == near(float(loss.detach()) / 2)


@pytest.mark.xfail(strict=True, reason="a number that is no int (NumPy's, a 0-d tensor) is refused")
def test_an_index_of_another_library() -> None:
    b = leaf([0.5, 0.25])
    trace = gt.trace((b * b).sum(), names={"b": b})
    import numpy

    assert trace.path("b", torch.tensor(1)).index == (1,)
    assert trace.path("b", numpy.int64(1)).index == (1,)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        self.last = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.inner(x) * 2))


@pytest.mark.parametrize("rule", RULES)
def test_modules_and_calls(rule: str) -> None:
    """A module that is called twice is there once for each call, if something lies between."""
    model = Twice()
    with gt.watch(model) as watch:
        loss = model(torch.randn(1, 2)).sum() * 3
    trace = watch.trace(loss, rule=rule)
    path = trace.path("last.bias", 0)
    assert path.operators == ["AddmmBackward0", "SumBackward0", "MulBackward0"]
    assert path.modules == ["last"]
    found = [(s.operator, s.module, s.call) for s in trace.path("inner.0.weight", (0, 1)).steps]
    second = [
        ("AddmmBackward0", "inner.0", 1),
        ("TanhBackward0", "inner.1", 1),
        ("AddmmBackward0", "last", 0),
        ("SumBackward0", "", 0),
        ("MulBackward0", "", 0),
    ]
    first = [
        ("AddmmBackward0", "inner.0", 0),
        ("TanhBackward0", "inner.1", 0),
        ("MulBackward0", "", 0),
    ]
    weight = watch.graph(loss)["inner.0.weight"]
    assert len(watch.graph(loss).uses(weight)) == 2
    if len(found) == 7:
        assert found == [("leaf", "", 0), ("TBackward0", "inner.0", 1), *second]
        assert trace.path("inner.0.weight", (0, 1)).modules == ["inner.0", "inner.1", "last"]
    else:
        assert found == [("leaf", "", 0), ("TBackward0", "inner.0", 0), *first, *second]
    long = [p for p in trace.paths("inner.0.weight", k=50) if len(p) == 10]
    assert long
    for path in long:  # the product between both calls is in no inner module, but in the model
        assert path.modules == ["inner.0", "inner.1", "inner.0", "inner.1", "last"]


def test_modules_in_a_row_are_one() -> None:
    class Deep(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin().cos().exp()

    model = nn.Sequential(Deep(), Deep(), nn.Identity(), Deep())
    x = leaf([0.3])
    with gt.watch(model) as watch:
        loss = model(x * 1.0).log().sum()
    path = watch.trace(loss).path("leaf0", 0)
    assert [step.module for step in path.steps] == ["", "", *"000111333", "", ""]
    assert path.modules == ["0", "1", "3"]
    assert repr(path).startswith("Path(leaf0[0]: 0 -> 1 -> 3, weight=")
    assert path.operators[1:4] == ["SinBackward0", "CosBackward0", "ExpBackward0"]


# Long paths --------------------------------------------------------------------------------------


def repeated(x: Tensor, factor: float, times: int) -> Tensor:
    for _ in range(times):
        x = x * factor
    return x


@pytest.mark.parametrize("rule", RULES)
def test_a_long_path_keeps_its_weight(rule: str) -> None:
    x = leaf(1.0)
    path = gt.trace(repeated(x, 0.9, 3000), rule=rule, names={"x": x}).path("x")
    assert len(path) == 3001
    assert path.weight == pytest.approx(0.9**3000, rel=1e-9)
    assert path.log_weight == near(3000 * math.log(0.9))
    assert path.share == near(1.0)


@pytest.mark.parametrize("factor", [0.25, -0.25])
def test_a_weight_too_small_for_a_float(factor: float) -> None:
    """Viterbi finds the path all the same; for greedy all that comes is 0, by rounding."""
    x = leaf(1.0)
    loss = repeated(x, factor, 600)
    path = gt.trace(loss, rule="viterbi", names={"x": x}).path("x")
    assert path.weight == 0.0 and len(path) == 601
    assert path.log_weight == near(600 * math.log(0.25))
    assert path.gradient == 0.0 and math.isnan(path.share)
    assert "weight 0, gradient 0" in str(path)
    with pytest.raises(GradtraceError, match="has no path"):
        gt.trace(loss, rule="greedy", names={"x": x}).path("x")


def test_a_weight_too_large_for_a_float() -> None:
    x = leaf(1.0)
    loss = repeated(x, 3.0, 700)
    with pytest.raises(GradtraceError, match="not finite"):
        gt.trace(loss, rule="viterbi", names={"x": x})
    path = gt.trace(loss, rule="viterbi", names={"x": x}, nonfinite="allow").path("x")
    assert path.weight == math.inf
    assert path.log_weight == near(700 * math.log(3.0))
