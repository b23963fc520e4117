"""What an experiment is, and what it finds.

An experiment is a module with these names; the first four paragraphs of its docstring start with
``Question:``, ``Expectation:``, ``Method:`` and ``Seeds:``::

    QUICK = {"layers": [1, 10], "rounds": 3}     # under a minute on two cores
    FULL = {"layers": [1, 10, 100], "rounds": 9} # within two hours
    SEEDS = Seeds(quick=1, full=5)               # how many, unless --seeds says
    TIMED = False                                # True: nothing else may run beside a cell

    def cells(settings, seeds): ...  # list of JSON objects, each an independent piece of work
    def measure(cell, tick): ...     # a JSON object: what was measured of one cell
    def conclude(rows): ...          # Findings, from rows {"cell": ..., "result": ...}

``cells`` of equal arguments are equal, and a cell says all that ``measure`` has to know: it is
measured in any process, in any order, and a result that was journaled is not measured again.
``measure`` draws all its random numbers from seeds in the cell, and calls ``tick(text)`` now and
then. ``conclude`` needs no torch, and gives the same for rows in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

Cell: TypeAlias = dict[str, Any]
"""A piece of work, as JSON."""

Result: TypeAlias = dict[str, Any]
"""What was measured, as JSON."""

Tick: TypeAlias = Callable[[str], None]
"""Tell the progress bar what is going on."""


class Seeds(NamedTuple):
    """How many seeds the two forms of an experiment take."""

    quick: int = 1
    full: int = 1


class Row(NamedTuple):
    """A cell with its result."""

    cell: Cell
    result: Result


@dataclass(frozen=True)
class Table:
    """Numbers and words under headers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | float | int | None, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class Series:
    """Points of one kind: ``y`` over ``x``, with intervals ``low`` to ``high`` if there are any.

    One that belongs to another is drawn in the colour of that label, which it is ``like``.
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
    """A figure: one panel. Texts of ``x`` are categories."""

    name: str
    title: str
    x: str
    y: str
    series: tuple[Series, ...]
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Findings:
    """What an experiment found.

    ``sentence`` says it in plain words, with numbers, also where it contradicts the source.
    ``facts`` are what does not depend on the machine or on noise and can be asserted, and the
    numbers behind the sentence. ``drawings`` are pictures that are no plots, as SVG, by title.
    """

    sentence: str
    tables: tuple[Table, ...] = ()
    plots: tuple[Plot, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    drawings: Mapping[str, str] = field(default_factory=dict)


class Experiment(Protocol):
    """The names that a module of an experiment has."""

    __doc__: str | None
    QUICK: Mapping[str, Any]
    FULL: Mapping[str, Any]
    SEEDS: Seeds
    TIMED: bool

    def cells(self, settings: Mapping[str, Any], seeds: int) -> list[Cell]:
        """All pieces of work."""

    def measure(self, cell: Cell, tick: Tick) -> Result:
        """One of them, done."""

    def conclude(self, rows: Sequence[Row]) -> Findings:
        """What came out."""
