"""Orders of traversal. Each calls ``visit(node, edges)`` once for each node reachable from the
root, after all nodes that use it, and returns the nodes in that order.

>>> graph = {"loss": ["mul"], "mul": ["x", "x"], "x": []}
>>> kahn("loss", lambda node, edges: None, lambda n: [(c, 0) for c in graph[n]])
['loss', 'mul', 'x']
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from itertools import count
from traceback import walk_stack
from typing import Any, TypeAlias

from torch import Tensor

from gradtrace.autodiff.nodes import Node, edges_of, root_of, sequence_of
from gradtrace.autodiff.pass_scope import limit_recursion, set_reached_nodes
from gradtrace.autodiff.tuning import STACK_RESERVE_FRAMES
from gradtrace.errors import TooDeep, UnknownName, Unsupported

Visit: TypeAlias = Callable[[Any, Any], object]
Edges: TypeAlias = Callable[[Any], Iterable[tuple[Any, int]]]


def pending(root: Node, edges: Edges = edges_of) -> tuple[dict[Node, int], dict[Node, Any]]:
    """For every node reachable from the root, the number of edges into it (the x of ``x * x`` has
    two), and its own edges.
    """
    uses = {root: 0}
    known = {}
    stack = [root]
    while stack:
        node = stack.pop()
        known[node] = out = edges(node)
        for child, _ in out:
            if child is None:
                continue
            if child in uses:
                uses[child] += 1
            else:
                uses[child] = 1
                stack.append(child)
    return uses, known


def kahn(root: Node, visit: Visit, edges: Edges = edges_of) -> list[Node]:
    """Kahn's algorithm: count the edges into each node, visit a node when its count is zero."""
    uses, known = pending(root, edges)
    ready = [root]
    order = []
    while ready:
        node = ready.pop()
        out = known.pop(node)
        visit(node, out)
        order.append(node)
        for child, _ in out:
            if child is not None:
                left = uses[child] - 1
                uses[child] = left
                if not left:
                    ready.append(child)
    return order


def creation(root: Node, visit: Visit, edges: Edges = edges_of) -> list[Node]:
    """The reverse of the order in which the nodes were made; needs no edge counts.

    A node is made after its arguments, so the newest known node has no unvisited user. Leaves have
    no sequence number and come last. Raises ``Unsupported`` for graphs that break this rule (nodes
    made on several threads).
    """
    newest: list[tuple[int, int, Node]] = [(0, 0, root)]
    known = {root}
    visited: dict[Node, None] = {}  # in order
    leaves = []
    ties = count(1)
    while newest:
        _, _, node = heappop(newest)
        out = edges(node)
        visit(node, out)
        visited[node] = None
        for child, _ in out:
            if child is None:
                continue
            if child not in known:
                known.add(child)
                number = sequence_of(child)
                if number is None:
                    leaves.append(child)
                else:
                    heappush(newest, (-number, next(ties), child))
            elif child in visited:
                raise Unsupported(
                    "this graph was not made in one order (several threads?), so the reverse of "
                    "its creation order is no schedule; use schedule='kahn'"
                )
    for leaf in leaves:
        visit(leaf, ())
    return [*visited, *leaves]


def recursive(root: Node, visit: Visit, edges: Edges = edges_of) -> list[Node]:
    """Recursive traversal: visits a node when its count of pending uses is zero, then recurses into
    its arguments.

    Raises ``TooDeep`` beyond the interpreter's recursion limit.
    """
    uses, known = pending(root, edges)
    order: list[Node] = []
    frames = sum(1 for _ in walk_stack(sys._getframe()))
    deepest = sys.getrecursionlimit() - frames - STACK_RESERVE_FRAMES
    _descend(root, 0, deepest, uses, known, visit, order)
    return order


def _descend(
    node: Node,
    depth: int,
    deepest: int,
    uses: dict[Node, int],
    known: dict[Node, Any],
    visit: Visit,
    order: list[Node],
) -> None:
    if depth > deepest:
        raise TooDeep(
            f"the recursive schedule is {depth:,} calls deep, which is all that Python's stack "
            "allows here; use schedule='kahn', or raise sys.setrecursionlimit"
        )
    out = known.pop(node)
    visit(node, out)
    order.append(node)
    for child, _ in out:
        if child is not None:
            uses[child] -= 1
            if not uses[child]:
                _descend(child, depth + 1, deepest, uses, known, visit, order)


SCHEDULES: dict[str, Callable[..., list[Node]]] = {
    "kahn": kahn,
    "creation": creation,
    "recursive": recursive,
}


def schedule(name: str) -> Callable[..., list[Node]]:
    """The schedule of that name."""
    if name not in SCHEDULES:
        raise UnknownName(f"no schedule {name!r}; there are {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def walk(loss: Tensor, visit: Visit, order: str = "kahn") -> None:
    """Visit the nodes of a loss in the order of a schedule.

    Afterwards, also after an error, ``limit_recursion`` makes the graph safe to free.
    """
    root, known = root_of(loss), {}

    def edges(node: Node) -> Any:
        known[node] = out = edges_of(node)
        return out

    nodes: list[Node] = []
    set_reached_nodes(lambda: pending(root)[0])
    try:
        nodes = schedule(order)(root, visit, edges)
    except BaseException:
        nodes = kahn(root, lambda node, edges: None, edges)
        raise
    finally:
        set_reached_nodes(tuple)
        limit_recursion(nodes, known)
