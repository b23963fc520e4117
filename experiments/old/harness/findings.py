"""The interface of an experiment, and its findings.

An experiment is a module with these names; the first four paragraphs of its docstring start with
``Question:``, ``Expectation:``, ``Method:`` and ``Seeds:``, and one may start with ``Limits:``::

    QUICK = {"layers": [1, 10], "rounds": 3}     # under a minute on two cores
    FULL = {"layers": [1, 10, 100], "rounds": 9} # within two hours
    SEEDS = Seeds(quick=1, full=5)               # how many, unless --seeds says
    TIMED = False                                # True: nothing else may run beside a cell

    FIGURE = "times"                             # the plot that the page leads with
    TABLE = "Times by depth"                     # and the table, by its title

    def cells(settings, seeds): ...  # list of JSON objects, each an independent piece of work
    def measure(cell, tick): ...     # a JSON object: what was measured of one cell
    def conclude(rows): ...          # Findings, from rows {"cell": ..., "result": ...}
    def headline(facts): ...         # the answer in a sentence or two, from facts of its Findings

``cells`` is deterministic, and a cell contains everything that ``measure`` needs: it is measured in
any process, in any order, and a result in the journal is not measured again. ``measure`` takes all
its random numbers from seeds in the cell, and calls ``tick(text)`` to report progress. ``conclude``
needs no torch, and does not depend on the order of rows. Without a ``headline`` the page leads with
the first sentence of the findings, without a ``FIGURE`` or ``TABLE`` with the first plot or table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

Cell: TypeAlias = dict[str, Any]
"""A piece of work, as JSON."""

Result: TypeAlias = dict[str, Any]
"""The measurements of a cell, as JSON."""

Tick: TypeAlias = Callable[[str], None]
"""Sets the text of the progress bar."""


class Seeds(NamedTuple):
    """The default numbers of seeds of the two forms of an experiment."""

    quick: int = 1
    full: int = 1


class Row(NamedTuple):
    """A cell with its result."""

    cell: Cell
    result: Result


@dataclass(frozen=True)
class Table:
    """A table of numbers and text."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | float | int | None, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class Series:
    """A series of points ``y`` over ``x``, with intervals ``low`` to ``high`` if given.

    ``like`` is the label of another series whose colour it is drawn in.
    """

    label: str
    x: Sequence[float | str]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    style: str = "line"  # or "points", "bars", "dashed"
    like: str = ""


@dataclass(frozen=True)
class Plot:
    """A figure with one panel. Texts in ``x`` are categories."""

    name: str
    title: str
    x: str
    y: str
    series: tuple[Series, ...]
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Findings:
    """The results of an experiment.

    ``sentence`` states the result with numbers, also where it contradicts the source. ``facts`` are
    values that do not depend on the machine or on noise and can be asserted, and the numbers behind
    the sentence. ``drawings`` are pictures that are not plots, as SVG, by title.
    """

    sentence: str
    tables: tuple[Table, ...] = ()
    plots: tuple[Plot, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    drawings: Mapping[str, str] = field(default_factory=dict)


class Experiment(Protocol):
    """The names that the module of an experiment must define."""

    __doc__: str | None
    QUICK: Mapping[str, Any]
    FULL: Mapping[str, Any]
    SEEDS: Seeds
    TIMED: bool

    def cells(self, settings: Mapping[str, Any], seeds: int) -> list[Cell]:
        """All independent pieces of work."""

    def measure(self, cell: Cell, tick: Tick) -> Result:
        """Measure one cell."""

    def conclude(self, rows: Sequence[Row]) -> Findings:
        """The findings from all rows."""
