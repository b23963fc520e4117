"""Routes: the operator sequences of the paths of a uniform sample, the most frequent first."""

from __future__ import annotations

from itertools import groupby

import numpy as np

from gradtrace.report.encode import Column, View
from gradtrace.report.forest import NONE, Floats, PathPoints, Places
from gradtrace.report.program_rows import ProgramRows

MAX_ROUTES, ROUTE_MAX_STARTS = 50, 5
"""The most routes in a view, and the most paths of a route whose starts are in it."""


def routes(
    points: PathPoints, rows: ProgramRows, module: Column, starts: Places, gradient: Floats
) -> list[View]:
    """Group the paths of drawn elements (their first points, or ``NONE``, and gradients) that go
    through the same operators in the same order; the most frequent group first, then by gradient,
    then in the order of drawing.

    ``module`` is that of each operator. A route's ``starts`` are points, those of the largest
    gradients first.
    """
    there = starts != NONE
    starts, size = starts[there], np.abs(gradient[there])
    size = np.where(np.isfinite(size), size, 0.0)
    behind = points.next[starts]
    values, at = np.unique(points.value, return_inverse=True)
    operator = np.array([rows.of[value] for value in values.tolist()], dtype=np.int64)[at]
    route = _sequences(operator, points.next)[behind]
    _, first, kind = np.unique(route, return_index=True, return_inverse=True)
    count, weight = np.bincount(kind), np.bincount(kind, size)
    total = float(size.sum())
    found = []
    for k in np.lexsort((first, -weight, -count))[:MAX_ROUTES].tolist():
        mine = np.flatnonzero(kind == k)
        largest = starts[mine[np.argsort(-size[mine], kind="stable")]].tolist()
        way, point = list[int](), int(behind[first[k]])
        while point >= 0:
            way.append(int(operator[point]))
            point = int(points.next[point])
        passed = (number for number in module[way].tolist() if number)
        row: View = {"operators": way, "modules": [number for number, _ in groupby(passed)]}
        share, weighted = count[k] / len(starts), weight[k] / total if total else 0.0
        row |= {"count": int(count[k]), "share": float(share), "weighted": float(weighted)}
        found.append({**row, "starts": list(dict.fromkeys(largest))[:ROUTE_MAX_STARTS]})
    return found


def _sequences(operator: Places, following: Places) -> Places:
    """For each point, a number that identifies the sequence of operators from there on."""
    known: dict[tuple[int, int], int] = {}
    operators, ahead = operator.tolist(), following.tolist()
    numbers = [NONE] * (len(operators) + 1)  # the last stands for "none"
    for point in range(len(operators) - 1, -1, -1):  # each comes before the next
        key = operators[point], numbers[ahead[point]]
        numbers[point] = known.setdefault(key, len(known))
    return np.array(numbers[:-1], dtype=np.int64)
