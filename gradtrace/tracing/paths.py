"""Paths from a parameter element to the loss, as values to look at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import fsum, inf, log, nan, prod
from typing import Any, overload

import torch
from torch import Tensor

from gradtrace.io.table import TextColumn, TextTable
from gradtrace.ir.program import Program
from gradtrace.printable import printable
from gradtrace.tracing.path_forest import PathForest, PathProvenance, SliceBits
from gradtrace.tracing.path_search import PathEdge, PathFollower
from gradtrace.tracing.provenance import ComponentBits
from gradtrace.tracing.tensor_paths import TensorEdge
from gradtrace.types import Shape


@dataclass(frozen=True)
class PathStep:
    """A vertex of the scalar graph that a path visits: one element of an operator's output.

    ``derivative`` is that of the next operator's element by this one (at the loss, what the loss
    itself is weighed with). ``share`` is the part of the gradient here that came this way:
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
class Path:
    """A path, from a leaf element (first step) to the loss (last).

    ``weight`` is the product of all derivatives along it, signed; ``gradient`` that of the leaf
    element, to which all its paths add up. At operator granularity steps are whole tensors:
    ``index`` is empty, ``gradient`` is ``Σ |gradient|``, derivative and weight are nan, and
    ``share`` is the part, of what all users of a tensor handed back, that came this way.
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
        """The natural logarithm of |weight|, which no path is too long for."""
        return fsum(log(abs(s.derivative)) if s.derivative else -inf for s in self.steps)

    @property
    def share(self) -> float:
        """The part of the leaf element's gradient that this path alone carries."""
        return self.weight / self.gradient if self.gradient else nan

    @property
    def modules(self) -> list[str]:
        """The modules from parameter to loss, each once in a row."""
        found: list[str] = []
        for step in self.steps[1:]:
            if step.module and (not found or found[-1] != step.module):
                found.append(step.module)
        return found

    @property
    def operators(self) -> list[str]:
        """The operators from parameter to loss."""
        return [step.operator for step in self.steps[1:]]

    def table(self) -> TextTable:
        """The steps as a table."""
        columns = (
            TextColumn("operator"),
            TextColumn("module"),
            TextColumn("shape"),
            TextColumn("element"),
            TextColumn("derivative", "number"),
            TextColumn("gradient", "number"),
            TextColumn("share", "share"),
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
        return TextTable(title, columns, rows)

    def __str__(self) -> str:
        return str(self.table())

    def __len__(self) -> int:
        return len(self.steps)

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def to_pandas(self) -> Any:
        """The steps as a pandas.DataFrame."""
        return self.table().to_pandas()

    def __repr__(self) -> str:
        way = " -> ".join(self.modules) or f"{len(self.steps)} steps"
        return printable(f"Path({self.name}{list(self.index)}: {way}, weight={self.weight:.4g})")


def _shape(sizes: Shape) -> str:
    return "×".join(map(str, sizes)) if sizes else "scalar"


def _way(path: Path) -> str:
    return " → ".join(path.modules or path.operators)


@dataclass(frozen=True)
class Paths(Sequence[Path]):
    """Several paths, in order."""

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
        """Those from a leaf, or from one element of it."""
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

    def table(self) -> TextTable:
        """One row a path."""
        columns = (
            TextColumn("leaf"),
            TextColumn("element"),
            TextColumn("weight", "number"),
            TextColumn("gradient", "number"),
            TextColumn("steps", "count"),
            TextColumn("way"),
        )
        rows = tuple(
            (p.name, str(list(p.index)), p.weight, p.gradient, len(p), _way(p)) for p in self.items
        )
        return TextTable(self.title, columns, rows)

    def __str__(self) -> str:
        return str(self.table())

    def __repr__(self) -> str:
        return f"Paths({len(self.items):,} paths)"

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def to_pandas(self) -> Any:
        """One row a path, as a pandas.DataFrame."""
        return self.table().to_pandas()


# From hops to paths -------------------------------------------------------------------------------


@dataclass(frozen=True)
class ValueLabels:
    """What values are to a reader: a leaf, or the output of an operator."""

    names: dict[int, str]  # by leaf value
    shapes: dict[int, Shape]
    places: dict[int, tuple[str, str, int]]  # operator, module, call; of operators' outputs only
    seed: Tensor
    pair: int

    def step(
        self, value: int, element: int, derivative: float, gradient: float, onward: float | None
    ) -> PathStep:
        """A stop, given the gradient of the next one (None: this is the last)."""
        operator, module, call = self.places.get(value, ("leaf", "", 0))
        share = derivative if onward is None else onward * derivative
        share = share / gradient if gradient else nan
        shape = self.shapes[value]
        index = unravel(element, shape)
        return PathStep(operator, module, call, shape, index, derivative, gradient, share)

    def path(self, value: int, steps: Iterable[PathStep]) -> Path:
        """The path of a leaf."""
        first, *rest = steps
        first = replace(first, operator="leaf", module="", call=0)
        name = self.names[value]
        return Path(name, first.index, (first, *rest), first.gradient, self.pair)


class LazyPaths(Sequence[Path]):
    """Paths of a forest, made when they are asked for; those that meet share their steps."""

    def __init__(self, legend: ValueLabels, forest: PathForest, starts: Sequence[int]) -> None:
        self.legend = legend
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
        return self.legend.path(self.forest.value(node), self._steps(node))

    def __len__(self) -> int:
        return len(self.starts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def of(self, name: str, index: Shape | None) -> LazyPaths:
        """Those from a leaf, or from one element of it."""
        legend, forest = self.legend, self.forest
        values = {value for value, known in legend.names.items() if known == name}
        mine = [node for node in self.starts if forest.value(node) in values]
        if index is not None and mine:
            shape = legend.shapes[forest.value(mine[0])]
            mine = [node for node in mine if unravel(forest.place(node), shape) == index]
        return self._some(mine)

    def _some(self, starts: Sequence[int]) -> LazyPaths:
        return LazyPaths(self.legend, self.forest, starts)

    def _steps(self, node: int) -> Iterator[PathStep]:
        while node >= 0:
            if node not in self.known:
                self.known[node] = self._step(node)
            step, node = self.known[node]
            yield step

    def _step(self, node: int) -> tuple[PathStep, int]:
        """The stop at a node, and the node of the next stop (-1: there is none)."""
        here, *between = self.forest.until(node, self.legend.places)
        element, gradient = here.element, here.gradient
        last = between[-1] if between else here
        if not between or last.value not in self.legend.places:
            derivative = float(self.legend.seed.reshape(-1)[last.element])
            return self.legend.step(here.value, element, derivative, gradient, None), -1
        derivative = prod((stop.weight for stop in (here, *between[:-1])), start=1.0)
        step = self.legend.step(here.value, element, derivative, gradient, last.gradient)
        return step, last.node


@dataclass
class Builder:
    """Makes paths of what was followed: only operators' outputs are steps to a reader."""

    kept: PathFollower
    legend: ValueLabels

    @classmethod
    def of(cls, kept: PathFollower, names: dict[int, str], pair: int = 0) -> Builder:
        """For the leaves of a program."""
        program = kept.program
        shapes = {step.out: step.shape for step in program.steps()}
        shapes[program.root] = tuple(kept.seed.shape)
        places = {
            value: (block.operator, *block.place) for value, (block, _) in kept.takers.items()
        }
        return cls(kept, ValueLabels(names, shapes, places, kept.seed, pair))

    def path(self, value: int, element: int, hops: list[PathEdge]) -> Path:
        """The path of hops from a leaf's value."""
        stops: list[tuple[int, int, float]] = []  # value, element, derivative to the next stop
        at, place, weight = value, element, 1.0
        for hop in hops:
            weight *= hop.weight
            if hop.value in self.legend.places:
                stops.append((at, place, weight))
                at, place, weight = hop.value, hop.element, 1.0
        stops.append((at, place, float(self.kept.seed.reshape(-1)[place])))
        gradients = [self._gradient(v, e) for v, e, _ in stops]
        steps = [
            self.legend.step(*stop, gradient, onward)
            for stop, gradient, onward in zip(stops, gradients, [*gradients[1:], None])
        ]
        return self.legend.path(value, steps)

    def coarse(self, value: int, links: list[TensorEdge]) -> Path:
        """The path of a whole leaf: sizes in place of gradients, no elements, no derivatives."""
        legend, stops = self.legend, [value, *(link.take for link in links)]
        steps = []
        for n, at in enumerate(stops):
            operator, module, call = legend.places[at] if n else ("leaf", "", 0)
            share = links[n].size / links[n].total if n < len(links) else 1.0
            size = float(self.kept.gradients[at].abs().sum(dtype=torch.float64))
            steps.append(PathStep(operator, module, call, legend.shapes[at], (), nan, size, share))
        return Path(legend.names[value], (), tuple(steps), steps[0].gradient, legend.pair)

    def _gradient(self, value: int, element: int) -> float:
        return float(self.kept.gradients[value].reshape(-1)[element])

    def followed(self, starts: Mapping[int, Tensor], rule: str) -> Iterator[Path | None]:
        """The path of each element by a rule; None where there is none."""
        forest = self.kept.follow(starts, rule)
        woven = LazyPaths(self.legend, forest, forest.starts.tolist())
        for n, whole in enumerate(forest.whole.tolist()):
            yield woven[n] if whole else None

    def woven(self, starts: Mapping[int, Tensor], rule: str) -> LazyPaths:
        """The paths of elements by a rule, without those that have none."""
        forest = self.kept.follow(starts, rule)
        return LazyPaths(self.legend, forest, forest.starts[forest.whole].tolist())


def marked(forest: PathForest, program: Program, marks: ComponentBits) -> PathProvenance:
    """The marks of followed paths: those that ``Tracer`` finds at the elements they start from."""
    bits: dict[int, int] = {}
    slices: dict[int, SliceBits] = {}
    shapes = {step.out: step.shape for step in program.steps()}
    shapes[program.root] = tuple(program.seed.shape)
    for number, block in enumerate(program.blocks):
        for value in block.takes.values():
            bits[value] = bits.get(value, 0) | marks.block.get(number, 0)
            if number in marks.slices:
                slices[value] = SliceBits(shapes[value], *marks.slices[number])
        for position, value in block.gives.items():
            bits[value] = bits.get(value, 0) | marks.position.get((number, position), 0)
    return forest.marks(bits, slices)


def unravel(element: int, shape: Shape) -> Shape:
    """The multi-index of an element's number."""
    found = []
    for size in reversed(shape):
        found.append(element % size)
        element //= size
    return tuple(reversed(found))


def ravel(index: Sequence[int], shape: Shape) -> int:
    """The number of the element with this multi-index."""
    number = 0
    for i, size in zip(index, shape):
        number = number * size + i
    return number


def sampled(sizes: dict[str, int], sample: int, seed: int) -> dict[str, Tensor]:
    """Elements of several tensors, drawn without repetition, each as likely; in order of tensor."""
    total = sum(sizes.values())
    generator = torch.Generator().manual_seed(seed)
    if sample >= total:
        drawn = torch.arange(total, device="cpu")
    elif total <= 1 << 24:
        drawn = torch.randperm(total, generator=generator, device="cpu")[:sample].sort().values
    else:
        drawn = torch.empty(0, dtype=torch.int64, device="cpu")
        while len(drawn) < sample:  # few of many: draw again what came twice
            more = torch.randint(total, (2 * sample,), generator=generator, device="cpu")
            drawn = torch.cat([drawn, more]).unique()  # type: ignore[no-untyped-call]
        drawn = (
            drawn[torch.randperm(len(drawn), generator=generator, device="cpu")[:sample]]
            .sort()
            .values
        )
    found, first = {}, 0
    for name, size in sizes.items():
        found[name] = drawn[(drawn >= first) & (drawn < first + size)] - first
        first += size
    return found
