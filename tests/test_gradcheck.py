"""The gradient check: passes what is right, finds what is wrong, and leaves no trace."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradtrace as gt
from gradtrace.errors import GradtraceError, NoGraph, NonFinite, NotScalar, Unsupported
from gradtrace.table import Table
from gradtrace.training import gradcheck
from gradtrace.training.gradcheck import Check, check

Made = tuple[Callable[..., Tensor], nn.Module]


def verdicts(result: Check) -> dict[str, str]:
    return dict(zip(result.names, result.column("verdict")))


# Right gradients ---------------------------------------------------------------------------------


def mlp() -> Made:
    x, y = torch.randn(8, 5), torch.randn(8, 2)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
    return lambda m: F.mse_loss(m(x), y), model


def noisy() -> Made:
    x = torch.randn(8, 5)
    model = nn.Sequential(
        nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.4), nn.Linear(6, 3)
    )
    return lambda m: F.cross_entropy(m(x), torch.arange(8) % 3), model


def convolution() -> Made:
    x = torch.randn(2, 2, 6, 6)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return lambda m: m(x).pow(2).mean(), model


def lstm() -> Made:
    x = torch.randn(4, 2, 3)
    return lambda m: m(x)[0].pow(2).sum(), nn.LSTM(3, 4, 2, dropout=0.3)


def layer_norm() -> Made:
    x = torch.randn(3, 4)
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4))
    return lambda m: m(x).sigmoid().pow(2).sum(), model


def attention() -> Made:
    x = torch.randn(3, 2, 8)
    return lambda m: m(x).pow(3).mean(), nn.TransformerEncoderLayer(8, 2, 8, activation="gelu")


def half() -> Made:
    x = torch.randn(3, 4, dtype=torch.bfloat16)
    model = nn.Linear(4, 2).bfloat16()
    return lambda m: m(x).float().tanh().sum(), model


def autocast() -> Made:
    x, model = torch.randn(3, 4), nn.Linear(4, 2)

    def loss(m: nn.Module) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result: Tensor = m(x).tanh().sum()
            return result

    return loss, model


def sparse() -> Made:
    model = nn.Embedding(5, 3, sparse=True)
    return lambda m: m(torch.tensor([1, 2, 1])).tanh().sum(), model


def weight_norm() -> Made:
    x = torch.randn(3, 4)
    model = nn.utils.parametrizations.weight_norm(nn.Linear(4, 2))
    return lambda m: m(x).tanh().sum(), model


def checkpointed() -> Made:
    """A part that is run again in the backward pass, on a batch in float32."""
    x, model = torch.randn(3, 4), nn.Sequential(nn.Linear(4, 2), nn.Tanh())
    return lambda m: checkpoint(m, x, use_reentrant=False).square().sum(), model


RIGHT = [
    mlp,
    noisy,
    convolution,
    lstm,
    layer_norm,
    attention,
    half,
    autocast,
    sparse,
    weight_norm,
    checkpointed,
]


@pytest.mark.parametrize("make", RIGHT, ids=lambda make: make.__name__)
def test_right_gradients_pass(make: Callable[[], Made]) -> None:
    torch.manual_seed(3)
    loss_fn, model = make()
    result = check(model, loss_fn, sample=6)
    assert result.ok, str(result)
    assert set(verdicts(result).values()) == {"ok"}, str(result)
    assert max(row.error for row in result.rows) < 1e-4


def test_nothing_slow_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch._dynamo`` takes seconds, and so does sympy, which ``torch.unravel_index`` imports."""
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    monkeypatch.setitem(sys.modules, "torch.fx.experimental.symbolic_shapes", None)
    loss_fn, model = mlp()
    check(model, loss_fn, sample=2)
    with gt.watch(model) as watch:
        loss = loss_fn(model)
        nan = (model[0].weight * torch.nan).sum()
    assert str(watch.conflicts({"a": loss, "b": -loss}))
    assert str(watch.diagnose(nan))
    assert "torch._dynamo" not in sys.modules


@pytest.mark.parametrize("scale", [1e8, 1e-8])
def test_the_scale_of_the_loss_does_not_matter(scale: float) -> None:
    torch.manual_seed(0)
    loss_fn, model = mlp()
    assert check(model, lambda m: scale * loss_fn(m), sample=6).ok
    bad = check(model, lambda m: scale * wrong(loss_fn(m), 1.01), sample=6)
    assert set(verdicts(bad).values()) == {"wrong"}


@pytest.mark.parametrize("power", [1e-6, 1.0, 1e6])
def test_the_scale_of_the_parameter_does_not_matter(power: float) -> None:
    model = nn.ParameterDict({"w": torch.tensor([0.3, -0.7, 1.1]) * power})
    assert check(model, lambda m: (m["w"] / power).sin().sum()).ok


def test_strong_curvature_is_not_an_error() -> None:
    model = nn.ParameterDict({"w": torch.tensor([0.1, 0.2])})
    assert verdicts(check(model, lambda m: (3000 * m["w"]).sin().sum())) == {"w": "ok"}


def test_a_gradient_that_cancels_is_lost_in_noise_and_passes() -> None:
    """A bias before batch norm has gradient 0, which differences see only as rounding."""
    torch.manual_seed(1)
    x = torch.randn(16, 4)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))
    result = check(model, lambda m: m(x).exp().mean())
    assert verdicts(result)["0.bias"] == "ok"


# How loss_fn may be written ----------------------------------------------------------------------


def test_a_loss_that_closes_over_the_model() -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    assert check(model, lambda: model(x).tanh().sum()).ok
    assert check(model, lambda m: model(x).tanh().sum()).ok
    assert check(model, lambda x=x: model(x).tanh().sum()).ok
    assert check(model, lambda *args: args[0](x).tanh().sum()).ok


def test_a_loss_that_closes_over_a_parameter() -> None:
    model = nn.Linear(3, 2)
    weight = model.weight
    result = check(model, lambda: wrong(weight, -1.0).tanh().sum())
    assert verdicts(result) == {"weight": "wrong", "bias": "unreached"}


def test_narrow_tensors_are_widened_where_they_meet_the_model() -> None:
    model, x = nn.Linear(3, 3), torch.randn(3)
    state = torch.zeros(3)

    def loss(m: nn.Module) -> Tensor:
        state.add_(x)
        mixed = torch.stack([m(x), state, x.to(torch.float32)])
        return (mixed.to(dtype=torch.half) @ torch.ones(3, dtype=torch.float32)).tanh().sum()

    assert check(model, loss).ok
    assert not state.any()


def test_a_gradient_penalty() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(5, 3)
    x.requires_grad_()

    def loss(m: nn.Module) -> Tensor:
        (slope,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
        return slope.pow(2).sum()

    result = check(model, loss)
    assert result.ok and verdicts(result)["2.bias"] == "unreached"
    assert x.grad is None


def test_shared_parameters_are_checked_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 3, bias=False))
    model[2].weight = model[0].weight
    x = torch.randn(2, 3)
    result = check(model, lambda m: m(x).pow(2).sum())
    assert result.ok and list(verdicts(result)) == ["0.weight"]


def test_frozen_parameters_are_skipped() -> None:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    result = check(model, lambda m: m(torch.ones(3)).sum())
    assert list(verdicts(result)) == ["weight"]


def test_it_works_inside_no_grad() -> None:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        assert check(model, lambda m: m(torch.ones(3)).tanh().sum()).ok


# Wrong gradients ---------------------------------------------------------------------------------


class Wrong(torch.autograd.Function):
    """The identity, with a gradient off by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float | Tensor) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def wrong(x: Tensor, factor: float | Tensor) -> Tensor:
    result: Tensor = Wrong.apply(x, factor)  # type: ignore[no-untyped-call]
    return result


class Layer(nn.Module):
    """A linear layer whose weight has a wrong gradient; its bias has a right one."""

    def __init__(self, factor: float | Tensor, size: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, size))
        self.bias = nn.Parameter(torch.randn(size))
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, wrong(self.weight, self.factor), self.bias).tanh()


@pytest.mark.parametrize("factor", [1.01, -1.0, 0.0, 1.001])
def test_a_wrong_factor_is_found_and_named(factor: float) -> None:
    torch.manual_seed(0)
    x, model = torch.randn(3, 4), nn.Sequential(nn.Linear(4, 4), Layer(factor), nn.Linear(4, 1))
    result = check(model, lambda m: m(x).sum())
    assert result.wrong == ("1.weight",) and not result.ok
    worst = result.rows[0]
    assert worst.name == "1.weight" and worst.analytic == pytest.approx(factor * worst.numeric)
    assert result.verdict == "wrong gradient: 1.weight"


def test_one_wrong_element_is_found_and_its_index_told() -> None:
    torch.manual_seed(0)
    factor = torch.ones(4, 4)
    factor[2, 1] = 1.5
    x = torch.randn(3, 4)
    result = check(Layer(factor), lambda m: m(x).sum())
    assert result.wrong == ("weight",)
    assert result.rows[0].worst_at == "[2, 1]"
    assert result.rows[0].error == pytest.approx(1 / 3, rel=1e-4)


def test_one_wrong_element_among_those_not_sampled_is_found() -> None:
    torch.manual_seed(0)
    factor = torch.ones(30, 30)
    factor[17, 4] = 3.0
    x = torch.randn(3, 30)
    result = check(Layer(factor, 30), lambda m: m(x).sum(), sample=1)
    assert result.wrong == ("weight",)
    assert result.rows[0].worst_at == "899 others" and result.rows[0].checked == 1


def test_a_detached_parameter_that_matters_is_wrong() -> None:
    model = nn.Linear(3, 2)
    result = check(model, lambda m: F.linear(torch.ones(3), m.weight.detach(), m.bias).sum())
    assert verdicts(result) == {"weight": "wrong", "bias": "ok"}


def test_a_parameter_that_plays_no_part_is_unreached() -> None:
    model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2, bias=False)])
    result = check(model, lambda m: m[0](torch.ones(3)).sum())
    assert verdicts(result)["1.weight"] == "unreached" and result.ok


def test_a_gradient_that_is_not_a_number_is_wrong() -> None:
    model = nn.ParameterDict({"w": torch.tensor([0.0, 4.0])})
    result = check(model, lambda m: torch.where(m["w"] > 1, m["w"].sqrt(), 0.0).sum())
    assert result.wrong == ("w",) and result["w"].worst_at == "[0]"
    assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["rows"][0][3] == "inf"


def test_smaller_steps_do_not_hide_a_wrong_gradient_in_noise() -> None:
    model = nn.ParameterDict({"w": torch.tensor([0.3])})
    assert check(model, lambda m: wrong(m["w"], 1.01).sum() + 1e6).wrong == ("w",)


def test_a_wrong_gradient_beside_a_kink_is_wrong() -> None:
    """The kink lies within the first step, not within the finer ones."""
    model = nn.ParameterDict({"w": torch.tensor([2e-6], dtype=torch.float64)})
    assert check(model, lambda m: m["w"].relu().sum()).rows[0].verdict == "ok"
    result = check(model, lambda m: wrong(m["w"], 1.5).relu().sum())
    assert result.wrong == ("w",)


# Points without a derivative ---------------------------------------------------------------------

KINKS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda w: w.relu().sum(),
    "relu, sloped": lambda w: (w.relu() + 0.7 * w).sum(),
    "max": lambda w: torch.stack([w, 0 * w]).max(0).values.sum(),
    "max pool": lambda w: F.max_pool1d(torch.stack([w, 0 * w], -1), 2).sum(),
    "leaky": lambda w: F.leaky_relu(w).sum(),
    "smooth, though its parts are not": lambda w: (w.relu() - (-w).relu()).sum(),
}


@pytest.mark.parametrize("name", KINKS)
def test_a_kink_is_not_an_error(name: str) -> None:
    model = nn.ParameterDict({"w": torch.zeros(3)})
    result = check(model, lambda m: KINKS[name](m["w"]))
    assert verdicts(result) == {"w": "kink"} and result.ok, str(result)
    assert "1 at a point without a derivative" in result.verdict


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_relus_at_exactly_zero_excuse_no_other_error(factor: float) -> None:
    """After a zero initialisation differences and gradients part in each unit and sample."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    nn.init.zeros_(model[0].weight), nn.init.zeros_(model[0].bias)
    x, y = torch.randn(32, 6), torch.randint(3, (32,))

    def loss(m: nn.Module) -> Tensor:
        hidden = model[1](wrong(model[0](x), factor))
        return F.cross_entropy(model[2](hidden), y)

    found = verdicts(check(model, loss, sample=4))
    below = "kink" if factor == 1 else "wrong"
    assert found == {"0.weight": below, "0.bias": below, "2.weight": "ok", "2.bias": "ok"}


def test_outside_the_domain_there_is_no_derivative() -> None:
    model = nn.ParameterDict({"w": torch.zeros(1)})
    finite_at_zero = check(model, lambda m: (m["w"] + m["w"].detach().clamp(max=0).sqrt()).sum())
    assert verdicts(finite_at_zero) == {"w": "kink"}


def test_ties_within_one_parameter() -> None:
    model = nn.ParameterDict({"w": torch.ones(4), "v": torch.arange(4.0)})
    result = check(model, lambda m: m["w"].max(0).values * m["v"].max())
    assert verdicts(result) == {"w": "kink", "v": "ok"} and result.ok


# No trace ----------------------------------------------------------------------------------------


class Stateful(nn.Module):
    """State of every kind but attributes: buffers of three dtypes, modes, random numbers."""

    count: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.inner = nn.Sequential(self.linear, nn.BatchNorm1d(3), nn.Dropout(0.5))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float16))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.inner[2].train(not self.inner[2].training)
        out: Tensor = self.inner(x)
        self.mean = 0.5 * self.mean + out.detach().mean(0)
        return out + random.random() + float(numpy.random.rand())


def snapshot(model: nn.Module) -> list[Any]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [
        [(name, id(t), t.dtype, t.data_ptr(), t.tolist(), t.requires_grad) for name, t in tensors],
        [(id(p.grad), p.grad.tolist()) for p in model.parameters() if p.grad is not None],
        [module.training for module in model.modules()],
        torch.get_rng_state().tolist(),
        random.getstate(),
        numpy.random.get_state()[1].tolist(),  # type: ignore[index]
        torch.get_default_dtype(),
    ]


@pytest.fixture
def stateful() -> Stateful:
    torch.manual_seed(0)
    model = Stateful()
    model.inner[2].eval()
    torch.autograd.backward(model.linear(torch.ones(2, 3)).sum())
    return model


def test_the_model_is_left_untouched(stateful: Stateful) -> None:
    x = torch.randn(5, 3)
    old = stateful.linear(x).pow(2).sum()  # a graph of the user's, still alive
    expected = torch.autograd.grad(old, stateful.linear.weight, retain_graph=True)[0]
    before = snapshot(stateful)
    assert check(stateful, lambda m: m(x).pow(2).sum()).ok
    assert snapshot(stateful) == before
    assert torch.equal(torch.autograd.grad(old, stateful.linear.weight)[0], expected)


@pytest.mark.parametrize("kind", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("fatal", [1, 2, 30])
def test_the_model_is_put_back_after_an_exception(
    stateful: Stateful, kind: type[BaseException], fatal: int
) -> None:
    before, calls = snapshot(stateful), []

    def loss(m: nn.Module) -> Tensor:
        calls.append(0)
        m.eval()
        result: Tensor = m(torch.ones(2, 3)).sum()
        if len(calls) == fatal:
            raise kind("mine")
        return result

    with pytest.raises(kind, match="mine"):
        check(stateful, loss)
    assert snapshot(stateful) == before


def test_a_loss_that_writes_on_grad_and_weights(stateful: Stateful) -> None:
    before = snapshot(stateful)

    def loss(m: nn.Module) -> Tensor:
        m.zero_grad(set_to_none=False)
        with torch.no_grad():
            stateful.linear.bias.clamp_(0, 0)
        loss: Tensor = m(torch.eye(3)).pow(2).sum()
        torch.autograd.backward(loss, retain_graph=True)
        return loss

    check(stateful, loss)
    assert snapshot(stateful) == before


def test_the_seed_decides_the_result() -> None:
    torch.manual_seed(0)
    loss_fn, model = noisy()
    first = check(model, loss_fn, sample=2, seed=1)
    torch.rand(3)
    assert check(model, loss_fn, sample=2, seed=1).to_dict() == first.to_dict()
    assert check(model, loss_fn, sample=2, seed=2).to_dict() != first.to_dict()


# Errors ------------------------------------------------------------------------------------------


def complex_parameter() -> nn.Module:
    return nn.ParameterDict({"w": torch.zeros(2, dtype=torch.complex64)})


def changing() -> Callable[[nn.Module], Tensor]:
    batches = iter(torch.arange(100.0))
    return lambda m: m(next(batches).expand(2)).sum()


LINEAR = nn.Linear(2, 2)


def narrow(model: nn.Module) -> Tensor:
    raise RuntimeError("expected scalar type Float but found Double")


ERRORS: dict[str, tuple[type[GradtraceError], str, Any, Any]] = {
    "several losses": (NotScalar, r"shape \(2, 2\)", lambda m: m.weight, LINEAR),
    "NaN": (NonFinite, "loss is nan", lambda m: m.weight.sum() * float("nan"), LINEAR),
    "infinity": (NonFinite, "loss is inf", lambda m: m.weight.sum() + float("inf"), LINEAR),
    "detached": (NoGraph, "no grad_fn", lambda m: m.weight.sum().detach(), LINEAR),
    "a number": (NoGraph, "got float", lambda m: m.weight.sum().item(), LINEAR),
    "another model": (NoGraph, "depends on no", lambda m: nn.Linear(2, 2).bias.sum(), LINEAR),
    "nothing trainable": (NoGraph, "requires grad", lambda m: torch.ones(()), nn.ReLU()),
    "complex parameter": (Unsupported, "w is complex", lambda m: m["w"], complex_parameter()),
    "complex loss": (Unsupported, "loss is complex", lambda m: m.weight.sum() * 1j, LINEAR),
    "lazy": (Unsupported, "call the model once", lambda m: m(torch.ones(2)), nn.LazyLinear(2)),
    "meta": (Unsupported, "meta device", lambda m: m.sum(), nn.Linear(2, 2, device="meta")),
    "scripted": (Unsupported, "unscripted", lambda m: m, torch.jit.ScriptModule()),
    "changing": (GradtraceError, "changes from call to call", changing(), LINEAR),
    "wrong order": (GradtraceError, r"check\(model, loss_fn\)", LINEAR, lambda m: m),
    "no model": (GradtraceError, r"got \(int", lambda m: m, 3),
    "no function": (GradtraceError, "Tensor", LINEAR.weight.sum(), LINEAR),
    "float32 only": (Unsupported, "does not run in float64", narrow, LINEAR),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_say_what_to_do(name: str) -> None:
    kind, text, loss_fn, model = ERRORS[name]
    with pytest.raises(kind, match=text):
        check(model, loss_fn)


@pytest.mark.parametrize("options", [{"sample": 0}, {"tolerance": 0.0}, {"tolerance": 2.0}])
def test_options_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(GradtraceError, match=next(iter(options))):
        check(LINEAR, lambda m: m.weight.sum(), **options)


# The result --------------------------------------------------------------------------------------


def test_the_worst_come_first() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4)
    result = check(Layer(1.01), lambda m: m(x).sum())
    assert result.names == ("weight", "bias") and not result.ok
    lines = str(result).splitlines()
    assert lines[1].split() == [
        *("parameter", "checked", "elements", "error", "worst", "at"),
        *("analytic", "numeric", "verdict"),
    ]
    assert lines[-1] == result.verdict == "wrong gradient: weight"
    assert Table.from_dict(json.loads(json.dumps(result.to_dict()))).rows == result.rows


def test_many_parameters_share_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradcheck, "MOST_OF_ALL", 30)
    model = nn.ParameterList([torch.ones(70) for _ in range(7)])
    result = check(model, lambda m: sum(p.sum() for p in m))
    assert {row.checked for row in result.rows} == {4}
