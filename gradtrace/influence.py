"""Influence: through which components the paths of the parameters run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import nan, sqrt
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from gradtrace.components import Component
from gradtrace.errors import GradtraceError, UnknownName
from gradtrace.program import Program
from gradtrace.tables import Column, Table
from gradtrace.tracing import BITS, Found, Marks, Words

Weight = Literal["count", "gradient"]


@dataclass(frozen=True)
class Moments:
    """Sums over pairs of ``through`` (t) and ``eligible`` (e): Σt, Σe, Σt², Σte, Σe², exact.

    Gradients are floats, whose sums depend on their order; so they are kept as fractions, and the
    sums of parts are the sum of the whole, to the last bit.
    """

    t: Fraction = Fraction(0)
    e: Fraction = Fraction(0)
    tt: Fraction = Fraction(0)
    te: Fraction = Fraction(0)
    ee: Fraction = Fraction(0)

    @classmethod
    def of(cls, through: float, eligible: float) -> Moments:
        """Those of one pair."""
        t, e = Fraction(through), Fraction(eligible)
        return cls(t, e, t * t, t * e, e * e)

    def __add__(self, other: Moments) -> Moments:
        return Moments(*(a + b for a, b in zip(self.parts(), other.parts())))

    def parts(self) -> tuple[Fraction, ...]:
        """The five sums."""
        return self.t, self.e, self.tt, self.te, self.ee

    @property
    def share(self) -> float:
        """``Σt / Σe``."""
        return float(self.t / self.e) if self.e else nan

    def error(self, pairs: int) -> float:
        """The standard error of the share over pairs: that of a ratio of sums."""
        if pairs < 2 or not self.e:
            return nan
        share = self.t / self.e
        residual = self.tt - 2 * share * self.te + share * share * self.ee
        return sqrt(max(0.0, float(residual * pairs / (pairs - 1) / self.e**2)))


@dataclass(frozen=True)
class Row:
    """What is known of one component."""

    name: str
    own: int = 0
    unreached: int = 0
    count: Moments = Moments()
    gradient: Moments = Moments()

    def __add__(self, other: Row) -> Row:
        return replace(
            self,
            own=max(self.own, other.own),
            unreached=self.unreached + other.unreached,
            count=self.count + other.count,
            gradient=self.gradient + other.gradient,
        )


@dataclass(frozen=True)
class Influence:
    """A table of components.

    Of the parameter elements outside a component that could pass through it (``eligible``: some
    route through it exists, and the element has a path), ``through`` is how many do, and ``share``
    the ratio; ``weighted`` counts every element with its |gradient|. ``unreached`` are those that
    could but have no path, as nothing but zeros came to them; ``own`` are the component's own
    parameters, which are left out. Counts are sums over pairs, so tables add up: ``a.merge(b)``.
    """

    rows: tuple[Row, ...]
    pairs: int = 1
    weight: Weight = "count"
    rule: str = "greedy"
    notes: tuple[str, ...] = ()
    interrupted: bool = False

    def __getitem__(self, name: str) -> Row:
        for row in self.rows:
            if row.name == name:
                return row
        known = ", ".join(row.name for row in self.rows[:8])
        raise UnknownName(f"no component {name!r} in this table; there are {known}")

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def shares(self) -> dict[str, float]:
        """``{component: share}``, by count or by gradient as ``weight`` says; nan if none could."""
        return {row.name: getattr(row, self.weight).share for row in self.rows}

    @property
    def errors(self) -> dict[str, float]:
        """``{component: standard error of its share over pairs}``; nan for fewer than two."""
        return {row.name: getattr(row, self.weight).error(self.pairs) for row in self.rows}

    def by(self, weight: Weight) -> Influence:
        """The same table, with shares by ``"count"`` or by ``"gradient"``."""
        return replace(self, weight=checked_weight(weight))

    def merge(self, *others: Influence) -> Influence:
        """The table of all pairs of several; in any order and grouping the same."""
        result = self
        for other in others:
            if (other.weight, other.rule) != (result.weight, result.rule):
                raise GradtraceError(
                    f"a table by {result.rule} and {result.weight} cannot be merged with one by "
                    f"{other.rule} and {other.weight}"
                )
            mine = {row.name: row for row in result.rows}
            theirs = {row.name: row for row in other.rows}
            names = sorted(mine.keys() | theirs.keys(), key=_order(result.rows, other.rows))
            rows = tuple(mine.get(n, Row(n)) + theirs.get(n, Row(n)) for n in names)
            notes = tuple(sorted({*result.notes, *other.notes}))
            result = replace(
                result,
                rows=rows,
                pairs=result.pairs + other.pairs,
                notes=notes,
                interrupted=result.interrupted or other.interrupted,
            )
        return result

    # To look at ----------------------------------------------------------------------------------

    def table(self) -> Table:
        """The columns of every component."""
        many = self.pairs > 1
        columns = (
            Column("component"),
            Column("through", "count"),
            Column("eligible", "count"),
            Column("share", "share"),
            *([Column("± error", "share")] if many else []),
            Column("weighted", "share"),
            Column("unreached", "count"),
            Column("own", "count"),
        )
        rows = tuple(
            (
                row.name,
                int(row.count.t),
                int(row.count.e),
                row.count.share if row.count.e else None,
                *([row.count.error(self.pairs)] if many else []),
                row.gradient.share if row.gradient.e else None,
                row.unreached,
                row.own,
            )
            for row in self.rows
        )
        pairs = f", {self.pairs:,} pairs" if many else ""
        return Table(f"Influence ({self.rule}{pairs})", columns, rows, self.notes)

    def __str__(self) -> str:
        return str(self.table())

    def __repr__(self) -> str:
        return f"Influence({len(self.rows)} components, {self.pairs:,} pairs, {self.rule})"

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def to_pandas(self) -> Any:
        """One row a component, as a pandas.DataFrame."""
        return self.table().to_pandas()

    # To keep -------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON has it; fractions as [numerator, denominator]."""
        return {
            "rows": [
                {
                    "name": row.name,
                    "own": row.own,
                    "unreached": row.unreached,
                    "count": [[f.numerator, f.denominator] for f in row.count.parts()],
                    "gradient": [[f.numerator, f.denominator] for f in row.gradient.parts()],
                }
                for row in self.rows
            ],
            "pairs": self.pairs,
            "weight": self.weight,
            "rule": self.rule,
            "notes": list(self.notes),
            "interrupted": self.interrupted,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Influence:
        """What ``to_dict`` gave."""
        rows = tuple(
            Row(
                str(row["name"]),
                int(row["own"]),
                int(row["unreached"]),
                Moments(*(Fraction(*pair) for pair in row["count"])),
                Moments(*(Fraction(*pair) for pair in row["gradient"])),
            )
            for row in data["rows"]
        )
        return cls(
            rows,
            int(data["pairs"]),
            checked_weight(data["weight"]),
            str(data["rule"]),
            tuple(data["notes"]),
            bool(data["interrupted"]),
        )


def checked_weight(weight: str) -> Weight:
    """``"count"`` or ``"gradient"``, or a clear error."""
    if weight == "count":
        return "count"
    if weight == "gradient":
        return "gradient"
    raise UnknownName(f"weight is 'count' or 'gradient', not {weight!r}")


def _order(first: tuple[Row, ...], second: tuple[Row, ...]) -> Any:
    """Names in an order that does not depend on which table was first."""
    if [row.name for row in first] == [row.name for row in second]:
        place = {row.name: n for n, row in enumerate(first)}
        return lambda name: place[name]
    return lambda name: name


# Counting -----------------------------------------------------------------------------------------


@dataclass
class Tally:
    """Counts paths as leaves come in. ``could`` says which bits each leaf's value may have."""

    components: list[Component]
    could: dict[int, int]
    names: dict[int, str]
    pairs: int
    own: list[int] = field(default_factory=list)
    unreached: list[int] = field(default_factory=list)
    through: Tensor = field(default_factory=lambda: torch.empty(0))
    eligible: Tensor = field(default_factory=lambda: torch.empty(0))

    def __post_init__(self) -> None:
        n = len(self.components)
        self.own, self.unreached = [0] * n, [0] * n
        # (component, pair, count or gradient), in float64: counts are exact below 2**53
        self.through = torch.zeros(n, self.pairs, 2, dtype=torch.float64)
        self.eligible = torch.zeros_like(self.through)

    def add(self, found: Found, gradient: Tensor) -> None:
        """Count the paths of a leaf."""
        name, size = self.names[found.leaf.value], gradient.numel()
        first = isinstance(found.pair, Tensor) or found.pair == 0
        for n, component in enumerate(self.components):
            if first and name in component.owns:
                self.own[n] += size
        groups = Groups.of(found, gradient, self.pairs)
        could = self.could[found.leaf.value]
        for n, component in enumerate(self.components):
            if name in component.owns or not could & component.bits:
                continue
            self.unreached[n] += groups.total - groups.reached
            self.eligible[n].index_add_(0, groups.pair, groups.sums)
            through = groups.through(component.bits)
            self.through[n].index_add_(0, groups.pair[through], groups.sums[through])

    def result(self, rule: str, weight: Weight, notes: Iterable[str] = ()) -> Influence:
        """The table."""
        rows = []
        for n, component in enumerate(self.components):
            count, gradient = Moments(), Moments()
            for t, e in zip(self.through[n].tolist(), self.eligible[n].tolist()):
                count += Moments.of(t[0], e[0])
                gradient += Moments.of(t[1], e[1])
            rows.append(Row(component.name, self.own[n], self.unreached[n], count, gradient))
        return Influence(tuple(rows), self.pairs, weight, rule, tuple(notes))


@dataclass
class Groups:
    """The elements of a leaf that have a path, by pair and mark."""

    pair: Tensor
    words: Words
    sums: Tensor  # (groups, 2): how many elements, and the sum of |gradient|
    total: int  # elements, with a path or without

    @classmethod
    def of(cls, found: Found, gradient: Tensor, pairs: int) -> Groups:
        """Group a leaf's elements.

        A parameter is there for every pair, even if no two of them meet in an element of it (an
        embedding whose rows are each used once); an input is there once, each part for its pair.
        """
        words = tuple(word.reshape(-1) for word in found.state.words)
        size = gradient.reshape(-1).abs().double()
        total = len(size)
        keys = list(words)
        if isinstance(found.pair, Tensor):
            pair = found.pair.reshape(-1)
            shared = isinstance(found.leaf.tensor, Parameter) or bool((pair == 0).any())
            total = total * pairs if shared else total
            keys.append(pair - 1)
        there = (words[0] & 1).bool()
        if isinstance(found.pair, Tensor):
            there &= keys[-1] >= 0
        if not bool(there.all()):
            keys, size = [key[there] for key in keys], size[there]
        group, members = distinct(keys)
        sums = torch.stack(
            [
                torch.bincount(group, minlength=len(members)).double(),
                torch.bincount(group, weights=size, minlength=len(members)),
            ],
            1,
        ).cpu()
        rows = [key[members].cpu() for key in keys]
        numbers = (
            rows[-1].long()
            if isinstance(found.pair, Tensor)
            else torch.full((len(members),), found.pair)
        )
        return cls(numbers, tuple(rows[: len(words)]), sums, total)

    @property
    def reached(self) -> int:
        """How many elements have a path."""
        return int(self.sums[:, 0].sum())

    def through(self, bits: int) -> Tensor:
        """Which groups have any of these bits."""
        hit = torch.zeros(len(self.pair), dtype=torch.bool)
        for n, word in enumerate(self.words):
            part = bits >> (n * BITS) & ((1 << BITS) - 1)
            if part:
                hit |= (word & part) != 0
        return hit


def distinct(keys: list[Tensor]) -> tuple[Tensor, Tensor]:
    """For each place the number of its combination of keys, and one place for each combination."""
    n, device = len(keys[0]), keys[0].device
    group = torch.zeros(n, dtype=torch.int64, device=device)
    if not n:
        return group, group
    for key in keys:
        if bool((key == key[0]).all()):
            continue
        _, numbers = key.unique(return_inverse=True)  # type: ignore[no-untyped-call]
        both = group * (int(numbers.max()) + 1) + numbers
        _, group = both.unique(return_inverse=True)
    members = torch.full((int(group.max()) + 1,), n, device=device)
    return group, members.scatter_reduce(0, group, torch.arange(n, device=device), "amin")


def possible(program: Program, marks: Marks) -> dict[int, int]:
    """For each value the bits that some route of operators from it to the root would give."""
    found = {program.root: 1}
    for number, block in enumerate(program.blocks):
        bits = marks.block.get(number, 0)
        for each in marks.slices.get(number, (0, []))[1]:
            bits |= each
        for value in block.takes.values():
            found[value] |= bits
        for step in block.steps:
            found[step.out] = _any(found[term.value] for term in step.terms)
        for position, value in block.gives.items():
            found[value] |= marks.position.get((number, position), 0)
        for step in block.merges:
            found[step.out] = _any(found[term.value] for term in step.terms)
    return found


def _any(bits: Iterable[int]) -> int:
    total = 0
    for each in bits:
        total |= each
    return total
