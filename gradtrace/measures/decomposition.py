"""``Decomposition``: the gradient split by component, in shares, norms and angles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isnan, nan, sqrt
from typing import Any, NamedTuple

from torch import Tensor

from gradtrace.errors import GradtraceError, check_mergeable, listed, printable
from gradtrace.io import schemas
from gradtrace.io.table import ComponentRows, Tabular, TextColumn, TextTable, known
from gradtrace.io.validation import check_read
from gradtrace.measures.through import ThroughSource
from gradtrace.tracing.moments import NOTHING, Moments, loss_count

AGAINST = -0.2
"""Two components pull against each other if their cosine is below this."""

WHOLE_SHARE = 5e-4
"""Shares that add up to 100% up to this are parts of a whole."""

MOST_WORDS = 3
"""The most components, or pairs of them, that a remark names."""


@dataclass(frozen=True)
class ComponentPart:
    """One component C; see ``Decomposition``.

    ``leaves`` are those outside C from which a path could pass it, ``own`` is the number of C's own
    parameter elements, which are left out. ``whole`` has ⟨g_C, g⟩ and ⟨g, g⟩ over these leaves,
    ``contested`` over those of them that have another way, ``through`` is ‖g_C‖².
    """

    name: str
    own: int = 0
    leaves: tuple[str, ...] = ()
    whole: Moments = NOTHING
    contested: Moments = NOTHING
    through: float = 0.0

    @property
    def norms(self) -> tuple[float, float]:
        """``(‖g_C‖, ‖g‖)``."""
        return sqrt(self.through), sqrt(self.whole.e)

    @property
    def cosine(self) -> float:
        """The cosine of g_C and g; nan if one of them is 0."""
        return _ratio(float(self.whole.t), self.through, float(self.whole.e))

    def __add__(self, other: ComponentPart) -> ComponentPart:
        return replace(
            self,
            own=max(self.own, other.own),
            leaves=tuple(dict.fromkeys((*self.leaves, *other.leaves))),
            whole=self.whole + other.whole,
            contested=self.contested + other.contested,
            through=self.through + other.through,
        )


class LeafPart(NamedTuple):
    """What came through a component to a leaf: ⟨g_C, g⟩, ‖g_C‖² and ‖g‖².

    ``own``: the leaf belongs to the component. ``always``: every route from the leaf passes it.
    """

    leaf: str
    component: str
    own: bool
    always: bool
    dot: float
    through: float
    size: float

    def plus(self, other: LeafPart) -> LeafPart:
        """The sums of two parts of the same leaf and component."""
        always = self.always and other.always
        sums = (a + b for a, b in zip(self[4:], other[4:]))
        return LeafPart(self.leaf, self.component, self.own, always, *sums)


class Products(NamedTuple):
    """⟨g_a, g_b⟩, ‖g_a‖² and ‖g_b‖² of two components, over the leaves from which both can be
    passed (``common``: there are some). ``overlap``: some path passes both.
    """

    dot: float
    first: float
    second: float
    common: bool
    overlap: bool

    @property
    def cosine(self) -> float:
        """The cosine of the angle between them; nan if one is 0."""
        return _ratio(self.dot, self.first, self.second)

    def plus(self, other: Products) -> Products:
        """The sums of both."""
        return Products(
            self.dot + other.dot,
            self.first + other.first,
            self.second + other.second,
            self.common or other.common,
            self.overlap or other.overlap,
        )


def _ratio(dot: float, first: float, second: float) -> float:
    size = sqrt(first) * sqrt(second)
    return max(-1.0, min(1.0, dot / size)) if size else nan


@dataclass(frozen=True)
class Decomposition(ComponentRows[ComponentPart], Tabular):
    """The gradient through each component C: the sum over all paths that pass C at least once.

    ``g = g_C + (g - g_C)``, exactly and with signs. ``shares`` are ⟨g_C, g⟩ / ⟨g, g⟩ over the
    leaves outside C from which a path could pass it: how much of the gradient is explained by what
    came through C. Branches side by side, through one of which every path must go, add up to 1. A
    share can be negative (what comes through C points against the gradient) or above 1 (others
    cancel a part of it). Components in series have 1 by definition, and components on the same
    path overlap: then shares do not add up to 1.

    ``contested`` are the same shares over the leaves that have another way, and ``cosine(a, b)``
    says whether two components pull the same way. Of a vector of losses, products
    are summed over losses, and ``errors`` are standard errors over them.
    """

    rows: tuple[ComponentPart, ...]
    parts: tuple[LeafPart, ...] = field(default=(), repr=False)
    products: Mapping[tuple[str, str], Products] = field(default_factory=dict, repr=False)
    pairs: int = 1
    notes: tuple[str, ...] = ()
    source: ThroughSource | None = field(default=None, repr=False, compare=False)
    interrupted: bool = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "source": None}  # a trace cannot be pickled

    # Numbers --------------------------------------------------------------------------------------

    @property
    def shares(self) -> dict[str, float]:
        """``{component: ⟨g_C, g⟩ / ⟨g, g⟩}``; nan where no path could pass it from outside."""
        return {each.name: each.whole.share for each in self.rows}

    @property
    def contested(self) -> dict[str, float]:
        """``shares`` over the leaves that have another way; nan where there is none."""
        return {each.name: each.contested.share for each in self.rows}

    @property
    def errors(self) -> dict[str, float]:
        """``{component: standard error of its share over losses}``; nan for fewer than two."""
        return {each.name: each.whole.error(self.pairs) for each in self.rows}

    @property
    def norms(self) -> dict[str, tuple[float, float]]:
        """``{component: (‖g_C‖, ‖g‖)}``, over the same leaves as its share."""
        return {each.name: each.norms for each in self.rows}

    def cosine(self, first: str, second: str) -> float:
        """The cosine of the angle between what came through two components.

        It is taken over the leaves outside both from which either can be passed. 1: they pull the
        same way; below 0: they pull against each other; nan: there is no such leaf, or nothing
        came through one of them (``cosines()`` says which).

        Args:
            first: Name of a component.
            second: Name of another.

        Returns:
            The cosine, from -1 to 1, or nan.
        """
        if self[first].name == self[second].name:
            return nan if not self[first].through else 1.0
        found = self.products.get((first, second)) or self.products.get((second, first))
        return nan if found is None else found.cosine

    # Gradients ------------------------------------------------------------------------------------

    def gradient(self, component: str, leaf: str) -> Tensor:
        """The gradient of a leaf through a component, signed, summed over losses.

        It is computed when asked for, in one pass over the trace, so ask before the weights are
        changed. All leaves at once: ``gradients(component)``.

        Args:
            component: Name of a component.
            leaf: Name of a leaf.

        Returns:
            A tensor of the leaf's shape.
        """
        source = self._source(component)
        return source.gradients(component, leaf)[source.first_name(leaf)]

    def gradients(self, component: str) -> dict[str, Tensor]:
        """``{leaf: its gradient through a component}`` for all leaves.

        Args:
            component: Name of a component.

        Returns:
            Tensors by the name of their leaf.
        """
        return self._source(component).gradients(component)

    def around(self, component: str, leaf: str) -> Tensor:
        """The gradient of a leaf by paths that do not pass a component: ``g - g_C``.

        Args:
            component: Name of a component.
            leaf: Name of a leaf.

        Returns:
            A tensor of the leaf's shape.
        """
        return self._source(component).whole(leaf) - self.gradient(component, leaf)

    def _source(self, component: str) -> ThroughSource:
        _ = self[component]
        if self.source is None:
            raise GradtraceError(
                "this decomposition was merged or loaded, and has sums only; for tensors ask the "
                "decomposition of one trace: watch.trace(loss).decompose(...).gradient(...)"
            )
        return self.source

    # Tables ---------------------------------------------------------------------------------------

    def merge(self, *others: Decomposition) -> Decomposition:
        """The decomposition over the losses of all of them; gradients can no longer be asked for.

        Args:
            others: Decompositions over other losses.

        Returns:
            One decomposition.
        """
        result = self
        for other in others:
            check_mergeable(self, other)
            result = _merged(result, other)
        return replace(result, source=None)

    def table(self) -> TextTable:
        """One row per component, and remarks in words."""
        many = self.pairs > 1
        columns = (
            TextColumn("component"),
            TextColumn("share", "share"),
            *([TextColumn("± error", "share")] if many else []),
            TextColumn("contested", "share"),
            TextColumn("cosine", "number"),
            TextColumn("norm", "number"),
            TextColumn("whole norm", "number"),
            TextColumn("leaves", "count"),
            TextColumn("own", "count"),
        )
        rows = tuple(
            (
                each.name,
                known(each.whole.share),
                *([known(each.whole.error(self.pairs))] if many else []),
                known(each.contested.share),
                known(each.cosine),
                *(each.norms if each.leaves else (None, None)),
                len(each.leaves),
                each.own,
            )
            for each in self.rows
        )
        title = f"Gradient by component{f' ({self.pairs:,} losses)' if many else ''}"
        return TextTable(title, columns, rows, (*self.remarks(), *self.notes))

    def by_leaf(self, component: str | None = None) -> TextTable:
        """What came through each component, or through one, leaf by leaf.

        Args:
            component: Name of one component; all by default.

        Returns:
            A row for each component and leaf.
        """
        found = self._parts_of(component)
        rows = tuple((part.leaf, part.component, *_measures(part)) for part in found)
        return self._part_table("leaf", rows)

    def by_module(self, component: str | None = None) -> TextTable:
        """``by_leaf``, summed over the leaves of each module.

        Args:
            component: Name of one component; all by default.

        Returns:
            A row for each component and module.
        """
        sums: dict[tuple[str, str], LeafPart] = {}
        for part in self._parts_of(component):
            module = part.leaf.rpartition(".")[0]
            part = part._replace(leaf=module)
            key = (module, part.component)
            sums[key] = sums[key].plus(part) if key in sums else part
        rows = tuple((part.leaf, part.component, *_measures(part)) for part in sums.values())
        return self._part_table("module", rows)

    def _parts_of(self, component: str | None) -> list[LeafPart]:
        names = {each.name for each in self.rows}
        names = names if component is None else {self[component].name}
        return [part for part in self.parts if part.component in names and not part.own]

    def _part_table(self, first: str, rows: tuple[tuple[object, ...], ...]) -> TextTable:
        columns = (
            TextColumn(first),
            TextColumn("component"),
            TextColumn("share", "share"),
            TextColumn("cosine", "number"),
            TextColumn("norm", "number"),
            TextColumn("whole norm", "number"),
        )
        return TextTable(f"Gradient by {first} and component", columns, rows, self.notes)

    def cosines(self) -> TextTable:
        """Every two components: do they pull the same way?"""
        names = [each.name for each in self.rows]
        columns = (
            TextColumn("component"),
            TextColumn("and"),
            TextColumn("cosine", "number"),
            TextColumn("what it says"),
        )
        rows = []
        for n, first in enumerate(names):
            for second in names[n + 1 :]:
                found = self.products.get((first, second)) or self.products.get((second, first))
                cosine = nan if found is None else found.cosine
                rows.append((first, second, known(cosine), _words_of(found)))
        return TextTable("Cosines of gradients through two components", columns, tuple(rows))

    def remarks(self) -> list[str]:
        """In words: which components overlap, pull against each other, or are passed by no path."""
        here = {each.name for each in self.rows}
        pairs = {key: p for key, p in self.products.items() if set(key) <= here}
        found = []
        none = [each.name for each in self.rows if not each.leaves]
        if none:
            found.append(f"no path from a leaf outside can pass {listed(none)}")
        overlap = [f"{a} and {b}" for (a, b), p in pairs.items() if p.overlap]
        shared = [each for each in self.rows if not isnan(each.whole.share)]
        still = [each.name for each in self.rows if each.leaves and not each.whole.e]
        if still:
            found.append(f"no share of {listed(still)}: the gradient of all leaves outside is 0")
        total = sum(each.whole.share for each in shared)
        if overlap and shared and not abs(total - 1) < WHOLE_SHARE:  # grouped experts make 100%
            differ = len({each.leaves for each in shared}) > 1
            own = "each is of the gradient of its own leaves, and " if differ else ""
            found.append(
                f"shares add up to {total:.1%}, and need not make 100%: {own}a path that passes "
                f"two of these ({listed(overlap, 1)}) counts in both, one that passes none in none"
            )
        always = [e.name for e in self.rows if e.whole.share == 1 and isnan(e.contested.share)]
        if always:
            found.append(f"no path has another way than through {listed(always)}: 100% of course")
        negative = [each.name for each in self.rows if each.whole.share < 0]
        if negative:
            found.append(f"what comes through {listed(negative)} points against the whole gradient")
        apart = {key: p.cosine for key, p in pairs.items() if not p.overlap}
        against = sorted((c, *key) for key, c in apart.items() if c < AGAINST)
        if against:
            words = [f"{a} and {b} (cosine {cosine:.2f})" for cosine, a, b in against]
            found.append(f"these pull against each other: {listed(words)}")
        return found

    # Storage --------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """All sums as JSON values; fractions as [numerator, denominator]."""
        return {
            "rows": [
                {
                    "name": row.name,
                    "own": row.own,
                    "leaves": list(row.leaves),
                    "whole": row.whole.to_json(),
                    "contested": row.contested.to_json(),
                    "through": row.through,
                }
                for row in self.rows
            ],
            "parts": [list(part) for part in self.parts],
            "products": [[*names, *found] for names, found in self.products.items()],
            "pairs": self.pairs,
            "notes": list(self.notes),
            "interrupted": self.interrupted,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Decomposition:
        """The inverse of ``to_dict``."""
        check_read(schemas.DECOMPOSITION, data, "decomposition")
        rows = tuple(
            ComponentPart(
                str(row["name"]),
                int(row["own"]),
                tuple(row["leaves"]),
                Moments.from_json(row["whole"]),
                Moments.from_json(row["contested"]),
                float(row["through"]),
            )
            for row in data["rows"]
        )
        return cls(
            rows,
            tuple(LeafPart(*part) for part in data["parts"]),
            {(first, second): Products(*rest) for first, second, *rest in data["products"]},
            int(data["pairs"]),
            tuple(data["notes"]),
            None,
            bool(data["interrupted"]),
        )

    def __repr__(self) -> str:
        return printable(f"Decomposition({len(self)} components, {loss_count(self.pairs)})")


def _merged(first: Decomposition, second: Decomposition) -> Decomposition:
    mine = {each.name: each for each in first.rows}
    for each in second.rows:
        mine[each.name] = mine[each.name] + each if each.name in mine else each
    parts = {part[:2]: part for part in first.parts}
    for part in second.parts:
        key = part[:2]
        parts[key] = parts[key].plus(part) if key in parts else part
    products = dict(first.products)
    for (a, b), found in second.products.items():
        if (b, a) in products:
            found = found._replace(first=found.second, second=found.first)
            a, b = b, a
        products[a, b] = products[a, b].plus(found) if (a, b) in products else found
    return Decomposition(
        tuple(mine.values()),
        tuple(parts.values()),
        products,
        first.pairs + second.pairs,
        tuple(dict.fromkeys((*first.notes, *second.notes))),
        None,
        first.interrupted or second.interrupted,
    )


def _measures(part: LeafPart) -> tuple[object, ...]:
    share = part.dot / part.size if part.size else nan
    cosine = _ratio(part.dot, part.through, part.size)
    return known(share), known(cosine), sqrt(part.through), sqrt(part.size)


def _words_of(found: Products | None) -> str:
    if found is None or not found.common:
        return "no leaf has paths through either"
    if isnan(found.cosine):
        return "nothing came through one of them"
    words = "against each other" if found.cosine < AGAINST else "neither way"
    words = "the same way" if found.cosine > -AGAINST else words
    return f"{words}; a path may pass both" if found.overlap else words
