"""``Conflicts``: the gradients of loss terms, tasks or samples, compared module by module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import isfinite, nan, sqrt

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradtrace.autodiff.names import enclosing, unused
from gradtrace.errors import GradtraceError, UnknownName, did_you_mean, listed
from gradtrace.table import Column, Table

WHOLE = "(all)"
"""The name of the row over all parameters."""

AGAINST = -0.2
"""Two terms pull against each other where their cosine is below this."""

DROWNED = 10.0
"""A term is drowned by another whose gradient is this many times as long."""

MOST_COLUMNS = 4
"""Up to this many terms have a column each, and every pair of them; of more a summary is shown."""

BLOCK_ELEMENTS = 1 << 22
"""Products are computed in float64 for this many numbers at a time."""

LAST_COLUMNS = Column("wins"), Column("its share", "share")
SUMMARY = (
    Column("largest norm", "number"),
    Column("of"),
    Column("median norm", "number"),
    Column("lowest cosine", "number"),
    Column("between"),
    Column("mean cosine", "number"),
)


@dataclass(frozen=True, eq=False)
class Compared:
    """A parameter or a module with all its submodules: ``products[a, b]`` is ⟨g_a, g_b⟩ of the
    gradients of terms a and b; the last row and column are those of their sum.
    """

    name: str
    elements: int
    products: npt.NDArray[np.float64]  # (terms + 1, terms + 1)
    aliases: tuple[str, ...] = ()

    def norm(self, term: int) -> float:
        """‖g_a‖, 0 if the term does not reach it."""
        return sqrt(self.products[term, term])

    def cosine(self, first: int, second: int) -> float:
        """The cosine of the angle between two gradients; nan if one of them is 0."""
        size = self.norm(first) * self.norm(second)
        cosine = float(self.products[first, second]) / size if size else nan
        return max(-1.0, min(1.0, cosine)) if isfinite(cosine) else nan

    def share(self, term: int) -> float:
        """⟨g_a, g⟩ / ⟨g, g⟩: the part of the sum g that the term gives; nan if the sum is 0."""
        whole = float(self.products[-1, -1])
        return float(self.products[term, -1]) / whole if whole else nan

    @property
    def winner(self) -> int | None:
        """The term of the largest share; None if the sum is 0."""
        whole = self.products[-1, -1]
        return int(self.products[:-1, -1].argmax()) if whole and isfinite(whole) else None

    @property
    def cosines(self) -> list[tuple[float, int, int]]:
        """The cosines of all pairs that have one, with the two terms."""
        pairs = combinations(range(len(self.products) - 1), 2)
        found = ((self.cosine(a, b), a, b) for a, b in pairs)
        return [each for each in found if isfinite(each[0])]

    @property
    def places(self) -> list[str]:
        """All names of a parameter, and the modules that contain it, innermost first."""
        names = (self.name, *self.aliases)
        inside = (place for name in names for place in enclosing(name) if place)
        return list(dict.fromkeys((*names, *inside)))


def summed(name: str, some: Sequence[Compared]) -> Compared:
    """The products over several parameters."""
    products = np.sum([each.products for each in some], 0)
    return Compared(name, sum(each.elements for each in some), products)


@dataclass(frozen=True, repr=False)
class Conflicts(Table):
    """How the gradients of several terms agree: for each module (with its submodules) the norm of
    each term's gradient, the cosine of each pair, and who wins.

    ``norm(a)`` is ‖g_a‖, ``cosine(a, b)`` is ⟨g_a, g_b⟩ / (‖g_a‖ ‖g_b‖): below 0 a step along one
    undoes a step along the other. ``share(a)`` is ⟨g_a, g⟩ / ⟨g, g⟩ with ``g = Σ g_a``: the part of
    the sum that a term gives, along its direction; shares add up to 1, and are negative for a term
    that the others outvote. The winner has the largest. Terms count as they were given, so give
    them with their weights: ``{"ce": ce, "kl": 0.1 * kl}``.

    A term that does not reach a module has norm 0 there, and its cosines are nan. All products are
    of float64. The rows are modules; ``by_parameter()`` has parameters instead.
    """

    terms: tuple[str, ...] = ()
    parameters: tuple[Compared, ...] = ()

    def norm(self, term: str | int, module: str | None = None) -> float:
        """‖g_a‖ over a module, or a parameter; over all parameters by default.

        Args:
            term: Name of the term, or index of the sample.
            module: Name of a module or parameter; all parameters by default.

        Returns:
            The norm; 0 if the term does not reach the module.
        """
        return self._over(module).norm(self._term(term))

    def cosine(self, first: str | int, second: str | int, module: str | None = None) -> float:
        """The cosine of two terms' gradients over a module, or a parameter; nan if one is 0.

        Args:
            first: Name of a term, or index of a sample.
            second: Name or index of another.
            module: Name of a module or parameter; all parameters by default.

        Returns:
            The cosine, from -1 (opposed) to 1 (alike), or nan.
        """
        return self._over(module).cosine(self._term(first), self._term(second))

    def share(self, term: str | int, module: str | None = None) -> float:
        """⟨g_a, g⟩ / ⟨g, g⟩ over a module, or a parameter; nan where the sum g is 0.

        Args:
            term: Name of a term, or index of a sample.
            module: Name of a module or parameter; all parameters by default.

        Returns:
            The share; those of all terms add up to 1.
        """
        return self._over(module).share(self._term(term))

    def winner(self, module: str | None = None) -> str | None:
        """The term of the largest share; None where the sum is 0.

        Args:
            module: Name of a module or parameter; all parameters by default.

        Returns:
            The term's name, or None.
        """
        found = self._over(module).winner
        return None if found is None else self.terms[found]

    def by_parameter(self) -> Conflicts:
        """The same with a row for each parameter."""
        return _table("parameter", self.terms, self.parameters, self.parameters)

    def cosines(self, module: str | None = None) -> Table:
        """Every two terms over a module, or a parameter; the most opposed first.

        Args:
            module: Name of a module or parameter; all parameters by default.

        Returns:
            A row for each pair of terms.
        """
        found = self._over(module)
        pairs = combinations(enumerate(self.terms), 2)
        rows = tuple((a, b, found.cosine(m, n)) for (m, a), (n, b) in pairs)
        columns = Column("term"), Column("and"), Column("cosine", "number")
        where = "" if found.name == WHOLE else f" in {found.name}"
        table = Table(f"Cosines of terms{where}", columns, rows)  # type: ignore[arg-type]
        return table.sort("cosine", descending=False)

    def _term(self, name: str | int) -> int:
        name = str(name) if isinstance(name, int) else name  # the index of a sample
        if name not in self.terms:
            hint = did_you_mean(str(name), self.terms)
            raise UnknownName(f"no term {name!r} in this table{hint}")
        return self.terms.index(name)

    def _over(self, module: str | None) -> Compared:
        if module is None or module in ("", WHOLE):
            return summed(WHOLE, self.parameters)
        inside = [each for each in self.parameters if module in each.places]
        if not inside:
            known = dict.fromkeys(place for each in self.parameters for place in each.places)
            raise UnknownName(
                f"no module or parameter {module!r} that requires grad"
                f"{did_you_mean(str(module), known)}"
            )
        return summed(module, inside)


# Tables -------------------------------------------------------------------------------------------


def _table(
    kind: str, terms: tuple[str, ...], some: Sequence[Compared], parameters: Sequence[Compared]
) -> Conflicts:
    """A row for each; of many terms a summary."""
    first = Column(kind), Column("elements", "count")
    wide = len(terms) <= MOST_COLUMNS
    columns = (*first, *(_of_terms(terms, first) if wide else SUMMARY), *LAST_COLUMNS)
    numbers = _numbers if wide else _summary
    rows = tuple(
        (each.name, each.elements, *numbers(each, terms), *_won(each, terms)) for each in some
    )
    title = f"Gradients of {len(terms)} terms: {listed(terms, MOST_COLUMNS)}"
    notes = tuple(_notes(terms, some, summed(WHOLE, parameters)))
    return Conflicts(title, columns, rows, notes, {}, terms, tuple(parameters))  # type: ignore[arg-type]


def _of_terms(terms: Sequence[str], first: Iterable[Column]) -> list[Column]:
    """A column for the norm of each term and the cosine of each pair."""
    named = [f"norm {term}" for term in terms]
    named += [f"cosine {a}·{b}" for a, b in combinations(terms, 2)]
    taken, found = [column.name for column in (*first, *LAST_COLUMNS)], list[Column]()
    for name in named:
        found.append(Column(unused(name, taken), "number"))
        taken.append(found[-1].name)
    return found


def _numbers(each: Compared, terms: Sequence[str]) -> list[float | None]:
    count = len(terms)
    norms = [each.norm(n) for n in range(count)]
    cosines = (each.cosine(a, b) for a, b in combinations(range(count), 2))
    return [*norms, *(x if isfinite(x) else None for x in cosines)]


def _summary(each: Compared, terms: Sequence[str]) -> tuple[object, ...]:
    norms, cosines = [each.norm(n) for n in range(len(terms))], each.cosines
    of = terms[int(np.argmax(norms))] if any(norms) else None
    middle = sorted(norms)[(len(norms) - 1) // 2]
    if not cosines:
        return max(norms), of, middle, None, None, None
    lowest, a, b = min(cosines)
    mean = sum(cosine for cosine, _, _ in cosines) / len(cosines)
    return max(norms), of, middle, lowest, f"{terms[a]} and {terms[b]}", mean


def _won(each: Compared, terms: Sequence[str]) -> tuple[str | None, float | None]:
    won = each.winner
    return (None, None) if won is None else (terms[won], each.share(won))


def _notes(terms: Sequence[str], some: Sequence[Compared], whole: Compared) -> Iterator[str]:
    """In words: where terms pull against each other, drown one another, reach nothing."""
    inside = [each for each in some if each.name != WHOLE]
    lowest = [(*min(each.cosines), each.name) for each in inside if each.cosines]
    if against := sorted(each for each in lowest if each[0] < AGAINST):
        words = [f"{terms[a]} and {terms[b]} in {name} ({x:.2f})" for x, a, b, name in against]
        yield f"these pull against each other: {listed(words)}"
    norms = {term: whole.norm(n) for n, term in enumerate(terms)}
    low, high = min(norms, key=norms.__getitem__), max(norms, key=norms.__getitem__)
    if norms[low] and norms[high] > DROWNED * norms[low]:
        times = norms[high] / norms[low]
        yield f"the gradient of {high} is {times:,.4g} times as long as that of {low}"
    silent = {each.name for each in inside if not each.products.any()}
    missed = {"no term gives": silent}
    for n, term in enumerate(terms if len(terms) <= MOST_COLUMNS else ()):
        missed[f"{term} does not give"] = {e.name for e in inside if not e.norm(n)} - silent
    for who, names in missed.items():  # the outermost alone
        outer = [e.name for e in inside if e.name in names and not names & {*enclosing(e.name)}]
        if outer:
            yield f"{who} {listed(outer)} a gradient"


# Products -----------------------------------------------------------------------------------------


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
    products = [each.cpu().numpy() for each in map(_products, by_leaf.values())]
    parameters = [
        Compared(every[0], leaf.numel(), each, every[1:])
        for (leaf, every), each in zip(names.items(), products)
    ]
    modules: dict[str, list[Compared]] = {WHOLE: parameters}
    for each in parameters:
        for place in reversed(each.places):
            if place not in (each.name, *each.aliases):
                modules.setdefault(place, []).append(each)
    some = [summed(module, inside) for module, inside in modules.items()]
    return _table("module", tuple(gradients), some, parameters)


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
    devices = {str(term.device): name for name, (term, _) in found.items()}
    if len(devices) > 1:
        places = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
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
