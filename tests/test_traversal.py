"""Schedules: each node once, after all its users, however deep the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import programs
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import few
from torch import Tensor, nn

import gradtrace
from gradtrace.autodiff.traversal import SCHEDULES, creation, kahn, pending, recursive, schedule
from gradtrace.errors import TooDeep, UnknownName, Unsupported

Plain = dict[int, list[int | None]]


@st.composite
def dags(draw: Any) -> Plain:
    """Node i's arguments are later nodes, repeated at times, or None."""
    n = draw(st.integers(1, 12))
    graph: Plain = {}
    for node in range(n):
        later = st.one_of(st.none(), st.integers(node + 1, n - 1)) if node + 1 < n else st.none()
        graph[node] = draw(st.lists(later, max_size=4))
    return graph


def edges_in(graph: Plain) -> Callable[[int], list[tuple[int | None, int]]]:
    return lambda node: [(child, k) for k, child in enumerate(graph[node])]


def reachable(graph: Plain) -> set[int]:
    found, stack = {0}, [0]
    while stack:
        new = {c for c in graph[stack.pop()] if c is not None} - found
        found |= new
        stack += new
    return found


class Numbered:
    """A node of a made-up graph that knows when it was made."""

    def __init__(self, number: int, *children: Numbered | None) -> None:
        self.number = number
        self.children = children

    def _sequence_nr(self) -> int:
        return self.number


def children_of(node: Numbered) -> list[tuple[Numbered | None, int]]:
    return [(child, 0) for child in node.children]


def numbered(graph: Plain) -> Numbered:
    """The same graph, made in the order that a forward pass would make it in."""
    made: dict[int, Numbered] = {}
    for node in sorted(graph, reverse=True):
        arguments = [None if c is None else made[c] for c in graph[node]]
        made[node] = Numbered(len(graph) - node, *arguments)
    return made[0]


def assert_scheduled(graph: Plain, order: list[int]) -> None:
    assert sorted(order) == sorted(reachable(graph))
    when = {node: position for position, node in enumerate(order)}
    for node in order:
        for child in graph[node]:
            assert child is None or when[child] > when[node]


# Made-up graphs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("walk", [kahn, recursive])
@settings(max_examples=few(30, 80), deadline=None)
@given(dags())
def test_each_node_once_after_its_users(walk: Callable[..., None], graph: Plain) -> None:
    order: list[int] = []
    edges = edges_in(graph)

    def visit(node: int, out: Any) -> None:
        assert list(out) == edges(node)
        order.append(node)

    walk(0, visit, edges)
    assert_scheduled(graph, order)


@settings(max_examples=few(30, 80), deadline=None)
@given(dags())
def test_creation_visits_each_node_once_after_its_users(graph: Plain) -> None:
    order: list[int] = []
    creation(numbered(graph), lambda n, _: order.append(len(graph) - n.number), children_of)
    assert_scheduled(graph, order)


@settings(max_examples=few(25, 60), deadline=None)
@given(dags())
def test_pending_counts_edges_not_nodes(graph: Plain) -> None:
    uses, known = pending(0, edges_in(graph))
    inside = reachable(graph)
    assert set(uses) == set(known) == inside
    for node in inside:
        assert uses[node] == sum(graph[user].count(node) for user in inside)


@settings(max_examples=few(30, 80), deadline=None)
@given(dags(), st.randoms(use_true_random=False))
def test_creation_never_visits_a_node_too_early(graph: Plain, random: Any) -> None:
    """Whatever the numbers say: a schedule, or an error."""
    numbers = list(range(len(graph)))
    random.shuffle(numbers)
    made: dict[int, Numbered] = {}
    for node in sorted(graph, reverse=True):
        arguments = [None if c is None else made[c] for c in graph[node]]
        made[node] = Numbered(numbers[node], *arguments)
    order: list[int] = []
    try:
        creation(made[0], lambda n, _: order.append(numbers.index(n.number)), children_of)
    except Unsupported:
        return
    assert_scheduled(graph, order)


def test_creation_says_so_when_the_order_is_broken() -> None:
    argument = Numbered(9)  # made after its user
    user = Numbered(1, argument)
    root = Numbered(10, argument, user)
    with pytest.raises(Unsupported, match="schedule='kahn'"):
        creation(root, lambda node, out: None, children_of)


def test_creation_says_so_on_a_real_graph() -> None:
    x = torch.tensor(2.0, requires_grad=True)
    shared = x.sin()
    loss = shared * shared.exp()
    shared.grad_fn._set_sequence_nr(shared.grad_fn._sequence_nr() + 1000)
    with pytest.raises(Unsupported, match="several threads"):
        gradtrace.backward(loss, names={"x": x}, schedule="creation")
    found = gradtrace.backward(loss, names={"x": x}, schedule="kahn")
    assert torch.equal(found["x"], torch.autograd.grad(loss, x)[0])


def test_the_recursive_schedule_is_as_deep_as_the_stack() -> None:
    chain: Plain = {node: [node + 1] for node in range(5000)}
    chain[5000] = []
    with pytest.raises(TooDeep, match=r"calls deep.*schedule='kahn'.*setrecursionlimit"):
        recursive(0, lambda node, out: None, edges_in(chain))


def test_schedules_by_name() -> None:
    assert list(SCHEDULES) == ["kahn", "creation", "recursive"]
    assert all(schedule(name) is walk for name, walk in SCHEDULES.items())
    with pytest.raises(UnknownName, match="no schedule 'bfs'; there are kahn, creation, recursive"):
        schedule("bfs")


@pytest.mark.parametrize("ask", [gradtrace.backward, programs.program])
def test_an_unknown_schedule_is_named(ask: Callable[..., Any]) -> None:
    x = torch.tensor(2.0, requires_grad=True)
    with pytest.raises(UnknownName, match="no schedule 'dfs'"):
        ask(x.sin(), schedule="dfs")


# Real graphs -------------------------------------------------------------------------------------

Made = tuple[Tensor, dict[str, Tensor]]


def leaf(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(shape, generator=generator).requires_grad_()


def chain() -> Made:
    x, w = leaf(4, 3), leaf(3, 3)
    return ((x @ w).tanh() @ torch.ones(3)).exp().sum(), {"x": x, "w": w}


def tree() -> Made:
    """Every value is used once."""
    leaves = {f"x{i}": leaf(3, i + 1) for i in range(4)}
    parts = [x.sin().sum() * (i + 1) for i, x in enumerate(leaves.values())]
    return parts[0] * parts[1] - parts[2] / parts[3].exp(), leaves


def square() -> Made:
    x = leaf(5)
    return (x * x).sum(), {"x": x}


def residual() -> Made:
    x, w = leaf(2, 4), leaf(4, 4)
    h = x
    for _ in range(5):
        h = h + (h @ w).relu()
    return h.pow(2).mean(), {"x": x, "w": w}


def diamonds() -> Made:
    x = leaf(3)
    h = x
    for _ in range(8):
        a, b = h.sin(), h.cos()
        h = a * b + a
    return h.sum(), {"x": x}


def several_outputs() -> Made:
    x = leaf(4, 6)
    a, _, c = x.split(2, 1)
    values, _ = x.max(0)
    return (a * c).sum() + values.sum(), {"x": x}


def broadcast() -> Made:
    x, b = leaf(4, 3), leaf(3)
    return ((x + b) * b.exp()).sum(), {"x": x, "b": b}


def recurrent() -> Made:
    torch.manual_seed(0)
    model = nn.LSTM(3, 4)
    out, _ = model(torch.randn(5, 2, 3))
    return out.pow(2).sum(), dict(model.named_parameters())


def attention() -> Made:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    out = model(torch.randn(2, 3, 8))
    return F.mse_loss(out, torch.ones(2, 3, 8)), dict(model.named_parameters())


GRAPHS = [
    chain, tree, square, residual, diamonds, several_outputs, broadcast, recurrent, attention,
]  # fmt: skip


@pytest.mark.parametrize("make", GRAPHS)
@pytest.mark.parametrize("order", SCHEDULES)
def test_gradients_are_those_of_autograd(make: Callable[[], Made], order: str) -> None:
    loss, leaves = make()
    found = gradtrace.backward(loss, names=leaves, schedule=order)
    wanted = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()))))
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        torch.testing.assert_close(found[name], grad)


@pytest.mark.parametrize("make", [chain, tree])
def test_without_sharing_schedules_agree_to_the_bit(make: Callable[[], Made]) -> None:
    loss, leaves = make()
    first, *others = [gradtrace.backward(loss, names=leaves, schedule=s) for s in SCHEDULES]
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in leaves)


@pytest.mark.parametrize("make", GRAPHS)
@pytest.mark.parametrize("order", SCHEDULES)
def test_programs_hold_the_same_operators(make: Callable[[], Made], order: str) -> None:
    loss, _ = make()
    found = programs.program(loss, schedule=order)
    wanted = programs.program(loss)
    assert sorted(b.operator for b in found.blocks) == sorted(b.operator for b in wanted.blocks)


def test_names_of_unnamed_leaves_do_not_hang_on_the_schedule() -> None:
    a, b, c = (torch.tensor(v, requires_grad=True) for v in (1.0, 2.0, 3.0))
    loss = a.sin() * b.exp() + c.cos() * a
    graph = gradtrace.graph(loss)
    first, *others = [gradtrace.backward(loss, schedule=s) for s in SCHEDULES]
    assert set(graph.leaves) == set(first)
    for other in others:
        assert first == other


# Deep graphs -------------------------------------------------------------------------------------


def test_recursion_on_a_deep_loss_says_what_to_do() -> None:
    x = torch.tensor(1.0, requires_grad=True)
    y = x
    for _ in range(5000):
        y = y + 1
    with pytest.raises(TooDeep, match="use schedule='kahn'"):
        gradtrace.backward(y, names={"x": x}, schedule="recursive")
