"""Routes: the operator sequences of the paths of a uniform sample, the most frequent first."""

from __future__ import annotations

from itertools import groupby

import numpy as np

from gradtrace.report.forest import PathPoints, Places
from gradtrace.report.model import NONE, Floats, Ints, Route
from gradtrace.report.program_rows import ProgramRows
from gradtrace.report.tuning import MAX_ROUTES, ROUTE_MAX_STARTS


def routes(
    points: PathPoints, rows: ProgramRows, module: Ints, starts: Places, gradient: Floats
) -> list[Route]:
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
        found.append(
            Route(
                tuple(way),
                tuple(number for number, _ in groupby(passed)),
                int(count[k]),
                int(count[k]) / len(starts),
                float(weight[k]) / total if total else 0.0,
                tuple(dict.fromkeys(largest))[:ROUTE_MAX_STARTS],
            )
        )
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
