"""``Monitor``: traces of a training loop, without disturbing it."""

from __future__ import annotations

import copy
import math
import pickle
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gradtrace as gt
from gradtrace.errors import GradtraceError, Unsupported
from gradtrace.tracing.influence import Influence
from gradtrace.training import monitor

Batch = tuple[Tensor, Tensor]


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 3))


def batches(count: int, size: int = 5) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(size, 4, generator=generator),
            torch.randint(3, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def train(model: nn.Module, steps: int, monitor: gt.Monitor | None = None, **more: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches(steps):
        loss = loss_of(model, batch)
        if monitor is not None:
            monitor.step(loss, **more)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def direct(model: nn.Module, batch: Batch, **how: Any) -> Influence:
    with gt.watch(model) as watch:
        loss = loss_of(model, batch)
    return watch.trace(loss).influence(**how)


def hooks(model: nn.Module) -> int:
    return sum(
        len(table)
        for module in model.modules()
        for table in (
            module._forward_pre_hooks,
            module._forward_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
            module._forward_hooks_always_called,
        )
    )


# What is found ------------------------------------------------------------------------------------


def test_influence_is_that_of_a_direct_trace() -> None:
    model = net().eval()
    with gt.Monitor(model, every=1, budget=None) as monitor:
        for batch in batches(3):
            expected = direct(model, batch)
            loss = loss_of(model, batch)
            record = monitor.step(loss)
            assert record is not None and record.influence == expected
            assert record.loss == loss.item() and record.verdict
            loss.backward()
    assert monitor.history.influences[-1] == expected
    assert set(monitor.history.components) == {"0", "1", "2", "3"} - {"2"}


def test_norms_are_those_of_gradients() -> None:
    model = net().eval()
    with gt.Monitor(model, budget=None) as monitor:
        loss = loss_of(model, batches(1)[0])
        record = monitor.step(loss)
        loss.backward()
    assert record is not None
    for name in ("0", "3"):
        grads = torch.cat([p.grad.flatten() for p in model[int(name)].parameters()])  # type: ignore[union-attr]
        assert record.norms[name].own == pytest.approx(grads.norm().item(), rel=1e-5)


def test_components_rule_and_sample_are_passed_on() -> None:
    model, batch = net().eval(), batches(1)[0]
    groups = {"ends": ["0", "3"]}
    with gt.Monitor(model, components=groups, rule="viterbi", sample=None, budget=None) as monitor:
        record = monitor.step(loss_of(model, batch))
    with gt.watch(model) as watch:
        loss = loss_of(model, batch)
    assert record is not None
    assert record.influence == watch.trace(loss, rule="viterbi").influence(groups)


def test_vectors_of_losses_are_pairs() -> None:
    model = net().eval()
    x, y = batches(1)[0]
    monitor = gt.Monitor(model, budget=None)
    record = monitor.step(functional.cross_entropy(model(x), y, reduction="none"))
    monitor.close()
    assert record is not None and record.influence is not None and record.influence.pairs == 5


# Which steps are traced --------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 3, 100])
def test_every(every: int) -> None:
    model = net()
    with gt.Monitor(model, every=every, budget=None) as monitor:
        train(model, 8, monitor)
    assert monitor.history.steps == tuple(range(0, 8, every))
    assert monitor.cost.traces == len(monitor.history)


def test_a_step_of_several_backward_passes() -> None:
    model = net().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = {}
    with gt.Monitor(model, every=2, accumulate=3, budget=None) as monitor:
        for n, batch in enumerate(batches(12)):
            expected[n] = direct(model, batch)
            loss = loss_of(model, batch)
            monitor.step(loss / 3, scale=1 / 3)
            (loss / 3).backward()
            if n % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
    history = monitor.history
    assert history.steps == (0, 2)
    for record, first in zip(history.records, (0, 6)):
        assert record.influence is not None
        assert record.influence.shares == expected[first].shares
        assert record.scale == pytest.approx(1 / 3)
    model = net().eval()
    plain = loss_of(model, batches(1)[0])
    assert history.losses[0] == pytest.approx(plain.item(), rel=1e-6)


def test_begin_gives_steps_their_numbers() -> None:
    model = net()
    with gt.Monitor(model, every=10, budget=None) as monitor:
        for step in (100, 100, 105, 109, 110, 110, 111, 120):
            monitor.begin(step)
            monitor.step(loss_of(model, batches(1)[0]))
    assert monitor.history.steps == (100, 110, 120)


# Mixed precision ----------------------------------------------------------------------------------


class Scaler:
    """``torch.amp.GradScaler`` works on GPUs only."""

    def get_scale(self) -> float:
        return 1024.0

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self.get_scale()


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("scale", [1024.0, 1 / 4, -2.0])
def test_norms_outside_of_modules_are_told_without_a_scale(scale: float, reduction: str) -> None:
    model, (x, y), found = Parts(), batches(1)[0], []
    model.forward = lambda x: model.second(model.encode(x))  # type: ignore[method-assign]
    for by in (1.0, scale):
        with gt.Monitor(model, budget=None) as monitor:
            loss = functional.cross_entropy(model(x), y, reduction=reduction)
            record = monitor.step(loss if by == 1.0 else loss * by, scale=by)
            assert record is not None and record.norms is not None
            found.append(record.norms)
    plain, scaled = found
    assert plain.keys() == scaled.keys() and "" in plain
    for name, each in plain.items():
        assert scaled[name] == pytest.approx(each), name


def test_scaled_losses_are_told_without_their_scale() -> None:
    model, batch, scaler = net().eval(), batches(1)[0], Scaler()
    found = []
    for scale in (None, scaler):
        with gt.Monitor(model, budget=None) as monitor:
            loss = loss_of(model, batch)
            if scale is None:
                found.append(monitor.step(loss))
            else:
                found.append(monitor.step(scale.scale(loss), scale=scale))
    plain, scaled = found
    assert plain is not None and scaled is not None
    assert scaled.scale == 1024 and scaled.loss == plain.loss
    assert scaled.influence == plain.influence  # powers of two change no bit
    assert scaled.norms == plain.norms


def test_autocast_is_no_matter() -> None:
    model, (x, y) = net().eval(), batches(1)[0]
    found = []
    for inside in (True, False):
        with gt.Monitor(model, budget=None) as monitor:
            with torch.autocast("cpu", torch.bfloat16):
                loss = functional.cross_entropy(model(x).float(), y)
                if inside:
                    found.append(monitor.step(loss))
            if not inside:
                found.append(monitor.step(loss))
            before = {n: p.clone() for n, p in model.named_parameters()}
            loss.backward()
            assert all(torch.equal(before[n], p) for n, p in model.named_parameters())
    with gt.watch(model) as watch, torch.autocast("cpu", torch.bfloat16):
        loss = functional.cross_entropy(model(x).float(), y)
    trace = watch.trace(loss)
    assert found[0] is not None and found[1] is not None
    assert found[0].influence == found[1].influence == trace.influence()
    assert found[0].norms == found[1].norms
    assert found[0].norms["0"].own == trace.norms()["0"].own
    assert {p.dtype for p in model.parameters()} == {torch.float32}


# Training is as without ---------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.into, self.out = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.mix(self.into(x).unsqueeze(1).expand(-1, 6, -1)).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.mix(x.unsqueeze(1).expand(-1, 5, -1))[0][:, -1])


class Checkpointed(nn.Module):
    """Batch norm and a dropout whose random numbers are not put back."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.into = nn.Linear(4, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.1))
        self.out = nn.Linear(8, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        inside = checkpoint(
            self.body, self.into(x), use_reentrant=self.reentrant, preserve_rng_state=False
        )
        return self.out(inside)


@pytest.mark.parametrize("make", [net, Attention, Recurrent, Checkpointed])
def test_training_has_the_same_bits(make: Callable[[], nn.Module]) -> None:
    states = []
    for monitored in (False, True):
        torch.manual_seed(0)
        model = make()
        torch.manual_seed(7)
        monitor = gt.Monitor(model, every=2, budget=None) if monitored else None
        train(model, 6, monitor)
        if monitor is not None:
            assert len(monitor.history) == 3
            monitor.close()
        states.append((model.state_dict(), torch.get_rng_state()))
    (plain, random), (watched, other) = states
    assert all(torch.equal(plain[name], watched[name]) for name in plain)
    assert torch.equal(random, other)


def test_the_model_is_as_before() -> None:
    model = net()
    before = hooks(model)
    with gt.Monitor(model, every=2, budget=None) as monitor:
        loss = loss_of(model, batches(1)[0])
        assert hooks(model) == 0  # its calls are seen without
        monitor.step(loss)
        assert hooks(model) == 0
        assert all(p.grad is None for p in model.parameters())
    assert hooks(model) == before
    monitor.close()  # again


def test_copies_and_pickles_of_the_model_have_nothing_of_it() -> None:
    model = net()
    with gt.Monitor(model, budget=None) as monitor:
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            other(batches(1)[0][0])
            assert monitor._sampled._watch is None
        assert monitor.step(loss_of(model, batches(1)[0])) is not None


def test_evaluation_in_between() -> None:
    model = net()
    with gt.Monitor(model, every=1, budget=None) as monitor:
        for batch in batches(3):
            loss = loss_of(model, batch)
            with torch.no_grad():
                model.eval()
                model(batch[0])
                model.train()
            expected = monitor.step(loss)
            assert expected is not None and expected.influence is not None
            assert set(expected.influence.shares) == {"0", "1", "2", "3"}
            loss.backward()
    # Steps with an evaluation in between are not timed.
    assert monitor.history.timed == ()


# Errors of the user's ----------------------------------------------------------------------------


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.fails = nn.Linear(4, 3), True

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)
        if self.fails:
            raise KeyError("mine")
        return found


def test_errors_in_a_step_leave_nothing_behind() -> None:
    model = Failing()
    with pytest.raises(KeyError, match="mine"), gt.Monitor(model, budget=None) as monitor:
        loss_of(model, batches(1)[0])
    assert hooks(model) == 0
    assert monitor.history.notes == ("the run was ended by KeyError at step 0",)
    assert not monitor.history.running


def test_a_loop_may_go_on_after_an_error() -> None:
    model = Failing()
    with gt.Monitor(model, budget=None) as monitor:
        for _ in range(2):
            with pytest.raises(KeyError, match="mine"):
                loss_of(model, batches(1)[0])
        model.fails = False
        record = monitor.step(loss_of(model, batches(1)[0]))
        assert hooks(model) == 0
    assert record is not None and record.influence is not None
    assert record.influence.shares.keys() == {"inner"}


def test_losses_that_are_not_numbers_are_recorded() -> None:
    model = net()
    with gt.Monitor(model, every=1, budget=None) as monitor:
        monitor.step(loss_of(model, batches(1)[0]))
        loss = loss_of(model, batches(1)[0]) * math.nan
        record = monitor.step(loss)
        monitor.step(loss_of(model, batches(1)[0]))
    assert record is not None and record.influence is None
    assert "not finite" in record.notes[0]
    found = monitor.history
    assert math.isnan(found.losses[1]) and not math.isnan(found.losses[2])
    assert [table is None for table in found.influences] == [False, True, False]


def test_the_first_step_may_be_nan() -> None:
    model = net()
    with gt.Monitor(model, every=1, budget=None) as monitor:
        record = monitor.step(loss_of(model, batches(1)[0]) * math.inf)
    assert record is not None and record.influence is None


def test_a_loss_that_does_not_reach_the_model() -> None:
    model, other = net(), net(1)
    with gt.Monitor(model, budget=None) as monitor:
        model(batches(1)[0][0])
        with pytest.raises(GradtraceError, match="no parameter of the Sequential"):
            monitor.step(loss_of(other, batches(1)[0]))


def test_parameters_of_a_functional_call_are_known() -> None:
    """Where the watch is opened, the model holds tensors that are made from its parameters."""
    model, (x, y) = net(), batches(1)[0]
    with gt.Monitor(model, every=1, budget=None) as monitor:
        scaled = {name: p * 1.5 for name, p in model.named_parameters()}
        record = monitor.step(functional.cross_entropy(functional_call(model, scaled, (x,)), y))
    assert record is not None and record.influence is not None
    assert record.influence["3"].own == sum(p.numel() for p in model[3].parameters())


def test_a_loss_of_another_model_that_is_not_called_either() -> None:
    model, other = net(), net(1)
    with gt.Monitor(model, budget=None) as monitor:
        assert monitor.step(loss_of(other, batches(1)[0])) is None
        with pytest.raises(GradtraceError, match="no parameter of the Sequential"):
            monitor.step(loss_of(other, batches(1)[0]))


@pytest.mark.parametrize("loss", [0.5, None, torch.tensor(1.0)])
def test_what_is_no_loss(loss: Any) -> None:
    model = net()
    with gt.Monitor(model, budget=None) as monitor:
        model(batches(1)[0][0])
        with pytest.raises(GradtraceError):
            monitor.step(loss)
        assert hooks(model) == 0


@pytest.mark.parametrize(
    "how",
    [
        {"every": 0},
        {"every": True},
        {"sample": 0},
        {"accumulate": 1.5},
        {"budget": 0},
        {"budget": 2},
        {"rule": "best"},
        {"loggers": "tensorboard"},
        {"loggers": [3]},
        {"file": "/nowhere/run.jsonl"},
    ],
)
def test_bad_arguments(how: dict[str, Any]) -> None:
    model = net()
    with pytest.raises(GradtraceError):
        gt.Monitor(model, **how)
    assert hooks(model) == 0


def test_no_module() -> None:
    with pytest.raises(GradtraceError, match=r"torch\.nn\.Module, got function"):
        gt.Monitor(net)  # type: ignore[arg-type]


def test_after_the_end() -> None:
    model = net()
    monitor = gt.Monitor(model)
    monitor.close()
    with pytest.raises(GradtraceError, match="closed"):
        monitor.step(loss_of(model, batches(1)[0]))


def test_reentrant_checkpoints_are_refused() -> None:
    model = Checkpointed(reentrant=True)
    with gt.Monitor(model, budget=None) as monitor:
        loss = loss_of(model, batches(1)[0])
        with pytest.raises(Unsupported, match="use_reentrant=False"):
            monitor.step(loss)
        assert hooks(model) == 0


def test_later_errors_are_told_and_training_goes_on() -> None:
    model = Checkpointed()
    with gt.Monitor(model, every=1, budget=None) as monitor:
        monitor.step(loss_of(model, batches(1)[0]))
        model.reentrant = True
        with pytest.warns(UserWarning, match="step 1 could not be traced"):
            record = monitor.step(loss_of(model, batches(1)[0]))
        model.reentrant = False
        assert monitor.step(loss_of(model, batches(1)[0])) is not None
    assert record is not None and record.influence is None and "reentrant" in record.notes[0]
    assert [table is None for table in monitor.history.influences] == [False, True, False]


@pytest.mark.parametrize("hooked", [False, True])
def test_hooks_are_told_of_where_there_are_some(hooked: bool) -> None:
    """Not of a model that is called twice in a step, the watch of which is opened again."""
    model = nn.Linear(4, 3)
    with gt.Monitor(model, every=1, budget=None) as monitor:
        for x, _ in batches(2):
            first = model(x)
            if hooked:
                first.register_hook(lambda grad: grad * 2)
            record = monitor.step((first + model(x + 1)).square().mean())
            assert record is not None
            assert [note[:18] for note in record.notes] == ["hooks on gradients"] * hooked


# Models of other kinds ----------------------------------------------------------------------------


class Parts(nn.Module):
    """A model that is never called itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)

    def encode(self, x: Tensor) -> Tensor:
        return self.first(x).tanh()


def test_a_model_whose_parts_are_called() -> None:
    model = Parts()
    with gt.Monitor(model, every=5, budget=None) as monitor:
        for x, y in batches(12):
            monitor.step(functional.cross_entropy(model.second(model.encode(x)), y))
    assert monitor.history.steps == (1, 6, 11)  # the first told that the model is not called
    assert set(monitor.history.components) == {"first", "second"}


class Lossy(nn.Module):
    """A model that calls its Monitor from within its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, batch: Batch, monitor: gt.Monitor) -> None:
        loss = loss_of(self.inner, batch)
        monitor.step(loss)
        loss.backward()


def test_a_model_that_calls_its_monitor() -> None:
    model = Lossy()
    with gt.Monitor(model, every=2, budget=None) as monitor:
        for batch in batches(5):
            model(batch, monitor)
    assert monitor.history.steps == (0, 2, 4)


def test_shared_parameters_count_once() -> None:
    model = net().eval()
    model[3] = nn.Linear(6, 4)
    model.append(nn.Linear(4, 6))
    model[4].weight = model[0].weight
    x = torch.randn(5, 4)
    with gt.Monitor(model, sample=None, budget=None) as monitor:
        record = monitor.step(model(x).square().mean())
    assert record is not None and record.influence is not None
    assert record.influence["0"].own == 6 * 4 + 6
    assert sum(p.numel() for p in model.parameters()) == 6 * 4 + 6 + 4 * 6 + 4 + 6


def test_two_models_with_a_monitor_each() -> None:
    torch.manual_seed(0)
    maker, judge = nn.Sequential(nn.Linear(2, 4)), nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1))
    with (
        gt.Monitor(maker, every=2, budget=None) as first,
        gt.Monitor(judge, every=2, budget=None) as second,
    ):
        for x, _ in batches(4):
            made = maker(torch.randn(5, 2))
            loss = judge(x).mean() - judge(made.detach()).mean()
            second.step(loss)
            loss.backward()
            loss = judge(made).mean()
            first.step(loss)
            loss.backward()
    assert first.history.steps == second.history.steps == (0, 2)
    assert set(first.history.components) == {"0"}
    assert set(second.history.components) == {"0", "1"}
    assert hooks(maker) == hooks(judge) == 0


@pytest.mark.parametrize("way", ["outer", "inner", "in place"])
def test_compiled_models(way: str) -> None:
    model = net().eval()
    expected = direct(model, batches(1)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler's own
        called: nn.Module = model
        if way == "in place":
            model.compile(backend="aot_eager")
        else:
            called = torch.compile(model, backend="aot_eager", fullgraph=True)  # type: ignore[assignment]
        watched = model if way == "inner" else called
        with gt.Monitor(watched, every=2, budget=None) as monitor:
            for _ in range(5):
                loss = loss_of(called, batches(1)[0])
                monitor.step(loss)
                loss.backward()
    first = 1 if way == "inner" else 0
    assert monitor.history.steps == tuple(range(first, 5, 2))
    assert all(table == expected for table in monitor.history.influences)
    assert hooks(model) == 0
    torch._dynamo.reset()


# Loggers ------------------------------------------------------------------------------------------


def test_loggers_get_few_numbers() -> None:
    model, heard = net().eval(), []
    with gt.Monitor(
        model, every=2, budget=None, loggers=[lambda *said: heard.append(said)]
    ) as monitor:
        train(model, 3, monitor)
    assert [step for step, _ in heard] == [0, 2]
    record = monitor.history.records[-1]
    said = heard[-1][1]
    assert said["gradtrace/loss"] == record.loss
    assert set(said) <= {"gradtrace/loss", "gradtrace/cost"}  # in a chain there is no choice


def test_a_logger_that_fails_is_told_of_once() -> None:
    def fails(step: int, scalars: object) -> None:
        raise OSError("no network")

    model = net()
    with gt.Monitor(model, every=1, budget=None, loggers=[fails]) as monitor:
        with pytest.warns(UserWarning, match="no network"):
            monitor.step(loss_of(model, batches(1)[0]))
        assert monitor.step(loss_of(model, batches(1)[0])) is not None


def test_what_is_still_open_at_the_end_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    left = gt.Monitor(model, budget=None)
    left.step(loss_of(model, batches(1)[0]))
    monkeypatch.setattr(sys, "last_type", ValueError, raising=False)
    monitor._close_all()
    assert hooks(model) == 0
    assert left.history.notes == ("the run was ended by ValueError at step 1",)


def test_a_loss_in_full_precision_within_autocast() -> None:
    model = net().eval()
    expected = direct(model, batches(1)[0])
    with gt.Monitor(model, budget=None) as monitor:
        loss = loss_of(model, batches(1)[0])
        with torch.autocast("cpu", torch.bfloat16):
            record = monitor.step(loss)
    assert record is not None and record.influence == expected
