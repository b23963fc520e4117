"""Modes of PyTorch's functions around a call: they see what the user computes, and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
from test_interrupts import CtrlC
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

import gradtrace as gt
from gradtrace.pytorch.function_modes import paused, resumed

ASKS = ("__get__", "device")
"""Functions that ask for an attribute, or make none of the user's numbers."""


class Seen(TorchFunctionMode):
    """Counts the functions that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ not in ASKS:
            self.names[func.__name__] += 1
        return func(*args, **(kwargs or {}))


class Shifted(TorchFunctionMode):
    """Computes another function in place of tanh."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.tanh, Tensor.tanh):
            return torch.sin(*args) * 1.5
        return func(*args, **(kwargs or {}))


class Net(nn.Module):
    """Two layers and a norm; the first layer may be in a checkpoint."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.a, self.b, self.norm = nn.Linear(4, 5), nn.Linear(5, 3), nn.BatchNorm1d(3)

    def part(self, x: Tensor) -> Tensor:
        return torch.tanh(self.a(x))

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.part, x, use_reentrant=False) if self.checkpointed else self.part(x)
        return self.norm(self.b(x))  # type: ignore[no-any-return]


def net(checkpointed: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(checkpointed)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


BATCHES = list(torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(1)))


def seen(work: Callable[[], object]) -> Counter[str]:
    with Seen() as mode:
        work()
    return mode.names


def loop(monitored: bool, **options: Any) -> Callable[[], None]:
    model = net()
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    monitor = gt.Monitor(model, every=1, **options) if monitored else None

    def work() -> None:
        for x in BATCHES:
            sgd.zero_grad()
            loss = loss_of(model, x)
            if monitor is not None:
                monitor.step(loss, terms={"loss": loss, "half": loss})
            loss.backward()
            sgd.step()
        if monitor is not None:
            assert len(monitor.history) == len(BATCHES)
            monitor.close()

    return work


def test_a_monitor_shows_a_mode_nothing_of_its_own(tmp_path: Path) -> None:
    assert seen(loop(True, file=tmp_path / "run.jsonl")) == seen(loop(False))


def test_a_mode_takes_part_in_checkpoints_that_are_computed_again() -> None:
    """Else the derivative would be that of another function."""
    plain, model, x = net(), net(checkpointed=True), BATCHES[0]
    with Shifted():
        wanted = torch.autograd.grad(loss_of(plain, x), [*plain.parameters()])
        with gt.watch(model) as watch:
            loss = loss_of(model, x)
        found = watch.trace(loss).gradients
        of_all = gt.backward(loss, names=dict(model.named_parameters()))
    for (name, _), value in zip(model.named_parameters(), wanted):
        torch.testing.assert_close(found[name], value)
        torch.testing.assert_close(of_all[name], value)


def test_terms_are_compared_without_a_mode_and_read_within_one() -> None:
    model = net()
    with gt.watch(model) as watch:
        loss = loss_of(model, BATCHES[0])
        other = model.a.weight.abs().sum()
    wanted = str(watch.conflicts({"loss": loss, "other": other}))
    with Seen() as mode:
        table = watch.conflicts({"loss": loss, "other": other})
        text, winner = str(table), table.winner()
        assert winner is not None and table.cosine("loss", "other") < 1
    assert text == wanted and not mode.names


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_modes_are_back_after_an_error(kind: type[BaseException]) -> None:
    model = net()

    def raises(_: Tensor) -> None:
        raise kind

    with Seen() as outer, torch.device("cpu"), Shifted() as inner:
        before = _get_current_function_mode_stack()
        for ask in (gt.backward, gt.trace, programs.program):
            hidden = BATCHES[0].clone().requires_grad_() * 2
            hidden.register_hook(raises)
            with pytest.raises((kind, gt.errors.GradtraceError)):
                ask(loss_of(model, hidden))
            assert _get_current_function_mode_stack() == before
        with pytest.raises((kind, gt.errors.GradtraceError)):
            gt.influence(model, lambda *_: raises(BATCHES[0]), BATCHES)
        assert _get_current_function_mode_stack() == before
        assert {outer, inner} < {*before}


def test_ctrl_c_leaves_modes_on() -> None:
    def work() -> None:
        with paused():
            assert not names()
            with resumed():
                assert names() == ["Seen", "Shifted"]
            assert not names()

    def names() -> list[str]:
        return [type(mode).__name__ for mode in _get_current_function_mode_stack()]

    files = ("function_modes.py",)
    with Seen(), Shifted():
        before = _get_current_function_mode_stack()
        counted = CtrlC(files, 0)
        counted.run(work)
        assert counted.passed > 20
        for n in range(1, counted.passed + 1):
            interrupt = CtrlC(files, n)
            interrupt.run(work)
            assert _get_current_function_mode_stack() == before, interrupt.where
            work()
