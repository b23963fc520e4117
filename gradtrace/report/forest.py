"""Paths that join, as columns: each element that any of them visits once, with the next one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from gradtrace.report.cells import LARGEST
from gradtrace.report.graph import ProgramRows, columns
from gradtrace.report.model import Floats, Forest
from gradtrace.report.source import Source
from gradtrace.tracing import path_forest
from gradtrace.tracing.tensor_paths import TensorPaths

Places = npt.NDArray[np.int64]

WORD = "leaf"
"""What a path's first step is called."""

NONE, UNFOLLOWED = -1, -2
"""In place of a start: the element has no path; its path was not followed."""


class Grown(NamedTuple):
    """All stops of the paths that were followed, in an order in which each comes before the next.
    ``elements`` are those that were asked for, by leaf's value, and ``starts`` the stop of each (or
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


def followed(source: Source, elements: Mapping[int, Places]) -> Grown:
    """The paths of some elements of leaves' values, by the rule of the trace."""
    if source.granularity == "operator":
        return _whole_tensors(source, elements)
    at = {v: torch.from_numpy(e).to(source.device) for v, e in elements.items() if len(e)}
    found = source.builder.follower.follow(at, source.rule)
    grown, number = _contracted(source, found)
    whole = np.where(found.whole.numpy(), number[found.starts.numpy()], NONE)
    sizes = [len(elements[value]) for value in at]
    parts = np.split(whole, np.cumsum(sizes)[:-1]) if sizes else []
    starts = {value: np.zeros(0, dtype=np.int64) for value in elements}
    return grown._replace(starts={**starts, **dict(zip(at, parts))}, elements=dict(elements))


def _contracted(source: Source, found: path_forest.PathForest) -> tuple[Grown, Places]:
    """Without what lies within operators; and for each node the number of its stop.

    The derivative of a stop by the one before it is the product of the weights between them, from
    the leaf's side on, as ``trace.path`` takes it.
    """
    labels = source.builder.labels
    onward, weight = found.onward.numpy(), found.weight.numpy()
    stages = np.diff([*found.firsts, len(onward)])
    value = np.repeat(np.array(found.values, dtype=np.int64), stages)
    stops = [v in labels.places or v in source.names for v in found.values]
    stop = np.repeat(np.array(stops, dtype=bool), stages)
    here = np.flatnonzero(stop)
    number = np.full(len(onward) + 1, NONE, dtype=np.int64)  # the last stands for "nowhere"
    number[here] = np.arange(len(here))
    derivative, ahead = weight[here].copy(), onward[here].copy()
    while (between := np.flatnonzero((ahead >= 0) & ~stop[ahead])).size:
        derivative[between] *= weight[ahead[between]]
        ahead[between] = onward[ahead[between]]
    element, gradient = found.element.numpy()[here], found.gradient.numpy()[here]
    last = ahead < 0
    seed = source.builder.labels.seed.reshape(-1).double().cpu().numpy()
    root = last & (value[here] == found.root)
    derivative[root] = seed[element[root]]
    with np.errstate(all="ignore"):
        reached = np.where(last, 1.0, gradient[np.maximum(number[ahead], 0)])
        brought = reached * derivative
        share = np.where(gradient == 0, np.nan, brought / gradient)
    columns = (value[here], element, derivative, gradient, share, number[ahead])
    return Grown(*columns, starts={}, elements={}), number


def _whole_tensors(source: Source, elements: Mapping[int, Places]) -> Grown:
    """The path of each leaf as a whole; all its elements start from one stop."""
    seed = source.builder.follower.seed
    coarse = TensorPaths(source.program, source.rule, seed)
    chains = {value: coarse.chain(value).links for value in elements}
    stops = {value for value, links in chains.items() if links}
    stops |= {link.take for links in chains.values() for link in links}
    order = {step.out: n for n, step in enumerate(source.program.steps(), 1)}
    order[source.program.root] = 0
    values = sorted(stops, key=lambda value: -order[value])  # from the leaves to the root
    number = {value: n for n, value in enumerate(values)}
    links = [coarse.links.get(value) for value in values]
    value = np.array(values, dtype=np.int64)
    nan = np.full(len(values), np.nan)
    mass = np.array([_mass(source, v) for v in values], dtype=np.float64)
    share = np.array([1.0 if x is None else x.size / x.total for x in links], dtype=np.float64)
    ahead = np.array([NONE if x is None else number[x.take] for x in links], dtype=np.int64)
    starts = {
        v: np.full(len(e), number[v] if chains[v] else NONE, dtype=np.int64)
        for v, e in elements.items()
    }
    nowhere = np.full_like(value, -1)
    return Grown(value, nowhere, nan, mass, share, ahead, starts, dict(elements))


def _mass(source: Source, value: int) -> float:
    return float(source.builder.follower.gradients[value].abs().sum(dtype=torch.float64))


# What fits ----------------------------------------------------------------------------------------


def chosen(grown: Grown, wanted: Places, most: int) -> tuple[Places, Places]:
    """Of paths in the order in which they are wanted, by their first stops, as many as have
    ``most`` stops together: the stops that remain, and for each of all stops its new number
    (``UNFOLLOWED`` if it is none of them).
    """
    never = len(wanted)
    first = np.full(len(grown.next), never, dtype=np.int64)
    np.minimum.at(first, wanted, np.arange(never))
    turns, ahead = first.tolist(), grown.next.tolist()
    for stop, further in enumerate(ahead):  # each comes before the next
        if further >= 0 and turns[stop] < turns[further]:
            turns[further] = turns[stop]
    first = np.array(turns, dtype=np.int64)
    used = np.sort(first[first < never])
    limit = used[most] if len(used) > most else never
    left = np.flatnonzero(first < limit)
    number = np.full(len(first), UNFOLLOWED, dtype=np.int64)
    number[left] = np.arange(len(left))
    return left, number


def kept(grown: Grown, left: Places, number: Places, rows: ProgramRows) -> Forest:
    """The stops that remain, as the page has them."""
    leaves, places, shapes = rows.leaf, rows.source.builder.labels.places, rows.source.shapes
    values, kind = np.unique(grown.value[left], return_inverse=True)
    told = [
        (
            rows.of[value],
            rows.words(WORD if value in leaves else places[value][0]),
            rows.shapes(tuple(shapes[value])),
        )
        for value in values.tolist()
    ]
    operator, word, shape = (column[kind] for column in columns(told, 3))
    element, ahead = grown.element[left], grown.next[left]
    return Forest(
        operator,
        word,
        shape,
        np.where(element > LARGEST, -1, element).astype(np.int32),
        grown.derivative[left],
        grown.gradient[left],
        grown.share[left].astype(np.float32),
        np.where(ahead < 0, NONE, number[ahead]).astype(np.int32),
    )
