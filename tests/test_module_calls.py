"""Whichever way a module is called, its operators are its own, and nothing is left on it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import inspect
import io
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import programs
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import gradtrace as gt
from gradtrace.cli.discovery import Discovery
from gradtrace.pytorch import call_listeners, call_patches, module_calls


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Any:
    torch.manual_seed(0)
    kinds = [nn.Module, nn.Linear, nn.LSTM, Cell, Twice, Inherits, Net]
    before = [dict(vars(kind)) for kind in kinds]
    yield
    for kind, attributes in zip(kinds, before):
        for name in ("__init__", "__call__", "_call_impl", "forward"):
            assert vars(kind).get(name) is attributes.get(name), (kind, name)
    assert not call_listeners.LISTENERS and not call_patches.PATCHES
    assert not call_listeners.FOR_ALL
    assert "lstm" not in vars(torch._VF)


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        """What a cell does."""
        return (x @ self.weight).sin() * scale


class Twice(Cell):
    def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
        return super().forward(x, scale) + Cell.forward(self, x)


class Inherits(Cell):
    pass


class Calls(Cell):
    """Has a ``__call__`` of its own, with operators in it."""

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x.tan()).exp()


class Skips(Cell):
    def __call__(self, x: Tensor) -> Tensor:
        return self.forward(x)


class Property(Cell):
    @property
    def forward(self) -> Any:  # type: ignore[override]
        return lambda x: (x @ self.weight).sin()


class Decorated(Cell):
    forward = functools.partialmethod(Cell.forward, scale=2.0)  # type: ignore[assignment]


class Slots(Cell):
    __slots__ = ("kept",)


@dataclasses.dataclass(unsafe_hash=True)
class Equal(nn.Module):
    """Equal to any other of its kind."""

    size: int = 3

    def __post_init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).sin()


def bound_to_the_instance(cell: Cell) -> Cell:
    old = cell.forward
    cell.forward = lambda x: old(x)  # type: ignore[method-assign]
    return cell


def hooked(cell: Cell) -> Cell:
    cell.register_forward_pre_hook(lambda m, given: (given[0].tan(),))
    cell.register_forward_hook(lambda m, given, out: out.exp())
    return cell


class Net(nn.Module):
    def __init__(self, part: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.part = part
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.part, self.first(x)).cos()


WAYS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "called": lambda part, x: part(x),
    "forward": lambda part, x: part.forward(x),
    "unbound": lambda part, x: type(part).forward(part, x),
    "implementation": lambda part, x: part._call_impl(x),
    "dunder": lambda part, x: part.__call__(x),
    "functional": lambda part, x: functional_call(part, dict(part.named_parameters()), (x,)),
    "partial": lambda part, x: functools.partial(part.forward)(x),
    "checkpoint": lambda part, x: checkpoint(part.forward, x, use_reentrant=False),
    "shallow copy": lambda part, x: copy.copy(part)(x),
}
PARTS: dict[str, Callable[[], nn.Module]] = {
    "plain": Cell,
    "super": Twice,
    "inherited": Inherits,
    "own call": Calls,
    "no call": Skips,
    "instance": lambda: bound_to_the_instance(Cell()),
    "hooks": lambda: hooked(Cell()),
    "property": Property,
    "decorated": Decorated,
    "slots": Slots,
    "dataclass": Equal,
}


def made_in(watch: Any, loss: Tensor) -> dict[str, set[tuple[str, int]]]:
    found: dict[str, set[tuple[str, int]]] = {}
    for o in watch.graph(loss):
        if o.leaf is None:
            found.setdefault(o.name, set()).add((o.module, o.call))
    return found


@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize("way", WAYS)
def test_operators_belong_to_the_module(way: str, kind: str) -> None:
    model = Net(PARTS[kind](), WAYS[way])
    if way == "unbound" and kind in ("instance", "property", "decorated"):
        pytest.skip("the class has another forward, or none")
    wanted = model(torch.ones(2, 3))
    attributes = [dict(vars(module)) for module in model.modules()]
    with gt.watch(model) as watch:
        assert [dict(vars(module)) for module in model.modules()] == attributes
        out = model(torch.ones(2, 3))
    loss = out.sum()
    assert torch.equal(out, wanted)
    found = made_in(watch, loss)
    assert found["SinBackward0"] == {("part", 0)}
    assert found["CosBackward0"] == {("", 0)} and found["AddmmBackward0"] == {("first", 0)}
    for name in ("TanBackward0", "ExpBackward0"):
        assert found.get(name, {("part", 0)}) == {("part", 0)}
    assert {
        b.place.module for b in programs.of(watch)(loss).blocks if b.operator == "SinBackward0"
    } == {"part"}


@pytest.mark.parametrize("how", ["watch", "discovery", "influence"])
def test_a_direct_call_gives_the_same_table(how: str) -> None:
    def table(direct: bool) -> Any:
        torch.manual_seed(0)
        model = Net(Cell(), WAYS["forward" if direct else "called"])
        x = torch.randn(4, 3)
        if how == "influence":
            return gt.influence(model, lambda m, x: m.forward(x).sum(), [x])
        eye = gt.watch(model) if how == "watch" else Discovery()
        with eye as watch:
            loss = (model.forward(x) if direct else model(x)).sum()
        if isinstance(watch, Discovery):
            watch.resolve_names(loss)
        return watch.trace(loss).influence()

    found = table(True)
    assert found == table(False) and found.shares["part"] is not None


def test_discovery_sees_classes_that_are_made_later() -> None:
    with Discovery() as found:

        class Late(Cell):
            def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
                return super().forward(x).tan()

        model = Late()
        loss = model.forward(torch.ones(1, 3)).sum()
    found.resolve_names(loss, nn.ModuleDict({"late": model}))
    assert made_in(found, loss)["TanBackward0"] == {("late", 0)}


def test_a_forward_that_was_bound_before() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Cell(), Cell()
            self.run = self.a.forward

        def forward(self, x: Tensor) -> Tensor:
            return self.run(self.b(x))

    model = Keeps()
    kept = vars(model)["run"]
    first, second = gt.watch(model), gt.watch(model)
    with first:
        second.__enter__()
        twin = pickle.loads(pickle.dumps(nn.ModuleList([model.a, model.b])))
        copied = copy.deepcopy(model)
    loss = model(torch.ones(1, 3)).sum()
    second.__exit__(None, None, None)
    assert made_in(second, loss)["SinBackward0"] == {("a", 0), ("b", 0)}
    assert vars(model)["run"] is kept
    assert copied.run.__self__ is copied.a and type(copied.run) is type(kept) and len(twin) == 2


KEPT: dict[str, Callable[[nn.Module], Any]] = {
    "list": lambda part: [part.forward],
    "dict": lambda part: {"deep": [{"er": part.forward}]},
    "tuple": lambda part: (torch.sin, (part.forward, 3)),
    "partial": lambda part: [functools.partial(part.forward, scale=1.0)],
    "the module's own": lambda part: setattr(part, "run", part.forward) or part,
    "by its own forward": lambda part: _running_itself(part),
}


def _running_itself(part: Any) -> Any:
    part.old = part.forward
    part.forward = functools.partial(lambda part, x: part.old(x), part)
    return part


def _kept(found: Any) -> Any:
    while not callable(found):
        found = next(iter(found.values())) if isinstance(found, dict) else found[-1 % len(found)]
        found = found[0] if isinstance(found, tuple) else found
    return getattr(found, "run", found)


@pytest.mark.parametrize("how", KEPT)
def test_a_forward_that_is_kept_in_a_container(how: str) -> None:
    class Keeps(Net):
        def forward(self, x: Tensor) -> Any:
            return _kept(self.kept)(self.first(x)).cos()

    model = Keeps(Cell(), WAYS["called"])
    model.kept = KEPT[how](model.part)
    before, wanted = repr(model.kept), model(torch.ones(2, 3))
    first, second = gt.watch(model), gt.watch(model)
    first.__enter__()
    second.__enter__()
    loss = model(torch.ones(2, 3)).sum()
    twin = copy.deepcopy(model)
    first.__exit__()
    assert "CallEvent" not in repr(twin.kept) and torch.equal(twin(torch.ones(2, 3)), wanted)
    model(torch.ones(2, 3))
    second.__exit__()
    assert second._calls == {"": 2, "first": 2, "part": 2} and not first.trace(loss).notes
    assert repr(model.kept) == before and not module_calls.EXCHANGES
    assert made_in(first, loss)["SinBackward0"] == {("part", 0)}


class Elsewhere(nn.Module):
    """Uses modules in ways that cannot be seen, and one, of PyTorch's, that does so itself."""

    def __init__(self, seen: bool) -> None:
        super().__init__()
        self.cells = nn.Sequential(Cell(), Cell())
        self.shift = nn.ParameterList([nn.Parameter(torch.zeros(3))])
        self.attend = nn.MultiheadAttention(3, 1)
        self.run = None if seen else {self.cells[1].forward}

    def forward(self, x: Tensor) -> Tensor:
        run = self.cells[1] if self.run is None else next(iter(self.run))
        return self.attend(*[run(self.cells[0](x + self.shift[0]))] * 3)[0]


@pytest.mark.parametrize("seen", [True, False])
def test_modules_that_were_called_out_of_sight_are_named(seen: bool) -> None:
    model = Elsewhere(seen)
    with gt.watch(model) as watch:
        loss = model(torch.ones(2, 1, 3)).sum()
    notes = watch.trace(loss).influence().notes
    told = [note for note in notes if note.startswith("cells.1:")]
    assert len(told) == (0 if seen else 1)


@pytest.mark.parametrize("whom", ["a sibling", "the model"])
def test_weak_references_to_modules(whom: str) -> None:
    """PyTorch lists ``self.owner = weakref.proxy(...)`` as a part; a watch ended in a TypeError."""
    model = Net(Cell(), lambda part, x: part(x))
    kept = weakref.proxy(model.first if whom == "a sibling" else model)
    model.part.owner = kept
    assert len(model.part._modules) >= 1
    with gt.watch(model) as watch:
        loss = model(torch.ones(2, 3)).sum()
    found = made_in(watch, loss)
    assert found["SinBackward0"] == {("part", 0)} and found["AddmmBackward0"] == {("first", 0)}
    assert "part" in watch.trace(loss).influence().shares
    with gt.Monitor(model, every=1) as monitor:
        monitor.step(model(torch.ones(2, 3)).sum())
    assert not monitor.history.rows[0].note


def test_recursion_is_counted() -> None:
    class Again(nn.Module):
        def forward(self, x: Tensor, depth: int) -> Tensor:
            return self.forward(x.sin(), depth - 1).cos() if depth else x

    model = nn.ModuleDict({"again": Again()})
    with gt.watch(model) as watch:
        loss = model["again"](torch.ones(2, requires_grad=True), 2).sum()
    assert made_in(watch, loss)["SinBackward0"] == {("again", 0), ("again", 1)}


def test_what_can_be_read_of_a_watched_forward() -> None:
    model = Net(Twice(), WAYS["called"])
    part = model.part
    with gt.watch(model):
        assert inspect.signature(part.forward) == inspect.signature(Twice().forward)
        assert inspect.signature(Twice.forward) == inspect.signature(Cell.forward).replace(
            parameters=[
                p if p.name != "scale" else p.replace(default=2.0)
                for p in inspect.signature(Cell.forward).parameters.values()
            ]
        )
        assert inspect.ismethod(part.forward) and part.forward.__self__ is part
        assert part.forward == part.forward and part.forward.__name__ == "forward"
        assert inspect.isfunction(Twice.forward) and "super()" in inspect.getsource(part.forward)
        assert functools.wraps(part.forward)(lambda: 0).__wrapped__ == part.forward  # type: ignore[attr-defined]
        kept = part.forward
        with pytest.raises(TypeError, match="forward"):
            part.forward()
        with pytest.raises(AttributeError):
            del part.forward
        part.forward = lambda x: x  # type: ignore[method-assign]
        assert part(3) == 3 and part.forward(3) == 3
        del part.forward
    assert torch.equal(kept(torch.ones(3)), part(torch.ones(3)))


# Copies ---------------------------------------------------------------------------------------


def copied(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def pickled(model: nn.Module) -> nn.Module:
    text = pickle.dumps(model)
    assert b"gradtrace" not in text
    return pickle.loads(text)  # type: ignore[no-any-return]


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


def averaged(model: nn.Module) -> nn.Module:
    return torch.optim.swa_utils.AveragedModel(model).module


INSIDE: dict[str, Callable[[nn.Module], Any]] = {
    "watch": gt.watch,
    "monitor": lambda model: gt.Monitor(model),
}


def stack() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Tanh())


@pytest.mark.parametrize("how", [copied, pickled, saved, averaged])
@pytest.mark.parametrize("inside", INSIDE)
def test_copies_of_a_watched_model_are_clean(inside: str, how: Any) -> None:
    model, x = stack(), torch.randn(4, 3)
    wanted = model(x)
    with INSIDE[inside](model):
        model(x)
        twin = how(model)
        state = twin.state_dict()
        assert torch.equal(twin(x), wanted)  # it is not ablated, nor watched
    assert [set(vars(m)) for m in twin.modules()] == [set(vars(m)) for m in model.modules()]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in twin.modules())
    assert list(state) == list(model.state_dict())
    with gt.watch(twin) as watch:
        loss = twin(x).sum()
    assert set(watch.trace(loss).influence().shares) == {"0", "1", "2"}
    with gt.ablate(twin, "1"):
        assert not torch.equal(twin(x), wanted)
    torch.optim.SGD(twin.parameters(), 0.1).step()
    twin(x).sum().backward()


def test_a_copy_made_in_the_forward_pass() -> None:
    class Target(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.target = stack(), None

        def forward(self, x: Tensor) -> Tensor:
            if self.target is None:
                self.target = copy.deepcopy(self.encoder).requires_grad_(False)
            return (self.encoder(x) - self.target(x + 0.1)).pow(2).mean()

    model = Target()
    with gt.watch(model) as watch:
        loss = model(torch.randn(2, 3))
    assert watch.trace(loss).influence().shares["encoder.1"] == 1.0


class Guarded(nn.Linear):
    """Has its own way to be pickled."""

    def __getstate__(self) -> dict[str, Any]:
        state = dict(vars(self))
        state["note"] = sorted(set(state) - {"note"})
        return state


def test_a_pickle_of_the_users_own_and_weak_references() -> None:
    model = nn.Sequential(Guarded(2, 2))
    plain = copy.deepcopy(model)[0].note
    with gt.watch(model):
        assert copy.deepcopy(model)[0].note == plain
        reference = weakref.ref(model[0])
        model.share_memory()
    assert reference() is model[0]
    del model
    gc.collect()
    assert reference() is None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "how",
    [
        torch.jit.script,
        lambda model: torch.jit.trace(model, torch.ones(2, 3)),
        lambda model: torch.export.export(model, (torch.ones(2, 3),), strict=False).module(),
    ],
    ids=["script", "trace", "export"],
)
def test_a_watched_model_can_be_scripted(how: Any) -> None:
    class Scripted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.part(x))

    model, x = Scripted(), torch.randn(2, 3)
    with gt.watch(model):
        made = how(model)
    if how is torch.jit.script:
        assert torch.equal(made(x), model(x))
    else:
        made(x)


# Modules of other kinds ----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("call", ["called", "forward"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.Tanh())),
        lambda: torch.jit.trace(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.ones(2, 3)),
        lambda: torch.export.export(
            nn.Sequential(nn.Linear(3, 3), nn.Tanh()), (torch.ones(2, 3),)
        ).module(),
        lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 3), nn.Tanh())),
        lambda: nn.LazyLinear(3),
        lambda: nn.LazyBatchNorm1d(),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
    ],
    ids=["scripted", "traced", "exported", "fx", "lazy", "lazy norm", "parametrized"],
)
def test_modules_of_other_kinds(make: Any, call: str) -> None:
    if call == "forward" and make().__class__.__name__.startswith("Lazy"):
        pytest.skip("a lazy module is made by its call")
    model = Net(make(), WAYS[call])
    with gt.watch(model) as watch:
        loss = model(torch.ones(2, 3)).sum() + model(torch.ones(2, 3)).sum()
    found = made_in(watch, loss)
    places = set().union(*found.values())
    assert ("part", 0) in places or ("part.0", 0) in places
    assert ("part", 1) in places or ("part.0", 1) in places
    assert found["CosBackward0"] == {("", 0), ("", 1)}
    for name, grad in zip(dict(model.named_parameters()), watch.backward(loss).values()):
        assert grad is not None, name


# Many watches and threads ---------------------------------------------------------------------


def test_watches_end_in_any_order() -> None:
    model = Net(Cell(), WAYS["forward"])
    eyes = [gt.watch(model) for _ in range(3)]
    losses = []
    for eye in eyes:
        eye.__enter__()
    for eye in (eyes[1], eyes[0], eyes[2]):
        losses.append(model(torch.ones(1, 3)).sum())
        eye.__exit__(None, None, None)
    for n, eye in enumerate((eyes[1], eyes[0], eyes[2])):
        for m, loss in enumerate(losses):
            wanted = {("part", m)} if m <= n else {("", 0)}
            assert made_in(eye, loss)["SinBackward0"] == wanted


def test_an_exception_leaves_nothing() -> None:
    def fail(part: nn.Module, x: Tensor) -> Tensor:
        part.forward(x)
        part.forward("text")
        raise AssertionError

    model = Net(Cell(), fail)
    with pytest.raises(TypeError), gt.watch(model) as watch:
        model(torch.ones(1, 3))
    model.call = WAYS["forward"]
    with watch:
        loss = model(torch.ones(1, 3)).sum()
    assert made_in(watch, loss)["SinBackward0"] == {("part", 2)}


def test_a_monitor_that_is_dropped_lets_the_model_go() -> None:
    model = stack()
    monitor = gt.Monitor(model)
    reference = weakref.ref(model)
    del model, monitor
    gc.collect()
    assert reference() is None


def test_threads_that_open_and_close_at_random() -> None:
    model = Net(Cell(), WAYS["forward"])
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for n in range(20):
                with (
                    gt.watch(model) as watch,
                    gt.ablate(model, "first") if n % 3 else gt.watch(model),
                ):
                    loss = model(torch.ones(1, 3)).sum()
                assert made_in(watch, loss)["SinBackward0"] == {("part", 0)}
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


class Told(module_calls.Listener):
    def __init__(self, outermost: bool) -> None:
        self.outermost, self.calls = outermost, 0

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.calls += 1


class Nested(nn.Module):
    def forward(self, depth: int) -> int:
        return self.forward(depth - 1) if depth else 0


@pytest.mark.parametrize(
    "call", [lambda m: m(3), lambda m: m.forward(3), lambda m: m._call_impl(3)]
)
def test_listeners_that_need_the_outermost_call_get_it_once(call: Callable[[Any], int]) -> None:
    module, both = Nested(), (Told(True), Told(False))
    stop = module_calls.listen(both[0], [module])
    assert call(module) == 0 and both[0].calls == 1
    stop_other = module_calls.listen(both[1], [module])  # which is told of every call
    assert call(module) == 0 and (both[0].calls, both[1].calls) == (5, 4)
    stop_other()
    assert call(module) == 0 and both[0].calls == 6
    stop()
    assert call(module) == 0 and both[0].calls == 6 and not call_listeners.OUTERMOST
