"""Gradient norms by module, with a verdict on each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import hypot, isfinite
from typing import NamedTuple

from torch.nn import Parameter

from gradtrace.autodiff.names import enclosing
from gradtrace.flow.operator_graph import OperatorGraph, PassedGradient, rank, zero_share
from gradtrace.flow.sizing import Size
from gradtrace.flow.tuning import FAR_FACTOR, MOSTLY_DEAD_SHARE, SCORES_FACTOR

TOP = "(top)"
"""The name of the row of operators outside any module."""


class ModuleNorms(NamedTuple):
    """The gradient at one module, over its own operators, without those of its submodules.

    ``norm`` is the largest norm at its output: of the cotangents that reach its operators from
    outside the call. ``gain`` is the largest norm that its operators pass to other modules or
    calls, or to an input, over ``norm`` (None: there are none below, or ``norm`` is 0). ``own`` is
    the norm of all its parameters' gradients (None: it has none). ``depth`` is the least depth of
    its operators, ``zeros`` the share of exact zeros at its output, ``verdict`` one of "", "dead",
    "mostly dead", "vanishing", "exploding", "not finite".
    """

    module: str
    depth: int
    norm: float
    gain: float | None
    zeros: float
    own: float | None
    verdict: str = ""

    @property
    def name(self) -> str:
        """The module's name; ``(top)`` outside any module."""
        return self.module or TOP


@dataclass
class Gathered:
    """The cotangents that reach and leave the operators of one module."""

    depth: int
    reached: dict[int, None] = field(default_factory=dict)  # in order
    handed: list[int] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    dropped: float = 0.0  # the largest share of entries that an operator above set to 0
    dropper: str = ""  # this operator

    @property
    def out(self) -> list[int]:
        """All cotangents that leave the module, and its parameters' gradients."""
        return self.handed + self.own


@dataclass
class Modules:
    """The measurements of a program by module."""

    graph: OperatorGraph
    names: Mapping[int, str]
    classes: Mapping[str, str]

    @cached_property
    def gathered(self) -> dict[str, Gathered]:
        """By module, nearest to the loss first."""
        graph, found = self.graph, dict[str, Gathered]()
        places = [block.place for block in graph.blocks]
        for number, depth in sorted(graph.depth.items(), key=lambda item: item[1]):
            found.setdefault(places[number].module, Gathered(depth))
        if places:
            found[places[0].module].reached[graph.program.root] = None
        for edge in graph.edges:
            enters = edge.taker is not None and places[edge.taker] != places[edge.giver]
            if edge.taker is not None and enters:
                into = found[places[edge.taker].module]
                into.reached[edge.whole] = None
                if (share := self._dropped(edge)) > into.dropped:
                    into.dropped, into.dropper = share, graph.blocks[edge.giver].operator
            if enters or edge.leaf in self._inputs:
                found[places[edge.giver].module].handed.append(edge.value)
        for leaf in graph.program.leaves:
            name = self.names.get(leaf.value, "")
            owner = next((module for module in enclosing(name) if module in found), None)
            if owner is not None and leaf.value not in self._inputs:
                found[owner].own.append(leaf.value)
        return found

    def _dropped(self, edge: PassedGradient) -> float:
        """The share of nonzero entries that an elementwise operator set to 0."""
        if not self.graph.elementwise(edge.giver):
            return 0.0
        size, (take,) = self.graph.size, self.graph.blocks[edge.giver].takes.values()
        return zero_share(size[take].nonzero, size[edge.value].nonzero)

    @cached_property
    def _inputs(self) -> set[int | None]:
        """Leaves that are not parameters; empty without a model, as inputs are then unknown."""
        return {
            leaf.value
            for leaf in self.graph.program.leaves
            if self.classes
            and not isinstance(leaf.tensor, Parameter)
            and "." not in self.names.get(leaf.value, "")
        }

    # Rows ----------------------------------------------------------------------------------------

    @cached_property
    def rows(self) -> tuple[ModuleNorms, ...]:
        """One for each module."""
        return tuple(self._row(module, found) for module, found in self.gathered.items())

    def _row(self, module: str, found: Gathered) -> ModuleNorms:
        reached, norm = self._sizes(found.reached), self._norm(found.reached)
        zeros = zero_share(sum(x.entries for x in reached), sum(x.nonzero for x in reached))
        gain = self._norm(found.handed) / norm if found.handed and norm else None
        own = hypot(*(x.norm for x in self._sizes(found.own))) if found.own else None
        verdict = self._verdict(module, found, zeros)
        return ModuleNorms(module, found.depth, norm, gain, zeros, own, verdict)

    def _sizes(self, values: Iterable[int]) -> list[Size]:
        return [self.graph.size[value] for value in values]

    def _norm(self, values: Iterable[int]) -> float:
        """The largest norm."""
        return max(self._sizes(values), key=rank).norm

    def _verdict(self, module: str, found: Gathered, zeros: float) -> str:
        if not isfinite(self._norm(found.reached)):
            return "not finite"
        if self._all_zero(found.reached) or self._all_zero(found.out):
            faint = any(map(self.graph.faint, (*found.reached, *found.out)))
            return "vanishing" if faint else "dead"
        if min(found.dropped, zeros) >= MOSTLY_DEAD_SHARE:
            return "mostly dead"
        ratios = self._ratios(module, found)
        choosing = self.graph.scores.issuperset(self.graph.takers[v] for v in found.reached)
        if any(ratio < 1 / (SCORES_FACTOR if choosing else FAR_FACTOR) for ratio in ratios):
            return "vanishing"
        return "exploding" if any(ratio > FAR_FACTOR for ratio in ratios) else ""

    def _all_zero(self, values: Iterable[int]) -> bool:
        """Whether there are entries, and all are 0."""
        entries = [size for size in self._sizes(values) if size.entries]
        return bool(entries) and not any(size.nonzero for size in entries)

    def _ratios(self, module: str, found: Gathered) -> list[float]:
        """The gradient at a module relative to the top, and changes over many uses of a leaf."""
        graph = self.graph
        ratios = [change.ratio for change in graph.repeated if change.first.module == module]
        if graph.along and graph.along.first.norm:
            start = graph.body[0].depth
            some = (v for v in found.reached if graph.size[v].entries)
            body = [v for v in some if graph.depth[graph.takers[v]] >= start]
            ratios += [self._norm(body) / graph.along.first.norm] if body else []
        return ratios
