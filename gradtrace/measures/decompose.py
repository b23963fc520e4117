"""Measures a decomposition: inner products of what came through each component, leaf by leaf.

Of every leaf the sweep hands over its gradient and what of it came through each component. Only
their inner products are kept, so memory is that of a backward pass, times the components that are
mixed at a value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import nan, sqrt
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradtrace.components.components import Components, ComponentSelection, impossible
from gradtrace.ir import memory
from gradtrace.measures.decomposition import (
    Decomposition,
    LeafPart,
    Products,
    columns,
    remarks,
    row_of,
)
from gradtrace.measures.leaf_products import gram, gram_by_pair, leaf_gram
from gradtrace.measures.through import (
    REMEDY,
    WHAT,
    ComponentRoutes,
    ThroughSource,
    ThroughSweep,
    components_in,
    held_bytes,
)
from gradtrace.table import Row
from gradtrace.tracing.pair_executor import batched_maps, batches_of, only_pairs
from gradtrace.tracing.per_sample import Pairs
from gradtrace.tracing.traced_program import TracedProgram

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


def decomposed(
    traced: TracedProgram, chosen: ComponentSelection, by: Components = None
) -> Decomposition:
    """The decomposition of a trace's gradient by the chosen components, asked for as ``by``."""
    routes = ComponentRoutes.of(traced.program, chosen.components, chosen.component_bits)
    totals = Totals.of(traced, chosen, routes)
    with torch.no_grad(), memory.within(traced.backend, WHAT, REMEDY):
        for wanted in _sweeps(traced, routes):
            totals.add(components_in(wanted), list(_products(traced, routes, wanted)))
    return totals.result(ThroughSource(traced, routes, totals.names), by)


def possible(found: Decomposition) -> Decomposition:
    """The decomposition; an error if no path can pass any of its components."""
    if not found.parts:
        raise impossible(list(found.names))
    return found


def _sweeps(traced: TracedProgram, routes: ComponentRoutes) -> Iterator[int]:
    """The components (bits) of each sweep: all, or as many as fit into memory. Then every two of
    them meet in some sweep, since their inner product is wanted.
    """
    free = memory.available(traced.backend) if traced.budget is None else traced.budget
    free = None if free is None else free // memory.MIN_FREE_RATIO
    groups = 1
    while free is not None and groups < routes.count:
        parts = _groups(routes.count, groups)
        if all(held_bytes(routes, wanted) <= free for wanted in parts):
            break
        groups += 1 if groups > 1 else 2  # two groups that meet are all
    yield from _groups(routes.count, groups)


def _groups(count: int, groups: int) -> list[int]:
    """All components, or every two of so many groups of them."""
    some = [sum(1 << n + 1 for n in range(g, count, groups)) for g in range(groups)]
    return some if groups == 1 else [a | b for a, b in combinations(some, 2)]


# Inner products ----------------------------------------------------------------------------------


class LeafProducts(NamedTuple):
    """Inner products of a leaf's gradient (row 0) and of its parts through ``components`` (the rows
    from 1 on), for some pairs: (pairs, rows, rows) in float64.
    """

    value: int
    components: tuple[int, ...]
    pairs: range
    products: Tensor


def _products(
    traced: TracedProgram, routes: ComponentRoutes, wanted: int
) -> Iterator[LeafProducts]:
    """The inner products of every leaf."""
    program, known = traced.program, traced.program.constants.known_gradients()
    if traced.pairs == 1:
        sweep = ThroughSweep(routes, wanted, known, defers=True)
        sweep.values[program.root] = program.seed
        for value in sweep.run():
            components, products = _leaf_products(sweep, value)
            yield LeafProducts(value, components, range(1), products)
        return
    yield from _pair_products(traced, routes, wanted)


def _leaf_products(sweep: ThroughSweep, value: int) -> tuple[tuple[int, ...], Tensor]:
    tail = sweep.tails.get(value)
    if tail is None:
        rows, components = _rows(sweep, value)
        return components, gram([row.unsqueeze(0) for row in rows])
    components = sweep.components_of(value)
    return components, leaf_gram(tail, components, lambda: sweep.gradient(value))


def _rows(sweep: ThroughSweep, value: int) -> tuple[list[Tensor], tuple[int, ...]]:
    """A leaf's gradient and its parts, and the components of these."""
    parts = sweep.parts.get(value, {})
    return [sweep.values[value], *parts.values()], tuple(parts)


def _pair_products(
    traced: TracedProgram, routes: ComponentRoutes, wanted: int
) -> Iterator[LeafProducts]:
    """``_products`` for each loss of a vector: values that mix pairs are computed for each."""
    program, pairs = traced.program, Pairs.follow(traced.program, traced.pairs)
    known = {v: x for v, x in program.constants.known_gradients().items() if v in pairs.apart}
    whole = ThroughSweep(routes, wanted, known, frozenset(pairs.apart), frozenset(pairs.of))
    whole.values[program.root] = program.seed
    for value in whole.run():
        rows, components = _rows(whole, value)
        products = gram_by_pair(rows, pairs.of[value], traced.pairs)
        yield LeafProducts(value, components, range(traced.pairs), products)
    mixed, along = pairs.mixed(program), pairs.summed(program, pairs.mixed(program))
    batches = batches_of(program, mixed, traced.pairs, False)
    for some, maps in batched_maps(program, pairs, along, batches):
        sweep = ThroughSweep(routes, wanted, {}, mixed, maps=maps)
        for value in along:
            rows, components = _rows(whole, value)
            at = maps.places.get(value)
            sweep.values[value], *parts = only_pairs(rows, pairs, value, some, at)
            sweep.parts[value] = dict(zip(components, parts))
        for value in sweep.run():
            rows, components = _rows(sweep, value)
            yield LeafProducts(value, components, some, gram(rows))


# Sums over leaves --------------------------------------------------------------------------------


@dataclass
class Totals:
    """Inner products summed over leaves, for each component and each two of them.

    ``eligible`` and ``contested`` are (leaves, components): whether a path from the leaf, which is
    none of the component's own, could pass it; and whether another could pass it by. ``dot``,
    ``size``: ⟨g_C, g⟩ and ⟨g, g⟩ over these leaves, by (kind of leaves, pair, component).
    """

    traced: TracedProgram
    chosen: ComponentSelection
    routes: ComponentRoutes
    values: list[int]  # of leaves
    may: Flags
    must: Flags
    owned: Flags
    dot: Floats
    size: Floats
    leaf_dot: Floats  # (leaves, components), summed over pairs
    leaf_through: Floats
    leaf_size: Floats  # (leaves, components)
    cross: Floats  # (3, components, components): ⟨g_a, g_b⟩, ⟨g_a, g_a⟩, ⟨g_b, g_b⟩
    done: Flags  # (components, components)
    skipped: dict[str, None] = field(default_factory=dict)

    @classmethod
    def of(
        cls, traced: TracedProgram, chosen: ComponentSelection, routes: ComponentRoutes
    ) -> Totals:
        """Zeros for all leaves and components."""
        values = [leaf.value for leaf in traced.program.leaves]
        count, pairs, leaves = routes.count, traced.pairs, len(values)
        must, may = (
            np.array([[bits[v] >> n + 1 & 1 for n in range(count)] for v in values], bool)
            for bits in routes.bounds
        )
        owned = np.array(
            [[traced.names[v] in c.owns for c in chosen.components] for v in values], bool
        )
        shape = (leaves, count)
        return cls(
            traced,
            chosen,
            routes,
            values,
            may.reshape(shape),
            must.reshape(shape),
            owned.reshape(shape),
            dot=np.zeros((2, pairs, count)),
            size=np.zeros((2, pairs, count)),
            leaf_dot=np.zeros(shape),
            leaf_through=np.zeros(shape),
            leaf_size=np.zeros(shape),
            cross=np.zeros((3, count, count)),
            done=np.zeros((count, count), bool),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the components."""
        return tuple(component.name for component in self.chosen.components)

    def add(self, components: Sequence[int], found: Sequence[LeafProducts]) -> None:
        """Add the inner products of one sweep over these components."""
        columns = np.array(components, np.int64)
        fresh = ~self.done[np.ix_(columns, columns)]
        place = {value: n for n, value in enumerate(self.values)}
        flat = [each.products.reshape(-1) for each in found]
        numbers = torch.cat(flat).cpu().numpy() if flat else np.zeros(0)  # one sync
        ends = np.cumsum([len(each) for each in flat])
        whole: dict[int, float] = {}  # ⟨g, g⟩ of leaves whose parts are all of it or nothing
        for each, some in zip(found, np.split(numbers, ends[:-1])):
            leaf, products = place[each.value], some.reshape(each.products.shape)
            self._add(leaf, each, products, columns, fresh)
            if not each.components and np.isfinite(products).all():
                whole[leaf] = whole.get(leaf, 0.0) + float(products[:, 0, 0].sum())
        self._cross_whole(whole, columns, fresh)
        self.done[np.ix_(columns, columns)] = True

    def _add(
        self, leaf: int, each: LeafProducts, products: Floats, columns: npt.NDArray[np.int64],
        fresh: Flags,
    ) -> None:  # fmt: skip
        if not np.isfinite(products).all():
            self.skipped[self.traced.names[each.value]] = None
            return
        rows = {component: n + 1 for n, component in enumerate(each.components)}
        at = np.array(
            [0 if self.must[leaf, c] else rows.get(int(c), -1) for c in columns], np.int64
        )
        padded = np.pad(products, ((0, 0), (0, 1), (0, 1)))  # the last row is 0
        new = columns[fresh.diagonal()]
        mine = at[fresh.diagonal()]
        dot, size = padded[:, 0, mine], padded[:, :1, 0]
        could = self.may[leaf, new] & ~self.owned[leaf, new]
        for kind, flags in enumerate((could, could & ~self.must[leaf, new])):
            here = np.ix_(range(each.pairs.start, each.pairs.stop), new[flags])
            self.dot[kind][here] += dot[:, flags]
            self.size[kind][here] += size
        both = padded.sum(0)
        self.leaf_dot[leaf, new] += both[0, mine]
        self.leaf_through[leaf, new] += both[mine, mine]
        self.leaf_size[leaf, new] += both[0, 0]
        if not each.components:
            return  # see ``_cross_whole``
        could = self.may[leaf, columns] & ~self.owned[leaf, columns]
        meet = np.outer(could, could) & fresh
        here = np.ix_(columns, columns)
        inner, own = both[np.ix_(at, at)], both[at, at]
        for kind, each_ in enumerate((inner, own[:, None], own[None, :])):
            self.cross[kind][here] += np.where(meet, each_, 0)

    def _cross_whole(
        self, sizes: Mapping[int, float], columns: npt.NDArray[np.int64], fresh: Flags
    ) -> None:
        """Add to ``cross`` what ``_add`` leaves out, for all leaves at once: one by one they would
        take as long as all pairs of components for each.
        """
        here = np.ix_(np.fromiter(sizes, np.int64), columns)
        could = self.may[here] & ~self.owned[here]
        passed = (could & self.must[here]).astype(float)
        weighted = passed * np.array([*sizes.values()])[:, None]
        first = weighted.T @ could
        for kind, products in enumerate((weighted.T @ passed, first, first.T)):
            self.cross[kind][np.ix_(columns, columns)] += np.where(fresh, products, 0)

    # The result -----------------------------------------------------------------------------------

    def result(self, source: ThroughSource, by: Components) -> Decomposition:
        """The decomposition, of components that were asked for as ``by``."""
        losses, crossing = self.traced.pairs, self._crossing()
        shown, rows = columns(losses), tuple(self._rows())
        places = {column.name: n for n, column in enumerate(shown)}
        notes = [*remarks([Row(places, row) for row in rows], crossing), *self.traced.notes]
        if self.skipped:
            notes.append(
                "leaves whose gradient is NaN, infinite or too large to be squared are left out: "
                f"{', '.join(self.skipped)}"
            )
        about = {"losses": losses, "by": by}
        fixed = "Gradient by component", shown, rows, tuple(notes), about
        return Decomposition(*fixed, self._leaves(), crossing, source)  # type: ignore[arg-type]

    def _rows(self) -> Iterator[tuple[Any, ...]]:
        could, many = self.may & ~self.owned, self.traced.pairs > 1
        sizes = np.array([leaf.tensor.numel() for leaf in self.traced.program.leaves])
        for n, name in enumerate(self.names):
            through = float(self.leaf_through[could[:, n], n].sum())
            dots, whole = self.dot[:, :, n], self.size[:, :, n]
            (dot, size), (other, contested) = zip(dots.sum(1).tolist(), whole.sum(1).tolist())
            sums = {"dot": dot, "size": size, "through": through}
            sums |= {"contested dot": other, "contested size": contested}
            errors = [standard_error(*both) for both in zip(dots, whole)] if many else []
            counts = int(could[:, n].sum()), int(sizes[self.owned[:, n]].sum())
            yield row_of(name, sums, errors, counts)

    def _leaves(self) -> tuple[LeafPart, ...]:
        found, names = [], self.names
        for k, n in np.argwhere(self.may).tolist():
            leaf, name = self.traced.names[self.values[k]], names[n]
            sums = self.leaf_dot[k, n], self.leaf_through[k, n], self.leaf_size[k, n]
            own, must = bool(self.owned[k, n]), bool(self.must[k, n])
            found.append(LeafPart(leaf, name, own, must, *map(float, sums)))
        return tuple(found)

    def _crossing(self) -> dict[tuple[str, str], Products]:
        overlaps = self.routes.overlaps()
        could = self.may & ~self.owned
        common = could.T.astype(float) @ could.astype(float) > 0
        found, names = {}, self.names
        for a, b in combinations(range(len(names)), 2):
            overlap = bool(overlaps[a] >> b + 1 & 1)
            if common[a, b] or overlap:
                dot, first, second = self.cross[:, a, b].tolist()
                both = Products(dot, first, second, bool(common[a, b]), overlap)
                found[names[a], names[b]] = both
        return found


def standard_error(above: Floats, below: Floats) -> float:
    """The standard error of ``Σ above / Σ below`` over losses, as of a ratio estimator."""
    whole, many = float(below.sum()), len(above)
    if not whole:
        return nan
    residual = float(((above - above.sum() / whole * below) ** 2).sum())
    return sqrt(residual * many / (many - 1)) / abs(whole)
