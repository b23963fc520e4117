"""``watch``: every kind of model gets autograd's gradients, the user's names, and is left alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import programs
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import gradtrace as gt
from gradtrace.autodiff.pass_scope import own_work_runs
from gradtrace.diagnosis import ForwardRecorder
from gradtrace.errors import GradtraceError, Unsupported
from gradtrace.ir import interpreter
from gradtrace.pytorch import module_calls as calls


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def leaves_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters that need a gradient, under their first name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def assert_close(found: Tensor, wanted: Tensor) -> None:
    loose = 1e-2 if wanted.dtype is torch.bfloat16 else 1e-4
    scale = float(wanted.abs().amax()) if wanted.numel() else 0.0
    torch.testing.assert_close(found, wanted, rtol=loose, atol=loose * max(scale, 1e-3))


def check(watch: Any, loss: Tensor, leaves: dict[str, Tensor]) -> None:
    """``watch.backward`` and the program in SUM give what autograd gives, for these leaves only."""
    before = {name: leaf.grad for name, leaf in leaves.items()}
    wanted = dict(
        zip(
            leaves,
            torch.autograd.grad(loss, list(leaves.values()), retain_graph=True, allow_unused=True),
        )
    )
    present = {name: grad for name, grad in wanted.items() if grad is not None}
    found = watch.backward(loss)
    assert list(found) == list(present)
    for name, grad in present.items():
        assert found[name].dtype is grad.dtype
        assert_close(found[name], grad)
    run = interpreter.run(programs.of(watch)(loss), gt.semirings.SUM)
    assert {id(leaf) for leaf in run} == {id(leaves[name]) for name in present}
    for name, grad in present.items():
        assert_close(run[leaves[name]], grad)
    for name, leaf in leaves.items():
        assert leaf.grad is before[name]


def calls_of(watch: Any, loss: Tensor) -> set[tuple[str, int]]:
    """The module calls that made operators of this loss, leaves aside."""
    return {(o.module, o.call) for o in watch.graph(loss) if o.leaf is None}


def made_by(watch: Any, loss: Tensor, name: str) -> list[tuple[str, int]]:
    """The module calls that made the operators of that name, first made first."""
    return sorted((o.module, o.call) for o in watch.graph(loss) if o.name == name)


def hooks_of(model: nn.Module) -> int:
    return sum(
        len(m._forward_hooks)
        + len(m._forward_pre_hooks)
        + len(m._forward_hooks_always_called)
        + len(m._forward_hooks_with_kwargs)
        + len(m._backward_hooks)
        for m in model.modules()
    )


class Cell(nn.Module):
    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh()


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Cell()
        self.layers = nn.ModuleList([Cell(), nn.Sequential(Cell(), nn.ReLU(), Cell())])
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x) * self.scale
        return x


def test_modules_at_any_nesting() -> None:
    model = Nested()
    with gt.watch(model) as watch:
        loss = model(torch.randn(3, 4)).exp().sum()
    check(watch, loss, leaves_of(model))
    assert made_by(watch, loss, "AddmmBackward0") == [
        ("first.inner", 0),
        ("layers.0.inner", 0),
        ("layers.1.0.inner", 0),
        ("layers.1.2.inner", 0),
    ]
    assert made_by(watch, loss, "TanhBackward0") == [
        ("first", 0),
        ("layers.0", 0),
        ("layers.1.0", 0),
        ("layers.1.2", 0),
    ]
    assert made_by(watch, loss, "ReluBackward0") == [("layers.1.1", 0)]
    assert made_by(watch, loss, "MulBackward0") == [("", 0), ("", 0)]
    assert made_by(watch, loss, "ExpBackward0") == [("", 0)]


def test_shared_module_and_calls_are_counted() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.b = self.a

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(self.a(x)))

    model = Shared()
    with gt.watch(model) as watch:
        loss = model(torch.randn(2, 4)).sum() + model(torch.randn(2, 4)).sum()
    check(watch, loss, leaves_of(model))
    assert made_by(watch, loss, "AddmmBackward0") == [("a", n) for n in range(6)]
    graph = watch.graph(loss)
    assert graph["b.weight"] is graph["a.weight"]
    assert graph["a.weight"].names == ("a.weight", "b.weight")
    assert made_by(watch, loss, "SumBackward0") == [("", 0), ("", 0)]


def test_tied_parameters_are_one_leaf() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 4)
            self.head = nn.Linear(4, 7, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.embed(x))

    model = Tied()
    with gt.watch(model) as watch:
        loss = F.cross_entropy(model(torch.tensor([1, 2, 1])), torch.tensor([0, 3, 6]))
    check(watch, loss, leaves_of(model))
    assert watch.graph(loss)["head.weight"].names == ("embed.weight", "head.weight")
    assert list(watch.backward(loss)) == ["embed.weight"]


def test_a_leaf_with_three_names() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    for layer in model:
        layer.weight = model[0].weight
    with gt.watch(model) as watch:
        loss = model(torch.ones(1, 3)).sum()
    trace = watch.trace(loss)
    assert trace.aliases == {"0.weight": ("1.weight", "2.weight")}
    assert trace.gradients["2.weight"] is trace.gradients["0.weight"]
    assert trace.path("2.weight", (0, 1)) == trace.path("0.weight", (0, 1))


def test_the_model_called_several_times() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with gt.watch(model) as watch:
        x = torch.randn(2, 4)
        for _ in range(3):
            x = model(x)
        loss = x.sum()
    check(watch, loss, leaves_of(model))
    assert made_by(watch, loss, "AddmmBackward0") == [("0", 0), ("0", 1), ("0", 2)]
    assert made_by(watch, loss, "TanhBackward0") == [("1", 0), ("1", 1), ("1", 2)]


def test_recursion_of_one_module() -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x: Tensor, depth: int) -> Tensor:
            x = self.lin(x).sin()
            if depth:
                x = self(x, depth - 1)
            return x.cos()

    model = nn.ModuleDict({"again": Again()})
    with gt.watch(model) as watch:
        loss = model["again"](torch.randn(2, 4), 2).sum()
    check(watch, loss, leaves_of(model))
    calls = [("again", 0), ("again", 1), ("again", 2)]
    assert made_by(watch, loss, "SinBackward0") == calls
    assert made_by(watch, loss, "CosBackward0") == calls
    order = [
        (o.name, o.call) for o in watch.graph(loss) if o.name in ("CosBackward0", "SinBackward0")
    ]
    assert [call for name, call in order if name == "CosBackward0"] == [0, 1, 2]
    assert [call for name, call in order if name == "SinBackward0"] == [2, 1, 0]


def test_a_module_that_holds_its_parent() -> None:
    model = nn.ModuleDict({"lin": nn.Linear(3, 3)})
    model["lin"].parent = model
    with gt.watch(model) as watch:
        loss = model["lin"](torch.ones(1, 3)).sum()
    assert list(watch.backward(loss)) == ["lin.weight", "lin.bias"]


RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True),
    "lstm-proj": lambda: nn.LSTM(3, 4, proj_size=2),
    "gru": lambda: nn.GRU(3, 4),
    "rnn": lambda: nn.RNN(3, 4),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent(name: str) -> None:
    model = nn.ModuleDict({"rnn": RECURRENT[name](), "drop": nn.Dropout(0.5)})
    with gt.watch(model) as watch:
        out, _ = model["rnn"](torch.randn(5, 2, 3))
        loss = model["drop"](out).pow(2).mean()
    check(watch, loss, leaves_of(model))
    assert calls_of(watch, loss) == {("rnn", 0), ("drop", 0), ("", 0)}


def test_multihead_attention() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2, batch_first=True)})
    x = torch.randn(2, 5, 8)
    with gt.watch(model) as watch:
        out, _ = model["attention"](x, x, x, need_weights=False)
        loss = out.pow(2).sum()
    check(watch, loss, leaves_of(model))
    assert calls_of(watch, loss) == {("attention", 0), ("", 0)}
    names = {o.name for o in watch.graph(loss)}
    assert not any("ScaledDotProduct" in name for name in names)


def test_transformer_encoder() -> None:
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True), 2
    )
    with gt.watch(model) as watch:
        loss = model(torch.randn(2, 5, 8)).pow(2).mean()
    check(watch, loss, leaves_of(model))
    assert made_by(watch, loss, "NativeLayerNormBackward0") == [
        ("layers.0.norm1", 0),
        ("layers.0.norm2", 0),
        ("layers.1.norm1", 0),
        ("layers.1.norm2", 0),
    ]


# Exceptions -----------------------------------------------------------------------------------


def test_exception_in_a_module_leaves_nothing_behind() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("inside")

    model = nn.Sequential(nn.Linear(4, 4), Fails())
    flags = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()
    with pytest.raises(ValueError, match="inside"), gt.watch(model):
        model(torch.ones(1, 4))
    assert hooks_of(model) == 0
    assert flags == (
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
    )
    with gt.watch(model) as watch:
        loss = model[0](torch.ones(1, 4)).sum()
    check(watch, loss, leaves_of(model))
    assert made_by(watch, loss, "AddmmBackward0") == [("0", 0)]


def test_exception_in_the_block_leaves_nothing_behind() -> None:
    model = Nested()
    with pytest.raises(KeyError), gt.watch(model) as watch:
        loss = model(torch.randn(2, 4)).sum()
        raise KeyError("block")
    assert hooks_of(model) == 0
    check(watch, loss, leaves_of(model))


class Shaky(nn.Module):
    """Tries a module that fails, and goes on without it."""

    def __init__(self, fails: nn.Module) -> None:
        super().__init__()
        self.fails = fails
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.sin()
        try:
            x = self.fails(x)
        except ValueError:
            x = x.cos()
        return self.lin(x).tan()


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.lin(x)
        raise ValueError


def test_attribution_after_a_caught_exception() -> None:
    model = nn.ModuleDict({"shaky": Shaky(nn.Sequential(Deep()))})
    with gt.watch(model) as watch:
        loss = model["shaky"](torch.randn(2, 4, requires_grad=True)).exp().sum()
    for name in ("SinBackward0", "CosBackward0", "TanBackward0"):
        assert made_by(watch, loss, name) == [("shaky", 0)]
    assert made_by(watch, loss, "AddmmBackward0") == [("shaky.lin", 0)]
    assert made_by(watch, loss, "ExpBackward0") == [("", 0)]


@pytest.mark.parametrize("when", ["before", "inside"])
def test_a_pre_hook_of_the_user_that_fails(when: str) -> None:
    def fail(*_: object) -> None:
        raise ValueError

    model = nn.ModuleDict({"shaky": Shaky(nn.Tanh())})
    if when == "before":
        model["shaky"].fails.register_forward_pre_hook(fail)
    with gt.watch(model) as watch:
        if when == "inside":
            model["shaky"].fails.register_forward_pre_hook(fail, prepend=True)
        loss = model["shaky"](torch.randn(2, 4, requires_grad=True)).exp().sum()
    for name in ("SinBackward0", "CosBackward0", "TanBackward0"):
        assert made_by(watch, loss, name) == [("shaky", 0)]


# Several watches ------------------------------------------------------------------------------


def test_nested_watches_on_the_same_model() -> None:
    model = Nested()
    with gt.watch(model) as outer:
        first = model(torch.randn(2, 4)).sum()
        with gt.watch(model) as inner:
            second = model(torch.randn(2, 4)).sum()
        third = model(torch.randn(2, 4)).sum()
    assert hooks_of(model) == 0
    for loss in (first, second, third):
        check(outer, loss, leaves_of(model))
    check(inner, second, leaves_of(model))
    for call, loss in enumerate((first, second, third)):
        assert ("first.inner", call) in calls_of(outer, loss)
    assert ("first.inner", 0) in calls_of(inner, second)
    assert calls_of(inner, first) == calls_of(inner, third) == {("", 0)}


def test_nested_watch_on_a_submodule() -> None:
    model = Nested()
    with gt.watch(model) as outer, gt.watch(model.layers[1]) as inner:
        loss = model(torch.randn(2, 4)).sum()
    check(outer, loss, leaves_of(model))
    assert made_by(inner, loss, "AddmmBackward0") == [
        ("", 0),
        ("", 0),
        ("0.inner", 0),
        ("2.inner", 0),
    ]
    assert list(inner.backward(loss))[:2] == ["0.inner.weight", "0.inner.bias"]


def test_watches_that_overlap_put_the_switches_back() -> None:
    model = nn.Linear(2, 2)
    assert torch.backends.cuda.flash_sdp_enabled()
    first, second = gt.watch(model), gt.watch(model)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not torch.backends.cuda.flash_sdp_enabled()
    second.__exit__(None, None, None)
    assert torch.backends.cuda.flash_sdp_enabled()
    assert hooks_of(model) == 0


def test_a_watch_opened_again_counts_on() -> None:
    model = nn.Linear(2, 2)
    watch = gt.watch(model)
    with watch:
        first = model(torch.ones(1, 2)).sum()
    between = model(torch.ones(1, 2)).sum()
    with watch:
        second = model(torch.ones(1, 2)).sum()
    assert made_by(watch, first, "AddmmBackward0") == [("", 0)]
    assert watch.graph(second).operators[1].call == 1
    for loss in (first, between, second):
        check(watch, loss, leaves_of(model))


def test_concurrent_watches_see_their_own_calls() -> None:
    model = Nested()
    ready, done = threading.Barrier(2), threading.Barrier(2)
    found: dict[int, tuple[Any, Tensor]] = {}
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            x = torch.full((2, 4), float(number))
            with gt.watch(model) as watch:
                ready.wait(30)
                for _ in range(number):
                    loss = model(x).sum()
                done.wait(30)
            check(watch, loss, leaves_of(model))
            assert ("first.inner", number - 1) in calls_of(watch, loss)
            found[number] = watch, loss
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in (1, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
    assert hooks_of(model) == 0
    assert torch.backends.cuda.flash_sdp_enabled()
    for watch, loss in found.values():  # from this thread, too
        check(watch, loss, leaves_of(model))


def test_a_watch_belongs_to_one_thread() -> None:
    watch = gt.watch(nn.Linear(2, 2))
    with watch:
        pass
    failed: list[BaseException] = []

    def work() -> None:
        try:
            watch.__enter__()
        except GradtraceError as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "another thread" in str(failed[0])


# Compiled modules and wrappers ----------------------------------------------------------------


@pytest.fixture
def dynamo() -> Iterator[None]:
    import torch._dynamo

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_model(model: Nested) -> nn.Module:
    return torch.compile(model, backend="aot_eager")  # type: ignore[return-value]


def compiled_part(model: Nested) -> nn.Module:
    model.layers[1] = torch.compile(model.layers[1], backend="aot_eager")  # type: ignore[assignment]
    return model


def compiled_in_place(model: Nested) -> nn.Module:
    model.first.compile(backend="aot_eager")
    model.compile(backend="aot_eager")
    return model


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("how", [compiled_model, compiled_part, compiled_in_place])
@pytest.mark.usefixtures("dynamo")
@pytest.mark.filterwarnings("ignore")
def test_compiled_modules_run_eagerly(how: Callable[[Nested], nn.Module], warm: bool) -> None:
    plain = Nested()
    leaves = leaves_of(plain)
    model = how(plain)
    if warm:
        model(torch.randn(3, 4)).sum()
    with gt.watch(model) as watch:
        loss = model(torch.randn(3, 4)).sum() + model(torch.randn(3, 4)).sum()
    check(watch, loss, leaves)
    assert made_by(watch, loss, "TanhBackward0") == [
        (name, call)
        for name in ("first", "layers.0", "layers.1.0", "layers.1.2")
        for call in (0, 1)
    ]
    assert made_by(watch, loss, "ReluBackward0") == [("layers.1.1", 0), ("layers.1.1", 1)]
    assert torch._dynamo.eval_frame._stance.stance == "default"  # type: ignore[attr-defined]


class Doubled(nn.Linear):
    """What is called does more than its forward."""

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        return super()._call_impl(*args, **kwargs) * 2


class Inherits(nn.Linear):
    """Has the forward of the class above."""


def with_its_own_forward(linear: nn.Linear) -> nn.Linear:
    linear.forward = lambda x: x * 3  # type: ignore[method-assign]
    return linear


def with_a_hook(linear: nn.Linear) -> nn.Linear:
    linear.register_forward_hook(lambda module, given, out: out.exp())
    return linear


VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
PARTS: dict[str, tuple[nn.Module, bool]] = {  # and whether torch 2.6 makes one graph of it
    "plain": (nn.Linear(4, 4), True),
    "inherited forward": (Inherits(4, 4), True),
    "own implementation": (Doubled(4, 4), False),
    "own forward": (with_its_own_forward(nn.Linear(4, 4)), False),
    "hook": (with_a_hook(nn.Linear(4, 4)), False),
}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.usefixtures("dynamo")
@pytest.mark.filterwarnings("ignore")
def test_modules_can_be_compiled_while_somebody_listens(name: str) -> None:
    if name == "own forward" and (2, 9) <= VERSION < (2, 13):
        pytest.skip("the compiler of torch 2.9 to 2.12 refuses a forward that is set on a module")
    part, whole = PARTS[name]
    model, x = nn.Sequential(nn.Linear(4, 4), part), torch.randn(2, 4)
    wanted = model(x)
    stop = calls.listen(calls.Listener(), model.modules())
    try:
        compiled = torch.compile(model, backend="eager", fullgraph=whole)
        assert torch.equal(compiled(x), wanted)
    finally:
        stop()


@pytest.mark.usefixtures("dynamo")
@pytest.mark.filterwarnings("ignore")
def test_a_loss_compiled_outside_is_refused() -> None:
    model = nn.Linear(4, 4)
    compiled = torch.compile(lambda x: model(x).tanh().sum(), backend="aot_eager")
    loss = compiled(torch.randn(2, 4))
    assert loss.grad_fn.name().startswith("CompiledFunction")
    for ask in (gt.backward, programs.program):
        with pytest.raises(Unsupported, match=r"CompiledFunctionBackward .*gradtrace\.watch"):
            ask(loss)
    assert model.weight.grad is None


def test_data_parallel() -> None:
    model = Nested()
    wrapped = nn.DataParallel(model)
    with gt.watch(wrapped) as watch:
        loss = wrapped(torch.randn(2, 4)).sum()
    check(watch, loss, leaves_of(model))
    assert ("layers.1.0.inner", 0) in calls_of(watch, loss)


def test_a_wrapper_inside_a_model() -> None:
    inner = Nested()
    model = nn.Sequential(nn.Linear(4, 4), nn.DataParallel(inner))
    with gt.watch(model) as watch:
        loss = model(torch.randn(2, 4)).sum()
    leaves = {f"0.{name}": p for name, p in model[0].named_parameters()}
    leaves |= {f"1.{name}": p for name, p in inner.named_parameters()}
    check(watch, loss, leaves)
    assert made_by(watch, loss, "MulBackward0") == [("1", 0), ("1", 0)]


@pytest.mark.filterwarnings("ignore")
def test_distributed_data_parallel(tmp_path: Any) -> None:
    dist = torch.distributed
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("no gloo")
    store = dist.FileStore(str(tmp_path / "store"), 1)
    try:
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    except RuntimeError as error:
        pytest.skip(str(error))
    try:
        model = Nested()
        wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        with gt.watch(wrapped) as watch:
            loss = wrapped(torch.randn(2, 4)).sum()
        check(watch, loss, leaves_of(model))
        assert ("layers.1.0.inner", 0) in calls_of(watch, loss)
        static = nn.parallel.DistributedDataParallel(model, static_graph=True)
        for _ in range(3):
            with gt.watch(static) as watch:
                loss = static(torch.randn(2, 4)).sum()
            found = watch.backward(loss)
            check(watch, loss, leaves_of(model))
            model.zero_grad()
            loss.backward()  # reduces gradients at its end, which a trace must not do
            for name, parameter in leaves_of(model).items():
                torch.testing.assert_close(found[name], parameter.grad)
    finally:
        dist.destroy_process_group()


# Checkpoints ----------------------------------------------------------------------------------


class Counted(nn.Module):
    """A block that counts its calls, and remembers the masks that it drew."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.drop(self.lin(x).tanh()).sin()


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Counted(), Counted()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    def counts(self) -> list[int]:
        return [block.calls for block in self.blocks]


def test_checkpoint() -> None:
    model = Checkpointed()
    with gt.watch(model) as watch:
        loss = model(torch.randn(3, 4)).sum()
    assert model.counts() == [1, 1]
    watch.backward(loss)
    assert model.counts() == [2, 2]
    programs.of(watch)(loss)
    assert model.counts() == [3, 3]
    check(watch, loss, leaves_of(model))
    assert made_by(watch, loss, "SinBackward0") == [("blocks.0", 0), ("blocks.1", 0)]


@pytest.mark.parametrize("way", ["ours", "program", "torch"])
def test_backward_inside_the_block_disturbs_no_counts(way: str) -> None:
    model = Checkpointed()
    with gt.watch(model) as watch:
        first = model(torch.randn(3, 4)).sum()
        if way == "ours":
            watch.backward(first)
        elif way == "program":
            programs.of(watch)(first)
        else:
            torch.autograd.grad(first, list(model.parameters()), retain_graph=True)
        between = first.exp()
        second = model(torch.randn(3, 4)).sum() + between
    check(watch, second, leaves_of(model))
    assert made_by(watch, second, "SinBackward0") == [
        ("blocks.0", 0),
        ("blocks.0", 1),
        ("blocks.1", 0),
        ("blocks.1", 1),
    ]
    assert made_by(watch, second, "ExpBackward0") == [("", 0)]


def test_backward_inside_a_module() -> None:
    class Inner(nn.Module):
        """Descends once on a copy of its input, as models with an inner loop do."""

        def __init__(self) -> None:
            super().__init__()
            self.part = Checkpointed()

        def forward(self, x: Tensor) -> Tensor:
            y = x.detach().requires_grad_()
            (step,) = torch.autograd.grad(self.part(y).sum(), y)
            return self.part(x - step).cos()

    model = nn.ModuleDict({"inner": Inner()})
    with gt.watch(model) as watch:
        loss = model["inner"](torch.randn(2, 4)).sum()
    check(watch, loss, leaves_of(model))
    assert made_by(watch, loss, "SinBackward0") == [
        ("inner.part.blocks.0", 1),
        ("inner.part.blocks.1", 1),
    ]
    assert made_by(watch, loss, "CosBackward0") == [("inner", 0)]


class Attending(nn.Module):
    """Fused attention, or an LSTM, in a checkpoint."""

    def __init__(self, recurrent: bool) -> None:
        super().__init__()
        self.inner: nn.Module = nn.LSTM(8, 8) if recurrent else nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._block, x, use_reentrant=False)  # type: ignore[no-any-return]

    def _block(self, x: Tensor) -> Tensor:
        if isinstance(self.inner, nn.LSTM):
            return self.inner(x)[0]  # type: ignore[no-any-return]
        parts = self.inner(x).view(2, 5, 2, 12).transpose(1, 2).chunk(3, -1)
        heads = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        return heads.transpose(1, 2).reshape(2, 5, 8)


@pytest.mark.parametrize("recurrent", [False, True])
def test_composed_kernels_are_composed_again_in_checkpoints(recurrent: bool) -> None:
    """Also when the watch is closed, by a trace and by PyTorch's own pass."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Attending(recurrent), Attending(recurrent)), torch.randn(2, 5, 8)
    before = vars(torch.utils.checkpoint)["_CheckpointFrame"]
    with gt.watch(model) as watch:
        loss = model(x).square().mean()
    assert vars(torch.utils.checkpoint)["_CheckpointFrame"] is before
    trace = watch.trace(loss)
    assert {row.name for row in trace.influence()} >= {"0.inner", "1.inner"}
    loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(trace.gradients[name], parameter.grad)
    composed = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    model(x).square().mean().backward()  # outside of a watch, by fused kernels
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, composed[name])


def test_nested_checkpoints() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Checkpointed()
            self.lin = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda x: self.inner(self.lin(x).exp()), x, use_reentrant=False)

    model = Outer()
    with gt.watch(model) as watch:
        loss = model(torch.randn(3, 4)).sum()
    check(watch, loss, leaves_of(model))
    first = model.inner.counts()
    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    second = model.inner.counts()
    watch.backward(loss)
    third = model.inner.counts()
    assert [b - a for a, b in zip(first, second)] == [b - a for a, b in zip(second, third)]


def test_reentrant_checkpoint_is_refused() -> None:
    class Reentrant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Counted()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x, use_reentrant=True)

    model = nn.ModuleDict({"r": Reentrant()})
    with gt.watch(model) as watch:
        loss = model["r"](torch.randn(3, 4, requires_grad=True)).sum()
    for ask in (watch.backward, programs.of(watch)):
        with pytest.raises(
            Unsupported, match=r"CheckpointFunctionBackward \(in r\).*use_reentrant=False"
        ):
            ask(loss)
    assert all(p.grad is None for p in model.parameters())
    assert model["r"].block.calls == 1


# Number formats -------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_autocast(inside: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 4))
    with gt.watch(model) as watch, torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(torch.randn(4, 8)), torch.tensor([0, 1, 2, 3]))
    with torch.autocast("cpu", torch.bfloat16, enabled=inside):
        leaves = leaves_of(model)
        wanted = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True)
        found = watch.backward(loss)
    for (name, grad), want in zip(found.items(), wanted):
        assert name in leaves and grad.dtype is want.dtype
        torch.testing.assert_close(grad, want, rtol=0, atol=0)
    run = interpreter.run(programs.of(watch)(loss), gt.semirings.SUM)
    for leaf, want in zip(leaves.values(), wanted):  # rounded elsewhere, to 8 bits
        torch.testing.assert_close(run[leaf], want, rtol=0, atol=0.02 * float(want.abs().amax()))
    assert made_by(watch, loss, "AddmmBackward0") == [("0", 0), ("3", 0)]


def test_bfloat16_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(torch.bfloat16)
    with gt.watch(model) as watch:
        loss = model(torch.randn(2, 4, dtype=torch.bfloat16)).sum()
    check(watch, loss, leaves_of(model))


# Parameters from elsewhere --------------------------------------------------------------------


def test_functional_call() -> None:
    model = nn.ModuleDict({"net": nn.Sequential(Cell(), nn.MultiheadAttention(4, 2))})
    model.forward = lambda x: model["net"][1](*[model["net"][0](x)] * 3)[0]  # type: ignore[assignment]
    other = {name: (p.detach() + 0.1).requires_grad_() for name, p in model.named_parameters()}
    with gt.watch(model) as watch:
        loss = functional_call(model, other, torch.randn(2, 4)).pow(2).sum()
    check(watch, loss, other)
    assert made_by(watch, loss, "TanhBackward0") == [("net.0", 0)]


def test_functional_call_beside_the_model() -> None:
    model = nn.Linear(2, 2)
    several = [
        {name: (p.detach() + n).requires_grad_() for name, p in model.named_parameters()}
        for n in range(2)
    ]
    x = torch.randn(3, 2)
    with gt.watch(model) as watch:
        loss = model(x).sin().sum()
        for other in several:
            loss = loss + functional_call(model, other, x).sin().sum()
    found = watch.backward(loss)
    assert list(found) == ["weight", "bias", "weight@1", "bias@1", "weight@2", "bias@2"]
    leaves = [*model.parameters(), *several[0].values(), *several[1].values()]
    wanted = torch.autograd.grad(loss, leaves, retain_graph=True)
    for ours, grad in zip(found.values(), wanted):
        assert_close(ours, grad)


@pytest.mark.parametrize(
    "constrain",
    [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        lambda m: parametrizations.orthogonal(m, orthogonal_map="matrix_exp"),
        lambda m: parametrizations.orthogonal(m, orthogonal_map="cayley"),
        lambda m: parametrizations.orthogonal(m, orthogonal_map="householder"),
    ],
    ids=["weight_norm", "spectral_norm", "matrix_exp", "cayley", "householder"],
)
def test_parametrizations(constrain: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(constrain(nn.Linear(3, 3)), nn.Tanh(), nn.Linear(3, 2))
    with gt.watch(model) as watch:
        loss = model(torch.randn(4, 3)).pow(2).sum()
    check(watch, loss, leaves_of(model))
    assert {module for module, _ in calls_of(watch, loss)} >= {
        "0",
        "0.parametrizations.weight.0",
        "1",
    }


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_old_weight_norm() -> None:
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 3)), nn.Tanh())
    with gt.watch(model) as watch:
        loss = model(torch.randn(4, 3)).pow(2).sum()
    check(watch, loss, leaves_of(model))
    assert calls_of(watch, loss) == {("0", 0), ("1", 0), ("", 0)}


# Custom functions -----------------------------------------------------------------------------


class Weighted(torch.autograd.Function):
    """Arguments that are no tensors in between, and one that gets no gradient."""

    @staticmethod
    def forward(ctx: Any, factor: float, a: Tensor, note: str, b: Tensor, c: Tensor) -> Tensor:
        ctx.factor = factor
        ctx.save_for_backward(a, b)
        return factor * a * b + c

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        a, b = ctx.saved_tensors
        return None, ctx.factor * b * grad, None, ctx.factor * a * grad, None


class Three(torch.autograd.Function):
    """Several outputs; missing cotangents are filled with zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(x, y)
        return x * y, x + y, x.exp()

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor, k: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return g * y + h + k * x.exp(), g * x + h


class ThreeNone(torch.autograd.Function):
    """Several outputs; missing cotangents are None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, y)
        return x * y, x + y, x.exp()

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, h: Tensor | None, k: Tensor | None) -> Any:
        assert g is None or h is None or k is None, "some output is unused in every test"
        x, y = ctx.saved_tensors
        gx = gy = None
        if g is not None:
            gx, gy = g * y, g * x
        if h is not None:
            gx, gy = h if gx is None else gx + h, h if gy is None else gy + h
        if k is not None:
            gx = k * x.exp() if gx is None else gx + k * x.exp()
        return gx, gy


class Double(torch.autograd.Function):
    """In place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class Custom(nn.Module):
    def __init__(self, f: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.f = f
        self.a, self.b, self.c = (nn.Parameter(torch.randn(3)) for _ in range(3))

    def forward(self) -> Tensor:
        return self.f(self.a, self.b, self.c)


CUSTOM: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "weighted": lambda a, b, c: Weighted.apply(2.0, a, "note", b, c),
    "weighted-constant": lambda a, b, c: Weighted.apply(2.0, a.detach(), "note", b, c) * c,
    "first": lambda a, b, c: Three.apply(a, b)[0] * c,
    "second": lambda a, b, c: Three.apply(a * c, b)[1],
    "both": lambda a, b, c: (lambda o: o[0] * o[2] * c)(Three.apply(a, b)),
    "none-first": lambda a, b, c: ThreeNone.apply(a, b)[0] * c,
    "none-third": lambda a, b, c: ThreeNone.apply(a * c, b)[2],
    "none-two": lambda a, b, c: (lambda o: o[1] * o[2] * c)(ThreeNone.apply(a, b)),
    "same-twice": lambda a, b, c: Three.apply(a, a)[0] * b * c,
    "in-place": lambda a, b, c: Double.apply(a * b) * c,
    "in-place-view": lambda a, b, c: (lambda t: (Double.apply(t), t * c)[1])(a * b),
}


@pytest.mark.parametrize("hooked", [False, True], ids=["free", "hooked"])
@pytest.mark.parametrize("name", CUSTOM)
def test_custom_functions(name: str, hooked: bool) -> None:
    model = nn.ModuleDict({"custom": Custom(CUSTOM[name])})
    if hooked:
        for p in model.parameters():
            p.register_hook(lambda grad: None if grad is None else 3 * grad)
    with gt.watch(model) as watch:
        out = model["custom"]()
        if hooked:
            out.grad_fn.register_prehook(
                lambda grads: tuple(None if g is None else 2 * g for g in grads)
            )
            out.register_hook(lambda grad: 5 * grad)
        loss = out.sin().sum()
    check(watch, loss, leaves_of(model))
    custom = [o for o in watch.graph(loss) if o.name.startswith(("Weighted", "Three", "Double"))]
    assert [(o.module, o.call) for o in custom] == [("custom", 0)]


def test_library_operator() -> None:
    @torch.library.custom_op("gradtrace_test::halve", mutates_args=())
    def halve(x: Tensor, y: Tensor) -> Tensor:
        return x * y / 2

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    def back(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return grad * y / 2, grad * x / 2

    halve.register_autograd(back, setup_context=setup)
    model = nn.ModuleDict({"custom": Custom(lambda a, b, c: halve(a, b) * c)})
    with gt.watch(model) as watch:
        loss = model["custom"]().sum()
    check(watch, loss, leaves_of(model))


def test_a_function_that_returns_the_wrong_number() -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            return a * b

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return grad

    model = nn.ModuleDict({"custom": Custom(lambda a, b, c: Wrong.apply(a, b) * c)})
    with gt.watch(model) as watch:
        loss = model["custom"]().sum()
    for ask in (watch.backward, programs.of(watch)):
        with pytest.raises(Unsupported, match=r"WrongBackward \(in custom\).*2 gradients"):
            ask(loss)


def test_a_function_that_returns_the_wrong_shape() -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor) -> Tensor:
            return a * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad.new_ones(5)

    x = torch.ones(3, requires_grad=True)
    with pytest.raises(GradtraceError, match=r"shape \(5,\) for a value of shape \(3,\)"):
        gt.backward(Wrong.apply(x).sum())


# Nothing is changed ---------------------------------------------------------------------------


def test_the_graph_can_be_used_again() -> None:
    model = Nested()
    with gt.watch(model) as watch:
        loss = model(torch.randn(2, 4)).sum()
    first, second = watch.backward(loss), watch.backward(loss)
    program = programs.of(watch)(loss)
    loss.backward()
    run = interpreter.run(program, gt.semirings.SUM)
    for name, p in model.named_parameters():
        assert torch.equal(first[name], second[name])
        assert_close(first[name], p.grad)
        assert_close(run[p], p.grad)


def test_results_do_not_alias_grad() -> None:
    w = torch.ones(3, requires_grad=True)
    loss = w.sum() + (w * 1).sum()
    found = gt.backward(loss, names={"w": w})["w"].clone()
    loss.backward()
    assert torch.equal(found, w.grad)


def test_nothing_is_written_on_the_model() -> None:
    model = Nested().eval()
    model.first.requires_grad_(False)
    model.scale.grad = kept = torch.full((4,), 7.0)
    handle = model.first.register_forward_hook(lambda *_: None)
    names = dict(vars(model.first)).keys()
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    with gt.watch(model) as watch:
        loss = model(torch.randn(2, 4)).sum()
    check(watch, loss, leaves_of(model))
    assert model.scale.grad is kept and torch.equal(kept, torch.full((4,), 7.0))
    assert all(p.grad is None for p in model.parameters() if p is not model.scale)
    assert flags == {name: p.requires_grad for name, p in model.named_parameters()}
    assert not any(m.training for m in model.modules())
    assert vars(model.first).keys() == names
    assert hooks_of(model) == 1 and handle.id in model.first._forward_hooks


# What goes in and out of models ---------------------------------------------------------------


@pytest.mark.parametrize("kind", [dict, tuple, list])
def test_outputs_of_any_kind(kind: type) -> None:
    class Outs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, *, x: Tensor) -> Any:
            pairs = {"a": self.a(x), "b": self.b(x)}
            return pairs if kind is dict else kind(pairs.values())

    model = Outs()
    with gt.watch(model) as watch:
        out = model(x=torch.ones(2, 3))
        loss = (out["b"] if kind is dict else out[1]).sum()
    check(watch, loss, leaves_of(model))
    assert list(watch.backward(loss)) == ["b.weight", "b.bias"]  # a takes no part


def test_transformers_bert() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=10,
    )
    model = transformers.BertForMaskedLM(config)
    tokens = torch.tensor([[1, 2, 3, 4], [4, 5, 6, 7]])
    with gt.watch(model) as watch:
        output = model(input_ids=tokens, labels=tokens)
    check(watch, output.loss, leaves_of(model))
    graph = watch.graph(output.loss)
    tied = graph["bert.embeddings.word_embeddings.weight"]
    assert "cls.predictions.decoder.weight" in tied.names
    norms = made_by(watch, output.loss, "NativeLayerNormBackward0")
    assert ("bert.encoder.layer.1.output.LayerNorm", 0) in norms
    assert ("bert.embeddings.LayerNorm", 0) in norms


def test_a_model_with_buffers_only() -> None:
    model = nn.BatchNorm1d(3, affine=False)
    x = torch.randn(5, 3, requires_grad=True)
    with gt.watch(model) as watch:
        loss = model(x).pow(3).sum()
    check(watch, loss, {"leaf0": x})


def test_frozen_parameters_and_inputs() -> None:
    model = Nested()
    model.first.requires_grad_(False)
    x, y = torch.randn(2, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    with gt.watch(model) as watch:
        loss = (model(x) * y).sum()
    graph = watch.graph(loss)
    extra = [o.leaf for o in graph if o.leaf and o.leaf.startswith("leaf")]
    assert sorted(extra) == ["leaf0", "leaf1"]
    inputs = {(2, 4): x, (4,): y}
    check(watch, loss, leaves_of(model) | {n: inputs[graph[n].shape] for n in ("leaf0", "leaf1")})
    names = {"x": x, "y": y} | leaves_of(model)
    assert list(gt.backward(loss, names=names)) == list(names)


@pytest.mark.parametrize("schedule", ["kahn", "creation", "recursive"])
def test_unnamed_leaves_are_numbered_as_in_the_graph(schedule: str) -> None:
    class Silent(torch.autograd.Function):
        """Gives its first argument nothing."""

        @staticmethod
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            return a[0] + b

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return None, grad

    leaves = [torch.randn(n, requires_grad=True) for n in (2, 3, 4, 5)]
    a, b, c, d = leaves
    loss = Silent.apply(a, b).sum() * c.sum() + d.exp().sum() * b.sum()
    graph = gt.graph(loss)
    found = gt.backward(loss, schedule=schedule)
    assert {name: tuple(g.shape) for name, g in found.items()} == {
        name: o.shape for name, o in graph.leaves.items() if o.shape != (2,)
    }


def test_the_order_is_that_of_the_model() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for n in (2, 0, 3, 1):
                x = self.parts[n](x)
            return x

    model = Backwards()
    with gt.watch(model) as watch:
        loss = model(torch.ones(1, 3)).sum()
    for schedule in ("kahn", "creation", "recursive"):
        assert list(watch.backward(loss, schedule=schedule)) == list(leaves_of(model))
    assert list(watch.backward(loss, leaves=["parts.3.bias", "parts.0.bias"])) == [
        "parts.3.bias",
        "parts.0.bias",
    ]


def test_a_loss_that_is_not_of_the_model() -> None:
    w = torch.ones(3, requires_grad=True)
    with gt.watch(nn.Linear(2, 2)) as watch:
        loss = (w * w).sum()
    check(watch, loss, {"leaf0": w})


def test_operators_made_outside_lie_nowhere() -> None:
    model = nn.Linear(3, 3)
    before = torch.ones(1, 3, requires_grad=True).sin()
    with gt.watch(model) as watch:
        out = model(before).cos()
    loss = out.tan().sum()
    wrapped = nn.Sequential(model)
    assert watch.graph(loss).root.module == ""
    with gt.watch(wrapped) as second:
        again = wrapped(before)
    later = wrapped(again).sum()
    assert made_by(second, later, "AddmmBackward0") == [("", 0), ("0", 0)]


class Late:
    """A model whose loss can be computed inside a watch, around it, or in part."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
        self.x = torch.ones(2, 3, requires_grad=True)

    def loss(self) -> torch.Tensor:
        return self.model(self.x).sum()


@pytest.mark.parametrize("ask", ["trace", "diagnose", "attribute"])
@pytest.mark.parametrize("when", ["before", "after", "never"])
def test_a_loss_of_a_forward_pass_outside_the_watch_warns(when: str, ask: str) -> None:
    late = Late()
    loss, watch = late.loss(), gt.watch(late.model, names={"x": late.x})
    if when != "never":
        with watch:
            late.loss()
    if when == "after":
        loss = late.loss()
    told = "was never open" if when == "never" else "a forward pass outside the watch"
    with pytest.warns(UserWarning, match=f"{told}.*run the forward pass inside") as caught:
        getattr(watch, ask)(loss, *([{"x": late.x}] if ask == "attribute" else []))
    assert [each.filename for each in caught] == [__file__]


def test_a_loss_of_before_warns_while_the_watch_is_open() -> None:
    late = Late()
    loss = late.loss()
    with (
        gt.watch(late.model) as watch,
        pytest.warns(UserWarning, match="before it was opened"),
    ):
        watch.trace(loss * 2)


@pytest.mark.parametrize("ask", ["trace", "influence", "mass", "backward", "diagnose"])
def test_an_open_watch_records_the_forward_pass_alone(ask: str) -> None:
    """And not what gradtrace computes while it is open."""
    late = Late()
    with gt.watch(late.model) as watch:
        loss = late.loss()
        record = watch._record
        assert record is not None
        count = len(record.operations)
        if ask == "backward":
            gt.backward(loss)
        elif ask == "diagnose":
            watch.diagnose(loss)
        else:
            trace = watch.trace(loss)
            if ask != "trace":
                getattr(trace, ask)()
        assert len(record.operations) == count > 0


def test_modules_that_ran_after_the_watch_was_closed_are_named() -> None:
    late = Late()
    with gt.watch(late.model) as watch:
        hidden = late.model[0](late.x)
    with pytest.warns(UserWarning, match=r"closed \(what uses 2.bias, 2.weight\)"):
        watch.trace(late.model[2](hidden).sum())


def test_what_may_lie_outside_the_watch_does_not_warn() -> None:
    late = Late()
    with gt.watch(late.model) as watch:
        out = late.model(late.x)
        inside = late.model[0].weight.square().sum()
        watch.trace(inside)  # a term of parameters alone
        watch.trace(nn.functional.linear(out, late.model[2].weight.t()).sum())
    outside = sum(each.square().sum() for each in late.model.parameters())
    watch.trace(out.sum() + outside + (out * late.x.mean()).sum())  # as training loops have it
    with watch:  # opened again
        again = late.loss()
    watch.trace(again + out.sum())
    watch.trace(inside + late.x.sum())


def test_what_a_trace_computes_is_not_shown_to_an_open_watch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To be asked about each of its operations takes longer than the trace; afterwards all is
    recorded again.
    """
    seen, own = list[bool](), ForwardRecorder.__torch_function__

    def counted(self: ForwardRecorder, *call: Any) -> Any:
        seen.append(own_work_runs())
        return own(self, *call)

    monkeypatch.setattr(ForwardRecorder, "__torch_function__", counted)
    model = nn.Linear(3, 2)
    with gt.watch(model) as watch:
        loss = model(torch.ones(1, 3)).sum()
        forward = len(seen)
        watch.trace(loss).influence()
        assert len(seen) == forward > 0
        loss + 1
        assert len(seen) > forward
    assert True not in seen
