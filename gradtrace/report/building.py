"""Builds the view of a trace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from gradtrace import flow
from gradtrace.flow.sizing import sizes_of
from gradtrace.ir.program import Leaf
from gradtrace.paths.paths import sampled
from gradtrace.report import forest, model
from gradtrace.report.cells import MAX_NUMBERED_ELEMENTS, Cells, cells, grids
from gradtrace.report.forest import PathPoints, Places
from gradtrace.report.model import (
    NONE,
    UNFOLLOWED,
    Edges,
    Floats,
    FlowRow,
    HeatMap,
    Route,
    Sample,
    View,
)
from gradtrace.report.program_rows import ProgramRows
from gradtrace.report.routes import routes
from gradtrace.report.source import Source
from gradtrace.report.tuning import Limits
from gradtrace.table import Table
from gradtrace.tracing.influence import SERIES


def view(source: Source, sample: int, seed: int, limits: Limits) -> View:
    """Everything that a report shows of a trace; does not keep the trace alive.

    ``sample`` elements are drawn for the routes, with ``seed``.
    """
    rows = ProgramRows(source)
    operators, edges = rows.operators(), rows.edges()
    shown = _cells(source, limits.cells)
    longest = _longest_path(edges, len(operators.name))
    sizes = {leaf.value: leaf.tensor.numel() for leaf in source.leaves}
    some = sampled(sizes, min(sample, max(1, limits.steps // longest)), seed)
    drawn = {value: elements.numpy() for value, elements in some.items()}
    points, starts = _follow(source, shown, drawn, longest, limits)
    first, gradient = _sample(source, points, drawn)
    ways = routes(points, rows, operators.module, first, gradient)
    left, number = forest.chosen(points, _wanted(ways, shown, starts), limits.stops)
    maps = {v: _heat_map(found, starts[v], number) for v, found in shown.items()}
    found = sizes_of([source.gradient(leaf) for leaf in source.leaves]).tolist()
    leaves = tuple(
        _leaf(source, rows, leaf, maps.get(leaf.value), size)
        for leaf, size in zip(source.leaves, found)
    )
    return View(
        name=source.traced.modules.get("") or "loss",
        rule=source.traced.rule,
        granularity="scalar",
        pairs=source.traced.pairs,
        notes=source.notes,
        forest=forest.kept(points, left, number, rows),
        words=tuple(rows.words.known),
        shapes=tuple(rows.shapes.known),
        modules=rows.module_rows(),
        operators=operators,
        edges=edges,
        leaves=leaves,
        routes=tuple(
            replace(way, starts=tuple(n for s in way.starts if (n := int(number[s])) >= 0))
            for way in ways
        ),
        sample=Sample(int((first != NONE).sum()), len(first), sum(sizes.values()), seed),
        tables={
            kind: _table(table, rows.modules if kind in ("", "modules") else {})
            for kind, table in source.tables.items()
        },
        flow=_flow(source, rows.modules),
    )


# Heat maps ----------------------------------------------------------------------------------------


def _cells(source: Source, most: int) -> dict[int, Cells]:
    """The heat map cells of all leaves that have elements, by value."""
    leaves = [x for x in source.leaves if 0 < x.tensor.numel() <= MAX_NUMBERED_ELEMENTS]
    cuts = grids([tuple(leaf.tensor.shape) for leaf in leaves], most)
    return {leaf.value: cells(source.gradient(leaf), cut) for leaf, cut in zip(leaves, cuts)}


def _heat_map(shown: Cells, starts: Places, number: Places) -> HeatMap:
    start = np.where(starts < 0, starts, number[np.maximum(starts, 0)] if len(number) else starts)
    return HeatMap(*shown.grid, shown.element, shown.gradient, start.astype(np.int32))


def _leaf(
    source: Source, rows: ProgramRows, leaf: Leaf, heat_map: HeatMap | None, size: Sequence[float]
) -> model.Leaf:
    name, elements = source.names[leaf.value], leaf.tensor.numel()
    norm, largest, nonzero, _ = size
    parameter = source.is_parameter(leaf)
    return model.Leaf(
        name,
        (name, *source.traced.aliases.get(name, ())),
        rows.leaf[leaf.value],
        rows.modules[rows.home(name)] if parameter else 0,
        parameter,
        tuple(leaf.tensor.shape),
        elements,
        elements - int(nonzero),
        norm,
        largest,
        heat_map,
    )


# Paths --------------------------------------------------------------------------------------------


def _longest_path(edges: Edges, rows: int) -> int:
    """The most operators on a path from a leaf to the loss."""
    depth = [1] * rows
    for consumer, producer in zip(edges.consumer.tolist(), edges.producer.tolist()):
        depth[producer] = max(depth[producer], depth[consumer] + 1)
    return max(depth)


def _follow(
    source: Source,
    shown: Mapping[int, Cells],
    drawn: Mapping[int, Places],
    longest: int,
    limits: Limits,
) -> tuple[PathPoints, dict[int, Places]]:
    """Paths of the drawn elements and of cells; and for each cell the point where its path starts.

    How many cells' paths fit is estimated by following some first, since the more paths there are,
    the more points they share.
    """
    ranks = {value: _ranked(found.gradient) for value, found in shown.items()}
    turns = np.sort(np.concatenate([np.zeros(0, dtype=np.int64), *ranks.values()]))

    def sweep(count: int) -> tuple[PathPoints, dict[int, Places]]:
        """Follow ``count`` cells, evenly spread over leaves as far as possible."""
        limit = max(1, turns[count] if count < len(turns) else len(turns))
        elements, cells, starts = dict(drawn), dict[int, Places](), dict[int, Places]()
        for value, rank in ranks.items():
            cells[value] = shown[value].element[rank < limit].astype(np.int64)
            elements[value] = np.unique(np.concatenate([drawn[value], cells[value]]))
        points = forest.followed(source, elements)
        for value, rank in ranks.items():
            at = np.searchsorted(elements[value], cells[value])
            starts[value] = np.full(len(rank), UNFOLLOWED, dtype=np.int64)
            starts[value][rank < limit] = points.starts[value][at]
        return points, starts

    total, few = len(turns), min(limits.tried, limits.steps // longest)
    count = min(total, max(len(shown), few))
    points, starts = sweep(count)
    capacity = count * limits.stops // max(1, len(points.next))
    if count < total and 3 * count < 2 * capacity:
        return sweep(capacity + capacity // 4)
    return points, starts


def _sample(
    source: Source, points: PathPoints, drawn: Mapping[int, Places]
) -> tuple[Places, Floats]:
    """The points where the paths of the drawn elements start, and their gradients."""
    starts, gradients = [np.zeros(0, dtype=np.int64)], [np.zeros(0)]
    for leaf in source.leaves:
        mine = drawn[leaf.value]
        found = np.searchsorted(points.elements[leaf.value], mine)
        starts.append(points.starts[leaf.value][found])
        if len(mine):
            flat = source.gradient(leaf).reshape(-1)
            at = torch.from_numpy(mine).to(flat.device)
            gradients.append(flat[at].double().cpu().numpy())
    return np.concatenate(starts), np.concatenate(gradients)


def _wanted(
    ways: Iterable[Route], shown: Mapping[int, Cells], starts: Mapping[int, Places]
) -> Places:
    """The points where paths start, in the order of priority: one path of each route, the largest
    element of each leaf, then the second of each, and so on.
    """
    order = [np.zeros((2, 0), dtype=np.int64)]
    order += [np.stack([np.arange(len(way.starts)), way.starts]) for way in ways if way.starts]
    order += [np.stack([_ranked(each.gradient), starts[v]]) for v, each in shown.items()]
    turn, point = np.concatenate(order, 1)
    found: Places = point[np.argsort(turn, kind="stable")]
    return found[found >= 0]


def _ranked(gradient: Floats) -> Places:
    """The rank of each element, from 0 for the largest |gradient|."""
    size = np.where(np.isnan(gradient), np.inf, np.abs(gradient))
    rank = np.empty(len(size), dtype=np.int64)
    rank[np.argsort(-size, kind="stable")] = np.arange(len(size))
    return rank


# Tables -------------------------------------------------------------------------------------------


def _table(found: Table, modules: Mapping[str, int]) -> model.Influence:
    """A table; ``modules`` are the numbers of components that are modules."""
    rows, errors = found.rows, found.errors
    return model.Influence(
        tuple(row.name for row in rows),
        np.array([modules.get(row.name, -1) for row in rows], dtype=np.int32),
        _floats(found.column("share")),
        _floats(found.column("weighted")),
        _floats(errors[row.name] for row in rows),
        _floats(found.column("through")),
        _floats(found.column("eligible")),
        _floats(row.unreached for row in rows),
        _floats(row.own for row in rows),
        found.notes,
        np.array([row.choice == SERIES for row in rows], dtype=np.uint8),
    )


def _flow(source: Source, modules: Mapping[str, int]) -> model.Flow:
    """The gradient along depth."""
    traced = source.traced
    found = flow.norms_of(traced.program, traced.names, traced.modules, source.size)
    profile = flow.profile_of(traced.program, source.size)
    fields = ("depth", "norm", "gain", "zeros", "own", "verdict")
    return model.Flow(
        found.notes,
        np.array([level.depth for level in profile], dtype=np.int32),
        _floats(level.norm for level in profile),
        _floats(level.rms for level in profile),
        _floats(level.zeros for level in profile),
        tuple(level.operator for level in profile),
        tuple(level.module for level in profile),
        tuple(FlowRow(modules.get(row.name, 0), *(row[name] for name in fields)) for row in found),
    )


def _floats(numbers: Iterable[Any]) -> Floats:
    return np.array([float(x) for x in numbers], dtype=np.float64)
