"""Checks that a view that was read from a file is consistent: that its indices are valid.

The page uses these indices unchecked, and a cycle would hang it.
"""

from __future__ import annotations

import numpy as np

from gradtrace.io.validation import array, check_each, integer, one_of, unfit
from gradtrace.report.findings import SEVERITIES
from gradtrace.report.model import UNFOLLOWED, HeatMap, Leaf, View
from gradtrace.types import RULES

MAX_COUNT = 2**63 - 1
"""The largest count."""

MAX_DIMENSIONS = 64

_shape = array(integer(0, MAX_COUNT), MAX_DIMENSIONS)
_severity = one_of(*SEVERITIES)
_rule, _granularity = one_of(*RULES), one_of("scalar", "operator")


def check(view: View) -> None:
    """Raise SchemaMismatch for an inconsistent view."""
    parts = {
        "view": _whole,
        "modules": _modules,
        "operators": _operators,
        "edges": _edges,
        "leaves": _leaves,
        "forest": _forest,
        "routes": _routes,
        "tables": _tables,
        "flow": _flow,
        "choices": _choices,
        "diagnosis": _diagnosis,
    }
    check_each((name, part, view) for name, part in parts.items())


def _bounded(found: object, **limits: int | tuple[int, int]) -> None:
    """Raise SchemaMismatch unless these fields are ``low <= n < high``, low being 0 unless given;
    a field is a number, or many in a column or a tuple.
    """
    for name, limit in limits.items():
        value = getattr(found, name)
        numbers = value if isinstance(value, np.ndarray) else np.array(value, dtype=object)
        low, high = limit if isinstance(limit, tuple) else (0, limit)
        if numbers.size and not (numbers.min() >= low and numbers.max() < high):
            unfit(f"{name} is out of bounds")


def _whole(view: View) -> None:
    _rule(view.rule)
    _granularity(view.granularity)
    for shape in view.shapes:
        _shape(list(shape))
    _bounded(view, pairs=(1, MAX_COUNT))
    counts = dict.fromkeys(("paths", "drawn", "elements"), MAX_COUNT)
    _bounded(view.sample, **counts, seed=(-(2**63), 2**64))


def _modules(view: View) -> None:
    if not view.modules or view.modules[0].parent != -1:
        unfit("have no root")
    for n, module in enumerate(view.modules):
        parent = (0, n) if n else (-1, 0)
        _bounded(module, parent=parent, like=n + 1, calls=MAX_COUNT, parameters=MAX_COUNT)


def _operators(view: View) -> None:
    columns = {"name": len(view.words), "module": len(view.modules), "shape": len(view.shapes)}
    _bounded(view.operators, **columns, call=MAX_COUNT, leaf=(-1, len(view.leaves)), view=2)


def _edges(view: View) -> None:
    many = len(view.operators.name)
    _bounded(view.edges, consumer=many, producer=many, position=MAX_COUNT)
    if not (view.edges.consumer < view.edges.producer).all():
        unfit("an operator comes before one that uses it")


def _leaves(view: View) -> None:
    indices = {"operator": len(view.operators.name), "module": len(view.modules)}
    points = len(view.forest.next)

    def check_leaf(leaf: Leaf) -> None:
        _shape(list(leaf.shape))
        _bounded(leaf, **indices, elements=MAX_COUNT, zero=leaf.elements + 1)
        if leaf.map is not None:
            _map(leaf.map, leaf.elements)
            _bounded(leaf.map, start=(UNFOLLOWED, points))

    check_each((n, check_leaf, leaf) for n, leaf in enumerate(view.leaves))


def _map(found: HeatMap, elements: int) -> None:
    sides = dict.fromkeys(("height", "width", "rows", "columns"), MAX_COUNT)
    _bounded(found, **sides, element=elements)
    if found.height * found.width != elements or found.rows * found.columns != len(found.element):
        unfit("map has other cells than elements")
    if found.rows > found.height or found.columns > found.width:
        unfit("map has more cells than elements")


def _forest(view: View) -> None:
    found, many = view.forest, len(view.forest.next)
    columns = {"operator": len(view.operators.name), "word": len(view.words)}
    _bounded(found, **columns, shape=len(view.shapes), element=(-1, MAX_COUNT), next=(-1, many))
    if not ((found.next == -1) | (found.next > np.arange(many))).all():
        unfit("paths lead in a circle")


def _routes(view: View) -> None:
    limits = {"operators": len(view.operators.name), "modules": len(view.modules)}
    for route in view.routes:
        _bounded(route, **limits, starts=len(view.forest.next), count=MAX_COUNT)


def _tables(view: View) -> None:
    for table in view.tables.values():
        if len(table.name) != len(table.module):
            unfit("have other names than rows")
        _bounded(table, module=(-1, len(view.modules)))
        if table.series is not None:
            _bounded(table, series=2)


def _choices(view: View) -> None:
    modules = (-1, len(view.modules))
    for fork in view.choices or ():
        _bounded(fork, module=modules, times=MAX_COUNT)
        for branch in fork.branches:
            _bounded(branch, module=modules)


def _diagnosis(view: View) -> None:
    for finding in view.diagnosis.findings if view.diagnosis else ():
        _severity(finding.severity)
        _bounded(finding, module=(-1, len(view.modules)))


def _flow(view: View) -> None:
    flow = view.flow
    if not len(flow.depth) == len(flow.operator) == len(flow.module):
        unfit("has columns of other lengths")
    _bounded(flow, depth=MAX_COUNT)
    for row in flow.rows:
        _bounded(row, module=len(view.modules), depth=MAX_COUNT)
