"""``out = ⊕ₖ w[..k..] · in[..k..]``: matrix products, batched or not, in any layout."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from string import ascii_letters
from typing import NamedTuple

import torch
from torch import Tensor

from gradtrace.kernels import backend_of
from gradtrace.kernels.operands import MatrixLayout, Steps, TensorLines
from gradtrace.kernels.strides import flat
from gradtrace.linops import tuning
from gradtrace.linops.axes import MIXED, Axis
from gradtrace.linops.base import Best, Count, Map, Rows, Selection, any_nonzero, chosen
from gradtrace.linops.indexing import each_at, located, offsets, resized
from gradtrace.pytorch.plain_tensors import plain
from gradtrace.semirings import Semiring, Value
from gradtrace.semirings.base import cast, wide
from gradtrace.semirings.einsum_plan import EinsumPlan, plan
from gradtrace.types import Shape


class Contract(Map):
    """An einsum of the cotangent (first operand) with a weight (second).

    ``Contract("mk,kn->mn", w, (2, 3))`` is ``out[m, n] = ⊕ₖ in[m, k] · w[k, n]``. Every letter of
    the input is in the weight or in the result; the sum runs over letters the result lacks.

    ``crossed``: the gradient that it hands back lies in memory with its last two dimensions
    exchanged, as that by ``w.t()`` does; provenance ids are written so too, to be read beside it.
    """

    __slots__ = ("crossed", "each", "spec", "weight")
    weights = ("weight",)

    def __init__(
        self, spec: str, weight: Tensor, in_shape: Shape, out_shape: Shape, crossed: bool = False
    ) -> None:
        self.spec = spec
        self.crossed = crossed
        self.each = ""  # the einsum with a weight for each copy, if that saves to copy the input
        self.weight = plain(weight)
        self.in_shape = in_shape
        self.out_shape = out_shape

    def structure(self) -> object:
        return Contract, self.spec, self.in_shape, self.weight.shape, self.crossed

    def plan(self) -> EinsumPlan:
        """The contraction as a batched matrix product."""
        return plan(self.spec, self.in_shape, tuple(self.weight.shape))

    def contracted(self) -> set[int]:
        """The dimensions of the input that the sum runs over."""
        how = self.plan()
        return {d for d, letter in enumerate(how.x) if letter not in how.out}

    def produced(self) -> set[int]:
        """The dimensions of the output that come from the weight alone."""
        how = self.plan()
        return {d for d, letter in enumerate(how.out) if letter not in how.x}

    def apply(self, x: Tensor) -> Tensor:
        weight = cast(self.weight, x.dtype)
        if self.each and backend_of(x).host and x.numel() >= tuning.BATCHED_MIN_ELEMENTS:
            return torch.einsum(self.each, x, weight.expand(len(x), *weight.shape))
        return torch.einsum(self.spec, x, weight)

    def apply_in(self, x: Value, semiring: Semiring) -> Value:
        return semiring.contract(self.spec, x, self.weight)

    def best(self, x: Tensor, at: Tensor | None = None) -> Best:
        if at is None or 2 * at.numel() >= self.outputs or not self.inputs:
            return chosen(*super().best(x), at)
        return self._best_at(x, at)

    def _best_at(self, x: Tensor, at: Tensor) -> Best:
        """``best`` of some output elements: one dot product for each."""
        how, number = self.plan(), at.reshape(-1)
        left, right = wide(how.left(x)), wide(how.right(self.weight))
        steps, (b, m, k), (c, j, n) = how.element_strides, left.stride(), right.stride()
        rows = located(number, self.out_shape, _combined(steps.batch, b, steps.row, m))
        columns = located(number, self.out_shape, _combined(steps.batch, c, steps.column, n))
        value, place = backend_of(left).contract_lines(
            TensorLines(flat(left), rows, k), TensorLines(flat(right), columns, j), left.shape[2]
        )
        source = located(number, self.out_shape, steps.first) + located(place, *steps.along)
        return chosen(value.reshape(at.shape), source.reshape(at.shape), None)

    def select(self, x: Tensor, ids: Tensor, value: bool = False) -> Selection:
        if self.crossed:
            last = len(self.out_shape) - 1
            mirrored = self._permuted([*range(last - 1), last, last - 1])
            most, those = mirrored.select(x, ids, value)
            return None if most is None else most.mT, those.mT
        there = self._select_strided(x, ids, value)
        if there is not None:
            return there
        how = self.plan()
        backend = backend_of(x)
        left, right, ids = how.left(x), how.right(self.weight), how.left(ids)
        if how.turned:  # compute the transposed product, so that the result is contiguous
            found = backend.contract(right.mT, left.mT, value=value, ids=ids.mT, of_b=True)
        else:
            found = backend.contract(left, right, value=value, ids=ids)
        assert found.ids is not None
        shape = self.out_shape
        if how.turned:
            largest = None if found.value is None else found.value.reshape(shape)
            return largest, found.ids.reshape(shape)
        largest = None if found.value is None else how.back(found.value)
        return largest, how.back(found.ids)

    def _permuted(self, order: Sequence[int]) -> Contract:
        """The contraction with the dimensions of its result in another order."""
        terms, out = self.spec.split("->")
        spec = f"{terms}->{''.join(out[d] for d in order)}"
        return Contract(spec, self.weight, self.in_shape, tuple(self.out_shape[d] for d in order))

    def _select_strided(self, x: Tensor, ids: Tensor, value: bool) -> Selection | None:
        """``select`` that reads the operands with their strides, without copies; None if these
        cannot be read as matrices.
        """
        weight = self.weight
        layout = _operand_order(
            self.spec, self.in_shape, weight.shape, x.stride(), weight.stride(), ids.stride()
        )
        if layout is None:
            return None
        a, b = (weight, x) if layout.how.of_b else (x, weight)
        largest, _, chosen = backend_of(x).contract_strided(
            a, b, ids, layout.how, layout.shape, value
        )
        assert chosen is not None
        if layout.order is None:
            return largest, chosen
        return None if largest is None else largest.permute(layout.order), chosen.permute(
            layout.order
        )

    def carry_some(
        self, x: Tensor, ids: Tensor, order: Sequence[int], first: int, last: int
    ) -> Tensor:
        """Elements ``first`` to ``last`` of ``select(x, ids)[1].permute(order)``, flattened: part
        of the selected provenance ids. Only the slices along the first of these dimensions that
        hold them are computed.
        """
        dim = order[0]
        row = self.outputs // self.out_shape[dim]
        rows = slice(first // row, -(-last // row))
        how = self.plan()

        def sliced(t: Tensor, letters: str) -> Tensor:
            d = letters.find(how.out[dim])
            return t if d < 0 else t.narrow(d, rows.start, rows.stop - rows.start)

        x, ids, weight = sliced(x, how.x), sliced(ids, how.x), sliced(self.weight, how.w)
        shape = resized(self.out_shape, dim, rows.stop - rows.start)
        here = Contract(self.spec, weight, tuple(x.shape), shape)._permuted(order)
        found = here.select(x, ids)[1].reshape(-1)
        return found[first - rows.start * row : last - rows.start * row]

    def rows(self, at: Tensor) -> Rows:
        how = self.plan()
        steps = how.element_strides
        batch, column, base = (
            located(at, self.out_shape, step) for step in (steps.batch, steps.column, steps.first)
        )
        weight = how.right(self.weight)[batch, :, column]  # of (b, k, n)
        return Rows(base.unsqueeze(1) + offsets(*steps.along, at.device), weight)

    def entry(self, at: Tensor, source: Tensor) -> Tensor:
        how = self.plan()
        right, steps = how.right(self.weight), how.element_strides  # (b, k, n)
        b, k, n = right.stride()
        columns = located(at, self.out_shape, _combined(steps.batch, b, steps.column, n))
        inner = located(source, self.in_shape, [step * k for step in steps.inner])
        return flat(right).index_select(0, columns + inner).double()

    @property
    def width(self) -> int:
        how = self.plan()
        return how.size(how.inner)

    def may_be_nonzero(self, x: Tensor) -> Tensor | None:
        how = self.plan()
        rows, columns = any_nonzero(how.left(x), [2]), any_nonzero(how.right(self.weight), [1])
        return how.back(rows.unsqueeze(2) & columns.unsqueeze(1))

    def reads_nonzero(self, x: Tensor, at: Tensor) -> Tensor | None:
        if backend_of(x).synchronises:
            return None
        how = self.plan()
        left, steps = how.left(x), how.element_strides  # (b, m, k)
        place = _combined(steps.batch, left.shape[1], steps.row, 1)
        lines, which = located(at, self.out_shape, place).unique(return_inverse=True)  # type: ignore[no-untyped-call]
        return any_nonzero(left[lines // left.shape[1], lines % left.shape[1]], [1])[which]

    def copies(self, count: int) -> Map | None:
        return self._batched(self.weight, False, (count, *self.in_shape))

    def sums_over(self, dim: int) -> bool:
        return dim in self.contracted()

    def narrow(self, dim: int, index: Tensor) -> Map:
        how, shape = self.plan(), resized(self.in_shape, dim, index.shape[1])
        at = how.w.find(how.x[dim])
        weight = self.weight if at < 0 else each_at(self.weight, at, index)
        return self._batched(weight, at >= 0, (len(index), *shape))

    def _batched(self, weight: Tensor, weight_too: bool, in_shape: Shape) -> Contract:
        """The contraction with a new first dimension of the input, the output and, if it has one,
        the weight.
        """
        how = self.plan()
        letter = next(c for c in ascii_letters if c not in self.spec)
        specs = [f"{letter}{how.x},{mine}{how.w}->{letter}{how.out}" for mine in ("", letter)]
        found = Contract(specs[weight_too], weight, in_shape, (in_shape[0], *self.out_shape))
        # as one matrix, its rows would have to be moved past what is contracted
        if not weight_too and how.rows and not how.x.endswith(how.inner):
            found.each = specs[1]
        return found

    def max_source(self, x: Tensor) -> Tensor:
        how = self.plan()
        left = how.left(x)  # (b, m, k)
        most = left.amax(2) if left.shape[2] and left.numel() else left.new_zeros(left.shape[:2])
        return how.back(most.unsqueeze(2).expand(*most.shape, how.size(how.columns)))

    def follow_axis(self, axis: Axis, device: torch.device) -> Axis | None:
        how = self.plan()
        dim = how.out.find(how.x[axis.dim])
        return MIXED if dim < 0 else axis._replace(dim=dim)

    def routes(self, count: Count, device: torch.device) -> Count:
        if not isinstance(count, Tensor):
            how = self.plan()
            return count * how.size("".join({*how.x, *how.w} - {*how.out}))
        ones = torch.ones((), dtype=torch.float64, device=count.device).expand(self.weight.shape)
        return torch.einsum(self.spec, count, ones)


class _OperandOrder(NamedTuple):
    """The operands' strides as batched matrices, the shape in which the result is written, and the
    permutation to the wanted order of dimensions (None: already in that order).
    """

    how: MatrixLayout
    shape: Shape
    order: list[int] | None


def _combined(first: Shape, by: int, second: Shape, times: int) -> Shape:
    """The strides that lead to ``by`` times where the first ones do plus ``times`` the second."""
    return tuple([a * by + b * times for a, b in zip(first, second)])


@lru_cache(maxsize=4096)
def _operand_order(
    spec: str, x: Shape, w: Shape, of_x: Shape, of_w: Shape, of_marks: Shape
) -> _OperandOrder | None:
    """The layout of operands with these shapes and strides; None if one of them cannot be viewed as
    batched matrices without a copy.
    """
    how = plan(spec, x, w)
    found: list[Steps] = []
    for layout, shape, strides in (
        (how.left, x, of_x),
        (how.right, w, of_w),
        (how.left, x, of_marks),
    ):
        given = torch.empty_strided(shape, strides, device="meta")
        matrices = layout(given)
        if matrices is not given and matrices._base is not given:
            return None
        batch, row, column = matrices.stride()
        found.append((batch, row, column))
    left, right, ids = found
    i, k = how.size(how.batch), how.size(how.inner)
    m, n = how.size(how.rows), how.size(how.columns)
    if how.turned:
        (batch, inner, row), other = right, left
        shape = tuple(how.sizes[c] for c in how.out)
        return _OperandOrder(
            MatrixLayout((i, n, m), k, (batch, row, inner), other, ids, True), shape, None
        )
    batch, inner, column = right
    written, order = how.written
    matrix_layout = MatrixLayout((i, m, n), k, left, (batch, column, inner), ids, False)
    return _OperandOrder(matrix_layout, tuple(written), order)
