"""What a section found: a table, remarks, and curves to draw."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, field

from gradtrace.io.strict_json import json_value

Cell = str | float | None
"""None where there is nothing to say."""


@dataclass(frozen=True)
class ResultColumn:
    """A column of a table: ``form`` is how its numbers are written, ``limits`` the title of the
    column for which this one holds the most that is aimed at, or the ``least``.
    """

    title: str
    form: str = ""
    limits: str = ""
    least: bool = False


@dataclass(frozen=True)
class Curve:
    """Points of a figure; a ``limit`` is what others should stay below."""

    label: str
    x: list[float]
    y: list[float]
    limit: bool = False


@dataclass(frozen=True)
class Figure:
    """Curves over one pair of axes, at which ``x`` and ``y`` stand. Points are ``joined`` by lines,
    and axes are logarithmic (``log``), or not.
    """

    name: str
    title: str
    x: str
    y: str
    curves: list[Curve]
    joined: bool = True
    log: bool = True


@dataclass
class Section:
    """A table under a title; ``notes`` are sentences below it, ``seconds`` what it took in all,
    ``taken`` when, and beside what load; ``where``, if that is not the machine of the page.
    """

    title: str
    columns: list[ResultColumn]
    rows: list[list[Cell]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    seconds: float = 0.0
    taken: str = ""
    where: str = ""

    def add(self, *row: Cell) -> None:
        """Append a row, and show it; of a number that could not be told there is nothing to say."""
        assert len(row) == len(self.columns)
        cells = list(json_value(row, missing=True))
        self.rows.append(cells)
        say("  " + "  ".join(text(cell, column) for cell, column in zip(cells, self.columns)))

    def note(self, sentence: str) -> None:
        """Append a sentence, and show it."""
        self.notes.append(sentence)
        say(f"  {sentence}")


def text(cell: Cell, column: ResultColumn) -> str:
    """A cell as it is written."""
    if cell is None:
        return ""
    return cell if isinstance(cell, str) else format(cell, column.form)


class Absent(Exception):
    """Why a section cannot be taken here, in words; it is no failure."""


@dataclass
class Setting:
    """How to run: on small cases only, with how many rounds, on which device what is meant for a
    GPU (the first GPU unless told); and what had to be left out.
    """

    quick: bool = False
    rounds: int | None = None
    device: str | None = None
    left_out: list[str] = field(default_factory=list)

    def turns(self, own: int) -> int:
        """The rounds asked for, or those that a section has of its own."""
        return self.rounds or (1 if self.quick else own)

    def limit(self, aim: float | None) -> float | None:
        """What is aimed at; nothing where cases are small."""
        return None if self.quick else aim

    def has(self, package: str, what: str) -> bool:
        """Whether a package is installed; if not, says loudly what is left out."""
        if importlib.util.find_spec(package) is not None:
            return True
        self.leave_out(f"{what}: {package} is not installed")
        return False

    def leave_out(self, line: str) -> None:
        """Say once what is not in the results, and why."""
        if line not in self.left_out:
            self.left_out.append(line)
            say(f"LEFT OUT: {line}")


def say(line: str) -> None:
    """Progress, on stderr."""
    print(line, file=sys.stderr, flush=True)
