"""``J → Jᵀ``: the transpose of every kind of map, for passes that run from the leaves to the loss.

``transposed`` gives a map of a known kind wherever the kinds are closed under it (a product for a
product, a sum for an expansion); of other maps it is ``Transposed``, which reads the rows of the
original. ``column_sums`` is the transpose applied to ones, without the product.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache, singledispatch

import torch
from torch import Tensor

from gradtrace.kernels.precision import exact
from gradtrace.linops.base import Map, Rows, _masked
from gradtrace.linops.contraction import Contract
from gradtrace.linops.convolution import Convolve
from gradtrace.linops.cumsum import Scan
from gradtrace.linops.dense import Dense
from gradtrace.linops.diag_low_rank import Normaliser
from gradtrace.linops.elementwise import Scale
from gradtrace.linops.gather import Cut, Identity, Index, Slot
from gradtrace.linops.reduce import Reduce
from gradtrace.linops.scatter import Scatter
from gradtrace.linops.side_by_side import SideBySide
from gradtrace.linops.sparse import Sparse
from gradtrace.semirings import SUM, Semiring, Value
from gradtrace.semirings.additive import Additive
from gradtrace.semirings.base import each
from gradtrace.types import Shape

aten = torch.ops.aten


class Transposed(Map):
    """``out[j] = ⊕ᵢ lift(J[i, j]) ⊗ in[i]``, by the rows of J, in chunks."""

    __slots__ = ("_entries", "map")

    def __init__(self, map_: Map) -> None:
        self.map = map_
        self.in_shape, self.out_shape = map_.out_shape, map_.in_shape
        self._entries: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def single_source(self) -> bool:  # type: ignore[override]
        """Whether every input of the original has at most one output."""
        return self.map.single_target

    @property
    def single_target(self) -> bool:  # type: ignore[override]
        """Whether every output of the original has at most one input."""
        return self.map.single_source

    def apply(self, x: Tensor) -> Tensor:
        return self.apply_in((x,), SUM)[0]

    def apply_in(self, x: Value, semiring: Semiring) -> Value:
        if not isinstance(semiring, Additive):
            return self.generic(x, semiring)
        out = semiring.zeros((self.outputs,), x)
        flat = each(x, lambda part: part.reshape(-1))
        for at in self.map._chunks(x[0].device, None):
            source, weight = _masked(self.map.rows(at))
            taken = tuple(part[at].unsqueeze(1) for part in flat)
            product = semiring.times(semiring.weigh(weight.expand(source.shape)), taken)
            added = semiring.scatter(each(product, torch.flatten), source.flatten(), self.outputs)
            out = semiring.plus(out, tuple(a.to(o.dtype) for a, o in zip(added, out)))
        return each(out, lambda part: part.reshape(self.out_shape))

    def entries(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """All entries by column of J: where each column's begin, their rows, and their weights."""
        if self._entries is None:
            columns, rows, weights = [], [], []
            for at in self.map._chunks(device, None):
                source, weight = self.map.rows(at)
                there = source >= 0
                columns.append(source[there])
                rows.append(at.unsqueeze(1).expand(source.shape)[there])
                weights.append(weight.expand(source.shape)[there].double())
            none = torch.zeros(0, dtype=torch.int64, device=device)
            column, order = torch.cat([none, *columns]).sort(stable=True)
            count = torch.bincount(column, minlength=self.outputs)
            starts = torch.cat([none.new_zeros(1), count.cumsum(0)])
            row, weight = torch.cat([none, *rows]), torch.cat([none.double(), *weights])
            self._entries = starts, row[order], weight[order]
        return self._entries

    def rows(self, at: Tensor) -> Rows:
        starts, row, weight = self.entries(at.device)
        first, count = starts[at], starts[at + 1] - starts[at]
        number = torch.arange(int(count.max()) if len(at) else 0, device=at.device)
        there = number < count.unsqueeze(1)
        entry = torch.where(there, first.unsqueeze(1) + number, 0)
        if not len(row):
            return Rows(entry, weight.new_zeros(()))
        return Rows(torch.where(there, row[entry], -1), weight[entry])

    def max_source(self, x: Tensor) -> Tensor:
        starts, row, _ = self.entries(x.device)
        numbers = torch.arange(self.outputs, device=x.device)
        column = numbers.repeat_interleave(starts.diff(), output_size=len(row))
        out = x.new_zeros(self.outputs)
        return out.scatter_reduce(0, column, x.reshape(-1)[row], "amax").reshape(self.out_shape)


class ForwardConvolution(Transposed):
    """The transpose of ``Convolve``: the convolution itself, as a function of its input or of its
    kernel, with the other fixed.
    """

    __slots__ = ()
    map: Convolve

    def apply_in(self, x: Value, semiring: Semiring) -> Value:
        pieces = semiring.linear(self.map.other)
        floating = all(part.is_floating_point() for part in x)
        if pieces is None or not floating or not (self.inputs and self.outputs):
            return super().apply_in(x, semiring)
        out: dict[int, Tensor] = {}
        for i, o, weight in pieces:
            with nullcontext() if semiring == SUM else exact(x[i]):
                part = self._convolved(x[i], weight.to(x[i].dtype))
            out[o] = out[o] + part if o in out else part
        return tuple(out[o] for o in sorted(out))

    def _convolved(self, x: Tensor, other: Tensor) -> Tensor:
        w = self.map.windows
        image, kernel = (other, x) if self.map.to_kernel else (x, other)
        geometry = (w.stride, w.padding, w.dilation, w.transposed, w.output_padding, w.groups)
        found: Tensor = aten.convolution(image, kernel, None, *geometry)
        return found.reshape(self.out_shape)


class Spread(Scatter):
    """The transpose of an ``Index``. Where that is a view, elements are written through it."""

    __slots__ = ("_target", "index")

    def __init__(self, index: Index) -> None:
        self.index = index
        self.in_shape, self.out_shape = index.out_shape, index.in_shape
        self._target: Tensor | None = None

    @property
    def target(self) -> Tensor:  # type: ignore[override]
        """For each input element the number of its output element, -1 for none."""
        return self._targets(None)

    def _targets(self, device: torch.device | None) -> Tensor:
        """The target, found on this device: an index may hold tensors that are there."""
        if self._target is None:
            self._target = self.index.source(device)
        return self._target

    def apply(self, x: Tensor) -> Tensor:
        return self.apply_in((x,), SUM)[0]

    def apply_in(self, x: Value, semiring: Semiring) -> Value:
        view = self._view(x[0].device)
        if view is None:
            flat = each(x, lambda part: part.reshape(-1))
            target = self._targets(x[0].device).reshape(-1)
            found = semiring.scatter(flat, target, self.outputs)
            return each(found, lambda part: part.reshape(self.out_shape))
        sizes, strides, offset = view
        shaped = each(x, lambda part: part.reshape(sizes))
        repeated = [d for d, step in enumerate(strides) if not step and sizes[d] > 1]
        if self.inputs == self.outputs and not repeated:  # a permutation of dimensions
            order = sorted(range(len(sizes)), key=lambda d: -strides[d])
            return each(shaped, lambda part: part.permute(order).reshape(self.out_shape))
        thin = tuple(1 if d in repeated else size for d, size in enumerate(sizes))
        out = semiring.zeros(self.out_shape, x)
        for whole, part in zip(out, semiring.reduce(shaped, repeated)):
            whole.as_strided(thin, strides, offset).copy_(part)
        return out

    def _view(self, device: torch.device) -> tuple[Shape, Shape, int] | None:
        """The sizes, strides and offset of the view that the index makes of a contiguous tensor;
        None if it makes a copy, or if elements overlap other than by repetition.
        """
        index = self.index
        if index.fills or not self.inputs or not self.outputs:
            return None
        base = torch.empty(index.in_shape, dtype=torch.uint8, device=device)
        moved = index.move(base)
        if moved.untyped_storage().data_ptr() != base.untyped_storage().data_ptr():
            return None
        extent = 1
        for stride, size in sorted(zip(moved.stride(), moved.shape)):
            if stride and size > 1:
                if stride < extent:
                    return None
                extent = stride * (size - 1) + extent
        return tuple(moved.shape), tuple(moved.stride()), int(moved.storage_offset())


@singledispatch
def transposed(map_: Map) -> Map:
    """The map with the transposed Jacobian.

    >>> product = Contract("mk,kn->mn", torch.ones(3, 4), (2, 3), (2, 4))
    >>> transposed(product), transposed(product).spec
    (Contract([2, 4] -> [2, 3]), 'mn,kn->mk')
    """
    return Transposed(map_)


@transposed.register
def _(map_: Scale) -> Map:
    return map_


@transposed.register
def _(map_: Identity) -> Map:
    return Identity(map_.out_shape, map_.in_shape)


@transposed.register
def _(map_: Index) -> Map:
    return Spread(map_)


@transposed.register
def _(map_: Slot) -> Map:
    dim, start, size, shape = map_.dim, map_.start, map_.cut[map_.dim], map_.in_shape
    if map_.cut == shape:
        return Cut(dim, start, map_.out_shape, shape)

    def cut(x: Tensor) -> Tensor:
        return x.narrow(dim, start, size).reshape(shape)

    return Index(cut, map_.out_shape, shape, injective=True)


@transposed.register
def _(map_: Cut) -> Map:
    return Slot(map_.dim, map_.start, map_.out_shape, map_.out_shape, map_.in_shape)


@transposed.register
def _(map_: Spread) -> Map:
    return map_.index


@transposed.register
def _(map_: Scatter) -> Map:
    target, shape = map_.target, map_.in_shape

    def take(x: Tensor) -> Tensor:
        if not x.numel():
            return x.new_zeros(shape)
        return torch.where(target >= 0, x.reshape(-1)[target.clamp(min=0)], x.new_zeros(()))

    return Index(take, map_.out_shape, shape, fills=True)


@transposed.register
def _(map_: Reduce) -> Map:
    kept, shape = map_._kept_shape(), map_.in_shape
    return Index(lambda x: x.reshape(kept).expand(shape), map_.out_shape, shape)


@transposed.register
def _(map_: Contract) -> Map:
    return Contract(_turned(map_.spec), map_.weight, map_.out_shape, map_.in_shape)


@lru_cache(maxsize=4096)
def _turned(spec: str) -> str:
    """The einsum of the transpose."""
    x, rest = spec.split(",")
    weight, out = rest.split("->")
    return f"{out},{weight}->{x}"


@transposed.register
def _(map_: Convolve) -> Map:
    return ForwardConvolution(map_)


@transposed.register
def _(map_: Normaliser) -> Map:
    pairs = list(zip(map_.right, map_.left))
    return Normaliser(map_.diagonal, pairs, map_.dims, map_.in_shape)


@transposed.register
def _(map_: Scan) -> Map:
    return Scan(map_.dim, map_.in_shape, not map_.reverse)


@transposed.register
def _(map_: Dense) -> Map:
    return Dense(map_.matrix.t(), map_.out_shape, map_.in_shape)


@transposed.register
def _(map_: Sparse) -> Map:
    columns, rows = map_._sizes
    row = map_._row()
    column = map_.source + row // max(rows, 1) * columns
    entries = (column, row, map_.weight)
    return Sparse.of(entries, map_.out_shape, map_.in_shape, map_.around)


@transposed.register
def _(map_: SideBySide) -> Map:
    return SideBySide([transposed(each_map) for each_map in map_.maps])


@transposed.register
def _(map_: Transposed) -> Map:
    return map_.map


# Applied to ones ---------------------------------------------------------------------------------


def is_permutation(map_: Map) -> bool:
    """Whether the map moves every element to a place of its own, and fills every place."""
    if not map_.is_gather or map_.inputs != map_.outputs:
        return False
    return not getattr(map_, "fills", False) and map_.single_target


def column_sums(map_: Map, semiring: Semiring, ones: Value) -> Value:
    """``⊕ᵢ lift(J[i, j])`` for each input element j: the transpose applied to ``ones``, which is
    the semiring's one (0-d tensors). Of a matrix product only the weight is summed.
    """
    if isinstance(map_, Reduce) or is_permutation(map_):
        return each(ones, lambda one: one.expand(map_.in_shape))
    if isinstance(map_, Contract):
        return _contract_sums(map_, semiring, ones)
    if isinstance(map_, Scatter) and not isinstance(map_, Spread):
        there = map_.target >= 0
        zeros = semiring.zeros((), ones)
        return tuple(torch.where(there, one, zero) for one, zero in zip(ones, zeros))
    whole = each(ones, lambda one: one.expand(map_.out_shape))
    return transposed(map_).apply_in(whole, semiring)


def _contract_sums(map_: Contract, semiring: Semiring, ones: Value) -> Value:
    """Sums the weight over the letters that the input lacks, and repeats it along the others."""
    x, rest = map_.spec.split(",")
    w, _ = rest.split("->")
    weight, used = map_.weight, w
    alone = [d for d, c in enumerate(w) if c not in x and c not in rest.split("->")[1]]
    if alone:  # a pair of elements has one weight
        weight = weight.sum(alone)
        used = "".join(c for d, c in enumerate(w) if d not in alone)
    over = [d for d, c in enumerate(used) if c not in x]
    found = semiring.weight_sums(weight, over)
    if found[0].dtype is not ones[0].dtype:
        found = semiring.times(found, ones)
    kept = [d for d in range(len(used)) if d not in over]
    letters = "".join(used[d] for d in kept)
    order = sorted(range(len(kept)), key=lambda n: x.index(letters[n]))
    shape = [map_.in_shape[n] if c in letters else 1 for n, c in enumerate(x)]

    def shaped(part: Tensor) -> Tensor:
        part = part.reshape([part.shape[d] for d in kept]).permute(order)
        return part.reshape(shape).expand(map_.in_shape)

    return each(found, shaped)
