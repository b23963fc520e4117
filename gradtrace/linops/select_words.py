"""How the compiled library is told which contributions a map selects among, for a plan that it
executes by itself (``kernels/cpu/run_plan.cpp``): words that say how operands lie in memory.

Only layouts are looked at; the addresses of tensors are given later, for each loss anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradtrace.kernels import tuning
from gradtrace.kernels.strides import reduction
from gradtrace.linops.base import Map
from gradtrace.linops.contraction import Contract
from gradtrace.linops.diag_low_rank import Normaliser, _line_layout, _line_order
from gradtrace.linops.indexing import strides_of
from gradtrace.linops.reduce import Reduce
from gradtrace.linops.scatter import Scatter
from gradtrace.semirings.einsum_plan import EinsumLayout, EinsumPlan
from gradtrace.types import Shape

ASK, CONTRACT, REDUCE, NORMALISE, SCATTER = range(5)
"""Which map, in ``run_plan.cpp``; by any other, and where operands cannot be read, the library asks
Python to select."""


class NotCovered(Exception):
    """The library cannot execute a plan; says why."""


class Operands(NamedTuple):
    """How words refer to tensors: ``x`` is the input; ``pointer`` gives the number of the address
    of an attribute of the map, ``view`` that of a tensor of a shape and strides at an address (-1:
    of provenance ids, which are contiguous).
    """

    x: Tensor
    x_pointer: int
    pointer: Callable[..., int]
    view: Callable[[int, Sequence[int], Sequence[int]], int]


def select_words(map_: Map, to: Operands) -> list[int]:
    """The words for a map; raises ``NotCovered`` for one that the library does not select by."""
    if not map_.inputs or not map_.outputs:
        raise NotCovered("an empty tensor")
    maker = _MAKERS.get(type(map_))
    if maker is None:
        raise NotCovered(f"{type(map_).__name__} is not among the maps that it knows")
    return maker(map_, to)


def _required(*tensors: Tensor) -> None:
    for x in tensors:
        if x.dtype is not torch.float32 or not x.is_cpu:
            raise NotCovered(f"operands of {x.dtype} on {x.device}")


class _Matrix(NamedTuple):
    """An operand as matrices: a view to be copied from first (-1: read in place), and strides."""

    copied: int
    steps: tuple[int, int, int]


def _matrix(
    like: Tensor,
    layout: EinsumLayout,
    view: Callable[[Tensor], int],
) -> _Matrix:
    given = torch.empty_strided(tuple(like.shape), like.stride(), device="meta")
    found = layout(given)
    if found is given or found._base is given:
        batch, row, column = found.stride()
        return _Matrix(-1, (batch, row, column))
    moved = given if layout.order is None else given.permute(layout.order)
    _, rows, columns = found.shape
    return _Matrix(view(moved), (rows * columns, columns, 1))


def _contract(map_: Map, to: Operands) -> list[int]:
    assert isinstance(map_, Contract)
    x, weight, how = to.x, map_.weight, map_.plan()
    _required(x, weight)
    alone, missing, right = how._right
    if alone:
        raise NotCovered(f"a contraction {map_.spec} whose weight is summed first")
    i, m, k, n = (how.size(part) for part in (how.batch, how.rows, how.inner, how.columns))
    if i * m * k * n > tuning.THREAD_PRODUCTS_PER_CALL:
        raise NotCovered("a contraction so large that it is cut, so that it can be interrupted")
    pointer = to.pointer(map_, "weight")
    wide = weight
    for size in missing:
        wide = wide.unsqueeze(-1).expand(*wide.shape, size)
    ids = torch.empty(x.shape, dtype=torch.int32, device="meta")

    def viewed(at: int) -> Callable[[Tensor], int]:
        return lambda t: to.view(at, t.shape, t.stride())

    left = how._left
    mine = _matrix(x, left, viewed(to.x_pointer))
    theirs = _matrix(wide, right, viewed(pointer))
    marks = _matrix(ids, left, viewed(-1))
    plain = to.view(pointer, weight.shape, weight.stride()) if theirs.copied < 0 else theirs.copied
    words = [mine.copied, plain, marks.copied, theirs.copied >= 0, how.turned]
    batch, inner, column = theirs.steps
    words += [*mine.steps, batch, column, inner, *marks.steps]
    words += [i, n, k, m] if how.turned else [i, m, k, n]
    return [CONTRACT, *words, _written(how, to)]


def _written(how: EinsumPlan, to: Operands) -> int:
    """The view that moves a result to the order of the output; -1 if it is in it."""
    shape, order = how.written
    if how.turned or order is None:
        return -1
    steps = strides_of(tuple(shape))
    return to.view(-1, [shape[d] for d in order], [steps[d] for d in order])


def _reduce(map_: Map, to: Operands) -> list[int]:
    assert isinstance(map_, Reduce)
    _required(to.x)
    shape, dims = map_.in_shape, map_.dims
    how, copied = reduction(shape, to.x.stride(), strides_of(shape), dims), (-1, -1)
    if not how.short:
        raise NotCovered("a sum over too many elements")
    levels = how.levels
    if levels is None:  # kept dimensions first
        order = [*(d for d in range(len(shape)) if d not in dims), *sorted(dims)]
        width = map_.width
        levels = ((1, 0, 0), (map_.inputs // width, width, width), (width, 1, 1), (1, 0, 0))
        copied = _turned(to.x, to.x_pointer, order, to), _turned(None, -1, order, to, shape)
    return [REDUCE, *copied, *[level[part] for part in range(3) for level in levels]]


def _turned(
    x: Tensor | None, pointer: int, order: Sequence[int], to: Operands, shape: Shape = ()
) -> int:
    """A view with dimensions in another order; of provenance ids if there is no tensor."""
    sizes, steps = (shape, strides_of(shape)) if x is None else (x.shape, x.stride())
    return to.view(pointer, [sizes[d] for d in order], [steps[d] for d in order])


def _normalise(map_: Map, to: Operands) -> list[int]:
    assert isinstance(map_, Normaliser)
    shape, rank = map_.in_shape, len(map_.left)
    parts = [map_.diagonal, to.x, *map_.left, *map_.right]
    _required(*parts)
    if rank not in (1, 2):
        raise NotCovered("a norm of another rank")
    marks = shape, strides_of(shape)
    tensors = [(tuple(part.shape), part.stride()) for part in parts]
    layout = _line_layout(shape, map_.dims, *tensors, marks)
    order, back, width = _line_order(shape, map_.dims)
    names = [("diagonal", None), None, *[("left", n) for n in range(rank)]]
    names += [("right", n) for n in range(rank)]
    words, lines = [NORMALISE, map_.inputs // width, width, rank], order or range(len(shape))
    for k, (name, part) in enumerate(zip(names, parts)):
        pointer = to.x_pointer if name is None else to.pointer(map_, *name)
        if layout is None:
            wide = part.expand(shape)
            words += [pointer, _turned(wide, pointer, lines, to), width, 1]
        else:
            words += [pointer, -1, *layout.steps[k]]
    if layout is None:
        words += [_turned(None, -1, lines, to, shape), width, 1]
    else:
        words += [-1, *layout.steps[-1]]
    if order is None or back is None:
        return [*words, -1]
    steps = strides_of(tuple(shape[d] for d in order))
    return [*words, to.view(-1, shape, [steps[d] for d in back])]


def _scatter(map_: Map, to: Operands) -> list[int]:
    assert isinstance(map_, Scatter)
    _required(to.x)
    return [SCATTER, to.pointer(map_, "target"), map_.outputs]


_MAKERS: dict[type, Callable[[Map, Operands], list[int]]] = {
    Contract: _contract,
    Reduce: _reduce,
    Normaliser: _normalise,
    Scatter: _scatter,
}
