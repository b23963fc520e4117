"""``Conflicts``: the gradients of loss terms, tasks or samples, compared module by module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import isfinite, nan, sqrt
from typing import Any

import torch
from torch import Tensor

from gradtrace.autodiff.names import enclosing, unused
from gradtrace.errors import GradtraceError, UnknownName, did_you_mean, listed, printable
from gradtrace.io.table import RowSequence, Tabular, TextColumn, TextTable
from gradtrace.pytorch.function_modes import paused
from gradtrace.types import unravel

WHOLE = "(all)"
"""The name of the row over all parameters."""

AGAINST = -0.2
"""Two terms pull against each other where their cosine is below this."""

DROWNED = 10.0
"""A term is drowned by another whose gradient is this many times as long."""

MOST_COLUMNS = 4
"""Up to this many terms have a column each, and every pair of them; of more a summary is shown."""

MOST_WORDS = 3
"""The most modules that a remark names."""

BLOCK_ELEMENTS = 1 << 22
"""Products are computed in float64 for this many numbers at a time."""


@dataclass(frozen=True)
class ConflictRow:
    """A parameter or a module with all its submodules: ``products[a, b]`` is ⟨g_a, g_b⟩ of the
    gradients of terms a and b; the last row and column are those of their sum.
    """

    name: str
    elements: int
    products: Tensor = field(compare=False, repr=False)  # (terms + 1, terms + 1), float64
    aliases: tuple[str, ...] = ()

    def norm(self, term: int) -> float:
        """‖g_a‖, 0 if the term does not reach it; of the sum for -1.

        Args:
            term: Number of the term; -1 is the sum of all.

        Returns:
            The norm.
        """
        return sqrt(self._product(term, term))

    def cosine(self, first: int, second: int) -> float:
        """The cosine of the angle between two gradients; nan if one of them is 0.

        Args:
            first: Number of a term; -1 is the sum of all.
            second: Number of another.

        Returns:
            The cosine, or nan.
        """
        size = self.norm(first) * self.norm(second)
        cosine = self._product(first, second) / size if size else nan
        return max(-1.0, min(1.0, cosine)) if isfinite(cosine) else nan

    def share(self, term: int) -> float:
        """⟨g_a, g⟩ / ⟨g, g⟩: the part of the sum g that the term gives; nan if the sum is 0.

        Args:
            term: Number of the term.

        Returns:
            The share, or nan.
        """
        whole = self._product(-1, -1)
        return self._product(term, -1) / whole if whole else nan

    @property
    @paused()
    def winner(self) -> int | None:
        """The term of the largest share; None if the sum is 0."""
        whole = self._product(-1, -1)
        return int(self.products[:-1, -1].argmax()) if whole and isfinite(whole) else None

    @paused()
    def _product(self, first: int, second: int) -> float:
        return float(self.products[first, second])


@dataclass(frozen=True)
class Conflicts(RowSequence[ConflictRow], Tabular):
    """How the gradients of several terms agree: for each module (with its submodules) the norm of
    each term's gradient, the cosine of each pair, and who wins.

    ``norm(a)`` is ‖g_a‖, ``cosine(a, b)`` is ⟨g_a, g_b⟩ / (‖g_a‖ ‖g_b‖): below 0 a step along one
    undoes a step along the other. ``shares`` are ⟨g_a, g⟩ / ⟨g, g⟩ with ``g = Σ g_a``: the part of
    the sum that a term gives, along its direction; they add up to 1, and are negative for a term
    that the others outvote. The winner has the largest. Terms count as they were given, so give
    them with their weights: ``{"ce": ce, "kl": 0.1 * kl}``.

    A term that does not reach a module has norm 0 there, and its cosines are nan. All products are
    of float64. ``rows`` are modules; ``by_parameter()`` has parameters instead.
    """

    terms: tuple[str, ...]
    rows: tuple[ConflictRow, ...]
    parameters: tuple[ConflictRow, ...] = field(repr=False)
    kind: str = "module"

    def __getitem__(self, module: str) -> ConflictRow:
        """The row of a module or parameter."""
        return self._row(module)

    # Numbers --------------------------------------------------------------------------------------

    def norm(self, term: str | int, module: str | None = None) -> float:
        """‖g_a‖ over a module, or a parameter; over all parameters by default.

        Args:
            term: Name of the term, or index of the sample.
            module: Name of a module or parameter; all parameters by default.

        Returns:
            The norm; 0 if the term does not reach the module.
        """
        return self._row(module).norm(self._term(term))

    def cosine(self, first: str | int, second: str | int, module: str | None = None) -> float:
        """The cosine of two terms' gradients over a module, or a parameter; nan if one is 0.

        Args:
            first: Name of a term, or index of a sample.
            second: Name or index of another.
            module: Name of a module or parameter; all parameters by default.

        Returns:
            The cosine, from -1 (opposed) to 1 (alike), or nan.
        """
        return self._row(module).cosine(self._term(first), self._term(second))

    def shares(self, module: str | None = None) -> dict[str, float]:
        """``{term: ⟨g_a, g⟩ / ⟨g, g⟩}`` over a module, or a parameter; nan where the sum g is 0.

        Args:
            module: Name of a module or parameter; all parameters by default.

        Returns:
            A share for each term; they add up to 1.
        """
        row = self._row(module)
        return {term: row.share(n) for n, term in enumerate(self.terms)}

    def winner(self, module: str | None = None) -> str | None:
        """The term of the largest share; None where the sum is 0.

        Args:
            module: Name of a module or parameter; all parameters by default.

        Returns:
            The term's name, or None.
        """
        found = self._row(module).winner
        return None if found is None else self.terms[found]

    def not_finite(self) -> list[str]:
        """The terms whose gradient is not finite, or too large for its square to be."""
        whole = self._row(None).products.diagonal()
        return [term for term, size in zip(self.terms, whole.tolist()) if not isfinite(size)]

    def _term(self, name: str | int) -> int:
        name = str(name) if isinstance(name, int) else name  # the index of a sample
        if name not in self.terms:
            hint = did_you_mean(str(name), self.terms)
            raise UnknownName(f"no term {name!r} in this table{hint}")
        return self.terms.index(name)

    @paused()
    def _row(self, module: str | None) -> ConflictRow:
        if module is None or module in ("", WHOLE):
            return summed(WHOLE, self.parameters, len(self.terms))
        inside = [row for row in self.parameters if module in _places(row)]
        if not inside:
            known = dict.fromkeys(place for row in self.parameters for place in _places(row))
            raise UnknownName(
                f"no module or parameter {module!r} that requires grad"
                f"{did_you_mean(str(module), known)}"
            )
        return summed(module, inside, len(self.terms))

    # Tables ---------------------------------------------------------------------------------------

    @paused()
    def by_parameter(self) -> Conflicts:
        """The same with a row for each parameter."""
        return replace(self, rows=self.parameters, kind="parameter")

    @paused()
    def cosines(self, module: str | None = None) -> TextTable:
        """Every two terms over a module, or a parameter; the most opposed first.

        Args:
            module: Name of a module or parameter; all parameters by default.

        Returns:
            A row for each pair of terms.
        """
        row = self._row(module)
        found = [
            (a, b, _shown(row.cosine(m, n)))
            for (m, a), (n, b) in combinations(enumerate(self.terms), 2)
        ]
        columns = (TextColumn("term"), TextColumn("and"), TextColumn("cosine", "number"))
        where = "" if row.name == WHOLE else f" in {row.name}"
        table = TextTable(f"Cosines of terms{where}", columns, tuple(found))
        return table.sort("cosine", descending=False)

    @paused()
    def table(self) -> TextTable:
        """One row per module, and remarks in words; of many terms a summary."""
        if len(self.terms) <= MOST_COLUMNS:
            return self._wide()
        columns = (
            *self._first_columns(),
            TextColumn("largest norm", "number"),
            TextColumn("of"),
            TextColumn("median norm", "number"),
            TextColumn("lowest cosine", "number"),
            TextColumn("between"),
            TextColumn("mean cosine", "number"),
            *_LAST_COLUMNS,
        )
        rows = tuple((row.name, row.elements, *self._summary(row)) for row in self.rows)
        return TextTable(self._title(), columns, rows, self.remarks())

    def to_pandas(self) -> Any:
        """A ``pandas.DataFrame`` with a column for the norm of each term and the cosine of each
        pair, however many there are.
        """
        return self._wide().to_pandas()

    @paused()
    def _wide(self) -> TextTable:
        """The table with a column for each term and each pair."""
        columns = [*self._first_columns()]
        pairs = list(combinations(range(len(self.terms)), 2))
        named = [f"norm {term}" for term in self.terms]
        named += [f"cosine {self.terms[a]}·{self.terms[b]}" for a, b in pairs]
        for name in named:
            taken = [column.name for column in (*columns, *_LAST_COLUMNS)]
            columns.append(TextColumn(unused(name, taken), "number"))
        rows = tuple(
            (
                row.name,
                row.elements,
                *(row.norm(n) for n in range(len(self.terms))),
                *(_shown(row.cosine(a, b)) for a, b in pairs),
                *self._won(row),
            )
            for row in self.rows
        )
        return TextTable(self._title(), (*columns, *_LAST_COLUMNS), rows, self.remarks())

    def _first_columns(self) -> tuple[TextColumn, ...]:
        return TextColumn(self.kind), TextColumn("elements", "count")

    def _title(self) -> str:
        names = listed(self.terms, MOST_COLUMNS)
        return f"Gradients of {len(self.terms)} terms: {names}"

    def _won(self, row: ConflictRow) -> tuple[object, object]:
        won = row.winner
        return (None, None) if won is None else (self.terms[won], row.share(won))

    def _summary(self, row: ConflictRow) -> tuple[object, ...]:
        norms, cosines = _norms(row), _cosines(row)
        largest = int(norms.argmax()) if bool(norms.any()) else None
        known = cosines[cosines.isfinite()]
        between = None
        if known.numel():
            lowest = int(cosines.nan_to_num(torch.inf).argmin())
            a, b = unravel(lowest, tuple(cosines.shape))
            between = f"{self.terms[a]} and {self.terms[b]}"
        return (
            float(norms.max()),
            None if largest is None else self.terms[largest],
            float(norms.median()),
            float(known.min()) if known.numel() else None,
            between,
            float(known.mean()) if known.numel() else None,
            *self._won(row),
        )

    @paused()
    def remarks(self) -> tuple[str, ...]:
        """In words: where terms pull against each other, drown one another, reach nothing."""
        found = []
        against = self._against()
        if against:
            words = [f"{a} and {b} in {name} ({cosine:.2f})" for cosine, a, b, name in against]
            found.append(f"these pull against each other: {listed(words)}")
        whole = self._row(None)
        norms = {term: whole.norm(n) for n, term in enumerate(self.terms)}
        low, high = min(norms, key=norms.__getitem__), max(norms, key=norms.__getitem__)
        if norms[low] and norms[high] > DROWNED * norms[low]:
            times = norms[high] / norms[low]
            found.append(f"the gradient of {high} is {times:,.4g} times as long as that of {low}")
        return (*found, *self._unreached())

    def _unreached(self) -> Iterator[str]:
        """Which modules get no gradient from a term, or from any; the outermost alone."""
        rows = [row for row in self.rows if row.name != WHOLE]
        silent = {row.name for row in rows if not bool(row.products.any())}
        missed = {"no term": silent}
        for n, term in enumerate(self.terms if len(self.terms) <= MOST_COLUMNS else ()):
            missed[f"{term} does not"] = {row.name for row in rows if not row.norm(n)} - silent
        for who, names in missed.items():
            outer = [r.name for r in rows if r.name in names and not names & {*enclosing(r.name)}]
            if outer:
                verb = "gives" if who == "no term" else "give"
                yield f"{who} {verb} {listed(outer)} a gradient"

    def _against(self) -> list[tuple[float, str, str, str]]:
        """The lowest cosine of each row that is below ``AGAINST``, with its terms, lowest first."""
        found = []
        for row in self.rows:
            cosines = _cosines(row).nan_to_num(torch.inf)
            lowest = int(cosines.argmin())
            if row.name != WHOLE and cosines.flatten()[lowest] < AGAINST:
                a, b = unravel(lowest, tuple(cosines.shape))
                found.append((row.cosine(a, b), self.terms[a], self.terms[b], row.name))
        return sorted(found)

    @paused()
    def plot(self, by: str | None = None, *, most: int = 20, ax: Any = None) -> Any:
        """Bars of a column; by default the cosine of the two terms that are most opposed over all
        parameters, module by module. Returns matplotlib's ``Axes``.
        """
        if by is None and len(self.terms) > MOST_COLUMNS:
            by = "lowest cosine"
        elif by is None:
            cosines = _cosines(self._row(None)).nan_to_num(torch.inf)
            a, b = unravel(int(cosines.argmin()), tuple(cosines.shape))
            pairs = list(combinations(range(len(self.terms)), 2))
            at = pairs.index((a, b)) if (a, b) in pairs else 0
            by = self.table().columns[2 + len(self.terms) + at].name
        return super().plot(by, most=most, ax=ax)

    def __repr__(self) -> str:
        return printable(f"Conflicts({', '.join(self.terms)}; {len(self.parameters)} parameters)")


_LAST_COLUMNS = (TextColumn("wins"), TextColumn("its share", "share"))


# Products ----------------------------------------------------------------------------------------


def compared(
    gradients: Mapping[str, list[tuple[Tensor, Tensor]]], names: Mapping[Tensor, tuple[str, ...]]
) -> Conflicts:
    """The table of terms, from each one's leaves with their gradients. ``names`` has the names of
    all leaves, in the order of the model.
    """
    by_leaf: dict[int, list[Tensor | None]] = {id(leaf): [None] * len(gradients) for leaf in names}
    for n, found in enumerate(gradients.values()):
        for leaf, gradient in found:
            by_leaf[id(leaf)][n] = gradient
    products = _fetched([_products(some) for some in by_leaf.values()])
    parameters = tuple(
        ConflictRow(every[0], leaf.numel(), each, every[1:])
        for (leaf, every), each in zip(names.items(), products)
    )
    table = Conflicts(tuple(gradients), (), parameters)
    modules: dict[str, list[ConflictRow]] = {}
    for row in parameters:
        for place in reversed(_places(row)):
            if place not in (row.name, *row.aliases):
                modules.setdefault(place, []).append(row)
    rows = [summed(module, inside, len(gradients)) for module, inside in modules.items()]
    return replace(table, rows=(table._row(None), *rows))


def _products(gradients: Sequence[Tensor | None]) -> Tensor:
    """⟨g_a, g_b⟩ of every two gradients and of their sum, in float64; 0 for those that are None."""
    there = [n for n, gradient in enumerate(gradients) if gradient is not None]
    size = len(gradients) + 1
    flat = [_flat(gradient) for gradient in gradients if gradient is not None]
    if not flat:
        return torch.zeros(size, size, dtype=torch.float64, device="cpu")
    device = flat[0].device
    dense = torch.zeros(len(flat) + 1, len(flat) + 1, dtype=torch.float64, device=device)
    block = max(BLOCK_ELEMENTS // size, 1)
    for start in range(0, flat[0].numel(), block):
        part = torch.stack([each[start : start + block].double() for each in flat])
        part = torch.cat([part, part.sum(0, keepdim=True)])
        dense += part @ part.T
    at = torch.tensor([*there, size - 1], device=device)
    found = torch.zeros(size, size, dtype=torch.float64, device=device)
    found[at[:, None], at] = dense
    return found


def _flat(gradient: Tensor) -> Tensor:
    """A gradient as a vector of real numbers."""
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient.resolve_conj())
    return gradient.reshape(-1)


def _fetched(products: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of one shape on the CPU, with one synchronisation a device."""
    found: dict[int, Tensor] = {}
    for device in {each.device for each in products}:
        here = [n for n, each in enumerate(products) if each.device == device]
        found |= zip(here, torch.stack([products[n] for n in here]).cpu())
    return [found[n] for n in range(len(products))]


def summed(name: str, rows: Sequence[ConflictRow], terms: int) -> ConflictRow:
    """The row over several parameters."""
    products = torch.zeros(terms + 1, terms + 1, dtype=torch.float64, device="cpu")
    for row in rows:
        products += row.products
    return ConflictRow(name, sum(row.elements for row in rows), products)


def _places(row: ConflictRow) -> list[str]:
    """All names of a parameter, and the modules that contain it, innermost first."""
    names = (row.name, *row.aliases)
    inside = (place for name in names for place in enclosing(name) if place)
    return list(dict.fromkeys((*names, *inside)))


# Words -------------------------------------------------------------------------------------------


def _norms(row: ConflictRow) -> Tensor:
    return row.products.diagonal()[:-1].sqrt()


def _cosines(row: ConflictRow) -> Tensor:
    """The cosines of pairs (a, b) with a < b; nan elsewhere, and where one is 0."""
    norms = _norms(row)
    cosines = (row.products[:-1, :-1] / (norms[:, None] * norms)).clamp(-1, 1)
    return cosines.where(torch.ones_like(cosines).triu(1).bool(), nan)


def _shown(x: float) -> float | None:
    return x if isfinite(x) else None


# Checks ------------------------------------------------------------------------------------------


def checked_terms(terms: Mapping[str, Tensor] | Tensor) -> dict[str, tuple[Tensor, Tensor | None]]:
    """The terms by name, each with its cotangent: None, or a unit vector for an element of a vector
    of losses, whose name is its index.
    """
    if isinstance(terms, Tensor):
        if terms.dim() != 1:
            raise GradtraceError(
                f"conflicts got one tensor of shape {tuple(terms.shape)}; pass named terms, "
                '{"ce": ce, "kl": kl}, or a vector with a loss for each sample, such as '
                "losses.flatten(1).mean(1)"
            )
        seeds = torch.eye(len(terms), dtype=terms.dtype, device=terms.device)
        found: dict[str, tuple[Tensor, Tensor | None]] = {
            str(n): (terms, seed) for n, seed in enumerate(seeds)
        }
    elif isinstance(terms, Mapping):
        found = {name: (term, None) for name, term in terms.items()}
    else:
        raise GradtraceError(
            f"conflicts takes terms by name, {{'ce': ce, 'kl': kl}}, got {type(terms).__name__}"
        )
    if len(found) < 2:
        raise GradtraceError(
            f"conflicts compares at least two terms, got {', '.join(map(repr, found)) or 'none'}; "
            "watch.backward(loss) has the gradient of one"
        )
    if isinstance(terms, Mapping):
        for name, term in terms.items():
            _check_term(name, term)
    devices = {str(term.device): name for name, (term, _) in reversed(found.items())}
    if len(devices) > 1:
        places = ", ".join(f"{name!r} on {device}" for device, name in reversed(devices.items()))
        raise GradtraceError(
            f"terms lie on different devices ({places}), so they cannot be added up; move them to "
            "one where they are made: term.to(device)"
        )
    return found


def _check_term(name: object, term: object) -> None:
    if not isinstance(name, str):
        raise GradtraceError(f"names of terms are strings, not {name!r}")
    if not isinstance(term, Tensor):
        raise GradtraceError(f"term {name!r} is a {type(term).__name__}, not a tensor")
    if term.numel() != 1:
        raise GradtraceError(
            f"term {name!r} has {term.numel():,} elements (shape {tuple(term.shape)}); a term is "
            "one number, such as its mean(). To compare samples pass the vector alone: "
            "conflicts(losses)"
        )
