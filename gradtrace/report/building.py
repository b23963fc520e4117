"""From a trace to a view."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from gradtrace import flow
from gradtrace.flow.sizing import sizes
from gradtrace.ir.program import Leaf
from gradtrace.report import forest, model, routes
from gradtrace.report.cells import LARGEST, Cells, cells, grids
from gradtrace.report.forest import NONE, UNFOLLOWED, Places
from gradtrace.report.graph import Numbered, ProgramRows
from gradtrace.report.model import HeatMap, View
from gradtrace.report.numbers import along, table
from gradtrace.report.source import Source
from gradtrace.report.tree import Tree, named
from gradtrace.tracing.paths import sampled


@dataclass(frozen=True)
class Limits:
    """How much of a trace a view may hold: cells of heat maps, and stops of paths to be looked at.
    To see how many paths fit, those of the cells that are ``tried`` are followed first; fewer
    in deep graphs, where they would visit more than ``steps`` operators if none of them met.
    """

    cells: int = 40_000
    stops: int = 60_000
    tried: int = 8_000
    steps: int = 10_000_000


FULL = Limits()
SMALL = Limits(cells=4_000, stops=6_000, tried=2_000)
"""For notebooks, and models so large that a full view would keep one waiting."""


def view(source: Source, along_depth: flow.Flow, sample: int, seed: int, limits: Limits) -> View:
    """All that a report shows of a trace, which is no longer needed after it.

    ``sample`` elements are drawn for the routes, with ``seed``.
    """
    return _Builder(source, limits).view(along_depth, sample, seed)


class _Builder:
    """What the parts of a view share."""

    def __init__(self, source: Source, limits: Limits) -> None:
        self.source = source
        self.limits = limits
        self.modules = named(source)
        self.rows = ProgramRows(source, Numbered(), Numbered(), self.modules)

    def view(self, along_depth: flow.Flow, sample: int, seed: int) -> View:
        source, rows = self.source, self.rows
        operators, edges = rows.operators(), rows.edges()
        shown = self._cells()
        longest = deepest(edges, len(operators.name))
        drawn = self._drawn(min(sample, max(1, self.limits.steps // longest)), seed)
        grown, starts = self._followed(shown, drawn, longest)
        chosen = self._sampled(grown, drawn)
        ways = routes.ways(grown, chosen, rows)
        wanted = self._wanted(ways, shown, starts)
        left, number = forest.chosen(grown, wanted, self.limits.stops)
        leaves = tuple(
            self._leaf(n, leaf, shown.get(leaf.value), starts, number)
            for n, leaf in enumerate(source.leaves)
        )
        paths = int((chosen.stop != NONE).sum())
        total = sum(source.sizes.values())
        return View(
            name=source.modules.get("") or "loss",
            rule=source.rule,
            granularity=source.granularity,
            pairs=source.pairs,
            notes=source.notes,
            forest=forest.kept(grown, left, number, rows),
            words=rows.words.all(),
            shapes=rows.shapes.all(),
            modules=Tree(source, self.modules).modules(),
            operators=operators,
            edges=edges,
            leaves=leaves,
            routes=tuple(routes.told(way, number, operators.module.tolist()) for way in ways),
            sample=model.Sample(paths, len(chosen.stop), total, seed),
            tables={kind: self._table(kind) for kind in source.tables},
            flow=along(along_depth, self.modules),
        )

    def _table(self, kind: str) -> model.Influence:
        found = self.source.tables[kind]
        return table(found, self.modules if kind in ("", "modules") else {})

    # Heat maps -----------------------------------------------------------------------------------

    def _cells(self) -> dict[int, Cells]:
        """Those of all leaves that have elements, by value."""
        leaves = [x for x in self.source.leaves if 0 < x.tensor.numel() <= LARGEST]
        cuts = grids([tuple(leaf.tensor.shape) for leaf in leaves], self.limits.cells)
        return {
            leaf.value: cells(self.source.gradient(leaf), cut) for leaf, cut in zip(leaves, cuts)
        }

    def _leaf(
        self,
        n: int,
        leaf: Leaf,
        shown: Cells | None,
        starts: dict[int, Places],
        number: Places,
    ) -> model.Leaf:
        source, name = self.source, self.source.names[leaf.value]
        gradient = source.gradient(leaf)
        norm, largest, nonzero, _ = sizes(gradient).tolist()
        parameter = source.is_parameter(leaf)
        return model.Leaf(
            name,
            (name, *source.aliases.get(name, ())),
            self.rows.leaf[leaf.value],
            self.rows.home(name) if parameter else 0,
            parameter,
            tuple(leaf.tensor.shape),
            gradient.numel(),
            gradient.numel() - int(nonzero),
            norm,
            largest,
            None if shown is None else _map(shown, starts[leaf.value], number),
        )

    # Paths ---------------------------------------------------------------------------------------

    def _drawn(self, sample: int, seed: int) -> dict[int, Places]:
        values = {name: value for value, name in self.source.names.items()}
        return {values[n]: e.numpy() for n, e in sampled(self.source.sizes, sample, seed).items()}

    def _followed(
        self, shown: dict[int, Cells], drawn: dict[int, Places], longest: int
    ) -> tuple[forest.Grown, dict[int, Places]]:
        """Paths of what was drawn and of cells; and of each cell the stop where its path starts.

        How many cells have paths that fit is known when some were followed: the more there are,
        the more they share.
        """
        ranks = {value: ranked(found.gradient) for value, found in shown.items()}
        total = sum(map(len, ranks.values()))
        few = min(self.limits.tried, self.limits.steps // longest)
        whole = self.source.granularity == "operator"  # one path for all elements of a leaf
        many = total if whole else min(total, max(len(shown), few))
        grown, starts = self._sweep(shown, drawn, _first(ranks, many))
        room = many * self.limits.stops // max(1, len(grown.next))
        if many < total and 3 * many < 2 * room:
            return self._sweep(shown, drawn, _first(ranks, room + room // 4))
        return grown, starts

    def _sweep(
        self, shown: dict[int, Cells], drawn: dict[int, Places], first: dict[int, Places]
    ) -> tuple[forest.Grown, dict[int, Places]]:
        """Follow the cells that are ``first`` in each leaf."""
        elements = {
            value: np.unique(np.concatenate([mine, shown[value].element[first[value]]]))
            if value in shown
            else mine
            for value, mine in drawn.items()
        }
        grown = forest.followed(self.source, elements)
        starts = {}
        for value, found in shown.items():
            starts[value] = np.full(len(found.element), UNFOLLOWED, dtype=np.int64)
            at = np.searchsorted(elements[value], found.element[first[value]])
            starts[value][first[value]] = grown.starts[value][at]
        return grown, starts

    def _sampled(self, grown: forest.Grown, drawn: dict[int, Places]) -> routes.Sampled:
        """Where the paths of what was drawn start."""
        stops, sizes_ = [np.zeros(0, dtype=np.int64)], [np.zeros(0)]
        for leaf in self.source.leaves:
            mine = drawn[leaf.value]
            at = np.searchsorted(grown.elements[leaf.value], mine)
            stops.append(grown.starts[leaf.value][at])
            if len(mine):
                flat = self.source.gradient(leaf).reshape(-1)
                sizes_.append(flat[torch.from_numpy(mine)].double().numpy())
        return routes.Sampled(np.concatenate(stops), np.concatenate(sizes_))

    def _wanted(
        self, ways: list[routes.RouteGroup], shown: dict[int, Cells], starts: dict[int, Places]
    ) -> Places:
        """The stops where paths start, those to keep first in front: of each route one path, of
        each leaf the largest element, then of each the second, and so on.
        """
        order = [
            np.stack([np.arange(len(way.starts)), way.starts]) for way in ways if len(way.starts)
        ]
        for value, each in shown.items():
            order.append(np.stack([ranked(each.gradient), starts[value]]))
        turn, stop = np.concatenate([np.zeros((2, 0), dtype=np.int64), *order], 1)
        found: Places = stop[np.argsort(turn, kind="stable")]
        return found[found >= 0]


def deepest(edges: model.Edges, rows: int) -> int:
    """The most operators on the way from a leaf to the loss."""
    depth = [1] * rows
    for consumer, producer in zip(edges.consumer.tolist(), edges.producer.tolist()):
        depth[producer] = max(depth[producer], depth[consumer] + 1)
    return max(depth)


def _map(shown: Cells, starts: Places, number: Places) -> HeatMap:
    start = np.where(starts < 0, starts, number[np.maximum(starts, 0)] if len(number) else starts)
    return HeatMap(*shown.grid, shown.element, shown.gradient, start.astype(np.int32))


def _first(ranks: dict[int, Places], many: int) -> dict[int, Places]:
    """The places of so many in all, of each leaf as many as of any other, as far as it has them."""
    turn = np.sort(np.concatenate([np.zeros(0, dtype=np.int64), *ranks.values()]))
    limit = turn[many] if many < len(turn) else len(turn)
    return {value: np.flatnonzero(rank < max(1, limit)) for value, rank in ranks.items()}


def ranked(gradient: model.Floats) -> Places:
    """The place of each among all, the largest |gradient| first."""
    size = np.where(np.isnan(gradient), np.inf, np.abs(gradient))
    rank = np.empty(len(size), dtype=np.int64)
    rank[np.argsort(-size, kind="stable")] = np.arange(len(size))
    return rank
