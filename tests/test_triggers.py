"""Triggers of a Monitor: steps that go wrong are found, run again, and kept in a file."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gradtrace.runs import history
from gradtrace.training.forward_keeper import ForwardKeeper
from gradtrace.training.nested_files import Missing, decoded, encoded
from gradtrace.training.spike_rule import SpikeRule
from gradtrace.training.triggers import Triggers, cause_of
from pages import read
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook
from typer.testing import CliRunner, Result

import gradtrace as gt
from gradtrace.cli import app
from gradtrace.errors import GradtraceError
from gradtrace.kernels.finite_gradients import FiniteGradients
from gradtrace.pytorch.random_state import RandomState
from gradtrace.training import tuning
from gradtrace.training.incident import Incident

BAD = 500
STEPS = 520


class Net(nn.Module):
    """Everything that a rerun must not move, or must draw again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 12), nn.BatchNorm1d(12)
        self.drop, self.last = nn.Dropout(0.3), nn.Linear(12, 3)
        nn.utils.parametrizations.spectral_norm(self.last)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        hidden = self.drop(self.norm(self.first(x)).relu())
        scale = 1 + 1e-3 * random.random() + 1e-3 * float(np.random.randn())
        scale *= float(x.abs().max().clamp_min(10)) / 10
        return self.last(hidden) * scale  # type: ignore[no-any-return]


def loss_by(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        found = F.cross_entropy(model(x), y)
        if float(y[0]) == 2:  # a gradient that is not finite, of a loss that is
            found = found + (model.get_parameter("first.bias") * 0).square().sum().sqrt()
        return found

    return loss_of


def batch(step: int, bad: str, at: int = BAD) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(step)
    x = torch.randn(16, 6, generator=made)
    y = (x[:, 0] > 0).long()
    if step == at and bad == "spike":
        x, y = x * 1000, 1 - y
    if step == at and bad == "nan":
        x[3, 2] = math.nan
    if step == at and bad == "gradient":
        y[0] = 2
    return x, y


def train(
    bad: str, steps: int = STEPS, at: int = BAD, how: str = "batch", **options: Any
) -> tuple[nn.Module, gt.Monitor | None, list[float]]:
    """A run whose step ``at`` is bad; without a Monitor if no trigger is given."""
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    model, losses = Net(), []
    loss_of = loss_by(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    monitor = gt.Monitor(model, every=10**6, view=False, **options) if options else None
    for step in range(steps):
        x, y = batch(step, bad, at)
        loss = loss_of(x, y)
        if monitor is not None and how == "batch":
            monitor.step(loss, rerun=loss_of, batch=(x, y))
        elif monitor is not None:
            monitor.step(loss)
        optimizer.zero_grad()
        loss.backward()
        if bad != "spike" and step == at:
            optimizer.zero_grad()
            optimizer.step() if bad == "nan" else None
        else:
            optimizer.step()
        losses.append(loss.item())
    if monitor is not None:
        monitor.close()
    drawn = torch.rand(()).item(), random.random(), float(np.random.randn())
    return model, monitor, losses + list(drawn)


def same(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.state_dict().values(), b.state_dict().values())
    return all(torch.equal(x.nan_to_num(7), y.nan_to_num(7)) for x, y in pairs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bad", ["spike", "nan"])
def test_found_at_step_500_and_the_file_reproduces_it(bad: str, tmp_path: Path) -> None:
    plain, _, losses = train(bad)
    file = tmp_path / "run.jsonl"
    watched, monitor, again = train(bad, trigger=("spike", "nonfinite"), file=file)
    assert same(plain, watched)
    assert [*map(repr, losses)] == [*map(repr, again)]  # random numbers afterwards, too
    trigger = "spike" if bad == "spike" else "nonfinite"
    path = tmp_path / f"run-step{BAD}-{trigger}.gradtrace"
    assert monitor is not None and monitor.incidents == (path,)
    found = gt.load_incident(path)
    assert (found.step, found.trigger, found.of) == (BAD, trigger, "loss")
    assert repr(found.loss) == repr(losses[BAD])
    assert found.same
    x, y = batch(BAD, bad)
    assert torch.equal(found.batch[0].nan_to_num(7), x.nan_to_num(7))
    assert torch.equal(found.batch[1], y)
    torch.manual_seed(5)
    fresh = Net()
    before = [value.clone() for value in fresh.state_dict().values()]
    rerun = found.rerun(fresh, loss_by(fresh))
    assert rerun.same and repr(rerun.loss) == repr(losses[BAD])
    assert str(rerun.diagnosis) == found.words
    assert all(torch.equal(*pair) for pair in zip(before, fresh.state_dict().values()))
    if bad == "nan":
        assert rerun.diagnosis.nonfinite is not None
        assert rerun.diagnosis.nonfinite.operator == "an input"
        assert found.diagnosis["nonfinite"]["module"] == "first"
    else:
        assert "the limit" in found.evidence


class Entropy(nn.Module):
    """Divides by a bias, which a step can make 0."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(4, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.low(x)
        return self.high(hidden.log() if bool(x.max() < -50) else hidden.tanh())  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["batch", "calls"])
def test_the_operator_is_named_with_its_line(how: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Entropy()

    def loss_of(x: Tensor) -> Tensor:
        return model(x).square().mean()  # type: ignore[no-any-return]

    with gt.Monitor(model, trigger="nonfinite", file=tmp_path / "r.jsonl", view=False) as monitor:
        for step in range(4):
            x = torch.randn(3, 4) - 200 * (step == 2)
            given = {"rerun": loss_of, "batch": (x,)} if how == "batch" else {}
            monitor.step(loss_of(x), **given)
    (path,) = monitor.incidents
    for found in (
        gt.load_incident(path).diagnosis["nonfinite"],
        gt.load_incident(path)
        .rerun(model, loss_of if how == "batch" else None)
        .diagnosis.to_dict()["nonfinite"],
    ):
        assert found["operator"] == "log"
        assert "test_triggers.py" in found["line"] and "hidden.log()" in found["line"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["batch", "calls"])
def test_a_gradient_that_is_not_finite(how: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), Root())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept: list[Tensor] = []

    def loss_of(x: Tensor) -> Tensor:
        return model(x).mean()  # type: ignore[no-any-return]

    file = tmp_path / "r.jsonl"
    with gt.Monitor(model, trigger="nonfinite", file=file, view=False) as monitor:
        for step in range(5):
            x = torch.ones(2, 3) * (step != 3)
            with torch.no_grad():
                model[0].bias.mul_(step != 3)
            kept.append(model[0].bias.detach().clone())
            loss = loss_of(x)
            assert loss.isfinite() or step == 4
            given = {"rerun": loss_of, "batch": (x,)} if how == "batch" else {}
            monitor.step(loss, **given)
            assert not monitor.incidents or step == 4
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    (path,) = monitor.incidents  # the next loss is NaN for the same reason, and told once
    found = gt.load_incident(path)
    assert (found.step, found.of, found.same) == (3, "gradient", how == "batch" or found.same)
    assert torch.equal(found.beginning.state["0.bias"], kept[3])  # before the optimiser moved
    assert found.diagnosis["nonfinite"]["of"] == "gradient"
    assert "sqrt" in found.diagnosis["nonfinite"]["operator"].lower()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["lazy", "scripted"])
def test_modules_with_tables_of_their_own(kind: str, tmp_path: Path) -> None:
    """Buffers and parameters that have no shape yet, or are not in a dictionary."""
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    if kind == "scripted":
        model = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))))
    file = tmp_path / "run.jsonl"
    with gt.Monitor(model, trigger="nonfinite", file=file, view=False, budget=None) as monitor:
        for step in range(4):
            loss = model(torch.randn(5, 2)).square().mean()
            monitor.step(loss)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            loss.backward()
            for each in model.parameters():
                assert each.grad is not None
                each.grad *= math.inf if step == 3 else 1
            with pytest.warns(UserWarning, match="not finite") if step == 3 else nullcontext():
                optimizer.step()
    (incident,) = monitor.incidents
    found = gt.load_incident(incident)
    assert found.step == 3
    name, mean = next((n, t) for n, t in found.beginning.state.items() if "running_mean" in n)
    assert mean.shape == (3,) and not torch.equal(mean, model.state_dict()[name])


def test_the_report_of_the_run_names_step_cause_module_line_and_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Identity(), Entropy())
    options: dict[str, Any] = {"file": tmp_path / "r.jsonl", "report": tmp_path / "r.html"}
    with gt.Monitor(model, trigger="nonfinite", **options) as monitor:
        for step in range(4):
            monitor.step(model(torch.randn(3, 4) - 200 * (step == 2)).mean())
    (path,) = monitor.incidents
    (found,) = monitor.history.incidents
    assert found == history.read(tmp_path / "r.jsonl").incidents[0]
    assert (found.step, found.trigger, found.module) == (2, "nonfinite", "1")
    assert found.file == str(path)
    assert found.cause == "It begins with log" and "hidden.log()" in found.line
    note = read(tmp_path / "r.html")["training"]["notes"][0]
    for part in (f"step {found.step}: the loss is nan", "log in '1'", "test_triggers.py:", path):
        assert str(part) in note
    assert f"incident at step {found.step}: {path}" in capsys.readouterr().err


class Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().sum().sqrt().reshape(1)


def test_ordinary_runs_give_no_alarm(tmp_path: Path) -> None:
    for seed in range(4):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        file = tmp_path / f"{seed}.jsonl"
        options: dict[str, Any] = {"trigger": ("spike", "nonfinite"), "file": file, "view": False}
        size = (1, 8, 32, 64)[seed]
        with gt.Monitor(model, every=10**6, **options) as monitor:
            for step in range(300):
                x = torch.randn(size if step % 10 else max(1, size // 8), 8)  # an epoch's last
                loss = F.cross_entropy(model(x), (x[:, 0] * x[:, 1] > 0).long())
                monitor.step(loss)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        assert monitor.incidents == ()


# The rule ----------------------------------------------------------------------------------------


def fed(losses: list[float], factor: float = 10.0) -> SpikeRule:
    rule = SpikeRule(factor)
    assert not any(rule.exceeded(each) for each in losses)
    return rule


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_buffers(layout: torch.layout, tmp_path: Path) -> None:
    """An adjacency matrix: passes are compared with what was there before."""
    model = nn.Linear(3, 3)
    model.register_buffer("graph", torch.eye(3).to_sparse(layout=layout))
    with gt.Monitor(model, trigger="nonfinite", file=tmp_path / "run.jsonl", view=False) as monitor:
        for _ in range(4):
            loss = torch.sparse.mm(model.get_buffer("graph"), model(torch.ones(3, 3))).sum()
            monitor.step(loss)
            loss.backward()
        with pytest.warns(UserWarning, match="the loss is nan"):
            monitor.step(model(torch.ones(3, 3)).sum() * math.nan)
    assert len(monitor.incidents) == 1


@pytest.mark.parametrize("rerun", [True, False])
def test_a_model_whose_parts_are_called(rerun: bool, tmp_path: Path) -> None:
    """As a generator and a discriminator in one container, which has no forward pass."""
    model = nn.ModuleDict({"g": nn.Linear(3, 3), "d": nn.Linear(3, 1)})

    def loss_of(x: Tensor) -> Tensor:
        return model["d"](model["g"](x).tanh()).square().mean()

    with gt.Monitor(model, trigger="nonfinite", file=tmp_path / "run.jsonl", view=False) as monitor:
        for bad in (False, True):
            x = torch.full((2, 3), math.nan) if bad else torch.ones(2, 3)
            warns = pytest.warns(UserWarning, match="the loss is nan") if bad else nullcontext()
            with warns:
                monitor.step(loss_of(x), **({"rerun": loss_of, "batch": x} if rerun else {}))
    found = gt.load_incident(monitor.incidents[0])
    assert found.step == 1 and found.same is rerun
    told = "an input already holds it" if rerun else "the model itself was not called in this step"
    assert told in str(found)


def test_a_note_is_not_told_as_the_cause() -> None:
    note = {"title": "a branch", "module": "", "line": "", "severity": "note"}
    found: Any = SimpleNamespace(words="...", diagnosis={"nonfinite": None, "findings": [note]})
    assert cause_of(found)[0] == "It was run again, and nothing else was found"
    found.diagnosis["findings"].append({**note, "severity": "warning", "title": "two"})
    assert cause_of(found)[0] == "Run again: two"


def test_triggers_come_and_go_while_an_optimiser_steps() -> None:
    """As on another thread: the table of hooks that PyTorch goes over must not change meanwhile."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def open_and_close(*_: Any) -> None:
        with gt.Monitor(model, trigger="nonfinite", view=False):
            pass

    open_and_close()
    hooks = open_and_close, lambda *_: None
    handles = [register_optimizer_step_pre_hook(each) for each in hooks]
    try:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    finally:
        for handle in handles:
            handle.remove()


def test_what_a_spike_is() -> None:
    assert not fed([1.0] * 19).exceeded(1e9), "a warm-up"
    assert fed([1.0] * 20).exceeded(1.3), "10 times 2.5%, and the logarithm"
    assert not fed([1.0] * 20).exceeded(1.25)
    assert fed([1.0] * 20, factor=2.0).exceeded(1.1)
    assert not fed([-1.0] * 20).exceeded(-0.8)
    assert fed([-1.0] * 20).exceeded(-0.7), "losses may be negative"
    noisy = [1 + 0.1 * (-1) ** n for n in range(60)]
    assert not fed(noisy).exceeded(2.4) and fed(noisy).exceeded(5.0)
    assert not fed([2.0 * 0.97**n for n in range(200)]).exceeded(2.0 * 0.97**200)
    assert fed([0.0] * 30).exceeded(1e-3)
    rule = fed([1.0] * 30)
    assert rule.exceeded(5.0) and not rule.exceeded(4.0), "it was as large a moment ago"
    assert rule.exceeded(6.0)


def test_smaller_batches_may_have_larger_losses() -> None:
    for size, alarm in ((64, True), (1, False)):
        rule = SpikeRule(10.0)
        for _ in range(40):
            rule.exceeded(1.0, 64)
        assert bool(rule.exceeded(2.0, size)) is alarm


# What is kept ------------------------------------------------------------------------------------


def test_random_states_are_those_of_the_moment() -> None:
    def draw() -> tuple[Any, ...]:
        return torch.rand(1).item(), random.gauss(0, 1), float(np.random.randn()), random.random()

    for _ in range(3):  # odd numbers of normal draws leave one behind, beside the state itself
        state = RandomState.now([])
        drawn = draw()
        RandomState.of(state.tensors()).restore()
        assert draw() == drawn
        state.restore()
        assert draw() == drawn
        random.random()
        np.random.rand()


def test_states_that_are_none_are_refused() -> None:
    whole = RandomState.now([]).tensors()
    for change in (
        {"python": torch.zeros(3, dtype=torch.int64)},
        {"python": whole["python"] - 2**40},
        {"python cached": torch.zeros(2, dtype=torch.float64)},
        {"numpy": whole["numpy"].float()},
        {"cuda x": whole["cpu"]},
        {"cuda 0": whole["cpu"].float()},
        {"cpu": whole["cpu"].float()},
        {"cpu": whole["cpu"][:100]},
        {"cpu": torch.full_like(whole["cpu"], 255)},
    ):
        with pytest.raises(ValueError, match="generator"):
            RandomState.of({**whole, **change})


def test_buffers_are_those_before_the_pass() -> None:
    model = Net()
    keeper = ForwardKeeper(model)
    for step in range(5):
        before = {name: each.clone() for name, each in model.named_buffers()}
        assert keeper.enter(model, (), {})
        model(torch.randn(4, 6))
        keeper.leave(True, None)
        kept = keeper.take()
        assert kept is not None and kept.buffers["count"] == step
        changing = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
        assert kept.buffers.keys() >= changing
        assert all(torch.equal(each, before[name]) for name, each in kept.buffers.items())


class Late(nn.Module):
    """Draws random numbers from some pass on."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.linear, self.first, self.calls = nn.Linear(2, 2), first, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        noise = torch.rand(()) if self.calls > self.first else 0
        return self.linear(x) + noise  # type: ignore[no-any-return]


@pytest.mark.parametrize("first", [0, 3, 100])
def test_random_states_are_kept_soon_after_a_model_begins_to_draw(first: int) -> None:
    model, kept = Late(first), []
    keeper = ForwardKeeper(model)
    for _ in range(200):
        assert keeper.enter(model, (), {})
        model(torch.ones(1, 2))
        keeper.leave(True, None)
        found = keeper.take()
        assert found is not None
        kept.append(found.random is not None)
    assert all(kept[first + tuning.LOOK_STEPS :]) and (not first or not all(kept[:first]))


@pytest.mark.filterwarnings("ignore")
def test_a_step_that_draws_for_the_first_time_says_that_its_state_was_not_kept(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    model = Late(30)
    options: dict[str, Any] = {"file": tmp_path / "r.jsonl", "view": False}
    with gt.Monitor(model, every=10**6, trigger="spike", **options) as monitor:
        for step in range(31):
            monitor.step(model(torch.full((2, 2), 1e3 if step == 30 else 1.0)).square().sum())
    (path,) = monitor.incidents
    assert any("drew no random numbers" in note for note in gt.load_incident(path).notes)


def test_nested_values() -> None:
    image = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    value = {"x": (image, [1, None, "a"]), 3: torch.ones((), dtype=torch.float16), "o": object()}
    tensors: list[Tensor] = []
    found = decoded(encoded(value, tensors), tensors)
    assert found["x"][0].stride() == image.stride() and torch.equal(found["x"][0], image)
    assert found["x"][1] == [1, None, "a"] and found[3].dtype is torch.float16
    assert found["o"] == Missing("object")


# Around it ---------------------------------------------------------------------------------------


def short(tmp_path: Path, bad_steps: set[int], **options: Any) -> gt.Monitor:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = model.weight.detach().clone()
    options = {"file": tmp_path / "r.jsonl", "view": False, "trigger": "nonfinite", **options}
    with gt.Monitor(model, **options) as monitor:
        for step in range(12):
            x = torch.ones(2, 3) * (math.nan if step in bad_steps else 1.0)
            loss = model(x).mean()
            monitor.step(loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step in bad_steps and step + 1 not in bad_steps:  # mended
                with torch.no_grad():
                    model.weight.copy_(weight)
                    model.bias.zero_()
    return monitor


@pytest.mark.filterwarnings("ignore")
def test_what_lasts_is_told_once_and_files_are_few(tmp_path: Path) -> None:
    assert len(short(tmp_path, {3, 4, 5, 6}).incidents) == 1
    assert len(short(tmp_path, {1, 3, 5, 7, 9}).incidents) == tuning.INCIDENT_FILES


@pytest.mark.parametrize("kind", ["folder", "disk"])
def test_a_file_that_cannot_be_written_stops_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    if kind == "disk":
        monkeypatch.setattr(Incident, "save", full)
    else:
        (tmp_path / "r-step5-nonfinite.gradtrace").mkdir()
    with pytest.warns(UserWarning, match=r"step 5: the loss is nan.*training goes on"):
        monitor = short(tmp_path, {5})
    assert monitor.incidents == ()


@pytest.mark.filterwarnings("ignore")
def test_weights_over_the_limit_are_left_out(tmp_path: Path) -> None:
    (path,) = short(tmp_path, {2}, incident_bytes=40).incidents
    found = gt.load_incident(path)
    assert not found.beginning.state and any("weights are not" in note for note in found.notes)
    (path,) = short(tmp_path, {2}, incident_bytes=10).incidents
    assert gt.load_incident(path).calls == []


@pytest.mark.filterwarnings("ignore")
def test_the_pass_of_an_accumulated_step_is_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), Root())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"accumulate": 3, "file": tmp_path / "r.jsonl", "view": False}
    with gt.Monitor(model, trigger="nonfinite", **options) as monitor:
        for n in range(12):
            x = torch.ones(2, 3)
            if n == 7:  # the second pass of step 2: its gradient is not finite
                with torch.no_grad():
                    kept = [each.clone() for each in model.parameters()]
                    for each in model.parameters():
                        each.zero_()
            loss = model(x).mean() / 3
            monitor.step(loss, scale=1 / 3, rerun=lambda x: model(x).mean(), batch=(x,))
            loss.backward()
            if n == 7:
                with torch.no_grad():
                    for each, before in zip(model.parameters(), kept):
                        each.copy_(before)
            if n % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
    (path,) = monitor.incidents
    found = gt.load_incident(path)
    assert (found.step, found.micro, found.of) == (2, 1, "gradient")


@pytest.mark.parametrize("fused", [False, True])  # which looks at gradients in the optimiser
def test_infinite_gradients_of_a_scaler_are_no_incident(fused: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    options: dict[str, Any] = {"file": tmp_path / "r.jsonl", "view": False}
    skipped = 0
    with gt.Monitor(model, trigger=("spike", "nonfinite"), **options) as monitor:
        for _ in range(8):
            loss = 100 * model(torch.ones(2, 3)).square().mean() + 3
            if fused:
                monitor.step(loss)  # without the scale
            else:
                monitor.step(scaler.scale(loss), scale=scaler)
            scaler.scale(loss).backward()
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            skipped += scaler.get_scale() < before
            optimizer.zero_grad()
    assert skipped and monitor.incidents == ()


@pytest.mark.filterwarnings("ignore")
def test_autocast_is_on_in_the_rerun(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
    options: dict[str, Any] = {"file": tmp_path / "r.jsonl", "view": False}
    with gt.Monitor(model, trigger="spike", **options) as monitor:
        for step in range(40):
            x = torch.randn(8, 64) * (1000 if step == 30 else 1)
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).float().square().mean()
            monitor.step(loss, rerun=lambda x: model(x).float().square().mean(), batch=(x,))
    (path,) = monitor.incidents
    found = gt.load_incident(path)
    assert found.same and found.step == 30
    assert found.rerun(model, lambda x: model(x).float().square().mean()).same
    found.beginning.autocast = {}
    assert not found.rerun(model, lambda x: model(x).float().square().mean()).same


def test_the_command_shows_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match="gradtrace diagnose r-step4-nonfinite"):
        short(Path(), {4})
    shown: Result = CliRunner().invoke(app, ["diagnose", "r-step4-nonfinite.gradtrace"])
    assert shown.exit_code == 1
    assert "Step 4: the loss is nan. Run again, the step gave the same loss." in shown.stdout
    assert "an input already holds it" in shown.stdout
    short_json = CliRunner().invoke(app, ["diagnose", "r-step4-nonfinite.gradtrace", "--json"])
    assert '"trigger": "nonfinite"' in short_json.stdout


@pytest.mark.filterwarnings("ignore")
def test_another_model_is_refused(tmp_path: Path) -> None:
    (path,) = short(tmp_path, {2}).incidents
    found = gt.load_incident(path)
    with pytest.raises(GradtraceError, match="'weight' has shape"):
        found.rerun(nn.Linear(4, 1))
    with pytest.raises(GradtraceError, match="the model has no 'bias'"):
        found.rerun(nn.Sequential(nn.Linear(3, 1)))
    model = nn.Linear(3, 1)
    found.load_into(model)
    assert torch.equal(model.weight, found.beginning.state["weight"])


@pytest.mark.parametrize(
    "options",
    [{"trigger": "nan"}, {"trigger": "spike", "spike": 0}, {"trigger": "spike", "spike": math.inf}]
    + [{"trigger": "spike", "incident_bytes": -1}],
)
def test_bad_arguments(options: dict[str, Any]) -> None:
    with pytest.raises(GradtraceError):
        gt.Monitor(nn.Linear(1, 1), **options)


# What is done in each step -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compiled", [True, False])
def test_a_gradient_is_finite_or_not_whichever_way_it_is_looked_at(
    dtype: torch.dtype, compiled: bool
) -> None:
    parameters = [nn.Parameter(torch.ones(size, dtype=dtype)) for size in (3, 17, 40)]
    check = FiniteGradients(parameters)
    if not compiled:
        check._compiled = None
    assert check.finite(), "without gradients"
    for each in parameters:
        each.grad = torch.randn(each.shape, dtype=dtype)
    assert check.finite()
    for at, each in enumerate(parameters):
        for number in (math.nan, math.inf, -math.inf):
            grad = each.grad
            assert grad is not None
            before, grad[2 * at] = grad[2 * at].clone(), number
            assert not check.finite()
            grad[2 * at] = before
    memory = torch.full((40,), math.nan, dtype=dtype)
    memory[0] = 1
    parameters[1].grad = memory[:1].expand(17)  # one number, and others behind it in memory
    assert check.finite()
    parameters[2].grad = torch.ones(40, dtype=dtype).to_sparse()
    assert not check.finite(), "what cannot be told is looked at one by one"
    parameters[2].grad = None
    assert check.finite()


def test_no_operation_of_torch_and_one_number_are_read_in_a_step_without_incident() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options: dict[str, Any] = {"trigger": ("spike", "nonfinite"), "view": False}
    names: dict[bool, Counter[str]] = {}

    def step(told: bool) -> None:
        loss = model(torch.ones(2, 3)).square().mean()
        if told:
            monitor.step(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with gt.Monitor(model, every=10**6, **options) as monitor:
        for _ in range(5):
            step(told=True)
        for told in (False, True):
            with torch.profiler.profile(acc_events=True) as seen:  # else 2.11 warns
                step(told)
            names[told] = Counter(event.name for event in seen.events() or ())
    more = names[True] - names[False]
    if FiniteGradients([*model.parameters()])._compiled is None:
        pytest.skip("without the compiled kernels gradients are added up by torch")
    assert more == {"aten::item": 1, "aten::_local_scalar_dense": 1}


def quick_run(bad: str, at: int, folder: Path) -> tuple[Any, ...]:
    """What triggers know after 120 steps of which one is bad."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    weight, optimizer = model[0].weight, torch.optim.SGD(model.parameters(), lr=0.0)
    options: dict[str, Any] = {"trigger": ("spike", "nonfinite"), "view": False}
    with gt.Monitor(model, every=50, budget=None, file=folder / "run.jsonl", **options) as monitor:
        for step in range(120):
            x = torch.randn(4 + step % 3, 3)
            loss = model(x).square().mean()
            if step == at:
                loss = loss * {"spike": 1e6, "nan": math.nan, "-inf": -math.inf}.get(bad, 1.0)
                loss = loss + (weight[0, 0] * 0).sqrt() if bad == "gradient" else loss
            monitor.step(loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        triggers = monitor._triggers
        assert triggers is not None
        quick = triggers._granted - triggers.plain
        triggers.revoke()
        rule, passes = triggers._rule, triggers.keeper._passes
        known = [*rule._recent], [*rule._sizes], rule.below, rule._age, rule._unsized, passes
        found = [each.name for each in monitor.incidents], monitor.history.steps, repr(monitor)
        return str(known), found, quick


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bad", ["", "spike", "nan", "-inf", "gradient"])
def test_a_quick_look_finds_what_a_thorough_one_does(
    bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for at in (40, 77):
        (tmp_path / f"{at}").mkdir(), (tmp_path / f"{at}-slow").mkdir()
        *quick, count = quick_run(bad, at, tmp_path / f"{at}")
        assert count or bad, "the quick look is not used"
        with monkeypatch.context() as patch:
            patch.setattr(Triggers, "grant", lambda self, most: None)
            *slow, none = quick_run(bad, at, tmp_path / f"{at}-slow")
        assert not none and quick == slow
        trigger = {"spike": "spike", "": ""}.get(bad, "nonfinite")
        assert quick[1][0] == ([f"run-step{at}-{trigger}.gradtrace"] if bad else [])


def test_a_call_of_the_model_is_seen_in_whatever_way_it_runs() -> None:
    class Model(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)  # type: ignore[no-any-return]

    model, seen = Model(nn.Linear(2, 2)), list[int]()
    with gt.Monitor(model, every=10**6, trigger="spike", view=False) as monitor:
        assert monitor._triggers is not None
        keeper = monitor._triggers.keeper

        def calls() -> int:
            kept = keeper.take()
            return 0 if kept is None else len(kept.calls)

        x = torch.ones(1, 2)
        model(x), model.forward(x), model.__call__(x)
        assert calls() == 3
        handle = model.register_forward_hook(lambda *_: seen.append(1))
        assert model(x) is not None and seen == [1] and calls() == 1
        handle.remove()
        other = lambda x: seen.append(2) or x  # noqa: E731
        model.forward = other  # type: ignore[method-assign]
        assert model(x) is x and seen == [1, 2] and calls() == 1
        del model.forward
        with pytest.raises(RuntimeError):
            model(torch.ones(1, 3))
        assert calls() == 1
        with torch.no_grad():
            model(x)
        assert calls() == 0
        assert torch.fx.symbolic_trace(model)(x).shape == x.shape
        Model.forward = lambda self, x: x * 0  # type: ignore[method-assign]
        assert not model(x).any()


def test_a_part_that_is_monitored_is_one_node_for_fx() -> None:
    linear = nn.Linear(2, 2)
    with gt.Monitor(linear, trigger="spike", view=False):
        graph = torch.fx.symbolic_trace(nn.Sequential(linear)).graph
    assert [node.op for node in graph.nodes] == ["placeholder", "call_module", "output"]
