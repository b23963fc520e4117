"""Operators opened into elementary ones: gradients stay, paths are those of the pieces."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradtrace as gt
from gradtrace.errors import GradtraceError
from gradtrace.pytorch.opened import OPENED, WRAPPERS
from gradtrace.semirings import ABS, COUNT

Call = Callable[[Tensor], Tensor]

ALL = tuple(OPENED)
MASK = torch.ones(4, 4, dtype=torch.bool).tril()
WEIGHT, SHIFT = torch.linspace(0.5, 2, 6), torch.linspace(-1, 1, 6)
TARGET = torch.tensor([0, 5, 2, -100])
SHARES = torch.full((4, 6), 1 / 6, dtype=torch.float64)


def _batch_norm(x: Tensor) -> Tensor:
    mean, variance = torch.zeros(6).double(), torch.ones(6).double()
    out = F.batch_norm(x, mean, variance, WEIGHT.double(), None, True, 0.3)
    return out + mean + variance  # what was written into the buffers counts, too


CALLS: dict[str, tuple[str, Call]] = {
    "softmax": ("softmax", lambda x: F.softmax(x, -1)),
    "of torch": ("softmax", lambda x: torch.softmax(input=x, dim=0)),
    "method": ("softmax", lambda x: x.softmax(dim=1)),
    "dtype": ("softmax", lambda x: x.softmax(1, dtype=torch.float32).double()),
    "log dtype": ("log_softmax", lambda x: x.log_softmax(1, dtype=torch.float32).double()),
    "softmin": ("softmax", lambda x: F.softmin(x, 1)),
    "special": ("softmax", lambda x: torch.special.softmax(x, 1)),
    "masked": ("softmax", lambda x: (x @ x.T).masked_fill(~MASK, -math.inf).softmax(-1)),
    "attention": ("softmax", lambda x: F.scaled_dot_product_attention(x, x, x)),
    "causal": ("softmax", lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True)),
    "mask": ("softmax", lambda x: F.scaled_dot_product_attention(x, x, x, MASK, scale=0.3)),
    "added": ("softmax", lambda x: F.scaled_dot_product_attention(x, x, x, MASK.double())),
    "log-softmax": ("log_softmax", lambda x: F.log_softmax(x, -1)),
    "log method": ("log_softmax", lambda x: x.log_softmax(0)),
    "cross entropy": ("log_softmax", lambda x: F.cross_entropy(x, TARGET)),
    "one row": ("log_softmax", lambda x: F.cross_entropy(x[0], TARGET[1])),
    "rows": ("log_softmax", lambda x: F.cross_entropy(x, TARGET, reduction="none")),
    "weighted": ("log_softmax", lambda x: F.cross_entropy(x, TARGET, WEIGHT.double())),
    "smooth": ("log_softmax", lambda x: F.cross_entropy(x, TARGET, label_smoothing=0.2)),
    "smooth, weighted": (
        "log_softmax",
        lambda x: F.cross_entropy(x, TARGET, WEIGHT.double(), label_smoothing=0.2),
    ),
    "soft": ("log_softmax", lambda x: F.cross_entropy(x, SHARES, WEIGHT.double())),
    "both": (
        "log_softmax",
        lambda x: F.cross_entropy(x, SHARES, reduction="sum", label_smoothing=0.3),
    ),
    "layer norm": ("layer_norm", lambda x: F.layer_norm(x, (6,), WEIGHT.double())),
    "bias": ("layer_norm", lambda x: F.layer_norm(x, (4, 6), None, SHIFT.double().expand(4, 6))),
    "rms norm": ("rms_norm", lambda x: F.rms_norm(x, (6,), WEIGHT.double())),
    "tiny": ("rms_norm", lambda x: F.rms_norm(x * 1e-8, (6,))),  # eps has its default
    "group norm": ("group_norm", lambda x: F.group_norm(x, 2, WEIGHT.double(), SHIFT.double())),
    "batch norm": ("batch_norm", _batch_norm),
}


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        yield


def _watched(call: Call, x: Tensor, *names: str) -> tuple[Tensor, Any]:
    with gt.watch(nn.Identity(), open=names, names={"x": x}) as watch:
        out = call(x)
    return out, watch


def _operators(loss: Tensor) -> set[str]:
    return {each.name for each in gt.graph(loss).operators}


@pytest.mark.parametrize("case", CALLS)
def test_values_and_gradients_stay(case: str) -> None:
    """To 1e-12 in float64, with every name opened; and nothing else is opened by its own name."""
    name, call = CALLS[case]
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    slack = 1e-6 if "dtype" in case else 1e-12
    plain = call(x)
    weights = torch.randn_like(plain)
    (true,) = torch.autograd.grad((plain * weights).sum(), x)
    for names in ((name,), ALL):
        out, watch = _watched(call, x, *names)
        torch.testing.assert_close(out, plain, rtol=0, atol=slack)
        loss = (out * weights).sum()
        torch.testing.assert_close(watch.backward(loss)["x"], true, rtol=0, atol=slack)
        assert not any(
            word in each for each in _operators(loss) for word in ("Softmax", "Norm", "ScaledDot")
        )
    others = [each for each in ALL if each != name]
    kept = _operators((_watched(call, x, *others)[0] * weights).sum())
    assert kept == _operators((plain * weights).sum()) or "ScaledDot" in str(kept)


def test_every_name_and_wrapper_has_a_case() -> None:
    assert {name for name, _ in CALLS.values()} == set(OPENED)
    used = {F.softmax, F.log_softmax, F.softmin, F.cross_entropy, F.layer_norm, F.rms_norm}
    used |= {F.group_norm, F.batch_norm}
    assert WRAPPERS - used == {F.gumbel_softmax, F.multi_head_attention_forward}


@pytest.mark.parametrize("size", [1, 2, 5])
def test_paths_by_hand(size: int) -> None:
    """From x[j] to softmax(x)[0]: through logsumexp always, straight on if j is 0. The weights of
    the two are p₀ and -p₀·pⱼ. Fused there is one path, of weight p₀·(δ - pⱼ).
    """
    x = torch.randn(size, dtype=torch.float64, requires_grad=True)
    p = torch.softmax(x.detach(), 0)
    straight = (torch.arange(size) == 0).double()
    for name, call in (("softmax", torch.softmax), ("log_softmax", torch.log_softmax)):
        out, watch = _watched(lambda x, f=call: f(x, 0), x, name)
        scale = p[0] if name == "softmax" else 1.0
        torch.testing.assert_close(watch.backward(out[0], ABS)["x"], scale * (straight + p))
        torch.testing.assert_close(watch.backward(out[0], COUNT)["x"], 1 + straight)
        fused = gt.backward(call(x, 0)[0], ABS, names={"x": x})["x"]
        torch.testing.assert_close(fused, (scale * (straight - p)).abs())


def test_paths_of_layer_norm_by_hand() -> None:
    """y₀ = c₀/σ with c = x - mean. c[i] reaches y₀ by its numerator if i is 0, and as either factor
    of c·c; x[j] reaches every c[i] by the mean, and c[j] straight.
    """
    size = 3
    x = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64, requires_grad=True)
    out, watch = _watched(lambda x: F.layer_norm(x, (size,)), x, "layer_norm")
    to_c = torch.eye(size) + torch.ones(size, size)  # routes from x[j] to c[i]
    from_c = torch.tensor([3.0, 2.0, 2.0])  # routes from c[i] to y₀
    count = watch.backward(out[0], COUNT)["x"]
    torch.testing.assert_close(count, (from_c @ to_c).double())
    paths = [
        path for path in gt.testing.enumerate_paths(out[0], names={"x": x}) if path.index == (1,)
    ]
    assert len(paths) == int(count[1])
    absolute = sum(abs(path.weight) for path in paths)
    assert math.isclose(absolute, float(watch.backward(out[0], ABS)["x"][1]), rel_tol=1e-9)


class Block(nn.Module):
    """Attention of PyTorch with a norm, in a checkpoint if asked for."""

    def __init__(self, kept: bool = True, weights: bool = True) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(6), nn.MultiheadAttention(6, 2, batch_first=True)
        self.kept, self.weights = kept, weights

    def part(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x, x, x, need_weights=self.weights)[0]
        return self.norm(x + out)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.part(x) if self.kept else checkpoint(self.part, x, use_reentrant=False)
        return out


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_modules_and_checkpoints(kept: bool, weights: bool) -> None:
    """Those of PyTorch are opened inside, also where a checkpoint computes them again."""
    model, x = Block(kept, weights).double(), torch.randn(2, 4, 6, dtype=torch.float64)
    with gt.watch(model, open=("softmax", "layer_norm")) as watch:
        loss = model(x).square().sum()
    assert not {"SoftmaxBackward0", "NativeLayerNormBackward0"} & _operators(loss)
    found = watch.backward(loss)
    whole = model(x).square().sum()
    true = torch.autograd.grad(whole, list(model.parameters()))
    for (name, _), each in zip(model.named_parameters(), true):
        torch.testing.assert_close(found[name], each, rtol=0, atol=1e-11)
    places = {each.module for each in watch.graph(loss).operators if each.name == "SqrtBackward0"}
    assert places == {"norm"}
    assert "NativeLayerNormBackward0" in _operators(whole)  # nothing is left behind


def test_nested_watches_and_diagnosis() -> None:
    """The inner watch opens what the outer one does, too; a recorded pass is opened likewise."""
    model, x = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Softmax(-1)), torch.randn(3, 6)
    with gt.watch(model, open=["softmax"]):
        with gt.watch(model, open="layer_norm", diagnose=True) as inner:
            both = model(x).square().sum()
        one = model(x).square().sum()
    fused = {"SoftmaxBackward0", "NativeLayerNormBackward0"}
    assert not fused & _operators(both)
    assert fused & _operators(one) == {"NativeLayerNormBackward0"}
    assert fused <= _operators(model(x).square().sum())
    assert inner.diagnose(both).nonfinite is None


def test_nested_watches_open_a_checkpoint_alike() -> None:
    """What is computed again is opened by both, or it would not fit what was saved."""
    model, x = Block(kept=False).double(), torch.randn(2, 4, 6, dtype=torch.float64)
    with gt.watch(model, open="softmax"), gt.watch(model, open="layer_norm") as watch:
        loss = model(x).square().sum()
    found = watch.backward(loss)
    true = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    for (name, _), each in zip(model.named_parameters(), true):
        torch.testing.assert_close(found[name], each, rtol=0, atol=1e-11)


def test_a_dtype_that_is_asked_for_is_that_of_the_result() -> None:
    x = torch.randn(2, 3).bfloat16()
    with gt.watch(nn.Identity(), open=ALL):
        for call in (F.softmax, F.log_softmax):
            assert call(x, -1, dtype=torch.float64).dtype is torch.float64


def test_half_precision_is_computed_in_float32() -> None:
    x = (torch.randn(4, 6) * 4 + 30).bfloat16()
    for _, call in (CALLS["softmax"], CALLS["log-softmax"]):
        with gt.watch(nn.Identity(), open=ALL):
            out = call(x)
        assert out.dtype is torch.bfloat16
        torch.testing.assert_close(out, call(x), rtol=0.01, atol=0.01)


def test_attribution_runs_again_opened() -> None:
    """Scores of paths are those of the opened pass, which is run again by ``attribute``."""
    model, x = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)).double(), torch.randn(2, 6).double()
    with gt.watch(model, open=["layer_norm"]) as watch:
        assert watch._again()._open == ("layer_norm",)  # type: ignore[attr-defined]
        model(x)


def test_refusals() -> None:
    with pytest.raises(GradtraceError, match="did you mean 'softmax'"):
        gt.watch(nn.Identity(), open=["sotfmax"])
    with pytest.raises(GradtraceError, match="leave composed=True"):
        gt.watch(nn.Identity(), open=["softmax"], composed=False)
