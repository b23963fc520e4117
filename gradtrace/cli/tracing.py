"""Implements ``gradtrace trace``: from a function's return value to the output."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from gradtrace.cli.printing import ProgressBar, write, write_table
from gradtrace.errors import GradtraceError
from gradtrace.flow import Flow
from gradtrace.io.table import TextTable
from gradtrace.session import watch
from gradtrace.tools.discovery import Discovery
from gradtrace.tools.loss_evaluator import takes_model
from gradtrace.trace import Trace
from gradtrace.tracing.components import KINDS, Components
from gradtrace.tracing.influence import Influence, Row
from gradtrace.tracing.paths import Path as GradientPath

DEFAULT_TOP = 20
RETURNS = "return a loss, a model and its loss, or (model, loss_fn)"


# Options -----------------------------------------------------------------------------------------


class Element(NamedTuple):
    """An element of a leaf; with ``place`` None, the one with the largest path."""

    name: str
    place: tuple[int, ...] | None

    @classmethod
    def of(cls, text: str) -> Element:
        """Parse ``weight[23,3]``, ``weight[23][3]`` or ``weight``."""
        found = re.fullmatch(r"(.*?)((?:\[[-\d\s,]*\])*)", text, flags=re.DOTALL)
        name, index = found.groups() if found else ("", "")
        if not name or name.endswith("]") or not re.fullmatch(r"[^\[\]]*", name):
            raise GradtraceError(f"--path {text!r}: write NAME or NAME[INDEX], as weight[23,3]")
        numbers = tuple(int(number) for number in re.findall(r"-?\d+", index))
        return cls(name, numbers if index else None)


@dataclass(frozen=True)
class TraceOptions:
    """The options of the command."""

    rule: str = "greedy"
    granularity: str = "scalar"
    components: Components = None
    weight: str = "count"
    sample: int | None = None
    seed: int = 0
    paths: tuple[Element, ...] = ()
    out: Path | None = None
    report: Path | None = None


def components(given: Sequence[str]) -> Components:
    """A kind of component, or names, patterns and groups of them."""
    if not given:
        return None
    if len(given) == 1 and given[0] in KINDS:
        return given[0]
    groups: dict[str, list[str]] = {}
    for text in given:
        name, equals, parts = text.partition("=")
        groups[name] = parts.split(",") if equals else [text]
    return groups


# The function's return value ---------------------------------------------------------------------


class WatchedLoss(NamedTuple):
    """A loss, and the watch under which it was computed."""

    loss: Tensor
    watch: watch


def made(call: Callable[[], Any], name: str, known: Mapping[str, Any]) -> WatchedLoss:
    """Call the function while watching all modules, and interpret its return value."""
    with Discovery() as discovery:
        returned = call()
    model, rest = _parted(returned, name)
    loss = _loss(rest)
    if loss is not None:
        discovery.resolve_names(loss, model, known)
        return WatchedLoss(loss, discovery)
    if model is None or not callable(rest):
        raise GradtraceError(f"{name} returned {_kind(returned)}; {RETURNS}")
    with watch(model) as watched:
        found = rest(model) if takes_model(rest) else rest()
    loss = _loss(found)
    if loss is None:
        raise GradtraceError(f"the loss_fn that {name} returned gave {_kind(found)}, not a loss")
    return WatchedLoss(loss, watched)


def _parted(returned: Any, name: str) -> tuple[nn.Module | None, Any]:
    """Split a return value into the model, if there is one, and the rest."""
    if not isinstance(returned, (tuple, list)) or _loss(returned) is not None:
        return None, returned
    models = [part for part in returned if isinstance(part, nn.Module)]
    rest = [part for part in returned if not isinstance(part, nn.Module)]
    if len(models) != 1 or len(rest) != 1:
        raise GradtraceError(f"{name} returned {_kind(returned)}; {RETURNS}")
    return models[0], rest[0]


def _loss(value: Any) -> Tensor | None:
    """The tensor itself, or the ``loss`` of an output or a dict."""
    if isinstance(value, Mapping) and "loss" in value:
        value = value["loss"]
    elif not isinstance(value, (Tensor, nn.Module)):
        value = getattr(value, "loss", value)
    return value if isinstance(value, Tensor) else None


def _kind(value: Any) -> str:
    if type(value) in (tuple, list):
        return f"({', '.join(type(part).__name__ for part in value)})"
    return type(value).__name__


# Results -----------------------------------------------------------------------------------------


class TraceOutcome(NamedTuple):
    """Everything that the command prints."""

    loss: Tensor
    trace: Trace
    influence: Influence
    flow: Flow
    paths: tuple[GradientPath, ...]


def found(made: WatchedLoss, asked: TraceOptions, work: ProgressBar) -> TraceOutcome:
    """Trace the loss and measure."""
    work.begin("tracing")
    trace = made.watch.trace(made.loss, rule=asked.rule, granularity=asked.granularity)
    paths = tuple(
        _path(trace, wanted) for wanted in asked.paths
    )  # first, so that a typo is reported early
    work.begin("measuring influence")
    influence = trace.influence(
        asked.components, asked.weight, sample=asked.sample, seed=asked.seed
    )
    result = TraceOutcome(made.loss.detach(), trace, influence, trace.flow(), paths)
    if asked.out is not None:
        work.begin(f"saving {asked.out}")
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        trace.save(asked.out)
    if asked.report is not None:
        work.begin(f"writing {asked.report}")
        asked.report.parent.mkdir(parents=True, exist_ok=True)
        trace.report(asked.report)
    return result


def _path(trace: Trace, wanted: Element) -> GradientPath:
    if wanted.place is not None or trace.granularity == "operator":
        return trace.path(wanted.name, wanted.place or ())
    best = trace.paths(wanted.name, k=1)
    if not best:
        raise GradtraceError(f"{wanted.name} has no path: every contribution to it is 0")
    return best[0]


def chosen(influence: Influence, top: int | None) -> Influence:
    """The ``top`` components by influence, the largest first."""
    if top is None:
        return influence
    shares = influence.shares

    def rank(row: Row) -> float:
        return -1.0 if math.isnan(shares[row.name]) else shares[row.name]

    return replace(influence, rows=tuple(sorted(influence.rows, key=rank, reverse=True)[:top]))


# Output ------------------------------------------------------------------------------------------


def show(found: TraceOutcome, asked: TraceOptions, top: int | None) -> None:
    """Print the results as text."""
    write(_summary(found))
    table = chosen(found.influence, top or DEFAULT_TOP).table()
    more = len(found.influence) - len(table.rows)
    left = (f"… and {more:,} more components (--top {len(found.influence)} shows all)",)
    write_table(replace(table, notes=(*(left if more else ()), *table.notes)))
    write(f"Flow: {found.flow.verdict}")
    for path in found.paths:
        write_table(path.table())
    if asked.out is not None:
        write(f"The trace is in {asked.out}")
    if asked.report is not None:
        write(f"The report is in {asked.report}")


def _summary(found: TraceOutcome) -> str:
    """``Loss 3.912: 57 operators, 10 leaves of 2,458 elements``."""
    trace = found.trace
    elements = sum(leaf.tensor.numel() for leaf in trace.program.leaves)
    heading = f"Mean of {trace.pairs:,} losses" if trace.pairs > 1 else "Loss"
    return (
        f"{heading} {float(found.loss.double().mean()):.4g}: {len(trace.program.blocks):,} "
        f"operators, {len(trace.program.leaves):,} leaves of {elements:,} elements"
    )


def data(found: TraceOutcome, asked: TraceOptions, top: int | None) -> dict[str, Any]:
    """The results for ``--json``."""
    trace = found.trace
    leaves = {trace.names[leaf.value]: leaf.tensor for leaf in trace.program.leaves}
    return {
        "loss": [_number(float(x)) for x in found.loss.double().reshape(-1)],
        "rule": trace.rule,
        "granularity": trace.granularity,
        "operators": len(trace.program.blocks),
        "leaves": {name: list(tensor.shape) for name, tensor in leaves.items()},
        "weight": asked.weight,
        "influence": rows(chosen(found.influence, top).table()),
        "flow": found.flow.verdict,
        "paths": [_path_data(path) for path in found.paths],
        "notes": list(found.influence.notes),
        "out": None if asked.out is None else str(asked.out),
        "report": None if asked.report is None else str(asked.report),
    }


def rows(table: TextTable) -> list[dict[str, Any]]:
    """The rows of a table, for JSON."""
    return [
        {key.removeprefix("± "): value for key, value in row.items()} for row in table.to_dicts()
    ]


def _path_data(path: GradientPath) -> dict[str, Any]:
    return {
        "leaf": path.name,
        "element": list(path.index),
        "weight": _number(path.weight),
        "gradient": _number(path.gradient),
        "steps": path.table().to_dicts(),
    }


def _number(value: float) -> float | str:
    """A number for JSON, which has no NaN: non-finite ones are strings."""
    return value if math.isfinite(value) else str(value)
