"""What runs in addition to training leaves nothing in it: checkpoints, hooks, buffers, counters."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import programs
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook, save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import gradtrace as gt

SIZE = 4


class Part(nn.Module):
    """What runs again: a linear layer beside a state that every call moves on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.setup()

    def setup(self) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * self.moved(x.detach()))

    def moved(self, x: Tensor) -> Tensor | float:
        return 1.0


class LargeBuffer(Part):
    def setup(self) -> None:
        self.register_buffer("codes", torch.ones(70_000))

    def moved(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.codes.index_add_(0, torch.tensor([69_999]), x.mean().reshape(1))
        return self.codes[-1]


class NewBuffer(Part):
    def setup(self) -> None:
        self.register_buffer("mean", torch.ones(()))

    def moved(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + x.mean()
        return self.mean


class OtherMemory(Part):
    def setup(self) -> None:
        self.register_buffer("mean", torch.ones(()))

    def moved(self, x: Tensor) -> Tensor:
        self.mean.data = self.mean + x.mean()
        return self.mean.clone()


class PlainTensor(Part):
    def setup(self) -> None:
        self.mean = torch.ones(())

    def moved(self, x: Tensor) -> Tensor:
        self.mean.data.add_(x.mean())
        return self.mean.clone()


class Views(Part):
    def setup(self) -> None:
        self.register_buffer("table", torch.ones(3, SIZE))

    def moved(self, x: Tensor) -> Tensor:
        self.table[1] += x.mean(0)
        self.table[:, 2] *= 1.5
        self.table.view(-1)[3:7].mul_(0.9)
        return self.table.sum(0)


class Counter(Part):
    def setup(self) -> None:
        self.count = 0

    def moved(self, x: Tensor) -> float:
        self.count += 1
        return 1 / self.count


class Listed(Part):
    def setup(self) -> None:
        self.seen: list[float] = []

    def moved(self, x: Tensor) -> float:
        self.seen.append(float(x.mean()))
        return 1 + sum(self.seen)


class Nested(Part):
    """State in an object of its own, and in a list inside a dictionary."""

    def setup(self) -> None:
        self.state = SimpleNamespace(count=0)
        self.table: dict[str, list[float]] = {"seen": [0.0]}

    def moved(self, x: Tensor) -> float:
        self.state.count += 1
        self.table["seen"][0] += float(x.mean())
        return 1 / self.state.count + self.table["seen"][0]


COUNTED = [0.0]
TOTAL = 0.0


class Around(Part):
    """State in variables around the code: of a closure, of the module, and attributes of leaves."""

    def setup(self) -> None:
        self.linear.weight.calls = 0  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.counting(), super().forward(x), use_reentrant=False)
        return y

    def counting(self) -> Callable[[Tensor], Tensor]:
        own, weight = 0.0, self.linear.weight

        def run(x: Tensor) -> Tensor:
            nonlocal own
            global TOTAL
            own += 0.1
            TOTAL += 0.1
            COUNTED[0] += 0.1
            weight.calls += 1  # type: ignore[attr-defined]
            scale = own + TOTAL + COUNTED[0] + weight.calls  # type: ignore[attr-defined]
            return torch.tanh(x * scale)

        return run


class Unregistered(Part):
    def setup(self) -> None:
        self.hidden = [nn.BatchNorm1d(SIZE)]

    def moved(self, x: Tensor) -> Tensor:
        self.hidden[0](x)
        mean = self.hidden[0].running_mean
        assert mean is not None
        return mean.clone()


class WrittenParameter(Part):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.mul_(0.99)
        return super().forward(x)


class Normed(Part):
    def setup(self) -> None:
        self.norm = nn.BatchNorm1d(SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.linear(x)))


class Spectral(Part):
    def setup(self) -> None:
        nn.utils.parametrizations.spectral_norm(self.linear)


class Drawn(Part):
    def moved(self, x: Tensor) -> float:
        return 1 + random.random() * 1e-3 * float(torch.rand(()))


@dataclass(slots=True)
class Slots:
    count: int = 0


class OnTheClass(Part):
    """State in attributes of its class, in an object with slots, in bytes."""

    count = 0
    listed: ClassVar[list[int]] = []

    def setup(self) -> None:
        type(self).count = 0
        self.listed.clear()
        self.slots, self.bytes = Slots(), bytearray(1)

    def moved(self, x: Tensor) -> float:
        type(self).count += 1
        self.listed.append(1)
        self.slots.count += 1
        self.bytes[0] += 1
        return 1 / self.count + 1 / len(self.listed) + 1 / self.slots.count + 1 / self.bytes[0]


class ForwardHooks(Part):
    """State of hooks that run in the forward pass: a variable around one, an object, a method."""

    def setup(self) -> None:
        seen = self.seen = [1.0]
        self.counting = self.linear.register_forward_hook(Counting())

        def scaled(_: Any, args: Any) -> Any:
            seen.append(len(seen) * 0.1)
            return (args[0] * seen[-1],)

        self.linear.register_forward_pre_hook(scaled)


class Counting:
    calls = 0

    def __call__(self, _: nn.Module, args: Any, out: Tensor) -> Tensor:
        self.calls += 1
        return out * self.calls


class MakesParts(Part):
    """Parts that are made when it is first called, and exchanged."""

    def moved(self, x: Tensor) -> float:
        if "other" not in self._modules:
            self.other, self.count = nn.Identity(), 0
        self.linear.add_module("twin", self.other)
        self.other, self.count = nn.Identity(), self.count + 1
        return 1 / self.count


class Generators(Part):
    """Random generators and an array of its own."""

    def setup(self) -> None:
        self.seen = np.zeros(2)
        self.drawn = {"all": [np.random.default_rng(0), np.random.RandomState(0)]}
        self.python, self.torch = random.Random(0), [torch.Generator().manual_seed(0)]

    def moved(self, x: Tensor) -> float:
        self.seen[1] += 1
        drawn = [each.random() for each in self.drawn["all"]] + [self.python.random()]
        drawn.append(torch.rand((), generator=self.torch[0]).item())
        return float(self.seen.sum()) + sum(drawn)


class Own(Part):
    """A function of the user's whose backward moves a buffer."""

    def setup(self) -> None:
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(Moving.apply(self.linear(x), self))


class Moving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, part: Own) -> Tensor:
        ctx.part = part
        return x * part.scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.part.scale.add_(0.5)
        return grad * 1.5, None


PARTS = [
    *(LargeBuffer, NewBuffer, OtherMemory, PlainTensor, Views, Counter, Listed, Nested),
    *(Around, Unregistered, WrittenParameter, Normed, Spectral, Drawn, Generators, OnTheClass),
    *(MakesParts, ForwardHooks, Own),
]


def save_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = functools.partial(create_selective_checkpoint_contexts, save_products)


@contextmanager
def once() -> Iterator[None]:
    yield


WAYS: dict[str, Callable[..., Tensor]] = {
    "plain": lambda part, x: checkpoint(part, x, use_reentrant=False),
    "undrawn": lambda part, x: checkpoint(
        part, x, use_reentrant=False, preserve_rng_state=False, determinism_check="none"
    ),
    "selective": lambda part, x: checkpoint(part, x, use_reentrant=False, context_fn=SELECTIVE),
    "nested": lambda part, x: checkpoint(WAYS["plain"], part, x, use_reentrant=False),
    "context": lambda part, x: checkpoint(
        part, x, use_reentrant=False, context_fn=lambda: (once(), once())
    ),
    "not checkpointed": lambda part, x: part(x),
}


class Net(nn.Module):
    def __init__(self, part: type[Part], way: str) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(SIZE, SIZE), part(), nn.Linear(SIZE, 1)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(WAYS[self.way](self.part, self.first(x)))
        return out


def state_of(model: nn.Module) -> list[Any]:
    """All that a model is: tensors, and plain attributes."""
    found: list[Any] = [(k, v.detach().clone()) for k, v in model.state_dict().items()]
    for name, module in model.named_modules():
        for key, value in module.__dict__.items():
            if isinstance(value, (int, float, Tensor)) or key in ("seen", "hidden"):
                some = value[0].state_dict() if key == "hidden" else value
                found.append((f"{name}.{key}", copy.deepcopy(some)))
        if isinstance(module, Generators):
            found.append(("next", copy.deepcopy(module).moved(torch.ones(2))))
        if isinstance(module, OnTheClass):
            found.append(("class", [module.count, sum(module.listed), module.slots.count]))
        found.append((f"{name} parts", [*map(str, module._modules)]))
    return found


def draws() -> list[Any]:
    """The states of the random generators, but for NumPy's, which nothing here draws from."""
    return [("torch", torch.get_rng_state()), ("random", torch.tensor(random.getstate()[1]))]


def assert_same(found: list[Any], wanted: list[Any]) -> None:
    assert [name for name, _ in found] == [name for name, _ in wanted]
    for (name, x), (_, y) in zip(found, wanted):
        if name.endswith(" parts"):
            assert x == y
            continue
        torch.testing.assert_close(x, y, rtol=0, atol=0, msg=name)


def trained(make: Callable[[], nn.Module], monitored: bool, steps: int = 3) -> list[Any]:
    global TOTAL
    torch.manual_seed(0)
    random.seed(0)
    COUNTED[0] = TOTAL = Tallies.calls = 0.0
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = gt.Monitor(model, every=1, budget=None, view=False) if monitored else nullcontext()
    with monitor:
        for _ in range(steps):
            loss = model(torch.randn(5, SIZE)).square().mean()
            if isinstance(monitor, gt.Monitor):
                monitor.step(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    if isinstance(monitor, gt.Monitor):
        assert len(monitor.history.influences) == steps
    return [*state_of(model), ("draws", torch.rand(())), ("random", random.random())]


@pytest.mark.parametrize("way", [way for way in WAYS if way != "selective"])
@pytest.mark.parametrize("part", PARTS)
def test_a_monitor_leaves_what_runs_again(part: type[Part], way: str) -> None:
    make = functools.partial(Net, part, way)
    assert_same(trained(make, True), trained(make, False))


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("context", [nullcontext, save_on_cpu])
@pytest.mark.parametrize("way", ["plain", "selective", "nested"])
def test_a_monitor_leaves_every_kind_of_checkpoint(way: str, context: Any, early: bool) -> None:
    class Inside(Net):
        def forward(self, x: Tensor) -> Tensor:
            with context(), set_checkpoint_early_stop(early):
                return super().forward(x)

    make = functools.partial(Inside, Part, way)
    assert_same(trained(make, True), trained(make, False))


@pytest.mark.parametrize("part", [Part, Normed])
def test_selective_checkpointing_is_traced_and_left_for_backward(part: type[Part]) -> None:
    torch.manual_seed(0)
    x, model = torch.randn(5, SIZE), Net(part, "selective")
    other = copy.deepcopy(model)
    loss = model(x).square().mean()
    for _ in range(2):
        traced = gt.trace(loss, names=dict(model.named_parameters()))
        traced.influence()
    own = gt.backward(loss, names=dict(model.named_parameters()))
    loss.backward()
    other(x).square().mean().backward()
    for name, parameter in other.named_parameters():
        want = parameter.grad
        torch.testing.assert_close(model.get_parameter(name).grad, want, rtol=0, atol=0)
        torch.testing.assert_close(traced.gradients[name], want)
        torch.testing.assert_close(own[name], want)


class Taking(saved_tensors_hooks):
    """Saved tensors are packed into a table, and taken out of it when they are unpacked."""

    def __init__(self) -> None:
        super().__init__(self.pack, self.unpack)
        self.table: dict[int, Tensor] = {}
        self.packed, self.unpacked = 0, 0

    def pack(self, x: Tensor) -> int:
        self.packed += 1
        self.table[self.packed] = x
        return self.packed

    def unpack(self, number: int) -> Tensor:
        self.unpacked += 1
        x = self.table.pop(number)
        return x * (1 + 0.01 * self.unpacked) if x.is_floating_point() else x


@pytest.mark.parametrize("way", ["plain", "not checkpointed"])
def test_saved_tensors_that_can_be_unpacked_once(way: str) -> None:
    hooks: list[Taking] = []

    class Taken(Net):
        def forward(self, x: Tensor) -> Tensor:
            with hooks[-1]:
                return super().forward(x)

    def make() -> nn.Module:
        hooks.append(Taking())
        return Taken(Part, way)

    enter = saved_tensors_hooks.__enter__
    assert_same(trained(make, True), trained(make, False))
    assert saved_tensors_hooks.__enter__ is enter
    model = make()
    with gt.watch(model) as watch:
        loss = model(torch.ones(2, SIZE)).square().mean()
    found = watch.backward(loss), watch.trace(loss).gradients
    loss.backward()
    for name, parameter in model.named_parameters():
        for gradients in found:
            torch.testing.assert_close(gradients[name], parameter.grad)
    assert not any(each.table for each in hooks)  # each was taken


# Measuring ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["plain", "not checkpointed"])
@pytest.mark.parametrize("part", PARTS)
def test_influence_leaves_the_model(part: type[Part], way: str) -> None:
    torch.manual_seed(0)
    model = Net(part, way).train()
    batches = [torch.randn(5, SIZE) + 3 for _ in range(2)]
    before = [*state_of(model), *draws()]
    shuffled = torch.utils.data.DataLoader(batches, batch_size=None, shuffle=True)  # type: ignore[arg-type]
    gt.influence(model, lambda model, x: model(x).square().mean(1), shuffled)
    assert_same([*state_of(model), *draws()], before)
    loss = model(batches[0]).square().mean()
    loss.backward()  # versions are what they were


@pytest.mark.parametrize("measured", [gt.influence, gt.decompose])
def test_a_data_set_leaves_statistics_of_batch_norms(measured: Callable[..., object]) -> None:
    """Those of a model in training mode: they went to the mean of the batches."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).train()
    before = copy.deepcopy(model.state_dict())
    measured(model, lambda model, x: model(x).square().mean(), [torch.randn(8, 4) + 3] * 3)
    assert model.training and model[1].training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_what_fails_leaves_the_model_too() -> None:
    model = nn.Sequential(nn.BatchNorm1d(SIZE), nn.Linear(SIZE, 1)).train()
    before = state_of(model)

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        model(x)
        raise KeyError("no loss")

    with pytest.raises(KeyError, match="no loss"):
        gt.influence(model, losses, [torch.randn(5, SIZE)])
    assert_same(state_of(model), before)


# Hooks --------------------------------------------------------------------------------------------


class Hooked(nn.Module):
    """Scales its gradients by how often a hook has run."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, 1)
        self.kind, self.calls = kind, [0]
        scaled = self.scaled

        if kind == "module":
            self.first.register_full_backward_hook(
                lambda module, before, after: tuple(scaled(g) for g in before)
            )
        elif kind == "module, before":
            self.last.register_full_backward_pre_hook(lambda module, g: (scaled(g[0]),))
        elif kind == "leaf":
            self.first.weight.register_hook(scaled)
        elif kind == "accumulated":
            self.first.weight.register_post_accumulate_grad_hook(
                lambda p: setattr(p, "grad", scaled(p.grad))
            )

    def scaled(self, grad: Tensor) -> Tensor:
        self.calls.append(self.calls[-1] + 1)
        return grad * (1 + self.calls[-1] / 10)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind in ("module", "module, before"):
            x = x.requires_grad_()
        hidden = torch.tanh(self.first(x))
        node: Any = hidden.grad_fn
        if self.kind == "tensor":
            hidden.register_hook(self.scaled)
        elif self.kind == "node":
            node.register_hook(lambda given, taken: (self.scaled(given[0]),))
        elif self.kind == "node, before":
            node.register_prehook(lambda given: (self.scaled(given[0]),))
        elif self.kind in ("any", "all"):
            tensors, mode = (hidden, self.last.weight, self.first.bias), self.kind
            register_multi_grad_hook(
                tensors,
                lambda grads: self.calls.append(self.calls[-1] + 1),
                mode=mode,  # type: ignore[arg-type]
            )
            return self.last(hidden) * (1 + self.calls[-1])  # type: ignore[no-any-return]
        return self.last(hidden)  # type: ignore[no-any-return]


KINDS = [
    *("tensor", "node", "node, before", "module", "module, before", "leaf", "accumulated"),
    *("any", "all"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_monitor_runs_no_hooks(kind: str) -> None:
    make = functools.partial(Hooked, kind)
    with_one, without = trained(make, True), trained(make, False)
    assert_same(with_one, without)


@pytest.mark.parametrize("kind", KINDS)
def test_a_monitor_says_that_there_are_hooks(kind: str) -> None:
    model = Hooked(kind)
    with gt.Monitor(model, every=1, budget=None, view=False) as monitor:
        loss = model(torch.randn(5, SIZE)).square().mean()
        record = monitor.step(loss)
    assert model.calls == [0]
    assert record is not None
    said = any("hooks" in note for note in record.notes)
    assert said is (kind != "accumulated")  # that one sees .grad, which a trace does not write


def test_a_monitor_says_nothing_where_there_are_no_hooks() -> None:
    model = Net(Part, "plain")
    with gt.Monitor(model, every=1, budget=None, view=False) as monitor:
        record = monitor.step(model(torch.randn(5, SIZE)).square().mean())
    assert record is not None
    assert record.notes == ()


@pytest.mark.parametrize("look", [gt.trace, gt.backward, programs.program])
@pytest.mark.parametrize("mode", ["any", "all"])
def test_a_hook_on_several_tensors_runs_once_a_pass(mode: str, look: Any) -> None:
    first, last = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, 1)
    hidden = first(torch.randn(5, SIZE))
    loss = last(hidden.tanh()).square().mean()
    unused = torch.ones(3, requires_grad=True).exp()
    got: list[Any] = []
    tensors = (hidden, first.weight, unused, last.bias)
    register_multi_grad_hook(tensors, got.append, mode=mode)  # type: ignore[arg-type]
    loss.backward(retain_graph=True)
    (want,) = got
    got.clear()
    look(loss)
    (found,) = got
    if mode == "all":
        for x, y in zip(found, want):
            torch.testing.assert_close(x, y)


# Functions whose backward is written for one call ------------------------------------------------


class Counts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, _: Any) -> Tensor:
        ctx.calls = 0
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.calls += 1
        return grad * ctx.calls, None


class Drops(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, _: Any) -> Tensor:
        ctx.x, ctx.more = x.detach(), x.detach()
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, ctx.x = ctx.x, None
        del ctx.more
        return grad * (1 - x.tanh() ** 2), None


class Pops(torch.autograd.Function):
    """Takes from a list that several functions share, so that it may be put back at the end only"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stack: Any) -> Tensor:
        ctx.stack = stack
        stack[0].append(x.detach())
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * (1 - ctx.stack[0].pop().tanh() ** 2), None


class Writes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, _: Any) -> Tensor:
        ctx.state = SimpleNamespace(y=x.detach().sigmoid(), calls=0)
        return ctx.state.y.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        state = ctx.state
        state.calls += 1
        return grad.mul_(state.y.mul_(1 - state.y)) * state.calls, None


class Tallies(torch.autograd.Function):
    """Counts on its class, on a leaf that it is given, and in variables around it."""

    calls = 0.0

    @staticmethod
    def forward(ctx: Any, x: Tensor, _: Any) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        global TOTAL
        TOTAL += 0.1
        COUNTED[0] += 0.1
        Tallies.calls += 0.1
        return grad * (1 + Tallies.calls + TOTAL + COUNTED[0]), None


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


@pytest.mark.parametrize("function", [Counts, Drops, Pops, Writes, Tallies])
def test_functions_are_left_for_backward(function: Any) -> None:
    """Whatever gradtrace asks of a graph, ``loss.backward()`` afterwards is as without it."""
    torch.manual_seed(0)
    begin = Tallies.calls, TOTAL, COUNTED[0]
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE))
    x = torch.randn(3, SIZE)

    def loss_of() -> Tensor:
        stack: list[list[Tensor]] = [[]]
        y = model[0](x)
        y = model[1](function.apply(y, stack)) + y
        return function.apply(y, stack).square().mean()

    loss_of().backward()
    want = gradients_of(model)
    Tallies.calls, globals()["TOTAL"], COUNTED[0] = begin
    with gt.watch(model) as watch:
        loss = loss_of()
    traced = watch.trace(loss)
    traced.influence()
    watch.backward(loss, gt.semirings.MAX)
    for found in (traced.gradients, watch.backward(loss)):
        for a, b in zip(found.values(), want):
            torch.testing.assert_close(a, b)
    model.zero_grad()
    loss.backward()
    assert all(map(torch.equal, gradients_of(model), want))


class Recomputes(torch.autograd.Function):
    """A reentrant checkpoint of the user's own: its backward runs one that adds to ``.grad``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x).detach()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.layer(x).backward(grad)
        return x.grad, None


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, 1)

    def forward(self, x: Tensor) -> Tensor:
        return Recomputes.apply(self.first(x), self.last)  # type: ignore[no-any-return]


def test_a_pass_inside_a_pass_leaves_grad() -> None:
    assert_same(trained(Recomputed, True), trained(Recomputed, False))
    model = Recomputed()
    loss = model(torch.ones(2, SIZE)).square().mean()
    for before in (None, torch.ones(1)):
        bias = model.last.bias
        bias.grad = before
        gt.trace(loss).influence()
        gt.backward(loss)
        assert bias.grad is before
        assert before is None or before.tolist() == [1.0]
