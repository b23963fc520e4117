"""``Path`` and ``Paths``: paths from a parameter element to the loss, as a user sees them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import exp, fsum, inf, isfinite, isnan, log, nan, prod
from typing import TypeVar, overload

import torch
from torch import Tensor

from gradtrace.errors import printable
from gradtrace.ir.passes.provenance import ComponentBits
from gradtrace.ir.program import Program
from gradtrace.linops.indexing import repeated
from gradtrace.paths.path_forest import PathForest, PathProvenance, SliceBits
from gradtrace.paths.path_search import PathEdge, PathFollower
from gradtrace.pytorch.function_modes import paused
from gradtrace.pytorch.random_state import seeded
from gradtrace.table import Column, Table, Tabled
from gradtrace.types import Shape, unravel

K = TypeVar("K")


@dataclass(frozen=True)
class PathStep:
    """A vertex of the scalar graph that a path visits: one element of an operator's output.

    ``derivative`` is that of the next step's element with respect to this one (at the loss, the
    loss's seed weight). ``share`` is the part of the gradient here that came along this path:
    ``derivative · gradient of the next / gradient``; nan where the gradient is 0.
    """

    operator: str
    module: str
    call: int
    shape: Shape
    index: Shape
    derivative: float
    gradient: float
    share: float


@dataclass(frozen=True)
class Path(Tabled):
    """A path, from a leaf element (first step) to the loss (last).

    ``weight`` is the signed product of all derivatives along it; ``gradient`` is the leaf element's
    gradient, the sum of the weights of all its paths.
    """

    name: str
    index: Shape
    steps: tuple[PathStep, ...]
    gradient: float
    pair: int = 0

    @property
    def weight(self) -> float:
        """The signed product of the derivatives."""
        return prod(step.derivative for step in self.steps)

    @property
    def log_weight(self) -> float:
        """The natural logarithm of |weight|; does not underflow on long paths."""
        return fsum(log(abs(s.derivative)) if s.derivative else -inf for s in self.steps)

    @property
    def coverage(self) -> float:
        """The part of its element's gradient that this path carries, signed: weight / gradient.

        1 if the element has no other path; negative if the path has the opposite sign; nan if the
        gradient is 0, as the contributions of several paths cancel.
        """
        if not self.gradient:
            return nan
        if self.weight or not isfinite(self.log_weight):
            return self.weight / self.gradient
        size = exp(self.log_weight - log(abs(self.gradient)))  # the weight underflows
        odd = sum(step.derivative < 0 for step in self.steps) + (self.gradient < 0)
        return -size if odd % 2 else size

    @property
    def share(self) -> float:
        """The same as ``coverage``."""
        return self.coverage

    @property
    def modules(self) -> list[str]:
        """The modules from parameter to loss, without consecutive repetitions."""
        found: list[str] = []
        for step in self.steps[1:]:
            if step.module and (not found or found[-1] != step.module):
                found.append(step.module)
        return found

    @property
    def operators(self) -> list[str]:
        """The operators from parameter to loss."""
        return [step.operator for step in self.steps[1:]]

    def table(self) -> Table:
        """The steps as a table."""
        columns = (
            Column("operator"),
            Column("module"),
            Column("shape"),
            Column("element"),
            Column("derivative", "number"),
            Column("gradient", "number"),
            Column("share", "share"),
        )
        rows = tuple(
            (
                step.operator,
                step.module + (f" (call {step.call})" if step.call else ""),
                _shape(step.shape),
                str(list(step.index)),
                step.derivative,
                step.gradient,
                step.share,
            )
            for step in self.steps
        )
        title = (
            f"{self.name}{list(self.index)}: weight {self.weight:.4g}, gradient {self.gradient:.4g}"
        )
        return Table(f"{title}{self._carried()}", columns, rows)  # type: ignore[arg-type]

    def _carried(self) -> str:
        """The coverage in words."""
        if isnan(self.weight):
            return ""
        if not self.gradient:
            return "; its contributions cancel to 0"
        return "" if isnan(self.coverage) else f", coverage {self.coverage:.1%}"

    def __len__(self) -> int:
        return len(self.steps)

    def __repr__(self) -> str:
        route = " -> ".join(self.modules) or f"{len(self.steps)} steps"
        return printable(f"Path({self.name}{list(self.index)}: {route}, weight={self.weight:.4g})")


def _shape(sizes: Shape) -> str:
    return "×".join(map(str, sizes)) if sizes else "scalar"


def _route(path: Path) -> str:
    return " → ".join(path.modules or path.operators)


@dataclass(frozen=True)
class Paths(Tabled, Sequence[Path]):
    """A sequence of paths."""

    items: Sequence[Path]
    title: str = "Paths"

    @overload
    def __getitem__(self, at: int) -> Path: ...
    @overload
    def __getitem__(self, at: slice) -> Paths: ...
    def __getitem__(self, at: int | slice) -> Path | Paths:
        found = self.items[at]
        return found if isinstance(found, Path) else Paths(found, self.title)

    def __len__(self) -> int:
        return len(self.items)

    def of(self, name: str, index: Sequence[int] | int | None = None) -> Paths:
        """The paths from a leaf, or from one element of it.

        Args:
            name: Name of the leaf.
            index: Of one element; all by default.

        Returns:
            Those paths.
        """
        wanted = (index,) if isinstance(index, int) else None if index is None else tuple(index)
        if isinstance(self.items, LazyPaths):
            return Paths(self.items.of(name, wanted), self.title)
        found = tuple(p for p in self.items if p.name == name and wanted in (None, p.index))
        return Paths(found, self.title)

    def total(self) -> float:
        """The sum of their weights: for all the paths of an element, its gradient."""
        return fsum(path.weight for path in self.items)

    @cached_property
    def modules(self) -> dict[str, float]:
        """For each module the share of these paths that go through it."""
        seen = Counter(module for path in self.items for module in set(path.modules))
        return {module: n / len(self.items) for module, n in seen.most_common()}

    def table(self) -> Table:
        """The paths as a table, one row per path."""
        columns = (
            Column("leaf"),
            Column("element"),
            Column("weight", "number"),
            Column("gradient", "number"),
            Column("coverage", "share"),
            Column("steps", "count"),
            Column("way"),
        )
        rows = tuple(
            (p.name, str(list(p.index)), p.weight, p.gradient, p.coverage, len(p), _route(p))
            for p in self.items
        )
        return Table(self.title, columns, rows)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return f"Paths({len(self.items):,} paths)"


# From edges to paths ------------------------------------------------------------------------------


@dataclass(frozen=True)
class ValueLabels:
    """Names and shapes of a program's values: leaves, and outputs of operators."""

    names: dict[int, str]  # by leaf value
    shapes: dict[int, Shape]
    places: dict[int, tuple[str, str, int]]  # operator, module, call; of operators' outputs only
    seed: Tensor
    pair: int

    def step(
        self, value: int, element: int, derivative: float, gradient: float, onward: float | None
    ) -> PathStep:
        """A step of a path, given the gradient of the next step (None: this is the last)."""
        operator, module, call = self.places.get(value, ("leaf", "", 0))
        share = derivative if onward is None else onward * derivative
        share = share / gradient if gradient else nan
        shape = self.shapes[value]
        index = unravel(element, shape)
        return PathStep(operator, module, call, shape, index, derivative, gradient, share)

    def path(self, value: int, steps: Iterable[PathStep]) -> Path:
        """The path of a leaf, given its steps."""
        first, *rest = steps
        first = replace(first, operator="leaf", module="", call=0)
        name = self.names[value]
        return Path(name, first.index, (first, *rest), first.gradient, self.pair)


class LazyPaths(Sequence[Path]):
    """The paths of a forest, built when accessed; paths that meet share their steps."""

    def __init__(self, labels: ValueLabels, forest: PathForest, starts: Sequence[int]) -> None:
        self.labels = labels
        self.forest = forest
        self.starts = starts  # nodes
        self.known: dict[int, tuple[PathStep, int]] = {}  # by node, with the node of the next

    @overload
    def __getitem__(self, at: int) -> Path: ...
    @overload
    def __getitem__(self, at: slice) -> LazyPaths: ...
    def __getitem__(self, at: int | slice) -> Path | LazyPaths:
        if isinstance(at, slice):
            return self._some(self.starts[at])
        node = self.starts[at]
        return self.labels.path(self.forest.value(node), self._steps(node))

    def __len__(self) -> int:
        return len(self.starts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def of(self, name: str, index: Shape | None) -> LazyPaths:
        """The paths from a leaf, or from one element of it."""
        labels, forest = self.labels, self.forest
        values = {value for value, known in labels.names.items() if known == name}
        mine = [node for node in self.starts if forest.value(node) in values]
        if index is not None and mine:
            shape = labels.shapes[forest.value(mine[0])]
            mine = [node for node in mine if unravel(forest.place(node), shape) == index]
        return self._some(mine)

    def _some(self, starts: Sequence[int]) -> LazyPaths:
        return LazyPaths(self.labels, self.forest, starts)

    def _steps(self, node: int) -> Iterator[PathStep]:
        while node >= 0:
            if node not in self.known:
                self.known[node] = self._step(node)
            step, node = self.known[node]
            yield step

    def _step(self, node: int) -> tuple[PathStep, int]:
        """The step at a node, and the node of the next step (-1: there is none)."""
        here, *rest = self.forest.until(node, self.labels.places)
        element, gradient = here.element, here.gradient
        last = rest[-1] if rest else here
        if not rest or last.value not in self.labels.places:
            with paused():
                derivative = float(self.labels.seed.reshape(-1)[last.element])
            return self.labels.step(here.value, element, derivative, gradient, None), -1
        derivative = prod((point.weight for point in (here, *rest[:-1])), start=1.0)
        step = self.labels.step(here.value, element, derivative, gradient, last.gradient)
        return step, last.node


@dataclass
class Builder:
    """Builds ``Path`` objects from followed edges; only operators' outputs become steps."""

    follower: PathFollower
    labels: ValueLabels

    @classmethod
    def of(cls, follower: PathFollower, names: dict[int, str], pair: int = 0) -> Builder:
        """The builder for the leaves of the follower's program."""
        program = follower.program
        shapes = {step.out: step.shape for step in program.steps()}
        shapes[program.root] = tuple(follower.seed.shape)
        places = {
            value: (block.operator, *block.place) for value, (block, _) in follower.takers.items()
        }
        return cls(follower, ValueLabels(names, shapes, places, follower.seed, pair))

    def path(self, value: int, element: int, edges: list[PathEdge]) -> Path:
        """The path along ``edges``, from an element of a leaf's value."""
        points: list[tuple[int, int, float]] = []  # value, element, derivative to the next point
        at, place, weight = value, element, 1.0
        for edge in edges:
            weight *= edge.weight
            if edge.value in self.labels.places:
                points.append((at, place, weight))
                at, place, weight = edge.value, edge.element, 1.0
        points.append((at, place, float(self.follower.seed.reshape(-1)[place])))
        gradients = [self._gradient(v, e) for v, e, _ in points]
        steps = [
            self.labels.step(*point, gradient, onward)
            for point, gradient, onward in zip(points, gradients, [*gradients[1:], None])
        ]
        return self.labels.path(value, steps)

    def _gradient(self, value: int, element: int) -> float:
        return float(self.follower.gradients[value].reshape(-1)[element])

    def followed(self, starts: Mapping[int, Tensor], rule: str) -> Iterator[Path | None]:
        """The path of each start by a rule; None where it has none."""
        forest = self.follower.follow(starts, rule)
        lazy = LazyPaths(self.labels, forest, forest.starts.tolist())
        for n, whole in enumerate(forest.whole.tolist()):
            yield lazy[n] if whole else None

    def lazy_paths(self, starts: Mapping[int, Tensor], rule: str) -> LazyPaths:
        """The paths of all starts that have one, by a rule."""
        forest = self.follower.follow(starts, rule)
        return LazyPaths(self.labels, forest, forest.starts[forest.whole].tolist())


def path_provenance(forest: PathForest, program: Program, bits_of: ComponentBits) -> PathProvenance:
    """The provenance of followed paths; that which ``executor.execute`` finds."""
    return forest.provenance(*path_bits(program, bits_of))


def path_bits(
    program: Program, bits_of: ComponentBits
) -> tuple[dict[int, int], dict[int, SliceBits]]:
    """By value, the bits that a path gets for each of its elements, or for those of a slice."""
    bits: dict[int, int] = {}
    slices: dict[int, SliceBits] = {}
    shapes: dict[int, Shape] = {}
    if bits_of.slices:
        shapes = {step.out: step.shape for step in program.steps()}
        shapes[program.root] = tuple(program.seed.shape)
    for number, block in enumerate(program.blocks):
        for value in block.takes.values():
            bits[value] = bits.get(value, 0) | bits_of.block.get(number, 0)
            if number in bits_of.slices:
                slices[value] = SliceBits(shapes[value], *bits_of.slices[number])
        for position, value in block.gives.items():
            bits[value] = bits.get(value, 0) | bits_of.position.get((number, position), 0)
    return bits, slices


PERMUTED_MAX_ELEMENTS = 1 << 16
"""Above this many elements a small sample is drawn element by element: to permute a few million
takes as long as ten backward passes over them.
"""


def sampled(sizes: Mapping[K, int], sample: int, seed: int) -> dict[K, Tensor]:
    """``sample`` elements of several tensors, uniformly without replacement: flat indices by
    tensor, in ascending order.
    """
    total = sum(sizes.values())
    generator = seeded(seed)
    if sample >= total:
        drawn = torch.arange(total, device="cpu")
    elif total <= PERMUTED_MAX_ELEMENTS or 4 * sample > total:
        drawn = torch.randperm(total, generator=generator, device="cpu")[:sample].sort().values
    else:
        drawn = torch.empty(0, dtype=torch.int64, device="cpu")
        while len(drawn) < sample:  # few of many: draw more until enough are distinct
            more = torch.randint(total, (2 * sample,), generator=generator, device="cpu")
            drawn = torch.cat([drawn, more]).unique()  # type: ignore[no-untyped-call]
        drawn = (
            drawn[torch.randperm(len(drawn), generator=generator, device="cpu")[:sample]]
            .sort()
            .values
        )
    firsts = torch.tensor([0, *accumulate(sizes.values())], device="cpu")
    counts = torch.searchsorted(drawn, firsts).diff()
    local = drawn - repeated(firsts[:-1], counts)
    return dict(zip(sizes, torch.split(local, counts.tolist())))
