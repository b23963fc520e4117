"""Gradients of leaves that are worked out when somebody asks.

The gradient of a weight, ``xᵀ g``, is half of the work of a backward pass, and no other gradient
needs it. To follow paths it is not needed either, and where all of it is counted, one weight after
the other, it need not wait in memory for its turn.
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

SOURCE = "mn,mk->kn"
"""The gradient of w in ``x @ w``: summed over the rows, so that several are one product."""


@dataclass(frozen=True)
class LazyPart:
    """``maps[-1](... maps[0](x))``."""

    maps: tuple[Map, ...]
    x: Tensor

    def value(self) -> Tensor:
        """The contribution."""
        return _through(self.maps, self.x)

    def factors(self) -> list[Tensor]:
        """What is multiplied: the cotangent, and the operands of products."""
        return [self.x, *(map_.weight for map_ in self.maps if isinstance(map_, Contract))]

    def bound(self, sizes: Mapping[int, float]) -> float:
        """No partial sum of an element is larger than this; NaN or infinite if nobody knows.
        ``sizes`` are the largest magnitudes of the factors, by id.
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
    """A sum of contributions that has not been worked out."""

    parts: list[LazyPart]
    versions: list[tuple[Tensor, int]] = field(init=False)

    def __post_init__(self) -> None:
        held = [t for part in self.parts if part.maps for t in (part.x, *_operands(part.maps))]
        self.versions = [(tensor, tensor._version) for tensor in held]

    def mapped(self, maps: Sequence[Map]) -> LazyGradient:
        """The same, moved on."""
        return LazyGradient([LazyPart((*part.maps, *maps), part.x) for part in self.parts])

    def added(self, other: LazyGradient) -> LazyGradient:
        """Take over what another sum is made of. What was computed already is added up, so that
        there is one such part at most, the first.
        """
        for part in other.parts:
            if part.maps:
                self.parts.append(part)
            elif self.parts[0].maps:
                self.parts.insert(0, part)
            else:
                self.parts[0] = LazyPart((), self.parts[0].x + part.x)
        self.versions += other.versions
        return self

    def surely_finite(self, sizes: Mapping[int, float]) -> bool:
        """Whether no element can be NaN or infinite, as far as the ``sizes`` of factors tell."""
        most = sum(part.bound(sizes) for part in self.parts)
        return isfinite(most) and most < torch.finfo(self.parts[0].x.dtype).max

    def total(self) -> Tensor:
        """The gradient."""
        if any(tensor._version != version for tensor, version in self.versions):
            raise GradtraceError(
                "activations were changed in place since the trace was made, so a gradient that "
                "nobody asked for until now can no longer be computed; ask for it before"
            )
        with torch.no_grad():
            first, *rest = sorted(_joined(self.parts), key=_sparse)
            total, own = first.value(), any(not map_.is_gather for map_ in first.maps)
            for part in rest:
                total = _added(total, part, own)
                own = True
        return total


def _sparse(part: LazyPart) -> bool:
    """Whether a contribution is there for few elements only; such are added to the others."""
    return bool(part.maps) and isinstance(part.maps[-1], Scatter)


def _added(total: Tensor, part: LazyPart, own: bool) -> Tensor:
    """``total + part``, in place of the total if that is nobody else's."""
    if own and _sparse(part) and total.is_contiguous():
        last = part.maps[-1]
        assert isinstance(last, Scatter)
        return last.add_to(total, _through(part.maps[:-1], part.x))
    return total.add_(part.value()) if own else total + part.value()


def _joined(parts: list[LazyPart]) -> list[LazyPart]:
    """Products that are alike become one: that of all their rows."""
    alike: dict[object, list[LazyPart]] = {}
    for n, part in enumerate(parts):
        first, *rest = part.maps or (None,)
        alone = not isinstance(first, Contract) or first.spec != SOURCE or len(rest) > 1
        alike.setdefault(n if alone else tuple(map(_way, rest)), []).append(part)
    return [_one(some) for some in alike.values()]


def _way(move: Map) -> tuple[object, ...]:
    """What tells the two ways to lay out a matrix apart: where its second element comes from."""
    second = torch.tensor([min(1, move.outputs - 1)], device="cpu")
    return type(move), int(move.rows(second).source[0, 0]) if move.is_gather else id(move)


def _one(parts: list[LazyPart]) -> LazyPart:
    if len(parts) == 1:
        return parts[0]
    firsts = [part.maps[0] for part in parts]
    x = torch.cat([part.x for part in parts])
    operand = torch.cat([first.weight for first in firsts if isinstance(first, Contract)])
    first = Contract(SOURCE, operand, tuple(x.shape), firsts[0].out_shape)
    return LazyPart((first, *parts[0].maps[1:]), x)


def _through(maps: Sequence[Map], x: Tensor) -> Tensor:
    for map_ in maps:
        x = map_.apply(x)
    return x


def _operands(maps: Sequence[Map]) -> list[Tensor]:
    return [getattr(map_, name) for map_ in maps for name in map_.tensors()]


def sizes_of(sums: Iterable[LazyGradient]) -> dict[int, float]:
    """The largest magnitude of each factor of these sums, by id; NaN if it holds NaN. Those of all
    are looked at together, and so waited for once.
    """
    factors = {id(x): x for each in sums for part in each.parts for x in part.factors()}
    ends = [end for x in factors.values() for end in _ends(x)]
    found = iter(fetch_scalars(ends))
    return {key: max(abs(low), abs(high)) for key, low, high in zip(factors, found, found)}


def _ends(x: Tensor) -> Sequence[Tensor]:
    """The least and the largest element."""
    return torch.aminmax(x.detach()) if x.numel() else (x.new_zeros(()), x.new_zeros(()))
