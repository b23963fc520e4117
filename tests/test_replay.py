"""A loss of the structure of an earlier one: its recording is replayed, with the same bits."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import architectures
import operators
import pytest
import randomgraphs
import thorough
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import gradtrace as gt
from gradtrace.autodiff import hooks, tuning
from gradtrace.autodiff.pass_scope import collector_off, own_work_runs
from gradtrace.errors import FreedGraph, GradtraceError, NonFinite
from gradtrace.ir.program import Program, structure_of
from gradtrace.linops import Map
from gradtrace.recording import gradients, node_rules, replay
from gradtrace.recording.kept_recordings import RECORDINGS, RecordingCache
from gradtrace.traced import Trace
from gradtrace.tracing.kept_plans import KEPT, forget


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    forget()
    yield
    forget()


class Small(nn.Module):
    """Most kinds of rules: products, sums of broadcast values, views, joined slices, norms."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(7, width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) * self.scale
        q, k, v = self.mix(self.norm(x)).chunk(3, -1)
        x = x + torch.softmax(q @ k.mT / 3, -1) @ v.tanh()
        return self.out(x[:, 0])


def loss_of(model: nn.Module, batch: int = 3, tokens: int = 4) -> tuple[gt.watch, Tensor]:
    with gt.watch(model) as watch:
        loss = model(torch.randint(7, (batch, tokens))).square().mean()
    return watch, loss


def traced(model: nn.Module, **sizes: int) -> Trace:
    watch, loss = loss_of(model, **sizes)
    return watch.trace(loss)


def weights_of(map_: Map) -> list[Any]:
    """All numbers of a map."""
    return [getattr(map_, name) for name in map_.weights]


def equal(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor):
        return bool(a == b) and not isinstance(b, Tensor)
    if (a.shape, a.dtype, a.stride()) != (b.shape, b.dtype, b.stride()):
        return False
    return torch.equal(torch.nan_to_num(a, 7.0), torch.nan_to_num(b, 7.0))


def assert_same(found: Program, wanted: Program) -> None:
    """Two programs are the same, to the last bit."""
    assert (found.root, found.size, found.blocks) == (wanted.root, wanted.size, wanted.blocks)
    for shared in (found.blocks, *[some for b in found.blocks for some in (b.steps, b.merges)]):
        assert type(shared) is tuple  # by all losses of this structure: not to be changed
    assert found.notes() == wanted.notes()
    assert structure_of(found) == structure_of(wanted)
    assert [map_.structure() for map_ in found.maps] == [map_.structure() for map_ in wanted.maps]
    for a, b in zip(found.maps, wanted.maps):
        assert (a.in_shape, a.out_shape) == (b.in_shape, b.out_shape)
        assert all(map(equal, weights_of(a), weights_of(b))), (a, b)
    for one, other in zip(found.leaves, wanted.leaves, strict=True):
        assert one.tensor is other.tensor and one.value == other.value
        assert (one.known is None) is (other.known is None)
        assert equal(one.compute(), other.compute())
    assert [*found.kept] == [*wanted.kept]
    assert all(map(equal, found.kept.values(), wanted.kept.values()))


def recorded_anew(watch: Any, loss: Tensor) -> Trace:
    """The trace without recordings of other losses."""
    forget()
    trace: Trace = watch.trace(loss)
    assert trace.program.recorded
    return trace


def check_replay(watch: Any, loss: Tensor) -> bool:
    """Whether a loss is replayed; if so, its program is the one that is recorded."""
    trace = watch.trace(loss)
    if trace.program.recorded:
        return False
    assert_same(trace.program, recorded_anew(watch, loss).program)
    return True


# Equality -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_next_loss_is_replayed(dtype: torch.dtype) -> None:
    model = Small().to(dtype)
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        watch, loss = loss_of(model)
        trace = watch.trace(loss)
        table = trace.influence()
        assert bool(trace.program.recorded) is (step == 0)
        other = recorded_anew(watch, loss)
        assert_same(trace.program, other.program)
        assert table == other.influence()
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()


@pytest.mark.parametrize("uses", [1, 2])
def test_losses_of_one_watch_that_stays_open(uses: int) -> None:
    """Of each loss the calls are counted from its own first one."""
    model = Small()

    def loss() -> Tensor:
        return sum(model(torch.randint(7, (3, 4))).square().mean() for _ in range(uses))  # type: ignore[return-value]

    with gt.watch(model) as watch:
        losses = [loss() for _ in range(3)]
        with torch.no_grad():
            loss()
        losses.append(loss())
        traces = [watch.trace(each) for each in losses]
        calls = [{b.place.call for b in t.program.blocks} for t in traces]
    assert calls == [set(range(uses))] * 4
    assert [t.program.recorded == "" for t in traces] == [False, True, True, True]


def test_a_watch_that_stays_open_takes_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "NOTED_CALLS", 20)
    model, found = Small(), set()
    with gt.watch(model) as watch:
        for _ in range(8):
            loss = model(torch.randint(7, (3, 4))).square().mean()
            found.add(tuple((b.operator, b.place) for b in watch.trace(loss).program.blocks))
            assert len(watch.name_table.starts) == len(watch.name_table.places) <= 40 + 10
    assert len(found) == 1 and {"", "mix", "norm"} <= {place.module for _, place in found.pop()}


def test_every_measure_has_the_same_answer() -> None:
    model = Small()
    traced(model)
    watch, loss = loss_of(model)
    ask: dict[str, Callable[[Trace], Any]] = {
        "gradients": lambda t: [*t.gradients.values()],
        "flow": lambda t: str(t.norms()),
        "mass": lambda t: t.mass().shares,
        "decompose": lambda t: t.decompose().shares,
        "paths": lambda t: [(p.weight, p.operators) for p in t.paths("mix.weight", k=3)],
        "of": lambda t: t.influence("operators", of="mix"),
        "sample": lambda t: t.influence(sample=50),
    }
    trace = watch.trace(loss)
    assert trace.program.recorded == ""
    found = {name: measure(trace) for name, measure in ask.items()}
    trace = recorded_anew(watch, loss)
    for name, measure in ask.items():
        wanted = measure(trace)
        same = all(map(equal, found[name], wanted)) if name == "gradients" else None
        assert found[name] == wanted if same is None else same, name


def test_a_change_of_shapes_is_recorded_and_both_are_replayed() -> None:
    model = Small()
    for batch, tokens in ((3, 4), (2, 4), (3, 5), (3, 4), (2, 4), (3, 5)):
        check_replay(*loss_of(model, batch, tokens)) or traced(model, batch=batch, tokens=tokens)
    forget()
    sizes = ((3, 4), (2, 4), (3, 5)) * 2
    reasons = [traced(model, batch=b, tokens=n).program.recorded for b, n in sizes]
    assert [reason == "" for reason in reasons] == [False] * 3 + [True] * 3
    assert "shape (3, 5, 6)" in str(reasons[2])


GRAPHS = thorough.few(25, 50)  # in a test


@pytest.mark.parametrize("start", range(0, thorough.few(GRAPHS, 2000), GRAPHS))
def test_random_graphs(start: int) -> None:
    """The same graph, made twice; those with functions of the user's are recorded."""
    replayed = 0
    for seed in range(start, start + GRAPHS):
        loss = randomgraphs.build(seed).loss
        gt.trace(loss, nonfinite="allow")
        loss = randomgraphs.build(seed).loss
        replayed += check_replay(gt, loss)
        forget()
    assert replayed >= 0.7 * GRAPHS


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # transformers' own
@pytest.mark.parametrize("name", thorough.some(architectures.ARCHITECTURES, 4))
def test_architectures(name: str) -> None:
    model, loss = architectures.ARCHITECTURES[name]()

    def ask() -> tuple[gt.watch, Tensor]:
        torch.manual_seed(0)
        with gt.watch(model) as watch:
            found = loss(model)
        return watch, found

    for _ in range(2):
        watch, found = ask()
        watch.trace(found)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.01)
    watch, found = ask()
    routed = {"switch", "mixtral", "qwen2_moe"}  # experts get as many tokens as weights give them
    assert check_replay(watch, found) or name in routed


OPERATORS = {operators.label(op): op for op in operators.entries()}


@pytest.mark.parametrize("names", [sorted(OPERATORS)[n::8] for n in range(8)])
def test_operators(names: list[str]) -> None:
    """Those of the database that repeat: with other numbers of the same shapes."""
    for name in thorough.some(names, 4):
        op = OPERATORS[name]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for make in operators.makers(op, torch.float32, thorough.few(1, 4)):
                problem = make()
                if problem is None or problem[0].grad_fn is None:
                    continue
                try:
                    gt.trace(problem[0], nonfinite="allow")
                except GradtraceError:
                    continue
                problem = make()
                assert problem is not None
                check_replay(Allowing, problem[0])
                forget()


class Allowing:
    """``gt.trace`` of losses that may not be finite."""

    @staticmethod
    def trace(loss: Tensor) -> Trace:
        return gt.trace(loss, nonfinite="allow")


@pytest.mark.parametrize("least", [1, 30, 1 << 40])
def test_deferred_gradients(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "DEFER_MIN_ELEMENTS", least)
    model = Small()
    model.out.weight = nn.Parameter(model.mix.weight[:5].detach().clone())
    for _ in range(2):
        watch, loss = loss_of(model, 1, 2)
        trace = watch.trace(loss)
    assert trace.program.recorded == ""
    lazy = [leaf for leaf in trace.program.leaves if leaf.known is None]
    assert bool(lazy) is (least < 1 << 40)
    assert_same(trace.program, recorded_anew(watch, loss).program)


def test_vector_losses_tied_and_unused_leaves() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.unused = nn.Embedding(5, 3), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return (self.embed(x) @ self.embed.weight.T).logsumexp(-1).mean(1)

    model = Tied()
    for step in range(3):
        with gt.watch(model) as watch:
            loss = model(torch.randint(5, (4, 2))).flatten()
        assert check_replay(watch, loss) is (step > 0)


# What is seen -------------------------------------------------------------------------------------


def test_hooks_that_are_added_in_between_are_seen() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(5, 3)

    def trace(hook: bool) -> Trace:
        with gt.watch(model) as watch:
            middle = model[1](model[0](x))
            loss = model[2](middle).square().sum()
        if hook:
            middle.register_hook(lambda grad: 3 * grad)
        return watch.trace(loss)

    plain = [trace(False) for _ in range(2)][1]
    assert plain.program.recorded == ""
    hooked = trace(True)
    assert hooked.program.recorded
    assert torch.allclose(hooked.gradients["0.weight"], 3 * plain.gradients["0.weight"])
    assert trace(False).program.recorded == ""
    handle = model[0].weight.register_hook(lambda grad: 2 * grad)
    on_leaf = trace(False)
    assert on_leaf.program.recorded == "hooks stand on its leaves"
    assert torch.allclose(on_leaf.gradients["0.weight"], 2 * plain.gradients["0.weight"])
    with hooks.silenced() as state:
        silent = trace(False)
    assert state.hooked and equal(silent.gradients["0.weight"], plain.gradients["0.weight"])
    handle.remove()
    assert trace(False).program.recorded == ""


def test_gradients_that_are_retained_are_not_written() -> None:
    w = torch.randn(3, requires_grad=True)
    for _ in range(3):
        middle = w.tanh()
        middle.retain_grad()
        gt.trace((middle * 2).sum())
        assert middle.grad is None and w.grad is None


def test_labels_are_compared() -> None:
    w = torch.randn(3, 2, requires_grad=True)
    for names, replayed in (("a", False), ("b", False), ("a", True)):
        trace = gt.trace(gt.label(w.tanh(), 1, names).sum())
        assert trace.influence("labels").names == (f"{names} 0", f"{names} 1")
        assert (trace.program.recorded == "") is replayed


def test_functions_of_the_user_run_once() -> None:
    calls = SimpleQueue[int]()  # lists would be put back

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            calls.put(1)
            return 2 * grad

    w = torch.randn(3, requires_grad=True)
    for n in range(3):
        trace = gt.trace(Twice.apply(w.tanh()).sum())
        assert trace.program.recorded == "TwiceBackward runs code of the user's"
        assert calls.qsize() == n + 1


def test_one_leaf_in_two_places_is_not_two_leaves() -> None:
    a, b = (torch.randn(3, requires_grad=True) for _ in range(2))
    first = gt.trace((a.tanh() * b.tanh()).sum())
    other = gt.trace((a.tanh() * a.tanh()).sum())
    assert len(first.program.leaves) == 2 and len(other.program.leaves) == 1
    assert other.program.recorded == "a value is used in several places, not several values"
    assert gt.trace((a.tanh() * b.tanh()).sum()).program.recorded == ""


def test_another_module_another_place() -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.first = nn.Linear(3, 3), nn.Linear(3, 3), True

        def forward(self, x: Tensor) -> Tensor:
            return (self.a if self.first else self.b)(x).tanh()

    model = Either()
    for first in (True, True, False, False):
        model.first = first
        with gt.watch(model) as watch:
            loss = model(torch.randn(2, 3)).sum()
        trace = watch.trace(loss)
        assert {b.place.module for b in trace.program.blocks} >= {"a" if first else "b"}
        trace.influence()
    assert [row.replays for row in KEPT.summary().rows] == [1, 1]


def test_another_use_of_a_saved_number() -> None:
    w = torch.randn(4, 6, requires_grad=True)
    for dim in (0, 1, -1):
        gt.trace(w.softmax(dim).pow(2).sum())
        assert check_replay(gt, w.softmax(dim).pow(2).sum())
        assert check_replay(gt, w.softmax(dim).pow(3).sum()) in (True, False)
        forget()
    gt.trace((w[1:3] * 2).sum())
    assert gt.trace((w[2:4] * 2).sum()).program.recorded
    assert check_replay(gt, (w[2:4] * 3).sum())


def test_freed_and_changed_graphs_say_so() -> None:
    model = Small()
    traced(model)
    watch, loss = loss_of(model)
    loss.backward()
    with pytest.raises(FreedGraph, match="freed"):
        watch.trace(loss)
    watch, loss = loss_of(model)
    with torch.no_grad():
        model.mix.weight.mul_(2)
    with pytest.raises(FreedGraph, match=r"overwritten in place.*|changed"):
        watch.trace(loss)


def test_gradients_that_are_not_finite_are_refused() -> None:
    w = torch.tensor([1.0, 4.0], requires_grad=True)
    for _ in range(2):
        gt.trace(w.sqrt().sum())
    with torch.no_grad():
        w[0] = 0
    with pytest.raises(NonFinite, match="leaf0"):
        gt.trace(w.sqrt().sum())


def test_checkpoints_are_recomputed_once() -> None:
    calls = []

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            calls.append(1)
            return self.inner(x).tanh()

    class Checked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.out = Part(), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(checkpoint(self.part, x, use_reentrant=False))

    model, x = Checked(), torch.randn(4, 3)
    for _ in range(3):
        with gt.watch(model) as watch:
            loss = model(x).sum()
        calls.clear()
        trace = watch.trace(loss)
        assert len(calls) == 1
        loss.backward()
        for name, p in model.named_parameters():
            assert equal(trace.gradients[name], p.grad)
        model.zero_grad()


# What is kept -------------------------------------------------------------------------------------


def test_recordings_hold_no_tensors_and_no_nodes() -> None:
    model = Small()
    traced(model).influence()
    seen: set[int] = set()
    stack: list[Any] = [RECORDINGS._kept]
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, type) or item is sys.modules:
            continue
        seen.add(id(item))
        assert not isinstance(item, (Tensor, nn.Module, torch.autograd.graph.Node)), type(item)
        if not callable(item):
            stack += gc.get_referents(item)
    assert 1_000 < KEPT.summary().bytes < 1_000_000


def test_memory_returns_without_the_collector() -> None:
    model = Small()
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            watch, loss = loss_of(model)
            held = [StorageWeakRef(loss.untyped_storage())]
            trace = watch.trace(loss)
            held += [StorageWeakRef(x.untyped_storage()) for x in trace.program.kept.values()]
            del trace, loss, watch
            assert all(ref.expired() for ref in held)
    finally:
        gc.enable()


def test_recordings_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = RecordingCache(recordings=2)
    monkeypatch.setattr("gradtrace.recording.replay.RECORDINGS", cache)
    model = Small()
    for batch in (2, 3, 4):
        traced(model, batch=batch)
    assert len(cache.all()) == 2
    assert traced(model, batch=4).program.recorded == ""
    assert traced(model, batch=2).program.recorded
    cache.max_steps = 1
    traced(model, batch=5)
    assert len(cache.all()) == 1
    cache.clear()
    assert not cache.all() and not cache.hits


def test_the_table_says_what_was_replayed_and_why_not() -> None:
    model = Small()
    for _ in range(3):
        traced(model).influence()
    (row,) = KEPT.summary().rows
    assert (row.hits, row.replays, row.recorded) == (2, 2, "")
    handle = model.out.bias.register_hook(lambda grad: None)
    traced(model).influence()
    assert "hooks stand on its leaves" in KEPT.summary().rows[0].recorded
    handle.remove()


def test_threads() -> None:
    models = [Small(4 + n % 2) for n in range(4)]

    def ask(model: nn.Module) -> Any:
        with gt.watch(model) as watch:
            loss = model(torch.arange(6).reshape(2, 3)).square().mean()
        return watch.trace(loss).influence()

    wanted = [ask(model) for model in models]
    forget()
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):  # how many of these are replayed hangs on who comes first
            assert list(pool.map(ask, models)) == wanted
    for model, found in zip(models, wanted):  # one after the other, each on a thread of its own
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(ask, model).result() == found
            before = RECORDINGS.hits
            assert pool.submit(ask, model).result() == found
            assert RECORDINGS.hits == before + 1


def test_threads_replay_what_others_recorded() -> None:
    model = Small()
    for _ in range(3):
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(traced, model).result().program.leaves
    assert RECORDINGS.hits == 2


def test_our_own_mistakes_are_not_taken_for_another_structure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Small()
    traced(model)

    def broken(*args: object) -> None:
        raise KeyError("a mistake")

    monkeypatch.setattr(replay._Run, "_pass_on", broken)
    with pytest.raises(KeyError, match="a mistake"):
        traced(model)


def test_code_of_the_user_that_fails_says_where() -> None:
    class Fragile(nn.Module):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            if self.fails:
                raise ValueError("the user's mistake")
            return x.tanh()

    part, w = Fragile(), torch.randn(3, requires_grad=True)
    losses = [checkpoint(part, w * 2, use_reentrant=False).sum() for _ in range(2)]
    gt.trace(losses[0])
    part.fails = True
    messages = []
    for _ in range(2):  # with a recording to replay, and without
        with pytest.raises(GradtraceError, match="the user's mistake") as found:
            gt.trace(losses[1])
        messages.append(str(found.value))
        forget()
    assert messages[0] == messages[1]


def test_formulas_that_passes_simplify_share_what_follows_from_structure() -> None:
    """What is the same of every loss; unless the passes, which read tensors, find otherwise."""
    w = torch.randn(2, 3, requires_grad=True)

    def trace(repeats: int = 2) -> Trace:
        return gt.trace(w.tanh().repeat(1, repeats).roll(1, 0).square().sum())

    first, second, third = (trace() for _ in range(3))
    assert first.program.recorded and not second.program.recorded
    assert first.program.facts is second.program.facts is third.program.facts
    assert second.program.blocks is third.program.blocks
    other = trace(3)
    assert other.program.facts is not first.program.facts


@pytest.mark.parametrize("first", ["both", "left", "right"])
def test_results_are_compared_by_position(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that follows other arguments than before, though all need gradients."""
    x, y = (torch.randn(3, requires_grad=True) for _ in range(2))
    given = {"both": (0, 1), "left": (0,), "right": (1,)}
    now, usual = first, node_rules.NODES["MulBackward0"]

    def rule(*args: Any) -> Any:
        found = usual(*args)
        return (
            None if found is None else [f if n in given[now] else None for n, f in enumerate(found)]
        )

    monkeypatch.setitem(node_rules.NODES, "MulBackward0", rule)
    gt.trace((x * y).sum())
    assert gt.trace((x * y).sum()).program.recorded == ""
    for now in given.keys() - {first}:
        reason = gt.trace((x * y).sum()).program.recorded
        assert reason in ("MulBackward0 has fewer results", "MulBackward0 has other results")
        forget()
        now = first
        gt.trace((x * y).sum())


def test_the_collector_does_not_run_meanwhile() -> None:
    within: list[bool] = []
    model, threshold = Small(), gc.get_threshold()
    gc.callbacks.append(lambda phase, info: within.append(own_work_runs()))
    gc.set_threshold(1)
    try:
        for _ in range(2):
            watch, loss = loss_of(model)
            watch.trace(loss).influence()
            assert gc.isenabled()
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.pop()
    assert within and not any(within)


def test_the_collector_is_off_until_the_last_of_several_threads_is_done() -> None:
    with ThreadPoolExecutor(1) as other:
        with collector_off():
            inside = collector_off()
            other.submit(inside.__enter__).result()
        assert not gc.isenabled()
        other.submit(inside.__exit__, None, None, None).result()
    assert gc.isenabled()
