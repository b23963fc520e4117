"""The operator graph: operators, edges, leaves, names and modules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gradtrace
from gradtrace.autodiff.graph import Graph
from gradtrace.errors import NoGraph, UnknownName


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


def test_repr_counts(product_graph: Graph) -> None:
    assert repr(product_graph) == "Graph(3 operators, 2 edges, 1 leaves)"


def test_notebooks_show_a_drawing(product_graph: Graph) -> None:
    shown = product_graph._repr_html_()
    assert "<svg" in shown
    assert "</svg>" in shown
