"""``label``: names for slices, and nothing else changes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import programs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import gradtrace as gt
from gradtrace.autodiff.labels import label, labels_of
from gradtrace.errors import GradtraceError
from gradtrace.ir import interpreter


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def nodes_of(tensor: Tensor) -> list[Any]:
    """Every node of a graph."""
    found: dict[Any, None] = {}
    stack = [tensor.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in found:
            found[node] = None
            stack += [child for child, _ in node.next_functions]
    return list(found)


def marks_of(tensor: Tensor) -> list[Any]:
    return [found for node in nodes_of(tensor) if (found := labels_of(node)) is not None]


# What it says ---------------------------------------------------------------------------------


def test_the_node_knows_dim_and_names() -> None:
    out = label(torch.randn(2, 3, requires_grad=True), 1, ["a", "b", "c"])
    assert out.grad_fn.name() == "LabelBackward"
    assert out.grad_fn.dim == 1
    assert out.grad_fn.names == ("a", "b", "c")
    assert labels_of(out.grad_fn) == (1, ("a", "b", "c"))


@pytest.mark.parametrize(
    ("dim", "names", "wanted"),
    [
        (0, ["a", "b"], (0, ("a", "b"))),
        (-1, ("x", None, "x"), (1, ("x", None, "x"))),
        (-2, iter(["a", "b"]), (0, ("a", "b"))),
        (1, "head", (1, ("head 0", "head 1", "head 2"))),
        (1, "", (1, (" 0", " 1", " 2"))),
        (torch.tensor(1), [None] * 3, (1, (None, None, None))),
    ],
)
def test_dims_and_names_of_any_kind(dim: Any, names: Any, wanted: Any) -> None:
    assert labels_of(label(torch.randn(2, 3, requires_grad=True), dim, names).grad_fn) == wanted


def test_labels_of_other_nodes() -> None:
    class Label(torch.autograd.Function):
        """Another one of this name."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.dim, ctx.names = 0, ("a",)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    x = torch.ones(1, requires_grad=True)
    assert Label.apply(x).grad_fn.name() == "LabelBackward"
    for node in (Label.apply(x).grad_fn, x.sin().grad_fn, x.grad_fn, None):
        assert labels_of(node) is None


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: label(torch.tensor(1.0), 0, []), "0-d tensor"),
        (lambda: label(torch.ones(2, 3), 2, "a"), r"dim 2 .*\(2, 3\); use -2 to 1"),
        (lambda: label(torch.ones(2, 3), -3, "a"), r"dim -3 .*\(2, 3\)"),
        (lambda: label(torch.ones(2), "head", 0), "dim as an integer, got 'head'"),
        (lambda: label(torch.ones(2), 0.0, "a"), "dim as an integer, got 0.0"),
        (lambda: label(torch.ones(2), 0, ["a"]), "1 names for the 2 slices along dim 0"),
        (lambda: label(torch.ones(2, 3), -1, list("ab")), "2 names for the 3 slices along dim 1"),
        (lambda: label(torch.ones(2), 0, ["a", 3]), "strings, or None for no name, got 3"),
        (lambda: label(torch.ones(2), 0, 7), "strings, or None for no name, got 7"),
        (lambda: label(torch.ones(2), 0, None), "1 names for the 2 slices"),
        (lambda: label([1.0, 2.0], 0, "a"), "takes a tensor, got list"),
    ],
)
def test_errors_say_what_is_wrong(make: Callable[[], Tensor], says: str) -> None:
    with pytest.raises(GradtraceError, match=says):
        make()


# What it leaves as it is ----------------------------------------------------------------------

TENSORS: dict[str, Callable[[], Tensor]] = {
    "plain": lambda: torch.randn(2, 3, 4),
    "transposed": lambda: torch.randn(4, 3, 2).transpose(0, 2),
    "expanded": lambda: torch.randn(2, 3, 1).expand(2, 3, 4),
    "strided": lambda: torch.randn(2, 3, 8)[:, :, ::2],
    "double": lambda: torch.randn(2, 3, 4, dtype=torch.float64),
    "half": lambda: torch.randn(2, 3, 4, dtype=torch.float16),
    "bfloat16": lambda: torch.randn(2, 3, 4, dtype=torch.bfloat16),
    "complex": lambda: torch.randn(2, 3, 4, dtype=torch.complex64),
    "empty": lambda: torch.randn(0, 3, 4),
    "no slices": lambda: torch.randn(2, 0, 4),
}


@pytest.mark.parametrize("name", TENSORS)
def test_identity_in_value_and_gradient(name: str) -> None:
    x = TENSORS[name]().requires_grad_()
    out = label(x, 1, "s")
    assert out.dtype is x.dtype and out.shape == x.shape and torch.equal(out, x)
    assert labels_of(out.grad_fn) == (1, tuple(f"s {n}" for n in range(x.shape[1])))
    grad = torch.randn_like(x)
    assert torch.equal(torch.autograd.grad(out, x, grad)[0], grad)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.data())
def test_any_shape_and_dim(shape: list[int], data: st.DataObject) -> None:
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    x = torch.randn(shape, requires_grad=True)
    out = label(x, dim, [str(n) for n in range(shape[dim])])
    at, names = labels_of(out.grad_fn) or (-1, ())
    assert torch.equal(out, x) and at == dim % len(shape) and len(names) == shape[at]


def test_integers_and_bools_pass() -> None:
    for x in (torch.arange(3), torch.tensor([True, False, True])):
        assert torch.equal(label(x, 0, "t"), x)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_no_node_where_no_gradient_is_needed(mode: Callable[[], Any]) -> None:
    x = torch.randn(3, requires_grad=mode is not torch.enable_grad)
    with mode():
        out = label(x, 0, "t")
    assert out.grad_fn is None and not out.requires_grad and torch.equal(out, x)


@pytest.mark.parametrize("grad", [False, True])
def test_in_place_on_the_result(grad: bool) -> None:
    leaf = torch.randn(2, 3, requires_grad=grad)
    x = leaf * 2
    kept = x.detach().clone()
    out = label(x, 1, "s")
    out.mul_(3).add_(1)
    out[0] *= 5
    assert torch.equal(x, kept)  # alike with and without gradients
    wanted = (kept * 3 + 1) * torch.tensor([[5.0], [1.0]])
    assert torch.allclose(out, wanted)
    if grad:
        (found,) = torch.autograd.grad((out + x).sum(), leaf)
        assert torch.allclose(found, torch.tensor([[32.0], [8.0]]).expand(2, 3))
        assert len(marks_of(out)) == 1


@pytest.mark.parametrize("grad", [False, True])
def test_in_place_on_what_was_labelled(grad: bool) -> None:
    leaf = torch.randn(2, 3, requires_grad=grad)
    x = leaf * 2
    out = label(x, 1, "s")
    x.mul_(10)
    assert torch.allclose(out, leaf * 2)
    if grad:
        (found,) = torch.autograd.grad(out.sum() + x.sum(), leaf)
        assert torch.allclose(found, torch.full((2, 3), 22.0))
        assert labels_of(out.grad_fn) == (1, ("s 0", "s 1", "s 2"))


def test_views_of_the_result_may_be_written_to() -> None:
    leaf = torch.randn(2, 3, requires_grad=True)
    out = label(leaf * 1, 1, "s")
    out[:, 0].zero_()
    (found,) = torch.autograd.grad(out.sum(), leaf)
    assert found.tolist() == [[0.0, 1.0, 1.0]] * 2


def test_label_of_a_leaf_and_of_a_label() -> None:
    leaf = torch.randn(2, 3, requires_grad=True)
    out = label(label(leaf, 0, "row"), 1, "column")
    assert marks_of(out) == [
        (1, ("column 0", "column 1", "column 2")),
        (0, ("row 0", "row 1")),
    ]
    assert leaf.grad_fn is None
    out.sum().backward()
    assert torch.equal(leaf.grad, torch.ones(2, 3))


# Where it is used -----------------------------------------------------------------------------


def test_double_backward() -> None:
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: label(x, 1, "s"), x)
    assert torch.autograd.gradgradcheck(lambda x: label(x**3, 1, "s"), x)


def test_checkpoint() -> None:
    def block(x: Tensor) -> Tensor:
        return label(x.sin(), 1, "s").exp()

    x = torch.randn(2, 3, requires_grad=True)
    loss = checkpoint(block, x, use_reentrant=False).sum()
    assert marks_of(loss) == [(1, ("s 0", "s 1", "s 2"))]
    plain = x.sin().exp().sum()
    assert torch.equal(torch.autograd.grad(loss, x)[0], torch.autograd.grad(plain, x)[0])


@pytest.mark.parametrize(("in_dim", "wanted"), [(0, 2), (1, 2), (2, 1), (-1, 1)])
def test_vmap(in_dim: int, wanted: int) -> None:
    """The batch is one more dimension of the node, before the labelled one or behind it."""
    x = torch.randn(2, 3, 4, requires_grad=True)
    size = [s for d, s in enumerate(x.shape) if d != in_dim % 3][1]
    out = torch.func.vmap(lambda x: label(x, 1, "s"), in_dims=in_dim)(x)
    assert torch.equal(out, x.movedim(in_dim, 0))
    ((dim, names),) = marks_of(out)
    assert dim == wanted and len(names) == size == x.shape[dim]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_functional_transforms() -> None:
    def f(x: Tensor) -> Tensor:
        return label(x, 0, "s").pow(3).sum()

    x = torch.randn(3)
    assert torch.allclose(torch.func.grad(f)(x), 3 * x**2)
    assert torch.allclose(torch.func.hessian(f)(x), torch.diag(6 * x))
    assert torch.allclose(torch.func.vmap(torch.func.grad(f))(x.expand(2, 3))[1], 3 * x**2)
    value, tangent = torch.func.jvp(f, (x,), (torch.ones(3),))
    assert torch.allclose(tangent, (3 * x**2).sum()) and torch.allclose(value, x.pow(3).sum())


@pytest.mark.filterwarnings("ignore")
def test_compiled_whole() -> None:
    import torch._dynamo

    torch._dynamo.reset()
    x = torch.randn(2, 3, requires_grad=True)
    f = torch.compile(lambda x: label(x, 1, "s").pow(2).sum(), backend="aot_eager", fullgraph=True)
    assert torch.allclose(torch.autograd.grad(f(x), x)[0], 2 * x)
    torch._dynamo.reset()


def test_on_another_thread() -> None:
    found: list[Any] = []

    def work() -> None:
        found.append(labels_of(label(torch.ones(2, requires_grad=True), 0, "t").grad_fn))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(0, ("t 0", "t 1"))]


def test_gradtrace_follows_it() -> None:
    w = torch.randn(3, 4, requires_grad=True)
    loss = label(torch.randn(5, 3) @ w, 1, "unit").tanh().pow(2).sum()
    (wanted,) = torch.autograd.grad(loss, w, retain_graph=True)
    assert torch.allclose(gt.backward(loss, names={"w": w})["w"], wanted)
    found: Any = interpreter.run(programs.program(loss, names={"w": w}), gt.semirings.SUM)[w]
    assert torch.allclose(found[0] if isinstance(found, tuple) else found, wanted, atol=1e-6)
    assert "LabelBackward" in {operator.name for operator in gt.graph(loss)}
