"""Influence: through which components the paths of the parameters run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import nan, sqrt
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import Parameter

from gradtrace.components import Component
from gradtrace.errors import GradtraceError, UnknownName
from gradtrace.kernels import steps as fused
from gradtrace.maps.places import laid
from gradtrace.marks import Marks
from gradtrace.program import Program
from gradtrace.states import State, cancelled, solid
from gradtrace.tables import Column, Table
from gradtrace.tracing import Found

Bools: TypeAlias = npt.NDArray[np.bool_]
Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.intp]
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
        e = Fraction(eligible)
        ee = e * e
        if through == eligible:
            return cls(e, e, ee, ee, ee)
        t = Fraction(through)
        return cls(t, e, t * t, t * e, ee) if t else cls(t, e, t, t, ee)

    @classmethod
    def over(cls, through: Sequence[float], eligible: Sequence[float]) -> Moments:
        """Those of many pairs: in whole numbers, times a power of two that suits all of them."""
        if len(through) == 1:
            return cls.of(through[0], eligible[0])
        ratios = [x.as_integer_ratio() for x in (*through, *eligible)]
        power = max((below.bit_length() for _, below in ratios), default=1) - 1
        whole = [above << (power + 1 - below.bit_length()) for above, below in ratios]
        t, e = whole[: len(through)], whole[len(through) :]
        one, two = 1 << power, 1 << 2 * power
        return cls(
            Fraction(sum(t), one),
            Fraction(sum(e), one),
            Fraction(sum(x * x for x in t), two),
            Fraction(sum(x * y for x, y in zip(t, e)), two),
            Fraction(sum(y * y for y in e), two),
        )

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


class Groups(NamedTuple):
    """The elements of a leaf that have a path, by pair and mark: how many, and Σ |gradient|."""

    pairs: list[int]
    marks: list[int]
    sums: Floats  # (groups, 2), in float64: counts are exact below 2**53


@dataclass
class Counted:
    """A leaf's elements: those that have a path in groups, and how many there are in all."""

    name: str
    could: int
    size: int
    total: int
    groups: Groups


@dataclass
class Tally:
    """Counts paths as leaves come in. ``could`` says which bits each leaf's value may have."""

    components: list[Component]
    could: dict[int, int]
    names: dict[int, str]
    pairs: int
    leaves: list[Counted] = field(default_factory=list)
    sized: set[str] = field(default_factory=set)

    def add(self, found: Found, gradient: Tensor) -> None:
        """Count the paths of a leaf."""
        value, total = found.leaf.value, gradient.numel()
        if isinstance(found.pair, Tensor):
            # A parameter is there for every pair, even if no two of them meet in an element of it
            # (an embedding whose rows are each used once); an input is there once, each part for
            # its pair.
            shared = isinstance(found.leaf.tensor, Parameter) or bool((found.pair == 0).any())
            total = total * self.pairs if shared else total
        self._count(value, gradient.numel(), total, groups_of(found, gradient, self.pairs))

    def add_some(
        self, value: int, pair: int, marks: list[int], number: Tensor, gradient: Tensor, size: int
    ) -> None:
        """Count the paths of some elements of a leaf, which has ``size`` of them: each element's
        number among the marks, and its gradient.
        """
        counts, sizes = fused.tally(number.int(), gradient, len(marks))
        there = [n for n in counts.nonzero().reshape(-1).tolist() if marks[n] & 1]
        sums = np.stack([counts.double().numpy(), sizes.numpy()], 1)[there]
        groups = Groups([pair] * len(there), [marks[n] for n in there], sums)
        self._count(value, size, len(number), groups)

    def _count(self, value: int, size: int, total: int, groups: Groups) -> None:
        name = self.names[value]
        own = 0 if name in self.sized else size
        self.sized.add(name)
        self.leaves.append(Counted(name, self.could[value], own, total, groups))

    def result(self, rule: str, weight: Weight, notes: Iterable[str] = ()) -> Influence:
        """The table."""
        owns = self._owned()
        bits = [component.bits for component in self.components]
        could = hits([leaf.could for leaf in self.leaves], bits) & ~owns
        sizes = np.array([leaf.size for leaf in self.leaves], dtype=float)  # exact below 2**53
        reached = [leaf.groups.sums[:, 0].sum() for leaf in self.leaves]
        totals = np.array([leaf.total for leaf in self.leaves], dtype=float)
        missing = totals - np.array(reached, dtype=float)
        own, unreached = sizes @ owns.astype(float), missing @ could.astype(float)
        eligible, through = self._sums(could, bits)
        if not all(np.isfinite(leaf.groups.sums).all() for leaf in self.leaves):
            notes = (*notes, NONFINITE)
        rows = []
        for n, component in enumerate(self.components):
            count, gradient = (
                Moments.over(through[:, n, k].tolist(), eligible[:, n, k].tolist()) for k in (0, 1)
            )
            rows.append(Row(component.name, int(own[n]), int(unreached[n]), count, gradient))
        return Influence(tuple(rows), self.pairs, weight, rule, tuple(notes))

    def _owned(self) -> Bools:
        """Which leaf belongs to which component."""
        places: dict[str, list[int]] = {}
        for place, leaf in enumerate(self.leaves):
            places.setdefault(leaf.name, []).append(place)
        owns = np.zeros((len(self.leaves), len(self.components)), dtype=bool)
        for n, component in enumerate(self.components):
            for name in component.owns:
                owns[places.get(name, []), n] = True
        return owns

    def _sums(self, could: Bools, bits: list[int]) -> tuple[Floats, Floats]:
        """By pair and component, how many elements could pass and how many do, and the same by
        |gradient|, in the order of the leaves.
        """
        shape = (self.pairs, len(self.components), 2)
        eligible, through = np.zeros(shape), np.zeros(shape)
        groups = [leaf.groups for leaf in self.leaves]
        pairs = np.array([pair for some in groups for pair in some.pairs], dtype=np.intp)
        marks = [mark for some in groups for mark in some.marks]
        known = {mark: n for n, mark in enumerate(dict.fromkeys(marks))}
        kinds = np.array([known[mark] for mark in marks], dtype=np.intp)
        passes = hits(list(known), bits)
        whose = np.repeat(np.arange(len(groups)), [len(some.pairs) for some in groups])
        sums = np.concatenate([NOBODY.sums, *(some.sums for some in groups)])
        sums = np.where(np.isfinite(sums), sums, 0.0)
        order = np.argsort(pairs, kind="stable")
        most = max(1, ENTRIES // max(1, len(bits)))
        for pair, mine in _runs(order, pairs):
            for n in range(0, len(mine), most):
                some = mine[n : n + most]
                can = could[whose[some]]
                eligible[pair] += can.T.astype(float) @ sums[some]
                through[pair] += (can & passes[kinds[some]]).T.astype(float) @ sums[some]
        return eligible, through


ENTRIES = 1 << 22
"""How many pairs of a group and a component to look at in one go."""


def _runs(order: Ints, pairs: Ints) -> Iterator[tuple[int, Ints]]:
    """Each pair with its groups."""
    cuts = np.flatnonzero(np.diff(pairs[order])) + 1
    for mine in np.split(order, cuts):
        if len(mine):
            yield int(pairs[mine[0]]), mine


def groups_of(found: Found, gradient: Tensor, pairs: int) -> Groups:
    """The elements of a leaf that have a path, by pair and mark."""
    state, pair = found.state, found.pair
    if state.few is not None and isinstance(pair, int):
        return _of_few(state, gradient, pair)
    if state.numbers is None and isinstance(pair, int) and state.value is gradient:
        count, size = fused.magnitude(gradient)
        if count < gradient.numel() and state.parts:
            missed = cancelled(state.parts, gradient)
            count += 0 if missed is None else int(missed.sum())
        sums = np.array([[float(count), size]])
        return Groups([pair], state.palette.marks()[1:], sums) if count else NOBODY
    state = solid(state).written()
    assert state.numbers is not None
    marks = state.palette.marks()[1:]
    numbers, many = state.numbers, len(marks)
    if isinstance(pair, Tensor):
        there = (pair > 0) & (numbers > 0)
        numbers = torch.where(there, (pair.int() - 1) * many + numbers, 0)
    parts = pairs if isinstance(pair, Tensor) else 1
    counts, sizes = fused.tally(numbers, gradient, parts * many + 1)
    sums = np.stack([counts.double().cpu().numpy(), sizes.cpu().numpy()], 1)[1:]
    used = np.flatnonzero(sums[:, 0]).tolist()
    whose = [n // many if isinstance(pair, Tensor) else pair for n in used]
    return Groups(whose, [marks[n % many] for n in used], sums[used])


def _of_few(state: State, gradient: Tensor, pair: int) -> Groups:
    """A leaf of which few elements have marks of their own: these are counted by themselves, and
    the others, unless they have nothing, as a plain leaf is.
    """
    few, marks = state.few, state.palette.marks()[1:]
    assert few is not None
    counts, sizes = fused.tally(few.marks, few.value, len(marks) + 1)
    sums = np.stack([counts.double().cpu().numpy(), sizes.cpu().numpy()], 1)[1:]
    if not state.parts:
        line, at = laid(gradient, few.at)
        line[at] = 0  # for a moment
        sums[0] += fused.magnitude(gradient)
        line[at] = few.value
    used = np.flatnonzero(sums[:, 0]).tolist()
    return Groups([pair] * len(used), [marks[n] for n in used], sums[used])


NOBODY = Groups([], [], np.zeros((0, 2)))
NONFINITE = "some gradients are NaN or infinite; their paths count, but have no weight"


def hits(marks: list[int], bits: list[int]) -> Bools:
    """Which marks have any of some bits, as a matrix of marks by sets of bits."""
    width = -(-max((b.bit_length() for b in (*marks, *bits)), default=1) // 8) or 1
    table = np.frombuffer(b"".join(m.to_bytes(width, "little") for m in marks), np.uint8)
    atoms = np.unpackbits(table.reshape(len(marks), width), axis=1, bitorder="little")
    atoms = np.ascontiguousarray(atoms.T)  # a row for each bit
    found = np.zeros((len(marks), len(bits)), dtype=bool)
    for n, some in enumerate(bits):
        places = list(_places(some))
        if places:
            found[:, n] = np.bitwise_or.reduce(atoms[places], axis=0)
    return found


def _places(bits: int) -> Iterator[int]:
    """The numbers of the bits that are set."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


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
