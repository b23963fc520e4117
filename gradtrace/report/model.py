"""The data model of a report: values and columns, under the names that the page uses.

``web/src/types.ts`` documents each field; the two must agree. A ``View`` refers neither to the
trace it was made from nor to the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, TypeAlias, Union, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt

from gradtrace.io.validation import SchemaMismatch, number, unfit

# The dtype of a column is given twice, since what `typing` returns for NDArray depends on numpy's
# version.
Ints: TypeAlias = Annotated[npt.NDArray[np.int32], np.int32]
Bytes: TypeAlias = Annotated[npt.NDArray[np.uint8], np.uint8]
Floats: TypeAlias = Annotated[npt.NDArray[np.float64], np.float64]
Singles: TypeAlias = Annotated[npt.NDArray[np.float32], np.float32]

NONE, UNFOLLOWED = -1, -2
"""Values in place of a path's start: the element has no path; its path was not followed."""


@dataclass(frozen=True)
class Module:
    """A module of the model; the first is the model itself."""

    name: str
    kind: str
    parent: int
    calls: int
    parameters: int
    like: int


@dataclass(frozen=True, eq=False)
class Operators:
    """A row for each operator, from the loss on, and then for each leaf."""

    name: Ints
    module: Ints
    call: Ints
    shape: Ints
    leaf: Ints
    view: Bytes
    mass: Floats


@dataclass(frozen=True, eq=False)
class Edges:
    """A row for each argument that received gradient."""

    consumer: Ints
    producer: Ints
    position: Ints
    mass: Floats
    share: Singles


@dataclass(frozen=True, eq=False)
class HeatMap:
    """A leaf as a matrix, divided into cells: element ``(r, c)`` is in cell
    ``(r · rows // height, c · columns // width)``.
    """

    height: int
    width: int
    rows: int
    columns: int
    element: Ints
    gradient: Floats
    start: Ints


@dataclass(frozen=True, eq=False)
class Leaf:
    """A parameter, or an input that requires grad."""

    name: str
    names: tuple[str, ...]
    operator: int
    module: int
    parameter: bool
    shape: tuple[int, ...]
    elements: int
    zero: int
    norm: float
    largest: float
    map: HeatMap | None


@dataclass(frozen=True, eq=False)
class Forest:
    """The elements that paths visit, each once; ``next`` has a greater number than its element."""

    operator: Ints
    word: Ints
    shape: Ints
    element: Ints
    derivative: Floats
    gradient: Floats
    share: Singles
    next: Ints


@dataclass(frozen=True)
class Route:
    """A sequence of operators that sampled paths go through."""

    operators: tuple[int, ...]
    modules: tuple[int, ...]
    count: int
    share: float
    weighted: float
    starts: tuple[int, ...]


@dataclass(frozen=True)
class Sample:
    """How the paths behind the routes were drawn."""

    paths: int
    drawn: int
    elements: int
    seed: int


@dataclass(frozen=True, eq=False)
class Influence:
    """A row for each component."""

    name: tuple[str, ...]
    module: Ints
    share: Floats
    weighted: Floats
    error: Floats
    through: Floats
    eligible: Floats
    unreached: Floats
    own: Floats
    notes: tuple[str, ...]
    series: Bytes | None = None  # None: in a file of an older version


@dataclass(frozen=True)
class Branch:
    """One way that paths take at a fork."""

    name: str
    module: int
    elements: float
    share: float
    weighted: float
    error: float


@dataclass(frozen=True)
class Fork:
    """A place where paths divide."""

    name: str
    kind: str
    module: int
    times: int
    branches: tuple[Branch, ...]


@dataclass(frozen=True)
class FlowRow:
    """The gradient at a module."""

    module: int
    depth: int
    norm: float
    gain: float | None
    zeros: float
    own: float | None
    verdict: str


@dataclass(frozen=True, eq=False)
class Flow:
    """The gradient along depth and by module."""

    findings: tuple[str, ...]
    depth: Ints
    norm: Floats
    rms: Floats
    zeros: Floats
    operator: tuple[str, ...]
    module: tuple[str, ...]
    rows: tuple[FlowRow, ...]


@dataclass(frozen=True)
class Coverage:
    """What part of their elements' gradients the paths carry, over a sample of elements."""

    median: float
    lower: float
    upper: float
    opposite: float
    cancelled: float
    elements: int
    words: tuple[str, ...]


@dataclass(frozen=True)
class Finding:
    """One thing that a diagnosis found; ``place`` is the name of its module, in words."""

    kind: str
    severity: str
    title: str
    module: int
    place: str
    parameters: tuple[str, ...]
    line: str
    evidence: str
    advice: str


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with a loss and its gradient, worst first."""

    findings: tuple[Finding, ...]
    remarks: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class View:
    """Everything that a report shows of one trace."""

    name: str
    rule: str
    granularity: str
    pairs: int
    notes: tuple[str, ...]
    words: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    modules: tuple[Module, ...]
    operators: Operators
    edges: Edges
    leaves: tuple[Leaf, ...]
    forest: Forest
    routes: tuple[Route, ...]
    sample: Sample
    tables: dict[str, Influence]
    flow: Flow
    coverage: Coverage | None = None  # None: whole tensors, or a file of an older version
    choices: tuple[Fork, ...] | None = None  # None: not measured, or a file of an older version
    diagnosis: Diagnosis | None = None  # None: not asked for, or a file of an older version


@dataclass(frozen=True, eq=False)
class Training:
    """Influence over the steps of a training run."""

    step: Ints
    loss: Floats
    components: tuple[str, ...]
    share: tuple[Floats, ...]
    weighted: tuple[Floats, ...]
    cost: float
    running: bool
    notes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Timing:
    """Seconds per step, and whether they grow."""

    step: Ints
    seconds: Floats
    verdict: str
    grows: bool | None
    slope: float
    low: float
    high: float


@dataclass(frozen=True)
class AttributionNode:
    """An input position, a head, a module or the output of an attribution graph."""

    name: str
    kind: str
    label: str
    rank: int
    score: float
    influence: float


@dataclass(frozen=True)
class AttributionEdge:
    """What goes from a node (its number) to another."""

    source: int
    target: int
    score: float
    influence: float


@dataclass(frozen=True)
class Attribution:
    """A pruned attribution graph: what moves a scalar, and by which routes."""

    value: float
    total: float
    rule: str
    points: int
    defect: float
    whole: tuple[int, int]
    kept: tuple[float, float]
    nodes: tuple[AttributionNode, ...]
    edges: tuple[AttributionEdge, ...]


@dataclass(frozen=True, eq=False)
class Report:
    """A whole page."""

    schema: int
    title: str
    made: tuple[tuple[str, str], ...]
    traces: tuple[View, ...]
    training: Training | None
    timing: Timing | None
    attribution: Attribution | None = None


# From dicts ---------------------------------------------------------------------------------------


def revived(kind: type, data: Any) -> Any:
    """An object of one of the classes above from dicts, lists and columns, each field checked.

    >>> revived(Sample, {"paths": 3, "drawn": 4, "elements": 9, "seed": 0})
    Sample(paths=3, drawn=4, elements=9, seed=0)
    """
    hints = _hints(kind)
    optional = {part.name for part in fields(kind) if part.default is not MISSING}
    if not isinstance(data, Mapping) or not data.keys() >= hints.keys() - optional:
        unfit(f"is no {kind.__name__}")
    values = {}
    for name, hint in hints.items():
        if name not in data:
            continue
        try:
            values[name] = _value(hint, data[name])
        except SchemaMismatch as error:
            raise error.within(name) from None
    found = kind(**values)
    lengths = {len(x) for x in values.values() if isinstance(x, np.ndarray)}
    if len(lengths) > 1:
        unfit(f"has columns that differ in length ({kind.__name__})")
    return found


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _value(hint: Any, data: Any) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return None if data is None else _value(next(a for a in args if a is not NoneType), data)
    if origin is Annotated:
        dtype = args[1]
        if not isinstance(data, np.ndarray) or data.dtype != dtype:
            unfit(f"is no column of {np.dtype(dtype)}")
        return data
    if origin is dict and isinstance(data, Mapping):
        return {str(key): _value(args[1], each) for key, each in data.items()}
    if origin is tuple and isinstance(data, list):
        kinds = args[:1] * len(data) if args[1] is ... else args
        if len(kinds) != len(data):
            unfit(f"has {len(data)} values in place of {len(kinds)}")
        return tuple(map(_value, kinds, data))
    if isinstance(hint, type) and is_dataclass(hint):
        return revived(hint, data)
    if hint is float:
        number()(data)
        return float(data)
    if type(data) is not hint:
        unfit(f"is {type(data).__name__} in place of {getattr(hint, '__name__', hint)}")
    return data
