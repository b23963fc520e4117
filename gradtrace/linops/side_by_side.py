"""Block-diagonal maps: independent inputs, each with its own map."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gradtrace.linops.base import Count, Map, Rows, Selection, per_element
from gradtrace.semirings import Semiring, Value


class BlockDiagonal(Map):
    """Maps of consecutive parts of the input to consecutive parts of the output."""

    __slots__ = ()

    @abstractmethod
    def blocks(self, *x: Tensor) -> Iterator[tuple[Map, tuple[Tensor, ...]]]:
        """Each block and its part of these inputs; no blocks if the output is empty."""

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([part.reshape(-1) for part in parts]).reshape(self.out_shape)

    def apply(self, x: Tensor) -> Tensor:
        found = [block.apply(part) for block, (part,) in self.blocks(x)]
        return self._joined(found) if found else x.new_zeros(self.out_shape)

    def apply_in(self, x: Value, semiring: Semiring) -> Value:
        found = [block.apply_in(parts, semiring) for block, parts in self.blocks(*x)]
        if not found:
            return semiring.zeros(self.out_shape, x)
        return tuple(self._joined(parts) for parts in zip(*found))

    def select(self, x: Tensor, ids: Tensor, value: bool = False) -> Selection:
        found = [block.select(part, ids, value) for block, (part, ids) in self.blocks(x, ids)]
        if not found:
            return super().select(x, ids, value)
        sizes = [size for size, _ in found if size is not None]
        return self._joined(sizes) if value else None, self._joined([ids for _, ids in found])


class SideBySide(BlockDiagonal):
    """``out[n] = maps[n](in[n])``, for maps of equal shapes: a block-diagonal Jacobian."""

    __slots__ = ("maps",)

    def __init__(self, maps: Sequence[Map]) -> None:
        self.maps = tuple(maps)
        first = self.maps[0]
        self.in_shape = (len(self.maps), *first.in_shape)
        self.out_shape = (len(self.maps), *first.out_shape)

    def structure(self) -> object:
        return type(self), tuple(map_.structure() for map_ in self.maps)

    @property
    def single_source(self) -> bool:  # type: ignore[override]
        """Whether all blocks are."""
        return all(m.single_source for m in self.maps)

    @property
    def single_target(self) -> bool:  # type: ignore[override]
        """Whether all blocks are."""
        return all(m.single_target for m in self.maps)

    @property
    def is_gather(self) -> bool:  # type: ignore[override]
        """Whether all blocks are."""
        return all(m.is_gather for m in self.maps)

    @property
    def is_diagonal(self) -> bool:  # type: ignore[override]
        """Whether all blocks are."""
        return all(m.is_diagonal for m in self.maps)

    def blocks(self, *x: Tensor) -> Iterator[tuple[Map, tuple[Tensor, ...]]]:
        return zip(self.maps, zip(*x))

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.stack(tuple(parts))

    def rows(self, at: Tensor) -> Rows:
        size = max(1, self.maps[0].outputs)
        block = at // size
        found = []
        for n in block.unique().tolist():  # type: ignore[no-untyped-call]
            here = (block == n).nonzero().reshape(-1)
            found.append((n, here, self.maps[n].rows(at[here] - n * size)))
        width = max((rows.source.shape[1] for _, _, rows in found), default=0)
        source = torch.full((len(at), width), -1, dtype=torch.int64, device=at.device)
        weight = torch.zeros(len(at), width, dtype=torch.float64, device=at.device)
        for n, here, rows in found:
            used, inside = slice(rows.source.shape[1]), rows.source + n * self.maps[n].inputs
            source[here, used] = torch.where(rows.source >= 0, inside, -1)
            weight[here, used] = rows.weight.expand(rows.source.shape).double()
        return Rows(source, weight)

    def may_be_nonzero(self, x: Tensor) -> Tensor | None:
        found = [m.may_be_nonzero(part) for m, part in zip(self.maps, x)]
        there = [each for each in found if each is not None]
        return self._joined(there) if len(there) == len(found) else None

    def max_source(self, x: Tensor) -> Tensor:
        return self._joined([m.max_source(part) for m, part in zip(self.maps, x)])

    def routes(self, count: Count, device: torch.device) -> Count:
        parts = count if isinstance(count, Tensor) else [count] * len(self.maps)
        found = [
            per_element(m.routes(part, device), m.out_shape, device)
            for m, part in zip(self.maps, parts)
        ]
        return self._joined([part.double() for part in found])

    @property
    def width(self) -> int:
        return max(m.width for m in self.maps)


def copied(map_: Map, count: int) -> Map:
    """The map of ``count`` independent inputs: ``out[n] = map(in[n])``."""
    found = map_.copies(count)
    return SideBySide([map_] * count) if found is None else found
