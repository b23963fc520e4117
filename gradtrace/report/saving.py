"""Traces in ``.gradtrace`` files, which are read without the model: tensors and JSON, by the format
of the ``safetensors`` library.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from gradtrace.autodiff.names import Gradients
from gradtrace.errors import UPDATE, BadFile, GradtraceError, reason_of
from gradtrace.files import json_value, naming, replacing
from gradtrace.report import encode
from gradtrace.report.attribution import Graph
from gradtrace.report.attribution import attribution as of_attribution
from gradtrace.report.building import without_paths
from gradtrace.report.encode import View
from gradtrace.report.page import framed, report, write
from gradtrace.report.training import Run, parts
from gradtrace.table import Column, Table
from gradtrace.traced import Trace

SCHEMA = 1
"""The version of the files that are written; older ones have none, as none was published."""

VIEW = "view"
"""The tensor that holds what a page shows."""

PATH_COLUMNS = (
    Column("leaf"),
    Column("element"),
    Column("weight", "number"),
    Column("gradient", "number"),
    Column("share", "share"),
    Column("steps", "count"),
    Column("way"),
)


@dataclass(frozen=True)
class Saved:
    """A trace as it was saved: its gradients, tables, and the paths of a sample of elements."""

    gradients: Gradients = field(repr=False)
    rule: str
    notes: tuple[str, ...] = field(repr=False)
    tables: Mapping[str, Table] = field(repr=False)
    _view: View = field(repr=False)

    def influence(self) -> Table:
        """The influence of modules."""
        return self.tables["influence"]

    def norms(self) -> Table:
        """Gradient norms by module."""
        return self.tables["norms"]

    def coverage(self) -> Table:
        """What part of its element's gradient a path carries."""
        return self.tables["coverage"]

    def paths(self) -> Table:
        """The paths of the sample, a row for each; the report shows their steps."""
        return self.tables["paths"]

    def report(
        self,
        path: str | os.PathLike[str],
        *,
        name: str | None = None,
        training: Run | None = None,
        attribution: Graph | None = None,
    ) -> None:
        """Write one HTML file that shows the trace in a browser. Its top paths are those of the
        saved sample. Arguments are those of ``gradtrace.traced.Trace.report``.
        """
        write_page(path, self._view, name, training, attribution)

    def _repr_html_(self) -> str:
        """The report in a frame, for notebooks."""
        return framed(lambda: self._view, without_paths, repr(self))


def write_page(
    path: str | os.PathLike[str],
    view: View,
    name: str | None,
    training: Run | None,
    attribution: Graph | None,
) -> None:
    """Write the report of a trace, and of a run and of an attribution graph, if given."""
    graph = of_attribution(attribution)
    write(path, report(view, name, **parts(training), attribution=graph))


def save(path: str | os.PathLike[str], trace: Trace, view: View, sample: int, seed: int) -> None:
    """Write a trace, and what was measured of it, to a file."""
    tables = {
        "influence": trace.influence(),
        "norms": trace.norms(),
        "coverage": trace.coverage(sample, seed),
        "paths": _paths(trace, sample, seed),
    }
    meta = {
        "rule": trace.rule,
        "aliases": dict(trace.gradients.aliases),
        "leaves": list(trace.gradients),
        "notes": trace.notes,
        "tables": {name: table.to_dict() for name, table in tables.items()},
    }
    text = json.dumps(json_value(meta))
    grads = {f"gradient {n}": _plain(x) for n, x in enumerate(trace.gradients.values())}
    grads[VIEW] = torch.frombuffer(bytearray(encode.contained(view)), dtype=torch.uint8)
    with replacing(path) as new:
        save_file(grads, new, {"gradtrace": "trace", "schema": str(SCHEMA), "meta": text})


def _plain(gradient: Tensor) -> Tensor:
    """A tensor that a file can hold: on the CPU, contiguous, with a storage of its own."""
    return gradient.detach().to("cpu", copy=True).contiguous()


def _paths(trace: Trace, sample: int, seed: int) -> Table:
    """The paths of a sample as rows."""
    rows: Any = tuple(
        (
            *(path.name, str(list(path.index)), path.weight, path.gradient, path.share),
            *(len(path), " → ".join(path.modules or path.operators)),
        )
        for path in trace.paths(sample=sample, seed=seed)
    )
    return Table(f"Paths ({trace.rule})", PATH_COLUMNS, rows, about={"rule": trace.rule})


def load_trace(path: str | os.PathLike[str]) -> Saved:
    """Read a trace that ``trace.save`` wrote; neither the model nor its code is needed.

    Args:
        path: A ``.gradtrace`` file.

    Returns:
        The trace as saved: gradients, tables, and the rows of sampled paths; its ``report`` writes
        the page.
    """
    about, tensors = _contents(path)
    try:
        return _saved(json.loads(about["meta"]), tensors)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        what = f"is damaged, as its parts do not fit together ({reason_of(error)})"
        raise _bad(path, what, "copy it again, or save the trace again") from error


def _saved(meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Saved:
    grads = {name: tensors[f"gradient {n}"] for n, name in enumerate(meta["leaves"])}
    return Saved(
        Gradients(grads, meta["aliases"]),
        meta["rule"],
        tuple(meta["notes"]),
        {name: Table.from_dict(table) for name, table in meta["tables"].items()},
        encode.read(tensors[VIEW].numpy().tobytes()),
    )


def _contents(path: str | os.PathLike[str]) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The texts and the tensors of a file; an error in one sentence for any other file."""
    bad = partial(_bad, path)
    with naming(path, "read") as at:
        with open(at, "rb") as file:
            start = file.read(9)
        if not start:
            raise bad("is empty", "save the trace again")
        if start[8:] != b"{":
            raise bad("is no .gradtrace file", "give a file that trace.save wrote")
        try:
            with safetensors.safe_open(at, "pt") as found:
                about = found.metadata() or {}
                tensors = {name: found.get_tensor(name) for name in found.keys()}  # noqa: SIM118
        except safetensors.SafetensorError as error:
            raise bad(f"is torn or damaged ({error})", "copy it again, or save it again") from error
    if about.get("gradtrace") != "trace":
        raise bad("holds tensors, but no trace", "give a file that trace.save wrote")
    if about.get("schema") != str(SCHEMA):
        raise bad(f"has schema {about.get('schema')}, this gradtrace reads {SCHEMA}", UPDATE)
    return about, tensors


def _bad(path: str | os.PathLike[str], what: str, advice: str) -> GradtraceError:
    return BadFile(f"{os.fspath(path)!r} {what}: {advice}")
