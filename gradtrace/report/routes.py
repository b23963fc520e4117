"""Routes: the ways that a uniform sample of elements took, the most frequent first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from gradtrace.report.forest import NONE, Grown, Places
from gradtrace.report.graph import ProgramRows
from gradtrace.report.model import Floats, Route

MOST = 50
"""The most routes that are told."""

SHOWN = 5
"""Of how many paths of a route the page is told where they start."""


@dataclass(frozen=True)
class Sampled:
    """Elements that were drawn: the first stop of each (or ``NONE``), and its gradient."""

    stop: Places
    gradient: Floats


@dataclass(frozen=True)
class RouteGroup:
    """A route with the stops where its paths start, those of the largest gradients first."""

    operators: tuple[int, ...]
    count: int
    share: float
    weighted: float
    starts: Places


def ways(grown: Grown, sampled: Sampled, rows: ProgramRows) -> list[RouteGroup]:
    """Paths that run through the same operators, each time in the same order, are one way; the
    most frequent first, then those that more gradient takes, then as they were drawn.
    """
    there = sampled.stop != NONE
    stops, size = sampled.stop[there], np.abs(sampled.gradient[there])
    size = np.where(np.isfinite(size), size, 0.0)
    values = np.unique(grown.value)
    operator = np.array([rows.of[v] for v in values.tolist()], dtype=np.int64)
    at = operator[np.searchsorted(values, grown.value)]
    route = _numbered(at, grown.next)
    behind = route[grown.next[stops]]
    _, first, kind = np.unique(behind, return_index=True, return_inverse=True)
    count, weight = np.bincount(kind), np.bincount(kind, size)
    total = float(size.sum())
    found = []
    for k in np.lexsort((first, -weight, -count))[:MOST].tolist():
        mine = np.flatnonzero(kind == k)
        largest = stops[mine[np.argsort(-size[mine], kind="stable")]]
        way = tuple(at[list(_onward(grown.next, int(grown.next[stops[first[k]]])))].tolist())
        weighted = float(weight[k]) / total if total else 0.0
        found.append(
            RouteGroup(
                way, int(count[k]), int(count[k]) / len(stops), weighted, _different(largest)
            )
        )
    return found


def _numbered(at: Places, ahead: Places) -> Places:
    """For each stop the number of the operators from there on."""
    known: dict[tuple[int, int], int] = {}
    numbers = [NONE] * (len(at) + 1)
    operators, further = at.tolist(), ahead.tolist()
    for stop in range(len(operators) - 1, -1, -1):  # each comes before the next
        key = operators[stop], numbers[further[stop]]
        numbers[stop] = known.setdefault(key, len(known))
    return np.array(numbers[:-1], dtype=np.int64)


def _onward(ahead: Places, stop: int) -> Iterator[int]:
    while stop >= 0:
        yield stop
        stop = int(ahead[stop])


def _different(stops: Places) -> Places:
    """The first few that differ, in order."""
    return np.array(list(dict.fromkeys(stops.tolist()))[:SHOWN], dtype=np.int64)


def told(way: RouteGroup, number: Places, modules: list[int]) -> Route:
    """A way, as the page has it."""
    passed: list[int] = []
    for operator in way.operators:
        module = modules[operator]
        if module and passed[-1:] != [module]:
            passed.append(module)
    starts = tuple(n for n in number[way.starts].tolist() if n >= 0)
    return Route(way.operators, tuple(passed), way.count, way.share, way.weighted, starts)
