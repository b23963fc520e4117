"""``Monitor``: which steps of a training loop it traces, and what it says of them."""

from __future__ import annotations

import copy
import io
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import gradtrace as gt
from gradtrace.errors import BadFile, GradtraceError
from gradtrace.pytorch import call_listeners
from tests.waits import Waits

Batch = tuple[Tensor, Tensor]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def batches(count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    one = [torch.randn(5, 4, generator=generator) for _ in range(count)]
    return [(x, torch.randint(3, (5,), generator=generator)) for x in one]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def train(model: nn.Module, steps: int, monitor: gt.Monitor, **more: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches(steps):
        loss = loss_of(model, batch)
        monitor.step(loss, **more)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


# What is measured ---------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["modules", {"ends": ["0", "2"]}])
@pytest.mark.parametrize("rule", ["greedy", "edge"])
def test_shares_are_those_of_a_direct_trace(by: Any, rule: str) -> None:
    model = net()
    with gt.Monitor(model, every=1, by=by, rule=rule) as monitor:
        for n, batch in enumerate(batches(2)):
            with gt.watch(model) as watch:
                expected = watch.trace(loss_of(model, batch), rule=rule)
            loss = loss_of(model, batch)
            monitor.step(loss)
            loss.backward()
            found = monitor.history.rows[n]
            assert found.loss == pytest.approx(loss.item())
            for name, share in expected.influence(by).shares.items():
                mine = found[f"share {name}"]
                assert mine == share or (math.isnan(mine) and math.isnan(share))
    assert ("share ends" in {c.name for c in monitor.history.columns}) == (by != "modules")


def test_norms_are_those_of_gradients_without_the_scale() -> None:
    model, batch = net(), batches(1)[0]
    for scale in (1.0, 8.0):
        with gt.Monitor(model, every=1) as monitor:
            out = model(batch[0])
            loss = F.cross_entropy(out, batch[1])
            (grad,) = torch.autograd.grad(loss, out, retain_graph=True)
            monitor.step(scale * loss, scale=scale)
        row = monitor.history.rows[0]
        assert row["norm 2"] == pytest.approx(grad.norm().item(), rel=1e-5)
        assert row.loss == pytest.approx(loss.item())


def test_terms_are_compared() -> None:
    model = nn.Linear(2, 1, bias=False)
    with gt.Monitor(model, every=1) as monitor:
        up, down = model(torch.tensor([3.0, 4.0])).sum(), model(torch.tensor([-1.0, 0.0])).sum()
        monitor.step(up + down, terms={"up": up, "down": down})
    row = monitor.history.rows[0]
    assert (row["term up"], row["term down"]) == (5.0, 1.0)
    assert row["cosine up down"] == pytest.approx(-0.6)


# Which steps --------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 3])
def test_every_is_exact(every: int) -> None:
    with gt.Monitor(model := net(), every=every) as monitor:
        train(model, 8, monitor)
    assert monitor.history.column("step") == list(range(0, 8, every))
    assert monitor.times.column("step") == list(range(7))


def test_of_an_accumulated_step_the_first_pass_is_traced() -> None:
    model = net()
    with gt.Monitor(model, every=2, accumulate=3) as monitor:
        for batch in batches(12):
            loss = loss_of(model, batch) / 3
            monitor.step(loss, scale=1 / 3)
            loss.backward()
    assert monitor.history.column("step") == [0, 2]
    whole = loss_of(model, batches(12)[0]).item()
    assert monitor.history.rows[0].loss == pytest.approx(whole)


def test_the_cost_decides_and_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with gt.Monitor(model := net(), cost=1.0) as much, gt.Monitor(model, cost=1e-6) as little:
        for batch in batches(60):
            loss = loss_of(model, batch)
            much.step(loss)
            little.step(loss)
            loss.backward()
    assert little.history.column("step") == [0, 1]
    assert 2 <= len(much.history) < 60 and much.history.column("step")[0] == 0
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("gradtrace: traces one step in ") and "," in said[0]
    assert "% of the time" in said[1] and 0 < much.cost.share < 2


def test_steps_may_have_numbers_of_their_own() -> None:
    model = net()
    with gt.Monitor(model, every=10, start=40) as monitor:
        for n, batch in zip((40, 41, 50, 53, 60), batches(5)):
            monitor.begin(n)
            monitor.step(loss_of(model, batch))
    assert monitor.history.column("step") == [40, 50, 60]


@pytest.mark.parametrize("begins", [True, False])
def test_a_model_whose_parts_are_called(begins: bool) -> None:
    model, x = net(), torch.randn(5, 4)
    with gt.Monitor(model, every=1) as monitor:
        if begins:
            monitor.begin()
        loss = model[2](model[1](model[0](x))).square().mean()
        if begins:
            monitor.step(loss)
        else:
            with pytest.warns(UserWarning, match=r"call monitor.begin\(\)"):
                monitor.step(loss)
    note = monitor.history.rows[0].note
    assert ("call monitor.begin()" in note) != begins
    assert begins == ("share 0" in {each.name for each in monitor.history.columns})


def test_evaluation_and_several_calls_in_a_step() -> None:
    model, (x, y) = net(), batches(1)[0]
    with gt.Monitor(model, every=1) as monitor:
        with torch.no_grad():
            model(x)
        loss = F.cross_entropy(model(x) + model(-x), y)
        monitor.step(loss)
    with gt.watch(model) as watch:
        loss = F.cross_entropy(model(x) + model(-x), y)
    expected = {row.name: row.norm for row in watch.trace(loss).norms()}
    found = monitor.history.rows[0]
    assert [found[f"norm {n}"] for n in "012"] == pytest.approx([expected[n] for n in "012"])


class Twice(nn.Module):
    """Called again by a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.last = nn.Identity(), nn.Linear(4, 4)
        self.part.forward = lambda x: self(x, again=False)

    def forward(self, x: Tensor, again: bool = True) -> Tensor:
        return self.last(self.part(x) if again else x)  # type: ignore[no-any-return]


def test_calls_of_the_model_within_its_call() -> None:
    model, x = Twice(), torch.randn(2, 4)
    with gt.Monitor(model, every=1) as monitor:
        monitor.step(model(x).square().sum())
    with gt.watch(model) as watch:
        norms = watch.trace(model(x).square().sum()).norms()
    expected = {f"norm {row.name}": pytest.approx(row.norm) for row in norms}
    found = monitor.history.rows[0]
    assert expected and {name: found[name] for name in expected} == expected


# The model is left alone --------------------------------------------------------------------------


def test_copies_and_pickles_of_the_model_have_nothing_of_it(tmp_path: Path) -> None:
    model = net()
    with gt.Monitor(model, every=1, folder=tmp_path) as monitor:
        others = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        torch.save(model, io.BytesIO())
        for other in others:
            loss_of(other, batches(1)[0]).backward()
        train(model, 2, monitor)
    assert len(monitor.history) == 2 and not any(monitor.history.column("note"))
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_parameters_of_a_functional_call_are_known() -> None:
    model, (x, y) = net(), batches(1)[0]
    mine = {name: each.detach().clone().requires_grad_() for name, each in model.named_parameters()}
    with gt.Monitor(model, every=1) as monitor:
        monitor.step(F.cross_entropy(functional_call(model, mine, (x,)), y))
    assert monitor.history.rows[0]["share 2"] == 1.0


@pytest.mark.parametrize("way", ["torch.compile", "in place"])
def test_compiled_models(way: str) -> None:
    model = net()
    if way == "in place":
        model.compile(backend="eager")
    trained = model if way == "in place" else torch.compile(model, backend="eager")
    with gt.Monitor(trained, every=2) as monitor:
        train(trained, 4, monitor)
    assert monitor.history.column("share 2") == [1.0, 1.0]


# What goes wrong ----------------------------------------------------------------------------------


class Opaque(torch.autograd.Function):
    """Its backward pass cannot be followed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad.square().sqrt()


def test_an_error_of_a_trace_is_told_once_and_training_goes_on() -> None:
    model = net()
    with gt.Monitor(model, every=1) as monitor, pytest.warns(UserWarning) as told:
        for x, y in batches(3):
            loss = F.cross_entropy(Opaque.apply(model(x)), y)  # type: ignore[no-untyped-call]
            monitor.step(loss)
            loss.backward()
    assert len([each for each in told if "was not traced" in str(each.message)]) == 1
    assert all("not linear" in note or "linear" in note for note in monitor.history.column("note"))
    assert monitor.history.column("step") == [0, 1, 2]


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_losses_that_are_not_finite_are_recorded(number: float) -> None:
    model, (x, y) = net(), batches(1)[0]
    with gt.Monitor(model, every=1) as monitor:
        with pytest.warns(UserWarning, match="was not traced"):
            monitor.step(loss_of(model, (x, y)) * number)
        monitor.step(loss_of(model, (x, y)))
    first, second = monitor.history.rows
    assert not math.isfinite(first.loss) and second["share 2"] == 1.0 and not second.note


@pytest.mark.parametrize("every", [1, None])
def test_parameters_without_a_gradient_are_named_once(every: int | None) -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "left": nn.Linear(2, 1)})
    with gt.Monitor(model, every=every, cost=1.0) as monitor, pytest.warns(UserWarning) as told:
        for _ in range(3):
            monitor.begin()
            monitor.step(model["used"](torch.ones(1, 2)).sum())
    (text,) = (str(each.message) for each in told)
    assert "2 of 4 parameters get no gradient in this step: left.weight, left.bias" in text


def test_a_lazy_model(tmp_path: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    with gt.Monitor(model, every=1, folder=tmp_path) as monitor:
        for _ in range(2):
            monitor.step(model(torch.randn(5, 4)).square().sum())
    assert monitor.history.column("note") == ["", ""]


def test_a_forward_pass_that_fails_leaves_nothing_behind() -> None:
    model = net()
    with pytest.raises(RuntimeError, match="mat1"), gt.Monitor(model, every=1) as monitor:
        model(torch.ones(2, 3))
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert monitor.history.notes == ("ended by RuntimeError",)
    with gt.watch(model):  # none is open any more
        model(torch.ones(2, 4))


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"every": 0}, "every is a whole number from 1 on, not 0"),
        ({"every": True}, "every is a whole number"),
        ({"accumulate": 1.5}, "accumulate is a whole number"),
        ({"rule": "egde"}, "did you mean 'edge'"),
        ({"cost": 0}, "cost is a share of the time"),
        ({"spike": 1}, "spike is a factor above 1"),
        ({"writers": "tensorboard"}, "writers is a list"),
        ({"writers": [3]}, "a int is no writer"),
    ],
)
def test_bad_arguments(how: dict[str, Any], text: str) -> None:
    with pytest.raises(GradtraceError, match=text):
        gt.Monitor(net(), **how)


def test_what_is_no_model_no_loss_and_no_open_monitor() -> None:
    with pytest.raises(GradtraceError, match=r"takes a torch.nn.Module, got function"):
        gt.Monitor(net)  # type: ignore[arg-type]
    monitor = gt.Monitor(net())
    with pytest.raises(GradtraceError, match=r"not a float; not loss.item\(\)"):
        monitor.step(0.5)  # type: ignore[arg-type]
    monitor.close()
    with pytest.raises(GradtraceError, match="closed"):
        monitor.step(torch.ones(()))


def test_a_monitor_that_cannot_be_made_listens_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadFile, match="cannot be written"):
        gt.Monitor(net(), folder=tmp_path / "file" / "incidents")
    assert not call_listeners.LISTENERS


# What a step costs --------------------------------------------------------------------------------


@pytest.mark.parametrize("keeps", [False, True])
def test_an_untraced_step_waits_for_nothing(
    keeps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: the loss and the norms of a step are read while the next one is under way."""
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(
        "gradtrace.training.monitor.AsyncCopy", late := type("Late", (Late,), {"read_of": []})
    )
    monkeypatch.setattr("gradtrace.training.gradients.AsyncCopy", late)
    model = net()
    with gt.Monitor(model, every=100, folder=tmp_path if keeps else None) as monitor:
        train(model, 2, monitor)
        with Waits() as waits:
            train(model, 4, monitor)
    assert waits.places == []
    assert bool(late.read_of) == keeps


class Late:
    """Stands for an ``AsyncCopy``: nothing of a step is read before the next one is under way."""

    read_of: list[int]

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def read(self) -> Any:
        self.read_of.append(1)
        return np.ones(self.x.shape)
