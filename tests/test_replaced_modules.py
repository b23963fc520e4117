"""Modules that are replaced, wrapped or moved while a watch is open, and calls that pause."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

import gradtrace as gt
from gradtrace.pytorch import call_listeners, call_patches, module_calls, module_tree


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """``asyncio.run``, also where tests of the browser have left a loop running in this process."""
    outer = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        return asyncio.run(coroutine)
    finally:
        asyncio._set_running_loop(outer)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    torch.manual_seed(0)
    hooks = dict(nn_module._global_module_registration_hooks)
    yield
    assert not call_listeners.LISTENERS and not call_patches.PATCHES and not module_calls.EXCHANGES
    assert nn_module._global_module_registration_hooks == hooks and not module_tree._FOLLOWING


class Adapter(nn.Module):
    """As LoRA puts one around a layer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.down, self.up = inner, nn.Linear(4, 2), nn.Linear(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.up(self.down(x))


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)])
        self.out = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x).sum()


class Lazily(Net):
    """Makes a layer when it is first called."""

    def __init__(self) -> None:
        super().__init__()
        self.head: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.head is None:
            self.head = Adapter(nn.Linear(x.shape[1], 4))
        return super().forward(self.head.forward(x))


def renamed(model: Any) -> None:
    model.first, model.second = model.layers[0], model.layers[1]
    model.layers = nn.ModuleList([model.second, model.first])


def wrapped_twice(model: Any) -> None:
    wrapper = Adapter(model.a)
    model.a = wrapper
    wrapper.inner = Adapter(wrapper.inner)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda model: None,
    "replaced": lambda model: setattr(model, "a", nn.Linear(4, 4)),
    "wrapped": lambda model: setattr(model, "a", Adapter(model.a)),
    "wrapped twice": wrapped_twice,
    "wrapped in a list": lambda model: model.layers[1].__setitem__(0, Adapter(model.layers[1][0])),
    "item": lambda model: model.layers.__setitem__(2, nn.Linear(4, 4)),
    "inserted": lambda model: model.layers.insert(0, nn.Linear(4, 4)),
    "appended": lambda model: model.layers.append(nn.Linear(4, 4)),
    "added": lambda model: model.layers.add_module("3", Adapter(nn.Identity())),
    "removed": lambda model: model.layers.__delitem__(1),
    "renamed": renamed,
    "parametrized": lambda model: parametrize.register_parametrization(model.a, "weight", Halved()),
    "in its table": lambda model: model._modules.__setitem__("a", nn.Linear(4, 4)),
    "another class": lambda model: setattr(model.a, "__class__", Doubled),
}


def table(model: nn.Module, x: Tensor, change: Callable[[Any], Any]) -> Any:
    with gt.watch(model) as watch:
        change(model)
        loss = model(x)
    trace = watch.trace(loss)
    gradients = {name: gradient.clone() for name, gradient in trace.gradients.items()}
    rows = {row.name: row for row in trace.influence().rows}
    return rows, gradients, trace.notes, str(trace.influence())


@pytest.mark.parametrize("how", CHANGES)
def test_the_table_is_that_of_a_watch_opened_afterwards(how: str) -> None:
    model, x = Net(), torch.randn(3, 4)
    found = table(model, x, CHANGES[how])
    wanted = table(model, x, CHANGES["nothing"])
    assert found[0] == wanted[0] and found[2:] == wanted[2:]
    assert list(found[1]) == list(wanted[1])
    assert all(torch.equal(found[1][name], wanted[1][name]) for name in wanted[1])
    assert "No gradient" not in found[3]


def test_a_module_that_is_made_in_the_forward_pass() -> None:
    model, x = Lazily(), torch.randn(3, 4)
    found, wanted = (table(model, x, CHANGES["nothing"]) for _ in range(2))
    assert {"head", "head.inner", "head.down", "head.up"} <= found[0].keys()
    assert found[0] == wanted[0]
    assert {*found[1]} == {*wanted[1]} and "No gradient" not in found[3]


def test_what_is_parametrized_and_made_in_the_forward_pass() -> None:
    class Makes(Net):
        def forward(self, x: Tensor) -> Tensor:
            if not parametrize.is_parametrized(self.a):
                parametrize.register_parametrization(self.a, "weight", Halved())
            self.scale = nn.Parameter(torch.ones(4))
            return super().forward(x * self.scale)

    rows, gradients, notes, text = table(Makes(), torch.randn(3, 4), CHANGES["nothing"])
    assert {"a", "a.parametrizations.weight.0"} <= rows.keys() and not notes
    assert {"scale", "a.parametrizations.weight.original"} <= gradients.keys()
    assert "No gradient" not in text


def test_a_module_that_is_put_into_a_table_in_the_forward_pass_is_told() -> None:
    class ByHand(Net):
        def forward(self, x: Tensor) -> Tensor:
            self._modules["a"] = nn.Linear(4, 4)
            return super().forward(x)

    _, gradients, notes, text = table(ByHand(), torch.randn(3, 4), CHANGES["nothing"])
    assert "a.weight" in gradients and "No gradient" not in text
    assert [note.partition(":")[0] for note in notes] == ["a"]


class Swapping(nn.Module):
    """Its layers change places in the forward pass, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.how, self.deep = how, nn.ModuleList([nn.Sequential(nn.Linear(4, 4)), nn.Identity()])

    def swap(self) -> None:
        self.a, self.b = self.b, self.a

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "before":
            self.swap()
        x = self.a(x)
        if self.how == "both":
            x = self.b(x.tanh())
        if self.how in ("once", "both", "back"):
            self.swap()
        x = self.a(x.tanh())
        if self.how == "both":
            x = self.b(x.tanh())
        if self.how == "back":
            self.swap()
            x = self.b(x.tanh())
        if self.how == "wrapped":
            self.a = Adapter(self.a)
            x = self.a(x)
        if self.how == "deep":
            x = self.deep[0](x)
            self.deep[0], self.deep[1] = self.deep[1], self.deep[0]
            x = self.deep[1](x)
        return self.out(x).sum()


MOVED = {
    "before": "",
    "once": "b (called as a): ",
    "both": "a (called as b), b (called as a): ",
    "back": "b (called as a): ",
    "wrapped": "a.inner (called as a): ",
    "deep": "deep.1 (called as deep.0): ",
}


@pytest.mark.parametrize("how", MOVED)
def test_modules_that_change_places_between_two_calls_are_told(how: str) -> None:
    """Rows have the names of the calls, weights those that the model has at the end."""
    model, x = Swapping(how), torch.randn(3, 4)
    with gt.watch(model) as watch:
        loss = model(x)
    trace = watch.trace(loss)
    for name, leaf in model.named_parameters():
        (wanted,) = torch.autograd.grad(loss, leaf, retain_graph=True, allow_unused=True)
        if wanted is not None:
            torch.testing.assert_close(trace.gradients[name], wanted)
    assert [note.partition("modules changed")[0] for note in trace.notes] == [MOVED[how]] * (
        how != "before"
    )


def test_modules_that_changed_places_in_a_loss_before_are_not_told() -> None:
    model, x = Swapping("once"), torch.randn(3, 4)
    with gt.watch(model) as watch:
        first = model(x)
        model.how = "before"
        second = model(x)
    assert watch.trace(first).notes and not watch.trace(second).notes
    assert len(watch.trace(first + second).notes) == 1


def test_both_the_old_and_the_new_module_take_part() -> None:
    model, x = Net(), torch.randn(3, 4)
    with gt.watch(model) as watch:
        loss, old = model(x), model.a
        model.a = nn.Linear(4, 4)
        loss = loss + model(x) + old(x).sum()
    found = watch.trace(loss)
    assert found.influence()["a"].own == 40
    leaves = {"a.weight": model.a.weight, "a.weight@1": old.weight}
    for name, leaf in leaves.items():
        wanted = torch.autograd.grad(loss, leaf, retain_graph=True)[0]
        torch.testing.assert_close(found.gradients[name], wanted)


def test_a_tied_module_of_which_one_is_replaced() -> None:
    model, x = Net(), torch.randn(3, 4)
    model.tied = model.a
    with gt.watch(model) as watch:
        loss = model(x)
        model.a = nn.Linear(4, 4)
        loss = loss + model(x) + model.tied(x).sum()
    found = watch.trace(loss)
    for name in ("a", "tied"):
        leaf = model.get_submodule(name).weight
        wanted = torch.autograd.grad(loss, leaf, retain_graph=True)[0]
        torch.testing.assert_close(found.gradients[f"{name}.weight"], wanted)


def test_what_is_removed_after_the_forward_pass_keeps_its_name() -> None:
    model, x = Net(), torch.randn(3, 4)
    with gt.watch(model) as watch:
        loss = model(x)
    wanted = watch.trace(loss).influence()
    del model.layers[0]
    found = watch.trace(loss)
    assert {repr(row) for row in found.influence().rows} == {repr(row) for row in wanted.rows}
    assert "layers.2.0.weight" in found.gradients


@pytest.mark.parametrize("how", ["wrapped", "removed", "parametrized"])
def test_a_monitor_goes_on_with_the_changed_model(how: str) -> None:
    model, x = Net(), torch.randn(3, 4)
    with gt.Monitor(model, every=1) as monitor:
        monitor.step(model(x))
        CHANGES[how](model)
        monitor.step(model(x))
    rows, found = table(model, x, CHANGES["nothing"])[0], monitor.history.rows[1]
    assert not found.note and {f"share {name}" for name in rows} <= {*found._places}


def test_modules_elsewhere_are_not_listened_to() -> None:
    model, other = Net(), Net()
    with gt.watch(model) as watch:
        other.a = nn.Linear(4, 4)
        model.a = model.a
        loss = other(torch.randn(3, 4)) + model(torch.randn(3, 4))
    assert {place.partition(".")[0] for place in watch._calls} == {"", "a", "layers", "out"}
    assert watch._calls[""] == watch._calls["a"] == 1 and watch.trace(loss).pairs == 1


# Calls that pause --------------------------------------------------------------------------------


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.inner = nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 4)

    def step(self, x: Tensor) -> Tensor:
        return self.inner((x @ self.weight).tanh()).sin()


class Yields(Part):
    def forward(self, x: Tensor) -> Iterator[Tensor]:
        for _ in range(3):
            x = self.step(x)
            sent = yield x
            x = x if sent is None else x + sent
        return "ended"


class Awaits(Part):
    async def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            await asyncio.sleep(0)
            x = self.step(x)
        return x


class YieldsLater(Part):
    async def forward(self, x: Tensor) -> AsyncIterator[Tensor]:
        for _ in range(3):
            await asyncio.sleep(0)
            x = self.step(x)
            yield x


class Around(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first, self.part, self.out = nn.Linear(4, 4), part, nn.Linear(4, 1)


class Iterates(Around):
    def forward(self, x: Tensor) -> Tensor:
        return sum(self.out(y.cos()).sum() for y in self.part(self.first(x)))


class Sends(Around):
    def forward(self, x: Tensor) -> Tensor:
        running = self.part(self.first(x))
        loss = next(running)
        while True:
            try:
                loss = loss + running.send(loss.cos())
            except StopIteration as end:
                assert end.value == "ended"
                return self.out(loss).sum()


class Gathers(Around):
    async def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        one, two = await asyncio.gather(self.part(x), asyncio.create_task(self.part(x + 1)))
        return self.out(one + two.cos()).sum()


class IteratesLater(Around):
    async def forward(self, x: Tensor) -> Tensor:
        loss = torch.zeros(())
        async for y in self.part(self.first(x)):
            loss = loss + self.out(y.cos()).sum()
        return loss


PAUSING: dict[str, Callable[[], Any]] = {
    "generator": lambda: Iterates(Yields()),
    "sent to": lambda: Sends(Yields()),
    "coroutines": lambda: Gathers(Awaits()),
    "asynchronous generator": lambda: IteratesLater(YieldsLater()),
}


def result(found: Any) -> Tensor:
    async def awaited() -> Any:
        return await found

    return found if isinstance(found, Tensor) else run(awaited())


@pytest.mark.parametrize("how", PAUSING)
def test_operators_of_a_call_that_pauses_are_its_own(how: str) -> None:
    model, x = PAUSING[how](), torch.randn(2, 4)
    wanted = result(model(x))
    with gt.watch(model) as watch:
        loss = result(model(x))
    assert torch.equal(loss, wanted)
    made: dict[str, set[str]] = {}
    for each in watch.graph(loss):
        if each.leaf is None:
            made.setdefault(each.name, set()).add(each.module)
    assert made["TanhBackward0"] == made["SinBackward0"] == made["MmBackward0"] == {"part"}
    assert made["CosBackward0"] == {""} and made["AddmmBackward0"] == {"first", "part.inner", "out"}
    assert watch._calls["part"] == (2 if how == "coroutines" else 1)
    assert watch.trace(loss).influence()["part"].own == 36


@pytest.mark.parametrize("how", PAUSING)
def test_a_monitor_sees_a_call_that_pauses(how: str, recwarn: Any) -> None:
    model, x = PAUSING[how](), torch.randn(2, 4)
    with gt.Monitor(model, every=1) as monitor:
        for _ in range(2):
            monitor.step(result(model(x)))
    assert "share part" in {each.name for each in monitor.history.columns}
    assert not recwarn.list


def test_a_generator_that_is_closed_or_thrown_into() -> None:
    class Careful(Part):
        def forward(self, x: Tensor) -> Iterator[Tensor]:
            try:
                yield x
                yield x + 1
            except ValueError:
                yield self.step(x)
            finally:
                seen.append(len(call_listeners.STACK.calls))

    seen: list[int] = []
    model, x = Careful(), torch.randn(2, 4)
    with gt.watch(model) as watch:
        closed, thrown = model(x), model(x)
        next(closed)
        closed.close()
        next(thrown)
        loss = thrown.throw(ValueError("now")).sum()
        with pytest.raises(StopIteration):
            next(thrown)
        given = iter([x])
        assert nn.Identity()(given) is given
    assert seen == [1, 1] and closed.__name__ == "forward"
    found = {each.name: each.module for each in watch.graph(loss)}
    assert found["SinBackward0"] == "" and found["AddmmBackward0"] == "inner"


def test_a_generator_outlives_its_watch() -> None:
    model, x = Yields(), torch.randn(2, 4)
    with gt.watch(model) as watch:
        running = model(x)
        first = next(running)
    with torch.no_grad():
        second = next(running)
    assert torch.equal(second, model.step(first)) and watch._calls == {"": 1, "inner": 1}


def test_ablate_refuses_a_generator_by_name() -> None:
    model, x = Iterates(Yields()), torch.randn(2, 4)
    refused = pytest.raises(gt.errors.GradtraceError, match="'part' returned a generator")
    with refused, gt.ablate(model, "part"):
        model(x)


def test_a_watch_takes_no_number_of_hooks() -> None:
    """By these numbers other threads see that their nodes may have hooks, and ask each."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    before = RemovableHandle.next_id
    with gt.watch(model):
        model(torch.ones(1, 2))
    assert RemovableHandle.next_id == before
