"""Block-diagonal maps: independent inputs along a new first dimension, each with its own map."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gradtrace.linops.base import Best, Count, Map, Rows, chosen
from gradtrace.semirings import Semiring, Value


def copied(map_: Map, count: int) -> Map:
    """The map of ``count`` independent inputs: ``out[n] = map(in[n])``."""
    found = map_.copies(count)
    return SideBySide([map_] * count) if found is None else found


def narrowed(map_: Map, dim: int, index: Tensor) -> Map:
    """``out[n] = map.narrow(dim, index[n])(in[n])``, for the rows of an index. ``map.narrow`` must
    be defined for this dimension.
    """
    found = map_.narrow_each(dim, index)
    if found is not None:
        return found
    maps = [map_.narrow(dim, row) for row in index]
    return SideBySide([each for each in maps if each is not None])


class SideBySide(Map):
    """``out[n] = maps[n](in[n])``, for maps of equal shapes: a block-diagonal Jacobian."""

    __slots__ = ("maps",)

    def __init__(self, maps: Sequence[Map]) -> None:
        self.maps = tuple(maps)
        first = self.maps[0]
        self.in_shape = (len(self.maps), *first.in_shape)
        self.out_shape = (len(self.maps), *first.out_shape)

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

    def apply(self, x: Tensor) -> Tensor:
        return torch.stack([m.apply(part) for m, part in zip(self.maps, x)])

    def apply_in(self, x: Value, semiring: Semiring) -> Value:
        found = [
            m.apply_in(tuple(part[n] for part in x), semiring) for n, m in enumerate(self.maps)
        ]
        return tuple(torch.stack(parts) for parts in zip(*found))

    def best(self, x: Tensor, at: Tensor | None = None) -> Best:
        if at is not None:
            return self._best_at(x, at)
        found = [m.best(part) for m, part in zip(self.maps, x)]
        source = torch.stack([self._to_whole(n, best.source) for n, best in enumerate(found)])
        return Best(torch.stack([best.value for best in found]), source)

    def _best_at(self, x: Tensor, at: Tensor) -> Best:
        number = at.reshape(-1)
        value, source = None, torch.full_like(number, -1)
        for n, here, inside in self._blocks(number):
            best = self.maps[n].best(x[n], inside)
            if value is None:
                value = best.value.new_zeros(len(number))
            value[here], source[here] = best.value, self._to_whole(n, best.source)
        if value is None:
            return self.largest(x, at)
        return chosen(value.reshape(at.shape), source.reshape(at.shape), None)

    def select(self, x: Tensor, marks: Tensor, value: bool = False) -> tuple[Tensor | None, Tensor]:
        found = [m.select(part, some, value) for m, part, some in zip(self.maps, x, marks)]
        largest = [size for size, _ in found if size is not None]
        return torch.stack(largest) if value else None, torch.stack([some for _, some in found])

    def rows(self, at: Tensor) -> Rows:
        blocks = [(n, here, self.maps[n].rows(inside)) for n, here, inside in self._blocks(at)]
        width = max((rows.source.shape[1] for _, _, rows in blocks), default=0)
        source = torch.full((len(at), width), -1, dtype=torch.int64, device=at.device)
        weight = torch.zeros(len(at), width, dtype=torch.float64, device=at.device)
        for n, here, rows in blocks:
            used = slice(rows.source.shape[1])
            source[here, used] = self._to_whole(n, rows.source)
            weight[here, used] = rows.weight.expand(rows.source.shape).double()
        return Rows(source, weight)

    def entry(self, at: Tensor, source: Tensor) -> Tensor:
        found = torch.zeros(at.shape, dtype=torch.float64, device=at.device)
        for n, here, inside in self._blocks(at):
            found[here] = self.maps[n].entry(inside, source[here] - n * self.maps[n].inputs)
        return found

    def weighed(self, x: Tensor) -> Tensor:
        return torch.stack([m.weighed(part) for m, part in zip(self.maps, x)])

    def may_be_nonzero(self, x: Tensor) -> Tensor | None:
        found = [m.may_be_nonzero(part) for m, part in zip(self.maps, x)]
        there = [each for each in found if each is not None]
        return torch.stack(there) if len(there) == len(found) else None

    def max_source(self, x: Tensor) -> Tensor:
        return torch.stack([m.max_source(part) for m, part in zip(self.maps, x)])

    def routes(self, count: Count) -> Count:
        parts = count if isinstance(count, Tensor) else [count] * len(self.maps)
        found = [m.routes(part) for m, part in zip(self.maps, parts)]
        whole = [
            part if isinstance(part, Tensor) else torch.full(m.out_shape, part, device="cpu")
            for m, part in zip(self.maps, found)
        ]
        return torch.stack([part.double() for part in whole])

    @property
    def width(self) -> int:
        return max(m.width for m in self.maps)

    def _blocks(self, at: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Output elements by block: (block, positions in ``at``, numbers within the block)."""
        size = max(1, self.maps[0].outputs)
        block = at // size
        for n in block.unique().tolist():  # type: ignore[no-untyped-call]
            here = (block == n).nonzero().reshape(-1)
            yield n, here, at[here] - n * size

    def _to_whole(self, n: int, source: Tensor) -> Tensor:
        """Input numbers within block n, as numbers in the whole input; -1 stays -1."""
        return torch.where(source >= 0, source + n * self.maps[n].inputs, -1)
