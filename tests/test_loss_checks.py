"""What is switched on around a call changes nothing; what cannot be followed is refused."""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import gradtrace as gt
from gradtrace.errors import GradtraceError, NoGraph, Unsupported

Leaves = dict[str, Tensor]

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
"""Forward-mode AD of PyTorch's own uses it."""


def asked(loss: Tensor, leaves: Leaves) -> dict[str, Any]:
    """All that can be asked of a loss."""
    trace = gt.trace(loss, names=leaves)
    name = next(iter(trace.gradients))
    found: dict[str, Any] = {
        semiring.name: {k: v.tolist() for k, v in gt.backward(loss, semiring, names=leaves).items()}
        for semiring in (gt.semirings.SUM, gt.semirings.MAX, gt.semirings.COUNT)
    }
    found["path"] = trace.path(name, (0,) * leaves[name].dim()).weight
    found["sampled"] = [path.weight for path in trace.paths(sample=20)]
    found["best"] = [path.weight for path in trace.paths(name, k=2)]
    found["influence"] = str(trace.influence("operators"))
    found["flow"] = str(trace.norms())
    viterbi = gt.trace(loss, names=leaves, rule="viterbi")
    found["viterbi"] = str(viterbi.influence("operators"))
    found["program"] = len(programs.program(loss, names=leaves).blocks)
    return found


class Model:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3))
        self.x, self.target = torch.randn(6, 4), torch.arange(6) % 3
        self.leaves = dict(self.net.named_parameters())
        self.wanted = asked(self.loss(), self.leaves)

    def loss(self, net: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        return cross_entropy((net or self.net)(self.x), self.target)


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


class Silent(TorchDispatchMode):
    """Sees no product: a trace is no part of what the caller computes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "mm" not in func.name()
        return func(*args, **(kwargs or {}))


class Doubling(TorchFunctionMode):
    """Doubles all that is computed: a trace is no part of what the caller computes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        asks = func.__name__ in ("__get__", "detach")  # for an attribute
        return found * 2 if isinstance(found, Tensor) and not asks else found


@contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def all_of(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        yield


AROUND: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default device": lambda: default_device("meta"),
    "device context": lambda: torch.device("meta"),
    "default float64": lambda: default_dtype(torch.float64),
    "default float16": lambda: default_dtype(torch.float16),
    "deterministic": deterministic,
    "dispatch mode": Silent,
    "flop counter": lambda: FlopCounterMode(display=False),
    "function mode": Doubling,
    "function mode and device": lambda: all_of(torch.device("meta"), Doubling(), Doubling()),
    "dual level": forward_ad.dual_level,
    "saved hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
}


@pytest.mark.parametrize("name", AROUND)
def test_what_is_switched_on_around_a_call_changes_nothing(name: str, model: Model) -> None:
    loss = model.loss()
    with AROUND[name]():
        found = asked(loss, model.leaves)
    assert found == model.wanted


def test_a_trace_made_before_is_asked_in_inference_mode(model: Model) -> None:
    trace = gt.trace(model.loss(), names=model.leaves)
    with torch.inference_mode():
        assert str(trace.influence("operators")) == model.wanted["influence"]
        assert [path.weight for path in trace.paths(sample=20)] == model.wanted["sampled"]


def test_losses_of_dual_numbers(model: Model) -> None:
    with forward_ad.dual_level():
        x = forward_ad.make_dual(model.x, torch.ones_like(model.x))
        assert asked(cross_entropy(model.net(x), model.target), model.leaves) == model.wanted


def test_another_thread(model: Model) -> None:
    loss, found = model.loss(), []
    thread = threading.Thread(target=lambda: found.append(asked(loss, model.leaves)))
    thread.start()
    thread.join()
    assert found == [model.wanted]


def test_a_cotangent_made_in_inference_mode() -> None:
    x = torch.randn(2, requires_grad=True)
    with torch.inference_mode():
        cotangent = torch.ones(2)
    assert gt.backward(x * 2, names={"x": x}, cotangent=cotangent)["x"].tolist() == [2, 2]
    for semiring in (gt.semirings.MAX, gt.semirings.COUNT):
        assert "x" in gt.backward(x * 2, semiring, names={"x": x}, cotangent=cotangent)


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp", "a loss from outside"])
def test_inside_a_transform_of_torch_func(transform: str, model: Model) -> None:
    def function(x: Tensor) -> Tensor:
        gt.trace((x * x).sum())
        return x.sum()

    outside = model.loss()
    calls: dict[str, Callable[[], Any]] = {
        "vmap": lambda: torch.func.vmap(function)(model.x),
        "grad": lambda: torch.func.grad(function)(model.x),
        "jvp": lambda: torch.func.jvp(function, (model.x,), (model.x,)),
        "a loss from outside": lambda: torch.func.vmap(lambda x: (gt.backward(outside), x)[1])(
            model.x
        ),
    }
    with pytest.raises(NoGraph, match=r"inside a transform of torch\.func .* trace it outside"):
        calls[transform]()


@pytest.mark.filterwarnings("ignore")  # TorchScript is deprecated
def test_a_graph_that_torchscript_has_optimised(model: Model) -> None:
    """It is one node; what is inside are operators all the same, so values are those of eager."""
    scripted = torch.jit.script(model.net)
    for _ in range(4):
        loss = model.loss(scripted)
    leaves = dict(scripted.named_parameters())
    found = asked(loss, leaves)
    for semiring in ("SUM", "MAX", "COUNT"):
        for name, value in model.wanted[semiring].items():
            torch.testing.assert_close(torch.tensor(found[semiring][name]), torch.tensor(value))
    assert found["path"] == pytest.approx(model.wanted["path"])


# What cannot be followed -------------------------------------------------------------------------


def meta() -> tuple[Tensor, Leaves]:
    layer = nn.Linear(3, 1, device="meta")
    return layer(torch.randn(2, 3, device="meta")).sum(), dict(layer.named_parameters())


def parts() -> Leaves:
    return {"a": torch.randn(2, 3, requires_grad=True), "b": torch.randn(3, 3, requires_grad=True)}


def nested() -> tuple[Tensor, Leaves]:
    leaves = parts()
    both = torch.nested.as_nested_tensor(list(leaves.values()))
    return torch.nested.to_padded_tensor(both * 2, 0.0).pow(2).sum(), leaves


def nested_loss() -> tuple[Tensor, Leaves]:
    leaves = parts()
    return torch.nested.as_nested_tensor(list(leaves.values())), leaves


def jagged() -> tuple[Tensor, Leaves]:
    leaves = parts()
    both = torch.nested.as_nested_tensor(list(leaves.values()), layout=torch.jagged)
    return (both * 2).values().pow(2).sum(), leaves


def mkldnn() -> tuple[Tensor, Leaves]:
    x = torch.randn(2, 3, requires_grad=True)
    return x.to_mkldnn().to_dense().pow(2).sum(), {"x": x}


def float8() -> tuple[Tensor, Leaves]:
    x = torch.randn(3, requires_grad=True)
    return x.to(torch.float8_e4m3fn), {"x": x}


def float8_inside() -> tuple[Tensor, Leaves]:
    x = torch.randn(3, requires_grad=True)
    return x.to(torch.float8_e4m3fn).float().sum(), {"x": x}


def sparse_gradient() -> tuple[Tensor, Leaves]:
    table = nn.Embedding(5, 2, sparse=True)
    return table(torch.tensor([1, 2])).sum(), {"w": table.weight}


def sparse_leaf() -> tuple[Tensor, Leaves]:
    x = torch.eye(3).to_sparse().requires_grad_()
    return torch.sparse.mm(x, torch.ones(3, 3)).sum(), {"x": x}


REFUSED: dict[Callable[[], tuple[Tensor, Leaves]], str] = {
    meta: "meta device.* materialise",
    nested: "works on nested tensors.*pad before",
    nested_loss: "is a nested tensor; make one number",
    jagged: "layout torch.jagged.*pad before",
    mkldnn: "leave to_mkldnn",
    float8: r"convert it \(loss.float\(\)\)",
    float8_inside: "float8_e4m3fn cannot be followed",
    sparse_gradient: "sparse=False",
    sparse_leaf: "make it dense",
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_what_cannot_be_followed_is_refused_with_advice(
    make: Callable[[], tuple[Tensor, Leaves]],
) -> None:
    loss, leaves = make()
    for ask in (
        lambda: (
            gt.trace(loss.sum() if loss.dim() and not loss.is_nested else loss, names=leaves)
            if make is not float8
            else gt.trace(loss, names=leaves)
        ),
        lambda: programs.program(loss, names=leaves, cotangent=_ones(loss)),
        lambda: gt.backward(loss, gt.semirings.MAX, names=leaves, cotangent=_ones(loss)),
    ):
        with pytest.raises(Unsupported, match=REFUSED[make]):
            ask()


def _ones(loss: Tensor) -> Tensor | None:
    return None if loss.is_nested or not loss.dim() else torch.ones(loss.shape)


def test_a_leaf_of_float8_has_a_gradient() -> None:
    x = torch.randn(3).to(torch.float8_e4m3fn).requires_grad_()
    loss = x.float().pow(2).sum()
    (wanted,) = torch.autograd.grad(loss, x, retain_graph=True)
    assert torch.equal(gt.backward(loss, names={"x": x})["x"].float(), wanted.float())


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64], ids=str)
def test_losses_that_are_no_numbers(dtype: torch.dtype) -> None:
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(NoGraph, match="has no grad_fn"):
        gt.trace(x.sum().to(dtype), names={"x": x})


def test_a_forward_pass_in_inference_mode_has_no_graph(model: Model) -> None:
    def loss_fn(net: nn.Module, batch: Tensor) -> Tensor:
        return net(batch).square().mean()

    with torch.inference_mode(), pytest.raises(GradtraceError, match="inference_mode"):
        gt.influence(model.net, loss_fn, [model.x])


# Factories ---------------------------------------------------------------------------------------

FACTORIES = {"empty", "zeros", "ones", "full", "arange", "tensor", "eye", "randn", "rand"}
FACTORIES |= {"randint", "randperm"}
ELSEWHERE = {"cli", "report", "testing", "tools"}
"""Rooms of which nothing runs inside a pass."""
BUT = {"ir/passes/merge_routes.py"}  # sets the default device itself, to that of the values


def test_new_tensors_say_where_they_are() -> None:
    """A default device of the caller's must not reach what passes make for themselves."""
    root = Path(gt.__file__).parent
    found = []
    for path in root.rglob("*.py"):
        where = path.relative_to(root)
        if where.parts[0].removesuffix(".py") in ELSEWHERE or where.as_posix() in BUT:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            made = ast.unparse(node.func) in {f"torch.{name}" for name in FACTORIES}
            if made and not {word.arg for word in node.keywords} & {"device", None}:
                found.append(f"{where}:{node.lineno}")
    assert not found


ASKED: dict[str, Callable[[Tensor, Leaves], object]] = {
    "backward": lambda loss, names: gt.backward(loss, names=names),
    "MAX": lambda loss, names: gt.backward(loss, gt.semirings.MAX, names=names),
    "program": lambda loss, names: programs.program(loss, names=names),
    "trace": lambda loss, names: gt.trace(loss, names=names),
    "paths": lambda loss, names: gt.testing.enumerate_paths(loss, names=names),
}
"""What takes a loss."""


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a", torch.zeros(4), r"a had shape \(3, 4\) in the forward pass, and has \(4,\) now"),
        ("a", torch.zeros(7), r"a had shape \(3, 4\) .* and has \(7,\) now"),  # a formula fails
        ("b", torch.zeros(1), r"b had shape \(4,\) .* and has \(1,\) now"),
        ("a", torch.zeros(3, 4).double(), r"a was of torch.float32 .* and is of torch.float64 now"),
        ("b", torch.zeros(4).half(), r"b was of torch.float32 .* and is of torch.float16 now"),
    ],
    ids=["fits", "fails", "broadcast", "double", "half"],
)
def test_a_leaf_of_other_data_is_refused(
    ask: Callable[[Tensor, Leaves], object], name: str, data: Tensor, words: str
) -> None:
    """The gradients of others would be computed from it, those of ``b`` in another shape; a
    recording that is replayed notices, too.
    """
    for change in (False, False, True):
        leaves = {"a": torch.randn(3, 4, requires_grad=True), "b": torch.randn(4).requires_grad_()}
        loss = (leaves["a"] * leaves["b"]).square().sum()
        if not change:
            ask(loss, leaves)
            continue
        leaves[name].data = data
        with pytest.raises(GradtraceError, match=f"leaf {words}: its .data was set"):
            ask(loss, leaves)


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
def test_a_leaf_that_is_two_leaves_is_refused(ask: Callable[[Tensor, Leaves], object]) -> None:
    """Converted and back, it gets a second node, and a part of its gradient was left out."""
    for change in (False, True):
        w = torch.randn(3, requires_grad=True)
        other = w if change else torch.randn(3, requires_grad=True)
        half = (w * 2).sum()
        w.data = w.data.double() if change else w.data
        w.data = w.data.float()
        loss = half + (other * 3).sum()
        if change:
            with pytest.raises(GradtraceError, match=r"leaf w was converted .* it is two leaves"):
                ask(loss, {"w": w})
        else:  # a graph of the same shape, whose recording may be kept
            ask(loss, {"w": w, "other": other})


def test_a_term_and_diagnose_tell_of_other_data() -> None:
    model = nn.Linear(3, 1)
    with gt.watch(model) as watch:
        loss = model(torch.randn(2, 3)).sum()
    model.double()
    with pytest.raises(GradtraceError, match=r"term 'all': leaf (weight|bias) was of"):
        watch.conflicts({"all": loss, "half": 0.5 * loss})
    assert "was of torch.float32 in the forward pass" in str(watch.diagnose(loss))


@pytest.mark.parametrize(
    "change",
    [
        lambda loss: setattr(loss, "data", torch.zeros(5)),
        lambda loss: setattr(loss, "data", loss.data.double()),
        lambda loss: torch.no_grad()(loss.unsqueeze_)(0),
    ],
    ids=["shape", "dtype", "in place"],
)
def test_a_loss_of_other_data_is_refused(change: Callable[[Tensor], object]) -> None:
    w = torch.randn(3, requires_grad=True)
    for ask in ASKED.values():
        loss = (w * 2).sum()
        change(loss)
        with pytest.raises(
            Unsupported, match=r"its operator made one of shape \(\) and torch.float32"
        ):
            ask(loss, {"w": w})
