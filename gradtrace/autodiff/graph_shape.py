"""``GraphShape``: the nodes and edges of a graph without the graph, to recognise the next one.

The nodes of a loop's losses are others in every step, but of the same types, connected alike. To
compare a graph with a shape costs one look at each node, while to order the nodes costs two.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from operator import itemgetter, lt
from typing import NamedTuple

from torch import Tensor

from gradtrace.autodiff.names import NO_MODULE, ModuleCall, NameTable
from gradtrace.autodiff.nodes import Edges, Node, root_of, sequence_of, slot_of
from gradtrace.autodiff.pass_scope import KEEPER, far_children

NONE = -1
"""Stands for no node, at the end of an edge that needs no gradient."""


class Mismatch(Exception):
    """A loss is not of the structure that it is compared with; the message says why."""


class NodeShape(NamedTuple):
    """The type of a node, for each of its edges the number of the node at its end and the output
    slot there, and the module call that made it; None for leaves.
    """

    kind: type
    edges: tuple[tuple[int, int], ...]
    place: ModuleCall | None


class GraphShape(NamedTuple):
    """A graph whose nodes are numbered in the order of a schedule; node 0 made the loss.

    ``created`` are the numbers of the nodes, without leaves, in the order they were made. ``far``
    are the children that some nodes hold so that the graph can be freed (``limit_recursion``).
    """

    slot: int
    nodes: tuple[NodeShape, ...]
    created: tuple[int, ...]
    far: tuple[tuple[int, tuple[int, ...]], ...]

    def find(
        self, loss: Tensor, name_table: NameTable, clear_since: int
    ) -> tuple[list[Node], list[Edges]]:
        """The nodes of a loss by number, and their edges. Raises ``Mismatch`` if the graph has
        another shape, or nodes older than ``clear_since``, which may have hooks.
        """
        if slot_of(loss) != self.slot:
            raise Mismatch("the loss is another output of its operator")
        nodes, edges = self._connected(root_of(loss))
        made = itemgetter(*self.created)(nodes) if len(self.created) > 1 else (nodes[0],)
        numbers = [node._sequence_nr() for node in made]
        if numbers[0] < clear_since:
            raise Mismatch("hooks may stand on its operators")
        # In the same order as before no two nodes clash (``autodiff.names``): all are of the
        # watch's thread.
        if not all(map(lt, numbers, numbers[1:])):
            raise Mismatch("operators were made in another order, or on several threads")
        self._compare_places(numbers, name_table)
        return nodes, edges

    def _connected(self, root: Node) -> tuple[list[Node], list[Edges]]:
        """The nodes that are connected like this shape, and their edges."""
        nodes: list[Node] = [None] * len(self.nodes)
        nodes[0] = root
        edges: list[Edges] = []
        for at, (kind, wanted, _) in enumerate(self.nodes):
            if type(nodes[at]) is not kind:
                raise Mismatch(f"{type(nodes[at]).__name__} in place of {kind.__name__}")
            found: Edges = nodes[at].next_functions
            edges.append(found)
            if len(found) != len(wanted):
                raise Mismatch(f"{kind.__name__} has {len(found)} arguments, not {len(wanted)}")
            for (child, slot), (number, there) in zip(found, wanted):
                if child is None or number == NONE:
                    alike = child is None and number == NONE
                elif nodes[number] is None:
                    nodes[number], alike = child, slot == there
                else:
                    alike = nodes[number] is child and slot == there
                if not alike:
                    raise Mismatch(f"{kind.__name__} is connected otherwise")
        if len(set(nodes)) != len(nodes):
            raise Mismatch("a value is used in several places, not several values")
        return nodes, edges

    def _compare_places(self, numbers: Sequence[int], name_table: NameTable) -> None:
        """Compare the module calls of nodes; ``numbers`` are theirs, in ascending order."""
        starts, places = name_table.starts, name_table.places
        if name_table.away:
            raise Mismatch("modules were called on several threads")
        place, end = NO_MODULE, -1
        for at, number in zip(self.created, numbers):
            if number >= end:
                after = bisect_right(starts, number)
                place = places[after - 1] if after else NO_MODULE
                end = starts[after] if after < len(starts) else number + (1 << 62)
            if place != self.nodes[at].place:
                raise Mismatch(f"{self.nodes[at].kind.__name__} lies in {place.module or 'none'}")

    def limit_recursion(self, nodes: Sequence[Node]) -> None:
        """``pass_scope.limit_recursion`` for nodes that ``find`` found."""
        for at, children in self.far:
            nodes[at].metadata[KEEPER] = tuple([nodes[child] for child in children])


def shape_of_graph(loss: Tensor, edges: Mapping[Node, Edges], name_table: NameTable) -> GraphShape:
    """The shape of a graph, given the edges of its nodes in the order of a schedule."""
    number: dict[Node | None, int] = {node: n for n, node in enumerate(edges)}
    number[None] = NONE
    shapes, created = [], []
    for n, (node, out) in enumerate(edges.items()):
        made = sequence_of(node)
        place = None if made is None else name_table.place_at(made)
        ends = tuple([(number[child], slot) for child, slot in out])
        shapes.append(tuple.__new__(NodeShape, (type(node), ends, place)))
        if made is not None:
            created.append((made, n))
    far = far_children([*edges], edges)
    return GraphShape(
        slot_of(loss),
        tuple(shapes),
        tuple([n for _, n in sorted(created)]),
        tuple((number[node], tuple([number[c] for c in some])) for node, some in far.items()),
    )
