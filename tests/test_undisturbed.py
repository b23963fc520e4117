"""Training with and without a Monitor has the same bits, whatever the model and the loop are."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gradtrace as gt

STEPS = 5


class Part(nn.Module):
    """A residual block with what draws random numbers and what changes buffers."""

    def __init__(self, size: int = 8, checkpointed: str = "") -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(size, size), nn.BatchNorm1d(size), nn.GELU())
        self.dropout, self.checkpointed = nn.Dropout(0.3), checkpointed

    def forward(self, x: Tensor) -> Tensor:
        if not self.checkpointed:
            return x + self.dropout(self.inner(x))
        again = checkpoint(self.inner, x, use_reentrant=self.checkpointed == "reentrant")
        return x + self.dropout(again)


class Recurrent(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, 2, dropout=0.2, batch_first=True)
        self.out, self.checkpointed = nn.Linear(8, 3), checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (1, 8)).expand(-1, 5, -1)
        if self.checkpointed:
            return self.out(checkpoint(lambda x: self.lstm(x)[0], x, use_reentrant=False)[:, -1])  # type: ignore[no-any-return, index]
        return self.out(self.lstm(x)[0][:, -1])  # type: ignore[no-any-return]


class Words(nn.Module):
    """A GPT-2 that takes the numbers of a batch for words."""

    def __init__(self) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        sizes = {"n_layer": 2, "n_head": 2, "n_embd": 8, "vocab_size": 11, "n_positions": 8}
        config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
        self.gpt = transformers.GPT2LMHeadModel(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.gpt((x * 10).long() % 11).logits[:, -1, :3]  # type: ignore[no-any-return]


def net(*parts: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), *parts, nn.Linear(8, 3))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: net(nn.Dropout(0.4)),
    "batch norm": lambda: net(nn.BatchNorm1d(8), nn.ReLU()),
    "bfloat16": lambda: net(Part()),
    "checkpoint": lambda: net(Part(checkpointed="once")),
    "reentrant": lambda: net(Part(checkpointed="reentrant")),
    "accumulated": lambda: net(Part()),
    "LSTM": Recurrent,
    "LSTM in a checkpoint": lambda: Recurrent(checkpointed=True),
    "GPT-2": Words,
}


def batches(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(count):  # drawn in the loop, as loaders with augmentation do
        yield torch.randn(6, 8) + random.random() + np.random.rand(), torch.randint(3, (6,))


def seeded() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def trained(name: str, monitors: bool, folder: Path | None = None) -> dict[str, Any]:
    """All that training leaves, after STEPS steps of which every other one is traced."""
    seeded()
    model, passes = MODELS[name](), 4 if name == "accumulated" else 1
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    autocast: AbstractContextManager[Any] = nullcontext()
    if name == "bfloat16":
        autocast = torch.autocast("cpu", torch.bfloat16)
    monitor = gt.Monitor(model, every=2, accumulate=passes, folder=folder) if monitors else None
    losses = []
    for n, (x, y) in enumerate(batches(STEPS * passes)):
        with autocast:
            loss = F.cross_entropy(model(x), y) / passes
        if monitor is not None:
            monitor.step(loss, batch=(x, y), scale=1 / passes)
        loss.backward()
        losses.append(loss.detach())
        if n % passes == passes - 1:
            optimizer.step()
            optimizer.zero_grad()
    if monitor is not None:
        monitor.close()
        assert monitor.history.column("step") == [0, 2, 4]
        assert name == "reentrant" or not any(monitor.history.column("note"))
        assert not any(module._forward_pre_hooks for module in model.modules())
    return left(model, losses)


def left(model: nn.Module, losses: list[Tensor]) -> dict[str, Any]:
    numbers = {"python": random.random(), "numpy": np.random.rand(), "torch": torch.rand(1)}
    return {**model.state_dict(), "losses": torch.stack(losses), **numbers}


def same(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The names of what differs."""
    assert one.keys() == other.keys()
    return [k for k in one if not torch.equal(torch.as_tensor(one[k]), torch.as_tensor(other[k]))]


@pytest.mark.filterwarnings("ignore:step 0 was not traced")
@pytest.mark.filterwarnings("ignore:.*parameters get no gradient")
@pytest.mark.parametrize("name", MODELS)
def test_training_has_the_same_bits(name: str, tmp_path: Path) -> None:
    expected = trained(name, monitors=False)
    assert same(expected, trained(name, monitors=True)) == []
    assert same(expected, trained(name, monitors=True, folder=tmp_path)) == []


def adversaries(monitors: bool) -> dict[str, Any]:
    """A GAN: two models, two optimisers, a Monitor each."""
    seeded()
    one, other = net(Part()), net(nn.BatchNorm1d(8), nn.Dropout(0.2))
    maker, judge = nn.Sequential(one, nn.Linear(3, 8)), nn.Sequential(other, nn.Linear(3, 1))
    models, losses = (judge, maker), []
    optimizers = [torch.optim.Adam(model.parameters(), 0.01) for model in models]
    watching = [gt.Monitor(model, every=2) for model in models] if monitors else []
    for x, _ in batches(STEPS):
        made = maker(torch.randn(6, 8))
        real, false = judge(x), judge(made.detach())
        losses.append(F.softplus(-real).mean() + F.softplus(false).mean())
        step(losses[-1], optimizers[0], watching[:1])
        losses.append(F.softplus(-judge(made)).mean())
        step(losses[-1], optimizers[1], watching[1:])
        optimizers[0].zero_grad()
    for monitor in watching:
        assert monitor.history.column("step") == [0, 2, 4]
        assert not any(monitor.history.column("note"))
        monitor.close()
    kept = [loss.detach() for loss in losses]
    return left(nn.ModuleList(models), kept)


def step(loss: Tensor, optimizer: torch.optim.Optimizer, watching: list[gt.Monitor]) -> None:
    for monitor in watching:
        monitor.step(loss)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def test_two_optimisers() -> None:
    assert same(adversaries(False), adversaries(True)) == []


@pytest.mark.parametrize("where", ["on a parameter", "on an activation", "after accumulation"])
def test_hooks_run_as_often_as_without(where: str) -> None:
    ran = []

    def hooked(monitors: bool) -> dict[str, Any]:
        seeded()
        model = net(nn.Tanh())
        if where == "on a parameter":
            model[0].weight.register_hook(lambda grad: ran.append(0) or grad * 2)
        if where == "after accumulation":
            model[0].weight.register_post_accumulate_grad_hook(lambda _: ran.append(0))
        monitor = gt.Monitor(model, every=1) if monitors else None
        losses = []
        for x, y in batches(STEPS):
            out = model(x)
            if where == "on an activation":
                out.register_hook(lambda grad: ran.append(0) or grad * 2)
            loss = F.cross_entropy(out, y)
            if monitor is not None:
                monitor.step(loss)
            loss.backward()
            losses.append(loss.detach())
        return left(model, losses)

    assert same(hooked(False), hooked(True)) == [] and len(ran) == 2 * STEPS


def test_saved_tensors_may_be_unpacked_once() -> None:
    store: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> int:
        store[len(store)] = tensor
        return len(store) - 1

    model = net(nn.Tanh())
    with gt.Monitor(model, every=1) as monitor:
        for x, y in batches(2):
            with saved_tensors_hooks(pack, lambda key: store.pop(key)):
                loss = F.cross_entropy(model(x), y)
            monitor.step(loss)
            loss.backward()
            store.clear()
    assert not any(monitor.history.column("note"))


def test_gradients_are_left_alone() -> None:
    seeded()
    model = net(nn.Tanh())
    x, y = next(batches(1))
    with gt.Monitor(model, every=1) as monitor:
        loss = F.cross_entropy(model(x), y)
        monitor.step(loss)
        assert all(each.grad is None for each in model.parameters())
        loss.backward()
        again = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
    for parameter, grad in zip(model.parameters(), again):
        assert parameter.grad is not None and torch.equal(parameter.grad, grad)
