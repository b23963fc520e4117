"""A trace notices that its weights were changed, however that was done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.errors import GradtraceError


def swap(p: Tensor) -> None:
    p.data = p.data * 2


def one(p: Tensor) -> None:
    p.data.view(-1)[p.numel() // 3] += 1e-3


def by_numpy(p: Tensor) -> None:
    p.detach().numpy()[...] *= 2


def on_a_view(p: Tensor) -> None:
    with torch.no_grad():
        p.data.view(-1)[: p.numel() // 2].copy_(torch.zeros(p.numel() // 2))


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "scaled": lambda p: p.data.mul_(10),
    "negated": lambda p: p.data.neg_(),
    "clipped": lambda p: p.data.clamp_(-0.05, 0.05),
    "numpy": by_numpy,
    "a view": on_a_view,
    "foreach": lambda p: torch._foreach_mul_([p.data], 2.0),
    "in place": lambda p: torch.no_grad()(p.mul_)(2),
}


@pytest.mark.parametrize("size", [4, 300])
@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_noticed(change: str, size: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(size, size), nn.Tanh(), nn.Linear(size, 1))
    with gt.watch(model) as watch:
        loss = model(torch.randn(2, size)).sum()
    trace = watch.trace(loss)
    before = trace.path("0.weight", (0, 0)).weight
    loss.backward()
    assert trace.path("0.weight", (0, 0)).weight == before
    CHANGES[change](model[0].weight if size > 4 else model[2].weight)
    for ask in (lambda: trace.path("0.weight", (0, 0)), trace.influence, trace.norms):
        with pytest.raises(GradtraceError, match="changed in place since the trace"):
            ask()


class Masked(nn.Module):
    """A layer between an input and a buffer, neither of which requires grad."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(size, size)
        self.register_buffer("mask", torch.rand(size))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x).tanh() * self.mask).sum()


@pytest.mark.parametrize("size", [4, 300])
@pytest.mark.parametrize("what", ["input", "buffer"])
@pytest.mark.parametrize("change", ["scaled", "numpy"])
def test_changed_inputs_and_buffers_are_noticed(change: str, what: str, size: int) -> None:
    """A batch in memory of NumPy that the next one overwrites, a moving average by ``.data``."""
    torch.manual_seed(0)
    model, x = Masked(size), torch.randn(64, size)
    with gt.watch(model) as watch:
        loss = model(x)
    trace = watch.trace(loss)
    loss.backward()
    trace.path("layer.weight", (0, 0))
    CHANGES[change](x if what == "input" else model.mask)
    for ask in (lambda: trace.path("layer.weight", (0, 0)), trace.influence, trace.mass):
        with pytest.raises(GradtraceError, match="changed in place since the trace"):
            ask()


INDEXED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index_add": lambda w, at: torch.zeros(5, 3).index_add(0, at, w),
    "scatter": lambda w, at: torch.zeros(5, 3).scatter(0, at[:, None].expand(4, 3), w),
    "index_copy": lambda w, at: torch.zeros(5, 3).index_copy(0, at, w),
    "put": lambda w, at: torch.zeros(5, 3).index_put((at,), w),
}


@pytest.mark.parametrize("how", INDEXED)
@pytest.mark.parametrize("change", ["copied", "numpy"])
def test_changed_indices_are_noticed(change: str, how: str) -> None:
    """A batch of indices in memory that the next one overwrites: paths led elsewhere."""
    torch.manual_seed(0)
    w, at = torch.randn(4, 3, requires_grad=True), torch.tensor([0, 3, 2, 4])
    loss = (INDEXED[how](w, at).sin() * torch.arange(15.0).reshape(5, 3)).sum()
    trace = gt.trace(loss, names={"w": w})
    want = float(trace.gradients["w"][0, 1])
    assert trace.path("w", (0, 1)).weight == pytest.approx(want, rel=1e-5)
    new = torch.tensor([4, 1, 0, 3])
    if change == "copied":
        at.copy_(new)
    else:
        at.numpy()[...] = new.numpy()
    for ask in (lambda: trace.path("w", (0, 1)), trace.influence):
        with pytest.raises(GradtraceError, match="changed in place since the trace"):
            ask()


class OfInference(torch.autograd.Function):
    """Its ``backward`` uses tensors of inference mode, which count no versions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor, order: Tensor) -> Tensor:
        ctx.factor, ctx.order = factor, order
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (grads[0] * ctx.factor)[ctx.order], None, None


def test_tensors_of_inference_mode() -> None:
    """A trace ended in PyTorch's error that they have no version."""
    w = torch.ones(3, requires_grad=True)
    with torch.inference_mode():
        factor, order = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1, 2, 0])
    loss = OfInference.apply(w.sin(), factor, order).sum()
    trace = gt.trace(loss, names={"w": w})
    assert trace.path("w", 0).weight == pytest.approx(float(2 * torch.ones(()).cos()))
    with torch.inference_mode():
        factor.mul_(2)
    with pytest.raises(GradtraceError, match="changed in place since the trace"):
        trace.influence()


@pytest.mark.parametrize("what", ["input", "buffer", "weight"])
def test_freed_memory_is_noticed(what: str) -> None:
    """As sharded models and offloaded activations free it: to read it ended the process."""
    model, x = Masked(4), torch.randn(64, 4)
    with gt.watch(model) as watch:
        loss = model(x)
    trace = watch.trace(loss)
    freed = {"input": x, "buffer": model.mask, "weight": model.layer.weight}[what]
    freed.untyped_storage().resize_(0)
    for ask in (lambda: trace.path("layer.weight", (0, 0)), trace.influence):
        with pytest.raises(GradtraceError, match="changed in place since the trace"):
            ask()


def test_one_element_of_a_small_weight_and_nothing_at_all() -> None:
    torch.manual_seed(0)
    model = nn.Linear(9, 1)
    with gt.watch(model) as watch:
        loss = model(torch.randn(2, 9)).sum()
    trace = watch.trace(loss)
    one(model.bias)
    with pytest.raises(GradtraceError, match="changed in place since the trace"):
        trace.influence()


def test_other_memory_leaves_the_weights_of_the_forward_pass() -> None:
    """``p.data = new`` does not touch what the graph has saved."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    with gt.watch(model) as watch:
        loss = model(torch.randn(2, 4)).sum()
    trace = watch.trace(loss)
    before = trace.path("0.weight", (0, 0)).weight
    for p in model.parameters():
        swap(p)
    assert trace.path("0.weight", (0, 0)).weight == before


@pytest.mark.parametrize(
    "new",
    [lambda b: b * 2 + 1, lambda b: b[:1], lambda b: b.double(), lambda b: b.flip(0)],
    ids=["other numbers", "shape", "dtype", "order"],
)
def test_other_memory_that_is_read_instead(new: Callable[[Tensor], Tensor]) -> None:
    """Autograd saves a leaf itself, so a factor that is one is read from its new ``.data``."""
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    trace = gt.trace((a * b).square().sum(), names={"a": a, "b": b})
    trace.path("a", (0, 0))
    b.data = new(b.detach())
    for ask in (lambda: trace.path("a", (1, 1)), trace.influence, trace.decompose):
        with pytest.raises(GradtraceError, match="changed in place since the trace"):
            ask()


def test_a_leaf_of_another_shape_has_no_elements_of_the_old_one() -> None:
    w = torch.randn(4, 3, requires_grad=True)
    trace = gt.trace((torch.randn(2, 3) @ w.T).square().sum(), names={"w": w})
    w.data = torch.randn(3, 4)
    with pytest.raises(GradtraceError, match="changed in place since the trace"):
        trace.path("w", (2, 3))


def test_a_gradient_that_waits_notices_another_input() -> None:
    w, x = torch.randn(300, 300, requires_grad=True), torch.randn(2, 300)
    trace = gt.trace((x @ w).sum(), names={"w": w})
    x.data = torch.randn(2, 300)
    with pytest.raises(GradtraceError, match="changed in place since the trace"):
        trace.gradients["w"]
