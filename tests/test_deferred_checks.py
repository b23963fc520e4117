"""What would wait for a GPU is seen without one, and looked at once."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import programs
import pytest
import torch
import torch.nn.functional as F
from architectures import ARCHITECTURES
from backends import imitate_gpu, unread, using
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from waits import Waits

import gradtrace as gt
from gradtrace import session
from gradtrace.errors import GradtraceError, NonFinite
from gradtrace.ir import interpreter, nonfinite
from gradtrace.kernels import backend_of
from gradtrace.kernels.sync import DeferredChecks, fetch_scalars
from gradtrace.recording import aten_rules, dispatch, gradients
from gradtrace.semirings import MAX

X = torch.tensor([1.0, 2.0, 3.0])

LOOKS: dict[str, Callable[[], object]] = {
    "bool": lambda: bool(X[0]),
    "float": lambda: float(X[0]),
    "int": lambda: int(X[0]),
    "item": lambda: X[0].item(),
    "tolist": lambda: X.tolist(),
    "nonzero": lambda: X.nonzero(),
    "where": lambda: torch.where(X > 1),
    "mask": lambda: X[X > 1],
    "cpu": lambda: X.cpu(),
    "to": lambda: X.to("cpu"),
    "equal": lambda: torch.equal(X, X),
    "allclose": lambda: torch.allclose(X, X),
    "unique": lambda: X.unique(),
    "tensor": lambda: torch.tensor([1.0], device=X.device),
    "if": lambda: 1 if (X > 0).all() else 0,
}


@pytest.mark.parametrize("name", LOOKS)
def test_each_look_counts_once(name: str) -> None:
    with Waits() as waits:
        LOOKS[name]()
    assert waits.count == 1
    with Waits() as waits, _disable_current_modes():
        LOOKS[name]()
    assert waits.count == 1


def test_a_look_too_many_fails_where_it_is() -> None:
    with pytest.raises(AssertionError, match="more than 1 times"), Waits(most=1):
        float(X.sum())
        float(X.sum())


def test_what_only_computes_does_not_count() -> None:
    with Waits(most=0):
        torch.where(X > 1, X, 0).cumsum(0)[torch.tensor([0, 2])].to(torch.float64)
        X[1:].expand(2, 2).contiguous().view(-1).index_add(0, torch.tensor([1]), X[:1])


def test_many_numbers_are_one_look() -> None:
    given = [
        X.sum(),
        torch.tensor([True]),
        torch.tensor(7),
        torch.tensor(0.1),
        torch.tensor(0.1).half(),
    ]
    with Waits(most=1):
        found = fetch_scalars(given)
    assert found == [float(x) for x in given]
    assert fetch_scalars([]) == []
    assert all(map(torch.isnan, map(torch.tensor, fetch_scalars([torch.tensor(float("nan"))]))))


def test_hopes_are_looked_at_once() -> None:
    hopes = DeferredChecks()
    with Waits(most=0):
        assert hopes.fulfilled()
        hopes.add(X > 0)
        hopes.add((X > 0).all())
        hopes.add(X[:0] > 0)
    with Waits(most=1):
        assert hopes.fulfilled()
    hopes.add(X > 1)
    assert not hopes.fulfilled()
    hopes.add(X > 0)
    assert not hopes.fulfilled()  # what was dashed stays so


def test_tensors_of_the_cpu_are_looked_at_as_one_likes() -> None:
    assert not backend_of(X).synchronises


# Recording ---------------------------------------------------------------------------------------


@pytest.fixture
def unwaiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor counts as one that lies on a GPU."""
    imitate_gpu(monkeypatch)


def recurrent() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """A recurrent network with a loss at the last step."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"cell": nn.LSTM(4, 5, 2, batch_first=True), "out": nn.Linear(5, 3)})
    x, y = torch.randn(2, 6, 4), torch.tensor([0, 2])
    return model, lambda m: F.cross_entropy(m["out"](m["cell"](x)[0][:, -1]), y)  # type: ignore[index]


MODELS: dict[str, Callable[[], Any]] = {
    **{name: ARCHITECTURES[name] for name in ("gpt2", "llama", "bert", "resnet")},
    "lstm": recurrent,
}


@pytest.mark.parametrize("large", [1, 1 << 16], ids=["later", "at once"])
@pytest.mark.parametrize("name", MODELS)
def test_recording_waits_once_or_twice(
    name: str, large: int, unwaiting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For whether gradients are finite, at the very end."""
    monkeypatch.setattr(gradients, "DEFER_MIN_ELEMENTS", large)
    # else nothing is deferred on a GPU
    monkeypatch.setattr(session, "kept_gradient_bytes", lambda *_: 0)
    model, loss_of = MODELS[name]()
    with gt.watch(model) as watch:
        loss = loss_of(model)
    with Waits(most=2) as waits:
        watch.trace(loss)
    assert waits.count >= 1
    assert all("fetch_scalars" in place for place in waits.places)


@pytest.mark.parametrize("name", ["gpt2", "mamba2", "swin", "switch", "t5"])
def test_hoping_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, loss_of = ARCHITECTURES[name]()
    torch.manual_seed(1)
    with gt.watch(model) as watch:
        loss = loss_of(model)
    plain = watch.trace(loss)
    with monkeypatch.context() as patch:
        imitate_gpu(patch)
        hoping = watch.trace(loss)
    assert [len(b.steps) for b in plain.program.blocks] == [
        len(b.steps) for b in hoping.program.blocks
    ]
    for key in plain.gradients:
        assert torch.equal(plain.gradients[key], hoping.gradients[key])
    one, other = interpreter.run(plain.program, MAX), interpreter.run(hoping.program, MAX)
    assert all(torch.equal(value, other[leaf]) for leaf, value in one.items())


def mish(x: Tensor) -> Tensor:
    return F.mish(x).sum()


def hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """A formula that hides what it does: ``mish``, whose result is taken for a constant."""
    func = torch.ops.aten.mish_backward.default
    monkeypatch.setitem(
        dispatch._LOWERINGS, func, dispatch.Lowering("exact", aten_rules.RULES["zeros_like"])
    )


def test_what_was_hoped_in_vain_is_recorded_again(
    unwaiting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden(monkeypatch)
    x = torch.randn(4, requires_grad=True)
    loss = mish(x * 2)
    with Waits() as waits:
        found = interpreter.run(programs.program(loss), gt.semirings.SUM)[x]
    torch.testing.assert_close(found, torch.autograd.grad(loss, x)[0])
    assert any("check" in place for place in waits.places)


def test_errors_are_those_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden(monkeypatch)
    model = nn.Sequential(nn.Linear(3, 3), nn.Mish())
    texts = []
    for avoid in (False, True):
        imitate_gpu(monkeypatch, avoid)
        with gt.watch(model) as watch:
            loss = model(torch.ones(2, 3)).sum()
        with pytest.raises(GradtraceError, match=r"MishBackward0 \(in 1\)") as error:
            programs.of(watch)(loss, dense_limit=4)
        texts.append(str(error.value))
    assert texts[0] == texts[1]


def test_code_of_the_users_runs_once(unwaiting: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether what came before it was hoped in vain, or what comes after it."""
    hidden(monkeypatch)
    calls = SimpleQueue[str]()  # lists would be put back

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            calls.put("function")
            return 2 * grad

    x = torch.randn(4, requires_grad=True)
    x.register_hook(lambda grad: calls.put("hook"))  # type: ignore[no-untyped-call]
    for make in (lambda: mish(Doubled.apply(x)), lambda: Doubled.apply(F.mish(x)).sum()):
        loss = make()
        wanted = torch.autograd.grad(loss, x, retain_graph=True)[0]
        for _ in range(calls.qsize()):
            calls.get_nowait()
        found = interpreter.run(programs.program(loss), gt.semirings.SUM)[x]
        torch.testing.assert_close(found, wanted)
        assert [calls.get_nowait() for _ in range(calls.qsize())] == ["function", "hook"]


def test_a_probe_that_is_hoped_to_be_linear() -> None:
    for f, linear_ in ((lambda x: torch.lerp(x, x * 0, 0.25), True), (torch.special.erf, False)):
        x, hopes = torch.tensor([0.5, -2.0]), DeferredChecks()
        pen = dispatch.DispatchRecorder(1 << 20, checks=hopes)
        pen.begin()
        pen.track(x, pen.new())
        with using(unread()), pen:
            f(x)
        assert hopes.fulfilled() is linear_


@pytest.mark.parametrize("value", [[1.0, float("nan")], [float("inf"), 2.0], [], [3.0, 3.002]])
def test_near_is_close(value: list[float]) -> None:
    b = torch.tensor(value)
    for a in (b, b + 1e-5, b + 1, torch.tensor([float("inf"), 2.0])[: len(value)]):
        assert bool(dispatch.elementwise_close(a, b).all()) == dispatch.close(a, b)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e38])
def test_one_look_at_all_gradients(bad: float, unwaiting: None) -> None:
    """Their largest magnitudes tell, where a sum of 1e38 would be infinite."""
    fine = [torch.full((6,), 1e38), torch.zeros(0, 3), torch.tensor(2.0), torch.ones(2).half()]
    assert nonfinite.sums_are_finite(fine)
    for shape in ((), (5,), (70, 70)):
        grad = torch.zeros(shape)
        grad.view(-1)[-1] = bad
        assert nonfinite.sums_are_finite([*fine, grad]) is (abs(bad) == 1e38)


@pytest.mark.parametrize("large", [1, 1 << 16], ids=["later", "at once"])
def test_gradients_that_are_not_finite_are_refused(
    large: int, unwaiting: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "DEFER_MIN_ELEMENTS", large)
    # else nothing is deferred on a GPU
    monkeypatch.setattr(session, "kept_gradient_bytes", lambda *_: 0)
    model = nn.Linear(3, 3)
    with gt.watch(model) as watch:
        loss = (model(torch.ones(2, 3)) * torch.tensor([1.0, float("inf"), 1.0])).sum()
    with pytest.raises(NonFinite, match="MulBackward0"):
        watch.trace(loss)
