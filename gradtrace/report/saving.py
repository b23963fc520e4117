"""Traces in files, which can be read without the model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol, overload

import torch
from torch import Tensor

from gradtrace import report as reports
from gradtrace.autodiff.names import Gradients, unknown
from gradtrace.errors import GradtraceError, UnknownName
from gradtrace.io import container, schemas
from gradtrace.paths.paths import Path, Paths, PathStep
from gradtrace.report.attribution import Graph
from gradtrace.report.attribution import attribution as of_attribution
from gradtrace.report.training import timing as of_timing
from gradtrace.report.training import training as of_training
from gradtrace.table import Table
from gradtrace.tracing.traced_program import TracedProgram
from gradtrace.training import history
from gradtrace.types import ravel, unravel

KIND = "trace"
VIEW = "view"
"""The tensor that holds what a report shows."""


class Viewed(Protocol):
    """An object with a view, to make a report from: a ``Trace`` or a ``Saved``."""

    def _view(self, sample: int = ..., seed: int = ...) -> reports.View: ...


@dataclass(frozen=True)
class Saved:
    """A trace as it was saved: gradients, influence, flow, and paths of a sample of elements."""

    gradients: Gradients = field(repr=False)
    rule: str
    pairs: int
    modules: Mapping[str, str] = field(repr=False)
    notes: tuple[str, ...] = field(repr=False)
    _tables: Mapping[str, Table] = field(repr=False)
    _norms: Table = field(repr=False)
    _paths: Paths = field(repr=False)
    _seen: reports.View | None = field(default=None, repr=False)  # None: in files of schema 1

    def influence(self) -> Table:
        """The saved table, of modules."""
        return self._tables[""]

    def norms(self) -> Table:
        """Gradient magnitude along depth."""
        return self._norms

    def paths(self, name: str | None = None) -> Paths:
        """The saved paths, of all leaves or of one.

        Args:
            name: Name of a leaf; all by default.

        Returns:
            The paths of the sample that was saved.
        """
        return self._paths if name is None else self._paths.of(name)

    def path(self, name: str, index: int | Sequence[int] = ()) -> Path:
        """The path of an element, if it is among the saved ones.

        Args:
            name: Name of the leaf.
            index: Of the element.

        Returns:
            The path.
        """
        if name not in self.gradients:
            raise UnknownName(unknown("leaf", name, self.gradients))
        found = self._paths.of(name, index)
        if not found:
            raise GradtraceError(
                f"the path of {name}{index} is not among the {len(self._paths):,} that were saved; "
                "save with a larger sample, or trace again"
            )
        return found[0]

    def report(
        self,
        path: str | os.PathLike[str],
        *,
        compare: Viewed | None = None,
        name: str | Sequence[str] | None = None,
        training: str | os.PathLike[str] | None = None,
        attribution: Graph | None = None,
    ) -> None:
        """Write one HTML file that shows the trace in a browser; see ``Trace.report``. Its top
        paths are those of the saved sample.

        Args:
            path: File to write.
            compare: Another trace to show beside this one.
            name: Title of this trace in the report, or one for each of the two.
            training: File of a ``gradtrace.Monitor``, whose run is then shown, too.
            attribution: Graph to show in a tab of its own: ``watch.attribute(...).graph()``.
        """
        write(path, [self, compare], name, training, attribution=attribution)

    def _repr_html_(self) -> str:
        """The report in a frame, for notebooks."""
        return reports.framed(self._view, repr(self))

    def _view(self, sample: int = 0, seed: int = 0) -> reports.View:
        """The view that a report shows."""
        if self._seen is None:
            raise GradtraceError(
                "the file was saved by a gradtrace without reports and holds no view to make one "
                "of: trace again and save again"
            )
        return self._seen


def write(
    path: str | os.PathLike[str],
    traces: Sequence[Viewed | None],
    name: str | Sequence[str] | None,
    training: str | os.PathLike[str] | None,
    sample: int = 1000,
    seed: int = 0,
    attribution: Graph | None = None,
) -> None:
    """Write the report of some traces, and of the run in a Monitor's file and of an attribution
    graph, if given.
    """
    graph = of_attribution(attribution)
    run = None if training is None else history.read(training)
    run_parts = (None, None) if run is None else (of_training(run[0]), of_timing(run[1]))
    given = [trace for trace in traces if trace is not None]
    for trace in given:
        if not hasattr(trace, "_view"):
            raise GradtraceError(
                f"a {type(trace).__name__} cannot be compared with a trace; give what "
                "gradtrace.trace, watch.trace or gradtrace.load returned"
            )
    views = [trace._view(sample, seed) for trace in given]
    reports.write(path, reports.report(views, name, *run_parts, graph))


def save(
    path: str | os.PathLike[str],
    trace: TracedProgram,
    view: reports.View,
    tables: Mapping[str, Table],
    norms: Table,
    paths: Sequence[Path],
) -> None:
    """Write a trace, and what was measured of it, to a file."""
    kinds, arrays = _packed(paths)
    meta = {
        "rule": trace.rule,
        "pairs": trace.pairs,
        "modules": dict(trace.modules),
        "aliases": dict(trace.gradients.aliases),
        "leaves": list(trace.gradients),
        "notes": list(trace.notes),
        "tables": {kind: table.to_dict() for kind, table in tables.items()},
        "norms": norms.to_dict(),
        "kinds": kinds,
    }
    grads = {f"gradient {n}": grad for n, grad in enumerate(trace.gradients.values())}
    container.write(path, KIND, meta, {**grads, **arrays, VIEW: reports.saved(view)})


def load(path: str | os.PathLike[str]) -> Saved:
    """Read a trace that ``trace.save`` wrote; neither the model nor its code is needed.

    Files contain numbers and text, and no code; one that is damaged, of a newer version or not a
    trace raises ``gradtrace.io.container.BadFile``.

    Args:
        path: A ``.gradtrace`` file.

    Returns:
        The trace as saved: tables, flow, and the paths of a sample; its ``report`` writes
        the page.
    """
    with container.about(path):
        meta, tensors = container.read(path, KIND, schemas.TRACE)[1:]
        schemas.trace_tensors(meta, tensors, {VIEW})
        seen = reports.loaded(tensors[VIEW]) if VIEW in tensors else None
    grads = {name: tensors[f"gradient {n}"] for n, name in enumerate(meta["leaves"])}
    return Saved(
        Gradients(grads, meta["aliases"]),
        meta["rule"],
        meta["pairs"],
        meta["modules"],
        tuple(meta["notes"]),
        {kind: Table.from_dict(table) for kind, table in meta["tables"].items()},
        Table.from_dict(meta["norms"]),
        Paths(Packed(meta["kinds"], tensors), f"Paths ({meta['rule']})"),
        seen,
    )


# Paths as arrays ----------------------------------------------------------------------------------


def _packed(paths: Sequence[Path]) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """The distinct kinds of steps, and arrays with a row for each step of each path."""
    kinds: dict[tuple[Any, ...], int] = {}
    rows: list[tuple[int, int]] = []
    numbers: list[tuple[float, float, float]] = []
    known: dict[tuple[int, str], tuple[int, int]] = {}  # by id: paths that meet share their steps
    for path in paths:
        leaf = path.name
        for step in path.steps:
            row = known.get((id(step), leaf))
            if row is None:
                key = (step.operator, step.module, step.call, step.shape, leaf)
                row = kinds.setdefault(key, len(kinds)), ravel(step.index, step.shape)
                known[id(step), leaf] = row
            rows.append(row)
            numbers.append((step.derivative, step.gradient, step.share))
            leaf = ""
    names = ("operator", "module", "call", "shape", "leaf")
    return [dict(zip(names, key)) for key in kinds], {
        "lengths": torch.tensor([len(path) for path in paths], dtype=torch.int64, device="cpu"),
        "pairs": torch.tensor([path.pair for path in paths], dtype=torch.int64, device="cpu"),
        "steps": torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(-1, 2),
        "numbers": torch.tensor(numbers, dtype=torch.float64, device="cpu").reshape(-1, 3),
    }


class Packed(Sequence[Path]):
    """Paths in the arrays of a file, already validated; each path is made on access."""

    def __init__(self, kinds: Sequence[Mapping[str, Any]], tensors: Mapping[str, Tensor]) -> None:
        self.kinds = kinds
        self.steps, self.numbers = tensors["steps"], tensors["numbers"]
        self.pairs = tensors["pairs"].tolist()
        self.lengths = tensors["lengths"].tolist()
        self.firsts = [end - n for end, n in zip(accumulate(self.lengths), self.lengths)]

    @overload
    def __getitem__(self, at: int) -> Path: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Path, ...]: ...
    def __getitem__(self, at: int | slice) -> Path | tuple[Path, ...]:
        if isinstance(at, slice):
            return tuple(self[n] for n in range(*at.indices(len(self))))
        mine = slice(self.firsts[at], self.firsts[at] + self.lengths[at])
        rows = zip(self.steps[mine].tolist(), self.numbers[mine].tolist())
        steps = tuple(self._step(self.kinds[kind], element, n) for (kind, element), n in rows)
        name = self.kinds[int(self.steps[mine.start, 0])]["leaf"]
        return Path(name, steps[0].index, steps, steps[0].gradient, self.pairs[at])

    def __len__(self) -> int:
        return len(self.lengths)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def _step(self, kind: Mapping[str, Any], element: int, numbers: Sequence[float]) -> PathStep:
        place, shape = (kind["operator"], kind["module"], kind["call"]), tuple(kind["shape"])
        return PathStep(*place, shape, unravel(element, shape), *numbers)
