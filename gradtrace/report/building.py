"""Builds the view of a trace."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from gradtrace import flow
from gradtrace.flow.sizing import sizes
from gradtrace.ir.program import Leaf
from gradtrace.report import forest, model, routes
from gradtrace.report.cells import MAX_NUMBERED_ELEMENTS, Cells, cells, grids
from gradtrace.report.forest import NONE, UNFOLLOWED, Places
from gradtrace.report.graph import Numbered, ProgramRows
from gradtrace.report.model import HeatMap, View
from gradtrace.report.numbers import along, table
from gradtrace.report.source import Source
from gradtrace.report.tree import Tree, named
from gradtrace.tracing.paths import sampled


@dataclass(frozen=True)
class Limits:
    """Limits on the size of a view: cells of heat maps, and points of paths (``stops``).

    To estimate how many paths fit, those of ``tried`` cells are followed first; fewer in deep
    graphs, where they would visit more than ``steps`` operators if none of them joined.
    """

    cells: int = 40_000
    stops: int = 60_000
    tried: int = 8_000
    steps: int = 10_000_000


FULL = Limits()
SMALL = Limits(cells=4_000, stops=6_000, tried=2_000)
"""For notebooks, and for models so large that a full view would take long."""


def view(source: Source, along_depth: flow.Flow, sample: int, seed: int, limits: Limits) -> View:
    """Everything that a report shows of a trace; does not keep the trace alive.

    ``sample`` elements are drawn for the routes, with ``seed``.
    """
    return _Builder(source, limits).view(along_depth, sample, seed)


class _Builder:
    """Builds a view; holds what its parts share."""

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
        points, starts = self._followed(shown, drawn, longest)
        chosen = self._sampled(points, drawn)
        ways = routes.ways(points, chosen, rows)
        wanted = self._wanted(ways, shown, starts)
        left, number = forest.chosen(points, wanted, self.limits.stops)
        leaves = tuple(
            self._leaf(n, leaf, shown.get(leaf.value), starts, number)
            for n, leaf in enumerate(source.leaves)
        )
        paths = int((chosen.point != NONE).sum())
        total = sum(source.sizes.values())
        return View(
            name=source.modules.get("") or "loss",
            rule=source.rule,
            granularity=source.granularity,
            pairs=source.pairs,
            notes=source.notes,
            forest=forest.kept(points, left, number, rows),
            words=rows.words.all(),
            shapes=rows.shapes.all(),
            modules=Tree(source, self.modules).modules(),
            operators=operators,
            edges=edges,
            leaves=leaves,
            routes=tuple(routes.as_route(way, number, operators.module.tolist()) for way in ways),
            sample=model.Sample(paths, len(chosen.point), total, seed),
            tables={kind: self._table(kind) for kind in source.tables},
            flow=along(along_depth, self.modules),
        )

    def _table(self, kind: str) -> model.Influence:
        found = self.source.tables[kind]
        return table(found, self.modules if kind in ("", "modules") else {})

    # Heat maps -----------------------------------------------------------------------------------

    def _cells(self) -> dict[int, Cells]:
        """The heat map cells of all leaves that have elements, by value."""
        leaves = [x for x in self.source.leaves if 0 < x.tensor.numel() <= MAX_NUMBERED_ELEMENTS]
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
    ) -> tuple[forest.PathPoints, dict[int, Places]]:
        """Paths of the drawn elements and of cells; and for each cell the point where its path
        starts.

        How many cells' paths fit is estimated by following some first, since the more paths there
        are, the more points they share.
        """
        ranks = {value: ranked(found.gradient) for value, found in shown.items()}
        total = sum(map(len, ranks.values()))
        few = min(self.limits.tried, self.limits.steps // longest)
        whole = self.source.granularity == "operator"  # one path for all elements of a leaf
        count = total if whole else min(total, max(len(shown), few))
        points, starts = self._sweep(shown, drawn, _first(ranks, count))
        capacity = count * self.limits.stops // max(1, len(points.next))
        if count < total and 3 * count < 2 * capacity:
            return self._sweep(shown, drawn, _first(ranks, capacity + capacity // 4))
        return points, starts

    def _sweep(
        self, shown: dict[int, Cells], drawn: dict[int, Places], first: dict[int, Places]
    ) -> tuple[forest.PathPoints, dict[int, Places]]:
        """Follow the cells that are ``first`` in each leaf."""
        elements = {
            value: np.unique(np.concatenate([mine, shown[value].element[first[value]]]))
            if value in shown
            else mine
            for value, mine in drawn.items()
        }
        points = forest.followed(self.source, elements)
        starts = {}
        for value, found in shown.items():
            starts[value] = np.full(len(found.element), UNFOLLOWED, dtype=np.int64)
            at = np.searchsorted(elements[value], found.element[first[value]])
            starts[value][first[value]] = points.starts[value][at]
        return points, starts

    def _sampled(self, points: forest.PathPoints, drawn: dict[int, Places]) -> routes.Sampled:
        """The points where the paths of the drawn elements start, and their gradients."""
        start_points, sizes_ = [np.zeros(0, dtype=np.int64)], [np.zeros(0)]
        for leaf in self.source.leaves:
            mine = drawn[leaf.value]
            at = np.searchsorted(points.elements[leaf.value], mine)
            start_points.append(points.starts[leaf.value][at])
            if len(mine):
                flat = self.source.gradient(leaf).reshape(-1)
                sizes_.append(flat[torch.from_numpy(mine)].double().numpy())
        return routes.Sampled(np.concatenate(start_points), np.concatenate(sizes_))

    def _wanted(
        self, ways: list[routes.RouteGroup], shown: dict[int, Cells], starts: dict[int, Places]
    ) -> Places:
        """The points where paths start, in the order of priority: one path of each route, the
        largest element of each leaf, then the second of each, and so on.
        """
        order = [
            np.stack([np.arange(len(way.starts)), way.starts]) for way in ways if len(way.starts)
        ]
        for value, each in shown.items():
            order.append(np.stack([ranked(each.gradient), starts[value]]))
        turn, point = np.concatenate([np.zeros((2, 0), dtype=np.int64), *order], 1)
        found: Places = point[np.argsort(turn, kind="stable")]
        return found[found >= 0]


def deepest(edges: model.Edges, rows: int) -> int:
    """The most operators on a path from a leaf to the loss."""
    depth = [1] * rows
    for consumer, producer in zip(edges.consumer.tolist(), edges.producer.tolist()):
        depth[producer] = max(depth[producer], depth[consumer] + 1)
    return max(depth)


def _map(shown: Cells, starts: Places, number: Places) -> HeatMap:
    start = np.where(starts < 0, starts, number[np.maximum(starts, 0)] if len(number) else starts)
    return HeatMap(*shown.grid, shown.element, shown.gradient, start.astype(np.int32))


def _first(ranks: dict[int, Places], count: int) -> dict[int, Places]:
    """The indices of ``count`` cells in total, evenly spread over leaves as far as possible."""
    turn = np.sort(np.concatenate([np.zeros(0, dtype=np.int64), *ranks.values()]))
    limit = turn[count] if count < len(turn) else len(turn)
    return {value: np.flatnonzero(rank < max(1, limit)) for value, rank in ranks.items()}


def ranked(gradient: model.Floats) -> Places:
    """The rank of each element, from 0 for the largest |gradient|."""
    size = np.where(np.isnan(gradient), np.inf, np.abs(gradient))
    rank = np.empty(len(size), dtype=np.int64)
    rank[np.argsort(-size, kind="stable")] = np.arange(len(size))
    return rank
