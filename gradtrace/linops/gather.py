"""``out[i] = in[src[i]]``, or zero: maps that only move elements."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor

from gradtrace.kernels.strides import is_dense
from gradtrace.linops.axes import Axis, reshaped, viewed
from gradtrace.linops.base import Best, Map, Rows, Selection, chosen, taken_at
from gradtrace.linops.indexing import located, picked
from gradtrace.semirings import Semiring, Value
from gradtrace.semirings.base import each, wide
from gradtrace.types import Shape


class Gather(Map):
    """``out[i] = in[src[i]]``, or ⊕'s zero where ``src[i]`` is -1; only then ``fills`` is true."""

    __slots__ = ()
    single_source = is_gather = unit_weights = True
    fills = False

    @property
    def full_rows(self) -> bool:  # type: ignore[override]
        """Whether every output element has a source."""
        return not self.fills

    @abstractmethod
    def sources(self, at: Tensor) -> Tensor:
        """``src`` at these output elements."""

    def best(self, x: Tensor, at: Tensor | None = None) -> Best:
        if at is None:
            return super().best(x)
        source = self.sources(at)
        if self.fills:
            return chosen(wide(taken_at(x.reshape(-1), source, 0.0)).abs(), source, None)
        return chosen(wide(picked(x, self.in_shape, source)).abs(), source, None)

    def select(self, x: Tensor, ids: Tensor, value: bool = False) -> Selection:
        size = wide(self.apply(x)).abs()
        return size if value else None, torch.where(size != 0, self.apply(ids), 0)

    def rows(self, at: Tensor) -> Rows:
        return Rows(self.sources(at).unsqueeze(1), torch.ones((), device=at.device))

    def max_source(self, x: Tensor) -> Tensor:
        return self.apply(x)


class Identity(Gather):
    """``out[i] = in[i]``: a reshape that keeps the order of elements."""

    __slots__ = ()
    single_target = True

    def __init__(self, in_shape: Shape, out_shape: Shape | None = None) -> None:
        self.in_shape = in_shape
        self.out_shape = in_shape if out_shape is None else out_shape

    def sources(self, at: Tensor) -> Tensor:
        return at

    def apply(self, x: Tensor) -> Tensor:
        return x if x.shape == self.out_shape else torch.reshape(x, self.out_shape)

    def apply_in(self, x: Value, semiring: Semiring) -> Value:
        return each(x, self.apply)

    def follow_axis(self, axis: Axis, device: torch.device) -> Axis | None:
        return reshaped(axis, self.in_shape, self.out_shape)

    def may_be_nonzero(self, x: Tensor) -> Tensor | None:
        return (x != 0).reshape(self.out_shape)

    def copies(self, count: int) -> Map | None:
        return Identity((count, *self.in_shape), (count, *self.out_shape))


class Index(Gather):
    """Elements moved by ``move``: the operation itself (a view, a gather, a padding).

    It must work on tensors of any dtype and write 0 where there is no source; applied to element
    numbers it gives ``src``. ``fills`` says whether it may write zeros at all, ``injective``
    whether it reads no element twice (None: determined on demand).
    """

    __slots__ = ("fills", "injective", "move")

    def __init__(
        self,
        move: Callable[[Tensor], Tensor],
        in_shape: Shape,
        out_shape: Shape,
        fills: bool = False,
        injective: bool | None = None,
    ) -> None:
        self.move = move
        self.in_shape = in_shape
        self.out_shape = out_shape
        self.fills = fills
        self.injective = injective

    def source(self, device: torch.device | None = None) -> Tensor:
        """``src``: for each output element the number of its input element, -1 for none."""
        numbers = torch.arange(1, self.inputs + 1, device=device).reshape(self.in_shape)
        return self.move(numbers).reshape(self.out_shape) - 1

    def _view(self, device: torch.device | None) -> Tensor | None:
        """A view of a contiguous tensor, whose strides say where elements are moved from; None if
        they are copied.
        """
        if self.fills or not self.inputs:
            return None
        numbers = torch.empty(self.in_shape, dtype=torch.uint8, device=device)
        moved = self.move(numbers)
        there = moved.data_ptr() and moved.untyped_storage().data_ptr() == numbers.data_ptr()
        return moved if there else None

    def follow_axis(self, axis: Axis, device: torch.device) -> Axis | None:
        moved = self._view(device)
        if moved is None:
            return None
        where = moved.shape, moved.stride(), int(moved.storage_offset())
        found = viewed(axis, self.in_shape, *where)
        return None if found is None else reshaped(found, tuple(moved.shape), self.out_shape)

    def sources(self, at: Tensor) -> Tensor:
        moved = self._view(at.device)
        if moved is not None:
            return located(at, moved.shape, moved.stride()) + int(moved.storage_offset())
        dtype = torch.int32 if self.inputs < 1 << 31 else torch.int64
        numbers = torch.arange(1, self.inputs + 1, dtype=dtype, device=at.device)
        return self.move(numbers.reshape(self.in_shape)).reshape(-1)[at].long() - 1

    @property
    def single_target(self) -> bool:  # type: ignore[override]
        """Whether no element is read twice; determined on first access if not given."""
        if self.injective is None:
            self.injective = self._is_injective()
        return self.injective

    def _is_injective(self) -> bool:
        if not self.fills and self.outputs > self.inputs:
            return False
        moved = self._view(None)
        if moved is not None and is_dense(moved):
            return True
        source = self.source().reshape(-1)
        taken = torch.zeros(self.inputs + 1, dtype=torch.bool, device=source.device)
        taken[source + 1] = True  # slot 0 collects the elements without a source
        return int(taken[1:].sum()) == int((source >= 0).sum())

    def apply(self, x: Tensor) -> Tensor:
        return self.move(x)

    def apply_in(self, x: Value, semiring: Semiring) -> Value:
        if not self.fills or not any(semiring.zero):
            return each(x, self._move)
        there = self.source(x[0].device) >= 0
        return tuple(
            torch.where(there, self._move(part), zero) for part, zero in zip(x, semiring.zero)
        )

    def _move(self, x: Tensor) -> Tensor:
        return self.move(x) if x.dtype is not torch.bool else self.move(x.byte()) != 0

    def copies(self, count: int) -> Map | None:
        out_shape = (count, *self.out_shape)
        known: dict[torch.device, Tensor] = {}
        move, shape, size, fills = self.move, self.in_shape, self.inputs, self.fills

        def each_moved(x: Tensor) -> Tensor:
            source = known.get(x.device)
            if source is None:
                numbers = torch.arange(1, size + 1, device=x.device).reshape(shape)
                known[x.device] = source = move(numbers).reshape(-1) - 1
            if not size:
                return x.new_zeros(out_shape)
            taken = x.reshape(count, size).index_select(1, source.clamp(min=0) if fills else source)
            if fills:
                taken = torch.where(source >= 0, taken, torch.zeros_like(taken[:1, :1]))
            return taken.reshape(out_shape)

        return Index(each_moved, (count, *self.in_shape), out_shape, fills, self.injective)


class Slot(Index):
    """Writes the input, in the shape ``cut``, to the output from ``start`` on along ``dim``; the
    rest is zero. A concatenation is a sum of slots.
    """

    __slots__ = ("cut", "dim", "start")

    def __init__(self, dim: int, start: int, cut: Shape, in_shape: Shape, out_shape: Shape) -> None:
        def put(x: Tensor) -> Tensor:  # a bound method would make a reference cycle with the map
            out = x.new_zeros(out_shape)
            out.narrow(dim, start, cut[dim]).copy_(x.reshape(cut))
            return out

        super().__init__(put, in_shape, out_shape, fills=True, injective=True)
        self.dim = dim
        self.start = start
        self.cut = cut

    def structure(self) -> object:
        return Slot, self.dim, self.start, self.cut, self.out_shape

    def copies(self, count: int) -> Map | None:
        shapes = ((count, *shape) for shape in (self.cut, self.in_shape, self.out_shape))
        return Slot(self.dim + 1, self.start, *shapes)

    def sources(self, at: Tensor) -> Tensor:
        size, inner = self.cut[self.dim], prod(self.cut[self.dim + 1 :])
        outer = at // inner
        along = outer % self.out_shape[self.dim] - self.start
        source = (outer // self.out_shape[self.dim] * size + along) * inner + at % inner
        return torch.where((along >= 0) & (along < size), source, -1)


class Cut(Index):
    """Takes the elements from ``start`` on along ``dim``, as many as the output has."""

    __slots__ = ("dim", "start")

    def __init__(self, dim: int, start: int, in_shape: Shape, out_shape: Shape) -> None:
        length = out_shape[dim]

        def narrow(x: Tensor) -> Tensor:
            return x.narrow(dim, start, length)

        super().__init__(narrow, in_shape, out_shape, injective=True)
        self.dim = dim
        self.start = start


def tiling(maps: Sequence[Map]) -> list[int] | None:
    """The order in which the inputs of these maps, concatenated, are the whole output; None if the
    maps are not slots that tile it without gaps or overlaps.
    """
    slots = [map_ for map_ in maps if isinstance(map_, Slot)]
    if len(slots) < len(maps) or len({(slot.dim, slot.out_shape) for slot in slots}) != 1:
        return None
    order, end = sorted(range(len(slots)), key=lambda n: slots[n].start), 0
    for n in order:
        if slots[n].start != end:
            return None
        end += slots[n].cut[slots[n].dim]
    return order if end == slots[0].out_shape[slots[0].dim] else None


def tiled(maps: Sequence[Map], parts: Sequence[Tensor], order: list[int]) -> Tensor:
    """The inputs of slots, concatenated in ``order``."""
    slots = [map_ for map_ in maps if isinstance(map_, Slot)]
    cuts = [(parts[n], slots[n].cut) for n in order]
    pieces = [part if part.shape == cut else part.reshape(cut) for part, cut in cuts]
    return torch.cat(pieces, slots[0].dim)


def nothing(in_shape: Shape, out_shape: Shape) -> Index:
    """The ``Index`` of which no element has a source: what no path leads to.

    >>> nothing((2,), (3,)).apply(torch.ones(2))
    tensor([0., 0., 0.])
    """
    return Index(partial(_zeros, out_shape), in_shape, out_shape, fills=True, injective=True)


def _zeros(shape: Shape, x: Tensor) -> Tensor:
    return x.new_zeros(shape)


def gather(source: Tensor, in_shape: Shape) -> Index:
    """The ``Index`` with explicit source numbers (-1: no source)."""
    out_shape = tuple(source.shape)
    if source.untyped_storage().nbytes() > source.nbytes:
        source = source.clone()  # a view would keep all of that memory

    def move(x: Tensor) -> Tensor:
        flat = x.reshape(-1)
        if not flat.numel():
            return x.new_zeros(out_shape)
        there = source >= 0
        zero = torch.zeros((), dtype=x.dtype, device=x.device)
        return torch.where(there, flat[source.clamp(min=0)], zero)

    return Index(move, in_shape, out_shape, fills=bool((source < 0).any()))
