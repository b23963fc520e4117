"""What goes wrong, and what the user is told: the class, the place in the model, the way out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import programs
import pytest
import torch
from torch import Tensor, nn

import gradtrace as gt
from gradtrace.errors import (
    FreedGraph,
    GradtraceError,
    NoGraph,
    NonFinite,
    NotLinear,
    NotScalar,
    TooDeep,
    TooLarge,
    UnknownName,
    Unsupported,
)
from gradtrace.ir import interpreter


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


ASKED: dict[str, Callable[..., Any]] = {"backward": gt.backward, "program": programs.program}
both = pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)


def leaf(*shape: int) -> Tensor:
    return torch.ones(shape, requires_grad=True)


class Net(nn.Module):
    """Three layers, of which the middle one is to go wrong."""

    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.below, self.middle, self.above = nn.Linear(3, 3), middle or nn.Tanh(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.above(self.middle(self.below(x)))


class Apply(nn.Module):
    def __init__(self, f: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        return self.f(x)


def watched(net: nn.Module, *shape: int) -> tuple[Any, Tensor]:
    with gt.watch(net) as watch:
        loss = net(torch.randn(*(shape or (2, 3)))).sum()
    return watch, loss


# The loss -------------------------------------------------------------------------------------


@both
def test_several_elements(ask: Callable[..., Any]) -> None:
    with pytest.raises(
        NotScalar, match=r"6 elements \(shape \(2, 3\)\).*loss\.sum\(\).*cotangent="
    ):
        ask(leaf(2, 3) * 2)


def test_a_cotangent_weighs_them() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    loss, weight = x.exp(), torch.randn(2, 3)
    (want,) = torch.autograd.grad(loss, x, weight, retain_graph=True)
    torch.testing.assert_close(gt.backward(loss, cotangent=weight)["leaf0"], want)
    run = interpreter.run(programs.program(loss, cotangent=weight), gt.semirings.SUM)
    torch.testing.assert_close(run[x], want)
    double = gt.backward(loss, cotangent=weight.double())["leaf0"]
    assert double.dtype is torch.float32


@both
def test_wrong_cotangents(ask: Callable[..., Any]) -> None:
    loss = leaf(2, 3) * 2
    with pytest.raises(NotScalar, match=r"cotangent has shape \(3, 2\), the loss \(2, 3\)"):
        ask(loss, cotangent=torch.ones(3, 2))
    with pytest.raises(Unsupported, match="cotangent is on meta, the loss on cpu"):
        ask(loss, cotangent=torch.ones(2, 3, device="meta"))
    with pytest.raises(NotScalar, match="cotangent is a float; pass a tensor"):
        ask(loss, cotangent=1.0)


@pytest.mark.parametrize("ask", [gt.backward, programs.program, gt.graph])
def test_no_graph(ask: Callable[..., Any]) -> None:
    x = leaf()
    with pytest.raises(NoGraph, match="it is a leaf itself"):
        ask(x)
    with pytest.raises(NoGraph, match=r"does not require grad.*do not detach"):
        ask((x * 2).detach())
    with torch.no_grad():
        loss = x * 2
    with pytest.raises(NoGraph, match=r"outside torch\.no_grad\(\)"):
        ask(loss)
    with torch.inference_mode():
        loss = x * 2
    with pytest.raises(NoGraph, match=r"torch\.inference_mode\(\)"):
        ask(loss)
    with pytest.raises(NoGraph, match="does not require grad"):
        ask(torch.tensor(3))


@pytest.mark.parametrize("ask", [gt.backward, programs.program, gt.graph])
@pytest.mark.parametrize("thing", [None, 1.0, {"loss": 1}, [torch.ones(1)], "loss"], ids=repr)
def test_not_a_tensor(ask: Callable[..., Any], thing: object) -> None:
    with pytest.raises(NoGraph, match=rf"expected the loss tensor, got {type(thing).__name__}"):
        ask(thing)


def test_a_model_output() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    loss = leaf(2).sum()
    with pytest.raises(NoGraph, match=r"got MaskedLMOutput.*its \.loss"):
        gt.backward(outputs.MaskedLMOutput(loss=loss))


def test_all_of_it_with_a_watch() -> None:
    net = Net()
    with gt.watch(net) as watch:
        out = net(torch.ones(2, 3))
    for ask in (watch.backward, programs.of(watch)):
        with pytest.raises(NotScalar):
            ask(out)
        with pytest.raises(NoGraph):
            ask(out.detach())
    with pytest.raises(NoGraph):
        watch.graph(None)


# The graph ------------------------------------------------------------------------------------


def test_a_freed_graph() -> None:
    watch, loss = watched(Net())
    loss.backward()
    for ask in (watch.backward, programs.of(watch)):
        with pytest.raises(FreedGraph, match=r"Backward0 \(in above\).*before loss\.backward\(\)"):
            ask(loss)


def test_a_freed_custom_function() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return 2 * x * grad

    loss = Square.apply(leaf(2)).sum()
    loss.backward()
    for ask in ASKED.values():
        with pytest.raises(FreedGraph, match=r"SquareBackward.*retain_graph=True"):
            ask(loss)


def test_an_optimizer_step_between() -> None:
    net = Net()
    watch, loss = watched(net)
    loss.backward(retain_graph=True)
    torch.optim.SGD(net.parameters(), 0.1).step()
    for ask in (watch.backward, programs.of(watch)):
        with pytest.raises(
            FreedGraph, match=r"Backward0 \(in above\).*overwritten in place.*optimizer"
        ):
            ask(loss)


@pytest.mark.parametrize(
    ("f", "place"),
    [
        (lambda x: (x - x).sqrt(), "SqrtBackward0 (in middle)"),
        (lambda x: (x - x).abs().pow(0.5), "PowBackward0 (in middle)"),
        (lambda x: x * math.inf, "AddmmBackward0 (in above)"),  # infinity times 1, for its weight
        (lambda x: x * math.nan, "AddmmBackward0 (in above)"),
    ],
    ids=["sqrt", "power", "infinity", "nan"],
)
def test_non_finite_gradients(f: Callable[[Tensor], Tensor], place: str) -> None:
    net = Net(Apply(f))
    watch, loss = watched(net)
    with pytest.raises(NonFinite) as caught:
        watch.backward(loss)
    for part in (f"first appears at {place}", "gradient of below.weight", "nonfinite='allow'"):
        assert part in str(caught.value)
    found = watch.backward(loss, nonfinite="allow")
    want = torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
    for ours, grad in zip(found.values(), want):
        torch.testing.assert_close(ours, grad, equal_nan=True)


def test_the_first_of_several_is_named() -> None:
    """Seen from the loss: what lies below only passes it on."""
    net = nn.Sequential(
        nn.Linear(3, 3),
        Apply(lambda x: (x - x).sqrt()),
        nn.Linear(3, 3),
        Apply(lambda x: (x - x).sqrt()),
    )
    watch, loss = watched(net)
    with pytest.raises(NonFinite, match=r"first appears at SqrtBackward0 \(in 3\)"):
        watch.backward(loss)


def test_overflow_of_a_sum_is_no_infinity() -> None:
    x = torch.ones(4, requires_grad=True)
    loss = (x * 3e38).sum()
    assert torch.equal(gt.backward(loss)["leaf0"], torch.full((4,), 3e38))


@both
def test_complex_losses(ask: Callable[..., Any]) -> None:
    x = torch.ones(2, dtype=torch.complex64, requires_grad=True)
    real = torch.ones(2, requires_grad=True)
    for loss in ((x * 1j).sum(), (real * 1j).sum(), real * 1j):
        for wanted in (ask, gt.trace):
            with pytest.raises(Unsupported, match=r"loss is complex.*real part"):
                wanted(loss)


def test_complex_leaves() -> None:
    x = torch.ones(2, dtype=torch.complex64, requires_grad=True)
    with pytest.raises(Unsupported, match=r"leaf x is complex.*torch\.view_as_complex"):
        gt.backward((x * 1j).abs().sum(), names={"x": x})


@pytest.mark.parametrize(
    "f",
    [
        lambda x: torch.fft.rfft(x).abs(),
        lambda x: torch.view_as_complex(x.reshape(-1, 2)).exp().imag,
        lambda x: torch.polar(x, 2 * x).conj().real,
    ],
    ids=["fft", "exp", "polar"],
)
def test_complex_numbers_inside(f: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(4, requires_grad=True)
    loss = f(x).pow(2).sum()
    (want,) = torch.autograd.grad(loss, x, retain_graph=True)
    torch.testing.assert_close(gt.backward(loss)["leaf0"], want)
    torch.testing.assert_close(interpreter.run(programs.program(loss), gt.semirings.SUM)[x], want)


def test_sparse_gradients() -> None:
    net = nn.ModuleDict({"embed": nn.Embedding(5, 3, sparse=True)})
    with gt.watch(net) as watch:
        loss = net["embed"](torch.tensor([1, 2, 1])).sum()
    for ask in (watch.backward, programs.of(watch)):
        with pytest.raises(Unsupported, match=r"EmbeddingBackward0 \(in embed\).*sparse=False"):
            ask(loss)


def test_too_large() -> None:
    net = Net(Apply(torch.linalg.matrix_exp))
    watch, loss = watched(net, 3, 3)
    with pytest.raises(TooLarge, match=r"\(in middle\).*too many"):
        programs.of(watch)(loss, dense_limit=4)
    programs.of(watch)(loss)


def test_too_deep() -> None:
    x = leaf()
    y = x
    for _ in range(5000):
        y = y * 1.0
    with pytest.raises(TooDeep, match="schedule='kahn'"):
        gt.backward(y, schedule="recursive")
    assert float(gt.backward(y)["leaf0"]) == 1.0


# Names ----------------------------------------------------------------------------------------


def test_unknown_leaves() -> None:
    watch, loss = watched(Net())
    with pytest.raises(UnknownName, match=r"no leaf 'abov.weight'.*did you mean above\.weight"):
        watch.backward(loss, leaves=["abov.weight"])
    with pytest.raises(UnknownName, match=r"no leaf 'nope'.*there are below.weight"):
        watch.backward(loss)["nope"]
    with pytest.raises(UnknownName, match=r"no leaf 'belwo.bias'.*did you mean below.bias"):
        watch.graph(loss)["belwo.bias"]
    with pytest.raises(UnknownName, match=r"no leaf 'nope'.*there are leaf0"):
        gt.backward(leaf(2).sum(), leaves=["nope"])
    with pytest.raises(KeyError):
        watch.backward(loss)["nope"]


def test_frozen_parameters_are_no_leaves() -> None:
    net = Net()
    net.below.requires_grad_(False)
    watch, loss = watched(net)
    with pytest.raises(UnknownName, match=r"no leaf 'below\.weight' takes part in this loss"):
        watch.backward(loss, leaves=["below.weight"])


def test_a_string_is_no_list_of_leaves() -> None:
    watch, loss = watched(Net())
    with pytest.raises(UnknownName, match=r"leaves=\['above\.bias'\]"):
        watch.backward(loss, leaves="above.bias")


def test_any_name_of_a_tied_leaf_will_do() -> None:
    net = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    net["b"].weight = net["a"].weight
    with gt.watch(net) as watch:
        loss = net["b"](net["a"](torch.ones(1, 3))).sum()
    found = watch.backward(loss, leaves=["b.weight"])
    assert list(found) == ["b.weight"]
    every = watch.backward(loss)
    assert list(every) == ["a.weight", "a.bias", "b.bias"]
    assert torch.equal(found["b.weight"], every["a.weight"])
    assert every["b.weight"] is every["a.weight"]


@pytest.mark.parametrize("ask", [gt.backward, programs.program, gt.graph])
def test_names_of_what_is_no_leaf(ask: Callable[..., Any]) -> None:
    x = leaf(2)
    y = x * 2
    with pytest.raises(UnknownName, match=r"names\['y'\] is not a leaf.*name parameters"):
        ask(y.sum(), names={"y": y})
    with pytest.raises(UnknownName, match=r"names\['z'\] does not require grad"):
        ask(y.sum(), names={"z": torch.ones(2)})
    with pytest.raises(UnknownName, match=r"names\['z'\] is a float, not a tensor"):
        ask(y.sum(), names={"z": 1.0})
    with pytest.raises(UnknownName, match=r"dict\(model.named_parameters\(\)\), got generator"):
        ask(y.sum(), names=torch.nn.Linear(2, 2).named_parameters())
    with pytest.raises(UnknownName, match="names of leaves are strings, not 0"):
        ask(y.sum(), names={0: x})
    ask(y.sum(), names={})


def test_a_name_for_a_leaf_that_takes_no_part() -> None:
    x, other = leaf(2), leaf(2)
    assert list(gt.backward(x.sum(), names={"other": other, "x": x})) == ["x"]


def test_names_that_look_like_ours() -> None:
    x, y = leaf(2), leaf(3)
    found = gt.backward(x.sum() * y.sum(), names={"leaf0": x})
    assert {name: tuple(g.shape) for name, g in found.items()} == {"leaf0": (2,), "leaf1": (3,)}


def test_wrong_options() -> None:
    loss = leaf(2).sum()
    for ask in ASKED.values():
        with pytest.raises(
            UnknownName, match=r"no schedule 'nope'; there are kahn, creation, recursive"
        ):
            ask(loss, schedule="nope")
    with pytest.raises(UnknownName, match="nonfinite is 'raise' or 'allow', not 'warn'"):
        gt.backward(loss, nonfinite="warn")


@pytest.mark.parametrize("thing", ["MAX", None, torch.ones(1), gt.semirings], ids=repr)
def test_wrong_semirings(thing: Any) -> None:
    with pytest.raises(GradtraceError, match=r"is no semiring; pass one of gradtrace\.semirings"):
        gt.backward(leaf(2).sum(), thing)


# The watch ------------------------------------------------------------------------------------


@pytest.mark.parametrize("thing", [None, torch.ones(1), nn.Linear, lambda x: x])
def test_watch_of_what_is_no_module(thing: Any) -> None:
    with pytest.raises(GradtraceError, match=r"watch takes a torch\.nn\.Module, got .*names="):
        gt.watch(thing)


def test_a_watch_opened_twice() -> None:
    net = Net()
    with gt.watch(net) as watch:
        with pytest.raises(GradtraceError, match="already open"), watch:
            pass
        loss = net(torch.ones(1, 3)).sum()
    assert len(watch.backward(loss)) == 4
    assert not net.below._forward_hooks


# Odd sizes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.sum(),
        lambda x: (x @ torch.ones(3, 2)).sum(),
        lambda x: torch.cat([x, torch.ones(1, 3)]).exp().sum(),
        lambda x: x.softmax(-1).sum(),
        lambda x: nn.functional.layer_norm(x, (3,)).sum(),
    ],
    ids=["sum", "matmul", "cat", "softmax", "norm"],
)
def test_empty_tensors(f: Callable[[Tensor], Tensor]) -> None:
    x = torch.ones(0, 3, requires_grad=True)
    loss = f(x)
    assert gt.backward(loss)["leaf0"].shape == (0, 3)
    run = interpreter.run(programs.program(loss), gt.semirings.SUM)
    assert all(grad.shape == (0, 3) for grad in run.values())


def test_zero_dimensions() -> None:
    x = torch.tensor(3.0, requires_grad=True)
    loss = x * x + x
    assert float(gt.backward(loss)["leaf0"]) == 7.0
    assert float(interpreter.run(programs.program(loss), gt.semirings.SUM)[x]) == 7.0


def test_one_element_with_dimensions() -> None:
    x = leaf(1, 1)
    assert gt.backward((x * 2).reshape(1, 1, 1))["leaf0"].tolist() == [[2.0]]


def test_a_loss_of_no_elements() -> None:
    with pytest.raises(NotScalar, match="0 elements"):
        gt.backward(torch.ones(0, requires_grad=True) * 2)


# Components ---------------------------------------------------------------------------------------

TABLES = ("influence", "decompose", "mass")


@pytest.mark.parametrize("table", TABLES)
def test_components_that_are_no_names(table: str) -> None:
    """Every table says the same of them."""
    model = Net(nn.Linear(3, 3))
    watch, loss = watched(model)
    trace = watch.trace(loss)
    ask: Callable[..., Any] = getattr(trace, table)
    nothing: tuple[Any, ...] = ([], {}, (), iter(()))
    for empty in nothing:
        with pytest.raises(GradtraceError, match="name at least one"):
            ask(empty)
    with pytest.raises(GradtraceError, match="Tanh; it is none of the watched model"):
        ask([nn.Tanh()])
    with pytest.raises(GradtraceError, match="by is made of 3; give one of"):
        ask(3)
    with pytest.raises(GradtraceError, match="component 3 is made of 3; give"):
        ask([3])
    for thing in (b"middle", torch.tensor(1)):
        with pytest.raises(GradtraceError, match="give "):
            ask(thing)
    with pytest.raises(GradtraceError, match="called by names, not 3"):
        ask({3: ["middle"]})
    with pytest.raises(GradtraceError, match=r"called by names, not \['middle'\]"):
        ask([["middle"]])
    with pytest.raises(GradtraceError, match="'it' is made of nothing"):
        ask({"it": []})
    with pytest.raises(UnknownName, match="'' is the whole model"):
        ask([""])


class Branches(nn.Module):
    """Two branches, of which a batch may take one only."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Linear(3, 4), nn.Linear(4, 1)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, both: bool = True) -> Tensor:
        h = self.embed(x)
        return self.out(self.a(h) + self.b(h) if both else h).square().sum()


def test_components_are_read_once() -> None:
    """An iterator can be, and a list may be changed before the table is printed."""
    model = Branches().double()
    with gt.watch(model) as watch:
        loss = model(torch.randn(2, 3).double())
    names, trace = ["a", "b"], watch.trace(loss)
    table, other = trace.influence(iter(names)), trace.influence(names)  # type: ignore[arg-type]
    names.append("none such")
    assert str(table) == str(other)
    data, ask = [torch.randn(2, 3).double()] * 2, {"by": iter(["a"])}
    found = gt.influence(model, lambda m, x: m(x), data, **ask)  # type: ignore[arg-type]
    assert found.about["losses"] == 2 and found.names == ("a",)
    with gt.Monitor(model, every=1, by=iter(["a"])) as monitor:
        for x in data:
            monitor.step(model(x))
    assert monitor.history.column("note") == ["", ""] and "share a" in str(monitor.history)


def test_batches_that_pass_none_of_the_components() -> None:
    """An error, which says which batch it was."""
    model, x = Branches().double(), torch.randn(2, 3).double()
    with gt.watch(model) as watch:
        loss = model(x, both=False)
    trace = watch.trace(loss)
    for ask in (trace.decompose, trace.mass):
        with pytest.raises(
            GradtraceError, match="no path from a leaf to this loss can pass 'a', 'b'"
        ):
            ask(["a", "b"])
    assert "no path from a leaf can pass a, b\n" in str(trace.influence(["a", "b", "out"]))
    assert "can pass" not in str(trace.influence())
    with pytest.raises(GradtraceError, match=r"batch 0: no path .* can pass 'a', 'b'"):
        gt.decompose(model, lambda m, way: m(x, way), [False, True], by=["a", "b"])


def test_leaves_without_elements() -> None:
    """No table has anything to say of them."""
    x = torch.zeros(0, 2, requires_grad=True)
    for rule in ("greedy", "edge", "viterbi"):
        trace = gt.trace(x.tanh().sum(), names={"x": x}, rule=rule)
        for table in (trace.influence(), trace.influence(sample=5), trace.coverage(), trace.mass()):
            assert "nan" not in str(table)


def test_arguments_of_the_wrong_type() -> None:
    model = Branches()
    with gt.watch(model) as watch:
        loss = model(torch.ones(2, 3))
    trace: Any = watch.trace(loss)
    split = trace.decompose()
    for of in (3, model.out.weight, [None]):
        for ask in (trace.influence, trace.coverage):
            with pytest.raises(UnknownName, match="is no name of a leaf; give names such as"):
                ask(of=of)
    for leaf in (3, None, ["out.weight"]):
        for ask in (trace.path, lambda name: split.gradient("a", name)):
            with pytest.raises(UnknownName, match=r"no leaf .* takes part in this loss; there are"):
                ask(leaf)
    for seed in (1.5, "1", None, 1 << 70):
        with pytest.raises(GradtraceError, match="seed is a whole number"):
            trace.influence(sample=3, seed=seed)


# Code of the user's ---------------------------------------------------------------------------


def through(backward: Callable[[Tensor], Any]) -> Tensor:
    """A loss behind a ``torch.autograd.Function`` with this backward."""

    class Middle(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return backward(grad)

    return (Middle.apply(leaf(3)) * torch.tensor([1.0, -2.0, 3.0])).sum()


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def raises(error: type[BaseException]) -> Callable[[Tensor], Any]:
    def backward(grad: Tensor) -> Any:
        raise error

    return backward


@both
@pytest.mark.parametrize("thing", ["x", 3.0, [leaf(3)], {1: leaf(3)}], ids=type)
def test_code_that_returns_no_tensor(ask: Callable[..., Any], thing: Any) -> None:
    said = f"returned a {type(thing).__name__}, where PyTorch takes tensors and None; return a"
    with pytest.raises(
        Unsupported, match=f"MiddleBackward cannot be followed: its backward {said}"
    ):
        ask(through(lambda grad: thing))
    for register in ("register_hook", "register_prehook"):
        x = leaf(3) * 2
        getattr(x.grad_fn, register)(lambda *_: thing)
        with pytest.raises(
            Unsupported, match=f"MulBackward0 cannot be followed: a hook on it {said}"
        ):
            ask(x.sum())


@both
def test_hooks_on_tensors_that_return_something_else(ask: Callable[..., Any]) -> None:
    returned: dict[str, Any] = {
        r"a hook on it \(register_hook\) returned a str, where PyTorch takes a tensor or": "x",
        r"a hook on it \(register_hook\) returned a tuple, where PyTorch takes a tensor": (
            leaf(3),
        ),
        "the hook clip on it returned a gradient of another shape than it was given": leaf(4),
        r"the hook clip on it was given a gradient of torch\.\w+ and returned one of torch\.L": (
            torch.ones(3).long()
        ),
    }
    for said, thing in returned.items():

        def clip(_: Tensor) -> Any:
            return thing  # noqa: B023

        w = leaf(3)
        w.register_hook(clip)
        of_leaf = r"AccumulateGrad \(a hook on leaf w: .*clip\) cannot be followed: "
        with pytest.raises(Unsupported, match=f"^{of_leaf}{said}"):
            ask((w * 2).sum(), names={"w": w})
        x = leaf(3) * 2
        x.register_hook(clip)
        with pytest.raises(Unsupported, match=f"^MulBackward0 cannot be followed: {said}"):
            ask(x.sum())


@both
def test_hooks_of_modules_and_saved_tensors_that_return_something_else(
    ask: Callable[..., Any],
) -> None:
    for register, said in (
        ("register_full_backward_hook", "backward hook of its module returned 2 gradients of inp"),
        ("register_full_backward_pre_hook", "backward pre hook of its module returned 2 grad"),
    ):
        model = torch.nn.Linear(3, 1)
        getattr(model, register)(lambda *_: (None, None))
        with pytest.raises(Unsupported, match=f"cannot be followed: a full {said}"):
            ask(model(leaf(3)).sum())
        model = torch.nn.Linear(3, 1)
        getattr(model, register)(lambda *_: 3.0)
        with pytest.raises(GradtraceError, match=r"look at the hooks of that module \(register"):
            ask(model(leaf(3)).sum())
    x = leaf(3)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, str):
        loss = (x * x).sum()
    with pytest.raises(Unsupported, match=r"unpacks what it has saved \(.*\) returned a str; it"):
        ask(loss)


@both
def test_exceptions_without_a_text(ask: Callable[..., Any]) -> None:
    advice = "; look at the backward of that torch.autograd.Function"
    for error in (AssertionError, StopIteration):
        said = f"MiddleBackward failed: {error.__name__}, which came without a text{advice}"
        with pytest.raises(GradtraceError, match=said):
            ask(through(raises(error)))
    with pytest.raises(
        GradtraceError, match="MiddleBackward failed: Mute, whose text cannot be re"
    ):
        ask(through(raises(Mute)))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_without_a_common_shape() -> None:
    parts = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], requires_grad=True)
    loss = torch.nested.to_padded_tensor(parts * 2, 0.0).sum()
    for ask in (gt.graph, gt.backward, gt.trace, programs.program):
        with pytest.raises(Unsupported, match=r"works on nested tensors.*pad before") as caught:
            ask(loss)
        assert "file an issue" not in str(caught.value) and "variant" not in str(caught.value)


def test_intermediates_of_another_dtype() -> None:
    """Written out as a matrix in float64, while the gradient it receives is float32."""
    hidden = through(lambda grad: torch.tensor(grad.double().numpy() * 2))
    assert gt.backward(hidden, gt.semirings.MAX)["leaf0"].tolist() == [2.0, 4.0, 6.0]
    assert gt.trace(hidden).path("leaf0", 2).weight == 6.0
    for ask in (gt.trace, programs.program):
        with pytest.raises(NotLinear, match="is not linear in the gradient"):
            ask(through(lambda grad: grad.double() * grad.double().norm()))
