"""Finds operators that were made on threads other than the watch's, and their module calls.

Each thread counts its own sequence numbers, and a node does not say on which thread it was made.
Module calls on other threads annotate the nodes that made their inputs and outputs, so the nodes
between these are known. Other nodes of other threads are recognised by contradiction: on one
thread each number is used once, and a node has a greater number than its arguments. They belong to
no module.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from gradtrace.autodiff.names import GIVEN, MADE, NO_MODULE, ModuleCall, NameTable, ThreadCall
from gradtrace.autodiff.nodes import (
    ACCUMULATE,
    VIEWS,
    Edges,
    Node,
    annotations_of,
    edges_of,
    name_of,
    root_of,
    sequence_of,
)
from gradtrace.autodiff.traversal import pending
from gradtrace.errors import Unsupported


def off_thread_calls(loss: Tensor, name_table: NameTable) -> dict[Node, ModuleCall]:
    """The module calls of those nodes of a loss for which ``NameTable.place_at`` would be wrong."""
    if not name_table.starts:
        return {}
    edges = pending(root_of(loss))[1]
    found_numbers = ((node, sequence_of(node)) for node in edges)
    numbers = {node: number for node, number in found_numbers if number is not None}
    found = _annotated(numbers, edges) if name_table.away else {}
    left = {node: number for node, number in numbers.items() if node not in found}
    found.update(dict.fromkeys(_foreign(left, edges, name_table), NO_MODULE))
    return found


def unit_around(node: Node, off_thread: Mapping[Node, ModuleCall], name_table: NameTable) -> str:
    """The name of the module that made a node of a sharded model; raises if that is not known."""
    place = off_thread.get(node) or name_table.place_of(node)
    if place is NO_MODULE and node in off_thread:
        raise Unsupported(
            f"{name_of(node)} was made on a thread that the watch knows nothing of, so it is not "
            "known which parameters of the sharded model it uses; call the model on the thread of "
            "the watch"
        )
    return place.module


def _annotated(numbers: dict[Node, int], edges: dict[Node, Edges]) -> dict[Node, ModuleCall]:
    """The nodes between the annotated inputs and outputs of calls on other threads."""
    found: dict[Node, ModuleCall] = {}
    given: dict[ThreadCall, set[Node]] = {}
    made: list[tuple[ThreadCall, Node]] = []
    for node in numbers:
        for call, kind in annotations_of(node):
            if isinstance(call, ThreadCall) and kind == GIVEN:
                given.setdefault(call, set()).add(node)
            elif isinstance(call, ThreadCall) and kind == MADE:
                made.append((call, node))
    taken: dict[tuple[ThreadCall, int], Node] = {}
    for call, node in made:
        outside, first, end = given.get(call, set()), call.starts[0], call.starts[-1]
        stack = [node]
        while stack:
            node = stack.pop()
            number = numbers[node]
            if node in found or node in outside or not first <= number < end:
                continue
            other = taken.setdefault((call, number), node)
            if other is not node:
                found[node] = found[other] = NO_MODULE  # one of them is an input without annotation
                continue
            found[node] = call.place_at(number)
            stack += [c for c, _ in edges[node] if c in numbers and numbers[c] < number]
    return found


def _foreign(
    numbers: dict[Node, int], edges: dict[Node, Edges], name_table: NameTable
) -> dict[Node, None]:
    """Nodes that clash with nodes of the watch's thread, so that they are from another thread.

    Of two nodes that clash, one with a parameter of the module that was running at its number is
    the watch's own; otherwise the one with fewer clashes. If these are equal, both are taken as
    foreign.
    """
    clashes = _clashes(numbers, edges)
    own = {
        node
        for node in clashes
        if _uses_parameter_of_running_module(numbers[node], edges[node], name_table)
    }
    foreign = {node: None for node in clashes if clashes[node] & own}
    while True:
        left = {n: others - foreign.keys() for n, others in clashes.items() if n not in foreign}
        worst = max(map(len, left.values()), default=0)
        if not worst:
            return foreign
        foreign.update({node: None for node, others in left.items() if len(others) == worst})


def _clashes(numbers: dict[Node, int], edges: dict[Node, Edges]) -> dict[Node, set[Node]]:
    """For each node, those that cannot be from the same thread."""
    found: dict[Node, set[Node]] = {}
    first: dict[int, Node] = {}
    for node, number in numbers.items():
        same = first.setdefault(number, node)
        clashing = [] if same is node else [same]
        clashing += [c for c, _ in edges[node] if c in numbers and numbers[c] >= number]
        for other in clashing:
            found.setdefault(node, set()).add(other)
            found.setdefault(other, set()).add(node)
    return found


def _uses_parameter_of_running_module(number: int, edges: Edges, name_table: NameTable) -> bool:
    """Whether a node takes a parameter of the module that was running at its number."""
    module = name_table.place_at(number).module
    for child, _ in edges:
        if child is not None and type(child).__name__ in VIEWS:
            child = edges_of(child)[0][0]
        if child is not None and type(child) is ACCUMULATE:
            names = name_table.names_of(child.variable)
            if any(name.rpartition(".")[0] == module for name in names):
                return True
    return False
