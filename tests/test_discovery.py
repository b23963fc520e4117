"""A watch over a forward pass whose model is not known beforehand."""

from __future__ import annotations

from typing import Any

import programs
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import gradtrace as gt
from gradtrace.cli.discovery import Discovery, outermost
from gradtrace.errors import GradtraceError


class Net(nn.Module):
    """A module that is called twice, one that is never called, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.block = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.mute = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.block(self.block(x)) @ self.mute.weight


def loss_of(model: nn.Module) -> Tensor:
    found: Tensor = model(torch.ones(2, 3)).sum()
    return found


def places(loss: Tensor, watch: gt.watch) -> list[tuple[str, str, int]]:
    blocks = programs.of(watch)(loss).blocks
    return [(b.operator, b.place.module, b.place.call) for b in blocks]


@pytest.mark.parametrize("known", ["nothing", "model", "variable"])
def test_it_sees_what_a_watch_sees(known: str) -> None:
    model = Net()
    with gt.watch(model) as watch:
        wanted = loss_of(model)
    with Discovery() as found:
        loss = loss_of(model)
    found.resolve_names(loss, model if known == "model" else None, {"net": model, "x": 3})
    assert places(loss, found) == places(wanted, watch)
    mine, theirs = found.trace(loss), watch.trace(wanted)
    assert mine.modules == theirs.modules and list(mine.gradients) == list(theirs.gradients)
    assert mine.influence() == theirs.influence()


def test_calls_are_counted_from_the_first_of_the_loss() -> None:
    model = Net()
    with Discovery() as found:
        for _ in range(5):
            loss_of(model).backward()
        loss = loss_of(model)
    found.resolve_names(loss)
    assert {call for _, module, call in places(loss, found) if module == "block.0"} == {0, 1}
    assert {call for _, module, call in places(loss, found) if not module} == {0}


def test_a_loss_that_begins_in_a_call_within_a_call_of_the_same_module() -> None:
    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, depth: int) -> Tensor:
            return self.weight.exp() if depth == 0 else self(depth - 1).sin()

    model = Recursive()
    with Discovery() as found:
        model(2)
        loss = model(2).sum()
    found.resolve_names(loss, model)
    calls = {operator: call for operator, _, call in places(loss, found)}
    assert [calls[f"{kind}Backward0"] for kind in ("Exp", "Sin")] in ([2, 0], [2, 1])


def test_several_models_are_named_by_variable_or_class() -> None:
    first, second, third, judge = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3), nn.MSELoss()
    with Discovery() as found:
        loss = judge(third(second(first(torch.ones(2, 3)))), torch.zeros(2, 3))
    found.resolve_names(loss, None, {"encoder": first})
    names = {"encoder", "Linear", "Linear@1", "MSELoss"}
    assert {module for _, module, _ in places(loss, found)} == names
    assert set(found.trace(loss).gradients) == {
        f"{name}.{part}" for name in names - {"MSELoss"} for part in ("weight", "bias")
    }


def test_the_one_with_parameters_is_the_model() -> None:
    model, judge = Net(), nn.MSELoss()
    with Discovery() as found:
        loss = judge(model(torch.ones(2, 3)), torch.zeros(2, 3))
    found.resolve_names(loss)
    assert {module for _, module, _ in places(loss, found)} == {"", "block.0", "block.1", "MSELoss"}
    assert "scale" in found.trace(loss).gradients


def test_a_model_whose_forward_is_never_called() -> None:
    model = Net()
    with Discovery() as found:
        loss = model.block(torch.ones(2, 3)).sum()
    found.resolve_names(loss, model)
    assert set(found.trace(loss).gradients) == {"block.0.weight", "block.0.bias"}


def test_a_name_that_the_model_has_taken() -> None:
    model = nn.ModuleDict({"Linear": nn.Linear(3, 3)})
    other = nn.Linear(3, 1)
    with Discovery() as found:
        loss = other(model["Linear"](torch.ones(2, 3))).sum()
    found.resolve_names(loss, model)
    leaves = {"Linear.weight", "Linear.bias", "Linear@1.weight", "Linear@1.bias"}
    assert set(found.trace(loss).gradients) == leaves


def test_other_tensors_in_the_place_of_parameters() -> None:
    model = Net()
    other: dict[str, Any] = {
        name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()
    }
    with Discovery() as found:
        loss = functional_call(model, other, (torch.ones(2, 3),)).sum()
    found.resolve_names(loss, model)
    assert set(found.trace(loss).gradients) >= {"scale", "block.0.weight", "block.0.bias"}


def test_no_module_at_all() -> None:
    x = torch.ones(3, requires_grad=True)
    with Discovery() as found:
        loss = (x * x).sum()
    found.resolve_names(loss)
    assert set(found.trace(loss).gradients) == {"leaf0"}


def test_nothing_is_left_behind() -> None:
    with pytest.raises(ValueError, match="user"), Discovery():
        raise ValueError("the user's own")
    module = nn.modules.module
    assert not module._global_forward_hooks and not module._global_forward_pre_hooks


def test_a_loss_without_a_graph() -> None:
    with Discovery() as found:
        loss = torch.ones(3).sum()
    with pytest.raises(GradtraceError, match="no grad_fn"):
        found.resolve_names(loss)


def test_outermost() -> None:
    inner = nn.Linear(2, 2)
    outer = nn.Sequential(inner)
    assert outermost([inner, outer, inner, outer]) == [outer]
    assert outermost([]) == []
