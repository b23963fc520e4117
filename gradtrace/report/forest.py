"""Joining paths as columns: one row for each element (point) that a path visits, with the next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gradtrace.report.encode import View, columns
from gradtrace.report.program_rows import ProgramRows
from gradtrace.traced import Trace

Places = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

NONE, UNFOLLOWED = -1, -2
"""Values in place of a path's start: the element has no path; its path is not in the view."""

LEAF_WORD = "leaf"
"""The name of a path's first step."""

MAX_NUMBERED_ELEMENTS = 2**31 - 1
"""The most elements of a tensor whose elements the page can number."""


class PathPoints(NamedTuple):
    """All points of the paths that were followed, in an order in which each precedes its ``next``.
    ``elements`` are the requested elements, by leaf's value, and ``starts`` the point of each (or
    ``NONE``).
    """

    value: Places
    element: Places
    derivative: Floats
    gradient: Floats
    share: Floats
    next: Places
    starts: dict[int, Places]
    elements: dict[int, Places]


def followed(traced: Trace, elements: Mapping[int, Places]) -> PathPoints:
    """The paths of some elements of leaves' values, by the rule of the trace.

    Nodes inside operators are dropped. The derivative of a point by the previous one is the product
    of the weights between them, from the leaf on, in the order of ``trace.path``.
    """
    builder = traced.builder(0)
    at = {v: torch.from_numpy(e).to(traced.device) for v, e in elements.items() if len(e)}
    labels, found = builder.labels, builder.follower.follow(at, traced.rule)
    onward, weight = found.onward.numpy(), found.weight.numpy()
    stages = np.diff([*found.firsts, len(onward)])
    value = np.repeat(np.array(found.values, dtype=np.int64), stages)
    shown = [v in labels.places or v in traced.names for v in found.values]
    is_point = np.repeat(np.array(shown, dtype=bool), stages)
    here = np.flatnonzero(is_point)
    number = np.full(len(onward) + 1, NONE, dtype=np.int64)  # the last stands for "none"
    number[here] = np.arange(len(here))
    derivative, ahead = weight[here].copy(), onward[here].copy()
    while (inner := np.flatnonzero((ahead >= 0) & ~is_point[ahead])).size:
        derivative[inner] *= weight[ahead[inner]]
        ahead[inner] = onward[ahead[inner]]
    element, gradient = found.element.numpy()[here], found.gradient.numpy()[here]
    last = ahead < 0
    root = last & (value[here] == found.root)
    derivative[root] = labels.seed.reshape(-1).double().cpu().numpy()[element[root]]
    with np.errstate(all="ignore"):
        reached = np.where(last, 1.0, gradient[np.maximum(number[ahead], 0)])
        share = np.where(gradient == 0, np.nan, reached * derivative / gradient)
    first = np.where(found.whole.numpy(), number[found.starts.numpy()], NONE)
    ends = np.cumsum([len(mine) for mine in elements.values()])
    starts = dict(zip(elements, np.split(first, ends[:-1])))
    points = (value[here], element, derivative, gradient, share, number[ahead])
    return PathPoints(*points, starts, dict(elements))


def chosen(points: PathPoints, wanted: Places, most: int) -> tuple[Places, Places]:
    """Choose paths in order of priority (``wanted``: their first points) until they have ``most``
    points in total. Returns the points that are kept, and for each of all points its new number
    (``UNFOLLOWED`` if it is not kept).
    """
    never = len(wanted)
    first = np.full(len(points.next), never, dtype=np.int64)
    np.minimum.at(first, wanted, np.arange(never))
    turns, ahead = first.tolist(), points.next.tolist()
    for point, further in enumerate(ahead):  # each comes before the next
        if further >= 0 and turns[point] < turns[further]:
            turns[further] = turns[point]
    first = np.array(turns, dtype=np.int64)
    used = np.sort(first[first < never])
    limit = used[most] if len(used) > most else never
    left = np.flatnonzero(first < limit)
    number = np.full(len(first), UNFOLLOWED, dtype=np.int64)
    number[left] = np.arange(len(left))
    return left, number


def kept(points: PathPoints, left: Places, number: Places, rows: ProgramRows) -> View:
    """The points that are kept, as the columns of the page."""
    leaves, places = rows.leaf, rows.traced.builder(0).labels.places
    values, kind = np.unique(points.value[left], return_inverse=True)
    rows_of_values = [
        (
            rows.of[value],
            rows.words(LEAF_WORD if value in leaves else places[value][0]),
            rows.shapes(tuple(rows.value_shapes[value])),
        )
        for value in values.tolist()
    ]
    operator, word, shape = (column[kind] for column in columns(rows_of_values, 3))
    element, ahead = points.element[left], points.next[left]
    return {
        "operator": operator,
        "word": word,
        "shape": shape,
        "element": np.where(element > MAX_NUMBERED_ELEMENTS, -1, element).astype(np.int32),
        "derivative": points.derivative[left],
        "gradient": points.gradient[left],
        "share": points.share[left].astype(np.float32),
        "next": np.where(ahead < 0, NONE, number[ahead]).astype(np.int32),
    }
