"""Incidents: steps that go wrong are kept, and a new process says what their cause is."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.errors import BadFile, GradtraceError
from gradtrace.training.incident import Incident, load_incident

MODEL = """
import sys, torch
from torch import nn

class Net(nn.Module):
    def __init__(self, divides=False):
        super().__init__()
        torch.manual_seed(0)
        self.into, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.2)
        self.out, self.divides = nn.Linear(4, 1), divides

    def forward(self, x):
        h = self.drop(self.norm(self.into(x)).relu())
        return self.out(h / h.norm(dim=1, keepdim=True) if self.divides else h)

def loss_fn(model, batch):
    return (model(batch["x"]) - batch["y"]).square().mean()
"""

READ = """
import gradtrace as gt
for path in sys.argv[1:]:
    found = gt.load(path)
    print(found, found.diagnose(Net("divides" in path), loss_fn), sep="\\n", end="\\f")
"""

SPOILT = {"nan": math.nan, "1e4": 1e4, "divides": 1.0}
"""What a batch has at step 25; the model that divides does so by 0 where no unit is open."""


def trained(how: str, folder: Path) -> Path:
    """Train until something goes wrong; the first incident."""
    known: dict[str, Any] = {}
    exec(MODEL, known)
    model = known["Net"](how == "divides")
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with gt.Monitor(model, every=1000, folder=folder) as monitor, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for n in range(30):
            batch = {"x": torch.randn(6, 4), "y": torch.randn(6, 1), "names": [str(n)]}
            if n == 25:
                batch["x"][3, 2], batch["y"][3] = SPOILT[how], SPOILT[how]
            loss = known["loss_fn"](model, batch)
            monitor.step(loss, batch=batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return monitor.incidents[0]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What one new process says of an incident of each kind."""
    folder = tmp_path_factory.mktemp("incidents")
    paths = [str(trained(how, folder / how)) for how in SPOILT]
    done = fresh.python("-c", MODEL + READ, *paths, check=True)
    return dict(zip(SPOILT, done.stdout.split("\f")))


def test_a_new_process_names_an_input_that_is_not_finite(said: dict[str, str]) -> None:
    assert "Step 25: the loss is nan" in said["nan"] and "1 not finite" in said["nan"]
    assert "an input already holds it" in said["nan"] and "element [3, 2]" in said["nan"]


def test_a_new_process_names_the_batch_of_a_spike(said: dict[str, str]) -> None:
    text = said["1e4"]
    assert "Step 25: the gradient has norm" in text and "times the usual" in text
    assert "that at (3, 2) is" in text and "times the median |value|" in text
    assert "Norms of gradients by module: " in text and ", usually " in text


def test_a_new_process_places_a_nan_of_the_models_own(said: dict[str, str]) -> None:
    assert "keep the divisor away from 0" in said["divides"] and "Step " in said["divides"]


# What is kept -------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.last = nn.Linear(4, 1)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.last(self.net(x))  # type: ignore[no-any-return]


def kept(folder: Path, bad: int = 2, batch: Any = None, **how: Any) -> tuple[Any, list[Any]]:
    """Train until a loss is nan; the incident, and the model's state before each step."""
    model, before = Net(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gt.Monitor(model, folder=folder, **how) as monitor, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for n in range(bad + 3):
            x = torch.randn(5, 3)
            with torch.no_grad():  # an evaluation is no part of the step
                model(x)
            state = {name: each.clone() for name, each in model.state_dict().items()}
            before.append((state, torch.get_rng_state(), x))
            loss = model(x).square().mean() * (math.nan if n >= bad else 1)
            monitor.step(loss, batch=x if batch is None else batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return monitor, before


class Late:
    """Stands for an ``AsyncCopy``."""

    def __init__(self, x: Tensor) -> None:
        self.x = x.clone()

    def read(self) -> Tensor:
        return self.x


@pytest.mark.parametrize("late", [False, True], ids=["CPU", "as on a GPU"])
def test_weights_buffers_and_random_states_are_those_before_the_step(
    late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a step is judged when the optimiser has moved the weights."""
    if late:
        monkeypatch.setattr(Tensor, "is_cuda", True)
        monkeypatch.setattr("gradtrace.training.monitor.AsyncCopy", Late)
        monkeypatch.setattr("gradtrace.training.gradients.AsyncCopy", Late)
    monitor, before = kept(tmp_path)
    monkeypatch.undo()
    (path,) = monitor.incidents  # what lasts is told once
    found, (state, draws, x) = load_incident(path), before[2]
    assert found.state.keys() == state.keys() and torch.equal(found.batch, x)
    assert all(torch.equal(found.state[name], each) for name, each in state.items())
    assert torch.equal(found.began["torch"], draws) and found.began["buffers"]["calls"] == 5
    model = Net().eval()
    found.load_into(model)
    assert model.training and model.calls == 5 and torch.equal(torch.get_rng_state(), draws)
    assert "step 2: the loss is nan" in monitor.history.notes[0]


def test_diagnose_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    found = load_incident(kept(tmp_path)[0].incidents[0])
    model = Net().eval()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    diagnosis = found.diagnose(model, lambda model, x: model(x).square().mean())
    assert diagnosis.nonfinite is None and diagnosis.findings[0].kind == "incident"
    assert not model.training and model.calls == 0
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_what_a_batch_may_hold(tmp_path: Path) -> None:
    class Text(str):
        pass

    batch = {"a": (1, 2.5, None, True), "b": [Text("x"), {"c": torch.ones(2)}], "f": len, 3: object}
    (path,) = kept(tmp_path, batch=batch)[0].incidents
    found = load_incident(path)
    assert found.batch["a"] == batch["a"] and found.batch["b"][0] == "x"
    assert torch.equal(found.batch["b"][1]["c"], torch.ones(2)) and found.batch["f"] is None
    assert found.left_out == ["f (builtin_function_or_method)", "3 (type)"]
    assert "Left out of the batch: f (builtin" in str(found)
    assert "float32 of shape (2,), 1 to 1" in found.words


def test_autocast_is_on_again(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    monitor = gt.Monitor(model, folder=tmp_path)
    with torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        monitor.step(model(torch.full((1, 2), 1e38)).float().sum() * math.inf)
    monitor.close()
    seen = []
    load_incident(monitor.incidents[0]).diagnose(
        model, lambda model, _: seen.append(x := model(torch.ones(1, 2))) or x.sum()
    )
    assert seen[0].dtype == torch.bfloat16


# When ---------------------------------------------------------------------------------------------


def run(folder: Path, scales: list[float], **how: Any) -> list[str]:
    """Steps whose gradients are multiplied: the names of the incidents."""
    model = nn.Linear(3, 1)
    how = {"passes": 1, "scale": 1.0, "grad": 1.0} | how
    monitor = gt.Monitor(model, folder=folder, accumulate=how["passes"])
    with monitor, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for n, factor in enumerate(scales):
            out = model(torch.randn(4, 3))
            out.register_hook(lambda grad, factor=factor: grad * factor)
            loss = out.mean() * how["grad"]
            monitor.step(loss, scale=how["scale"])
            loss.backward()
            if n % how["passes"] == how["passes"] - 1:
                model.zero_grad()
    return [each.name for each in monitor.incidents]


@pytest.mark.parametrize(
    ("scales", "expected"),
    [
        ([1.0] * 40, []),
        ([1.0] * 10 + [50.0] + [1.0] * 30, []),  # too early to know what is usual
        ([1.0] * 30 + [50.0] + [1.0] * 5 + [80.0], ["step30.pt", "step36.pt"]),
        ([1.0] * 30 + [math.nan] * 4 + [1.0, math.inf], ["step30.pt", "step35.pt"]),
    ],
    ids=["none", "warming up", "spikes", "not finite"],
)
def test_which_steps(scales: list[float], expected: list[str], tmp_path: Path) -> None:
    assert run(tmp_path, scales) == expected


def test_the_pass_of_an_accumulated_step(tmp_path: Path) -> None:
    assert run(tmp_path, [1.0, 1.0, 1.0] * 25 + [1.0, 60.0, 1.0], passes=3) == ["step25.pt"]


def test_infinite_gradients_are_a_scalers_to_handle(tmp_path: Path) -> None:
    scales, scaler = [1.0] * 25 + [math.inf, 1.0], torch.amp.GradScaler("cpu", init_scale=4.0)
    assert run(tmp_path, scales, scale=scaler, grad=4.0) == []
    assert run(tmp_path, scales, scale=4.0, grad=4.0) == ["step25.pt"]


def test_there_are_at_most_so_many(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    with gt.Monitor(model, folder=tmp_path, most=2) as monitor:
        for n in range(8):
            loss = model(torch.ones(1, 2)).sum() * (math.nan if n % 2 else 1)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                monitor.step(loss)
            loss.backward()
            model.zero_grad()
    assert [each.name for each in monitor.incidents] == ["step1.pt", "step3.pt"]


# Files --------------------------------------------------------------------------------------------


def test_a_folder_that_vanishes_stops_nothing(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    monitor = gt.Monitor(model, every=10, folder=tmp_path / "kept")
    (tmp_path / "kept").rmdir()
    (tmp_path / "kept").write_text("")
    monitor.step(model(torch.ones(1, 2)).sum())
    with pytest.warns(UserWarning, match="was not kept.*training goes on"):
        monitor.step(model(torch.ones(1, 2)).sum() * math.nan)
    monitor.close()


@pytest.mark.parametrize("content", [b"", b"torn", b"PK\x03\x04torn"])
def test_files_that_are_none(content: bytes, tmp_path: Path) -> None:
    (path := tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(BadFile, match=r"a\.pt'.* (torn|no incident)"):
        load_incident(path)
    torch.save({"weights": torch.ones(2)}, path)
    with pytest.raises(BadFile, match=r"is no incident of a gradtrace\.Monitor"):
        load_incident(path)


def test_another_model_is_refused(tmp_path: Path) -> None:
    found: Incident = load_incident(kept(tmp_path)[0].incidents[0])
    with pytest.raises(GradtraceError, match=r"of another model: (?s:.*)net.0.weight"):
        found.load_into(nn.Linear(3, 4))
    other = Net()
    other.last = nn.Linear(4, 2)
    with pytest.raises(GradtraceError, match=r"size mismatch for last.weight"):
        found.load_into(other)
