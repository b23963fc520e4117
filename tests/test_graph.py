"""The operator graph, and the size of the scalar graph counted by hand and by brute force."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import few
from torch import Tensor, nn

import gradtrace
from gradtrace.autodiff.traversal import kahn
from gradtrace.errors import NoGraph, UnknownName
from gradtrace.graphs.graph import Graph


def leaf(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape) + 10 * sum(shape))
    return (torch.rand(shape, generator=generator) + 0.5).requires_grad_()


# Operators and edges -----------------------------------------------------------------------------


@pytest.fixture
def product_graph() -> Graph:
    x, w = torch.ones(4, 3), leaf(3, 2)
    return gradtrace.graph((x @ w).sum(), names={"w": w})


def test_operators_come_after_their_users(product_graph: Graph) -> None:
    names = [operator.name for operator in product_graph]
    assert names == ["SumBackward0", "MmBackward0", "AccumulateGrad"]
    assert [operator.index for operator in product_graph] == [0, 1, 2]
    assert [operator.shape for operator in product_graph] == [(), (4, 2), (3, 2)]
    assert [operator.size for operator in product_graph] == [1, 8, 6]
    assert product_graph.root is product_graph[0]
    assert len(product_graph) == 3


def test_edges_are_ordered_and_say_which_argument_needs_no_gradient(product_graph: Graph) -> None:
    total, matmul, w = product_graph
    assert [(e.producer, e.position) for e in product_graph.arguments(total)] == [(1, 0)]
    assert [(e.producer, e.position) for e in product_graph.arguments(matmul)] == [
        (None, 0),
        (2, 1),
    ]
    assert product_graph.arguments(w) == []
    assert product_graph.uses(total) == []
    assert [(e.consumer, e.position) for e in product_graph.uses(w)] == [(1, 1)]
    assert product_graph.edges == [
        edge for operator in product_graph for edge in product_graph.arguments(operator)
    ]


def test_argument_positions_tell_a_minus_b_from_b_minus_a() -> None:
    a, b = leaf(3), leaf(3)
    for first, second in ((a, b), (b, a)):
        graph = gradtrace.graph((first - second).sum(), names={"a": a, "b": b})
        minus = next(o for o in graph if o.name == "SubBackward0")
        left, right = (graph[e.producer] for e in graph.arguments(minus) if e.producer is not None)
        assert left.leaf == ("a" if first is a else "b")
        assert right.leaf == ("b" if first is a else "a")


def test_a_value_used_twice_has_two_edges() -> None:
    x = leaf()
    graph = gradtrace.graph(x * x, names={"x": x})
    assert len(graph) == 2
    assert [(e.consumer, e.producer, e.position) for e in graph.edges] == [(0, 1, 0), (0, 1, 1)]
    assert len(graph.uses(graph["x"])) == 2


def test_operators_with_several_outputs_have_shapes_and_slots() -> None:
    x = leaf(2, 6)
    a, b, c = x.split([1, 2, 3], 1)
    graph = gradtrace.graph(a.sum() * c.sum() + b.sum(), names={"x": x})
    split = next(o for o in graph if o.name.startswith("Split"))
    assert split.shapes == ((2, 1), (2, 2), (2, 3))
    assert split.shape == (2, 1)
    assert split.size == 12
    assert sorted(e.slot for e in graph.uses(split)) == [0, 1, 2]


def test_each_operator_once_in_a_graph_that_shares() -> None:
    x = leaf(3)
    h = x
    for _ in range(6):
        h = h.sin() * h.cos()
    graph = gradtrace.graph(h.sum(), names={"x": x})
    assert len(graph) == 1 + 6 * 3 + 1
    for edge in graph.edges:
        assert edge.producer is None or edge.producer > edge.consumer


def test_a_loss_without_a_graph_is_refused() -> None:
    with pytest.raises(NoGraph):
        gradtrace.graph(torch.ones(()))
    with pytest.raises(NoGraph):
        gradtrace.graph(leaf())


# Leaves, names, modules --------------------------------------------------------------------------


def test_leaves_by_name_and_by_number() -> None:
    a, b, c = leaf(1), leaf(2), leaf(3)
    graph = gradtrace.graph(a.sum() + b.sum() + c.sum(), names={"b": b})
    assert set(graph.leaves) == {"leaf0", "b", "leaf1"}
    assert graph["b"].shape == (2,)
    assert {graph["leaf0"].shape, graph["leaf1"].shape} == {(1,), (3,)}
    with pytest.raises(UnknownName, match="no leaf 'w'"):
        graph["w"]
    assert graph[-1] is graph.operators[-1]
    with pytest.raises(IndexError):
        graph[len(graph)]


def test_a_leaf_with_two_names_is_one_operator() -> None:
    w = leaf(2, 2)
    graph = gradtrace.graph((w @ w).sum(), names={"first": w, "second": w})
    assert graph["first"] is graph["second"]
    assert graph["first"].leaf == "first"
    assert graph["first"].names == ("first", "second")
    assert list(graph.leaves) == ["first"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.mix = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.mix(self.embed(x))
        return self.head(self.mix(h) + h.exp())


@pytest.fixture
def tied() -> Graph:
    torch.manual_seed(0)
    model = Tied()
    with gradtrace.watch(model) as watch:
        out = model(torch.tensor([1, 4]))
        loss = out.logsumexp(-1).sum()
    return watch.graph(loss)


def test_tied_weights_are_one_leaf_with_all_their_names(tied: Graph) -> None:
    assert tied["embed.weight"] is tied["head.weight"]
    assert tied["head.weight"].names == ("embed.weight", "head.weight")
    assert set(tied.leaves) == {"embed.weight", "mix.0.weight", "mix.0.bias"}


def test_operators_know_their_module_and_its_call(tied: Graph) -> None:
    where = {(o.name, o.module, o.call) for o in tied if o.leaf is None}
    assert ("EmbeddingBackward0", "embed", 0) in where
    assert {("TanhBackward0", "mix.1", 0), ("TanhBackward0", "mix.1", 1)} <= where
    assert {("AddmmBackward0", "mix.0", 0), ("AddmmBackward0", "mix.0", 1)} <= where
    assert ("MmBackward0", "head", 0) in where
    assert ("ExpBackward0", "", 0) in where  # in the model itself
    assert ("SumBackward0", "", 0) in where


def test_the_same_graph_without_watching_has_no_modules() -> None:
    model = nn.Linear(2, 2)
    graph = gradtrace.graph(model(torch.ones(1, 2)).sum(), names=dict(model.named_parameters()))
    assert {operator.module for operator in graph} == {""}
    assert set(graph.leaves) == {"weight", "bias"}


def test_inputs_that_need_gradient_are_leaves(tied: Graph) -> None:
    model, x = nn.Linear(2, 2), leaf(1, 2)
    with gradtrace.watch(model) as watch:
        loss = model(x).sum()
    graph = watch.graph(loss)
    assert set(graph.leaves) == {"weight", "bias", "leaf0"}
    assert graph["leaf0"].shape == (1, 2)


def test_the_module_of_a_nested_call_is_the_innermost() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 1))
    with gradtrace.watch(model) as watch:
        loss = model(torch.ones(1, 2)).sum()
    found = {o.name: o.module for o in watch.graph(loss) if o.name in ("ReluBackward0",)}
    assert found == {"ReluBackward0": "0.1"}
    assert {o.module for o in watch.graph(loss)} == {"", "0.0", "0.1", "1"}


# Other forms -------------------------------------------------------------------------------------


def test_networkx_keeps_parallel_edges_and_attributes() -> None:
    import networkx

    x = leaf(3)
    graph = gradtrace.graph((x * x).sum(), names={"x": x})
    found = graph.to_networkx()
    assert isinstance(found, networkx.MultiDiGraph)
    assert found.number_of_nodes() == 3
    assert found.number_of_edges() == 3
    assert found.number_of_edges(1, 2) == 2
    assert set(found[1][2]) == {0, 1}  # keyed by position
    assert found.nodes[2] == {
        "name": "AccumulateGrad", "shape": (3,), "module": "", "call": 0, "leaf": "x",
    }  # fmt: skip
    assert found.edges[1, 2, 0]["slot"] == 0
    assert networkx.is_directed_acyclic_graph(found)


def test_networkx_leaves_out_arguments_without_gradient(product_graph: Graph) -> None:
    found = product_graph.to_networkx()
    assert (found.number_of_nodes(), found.number_of_edges()) == (3, 2)
    assert list(found.edges(keys=True)) == [(0, 1, 0), (1, 2, 1)]


def test_networkx_of_a_model(tied: Graph) -> None:
    found = tied.to_networkx()
    assert found.number_of_nodes() == len(tied)
    assert found.number_of_edges() == sum(e.producer is not None for e in tied.edges)
    assert {d["module"] for _, d in found.nodes(data=True)} == {o.module for o in tied}


def test_repr_counts(product_graph: Graph) -> None:
    assert repr(product_graph) == "Graph(3 operators, 2 edges, 1 leaves)"


def test_notebooks_show_a_drawing(product_graph: Graph) -> None:
    shown = product_graph._repr_html_()
    assert "<svg" in shown
    assert "</svg>" in shown


# |V'| and |E'| by hand ---------------------------------------------------------------------------


def sizes(loss: Tensor) -> tuple[int, int]:
    graph = gradtrace.graph(loss)
    return graph.scalar_vertices, graph.scalar_edges


def test_matrix_product_one_operand() -> None:
    m, k, n = 4, 3, 2
    assert sizes(torch.ones(m, k) @ leaf(k, n)) == (m * n + k * n, m * k * n)


def test_matrix_product_both_operands() -> None:
    m, k, n = 4, 3, 2
    assert sizes(leaf(m, k) @ leaf(k, n)) == (m * n + m * k + k * n, 2 * m * k * n)


def test_batched_matrix_product() -> None:
    b, m, k, n = 2, 3, 4, 2
    edges = 2 * b * m * k * n
    assert sizes(leaf(b, m, k).bmm(leaf(b, k, n)))[1] == edges


def test_linear_layer() -> None:
    m, k, n = 4, 3, 2
    x, w, b = torch.ones(m, k), leaf(n, k), leaf(n)
    # addmm: m·k·n to the weight, m·n to the bias; the transposition n·k
    assert sizes(F.linear(x, w, b)) == (m * n + 2 * n * k + n, m * k * n + m * n + n * k)


def test_elementwise() -> None:
    assert sizes(leaf(5).tanh()) == (10, 5)
    assert sizes(leaf(2, 3) * leaf(2, 3).exp()) == (6 + 6 + 6 + 6, 12 + 6)


def test_square_has_two_edges_an_element() -> None:
    x = leaf(5)
    assert sizes(x * x) == (10, 10)


def test_sum_and_mean() -> None:
    assert sizes(leaf(2, 3).sum()) == (1 + 6, 6)
    assert sizes(leaf(2, 3).mean()) == (1 + 6, 6)
    assert sizes(leaf(2, 3).sum(1)) == (2 + 6, 6)


def test_broadcasting_add() -> None:
    assert sizes(leaf(4, 3) + leaf(3)) == (12 + 12 + 3, 12 + 12)
    assert sizes(torch.ones(4, 3) + leaf(3)) == (12 + 3, 12)
    assert sizes(leaf(4, 1) + leaf(1, 3)) == (12 + 4 + 3, 24)


def test_residual_sum() -> None:
    x = leaf(6)
    assert sizes(x + x.tanh()) == (6 + 6 + 6, 12 + 6)


def test_embedding() -> None:
    table = leaf(7, 3)
    assert sizes(F.embedding(torch.tensor([1, 5, 5, 0]), table)) == (12 + 21, 12)
    padded = F.embedding(torch.tensor([1, 5, 5, 0]), table, padding_idx=5)
    assert sizes(padded) == (12 + 21, 6)


def test_softmax() -> None:
    assert sizes(leaf(3, 4).softmax(-1)) == (24, 3 * 16)
    assert sizes(leaf(3, 4).log_softmax(0)) == (24, 4 * 9)


def test_norms() -> None:
    x, gain, bias = leaf(3, 4), leaf(4), leaf(4)
    assert sizes(F.layer_norm(x, (4,), gain, bias)) == (12 + 12 + 8, 3 * 16 + 12 + 12)
    assert sizes(F.batch_norm(leaf(5, 2), None, None, training=True))[1] == 2 * 25


def test_movement() -> None:
    x = leaf(2, 3)
    assert sizes(x.t()) == (12, 6)
    assert sizes(x[:, 1]) == (2 + 6, 2)
    assert sizes(torch.cat([x, x])) == (12 + 6, 12)
    assert sizes(x.reshape(6)) == (12, 6)
    assert sizes(F.pad(x, (1, 1))) == (10 + 6, 6)


def test_cumulative_sum() -> None:
    assert sizes(leaf(4).cumsum(0)) == (8, 10)


def convolution_edges(x: Any, w: Any, y: Any, stride: int, padding: int, groups: int) -> int:
    """Pairs of an output element and an input element in its window; as many for the kernel."""
    found = 0
    for a, b in product(range(y[2]), range(y[3])):
        rows = sum(0 <= a * stride + i - padding < x[2] for i in range(w[2]))
        columns = sum(0 <= b * stride + j - padding < x[3] for j in range(w[3]))
        found += rows * columns
    return found * x[0] * w[0] * w[1]


@pytest.mark.parametrize(
    ("stride", "padding", "groups"), [(1, 0, 1), (1, 1, 1), (2, 1, 1), (2, 1, 2), (1, 2, 2)]
)
def test_convolution(stride: int, padding: int, groups: int) -> None:
    x, w = leaf(2, 4, 5, 4), leaf(2, 4 // groups, 3, 3)
    y = F.conv2d(x, w, None, stride, padding, 1, groups)
    one = convolution_edges(x.shape, w.shape, y.shape, stride, padding, groups)
    vertices = x.numel() + w.numel() + y.numel()
    assert sizes(y) == (vertices, 2 * one)
    bias = leaf(2)
    fixed = F.conv2d(x.detach(), w, bias, stride, padding, 1, groups)
    assert sizes(fixed)[1] == one + y.numel()


def test_counting_leaves_no_trace() -> None:
    x = leaf(3)
    loss = (x * x).sum()
    graph = gradtrace.graph(loss)
    assert graph.scalar_edges == graph.scalar_edges == 3 + 6
    assert x.grad is None
    loss.backward()
    assert x.grad is not None


@pytest.mark.parametrize("hook", [lambda g: None, lambda g: g, lambda g: 2 * g])
def test_hooks_are_no_edges(hook: Callable[[Tensor], Tensor | None]) -> None:
    """BUG sizes.block_edges: the block of a leaf's hooks is counted, or has no steps to count."""
    x = leaf(3)
    x.register_hook(hook)
    assert sizes(x.tanh()) == (6, 3)


def test_edges_of_a_recurrent_layer_are_not_its_paths() -> None:
    """BUG sizes.block_edges: of an opened operator it counts routes, exponentially many in time."""

    def edges(steps: int) -> int:
        return sizes(nn.LSTM(4, 8)(torch.ones(steps, 1, 4))[0].sum())[1]

    assert edges(8) <= 4 * edges(4)


# |E'| by brute force -----------------------------------------------------------------------------


def brute_force(loss: Tensor) -> int:
    """Call every node on every unit cotangent and count what is not zero."""
    found = 0

    def visit(node: Any, edges: Any) -> None:
        nonlocal found
        if hasattr(node, "variable"):
            return
        metas = node._input_metadata
        for slot, meta in enumerate(metas):
            for j in range(torch.Size(meta.shape).numel()):
                grads = [torch.zeros(tuple(m.shape), dtype=m.dtype) for m in metas]
                grads[slot].view(-1)[j] = 1
                outs = node(*grads)
                outs = outs if isinstance(outs, tuple) else (outs,)
                for (child, at), out in zip(edges, outs):
                    if child is not None and out is not None:
                        out = out.sum_to_size(tuple(child._input_metadata[at].shape))
                        found += int((out != 0).sum())

    with torch.no_grad():
        kahn(loss.grad_fn, visit)
    return found


UNARY: list[Callable[[Tensor], Tensor]] = [
    torch.tanh,
    torch.exp,
    lambda x: x.softmax(-1),
    lambda x: x.log_softmax(0),
    lambda x: x.relu(),
    lambda x: x.t().contiguous().t(),
    lambda x: x.flip(1),
    lambda x: x.cumsum(1),
    lambda x: x @ torch.linspace(0.5, 1.5, 9, dtype=x.dtype).reshape(3, 3),
    lambda x: x - x.mean(1, keepdim=True),
    lambda x: F.layer_norm(x, (3,)),
    lambda x: x[[1, 0]],
    lambda x: torch.cat([x[:, 1:], x[:, :1]], 1),
    lambda x: F.gelu(x),
    lambda x: x / x.norm(),
]
BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.add,
    torch.mul,
    lambda x, y: x - y * 0.3,
    lambda x, y: x @ (y.t() @ y),
    lambda x, y: x / (y.abs() + 1),
    lambda x, y: torch.where(x > y, x, y),
    lambda x, y: x + y.sum(0),
]


@st.composite
def expressions(draw: Any) -> Tensor:
    """A random graph over matrices of two by three."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    pool = [
        torch.randn(2, 3, generator=generator, dtype=torch.float64).requires_grad_()
        for _ in range(2)
    ]
    for _ in range(draw(st.integers(1, 5))):
        x = pool[draw(st.integers(0, len(pool) - 1))]
        y = pool[draw(st.integers(0, len(pool) - 1))]
        if draw(st.booleans()):
            pool.append(draw(st.sampled_from(UNARY))(x))
        else:
            pool.append(draw(st.sampled_from(BINARY))(x, y))
    return pool[-1].sum()


@settings(max_examples=few(25, 60), deadline=None)
@given(expressions())
def test_edges_are_the_entries_of_the_jacobians(loss: Tensor) -> None:
    assert gradtrace.graph(loss).scalar_edges == brute_force(loss)


@settings(max_examples=few(15, 40), deadline=None)
@given(expressions())
def test_vertices_are_the_outputs_of_the_nodes(loss: Tensor) -> None:
    total = 0

    def visit(node: Any, edges: Any) -> None:
        nonlocal total
        total += sum(torch.Size(meta.shape).numel() for meta in node._input_metadata)

    kahn(loss.grad_fn, visit)
    assert gradtrace.graph(loss).scalar_vertices == total
