"""Routes: the operator sequences of the paths of a uniform sample, the most frequent first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from gradtrace.report.forest import NONE, PathPoints, Places
from gradtrace.report.graph import ProgramRows
from gradtrace.report.model import Floats, Route

MAX_ROUTES = 50
"""The most routes in a view."""

MAX_STARTS = 5
"""The most paths of a route whose starts are in a view."""


@dataclass(frozen=True)
class Sampled:
    """The elements that were drawn: the first point of each (or ``NONE``), and its gradient."""

    point: Places
    gradient: Floats


@dataclass(frozen=True)
class RouteGroup:
    """A route with the points where its paths start, those of the largest gradients first."""

    operators: tuple[int, ...]
    count: int
    share: float
    weighted: float
    starts: Places


def ways(points: PathPoints, sampled: Sampled, rows: ProgramRows) -> list[RouteGroup]:
    """Group paths through the same operators in the same order; the most frequent group first, then
    by gradient, then in the order of drawing.
    """
    there = sampled.point != NONE
    start_points, size = sampled.point[there], np.abs(sampled.gradient[there])
    size = np.where(np.isfinite(size), size, 0.0)
    values = np.unique(points.value)
    operator = np.array([rows.of[v] for v in values.tolist()], dtype=np.int64)
    at = operator[np.searchsorted(values, points.value)]
    route = _numbered(at, points.next)
    behind = route[points.next[start_points]]
    _, first, kind = np.unique(behind, return_index=True, return_inverse=True)
    count, weight = np.bincount(kind), np.bincount(kind, size)
    total = float(size.sum())
    found = []
    for k in np.lexsort((first, -weight, -count))[:MAX_ROUTES].tolist():
        mine = np.flatnonzero(kind == k)
        largest = start_points[mine[np.argsort(-size[mine], kind="stable")]]
        way = tuple(
            at[list(_onward(points.next, int(points.next[start_points[first[k]]])))].tolist()
        )
        weighted = float(weight[k]) / total if total else 0.0
        found.append(
            RouteGroup(
                way, int(count[k]), int(count[k]) / len(start_points), weighted, _different(largest)
            )
        )
    return found


def _numbered(at: Places, ahead: Places) -> Places:
    """For each point, a number that identifies the sequence of operators from there on."""
    known: dict[tuple[int, int], int] = {}
    numbers = [NONE] * (len(at) + 1)
    operators, further = at.tolist(), ahead.tolist()
    for point in range(len(operators) - 1, -1, -1):  # each comes before the next
        key = operators[point], numbers[further[point]]
        numbers[point] = known.setdefault(key, len(known))
    return np.array(numbers[:-1], dtype=np.int64)


def _onward(ahead: Places, point: int) -> Iterator[int]:
    while point >= 0:
        yield point
        point = int(ahead[point])


def _different(start_points: Places) -> Places:
    """The first ``MAX_STARTS`` distinct points, in order."""
    return np.array(list(dict.fromkeys(start_points.tolist()))[:MAX_STARTS], dtype=np.int64)


def as_route(way: RouteGroup, number: Places, modules: list[int]) -> Route:
    """A route as the page's data model has it."""
    passed: list[int] = []
    for operator in way.operators:
        module = modules[operator]
        if module and passed[-1:] != [module]:
            passed.append(module)
    starts = tuple(n for n in number[way.starts].tolist() if n >= 0)
    return Route(way.operators, tuple(passed), way.count, way.share, way.weighted, starts)
