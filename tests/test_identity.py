"""A journal knows what it belongs to: the model, the loss function, the settings and the data."""

from __future__ import annotations

import functools
import importlib
import random
import statistics
import sys
from argparse import Namespace
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gradtrace.distributed import digests
from gradtrace.distributed.code_facts import exchanged
from gradtrace.distributed.identity import identity
from torch import Tensor, nn
from torch.fx import symbolic_trace
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import gradtrace as gt
from gradtrace.errors import GradtraceError
from gradtrace.tracing.influence import Influence

Loss = Callable[[nn.Module, Any], Tensor]


class Net(nn.Module):
    def __init__(self, power: float = 1.0) -> None:
        super().__init__()
        self.e, self.a, self.b = (nn.Linear(6, 6) for _ in range(3))
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.0)
        self.register_buffer("mask", torch.ones(6))
        self.power, self.calls = power, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = self.norm(self.drop(self.e(x)))
        return (self.a(h) + self.b(h) * self.power) * self.mask


def net(**more: Any) -> Net:
    torch.manual_seed(0)
    return Net(**more).eval()


def data(count: int = 5, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 6, generator=generator) for _ in range(count)]


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean(1)


# What belongs to a journal ------------------------------------------------------------------------


def scaled(model: Net) -> Net:
    with torch.no_grad():
        model.a.weight.mul_(100)
    return model


def one_weight(model: Net) -> Net:
    with torch.no_grad():
        model.b.weight.view(-1)[17] += 1e-6
    return model


def swapped(model: Net) -> Net:
    with torch.no_grad():
        model.a.weight.copy_(model.a.weight.flip(0))
    return model


def masked(model: Net) -> Net:
    model.mask[2] = 0
    return model


def frozen(model: Net) -> Net:
    model.e.weight.requires_grad_(False)
    return model


def dropped(model: Net) -> Net:
    model.drop.p = 0.5
    return model


def tied(model: Net, tie: bool) -> Net:
    with torch.no_grad():
        model.b.weight.copy_(model.a.weight)
    if tie:
        model.b.weight = model.a.weight
    return model


def test_tied_weights_and_shared_modules_count() -> None:
    apart, shared = (identity(tied(net(), tie), loss)[0] for tie in (False, True))
    assert apart.tensors != shared.tensors
    act = nn.Tanh()
    twice, two = nn.Sequential(act, act), nn.Sequential(nn.Tanh(), nn.Tanh())
    assert identity(twice, loss)[0].modules != identity(two, loss)[0].modules


class Other(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).abs()


CHANGED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "weights": (lambda: scaled(net()), r"weights or buffers \(a\.weight\)"),
    "one weight": (lambda: one_weight(net()), r"\(b\.weight\)"),
    "order of weights": (lambda: swapped(net()), r"\(a\.weight\)"),
    "a buffer": (lambda: masked(net()), r"\(mask\)"),
    "running statistics": (lambda: moved(net()), r"\(norm\.running_mean\)"),
    "frozen": (lambda: frozen(net()), "names, shapes, dtypes"),
    "double": (lambda: net().double(), "names, shapes, dtypes"),
    "mode": (lambda: net().train(), "the mode of modules|names, shapes"),
    "mode of a part": (lambda: part_trains(net()), "the mode of modules"),
    "a setting of a module": (lambda: dropped(net()), "code or the settings of the model"),
    "a setting of the user's": (lambda: net(power=2.0), "code or the settings of the model"),
    "another class": (lambda: like(Other()), "it was a Net, this is a Other"),
    "another model": (lambda: nn.Sequential(nn.Linear(6, 3)), "it was a Net, this is a Sequential"),
}


def moved(model: Net) -> Net:
    assert model.norm.running_mean is not None
    model.norm.running_mean += 1
    return model


def part_trains(model: Net) -> Net:
    model.drop.train()
    return model


def like(model: Net) -> Net:
    model.load_state_dict(net().state_dict())
    return model.eval()


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("what", CHANGED)
def test_a_changed_model_is_refused(tmp_path: Path, what: str, finished: bool) -> None:
    file = tmp_path / "run.gradtrace"
    gt.influence(net(), loss, data(5 if finished else 3), checkpoint=file)
    before = file.read_bytes()
    make, told = CHANGED[what]
    with pytest.raises(GradtraceError, match=told) as error:
        gt.influence(make(), loss, data(), checkpoint=file)
    assert "delete it to begin again" in str(error.value)
    assert file.read_bytes() == before
    assert gt.influence(net(), loss, data(), checkpoint=file).pairs == 20


class Choice(Enum):
    A, B = 1, 2


@dataclass
class Config:
    scale: float = 1.0


class Configured(nn.Module):
    """Settings of many kinds, and what changes in use."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.table, self.record, self._hidden = {"scale": [1.0, 2.0]}, Config(), 1.0
        self.bias, self.steps = torch.zeros(2), (1, 2)
        self.kept: list[Tensor] = []
        self.cache, self._count, self.state = dict[int, Tensor](), 0, Namespace(last=None)
        self.gain, self.act, self.choice = 1.0, torch.relu, Choice.A
        self.prior = torch.distributions.Normal(0.0, 1.0)

    def set_gain(self, gain: float) -> None:
        self.gain = gain

    @property
    def offset(self) -> float:
        return getattr(self, "_offset", 0.0)

    @offset.setter
    def offset(self, value: float) -> None:
        self._offset = value

    def forward(self, x: Tensor) -> Tensor:
        self._count += 1
        self.cache[self._count] = x
        self.state.last = self._count
        h = self.act(self.layer(x)) * self.gain + self.offset
        return h * self.table["scale"][0] * self.record.scale * self._hidden + self.bias

    def keep(self, x: Tensor) -> None:
        self.kept.append(x)


SETTINGS: dict[str, Callable[[Any], object]] = {
    "a dict": lambda model: model.table["scale"].append(3.0),
    "a dataclass": lambda model: setattr(model.record, "scale", 2.0),
    "a private number": lambda model: setattr(model, "_hidden", 2.0),
    "a tensor": lambda model: model.bias.add_(1),
    "a tuple": lambda model: setattr(model, "steps", (1, 3)),
    "a hook": lambda model: model.layer.register_forward_hook(lambda m, x, out: 2 * out),
    "by a method": lambda model: model.set_gain(2.0),
    "by a property": lambda model: setattr(model, "offset", 2.0),
    "an activation": lambda model: setattr(model, "act", torch.tanh),
    "a choice": lambda model: setattr(model, "choice", Choice.B),
    "a distribution": lambda model: setattr(
        model, "prior", torch.distributions.Normal(0.0, torch.tensor(2.0))
    ),
    "a backward hook": lambda model: model.layer.register_full_backward_hook(lambda m, a, b: None),
    "a hook on gradients": lambda model: model.register_full_backward_pre_hook(lambda m, g: None),
    "a hook of a weight": lambda model: model.layer.weight.register_hook(lambda g: 2 * g),
    "a hook before": lambda model: model.register_forward_pre_hook(lambda m, x: (2 * x[0],)),
}


@pytest.mark.parametrize("what", SETTINGS)
def test_settings_in_attributes_and_hooks_count(what: str) -> None:
    torch.manual_seed(0)
    model = Configured()
    before = identity(model, loss)[0].modules
    model(torch.ones(1, 2))
    model.keep(torch.ones(2))
    assert identity(model, loss)[0].modules == before  # what a model changes in use is no setting
    with gt.watch(model):
        assert identity(model, loss)[0].modules == before
    SETTINGS[what](model)
    assert identity(model, loss)[0].modules != before


def test_hooks_on_all_modules_count() -> None:
    before = identity(net(), loss)[0]
    hook = register_module_forward_hook(lambda module, given, out: None)
    try:
        assert identity(net(), loss)[0] != before
    finally:
        hook.remove()


def test_autocast_around_the_call_counts() -> None:
    before = identity(net(), loss)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        now = identity(net(), loss)[0]
    (told,) = before.differences(now, [])
    assert "torch.autocast" in told


def test_a_model_without_shapes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GradtraceError, match=r"0\.weight has no shape yet: call the model once"):
        gt.influence(nn.Sequential(nn.LazyLinear(3)), loss, data(), checkpoint=tmp_path / "c")


def test_running_statistics_of_norms_in_training_do_not_matter() -> None:
    first, second = net().train(), moved(net()).train()
    assert identity(first, loss)[0] == identity(second, loss)[0]


# Loss functions -----------------------------------------------------------------------------------

SCALE = 1.0
OPTIONS = {"power": 2}
CALLS: list[int] = []
ARGS = Namespace(scale=1.0)


def helper(x: Tensor) -> Tensor:
    return x.square()


class Criterion:
    def __init__(self, scale: float) -> None:
        self.scale, self.count = scale, 0

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        self.count += 1
        return model(x).mean(1) * self.scale


def teaching(teacher: nn.Module) -> Loss:
    return lambda model, x: (model(x) - teacher(x)).square().mean(1)


def weighted(weights: Tensor) -> Loss:
    return lambda model, x: (model(x) * weights).mean(1)


def by_global(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).mean(1) * SCALE


def by_dict(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).pow(OPTIONS["power"]).mean(1)


def by_args(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).mean(1) * ARGS.scale


def by_helper(model: nn.Module, x: Tensor) -> Tensor:
    return helper(model(x)).mean(1)


def counting(model: nn.Module, x: Tensor) -> Tensor:
    CALLS.append(1)
    return loss(model, x)


def with_default(model: nn.Module, x: Tensor, scale: float = 1.0) -> Tensor:
    return model(x).mean(1) * scale


def told(function: Loss) -> str:
    return identity(net(), function)[0].loss


def test_the_same_loss_is_recognised() -> None:
    """Written elsewhere, called before, with counters that have moved."""
    here = told(lambda m, x: m(x).square().mean(1))
    there = told(
        lambda m, x: m(x).square().mean(1)  # a comment
    )
    assert here == there
    for make in (lambda: counting, lambda: Criterion(1.0), lambda: teaching(net())):
        function = make()
        first = told(function)
        for x in data(30):
            function(net(), x)
        assert told(function) == first == told(make())
    number = 0

    def numbered(model: nn.Module, x: Tensor) -> Tensor:
        nonlocal number
        number += 1
        return loss(model, x)

    before = told(numbered)
    numbered(net(), data()[0])
    assert told(numbered) == before
    model = net()
    before = identity(model, loss)[0].modules
    model(data()[0])  # which counts its calls
    assert identity(model, loss)[0].modules == before


def test_a_global_with_the_name_of_an_attribute_does_not_matter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``a = gt.influence(model, ...)``, where the model has a module ``a``."""

    def function(model: nn.Module, x: Tensor) -> Tensor:
        return loss(model, x).square()

    before = identity(net(), function)[0]
    for name in ("a", "power", "square"):
        monkeypatch.setattr(sys.modules[__name__], name, 5, raising=False)
    assert identity(net(), function)[0] == before
    monkeypatch.setattr(sys.modules[__name__], "loss", by_global)
    assert identity(net(), function)[0] != before

    def within(model: nn.Module, x: Tensor) -> Tensor:
        class Inner:
            scale = SCALE

        return loss(model, x) * Inner.scale

    inner = told(within)
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 7.0)
    assert told(within) != inner


class Shy:
    """An object that does not want to be looked at."""

    def __getattribute__(self, name: str) -> Any:
        raise ValueError(name)


def test_objects_that_cannot_be_looked_into() -> None:
    shy = Shy()
    deep: list[Any] = []
    for _ in range(3000):
        deep = [deep]

    def odd(model: nn.Module, x: Tensor) -> Tensor:
        return loss(model, x) if shy is not deep else x

    assert told(odd) == told(odd)


def test_another_loss_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    module, functions = sys.modules[__name__], (by_global, by_dict, by_args, by_helper)
    before = [told(function) for function in functions]
    monkeypatch.setattr(module, "SCALE", 2.0)
    monkeypatch.setitem(OPTIONS, "power", 4)
    monkeypatch.setattr(ARGS, "scale", 2.0)
    monkeypatch.setattr(module, "helper", lambda x: x.abs())
    for function, one in zip(functions, before):
        assert told(function) != one
    torch.manual_seed(0)
    pairs: list[tuple[Loss, Loss]] = [
        (lambda m, x: m(x).square().mean(1), lambda m, x: m(x).abs().mean(1)),
        (lambda m, x: m(x).mean(1) * 2, lambda m, x: m(x).mean(1) * 3),
        (Criterion(1.0), Criterion(2.0)),
        (teaching(nn.Linear(6, 6)), teaching(nn.Linear(6, 6))),
        (weighted(torch.ones(6)), weighted(torch.zeros(6))),
        (with_default, functools.partial(with_default, scale=1.0)),
        (functools.partial(with_default, scale=2.0), functools.partial(with_default, scale=1.0)),
    ]
    for first, second in pairs:
        assert told(first) != told(second)
        assert told(first) == told(first)


def test_another_loss_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.gradtrace"
    gt.influence(net(), loss, data(3), checkpoint=file)
    with pytest.raises(GradtraceError, match="the loss function"):
        gt.influence(net(), lambda m, x: m(x).abs().mean(1), data(), checkpoint=file)


def record(model: nn.Module, x: Tensor) -> Tensor:
    """Uses a global dict, and changes something else."""
    kept = []
    kept.append(x)
    return model(x).pow(OPTIONS["power"]).mean(1)


class Annealed:
    """A loss whose weight has a setter; counts its calls, by a method that runs."""

    def __init__(self, scale: float) -> None:
        self.scale, self.calls, self.past, self.started = scale, 0, list[float](), 0.0

    def set(self, scale: float) -> Annealed:
        self.scale = scale
        return self

    def note(self, value: Tensor) -> None:
        self.calls += 1
        self.past.append(value.sum().item())

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        found = model(x).mean(1) * self.scale
        self.note(found)
        return found


class Holder:
    def __init__(self, inner: Annealed) -> None:
        self.inner = inner

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        return self.inner(model, x)


class Table:
    OPTIONS: ClassVar = {"scale": 1.0}
    SIZES: ClassVar = [1, 2]
    WEIGHTS: ClassVar = torch.ones(6)
    act = staticmethod(torch.relu)
    reduce = functools.partial(torch.mean, dim=1)
    calls: ClassVar[list[int]] = []

    @classmethod
    def loss(cls, model: nn.Module, x: Tensor) -> Tensor:
        cls.calls.append(1)
        return model(x).mean(1) * cls.OPTIONS["scale"]


def using(thing: Any) -> Loss:
    return lambda model, x: (thing, loss(model, x))[1]


def decorated(decorator: Any, scale: float) -> Loss:
    @decorator
    def helper(x: float) -> float:
        return x * scale

    return lambda model, x: loss(model, x) * float(helper(3.0))


def normal(scale: float) -> torch.distributions.Distribution:
    kinds = torch.distributions
    base = kinds.Normal(torch.zeros(6), torch.ones(6))
    return kinds.TransformedDistribution(base, [kinds.AffineTransform(0.0, scale)])


DIFFERENT: dict[str, Callable[[int], Loss]] = {
    "a setter's attribute": lambda n: Annealed(1.0).set(float(n)),
    "given to a class with a setter": lambda n: Annealed(float(n)),
    "inside another object": lambda n: Holder(Annealed(1.0).set(float(n))).loss,
    "functools.cache": lambda n: decorated(functools.cache, n),
    "functools.singledispatch": lambda n: decorated(functools.singledispatch, n),
    "numpy.vectorize": lambda n: decorated(np.vectorize, n),
    "a distribution": lambda n: using(torch.distributions.Normal(0.0, float(n))),
    "a transformed distribution": lambda n: using(normal(float(n))),
    "a categorical distribution": lambda n: using(
        torch.distributions.Categorical(torch.arange(1.0, 3.0) ** n)
    ),
    "an enumeration": lambda n: using(Choice(n)),
    "a number of NumPy": lambda n: using(np.float32(n)),
    "a fraction": lambda n: using(Fraction(n)),
    "a path": lambda n: using(Path(str(n))),
    "a deque": lambda n: using(deque([n])),
    "a proxy": lambda n: using(MappingProxyType({"n": n})),
    "bytes": lambda n: using(bytearray([n])),
    "a getter": lambda n: using(itemgetter(n)),
    "an operator": lambda n: using((torch.ops.aten.relu, torch.ops.aten.tanh)[n - 1]),
    "a method": lambda n: using((Tensor.relu, Tensor.tanh)[n - 1]),
    "a ufunc": lambda n: using((np.sin, np.cos)[n - 1]),
    "a tensor's method": lambda n: using(torch.full((3,), n).add),
    "a set of tuples": lambda n: using({(1, n)}),
    "a long list": lambda n: using(list(range(n, 20_000 + n))),
    "torch.fx": lambda n: using(symbolic_trace((nn.Tanh(), nn.ReLU())[n - 1])),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_what_a_loss_refers_to_counts(what: str) -> None:
    first, same, other = (DIFFERENT[what](n) for n in (1, 1, 2))
    before = told(first)
    for x in data(2):
        first(net(), x)
    assert told(first) == before == told(same) != told(other)


def test_class_attributes_and_globals_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = told(Table.loss)
    Table.loss(net(), data()[0])
    assert told(Table.loss) == before  # of Table.calls, which it fills
    for name, value in {
        "OPTIONS": {"scale": 2.0},
        "SIZES": [1, 3],
        "WEIGHTS": torch.zeros(6),
        "act": staticmethod(torch.tanh),
        "reduce": functools.partial(torch.mean, dim=0),
    }.items():
        with monkeypatch.context() as patch:
            patch.setattr(Table, name, value)
            assert told(Table.loss) != before, name
    before = told(record)
    monkeypatch.setitem(OPTIONS, "power", 6)
    assert told(record) != before


class Tally:
    """What loss functions count in."""

    calls, total, scale = 0, torch.zeros(()), 1.0

    def __init__(self) -> None:
        self.seen, self.power = 0, 2.0

    @classmethod
    def note(cls) -> None:
        cls.calls += 1


class Fewer(Tally):
    pass


class Fresh:
    """A criterion that is made for each batch, and counts how often."""

    made = 0

    def __init__(self) -> None:
        Fresh.made += 1


class Inside(nn.Module):
    """A model that counts in an object of its own, and in its class."""

    runs = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.tally = nn.Linear(6, 6), Tally()

    def forward(self, x: Tensor) -> Tensor:
        self.tally.seen += 1
        Inside.runs += 1
        return self.layer(x)


TALLY, SPACE = Tally(), SimpleNamespace(seen=0)
ARRAY, SUM, RAW = np.zeros(2), torch.zeros(2), bytearray(2)


def _on_a_class() -> None:
    Tally.calls += 1


def _on_a_subclass() -> None:
    Fewer.calls += 1


def _a_tensor_of_a_class() -> None:
    Tally.total = Tally.total + 1


def _by_a_class_method() -> None:
    Tally.note()


def _by_name() -> None:
    setattr(Tally, "calls", Tally.calls + 1)  # noqa: B010


def _by_another_name() -> None:
    kind = Tally
    kind.calls += 1


def _on_an_object() -> None:
    TALLY.seen += 1
    SPACE.seen += 1


def _when_made() -> None:
    Fresh()


def _in_place() -> None:
    ARRAY[0] += 1
    SUM.add_(1)
    RAW[0] += 1


COUNTING = (
    *(_on_a_class, _on_a_subclass, _a_tensor_of_a_class, _by_a_class_method, _by_name),
    *(_by_another_name, _on_an_object, _when_made, _in_place),
)


def that(count: Callable[[], None]) -> Loss:
    """A loss that counts its calls."""

    def counts(model: nn.Module, x: Tensor) -> Tensor:
        count()
        return loss(model, x)

    return counts


@pytest.mark.parametrize("count", COUNTING, ids=lambda count: count.__name__)
def test_a_run_that_counts_its_calls_goes_on(count: Callable[[], None], tmp_path: Path) -> None:
    file, batches = tmp_path / "run.json", data()
    whole = gt.influence(net(), that(count), batches)
    gt.influence(net(), that(count), batches[:2], checkpoint=file)
    table = gt.influence(net(), that(count), batches, checkpoint=file)
    assert [row.count for row in table] == [row.count for row in whole]


def test_models_and_hooks_that_count_go_on() -> None:
    torch.manual_seed(0)
    model = Inside()
    model.layer.register_forward_hook(lambda *_: Tally.note())
    before = identity(model, loss)[0]
    loss(model, data()[0])
    assert identity(model, loss)[0] == before
    model.tally.power = 3.0
    assert identity(model, loss)[0].modules != before.modules


def test_what_is_not_assigned_counts_beside_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another class assigns to an attribute of that name."""

    def counts(model: nn.Module, x: Tensor) -> Tensor:
        Fewer.scale = TALLY.seen = len(x)
        return loss(model, x) * Tally.scale * TALLY.power * SUM[0] * ARRAY[0]

    before = told(counts)
    counts(net(), data()[0])
    assert told(counts) == before
    for owner, name in ((Tally, "scale"), (TALLY, "power")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, 7.0)
            assert told(counts) != before, name
    for held in (SUM, ARRAY):
        held += 1
        assert told(counts) != before
        held -= 1
    assert told(counts) == before


def test_a_counter_in_a_module_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_counter.py").write_text("calls = 0\nscale = 1.0")
    (tmp_path / "own_counting.py").write_text(
        "import own_counter\n"
        "def near(model, x):\n"
        "    own_counter.calls += 1\n"
        "    return model(x).mean(1) * own_counter.scale\n"
        "def late(model, x):\n"
        "    import own_counter\n"
        "    own_counter.calls += 1\n"
        "    return model(x).mean(1) * own_counter.scale\n"
    )
    functions: Any = importlib.import_module("own_counting")
    for function in (functions.near, functions.late):
        before = told(function)
        function(net(), data()[0])
        assert told(function) == before
        with monkeypatch.context() as patch:
            patch.setattr(functions.own_counter, "scale", 2.0)
            assert told(function) != before
    for name in ("own_counter", "own_counting"):
        monkeypatch.delitem(sys.modules, name)


def test_modules_of_a_package_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``package.settings.SCALE``, and modules that a function imports when it runs."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package/__init__.py").touch()
    (tmp_path / "own_package/settings.py").write_text("SCALE = 1.0")
    (tmp_path / "own_loss.py").write_text(
        "import own_package.settings\n"
        "def near(model, x): return model(x).mean(1) * own_package.settings.SCALE\n"
        "def late(model, x):\n"
        "    from own_package.late import scale\n"
        "    return model(x).mean(1) * scale(2)\n"
    )
    late = tmp_path / "own_package/late.py"
    late.write_text("from .deeper import SCALE\ndef scale(n): return n * SCALE")
    (tmp_path / "own_package/deeper.py").write_text("SCALE = 1.0")
    functions: Any = importlib.import_module("own_loss")
    before = told(functions.near), told(functions.late)
    functions.late(net(), data()[0])
    assert (told(functions.near), told(functions.late)) == before
    (tmp_path / "own_package/deeper.py").write_text("SCALE = 2.0")
    assert told(functions.late) != before[1]
    monkeypatch.setattr(functions.own_package.settings, "SCALE", 2.0)
    assert told(functions.near) != before[0]
    for name in ("own_loss", "own_package", "own_package.settings", "own_package.late"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "own_package.deeper")


# Data ---------------------------------------------------------------------------------------------


class Counts:
    """A loss that notes which samples it saw, and stops once before one of its calls."""

    def __init__(self, stop: int | None = None) -> None:
        self.seen, self.stop = Counter[int](), stop

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        x, n = batch
        if self.stop is not None and len(self.seen) >= self.stop:
            self.stop = None
            raise KeyboardInterrupt
        self.seen.update(n.tolist())
        return loss(model, x)


SAMPLES = TensorDataset(torch.cat(data(3)), torch.arange(12))


def resumed(file: Path, first: Any, second: Any) -> tuple[Influence, Counter[int]]:
    """The table of a run that is stopped after six samples and goes on with another loader."""
    counts = Counts(stop=6)
    assert gt.influence(net(), counts, first, checkpoint=file).interrupted
    return gt.influence(net(), counts, second, checkpoint=file), counts.seen


def seeded(seed: int, size: int = 2) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(SAMPLES, size, shuffle=True, generator=generator)


class Stream(IterableDataset[Any]):
    def __init__(self, order: list[int]) -> None:
        self.order = order

    def __iter__(self) -> Iterator[Any]:
        return iter([SAMPLES[n] for n in self.order])


SAME: dict[str, Callable[[bool], Any]] = {
    "in order": lambda again: DataLoader(SAMPLES, 2),
    "shuffled by a seed": lambda again: seeded(3),
    "a list": lambda again: list(DataLoader(SAMPLES, 2)),
    "a list in another order": lambda again: list(DataLoader(SAMPLES, 2))[:: -1 if again else 1],
    "single samples in any order": lambda again: seeded(int(again), size=1),
    "a generator": lambda again: (batch for batch in DataLoader(SAMPLES, 2)),
    "a stream": lambda again: DataLoader(Stream(list(range(12))), 2),
}


LATE = """
SCALE = 2.0
NAMES = ["a"]
COUNT = 0
if SCALE > 1:
    MODE = "fast"
else:
    MODE = "slow"

def helper(x, by=1):
    global COUNT
    COUNT += 1
    return x * SCALE * by

@staticmethod
def wrapped(x):
    return x
"""
"""A module that only the loss imports."""


@pytest.mark.parametrize("how", ["import", "from"])
def test_a_module_that_is_imported_in_the_loss_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    (tmp_path / "imported_late.py").write_text(LATE)
    monkeypatch.syspath_prepend(tmp_path)

    def whole(net: nn.Module, x: Tensor) -> Tensor:
        import imported_late as late  # type: ignore[import-not-found]

        return late.helper(net(x)).sum() * late.SCALE  # type: ignore[no-any-return]

    def parts(net: nn.Module, x: Tensor) -> Tensor:
        from imported_late import SCALE, helper

        return helper(net(x)).sum() * SCALE  # type: ignore[no-any-return]

    net, loss_fn = nn.Linear(2, 2), {"import": whole, "from": parts}[how]
    try:
        before = identity(net, loss_fn)
        loss_fn(net, torch.ones(1, 2))
        assert identity(net, loss_fn) == before  # whether it is loaded does not matter
        late = sys.modules["imported_late"]
        for name, value in {
            "SCALE": 3.0,
            "helper": lambda x, by=1: x,
            "EXTRA": 5,
        }.items():
            with monkeypatch.context() as patch:
                patch.setattr(late, name, value, raising=False)
                assert identity(net, loss_fn) != before, name
        assert identity(net, loss_fn) == before
    finally:
        sys.modules.pop("imported_late", None)


def doubled(x: Tensor, *_: object, **__: object) -> Tensor:
    return x * 2


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (F, "relu"),
        (torch, "relu"),
        (Tensor, "relu"),
        (nn.Linear, "forward"),
        (nn.Module, "half"),
        (statistics, "mean"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_functions_of_packages_that_were_exchanged_count(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    def loss_fn(net: nn.Module, x: Tensor) -> Tensor:
        return net(x).sum() * statistics.mean([1.0, 3.0])

    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    before = identity(net, loss_fn)
    monkeypatch.setattr(owner, name, doubled)
    assert identity(net, loss_fn) != before
    monkeypatch.undo()
    assert identity(net, loss_fn) == before


def test_functions_that_packages_make_are_their_own() -> None:
    """``dataclass`` makes some of text, which lies in no file."""
    kinds = [kind for kind in vars(nn).values() if isinstance(kind, type)]
    assert not any(exchanged(owner) for owner in (torch, F, Tensor))
    assert not any(exchanged(base) for kind in kinds for base in kind.__mro__[:-1])


@pytest.mark.parametrize("change", ["mask", "fill_value"])
def test_masked_arrays_count(change: str) -> None:
    array = np.ma.masked_array([1.0, 2.0, 3.0], mask=[0, 1, 0])

    def loss_fn(net: nn.Module, x: Tensor) -> Tensor:
        return net(x).sum() * float(array.filled().sum())

    net = nn.Linear(2, 2)
    before = identity(net, loss_fn)
    setattr(array, change, [1, 0, 0] if change == "mask" else 7.0)
    assert identity(net, loss_fn) != before


@pytest.mark.parametrize("kind", SAME)
def test_the_same_batches_are_counted_once(tmp_path: Path, kind: str) -> None:
    make, file = SAME[kind], tmp_path / "run.gradtrace"
    table, seen = resumed(file, make(False), make(True))
    assert seen == Counter(range(12))
    whole = gt.influence(net(), Counts(), make(False))
    assert (table.pairs, [r.count for r in table]) == (12, [r.count for r in whole])
    assert gt.influence(net(), Counts(), make(True), checkpoint=file) == table


OTHER: dict[str, Callable[[bool], Any]] = {
    "shuffled": lambda again: seeded(int(again)),
    "other samples per batch": lambda again: DataLoader(SAMPLES, 3 if again else 2),
    "fewer": lambda again: list(DataLoader(SAMPLES, 2))[: 2 if again else 6],
    "fewer, of a generator": lambda again: iter(list(DataLoader(SAMPLES, 2))[: 2 if again else 6]),
    "a stream in another order": lambda again: DataLoader(
        Stream(list(range(12))[:: -1 if again else 1]), 2
    ),
}


@pytest.mark.parametrize("kind", OTHER)
def test_other_batches_are_refused(tmp_path: Path, kind: str) -> None:
    make, file = OTHER[kind], tmp_path / "run.gradtrace"
    counts = Counts(stop=6)
    assert gt.influence(net(), counts, make(False), checkpoint=file).interrupted
    before, seen = file.read_bytes(), Counter(counts.seen)
    with pytest.raises(GradtraceError, match=r"shuffle=False.*manual_seed.*delete it") as error:
        gt.influence(net(), counts, make(True), checkpoint=file)
    assert "counts 3 batches" in str(error.value)
    assert file.read_bytes() == before and counts.seen == seen


class Augmented(Dataset[Any]):
    """Samples that differ each time; ``noise`` of one value is the same data."""

    def __init__(self, noise: float) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return len(SAMPLES)

    def __getitem__(self, n: int) -> Any:
        x, label = SAMPLES[n]
        return x + self.noise * random.random(), label


def test_other_data_under_the_same_indices_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.gradtrace"
    counts = Counts(stop=6)
    gt.influence(net(), counts, DataLoader(Augmented(0.0), 2), checkpoint=file)
    with pytest.raises(GradtraceError, match=r"batch 0 has the samples.*augmentation.*seed"):
        gt.influence(net(), counts, DataLoader(Augmented(1.0), 2), checkpoint=file)
    assert gt.influence(net(), counts, DataLoader(Augmented(0), 2), checkpoint=file).pairs == 12


def test_a_finished_journal_of_other_data_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.gradtrace"
    table = gt.influence(net(), loss, data(), checkpoint=file)
    with pytest.raises(GradtraceError, match="does not give 5 of them again"):
        gt.influence(net(), loss, data(seed=2), checkpoint=file)
    assert gt.influence(net(), loss, data(), checkpoint=file) == table
    more = gt.influence(net(), loss, data(7), checkpoint=file)
    assert more == gt.influence(net(), loss, data(7))


def test_equal_batches_count_as_often_as_they_come(tmp_path: Path) -> None:
    file, same = tmp_path / "run.gradtrace", torch.ones(4, 6)
    assert gt.influence(net(), loss, [same] * 2, checkpoint=file).pairs == 8
    assert gt.influence(net(), loss, [same] * 5, checkpoint=file).pairs == 20
    with pytest.raises(GradtraceError, match="does not give 2 of them"):
        gt.influence(net(), loss, [same] * 3, checkpoint=file)


# Digests ------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    x: Tensor
    y: int


@dataclass
class Record:
    x: Tensor
    name: str


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: object) -> None:
        self.x = x


class Selfish:
    def __init__(self, value: int) -> None:
        self.me, self.value = self, value


class Image:
    """As that of PIL: NumPy reads it, and its core cannot be pickled."""

    def __init__(self, value: int) -> None:
        self.core = (np.full((2, 3), value) for _ in range(1))
        self.pixels = lambda: np.full((2, 3), value)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {**self.pixels().__array_interface__, "data": self.pixels().tobytes()}


def changed(x: Tensor, at: int) -> Tensor:
    y = x.clone()
    y.view(-1)[at] = 1 if y.dtype is torch.bool else y.view(-1)[at] + 1
    return y


X = torch.zeros(70_001)
DIFFER: list[tuple[Any, Any]] = [
    *((X, changed(X, at)) for at in (0, 1, 3, 65_535, 65_536, 70_000)),
    (X, X.double()),
    (X, X.view(1, -1)),
    (X.bool(), changed(X.bool(), 70_000)),
    (X.to(torch.bfloat16), changed(X.to(torch.bfloat16), 69_999)),
    (X.to(torch.complex64), changed(X.to(torch.complex64), 7)),
    (torch.arange(9)[1:], torch.arange(9)[:-1]),
    (torch.eye(3).to_sparse(), (2 * torch.eye(3)).to_sparse()),
    ({"a": X}, {"b": X}),
    ({"a": [X, (X,)]}, {"a": [X, (changed(X, 9),)]}),
    ([1, 2], (1, 2)),
    ([1, 2], [2, 1]),
    (["1"], [1]),
    ([[1], [2, 3]], [[1, 2], [3]]),
    ({1, 2}, {1, 3}),
    (np.zeros(5), np.ones(5)),
    (np.array(["a", None]), np.array(["b", None])),
    (np.ma.masked_equal([1, 2], 1), np.ma.masked_equal([1, 2], 2)),
    (Image(1), Image(2)),
    ([Image(1)], [Image(2)]),
    (Pair(X, 1), Pair(X, 2)),
    (Record(X, "a"), Record(changed(X, 3), "a")),
    (Slotted(1), Slotted(2)),
    (Selfish(1), Selfish(2)),
    (range(3), range(4)),
    (None, 0),
]


@pytest.mark.parametrize("case", range(len(DIFFER)))
def test_digests_tell_things_apart(case: int) -> None:
    first, second = DIFFER[case]
    assert digests.digest(first) != digests.digest(second)
    assert digests.digest(first) == digests.digest(first)


def test_signs_of_two_elements_and_swaps_are_noticed() -> None:
    """Sums of products alone would miss flips of the highest bits, two by two."""
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    whole = digests.digest(x)
    for first, second in ((1, 3), (0, 2), (1, 999), (0, 1)):
        y = x.clone()
        y[first], y[second] = -y[first], -y[second]
        z = x.clone()
        z[first], z[second] = x[second], x[first]
        assert len({whole, digests.digest(y), digests.digest(z)}) == 3


def test_views_of_memory_do_not_matter() -> None:
    x = torch.arange(24.0).view(4, 6)
    for same in (x.t().contiguous().t(), torch.cat([torch.zeros(1, 6), x])[1:], x.expand(4, 6)):
        assert digests.digest(same) == digests.digest(x)
    byte = torch.arange(40, dtype=torch.uint8)
    assert digests.digest(byte[3:]) == digests.digest(byte[3:].clone())


def test_what_is_deprecated_is_not_asked_for_its_functions() -> None:
    """``torch.distributed.reduce_op`` warns at every attribute; here a warning is an error."""
    assert exchanged(torch.distributed) == {}
