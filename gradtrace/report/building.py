"""Builds the view of a trace: its tables, and the paths of a sample and of its largest elements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import log2, nan
from typing import Any

import numpy as np
import torch

from gradtrace import flow
from gradtrace.errors import TooLarge, UnknownName
from gradtrace.ir.program import Leaf, Program
from gradtrace.paths.paths import sampled
from gradtrace.report import forest
from gradtrace.report.encode import Column, View, floats, ints
from gradtrace.report.findings import diagnosis, undiagnosed
from gradtrace.report.forest import NONE, UNFOLLOWED, PathPoints, Places
from gradtrace.report.program_rows import ProgramRows
from gradtrace.report.routes import routes
from gradtrace.table import Row, Table
from gradtrace.traced import Trace


@dataclass(frozen=True)
class Limits:
    """Limits on a view: elements of leaves that are listed, and points of paths. In deep graphs
    fewer paths are followed: they would visit more than ``steps`` operators if none joined.
    """

    elements: int = 4_000
    points: int = 60_000
    steps: int = 10_000_000


FULL, SMALL = Limits(), Limits(elements=400, points=6_000)
"""``SMALL``: for notebooks, of models so large that a full view would take long."""

LEAF_MAX_ELEMENTS = 64
"""The most elements of a leaf that are listed, those of the largest |gradient|."""

FULL_VIEW_MAX_OPERATORS, FULL_VIEW_MAX_ELEMENTS = 2_000, 5_000_000
"""Above this many operators, or parameter elements, a notebook shows a smaller view."""

SAMPLED_ELEMENTS, COVERED_ELEMENTS = 10_000, 1_000
"""How many elements influence is sampled from where not all are counted, and the most whose paths'
coverage is measured.
"""

MAX_FORKS, FORK_MAX_BRANCHES = 200, 64
"""The most forks in a view, those of most information, and the most branches of each."""

SMALL_VIEW_NOTE = (
    f"this is a smaller view, for a notebook: influence of {SAMPLED_ELEMENTS:,} sampled elements, "
    "and fewer paths; trace.report('report.html') writes all"
)


def is_large(program: Program) -> bool:
    """Whether a notebook shows the ``small`` view of a program."""
    elements = sum(leaf.tensor.numel() for leaf in program.leaves)
    return elements > FULL_VIEW_MAX_ELEMENTS or len(program.blocks) > FULL_VIEW_MAX_OPERATORS


def view_of(
    trace: Trace,
    sample: int,
    seed: int,
    small: bool = False,
    diagnosed: Mapping[str, Any] | None = None,
) -> View:
    """Everything that a report shows of a trace, which is not kept alive, with the paths of
    ``sample`` elements; ``diagnosed`` is the dict of a ``Diagnosis`` of the same loss, if any.
    """
    trace.check_unchanged()
    table, notes = _influence(trace, small)
    coverage = trace.coverage(min(sample, COVERED_ELEMENTS), seed)
    size = flow.measure(trace.program)
    rows = ProgramRows(trace, size, trace.builder(0).labels.shapes)
    parts = _Paths(trace, rows, SMALL if small else FULL).view(sample, seed)
    leaf_names = (*trace.names.values(), *trace.gradients.aliases)
    found = diagnosis(diagnosed, rows.modules)
    return {
        "name": trace.modules.get("") or "loss",
        "rule": trace.rule,
        "notes": [*trace.notes, *notes],
        "words": list(rows.words.known),
        "shapes": list(rows.shapes.known),
        "modules": rows.module_rows(),
        **parts,
        "tables": {"": _table(table, rows.modules)},
        "flow": _flow(trace, size, rows.modules),
        "coverage": _coverage(coverage),
        "choices": _forks(trace, rows.modules, small),
        "diagnosis": found or undiagnosed(trace.silent, leaf_names, rows.modules),
    }


# Paths --------------------------------------------------------------------------------------------


class _Paths:
    """Follows paths of a trace, and lists those of a view."""

    def __init__(self, trace: Trace, rows: ProgramRows, limits: Limits) -> None:
        self.trace, self.rows, self.limits = trace, rows, limits
        self.gradients = {
            leaf.value: trace.gradients[rows.name(leaf)].detach() for leaf in rows.leaves
        }

    def view(self, sample: int, seed: int) -> View:
        """Operators, edges, leaves, the forest of paths, and the routes of ``sample`` elements."""
        rows = self.rows
        operators, edges = rows.operators(), rows.edges()
        most = max(1, self.limits.steps // _longest_path(edges, len(operators["name"])))
        sizes = {leaf.value: leaf.tensor.numel() for leaf in rows.leaves}
        some = sampled(sizes, min(sample, most), seed)
        drawn = {value: elements.numpy() for value, elements in some.items()}
        largest = self._largest(most)
        union = {v: np.unique(np.concatenate([drawn[v], largest[v][0]])) for v in drawn}
        points = forest.followed(self.trace, union)
        first, gradient = self._sample(points, drawn)
        ways = routes(points, rows, operators["module"], first, gradient)
        starts = {v: _starts(points, v, elements) for v, (elements, _) in largest.items()}
        left, number = forest.chosen(points, _wanted(ways, starts.values()), self.limits.points)
        for way in ways:
            way["starts"] = [int(n) for n in number[way["starts"]] if n >= 0]
        leaves = []
        for leaf in rows.leaves:
            (element, values), start = largest[leaf.value], starts[leaf.value]
            start = (
                np.where(start < 0, start, number[np.maximum(start, 0)]) if len(number) else start
            )
            listed = {"element": ints(element), "gradient": values, "start": ints(start)}
            leaves.append({**self._leaf(leaf), **listed})
        paths = int((first != NONE).sum())
        told = {"paths": paths, "drawn": len(first), "elements": sum(sizes.values()), "seed": seed}
        return {
            "operators": operators,
            "edges": edges,
            "leaves": leaves,
            "forest": forest.kept(points, left, number, rows),
            "routes": ways,
            "sample": told,
        }

    def _leaf(self, leaf: Leaf) -> View:
        """The facts of a leaf."""
        rows, name, elements = self.rows, self.rows.name(leaf), leaf.tensor.numel()
        parameter, size = rows.is_parameter(leaf), rows.size[leaf.value]
        return {
            "name": name,
            "names": [name, *self.trace.aliases.get(name, ())],
            "operator": rows.leaf[leaf.value],
            "module": rows.modules[rows.home(name)] if parameter else 0,
            "parameter": parameter,
            "shape": tuple(leaf.tensor.shape),
            "elements": elements,
            "zero": elements - int(size.nonzero),
            "norm": float(size.norm),
            "largest": float(size.largest),
        }

    def _largest(self, most: int) -> dict[int, tuple[Places, Column]]:
        """The elements of the largest |gradient| of each leaf, the largest first, and these."""
        each = min(self.limits.elements, most) // max(1, len(self.gradients))
        return {v: _top(g, min(max(1, each), LEAF_MAX_ELEMENTS)) for v, g in self.gradients.items()}

    def _sample(self, points: PathPoints, drawn: Mapping[int, Places]) -> tuple[Places, Column]:
        """The points where the paths of the drawn elements start, and their gradients."""
        starts, gradients = [np.zeros(0, dtype=np.int64)], [np.zeros(0)]
        for value, mine in drawn.items():
            starts.append(_starts(points, value, mine))
            flat = self.gradients[value].reshape(-1)
            if len(mine):
                at = torch.from_numpy(mine).to(flat.device)
                gradients.append(flat[at].double().cpu().numpy())
        return np.concatenate(starts), np.concatenate(gradients)


def _top(gradient: torch.Tensor, most: int) -> tuple[Places, Column]:
    flat = gradient.reshape(-1)
    size = torch.where(flat.isnan(), torch.inf, flat.abs())
    at = size.topk(min(most, flat.numel())).indices.sort().values
    at = at[size[at].argsort(descending=True, stable=True)]  # of equal ones the first
    at = at[at <= forest.MAX_NUMBERED_ELEMENTS]
    return at.cpu().numpy(), flat[at].double().cpu().numpy()


def _starts(points: PathPoints, value: int, elements: Places) -> Places:
    """The points where the paths of elements of a leaf start."""
    found: Places = points.starts[value][np.searchsorted(points.elements[value], elements)]
    return found


def _longest_path(edges: View, rows: int) -> int:
    """The most operators on a path from a leaf to the loss."""
    depth = [1] * rows
    for consumer, producer in zip(edges["consumer"].tolist(), edges["producer"].tolist()):
        depth[producer] = max(depth[producer], depth[consumer] + 1)
    return max(depth)


def _wanted(ways: Iterable[View], starts: Iterable[Places]) -> Places:
    """The points where paths start, in the order of priority: one path of each route, the largest
    element of each leaf, then the second of each, and so on.
    """
    lists = [np.array(way["starts"], dtype=np.int64) for way in ways]
    every = [np.stack([np.arange(len(each)), each]) for each in (*lists, *starts)]
    turn, point = np.concatenate([np.zeros((2, 0), dtype=np.int64), *every], 1)
    found: Places = point[np.argsort(turn, kind="stable")]
    return found[found >= 0]


# Tables -------------------------------------------------------------------------------------------


def _influence(trace: Trace, small: bool) -> tuple[Table, list[str]]:
    """Influence of modules, with notes where it is that of a sample."""
    if small:
        return trace.influence(sample=SAMPLED_ELEMENTS), [SMALL_VIEW_NOTE]
    try:
        return trace.influence(), []
    except TooLarge as error:
        note = f"influence is that of {SAMPLED_ELEMENTS:,} sampled elements: {error}"
        return trace.influence(sample=SAMPLED_ELEMENTS), [note]


def _table(found: Table, modules: Mapping[str, int]) -> View:
    """The table of influence; ``modules`` are the numbers of components that are modules."""
    numbers = ("share", "weighted", "through", "eligible", "unreached", "own")
    return {
        "name": found.names,
        "module": ints(modules.get(name, -1) for name in found.names),
        **{name: floats(found.column(name)) for name in numbers},
        "error": floats(found.errors.values()),
        "notes": found.notes,
        "series": np.array([bool(row["choice"]) for row in found], dtype=np.uint8),
    }


def _flow(trace: Trace, size: Mapping[int, flow.Size], modules: Mapping[str, int]) -> View:
    """The gradient by module and along depth."""
    found = flow.norms_of(trace.program, trace.names, trace.modules, size)
    profile = flow.profile_of(trace.program, size)
    names = ("depth", "norm", "gain", "zeros", "own", "verdict")
    rows = [{name: row[name] for name in names} for row in found]
    return {
        "findings": found.notes,
        "depth": ints(level.depth for level in profile),
        **{x: floats(getattr(level, x) for level in profile) for x in ("norm", "rms", "zeros")},
        "operator": [level.operator for level in profile],
        "module": [level.module for level in profile],
        "rows": [{"module": modules.get(n, 0), **row} for n, row in zip(found.names, rows)],
    }


def _coverage(found: Table) -> View:
    """What part of their elements' gradients paths carry, and the same in words."""
    names = ("elements", "median", "lower", "upper", "opposite", "cancelled")
    facts = {name: found["all"][name] for name in names}
    words = (
        f"A path carries {facts['median']:.1%} of its element's gradient (median of "
        f"{facts['elements']:,} elements; half of them lie between {facts['lower']:.1%} and "
        f"{facts['upper']:.1%}); {facts['opposite']:.1%} have the opposite sign."
    )
    return {**facts, "words": [words, *found.notes] if facts["elements"] else found.notes}


def _forks(trace: Trace, modules: Mapping[str, int], small: bool) -> list[View] | None:
    """How paths divide at each fork, those of most information first; None if there are too many
    to count.
    """
    try:
        table = trace.influence("forks", sample=SAMPLED_ELEMENTS if small else "auto")
    except UnknownName:  # there is none
        return []
    except TooLarge:
        return None
    groups: dict[str, list[Row]] = {}
    for row in table:
        groups.setdefault(row.name.partition("/")[0], []).append(row)
    told = sorted(groups.items(), key=lambda item: -_information(item[1]))
    return [_fork(name, rows, table.errors, modules) for name, rows in told[:MAX_FORKS]]


def _information(rows: Iterable[Row]) -> float:
    return float(sum(-row.eligible * row.share * log2(row.share) for row in rows if row.share > 0))


def _fork(
    name: str, rows: list[Row], errors: Mapping[str, float], modules: Mapping[str, int]
) -> View:
    """A fork with its branches; of very many the smallest together."""
    ranked = sorted(rows, key=lambda row: -row.through) if len(rows) > FORK_MAX_BRANCHES else rows
    branches = []
    for row in ranked[:FORK_MAX_BRANCHES]:
        branch = row.name.partition("/")[2]
        module = modules.get(branch.partition(" (call ")[0], -1)
        numbers = {"elements": row.through, "share": row.share, "weighted": row.weighted}
        branches.append({"name": branch, "module": module, **numbers, "error": errors[row.name]})
    if rest := ranked[FORK_MAX_BRANCHES:]:
        sums = zip(*((row.through, row.share, row.weighted) for row in rest))
        numbers = dict(zip(("elements", "share", "weighted"), map(sum, sums)))
        more = f"{len(rest):,} other branches"
        branches.append({"name": more, "module": -1, **numbers, "error": nan})
    base = name.partition(" (")[0].rpartition(".")[0]
    return {"name": name, "module": modules.get(base, -1), "branches": branches}


def without_paths(view: View) -> View:
    """A view without its paths, which take most of its size."""
    leaves = [
        {**leaf, "start": np.where(leaf["start"] >= 0, UNFOLLOWED, leaf["start"]).astype(np.int32)}
        for leaf in view["leaves"]
    ]
    empty = {name: column[:0] for name, column in view["forest"].items()}
    ways = [{**way, "starts": []} for way in view["routes"]]
    note = "to keep the notebook small the paths of single elements are left out"
    notes = [*view["notes"], f"{note}; .report('report.html') writes all"]
    return {**view, "notes": notes, "forest": empty, "routes": ways, "leaves": leaves}
