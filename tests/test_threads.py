"""Operators made on other threads lie in their own module, or in none, and never in another one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import programs
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.autodiff.names import ModuleCall, NameTable, off_thread_calls


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def fresh() -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Runs something on a new thread, whose nodes are numbered from 0 on."""

    def run(work: Callable[[], Any]) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(work).result()

    yield run


def modules_of(watch: Any, loss: Tensor) -> dict[str, list[str]]:
    """The modules of the operators of each name, as the graph and as the program say."""
    found: dict[str, list[str]] = {}
    for o in watch.graph(loss):
        if o.leaf is None:
            found.setdefault(o.name, []).append(o.module)
    blocks = [(b.operator, b.place.module) for b in programs.of(watch)(loss).blocks]
    listed = sorted((name, module) for name, modules in found.items() for module in modules)
    assert sorted(blocks) == listed
    return {name: sorted(modules) for name, modules in found.items()}


class Branches(nn.Module):
    """Runs its branches in a pool: as modules, or as bare functions."""

    def __init__(self, pool: ThreadPoolExecutor | None, bare: bool = False, many: int = 3) -> None:
        super().__init__()
        self.pre = nn.Sequential(nn.Linear(3, 3), nn.Sigmoid())
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.ReLU())
            for _ in range(many)
        )
        self.post = nn.Sequential(nn.Linear(3, 3), nn.Softplus())
        self.__dict__["pool"] = pool
        self.bare = bare

    def forward(self, x: Tensor) -> Tensor:
        x = self.pre(x)
        pool = self.pool or ThreadPoolExecutor(2)
        work = torch.sin if self.bare else None
        tasks = [pool.submit(work or branch, x + n) for n, branch in enumerate(self.branches)]
        parts = [task.result() for task in tasks]
        if self.pool is None:
            pool.shutdown()
        return self.post(torch.stack(parts).sum(0))


ADVANCE: dict[str, Callable[[], object]] = {
    "new": lambda: None,
    "behind": lambda: [torch.ones(1, requires_grad=True).sin() for _ in range(7)],
    "ahead": lambda: [torch.ones(1, requires_grad=True).sin() for _ in range(3000)],
}


@pytest.mark.parametrize("main", ["fresh", "used"])
@pytest.mark.parametrize("pool", ["inside", *ADVANCE])
def test_modules_called_on_other_threads(pool: str, main: str, fresh: Any) -> None:
    workers = None if pool == "inside" else ThreadPoolExecutor(2)
    if workers is not None:
        ready = threading.Barrier(2)
        list(workers.map(lambda _: (ADVANCE[pool](), ready.wait(30)), range(2)))
    model = Branches(workers)

    def work() -> dict[str, list[str]]:
        if main == "used":
            [torch.ones(1, requires_grad=True).sin() for _ in range(50)]
        with gt.watch(model) as watch:
            loss = model(torch.randn(4, 3)).pow(2).sum()
        found = modules_of(watch, loss)
        wanted = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        for grad, want in zip(watch.backward(loss).values(), wanted):
            torch.testing.assert_close(grad, want)
        return found

    found = fresh(work)
    if workers is not None:
        workers.shutdown()
    linear = [f"branches.{n}.{m}" for n in range(3) for m in (0, 2)]
    assert found["AddmmBackward0"] == sorted([*linear, "pre.0", "post.0"])
    assert found["TanhBackward0"] == [f"branches.{n}.1" for n in range(3)]
    assert found["ReluBackward0"] == [f"branches.{n}.3" for n in range(3)]
    assert found["SigmoidBackward0"] == ["pre.1"] and found["SoftplusBackward0"] == ["post.1"]
    assert found["StackBackward0"] == [""] and found["PowBackward0"] == [""]


def test_functions_called_on_other_threads_lie_nowhere(fresh: Any) -> None:
    model = Branches(None, bare=True)

    def work() -> dict[str, list[str]]:
        with gt.watch(model) as watch:
            loss = model(torch.randn(4, 3)).pow(2).sum()
        return modules_of(watch, loss)

    found = fresh(work)
    assert set(found["SinBackward0"]) == {""}
    assert found["AddmmBackward0"] == ["post.0", "pre.0"]
    assert found["SoftplusBackward0"] in (["post.1"], [""])  # never in another module


def test_the_whole_model_on_another_thread(fresh: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.LSTM(3, 3))
    with gt.watch(model) as watch:
        loss = fresh(lambda: model(torch.randn(4, 2, 3))[0]).pow(2).sum()
    found = modules_of(watch, loss)
    assert found["TanhBackward0"].count("1") == 1 and set(found["TanhBackward0"]) == {"1", "2"}
    assert set(found["SigmoidBackward0"]) == {"2"}  # composed, there too
    assert "lstm" not in vars(torch._VF)


def test_replicas_of_data_parallel(fresh: Any) -> None:
    """As ``nn.DataParallel`` makes them for several devices."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())

    def replica(model: nn.Module) -> nn.Module:
        twin = model._replicate_for_data_parallel()
        for name, child in model.named_children():
            setattr(twin, name, replica(child))
        for name, parameter in model.named_parameters(recurse=False):
            setattr(twin, name, parameter * 1)
        return twin

    with gt.watch(model) as watch:
        twins = [replica(model) for _ in range(2)]
        with ThreadPoolExecutor(2) as pool:
            parts = list(pool.map(lambda twin: twin(torch.ones(1, 3)), twins))
        loss = torch.cat(parts).sum()
    found = modules_of(watch, loss)
    assert found["TanhBackward0"] == ["1", "1"] and found["AddmmBackward0"] == ["0", "0"]
    assert found["MulBackward0"] == [""] * 4


def test_a_thread_without_gradients_is_not_counted(fresh: Any) -> None:
    model = nn.Linear(3, 3)

    def judge() -> None:
        with torch.no_grad():
            model(torch.ones(1, 3))

    with gt.watch(model) as watch:
        fresh(judge)
        loss = model(torch.ones(1, 3)).sum()
    assert {o.call for o in watch.graph(loss)} == {0}


def test_second_derivatives() -> None:
    class Force(nn.Module):
        """Its output is the gradient of another module's."""

        def __init__(self) -> None:
            super().__init__()
            self.energy = nn.Sequential(nn.Linear(3, 3), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            x = x.requires_grad_()
            (found,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
            return found.cos()

    model = nn.ModuleDict({"force": Force()})
    with gt.watch(model) as watch:
        loss = model["force"](torch.randn(2, 3)).sum().exp()
    found = modules_of(watch, loss)
    assert found["TanhBackward0"] == ["force.energy.1"] and found["CosBackward0"] == ["force"]
    assert found["MmBackward0"] == ["force"] and found["ExpBackward0"] == [""]


def test_numbers_that_contradict_each_other() -> None:
    """One leaf of the module; of two nodes with one number that which uses it is the watch's."""
    weight, x = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    atlas = NameTable()
    atlas.name(weight, "part.weight")
    begin = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    own = weight * 2
    other = x.exp()
    other.grad_fn._set_sequence_nr(begin)
    after = own.sin()
    late = after + other
    atlas.enter(begin, ModuleCall("part", 0))
    atlas.enter(begin + 4, ModuleCall("", 0))
    assert off_thread_calls(late.sum(), atlas) == {other.grad_fn: ModuleCall("", 0)}
    twin = own.cos()
    twin.grad_fn._set_sequence_nr(after.grad_fn._sequence_nr())
    found = off_thread_calls((after + twin).sum(), atlas)
    assert found == {
        after.grad_fn: ModuleCall("", 0),
        twin.grad_fn: ModuleCall("", 0),
    }  # either may be


# Many watches at once -------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.embed, self.rnn, self.out = nn.Embedding(10, 8), kind(8, 8), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(self.embed(x))[0])


class Attends(Recurrent):
    def __init__(self, _: Any) -> None:
        super().__init__(nn.GRU)
        self.rnn = nn.TransformerEncoderLayer(8, 2, 8, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(self.embed(x)))


class Convolves(Recurrent):
    def __init__(self, _: Any) -> None:
        super().__init__(nn.GRU)
        self.rnn = nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(self.embed(x).mT).mT)


def table(model: nn.Module, x: Tensor) -> Any:
    with gt.watch(model) as watch:
        loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
    found = watch.trace(loss).influence().to_dict()
    return found["rows"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Recurrent(nn.LSTM),
        lambda: Recurrent(nn.GRU),
        lambda: Attends(0),
        lambda: Convolves(0),
    ],
    ids=["lstm", "gru", "transformer", "conv"],
)
def test_tables_of_threads_are_those_of_one(make: Callable[[], nn.Module]) -> None:
    models = [make() for _ in range(8)]
    data = [torch.randint(10, (2, 4)) for _ in models]
    serial = [table(model, x) for model, x in zip(models, data)]
    wrong: list[object] = []

    def work(n: int) -> None:
        try:
            wrong.extend(n for _ in range(3) if table(models[n], data[n]) != serial[n])
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert torch._C._get_mkldnn_enabled() and torch.backends.cuda.flash_sdp_enabled()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("both", [False, True])
def test_a_composed_lstm_is_pytorchs_own(both: bool, layers: int, first: bool, bias: bool) -> None:
    """The same operators in the same order as where oneDNN is switched off."""
    lstm = nn.LSTM(3, 4, layers, bias, first, 0.5 if layers > 1 else 0.0, both)
    x = torch.randn(5, 2, 3)

    def run() -> tuple[Tensor, list[tuple[int, str]]]:
        torch.manual_seed(1)
        out, (h, c) = lstm(x)
        loss = out.pow(2).sum() + h.sum() + c.exp().sum()
        seen, stack = {}, [loss.grad_fn]
        while stack:
            node = stack.pop()
            if node not in seen and hasattr(node, "_sequence_nr") and not hasattr(node, "variable"):
                seen[node] = node._sequence_nr()
                stack += [child for child, _ in node.next_functions if child is not None]
        start = min(seen.values())
        return loss, sorted((number - start, node.name()) for node, number in seen.items())

    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        wanted, operators = run()
    finally:
        torch._C._set_mkldnn_enabled(before)
    with gt.watch(nn.Sequential(lstm)):
        found, ours = run()
    assert ours == operators
    torch.testing.assert_close(found, wanted)
    for grad, want in zip(
        torch.autograd.grad(found, list(lstm.parameters())),
        torch.autograd.grad(wanted, list(lstm.parameters())),
    ):
        torch.testing.assert_close(grad, want)


# Switches of the process ----------------------------------------------------------------------


def switches() -> tuple[object, ...]:
    return (
        torch._C._get_mkldnn_enabled(),
        torch.get_default_dtype(),
        torch.backends.mha.get_fastpath_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cudnn.enabled,
        torch._dynamo.eval_frame._stance.stance,  # type: ignore[attr-defined]
        torch.get_float32_matmul_precision(),
        torch.is_grad_enabled(),
        "lstm" in vars(torch._VF),
    )


def test_blocks_that_are_not_nested_put_switches_back() -> None:
    import torch._dynamo  # else there is no stance

    model = nn.Sequential(nn.TransformerEncoderLayer(4, 2, 4))
    before = switches()
    makers = [
        lambda: gt.watch(model),
        lambda: gt.ablate(model, "0.linear1"),
        lambda: gt.watch(model, composed=False),
        lambda: gt.ablate(model, "0.linear2"),
    ]
    for order in ([0, 1, 2, 3], [1, 0, 3, 2], [3, 2, 1, 0], [2, 0, 1, 3]):
        blocks = [make() for make in makers]
        for block in blocks:
            block.__enter__()
        model(torch.ones(1, 2, 4))
        for n in order:
            stance = torch._dynamo.eval_frame._stance.stance  # type: ignore[attr-defined]
            assert stance == "force_eager"
            blocks[n].__exit__(None, None, None)
        assert switches() == before


def test_checks_on_threads_put_the_dtype_back() -> None:
    """The first ends while the second is under way."""
    first, second = threading.Event(), threading.Event()
    before = switches()

    def slow(model: nn.Module) -> Tensor:
        first.set()
        second.wait(30)
        return model(torch.ones(1, 2)).sum()

    def ends_later(model: nn.Module) -> Tensor:
        second.set()
        thread.join(30)
        return model(torch.ones(1, 2)).sum()

    thread = threading.Thread(target=lambda: gt.check(nn.Linear(2, 1), slow))
    thread.start()
    first.wait(30)
    gt.check(nn.Linear(2, 1), ends_later)
    assert not thread.is_alive() and switches() == before
