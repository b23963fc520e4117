"""Every path of a small loss, one by one: what the engine and its semirings are tested against.

The *scalar graph* has a vertex for each element of each value and an edge for each nonzero partial
derivative. Derivatives come from the autograd nodes themselves, called on unit cotangents: ``J[i,
j]`` is what element ``i`` of an argument gets when element ``j`` of the result is handed 1. Nothing
here knows of maps, programs or semirings, and nothing of gradtrace is imported.
"""

from __future__ import annotations

import builtins
import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

Node: TypeAlias = Any  # an autograd node
Position: TypeAlias = "int | Sequence[int]"  # of an element: flat, or by dimension

Taken: TypeAlias = tuple[int, int]  # an element of an output: its slot and flat index

LIMIT = 20_000
"""The most paths of one element that are listed unless the caller says otherwise."""


RTOL = 1e-9
"""How far off, relative to what it is summed of, a number may be that is right but for rounding."""


class TooManyPaths(Exception):
    """More paths or edges than the caller is ready to list."""


class NotFinite(Exception):
    """A derivative is infinite or not a number."""


class Place(NamedTuple):
    """Where a vertex stands: an element of a slot of a node, by their numbers."""

    node: int
    slot: int
    element: int  # flat


class Edge(NamedTuple):
    """From an element of an argument up to an element of a result; ``weight = J[below, above]``."""

    below: int
    above: int
    weight: float
    consumer: int  # the number of the node that the argument is one of
    position: int  # of the argument


class Path(NamedTuple):
    """From a leaf's element up to the root; the weight is the product, times the seed."""

    edges: tuple[Edge, ...]
    weight: float


class Hop(NamedTuple):
    """An edge of a path that somebody claims, as far as it is known; None stands for any."""

    operator: str | Node | None = None  # the consumer, or its name ("MulBackward0")
    position: int | None = None
    slot: int | None = None
    element: int | None = None  # flat, of that slot


class Consumer(NamedTuple):
    """A use of an element as an argument: what it hands back, and what that is made of."""

    edges: list[Edge]
    contribution: float  # Σⱼ J[i, j] · g[j]
    mass: float  # the same of absolute values: what rounding is relative to


class Weights(list[float]):
    """The weights of all paths of one element, and what each semiring says of them."""

    def sum(self) -> float:
        """The gradient."""
        return math.fsum(self)

    def abs(self) -> float:
        """The total path mass."""
        return math.fsum(map(abs, self))

    def max(self) -> float:
        """|weight| of the best path, 0 if there is none."""
        return max(map(abs, self), default=0.0)

    def extremes(self) -> tuple[float, float]:
        """The most positive and the most negative weight; 0 where no path has that sign."""
        return max([0.0, *self]), min([0.0, *self])

    def span(self) -> tuple[float, float]:
        """The largest and the smallest weight, whatever their signs; -inf and inf if none."""
        return max(self, default=-math.inf), min(self, default=math.inf)

    def count(self) -> int:  # type: ignore[override]
        """How many paths there are."""
        return len(self)

    def entropy_sums(self) -> tuple[float, float]:
        """``Σ|w|`` and ``-Σ|w|·log|w|``, with 0·log 0 = 0."""
        sizes = [size for size in map(abs, self) if size]
        return math.fsum(sizes), math.fsum(-size * math.log(size) for size in sizes)

    def entropy(self) -> float:
        """The entropy of ``p = |w| / Σ|w|`` in nats: ``H / Z + log Z``; 0 if there is no path."""
        mass, spread = self.entropy_sums()
        return spread / mass + math.log(mass) if mass else 0.0

    def top(self, k: int, signed: builtins.bool = False) -> list[float]:
        """The k largest |weights|, largest first, zeros where there are fewer; or with signs."""
        best = heapq.nlargest(k, self, key=abs) + [0.0] * max(0, k - len(self))
        return best if signed else [abs(weight) for weight in best]

    def bool(self) -> builtins.bool:
        """Whether there is a path."""
        return len(self) > 0


Statistic: TypeAlias = "Callable[[Weights], float | Sequence[float]]"


@dataclass
class ScalarGraph:
    """Elements and partial derivatives; vertices are numbered from the root down."""

    nodes: list[Node] = field(default_factory=list)  # in topological order, the root first
    places: list[Place] = field(default_factory=list)  # of every vertex
    up: list[list[Edge]] = field(default_factory=list)  # the edges from every vertex
    counts: list[int] = field(default_factory=list)  # paths from every vertex to the root
    seeds: dict[int, float] = field(default_factory=dict)  # of the elements of the loss
    starts: dict[str, int] = field(default_factory=dict)  # the first vertex of a leaf, if reached
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    faintest: float = math.inf  # the least |weight|, relative to the largest of its argument
    blur: float = 0.0  # how much rounding changes a weight, relative to it
    _lists: dict[int, Weights] = field(default_factory=dict, repr=False)
    _gradients: list[tuple[float, float]] = field(default_factory=list, repr=False)

    @staticmethod
    def of(
        loss: Tensor,
        leaves: dict[str, Tensor],
        seed: Tensor | None = None,
        zero: float = 0.0,
        unit: float = 1.0,
        most_edges: int | None = None,
        most_paths: int | None = None,
    ) -> ScalarGraph:
        """The scalar graph of a loss; of a vector of losses, weighed by ``seed``.

        A derivative is an edge if it is more than ``zero`` times the largest of its argument.
        Nodes are called on ``unit`` where a unit is meant, and what they give is divided by it.
        """
        if loss.grad_fn is None:
            raise ValueError("the loss has no grad_fn")
        graph = ScalarGraph(shapes={name: tuple(leaf.shape) for name, leaf in leaves.items()})
        build = _Builder(graph, leaves, zero, unit, most_edges, most_paths)
        with torch.no_grad():
            build.run(loss, torch.ones_like(loss) if seed is None else seed)
        return graph

    # The graph

    def vertex(self, name: str, index: Position) -> int | None:
        """The vertex of a leaf's element; None if no cotangent reaches the leaf at all."""
        shape = self.shapes[name]
        if not isinstance(index, int):
            index = math.prod(shape) and _flat(shape, index)
        if not 0 <= index < math.prod(shape):
            raise IndexError(f"{name} of shape {shape} has no element {index}")
        return self.starts[name] + index if name in self.starts else None

    def operator(self, number: int) -> str:
        """The name of a node: ``MulBackward0``."""
        return str(self.nodes[number].name()).rsplit("::", 1)[-1]

    @property
    def size(self) -> int:
        """How many edges there are."""
        return sum(map(len, self.up))

    def count_paths(self, name: str) -> list[int]:
        """The number of paths of every element of a leaf, found without listing them."""
        n = math.prod(self.shapes[name])
        if name not in self.starts:
            return [0] * n
        return self.counts[self.starts[name] :][:n]

    def most_paths(self) -> int:
        """The largest number of paths that an element of a leaf has."""
        return max((max(self.count_paths(name), default=0) for name in self.shapes), default=0)

    # Paths

    def paths(self, name: str, index: Position, limit: int = LIMIT) -> list[Path]:
        """All paths from a leaf's element up to the root, depth first."""
        at = self._counted(name, index, limit)
        return [] if at is None else list(self._climb(at, (), 1.0))

    def _climb(self, at: int, edges: tuple[Edge, ...], weight: float) -> Iterator[Path]:
        if at in self.seeds:
            yield Path(edges, weight * self.seeds[at])
        for edge in self.up[at]:
            yield from self._climb(edge.above, (*edges, edge), weight * edge.weight)

    def weights(self, name: str, index: Position, limit: int = LIMIT) -> Weights:
        """The weights of all paths, without their edges: the same numbers, much faster."""
        at = self._counted(name, index, limit)
        return Weights() if at is None else self._listed(at)

    def table(self, name: str, statistic: Statistic, limit: int = LIMIT) -> Tensor:
        """``statistic(weights)`` of every element of a leaf; several numbers are a last dimension.

        ``graph.table("w", Weights.max)``, ``graph.table("w", Weights.entropy_sums)``.
        """
        shape = self.shapes[name]
        rows = [statistic(self.weights(name, i, limit)) for i in range(math.prod(shape))]
        found = torch.tensor(rows, dtype=torch.float64)
        return found.reshape((*shape, *found.shape[1:]))

    def _counted(self, name: str, index: Position, limit: int) -> int | None:
        at = self.vertex(name, index)
        if at is not None and self.counts[at] > limit:
            raise TooManyPaths(f"{name}[{index}] has {self.counts[at]:,} paths, over {limit:,}")
        return at

    def _listed(self, at: int) -> Weights:
        if at not in self._lists:
            found = Weights([self.seeds[at]] if at in self.seeds else [])
            for edge in self.up[at]:
                found += [edge.weight * weight for weight in self._listed(edge.above)]
            self._lists[at] = found
        return self._lists[at]

    def matching(self, name: str, index: Position, hops: Sequence[Hop]) -> list[Path]:
        """The paths whose edges are as claimed, one edge for each hop."""
        at = self.vertex(name, index)
        found: list[tuple[tuple[Edge, ...], int, float]] = [] if at is None else [((), at, 1.0)]
        for hop in hops:
            found = [
                ((*edges, edge), edge.above, weight * edge.weight)
                for edges, at, weight in found
                for edge in self.up[at]
                if self._is(edge, hop)
            ]
        return [Path(edges, w * self.seeds[at]) for edges, at, w in found if at in self.seeds]

    def _is(self, edge: Edge, hop: Hop) -> bool:
        above, wanted = self.places[edge.above], hop.operator
        if isinstance(wanted, str):
            same = self.operator(edge.consumer) == wanted
        else:
            same = wanted is None or self.nodes[edge.consumer] is wanted
        pairs = (
            (hop.position, edge.position),
            (hop.slot, above.slot),
            (hop.element, above.element),
        )
        return same and all(claim is None or claim == fact for claim, fact in pairs)

    def is_path(self, edges: Sequence[Edge], name: str, index: Position) -> bool:
        """Whether these are edges of the graph, one after the other, from here up to the root."""
        at = self.vertex(name, index)
        for edge in edges:
            if at is None or edge not in self.up[at]:
                return False
            at = edge.above
        return at in self.seeds

    def describe(self, path: Path | Sequence[Edge]) -> str:
        """One line for each edge."""
        edges = path.edges if isinstance(path, Path) else path
        return "\n".join(
            f"{edge.weight:+.6g} by argument {edge.position} of #{edge.consumer} "
            f"{self.operator(edge.consumer)}, its output {self.places[edge.above].slot}"
            f"[{self.places[edge.above].element}]"
            for edge in edges
        )

    # Greedy: Algorithm 1 of the chapter

    def gradient(self, vertex: int) -> float:
        """``g``: the sum over all paths, by Equation 1.6."""
        return self._summed()[vertex][0]

    def mass(self, vertex: int) -> float:
        """The sum of |weight| over all paths: what the rounding of ``g`` is relative to."""
        return self._summed()[vertex][1]

    @cached_property
    def largest(self) -> float:
        """The largest mass of all vertices."""
        return max(size for _, size in self._summed())

    def _summed(self) -> list[tuple[float, float]]:
        known = self._gradients
        for at in range(len(known), len(self.up)):  # from the root down
            seed = self.seeds.get(at, 0.0)
            parts = [(e.weight * known[e.above][0], abs(e.weight) * known[e.above][1])
                     for e in self.up[at]]  # fmt: skip
            gradient = math.fsum([seed, *(part for part, _ in parts)])
            known.append((gradient, math.fsum([abs(seed), *(size for _, size in parts)])))
        return known

    def consumers(self, vertex: int) -> list[Consumer]:
        """The uses of an element, first consumer first, then by argument position."""
        uses: dict[tuple[int, int], list[Edge]] = {}
        for edge in self.up[vertex]:
            uses.setdefault((edge.consumer, edge.position), []).append(edge)
        return [
            Consumer(
                edges,
                math.fsum(edge.weight * self.gradient(edge.above) for edge in edges),
                math.fsum(abs(edge.weight) * self.mass(edge.above) for edge in edges),
            )
            for edges in uses.values()
        ]

    def _part(self, edge: Edge) -> float:
        return abs(edge.weight * self.gradient(edge.above))

    def greedy(self, name: str, index: Position) -> Path | None:
        """The path that goes, at every vertex, to the operator that handed back most.

        That is to the consumer with the largest |contribution|, and in it to the element with the
        largest |J[i, j] · g[j]|; ties go to the first. None where every such product is 0.
        """
        at = self.vertex(name, index)
        edges: list[Edge] = []
        weight = 1.0
        while at is not None and at not in self.seeds:
            live = [use for use in self.consumers(at) if any(map(self._part, use.edges))]
            if not live:
                return None  # at the start only: a vertex that was chosen has a gradient
            winner = max(live, key=lambda use: abs(use.contribution))
            edge = max(winner.edges, key=self._part)
            edges.append(edge)
            weight *= edge.weight
            at = edge.above
        return None if at is None else Path(tuple(edges), weight * self.seeds[at])

    def greedy_fault(
        self, edges: Sequence[Edge] | None, name: str, index: Position, rtol: float = RTOL
    ) -> str | None:
        """What is wrong with a claimed greedy path, or with the claim that there is none.

        Contributions are known up to rounding, ``rtol`` times the sum of the absolute values of
        what they are made of; a choice is good if it is the best for some values that near.
        """
        at = self.vertex(name, index)
        uses = [] if at is None else self.consumers(at)
        if edges is None:
            handed = [use for use in uses if abs(use.contribution) > rtol * use.mass]
            return f"there is a path: {handed[0]}" if handed else None
        if not self.is_path(edges, name, index):
            return "these edges are no path from here to the root"
        for edge in edges:
            fault = self._unwise(edge, rtol)
            if fault:
                return fault
        return None

    def greedy_ok(
        self, edges: Sequence[Edge] | None, name: str, index: Position, rtol: float = RTOL
    ) -> bool:
        """Whether every choice of a claimed greedy path is the best one, up to rounding."""
        return self.greedy_fault(edges, name, index, rtol) is None

    def _unwise(self, edge: Edge, rtol: float) -> str | None:
        uses = self.consumers(edge.below)
        chosen = next(use for use in uses if edge in use.edges)
        for use in uses:
            slack = rtol * (use.mass + chosen.mass)
            if abs(use.contribution) > abs(chosen.contribution) + slack:
                return (
                    f"of the consumers of {self.places[edge.below]}, {use} gives more than {edge}"
                )
        part, mass = self._part(edge), abs(edge.weight) * self.mass(edge.above)
        for other in chosen.edges:
            slack = rtol * (mass + abs(other.weight) * self.mass(other.above))
            if self._part(other) > part + slack:
                return f"{other} ({self._part(other)}) gives more than {edge} ({part})"
        if not part and not rtol:
            return f"{edge} carries nothing"
        return None

    # Edge: Equation 1.7 of the chapter

    def edge(self, name: str, index: Position) -> Path | None:
        """The path that takes, at every vertex, the edge of the largest |J[i, j] · g[j]| of all
        consumers; ties go to the first consumer, then to the first element. None where all are 0.
        """
        at = self.vertex(name, index)
        edges: list[Edge] = []
        weight = 1.0
        while at is not None and at not in self.seeds:
            every = [edge for use in self.consumers(at) for edge in use.edges]
            best = max(every, key=self._part, default=None)
            if best is None or not self._part(best):
                return None
            edges.append(best)
            weight *= best.weight
            at = best.above
        return None if at is None else Path(tuple(edges), weight * self.seeds[at])

    def edge_fault(
        self, edges: Sequence[Edge] | None, name: str, index: Position, rtol: float = RTOL
    ) -> str | None:
        """What is wrong with a claimed path of largest edges, or with the claim of none; numbers
        are known up to rounding, as in ``greedy_fault``.
        """
        at = self.vertex(name, index)
        if edges is None:
            every = [] if at is None else self.up[at]
            there = [e for e in every if self._part(e) > rtol * self._part_mass(e)]
            return f"there is a path: {there[0]}" if there else None
        if not self.is_path(edges, name, index):
            return "these edges are no path from here to the root"
        for edge in edges:
            part = self._part(edge)
            for other in self.up[edge.below]:
                slack = rtol * (self._part_mass(edge) + self._part_mass(other))
                if self._part(other) > part + slack:
                    return f"{other} ({self._part(other)}) gives more than {edge} ({part})"
            if not part and not rtol:
                return f"{edge} carries nothing"
        return None

    def edge_ok(
        self, edges: Sequence[Edge] | None, name: str, index: Position, rtol: float = RTOL
    ) -> bool:
        """Whether every edge of a claimed path is the largest one, up to rounding."""
        return self.edge_fault(edges, name, index, rtol) is None

    def _part_mass(self, edge: Edge) -> float:
        return abs(edge.weight) * self.mass(edge.above)

    # Viterbi

    def viterbi(self, name: str, index: Position, limit: int = LIMIT) -> Path | None:
        """A path of the greatest |weight|, the first of those listed; None if there is no path."""
        found = self.paths(name, index, limit)
        return max(found, key=lambda path: abs(path.weight), default=None)

    def viterbi_fault(
        self, edges: Sequence[Edge] | None, name: str, index: Position, rtol: float = RTOL
    ) -> str | None:
        """What is wrong with a claimed path of greatest |weight|, or with the claim of none."""
        best = self.weights(name, index).max()
        if edges is None:
            return f"there is a path of weight {best}" if best else None
        if not self.is_path(edges, name, index):
            return "these edges are no path from here to the root"
        weight = abs(math.prod(edge.weight for edge in edges) * self.seeds[edges[-1].above])
        if weight < best * (1 - rtol):
            return f"its weight is {weight}, the best has {best}"
        return None

    def viterbi_ok(
        self, edges: Sequence[Edge] | None, name: str, index: Position, rtol: float = RTOL
    ) -> bool:
        """Whether a claimed path has the greatest |weight|, up to rounding."""
        return self.viterbi_fault(edges, name, index, rtol) is None


def sharp(graph: ScalarGraph, loss: Tensor, leaves: dict[str, Tensor]) -> bool:
    """Whether which derivatives are 0 does not hang on rounding, as far as can be seen.

    ``x̂ᵢ·x̂ⱼ + 1`` of a norm may be 0, or 1e-17 by another formula, and then the *number* of paths
    is not defined, though all else is. Two signs: a weight far smaller than its neighbours, and a
    weight that comes or goes when cotangents are 1/3 in place of 1. A zero that only an altogether
    different formula would blur is not seen: think of norms and softmax of tied whole numbers.
    """
    other = ScalarGraph.of(loss, leaves, unit=1 / 3)
    faintest = min(graph.faintest, other.faintest)
    return faintest > 1e-12 and graph.size == other.size


# From autograd to edges


class _Arrow(NamedTuple):
    """An edge that still waits for the vertex it starts from."""

    element: int
    above: int
    weight: float
    consumer: int
    position: int


@dataclass
class _Builder:
    graph: ScalarGraph
    leaves: dict[str, Tensor]
    zero: float
    unit: float
    most_edges: int | None
    most_paths: int | None
    waiting: dict[tuple[Node, int], list[_Arrow]] = field(default_factory=dict)
    edges: int = 0

    def run(self, loss: Tensor, seed: Tensor) -> None:
        graph = self.graph
        for number, node in enumerate(topological(loss.grad_fn)):
            graph.nodes.append(node)
            slots: dict[int, int] = {}  # the first vertex of each slot that something reaches
            if not number:
                slots[loss.output_nr] = 0
                self._root(seed, loss.output_nr)
            for slot in range(len(node._input_metadata)):
                arrows = self.waiting.pop((node, slot), None)
                if arrows:
                    slots[slot] = len(graph.up)
                    self._vertices(number, slot, shape_of(node, slot).numel(), arrows)
            if graph.operator(number) == "AccumulateGrad":
                self._leaf(node.variable, slots)
            elif slots:
                self._spread(number, slots)

    def _root(self, seed: Tensor, slot: int) -> None:
        for index, value in enumerate(seed.reshape(-1).tolist()):
            self.graph.places.append(Place(0, slot, index))
            self.graph.up.append([])
            self.graph.counts.append(int(value != 0))
            if value != 0:
                self.graph.seeds[index] = value

    def _vertices(self, number: int, slot: int, size: int, arrows: list[_Arrow]) -> None:
        graph, first = self.graph, len(self.graph.up)
        graph.places += [Place(number, slot, index) for index in range(size)]
        graph.up += [[] for _ in range(size)]
        graph.counts += [0] * size
        for element, above, weight, consumer, position in arrows:
            at = first + element
            graph.up[at].append(Edge(at, above, weight, consumer, position))
            graph.counts[at] += graph.counts[above]
        self.edges += len(arrows)
        if self.most_edges is not None and self.edges > self.most_edges:
            raise TooManyPaths(f"more than {self.most_edges:,} edges")
        if self.most_paths is not None and max(graph.counts[first:]) > self.most_paths:
            raise TooManyPaths(f"an element has more than {self.most_paths:,} paths")

    def _leaf(self, variable: Tensor, slots: dict[int, int]) -> None:
        for name, leaf in self.leaves.items():
            if leaf is variable and slots:
                self.graph.starts[name] = slots[0]

    def _spread(self, number: int, slots: dict[int, int]) -> None:
        """Leave an arrow for each derivative of a node that is not 0."""
        node, graph = self.graph.nodes[number], self.graph
        taken = [
            (slot, element)
            for slot, first in slots.items()
            for element in range(shape_of(node, slot).numel())
            if graph.counts[first + element]  # else it is on no path
        ]
        if not taken:
            return
        found, faint = derivatives(node, taken, self.unit), math.inf
        moved = True  # all derivatives are 0, 1 or -1, where there is nothing to round
        for position, rows in found.items():
            largest = float(rows.abs().amax()) if rows.numel() else 0.0
            if not math.isfinite(largest):
                raise NotFinite(f"a derivative of {graph.operator(number)} is not finite")
            arrows = [
                _Arrow(element, slots[slot] + above, weight, number, position)
                for (slot, above), row in zip(taken, rows.tolist())
                for element, weight in enumerate(row)
                if abs(weight) > self.zero * largest
            ]
            if arrows:
                self.waiting.setdefault(node.next_functions[position], []).extend(arrows)
                faint = min(faint, min(abs(arrow.weight) for arrow in arrows) / largest)
            moved = moved and faint == largest == 1
        graph.faintest = min(graph.faintest, faint)
        if not moved:
            graph.blur = max(graph.blur, blur_of(node, taken, found, faint))


def derivatives(node: Node, taken: Sequence[Taken], unit: float = 1.0) -> dict[int, Tensor]:
    """For each argument ``J`` transposed: a row for each element of an output that is taken."""
    shapes = {slot: shape_of(node, slot) for slot, _ in taken}
    units = {
        slot: torch.eye(shape.numel(), dtype=dtype_of(node, slot)).mul_(unit)
        for slot, shape in shapes.items()
    }
    single = {slot: units[slot].reshape(-1, *shapes[slot]).unbind(0) for slot in shapes}
    outs = [call(node, shapes, {slot: single[slot][element]}) for slot, element in taken]
    return {
        position: conformed([out[position] for out in outs], shape_of(child, slot)) / unit
        for position, (child, slot) in enumerate(node.next_functions)
        if child is not None and any(out[position] is not None for out in outs)
    }


def blur_of(node: Node, taken: Sequence[Taken], found: dict[int, Tensor], faint: float) -> float:
    """How much rounding changes a derivative, relative to it.

    Called on some numbers or other for all elements at once, a node must give the rows times these
    numbers. Where it does, and no entry is so ``faint`` that an error in it would not show, there
    is no more to ask. Else unit cotangents of 1/3 also tell what rounding does to each entry.
    """
    shapes = {slot: shape_of(node, slot) for slot, _ in taken}
    numbers = torch.arange(1.0, len(taken) + 1, dtype=torch.float64).cos_()
    mixed = {slot: [0.0] * shape.numel() for slot, shape in shapes.items()}
    for (slot, element), number in zip(taken, numbers.tolist()):
        mixed[slot][element] = number
    dtype = dtype_of(node, taken[0][0])
    grads = {slot: torch.tensor(mixed[slot], dtype=dtype).reshape(shapes[slot]) for slot in shapes}
    outs = call(node, shapes, grads)
    blur = 0.0
    for position, rows in found.items():
        child, slot = node.next_functions[position]
        off = (conformed([outs[position]], shape_of(child, slot)) - numbers @ rows).abs()
        if bool(off.any()):
            blur = max(blur, _largest(off / (numbers.abs() @ rows.abs())))
    if blur <= 64 * torch.finfo(dtype).eps and faint > 1e-4:
        return blur
    again = derivatives(node, taken, 1 / 3)
    each = [_largest((rows - again[at]).abs() / rows.abs()) for at, rows in found.items()]
    return max([blur, *each])


def _largest(ratios: Tensor) -> float:
    return float(ratios.nan_to_num(0.0, math.inf).amax()) if ratios.numel() else 0.0


def conformed(grads: Sequence[Tensor | None], shape: torch.Size) -> Tensor:
    """What reaches an argument, a row for each; the engine undoes broadcasting, formulas do not."""
    rows = [
        torch.zeros(shape) if grad is None
        else grad if grad.shape == shape
        else grad.sum_to_size(shape)
        for grad in grads
    ]  # fmt: skip
    return torch.stack(rows).reshape(len(rows), shape.numel()).double()


def topological(root: Node) -> list[Node]:
    """All nodes below the root, each after every node that it is an argument of."""
    uses: dict[Node, int] = {root: 0}  # edges that lead to a node, two for x · x
    stack = [root]
    while stack:
        for child, _ in stack.pop().next_functions:
            if child is not None:
                if child not in uses:
                    uses[child] = 0
                    stack.append(child)
                uses[child] += 1
    order = [root]
    for node in order:  # which grows
        for child, _ in node.next_functions:
            if child is not None:
                uses[child] -= 1
                if not uses[child]:
                    order.append(child)
    return order


def shape_of(node: Node, slot: int) -> torch.Size:
    """The shape of a node's output, which is that of the cotangent it takes there."""
    return torch.Size(node._input_metadata[slot].shape)


def is_python(node: Node) -> bool:
    """Whether the node is a ``torch.autograd.Function``."""
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def dtype_of(node: Node, slot: int) -> torch.dtype:
    """The dtype of the cotangent that a node takes there."""
    dtype: torch.dtype = node._input_metadata[slot].dtype
    return dtype


def call(node: Node, reached: Iterable[int], grads: dict[int, Tensor]) -> Sequence[Tensor | None]:
    """What a node hands to each of its ``next_functions``.

    Outputs without a cotangent get zeros, or None where nothing ever reaches them; Python
    functions get zeros there too, as from the engine by default.
    """
    given = [grads.get(slot) for slot in range(len(node._input_metadata))]
    python = is_python(node)
    for slot in range(len(given)) if python else reached:
        if given[slot] is None:
            given[slot] = torch.zeros(shape_of(node, slot), dtype=dtype_of(node, slot))
    if not python:
        outs = node(*given)
        return outs if isinstance(outs, tuple) else (outs,)
    outs = node.apply(*given)  # a result for each argument of forward, be it a tensor or not
    outs = outs if isinstance(outs, tuple) else (outs,)
    needed = iter([out for out, need in zip(outs, node.needs_input_grad) if need])
    return [None if child is None else next(needed) for child, _ in node.next_functions]


def _flat(shape: Sequence[int], index: Sequence[int]) -> int:
    if len(shape) != len(index) or not all(0 <= i < n for i, n in zip(index, shape)):
        raise IndexError(f"no element {tuple(index)} in shape {tuple(shape)}")
    flat = 0
    for i, n in zip(index, shape):
        flat = flat * n + i
    return flat
