"""Gradients of leaves that are computed on demand.

The gradient of a weight, ``xᵀ g``, is half of the work of a backward pass, and no other gradient
depends on it. Following paths does not need it either. Where all leaves are counted one after the
other, computing each when its turn comes means that only one is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

import torch
from torch import Tensor

from gradtrace.errors import GradtraceError
from gradtrace.kernels.sync import fetch_scalars
from gradtrace.linops import Contract, Map, Scatter
from gradtrace.pytorch.replaced_data import data_of, have_data

WEIGHT_GRADIENT_SPEC = "mn,mk->kn"
"""Einsum for the gradient of w in ``x @ w``. It sums over rows m, so several such products become
one when their operands are concatenated along m.
"""


@dataclass(frozen=True)
class LazyPart:
    """One contribution to a gradient: ``maps[-1](... maps[0](x))``."""

    maps: tuple[Map, ...]
    x: Tensor

    def value(self) -> Tensor:
        """The contribution, computed now."""
        return _applied(self.maps, self.x)

    def factors(self) -> list[Tensor]:
        """The tensors that are multiplied: the cotangent, and the weights of contractions."""
        return [self.x, *(map_.weight for map_ in self.maps if isinstance(map_, Contract))]

    def bound(self, sizes: Mapping[int, float]) -> float:
        """An upper bound on the magnitude of every partial sum; NaN or infinite if unknown.
        ``sizes`` are the largest magnitudes of the factors, by ``id()``.
        """
        most = sizes[id(self.x)]
        for map_ in self.maps:
            if isinstance(map_, Contract):
                most *= sizes[id(map_.weight)] * map_.width
            elif isinstance(map_, Scatter):
                most *= map_.inputs
            elif not map_.is_gather:
                return float("nan")
        return most


@dataclass
class LazyGradient:
    """A sum of contributions that has not been computed yet.

    ``versions`` are the version counters of the tensors it reads, ``data`` where these lie, so that
    ``total`` can refuse if one of them was changed since.
    """

    parts: list[LazyPart]
    versions: list[tuple[Tensor, int]] = field(init=False)
    data: list[tuple[Tensor, Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        held = [t for part in self.parts if part.maps for t in (part.x, *_operands(part.maps))]
        self.versions = [(tensor, tensor._version) for tensor in held]
        self.data = data_of(held)

    def mapped(self, maps: Sequence[Map]) -> LazyGradient:
        """The gradient after further maps."""
        return LazyGradient([LazyPart((*part.maps, *maps), part.x) for part in self.parts])

    def added(self, other: LazyGradient) -> LazyGradient:
        """Add the parts of another sum to this one, in place. Parts without maps are tensors that
        were computed already: these are added up at once, so there is at most one, the first.
        """
        for part in other.parts:
            if part.maps:
                self.parts.append(part)
            elif self.parts[0].maps:
                self.parts.insert(0, part)
            else:
                self.parts[0] = LazyPart((), self.parts[0].x + part.x)
        self.versions += other.versions
        self.data += other.data
        return self

    def surely_finite(self, sizes: Mapping[int, float]) -> bool:
        """Whether the ``sizes`` of the factors guarantee that no element is NaN or infinite."""
        most = sum(part.bound(sizes) for part in self.parts)
        return isfinite(most) and most < torch.finfo(self.parts[0].x.dtype).max

    def total(self) -> Tensor:
        """The gradient, computed now. Raises if an operand was changed in place."""
        changed = any(tensor._version != version for tensor, version in self.versions)
        if changed or not have_data(self.data):
            raise GradtraceError(
                "activations were changed in place since the trace was made, so a gradient that "
                "nobody asked for until now can no longer be computed; ask for it before"
            )
        with torch.no_grad():
            several = len(self.parts) > 1
            first, *rest = sorted(_batched(self.parts), key=_sparse) if several else self.parts
            total, own = first.value(), any(not map_.is_gather for map_ in first.maps)
            for part in rest:
                total = _added(total, part, own)
                own = True
        return total


def _sparse(part: LazyPart) -> bool:
    """Whether a contribution ends in a scatter. Such parts come last and are added in place."""
    return bool(part.maps) and isinstance(part.maps[-1], Scatter)


def _added(total: Tensor, part: LazyPart, own: bool) -> Tensor:
    """``total + part``; in place if ``own``, that is if no one else refers to ``total``."""
    if own and _sparse(part) and total.is_contiguous():
        last = part.maps[-1]
        assert isinstance(last, Scatter)
        return last.add_to(total, _applied(part.maps[:-1], part.x))
    return total.add_(part.value()) if own else total + part.value()


def _batched(parts: list[LazyPart]) -> list[LazyPart]:
    """Weight-gradient products with the same final layout, merged into one product over all their
    rows.
    """
    groups: dict[object, list[LazyPart]] = {}
    for n, part in enumerate(parts):
        first, *rest = part.maps or (None,)
        unbatched = (
            not isinstance(first, Contract) or first.spec != WEIGHT_GRADIENT_SPEC or len(rest) > 1
        )
        groups.setdefault(n if unbatched else tuple(map(layout_key, rest)), []).append(part)
    return [_concatenated(some) for some in groups.values()]


def layout_key(move: Map) -> tuple[object, ...]:
    """Key that tells the two layouts of a matrix apart (row-major, transposed): the source of its
    second element.
    """
    second = torch.tensor([min(1, move.outputs - 1)], device="cpu")
    return type(move), int(move.rows(second).source[0, 0]) if move.is_gather else id(move)


def _concatenated(parts: list[LazyPart]) -> LazyPart:
    """One product over the concatenated rows of these parts."""
    if len(parts) == 1:
        return parts[0]
    firsts = [part.maps[0] for part in parts]
    x = torch.cat([part.x for part in parts])
    operand = torch.cat([first.weight for first in firsts if isinstance(first, Contract)])
    first = Contract(WEIGHT_GRADIENT_SPEC, operand, tuple(x.shape), firsts[0].out_shape)
    return LazyPart((first, *parts[0].maps[1:]), x)


def _applied(maps: Sequence[Map], x: Tensor) -> Tensor:
    for map_ in maps:
        x = map_.apply(x)
    return x


def _operands(maps: Sequence[Map]) -> list[Tensor]:
    return [getattr(map_, name) for map_ in maps for name in map_.tensors()]


def sizes_of(sums: Iterable[LazyGradient]) -> dict[int, float]:
    """The largest magnitude of each factor of these sums, by ``id()``; NaN if it holds NaN. All are
    fetched from the device in one synchronisation.
    """
    factors = {id(x): x for each in sums for part in each.parts for x in part.factors()}
    ends = [end for x in factors.values() for end in _min_max(x)]
    found = iter(fetch_scalars(ends))
    return {key: max(abs(low), abs(high)) for key, low, high in zip(factors, found, found)}


def _min_max(x: Tensor) -> Sequence[Tensor]:
    """The smallest and the largest element; zeros for an empty tensor."""
    return torch.aminmax(x.detach()) if x.numel() else (x.new_zeros(()), x.new_zeros(()))
