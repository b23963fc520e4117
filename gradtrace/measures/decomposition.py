"""``Decomposition``: the gradient split by component, in shares, norms and angles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan, nan
from typing import Any, NamedTuple

from torch import Tensor

from gradtrace.errors import GradtraceError, listed
from gradtrace.measures.through import ThroughSource
from gradtrace.table import FORMULAS, Column, Row, Table

AGAINST = -0.2
"""Two components pull against each other if their cosine is below this."""

WHOLE_SHARE = 5e-4
"""Shares that add up to 100% up to this are parts of a whole."""

SHARE = Column("share", "share", formula="ratio", of=("dot", "size"))
CONTESTED = Column("contested", "share", formula="ratio", of=("contested dot", "contested size"))
ANGLES = (
    Column("cosine", "number", formula="cosine", of=("dot", "through", "size")),
    Column("norm", "number", formula="root", of=("through",)),
    Column("whole norm", "number", formula="root", of=("size",)),
)
COUNTS = Column("leaves", "count"), Column("own", "count")
SUMS = tuple(
    Column(name, "number", adds=True, shown=False)
    for name in ("dot", "size", "through", "contested dot", "contested size")
)


def columns(losses: int) -> tuple[Column, ...]:
    """The columns of a decomposition; of several losses with standard errors."""
    errors = [(Column(f"± {each.name}", "share"),) * (losses > 1) for each in (SHARE, CONTESTED)]
    first = Column("component"), SHARE, *errors[0], CONTESTED, *errors[1]
    return (*first, *ANGLES, *COUNTS, *SUMS)


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
        return FORMULAS["cosine"](self.dot, self.first, self.second)


@dataclass(frozen=True, repr=False)
class Decomposition(Table):
    """The gradient through each component C: the sum over all paths that pass C at least once.

    ``g = g_C + (g - g_C)``, exactly and with signs. ``share`` is ⟨g_C, g⟩ / ⟨g, g⟩ over the
    ``leaves`` outside C from which a path could pass it: how much of the gradient is explained by
    what came through C. Branches side by side, through one of which every path must go, add up
    to 1. A share can be negative (what comes through C points against the gradient) or above 1
    (others cancel a part of it). Components in series have 1 by definition, and components on the
    same path overlap: then shares do not add up to 1.

    ``contested`` is the same share over the leaves that have another way, ``cosine`` that of g_C
    and g, ``norm`` is ‖g_C‖ and ``whole norm`` ‖g‖; ``own`` elements are left out. Hidden are
    ⟨g_C, g⟩ (``dot``), ⟨g, g⟩ (``size``) and ‖g_C‖² (``through``), from which ``Table.total`` finds
    the shares of several losses, with their errors.
    """

    parts: tuple[LeafPart, ...] = ()
    products: Mapping[tuple[str, str], Products] = field(default_factory=dict)
    source: ThroughSource | None = field(default=None, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "source": None}  # a trace cannot be pickled

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
                "this decomposition was copied from another process, and has sums only; for "
                "tensors ask that of a trace: watch.trace(loss).decompose(...).gradient(...)"
            )
        return self.source

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
            return 1.0 if self[first]["through"] else nan
        found = self._product(first, second)
        return nan if found is None else found.cosine

    def _product(self, first: str, second: str) -> Products | None:
        return self.products.get((first, second)) or self.products.get((second, first))

    def cosines(self) -> Table:
        """Every two components: do they pull the same way?"""
        pairs = [(a, b) for n, a in enumerate(self.names) for b in self.names[n + 1 :]]
        found = ((*pair, self._product(*pair)) for pair in pairs)
        rows = tuple((a, b, _known(p.cosine if p else nan), _words_of(p)) for a, b, p in found)
        names = Column("component"), Column("and"), Column("cosine", "number")
        title = "Cosines of gradients through two components"
        return Table(title, (*names, Column("what it says")), rows)  # type: ignore[arg-type]

    def by_leaf(self, component: str | None = None) -> Table:
        """What came through each component, or through one, leaf by leaf.

        Args:
            component: Name of one component; all by default.

        Returns:
            A row for each leaf and component.
        """
        wanted = self.names if component is None else (self[component].name,)
        found = [part for part in self.parts if part.component in wanted and not part.own]
        sums = ({"dot": each.dot, "through": each.through, "size": each.size} for each in found)
        measured = [[_known(c.value(some)) for c in (SHARE, *ANGLES)] for some in sums]
        rows = tuple((each.leaf, each.component, *some) for each, some in zip(found, measured))
        plain = (Column(each.name, each.kind) for each in (SHARE, *ANGLES))
        names = Column("leaf"), Column("component"), *plain
        return Table("Gradient by leaf and component", names, rows, self.notes)  # type: ignore[arg-type]


def _known(x: float) -> float | None:
    return None if isnan(x) else x


def row_of(
    name: str, sums: Mapping[str, float], errors: Sequence[float], counts: tuple[int, int]
) -> tuple[Any, ...]:
    """The row of a component, from its sums; ``errors`` of both shares, if there are any."""
    share, contested, *angles = (c.value(sums) for c in (SHARE, CONTESTED, *ANGLES))
    shares = (share, *errors[:1], contested, *errors[1:])
    return (name, *shares, *angles, *counts, *(sums[column.name] for column in SUMS))


# Words --------------------------------------------------------------------------------------------


def remarks(rows: Sequence[Row], products: Mapping[tuple[str, str], Products]) -> list[str]:
    """In words: which components overlap, pull against each other, or are passed by no path."""
    found = list[str]()
    if none := [row.name for row in rows if not row.leaves]:
        found.append(f"no path from a leaf outside can pass {listed(none)}")
    if still := [row.name for row in rows if row.leaves and not row["size"]]:
        found.append(f"no share of {listed(still)}: the gradient of all leaves outside is 0")
    overlap = [f"{a} and {b}" for (a, b), each in products.items() if each.overlap]
    shares = [row.share for row in rows if not isnan(row.share)]
    if overlap and shares and abs(sum(shares) - 1) >= WHOLE_SHARE:  # grouped experts make 100%
        found.append(
            "shares need not add up to 100%: each is of the gradient of its own leaves, and a path "
            f"that passes two of these ({listed(overlap, 1)}) counts in both"
        )
    if always := [row.name for row in rows if row.share == 1 and isnan(row.contested)]:
        found.append(f"no path has another way than through {listed(always)}: 100% of course")
    if negative := [row.name for row in rows if row.share < 0]:
        found.append(f"what comes through {listed(negative)} points against the whole gradient")
    apart = ((each.cosine, *key) for key, each in products.items() if not each.overlap)
    if against := [f"{a} and {b}" for cosine, a, b in sorted(apart) if cosine < AGAINST]:
        found.append(f"these pull against each other: {listed(against)}")
    return found


def _words_of(found: Products | None) -> str:
    if found is None or not found.common:
        return "no leaf has paths through either"
    if isnan(found.cosine):
        return "nothing came through one of them"
    words = "against each other" if found.cosine < AGAINST else "neither way"
    words = "the same way" if found.cosine > -AGAINST else words
    return f"{words}; a path may pass both" if found.overlap else words
