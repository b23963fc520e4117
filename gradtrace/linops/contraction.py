"""``out = ⊕ₖ w[..k..] · in[..k..]``: matrix products, batched or not, in any layout."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from string import ascii_letters
from typing import NamedTuple

import torch
from torch import Tensor

from gradtrace.kernels import contraction, cuda_contraction, max_contraction, winner
from gradtrace.kernels.cuda_contraction import MatrixLayout
from gradtrace.kernels.cuda_tiling import Steps
from gradtrace.kernels.rows import TensorLines, flat, products
from gradtrace.linops.base import Best, Count, Map, Rows, chosen, multi_index, offsets, resized
from gradtrace.linops.indexing import each_at, located
from gradtrace.pytorch.plain_tensors import plain
from gradtrace.semirings import Semiring, Value
from gradtrace.semirings.base import cast, wide
from gradtrace.semirings.einsum_plan import EinsumPlan, plan
from gradtrace.types import Shape


class Contract(Map):
    """An einsum of the cotangent (first operand) with a weight (second).

    ``Contract("mk,kn->mn", w, (2, 3))`` is ``out[m, n] = ⊕ₖ in[m, k] · w[k, n]``. Every letter of
    the input is in the weight or in the result; the sum runs over letters the result lacks.
    """

    __slots__ = ("spec", "weight")

    def __init__(self, spec: str, weight: Tensor, in_shape: Shape, out_shape: Shape) -> None:
        self.spec = spec
        self.weight = plain(weight)
        self.in_shape = in_shape
        self.out_shape = out_shape

    def sizes(self) -> dict[str, int]:
        """The size of each index letter."""
        x, rest = self.spec.split(",")
        w, _ = rest.split("->")
        return dict(zip(x, self.in_shape)) | dict(zip(w, self.weight.shape))

    def letters(self) -> tuple[str, str, str]:
        """The index letters of the input, of the weight and of the output."""
        x, rest = self.spec.split(",")
        w, out = rest.split("->")
        return x, w, out

    def contracted(self) -> set[int]:
        """The dimensions of the input that the sum runs over."""
        x, _, out = self.letters()
        return {d for d, letter in enumerate(x) if letter not in out}

    def produced(self) -> set[int]:
        """The dimensions of the output that come from the weight alone."""
        x, _, out = self.letters()
        return {d for d, letter in enumerate(out) if letter not in x}

    def apply(self, x: Tensor) -> Tensor:
        return torch.einsum(self.spec, x, cast(self.weight, x.dtype))

    def apply_in(self, x: Value, semiring: Semiring) -> Value:
        return semiring.contract(self.spec, x, self.weight)

    def best(self, x: Tensor, at: Tensor | None = None) -> Best:
        if at is not None and 2 * at.numel() < self.outputs:
            return self._best_at(x, at)
        how = self.plan()
        value, place = winner(how.left(x), how.right(self.weight))
        value, place = how.back(value), how.back(place)
        base, over, _ = self._source_offsets(torch.arange(self.outputs, device=x.device))
        source = base.reshape(self.out_shape)
        return chosen(value, source + over[place] if len(over) else place, at)

    def _best_at(self, x: Tensor, at: Tensor) -> Best:
        """``best`` of some output elements: one dot product for each."""
        how, number = self.plan(), at.reshape(-1)
        left, right = wide(how.left(x)), wide(how.right(self.weight))
        strides = _element_strides(self.spec, self.in_shape, tuple(self.weight.shape))
        batch, row, column, base = (
            located(number, self.out_shape, stride) for stride in strides.out
        )
        value, place = products(
            TensorLines(flat(left), batch * left.stride(0) + row * left.stride(1), left.stride(2)),
            TensorLines(
                flat(right), batch * right.stride(0) + column * right.stride(2), right.stride(1)
            ),
            left.shape[2],
        )
        source = base + located(place, *strides.along)
        return chosen(value.reshape(at.shape), source.reshape(at.shape), None)

    def select(self, x: Tensor, marks: Tensor, value: bool = False) -> tuple[Tensor | None, Tensor]:
        there = self._select_strided(x, marks, value)
        if there is not None:
            return there
        how = self.plan()
        left, right, ids = how.left(x), how.right(self.weight), how.left(marks)
        if how.turned:  # compute the transposed product, so that the result is contiguous
            found = contraction(right.mT, left.mT, value=value, marks=ids.mT, of_b=True)
        else:
            found = contraction(left, right, value=value, marks=ids)
        assert found.marks is not None
        shape = self.out_shape
        if how.turned:
            largest = None if found.value is None else found.value.reshape(shape)
            return largest, found.marks.reshape(shape)
        largest = None if found.value is None else how.back(found.value)
        return largest, how.back(found.marks)

    def _select_strided(
        self, x: Tensor, marks: Tensor, value: bool
    ) -> tuple[Tensor | None, Tensor] | None:
        """``select`` by a kernel that reads the operands with their strides, without copies; None
        if no kernel supports them.
        """
        weight = self.weight
        for kernel in (cuda_contraction, max_contraction):
            if kernel.serving(x, weight, marks):
                break
        else:
            return None
        layout = _operand_order(
            self.spec, self.in_shape, weight.shape, x.stride(), weight.stride(), marks.stride()
        )
        if layout is None:
            return None
        a, b = (weight, x) if layout.how.of_b else (x, weight)
        found = kernel.carried(a, b, marks, layout.how, layout.shape, value)
        if found is None:
            return None
        largest, _, chosen = found
        assert chosen is not None
        if layout.order is None:
            return largest, chosen
        return None if largest is None else largest.permute(layout.order), chosen.permute(
            layout.order
        )

    def carry_some(
        self, x: Tensor, marks: Tensor, order: Sequence[int], first: int, last: int
    ) -> Tensor:
        """Elements ``first`` to ``last`` of ``select(x, marks)[1].permute(order)``, flattened: part
        of the selected provenance ids. Only the slices along the first of these dimensions that
        hold them are computed.
        """
        dim = order[0]
        row = self.outputs // self.out_shape[dim]
        rows = slice(first // row, -(-last // row))
        letter = self.letters()[2][dim]
        x, marks = (self._sliced(t, 0, letter, rows) for t in (x, marks))
        weight = self._sliced(self.weight, 1, letter, rows)
        shape = resized(self.out_shape, dim, rows.stop - rows.start)
        here = Contract(self.spec, weight, tuple(x.shape), shape)
        found = here.select(x, marks)[1].permute(*order).reshape(-1)
        return found[first - rows.start * row : last - rows.start * row]

    def _sliced(self, x: Tensor, which: int, letter: str, rows: slice) -> Tensor:
        """A slice of operand number ``which`` along an index letter, if it has that letter."""
        at = self.letters()[which].find(letter)
        return x if at < 0 else x.narrow(at, rows.start, rows.stop - rows.start)

    def rows(self, at: Tensor) -> Rows:
        how = self.plan()
        base, over, numbers = self._source_offsets(at)
        right = how.right(self.weight)  # (b, k, n)
        batch, column = (_ravelled(at, numbers, how, c) for c in (how.batch, how.columns))
        return Rows(base.unsqueeze(1) + over, right[batch, :, column])

    def entry(self, at: Tensor, source: Tensor) -> Tensor:
        right = self.plan().right(self.weight)  # (b, k, n)
        strides = _element_strides(self.spec, self.in_shape, tuple(self.weight.shape))
        batch, _, column, _ = (located(at, self.out_shape, stride) for stride in strides.out)
        inner = located(source, self.in_shape, strides.inner)
        b, k, n = right.stride()
        return flat(right).index_select(0, batch * b + inner * k + column * n).double()

    def _source_offsets(self, at: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The input elements that output elements are sums of, as ``base[i] + over[k]``; and the
        multi-index of each output element by letter.
        """
        how = self.plan()
        numbers = dict(zip(how.out, multi_index(at, self.out_shape)))
        steps = how.strides(how.x)
        base = torch.zeros_like(at)
        for letter in how.batch + how.rows:
            base = base + numbers[letter] * steps[letter]
        sizes = tuple(how.sizes[c] for c in how.inner)
        return base, offsets(sizes, tuple(steps[c] for c in how.inner), at.device), numbers

    def plan(self) -> EinsumPlan:
        """The contraction as a batched matrix product."""
        return plan(self.spec, self.in_shape, tuple(self.weight.shape))

    @property
    def width(self) -> int:
        how = self.plan()
        return how.size(how.inner)

    def may_be_nonzero(self, x: Tensor) -> Tensor | None:
        how = self.plan()
        rows = (how.left(x) != 0).any(2)
        columns = (how.right(self.weight) != 0).any(1)
        return how.back(rows.unsqueeze(2) & columns.unsqueeze(1))

    def narrow(self, dim: int, index: Tensor) -> Map | None:
        x, w, out = self.letters()
        if x[dim] in out:
            return None
        at = w.find(x[dim])
        weight = self.weight if at < 0 else self.weight.index_select(at, index)
        return Contract(self.spec, weight, resized(self.in_shape, dim, len(index)), self.out_shape)

    def copies(self, count: int) -> Map | None:
        x, w, out = self.letters()
        batch_letter = self._unused_letter()
        spec = f"{batch_letter}{x},{w}->{batch_letter}{out}"
        return Contract(spec, self.weight, (count, *self.in_shape), (count, *self.out_shape))

    def narrow_each(self, dim: int, index: Tensor) -> Map | None:
        x, w, out = self.letters()
        if x[dim] in out:
            return None
        count, places = index.shape
        narrow = resized(self.in_shape, dim, places)
        batch_letter, at, weight = self._unused_letter(), w.find(x[dim]), self.weight
        if at >= 0:
            weight, w = each_at(weight, at, index), batch_letter + w
        spec = f"{batch_letter}{x},{w}->{batch_letter}{out}"
        return Contract(spec, weight, (count, *narrow), (count, *self.out_shape))

    def _unused_letter(self) -> str:
        """An index letter that the spec does not use."""
        return next(letter for letter in ascii_letters if letter not in self.spec)

    def max_source(self, x: Tensor) -> Tensor:
        how = self.plan()
        left = how.left(x)  # (b, m, k)
        most = left.amax(2) if left.shape[2] and left.numel() else left.new_zeros(left.shape[:2])
        return how.back(most.unsqueeze(2).expand(*most.shape, how.size(how.columns)))

    def routes(self, count: Count) -> Count:
        x, w, out = self.letters()
        sizes = self.sizes()
        if not isinstance(count, Tensor):
            return count * prod(sizes[letter] for letter in {*x, *w} - {*out})
        ones = torch.ones((), dtype=torch.float64, device="cpu").expand(self.weight.shape)
        return torch.einsum(self.spec, count, ones)

    def tensors(self) -> tuple[str, ...]:
        return ("weight",)


class _OperandOrder(NamedTuple):
    """The operands' strides as batched matrices, the shape in which the result is written, and the
    permutation to the wanted order of dimensions (None: already in that order).
    """

    how: MatrixLayout
    shape: Shape
    order: list[int] | None


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
    left, right, marks = found
    i, k = how.size(how.batch), how.size(how.inner)
    m, n = how.size(how.rows), how.size(how.columns)
    if how.turned:
        (batch, inner, row), other = right, left
        shape = tuple(how.sizes[c] for c in how.out)
        return _OperandOrder(
            MatrixLayout((i, n, m), k, (batch, row, inner), other, marks, True), shape, None
        )
    batch, inner, column = right
    written, order = how.written
    matrix_layout = MatrixLayout((i, m, n), k, left, (batch, column, inner), marks, False)
    return _OperandOrder(matrix_layout, tuple(written), order)


class _ElementStrides(NamedTuple):
    """Strides that take element numbers to positions in the batched product.

    ``out``: for each dimension of the output, the stride of the batch, row and column number, and
    of the first input element that the output element is a sum of. ``inner``: for each dimension of
    the input, the stride of the contraction index. ``along``: sizes and input strides of the
    contracted dimensions.
    """

    out: tuple[Shape, Shape, Shape, Shape]
    inner: Shape
    along: tuple[Shape, Shape]


@lru_cache(maxsize=4096)
def _element_strides(spec: str, x: Shape, w: Shape) -> _ElementStrides:
    how = plan(spec, x, w)
    steps = how.strides(how.x)
    base = {c: steps[c] for c in how.batch + how.rows}

    def along(letters: str, by: dict[str, int]) -> Shape:
        return tuple(by.get(c, 0) for c in letters)

    batch, row, column = (
        along(how.out, how.strides(c)) for c in (how.batch, how.rows, how.columns)
    )
    sizes = tuple(how.sizes[c] for c in how.inner)
    return _ElementStrides(
        (batch, row, column, along(how.out, base)),
        along(how.x, how.strides(how.inner)),
        (sizes, along(how.inner, steps)),
    )


def _ravelled(at: Tensor, numbers: dict[str, Tensor], how: EinsumPlan, letters: str) -> Tensor:
    """The row-major number of each element's multi-index restricted to these letters."""
    total = torch.zeros_like(at)
    for letter in letters:
        total = total * how.sizes[letter] + numbers[letter]
    return total
