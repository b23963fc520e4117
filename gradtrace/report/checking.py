"""Checks that a view that was read from a file is consistent: that its indices are valid.

The page uses these indices unchecked, and a cycle would hang it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from gradtrace.io.validation import SchemaMismatch, array, integer, one_of, unfit
from gradtrace.report.forest import UNFOLLOWED
from gradtrace.report.model import Forest, HeatMap, View

MAX_DIMENSIONS = 64
MAX_COUNT = 2**63 - 1
"""The largest count."""

_shape = array(integer(0, MAX_COUNT), MAX_DIMENSIONS)
_rule, _granularity = one_of("greedy", "viterbi"), one_of("scalar", "operator")

Numbers = npt.NDArray[Any]


def check(view: View) -> None:
    """Raise SchemaMismatch for an inconsistent view."""
    for name, part in (
        ("view", _whole),
        ("modules", _modules),
        ("operators", _operators),
        ("edges", _edges),
        ("leaves", _leaves),
        ("forest", lambda found: _forest(found.forest, found)),
        ("routes", _routes),
        ("tables", _tables),
        ("flow", _flow),
    ):
        try:
            part(view)
        except SchemaMismatch as error:
            raise error.within(name) from None


def _inside(what: str, numbers: Numbers | Iterable[int], high: int, low: int = 0) -> None:
    """Raise SchemaMismatch unless all numbers are ``low <= n < high``."""
    found = numbers if isinstance(numbers, np.ndarray) else np.array(list(numbers), dtype=object)
    if found.size and not (found.min() >= low and found.max() < high):
        unfit(f"{what} is out of bounds")


def _whole(view: View) -> None:
    _rule(view.rule)
    _granularity(view.granularity)
    for shape in view.shapes:
        _shape(list(shape))
    sample = view.sample
    _inside("pairs", [view.pairs], MAX_COUNT, 1)
    _inside("sample", [sample.paths, sample.drawn, sample.elements], MAX_COUNT)
    _inside("seed", [sample.seed], 2**64, -(2**63))


def _modules(view: View) -> None:
    modules = view.modules
    if not modules or modules[0].parent != -1:
        unfit("have no root")
    for n, module in enumerate(modules):
        _inside("parent", [module.parent], max(n, 1) if n else 0, 0 if n else -1)
        _inside("like", [module.like], n + 1)
        _inside("size", [module.calls, module.parameters], MAX_COUNT)


def _operators(view: View) -> None:
    found = view.operators
    _inside("name", found.name, len(view.words))
    _inside("module", found.module, len(view.modules))
    _inside("call", found.call, MAX_COUNT)
    _inside("shape", found.shape, len(view.shapes))
    _inside("leaf", found.leaf, len(view.leaves), -1)
    _inside("view", found.view, 2)


def _edges(view: View) -> None:
    many = len(view.operators.name)
    _inside("consumer", view.edges.consumer, many)
    _inside("producer", view.edges.producer, many)
    _inside("position", view.edges.position, MAX_COUNT)
    if not (view.edges.consumer < view.edges.producer).all():
        unfit("an operator comes before one that uses it")


def _leaves(view: View) -> None:
    for n, leaf in enumerate(view.leaves):
        try:
            _shape(list(leaf.shape))
            _inside("operator", [leaf.operator], len(view.operators.name))
            _inside("module", [leaf.module], len(view.modules))
            _inside("elements", [leaf.elements], MAX_COUNT)
            _inside("zero", [leaf.zero], leaf.elements + 1)
            if leaf.map is not None:
                _map(leaf.map, leaf.elements, len(view.forest.next))
        except SchemaMismatch as error:
            raise error.within(n) from None


def _map(found: HeatMap, elements: int, stops: int) -> None:
    sides = (found.height, found.width, found.rows, found.columns)
    _inside("map", sides, MAX_COUNT)
    if found.height * found.width != elements or found.rows * found.columns != len(found.element):
        unfit("map has other cells than elements")
    if found.rows > found.height or found.columns > found.width:
        unfit("map has more cells than elements")
    _inside("map's element", found.element, elements)
    _inside("map's start", found.start, stops, UNFOLLOWED)


def _forest(found: Forest, view: View) -> None:
    many = len(found.next)
    _inside("operator", found.operator, len(view.operators.name))
    _inside("word", found.word, len(view.words))
    _inside("shape", found.shape, len(view.shapes))
    _inside("element", found.element, MAX_COUNT, -1)
    _inside("next", found.next, many, -1)
    if not ((found.next == -1) | (found.next > np.arange(many))).all():
        unfit("paths lead in a circle")


def _routes(view: View) -> None:
    for route in view.routes:
        _inside("operators", route.operators, len(view.operators.name))
        _inside("modules", route.modules, len(view.modules))
        _inside("starts", route.starts, len(view.forest.next))
        _inside("count", [route.count], MAX_COUNT)


def _tables(view: View) -> None:
    for table in view.tables.values():
        if len(table.name) != len(table.module):
            unfit("have other names than rows")
        _inside("module", table.module, len(view.modules), -1)


def _flow(view: View) -> None:
    flow = view.flow
    if not len(flow.depth) == len(flow.operator) == len(flow.module):
        unfit("has columns of other lengths")
    _inside("depth", flow.depth, MAX_COUNT)
    _inside("module", [row.module for row in flow.rows], len(view.modules))
    _inside("depth", [row.depth for row in flow.rows], MAX_COUNT)
