"""Memory returns when a trace and its loss go: at once, at any depth, without the collector."""

from __future__ import annotations

import gc
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import gradtrace as gt
from gradtrace.autodiff.pass_scope import KEEPER
from gradtrace.autodiff.tuning import FREE_SPAN_NODES
from gradtrace.errors import FreedGraph, GradtraceError, NonFinite
from gradtrace.pytorch.global_switches import load_compiler
from gradtrace.pytorch.side_effects import Undo


@pytest.fixture(autouse=True)
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.freeze()  # what other tests left is not looked through again and again
    gc.disable()
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


def ref(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


# Deep graphs --------------------------------------------------------------------------------------

DEEP = """
import gc, sys, threading, torch
from torch.multiprocessing.reductions import StorageWeakRef
import gradtrace as gt
from gradtrace.autodiff.traversal import walk

gc.disable()
torch.set_num_threads(1)
weight = torch.eye(3, requires_grad=True)


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


LAYERS = {
    "chain": lambda x, n: x.cos(),
    "residual": lambda x, n: x + torch.tanh(x),
    "recurrent": lambda x, n: torch.tanh(weight @ x),
    "functions": lambda x, n: Own.apply(x) if n % 2 else x * x,
}


def walked(loss):
    walk(loss, lambda node, edges: None)


def traced(loss):
    return gt.trace(loss)


def failed(loss):
    try:
        walk(loss, lambda node, edges: 1 / 0)
    except ZeroDivisionError:
        pass


def run(kind, depth, look, order):
    x = torch.ones(3, requires_grad=True)
    refs, middle = [], None
    for n in range(depth):
        x = LAYERS[kind](x, n)
        if n % 100 == 50:
            refs.append(StorageWeakRef(x.untyped_storage()))
        if n == depth // 2:
            middle = x
    held = {"loss": x.sum(), "middle": middle}
    del x, middle
    held["trace"] = look(held["loss"])
    held["node"] = held["loss"].grad_fn.next_functions[0][0]
    for name in order.split():
        del held[name]
    del held
    alive = sum(not each.expired() for each in refs)
    assert not alive, (kind, look.__name__, order, alive)


ORDERS = ("node middle trace loss", "loss trace node middle", "trace loss middle node")
CASES = [(kind, 3_000, walked, order) for kind in LAYERS for order in ORDERS]
CASES += [("chain", 3_000, failed, ORDERS[0]), ("chain", 30_000, walked, ORDERS[0])]
CASES += [("residual", 500, traced, order) for order in ORDERS]
threading.stack_size(512 << 10)
for case in CASES:
    failures = []
    threading.excepthook = lambda args: failures.append(args.exc_value)
    thread = threading.Thread(target=run, args=case)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
print(len(CASES), "cases")
"""


def test_deep_graphs_are_freed_at_once_on_small_stacks() -> None:
    """Whatever goes last: the loss, a trace, an intermediate value, a node; after an error too."""
    done = fresh.python("-c", DEEP)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "17 cases\n"


def test_shallow_graphs_are_left_alone() -> None:
    x = y = torch.ones(3, requires_grad=True)
    for _ in range(2 * FREE_SPAN_NODES - 2):
        y = y.cos()
    gt.backward(y.sum())
    node: Any = y.grad_fn
    while node is not None:
        assert KEEPER not in node.metadata
        node = node.next_functions[0][0] if node.next_functions else None
    assert x.grad is None


# Cycles -------------------------------------------------------------------------------------------


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


class Squared(torch.autograd.Function):
    """Not linear in the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * grad


def asked(trace: gt.Trace, tmp_path: Path) -> None:
    """Everything that a trace can be asked for."""
    name = next(iter(trace.gradients))
    first = (0,) * trace.gradients[name].dim()
    trace.influence(), trace.influence(sample=5), trace.norms()
    trace.path(name, first), trace.paths(name, first, k=2), trace.paths(sample=5)
    trace.report(tmp_path / "page.html", sample=5)


def watched(x: Tensor, tmp_path: Path, **how: Any) -> Tensor:
    model = net()
    with gt.watch(model) as watch:
        h = model(x)
        loss = h.square().mean()
    asked(watch.trace(loss, **how), tmp_path)
    return h


def by_pairs(x: Tensor, tmp_path: Path) -> Tensor:
    h = net()(x)
    gt.trace(h.square().squeeze(1)).influence()
    return h


def monitored(x: Tensor, tmp_path: Path) -> Tensor:
    model = net()
    with gt.Monitor(model, every=1, file=tmp_path / "run.jsonl") as monitor:
        for _ in range(2):
            h = model(x)
            loss = h.square().mean()
            monitor.step(loss)
            loss.backward()
    return h


def over_data(x: Tensor, tmp_path: Path) -> Tensor:
    seen = []

    def losses(model: nn.Module, batch: Tensor) -> Tensor:
        seen.append(model(batch))
        return seen[-1].square().mean()

    gt.influence(net(), losses, [x, x])
    return seen[0]


def without(x: Tensor, tmp_path: Path) -> Tensor:
    model = net()
    with gt.ablate(model, "1"):
        h: Tensor = model(x)
        gt.trace(h.sum()).influence()
    return h


def recomputed(x: Tensor, tmp_path: Path) -> Tensor:
    h: Tensor = checkpoint(net(), x, use_reentrant=False)
    gt.trace(h.sum()).influence()
    return h


def hooked(x: Tensor, tmp_path: Path) -> Tensor:
    h = net()(x)
    h.register_hook(lambda grad: 2 * grad)
    gt.trace(h.sum()).influence()
    return h


def recurrent(x: Tensor, tmp_path: Path) -> Tensor:
    h: Tensor = nn.LSTM(4, 3)(x)[0]
    gt.trace(h.sum()).influence()
    return h


def joined(x: Tensor, tmp_path: Path) -> Tensor:
    h = torch.cat([x.sin(), x.cos()]).roll(1)
    gt.trace(h.sum()).influence()
    return h


def semirings(x: Tensor, tmp_path: Path) -> Tensor:
    h = net()(x)
    for semiring in (gt.semirings.MAX, gt.semirings.COUNT, gt.semirings.ENTROPY):
        gt.backward(h.sum(), semiring)
    return h


def schedules(x: Tensor, tmp_path: Path) -> Tensor:
    h = net()(x)
    for order in ("kahn", "creation", "recursive"):
        gt.backward(h.sum(), schedule=order)
    return h


def refused(x: Tensor, tmp_path: Path) -> Tensor:
    h: Tensor = Squared.apply(x.sin())
    with pytest.raises(GradtraceError):
        gt.trace(h.square().sum())
    return h


def used_up(x: Tensor, tmp_path: Path) -> Tensor:
    h = x.sin()
    loss = h.sum()
    loss.backward()
    with pytest.raises(GradtraceError):
        gt.trace(loss)
    return h


class Broken(nn.Module):
    """Its backward pass fails, if it is told to."""

    def __init__(self, when: set[int]) -> None:
        super().__init__()
        self.layer, self.when, self.calls = nn.Linear(4, 4), when, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h: Tensor = self.layer(x)
        return Fails.apply(h) if self.calls - 1 in self.when else h


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("no gradient")


def failing_first(x: Tensor, tmp_path: Path) -> Tensor:
    """The first trace of a Monitor, which raises."""
    model = Broken({0})
    with gt.Monitor(model, every=1, file=None) as monitor:
        h: Tensor = model(x)
        with pytest.warns(UserWarning, match="no gradient"):
            monitor.step(h.sum())
    return h


def failing_later(x: Tensor, tmp_path: Path) -> Tensor:
    """A later one, which warns."""
    model = Broken({1})
    with gt.Monitor(model, every=1, file=None) as monitor:
        monitor.step(model(x).sum())
        h: Tensor = model(x)
        with pytest.warns(UserWarning, match="no gradient"):
            monitor.step(h.sum())
    return h


def failing_diagnosed(x: Tensor, tmp_path: Path) -> Tensor:
    model = Broken({0})
    with gt.watch(model, diagnose=True) as watch:
        h: Tensor = model(x)
    assert "no gradient" in str(watch.diagnose(h.sum()))
    return h


def not_finite(x: Tensor, tmp_path: Path) -> Tensor:
    model = net()
    with gt.watch(model) as watch:
        h: Tensor = model(x) / 0.0
    with pytest.raises(NonFinite):
        watch.trace(h.sum())
    return h


def overwritten(x: Tensor, tmp_path: Path) -> Tensor:
    model = net()
    with gt.watch(model, diagnose=True) as watch:
        h: Tensor = model(x)
        loss = (h * h.detach()).sum()
    with torch.no_grad():
        model[2].weight.add_(1.0)  # type: ignore[operator]
    with pytest.raises(FreedGraph):
        watch.diagnose(loss)
    return h


def measured(x: Tensor, tmp_path: Path) -> Tensor:
    model = net()
    with gt.watch(model) as watch:
        h: Tensor = model(x)
    traced = watch.trace(h.sum())
    traced.coverage()
    traced.mass()
    str(traced.decompose())
    str(traced)
    return h


def of_a_watch(x: Tensor, tmp_path: Path) -> Tensor:
    """What takes a watch and not a trace."""
    model = net()
    with gt.watch(model, diagnose=True) as watch:
        h: Tensor = model(x)
        loss = h.sum()
    watch.diagnose(loss)
    str(watch.conflicts({"a": loss, "b": h.abs().sum()}))
    str(watch.attribute(loss, {"x": x}))
    return h


def taken(x: Tensor, tmp_path: Path) -> Tensor:
    """Functions and saved tensors of which the state is put back."""
    model, stack = net(), [[x.detach()]]
    with gt.watch(model) as watch, saved_tensors_hooks(lambda y: [y], lambda y: y.pop()):
        h: Tensor = Popped.apply(model(x), stack)
        loss = h.square().sum()
    watch.trace(loss).influence()
    watch.backward(loss)
    loss.backward()
    return h


class Popped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stack: list[list[Tensor]]) -> Tensor:
        ctx.stack = stack
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.stack[0].pop()
        del ctx.stack
        return grad * 2, None


CASES: dict[str, Callable[..., Tensor]] = {
    "greedy": watched,
    "viterbi": lambda x, tmp_path: watched(x, tmp_path, rule="viterbi"),
    "edge": lambda x, tmp_path: watched(x, tmp_path, rule="edge"),
    **{
        f.__name__: f
        for f in (
            *(by_pairs, monitored, over_data, without, recomputed, hooked, recurrent),
            *(joined, semirings, schedules, refused, used_up, measured),
            *(of_a_watch, taken, failing_first, failing_later, failing_diagnosed, not_finite),
            overwritten,
        )
    },
}


def ours(thing: Any) -> bool:
    """Whether it is gradtrace's, or what is to return: tensors, nodes, frames that hold them."""
    if isinstance(thing, types.FunctionType | types.MethodType):
        return thing.__module__.startswith("gradtrace")
    if isinstance(thing, types.FrameType):
        return "gradtrace" in thing.f_code.co_filename
    mine = type(thing).__module__.startswith("gradtrace")
    return mine or isinstance(thing, Tensor) or "Backward" in type(thing).__name__


@pytest.mark.parametrize("case", CASES)
def test_nothing_waits_for_the_collector(case: str, tmp_path: Path) -> None:
    x = torch.randn(5, 4, requires_grad=True)
    CASES[case](x, tmp_path)  # caches are filled, modules imported
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    storage = ref(CASES[case](x, tmp_path))
    assert storage.expired()
    gc.collect()
    assert [type(thing) for thing in gc.garbage if ours(thing)] == []


def test_nothing_is_imported_while_frames_hold_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cycle made by the import of torch._dynamo holds all frames that wait for it."""
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    with Undo.new() as undo:
        assert not hasattr(type(undo).__torch_dispatch__, "__wrapped__")  # which would import it
    threads: list[threading.Thread] = []
    note = lambda name: threads.append(threading.current_thread())  # noqa: E731
    monkeypatch.setattr("importlib.import_module", note)
    load_compiler()
    assert threads and threads[0] is not threading.current_thread()
    monkeypatch.setitem(sys.modules, "torch._dynamo", types.ModuleType("torch._dynamo"))
    load_compiler()
    wraps = hasattr(TorchDispatchMode, "_should_skip_dynamo")  # torch 2.9 wraps no mode
    with Undo.new() as undo:
        assert type(undo)._should_skip_dynamo()
        assert hasattr(type(undo).__torch_dispatch__, "__wrapped__") == wraps
    assert len(threads) == 1


def test_functions_that_are_made_in_a_forward_pass() -> None:
    """Their classes, and what these refer to, are kept by nothing that lasts."""

    def rounded(x: Tensor) -> tuple[Tensor, StorageWeakRef]:
        values = x.detach().round()

        class Rounded(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return values.clone()

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                return grad

        return Rounded.apply(x), ref(values)  # type: ignore[no-untyped-call]

    h, values = rounded(net()(torch.randn(5, 4)))
    gt.trace(h.square().sum()).influence()
    gt.backward(h.square().sum(), gt.semirings.MAX)
    del h
    gc.collect()  # a class lies in a cycle
    assert values.expired()
