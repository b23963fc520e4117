"""Convolutions: the backward maps to the input and to the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from gradtrace.kernels import Contraction, contraction
from gradtrace.kernels.precision import exact
from gradtrace.linops.base import Best, Count, Map, Rows, chosen, multi_index, resized
from gradtrace.linops.conv_windows import (
    Dimension,
    WindowProducts,
    to_input,
    to_kernel,
    with_margins,
)
from gradtrace.pytorch.plain_tensors import plain
from gradtrace.semirings import MAX, SUM, Semiring, Value
from gradtrace.types import Shape

aten = torch.ops.aten


@dataclass(frozen=True)
class Windows:
    """The geometry of a convolution, with PyTorch's parameters."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int


class Convolve(Map):
    """From the cotangent of a convolution to that of its input, or of its kernel.

    ``out[n,i,p] = ⊕ g[n,o,q]·w[o,i,k]`` over ``p = q·stride + k·dilation − padding``, or
    ``out[o,i,k] = ⊕ g[n,o,q]·x[n,i,p]`` over the same; ``other`` is w or x. For transposed
    convolutions p and q change places.
    """

    __slots__ = ("other", "to_kernel", "windows")

    def __init__(
        self,
        other: Tensor,
        windows: Windows,
        to_kernel: bool,
        in_shape: Shape,
        out_shape: Shape,
    ) -> None:
        self.other = plain(other)
        self.windows = windows
        self.to_kernel = to_kernel
        self.in_shape = in_shape
        self.out_shape = out_shape

    def apply(self, x: Tensor) -> Tensor:
        return self._apply_with(x, self.other.to(x.dtype))

    def _apply_with(self, g: Tensor, other: Tensor) -> Tensor:
        """The map with the weights ``other``, in SUM."""
        w = self.windows
        shape = g.new_zeros(()).expand(self.out_shape)
        x, kernel = (other, shape) if self.to_kernel else (shape, other)
        mask = [not self.to_kernel, self.to_kernel, False]
        geometry = (w.stride, w.padding, w.dilation, w.transposed, w.output_padding, w.groups)
        found = aten.convolution_backward(g, x, kernel, None, *geometry, mask)
        return found[1] if self.to_kernel else found[0]  # type: ignore[no-any-return]

    def apply_in(self, x: Value, semiring: Semiring) -> Value:
        if semiring == MAX and (how := self._products(x[0])) is not None:
            return (self._assembled(how, [part.value for part in self._contractions(how, x[0])]),)
        pieces = semiring.linear(self.other)
        if pieces is None or not all(part.is_floating_point() for part in x):
            return self.generic(x, semiring)
        out: dict[int, Tensor] = {}
        for i, o, weight in pieces:
            with nullcontext() if semiring == SUM else exact(x[i]):
                part = self._apply_with(x[i], weight.to(x[i].dtype))
            out[o] = out[o] + part if o in out else part
        return tuple(out[o] for o in sorted(out))

    def best(self, x: Tensor, at: Tensor | None = None) -> Best:
        how = self._products(x) if at is None else None
        if how is None:
            return self.largest(x, at)
        found = self._contractions(how, x, index=True)
        sources = []
        for piece, part in zip(how.pieces, found):
            batch, rows, inner = piece.source.offsets(x.device)
            assert part.index is not None
            sources.append(batch[:, None, None] + rows[:, None] + inner[part.index])
        value = self._assembled(how, [part.value for part in found])
        return chosen(value, self._assembled(how, sources, -1), None)

    def select(self, x: Tensor, marks: Tensor, value: bool = False) -> tuple[Tensor | None, Tensor]:
        how = self._products(x)
        if how is None:
            return super().select(x, marks, value)
        found = self._contractions(how, x, value=value, marks=marks)
        largest = self._assembled(how, [part.value for part in found]) if value else None
        return largest, self._assembled(how, [part.marks for part in found])

    # As batched matrix products ------------------------------------------------------------------

    def _products(self, x: Tensor) -> WindowProducts | None:
        """The map as batched products over windows; None if a tensor is empty, or if a non-finite
        element would be multiplied with the zeros of a margin.
        """
        if not x.numel() or not self.outputs or not self.other.numel():
            return None
        w, (_, _, kernel) = self.windows, self._geometry()
        dims = [Dimension(*d) for d in zip(w.stride, w.padding, w.dilation, kernel[2:])]
        if self.to_kernel:
            how = to_kernel(dims, self.in_shape, self.other, w.groups, w.transposed)
        else:
            how = self._to_input(dims)
        inside = x if self.to_kernel and not w.transposed else self.other
        return how if how.pieces and not (how.beyond and _has_nonfinite(inside)) else None

    def _to_input(self, dims: list[Dimension]) -> WindowProducts:
        w = self.windows
        along = zip(dims, self.out_shape[2:], self.in_shape[2:])
        if w.transposed:
            lines = [d.over_p(places, size) for d, places, size in along]
        else:
            lines = [d.over_q(places, size) for d, places, size in along]
        batch, channels, *places = self.out_shape
        result = (batch, w.groups, channels // w.groups, *places)
        return to_input(lines, self.in_shape, result, self.other, w.transposed)

    def _contractions(
        self,
        how: WindowProducts,
        x: Tensor,
        *,
        value: bool = True,
        index: bool = False,
        marks: Tensor | None = None,
    ) -> list[Contraction]:
        """The result of each batched product."""
        padded = with_margins(x, how.margins)
        padded_ids = None if marks is None else with_margins(marks, how.margins)
        return [
            contraction(
                piece.left.left(padded),
                piece.right,
                value=value,
                index=index,
                marks=None if padded_ids is None else piece.left.left(padded_ids),
            )
            for piece in how.pieces
        ]

    def _assembled(
        self, how: WindowProducts, parts: Sequence[Tensor | None], fill: int = 0
    ) -> Tensor:
        there = [part for part in parts if part is not None]
        return how.whole(there, fill).reshape(self.out_shape)

    def rows(self, at: Tensor) -> Rows:
        first, second, *place = (n.unsqueeze(1) for n in multi_index(at, self.out_shape))
        if self.to_kernel:
            return self._rows_to_kernel(first, second, place)
        return self._rows_to_input(first, second, place)

    def _rows_to_input(self, n: Tensor, channel: Tensor, place: list[Tensor]) -> Rows:
        """Rows for elements (n, channel, place) of the input: all outputs whose window holds it."""
        kernel, how = self.other.shape, self.windows
        groups = how.groups
        outs = kernel[1] if how.transposed else kernel[0] // groups
        ins = kernel[0] // groups if how.transposed else kernel[1]
        taps = tuple(kernel[2:])
        number = torch.arange(outs * prod(taps), device=n.device)
        out, *tap = multi_index(number, (outs, *taps))
        group = channel // ins
        target, there = [], torch.ones((), dtype=torch.bool, device=n.device)
        for d, size in enumerate(self.in_shape[2:]):
            if how.transposed:
                here = place[d] * how.stride[d] + tap[d] * how.dilation[d] - how.padding[d]
            else:
                tap[d] = taps[d] - 1 - tap[d]  # so that outputs are in ascending order
                reach = place[d] + how.padding[d] - tap[d] * how.dilation[d]
                here = reach.div(how.stride[d], rounding_mode="floor")
                there = there & (here * how.stride[d] == reach)
            there = there & (here >= 0) & (here < size)
            target.append(here)
        made = group * outs + out
        source = _flat([n, made, *target], self.in_shape)
        if how.transposed:
            weight = self.other[(channel, out, *tap)]
        else:
            weight = self.other[(made, channel % ins, *tap)]
        return Rows(torch.where(there, source, -1), weight)

    def _rows_to_kernel(self, first: Tensor, second: Tensor, tap: list[Tensor]) -> Rows:
        """Rows for elements (first, second, tap) of the kernel: all outputs that use it."""
        how, x, y = self.windows, self.other.shape, self.in_shape
        narrow, broad = (x, y) if how.transposed else (y, x)
        number = torch.arange(x[0] * prod(narrow[2:]), device=first.device)
        n, *q = multi_index(number, (x[0], *narrow[2:]))
        there, p = torch.ones((), dtype=torch.bool, device=first.device), []
        for d, size in enumerate(broad[2:]):
            here = q[d] * how.stride[d] + tap[d] * how.dilation[d] - how.padding[d]
            there = there & (here >= 0) & (here < size)
            p.append(here.clamp(0, size - 1))
        per = self.out_shape[0] // how.groups
        partner = first // per * self.out_shape[1] + second  # channel of the tensor over p
        if how.transposed:
            source, weight = _flat([n, partner, *p], y), self.other[(n, first, *q)]
        else:
            source, weight = _flat([n, first, *q], y), self.other[(n, partner, *p)]
        return Rows(torch.where(there, source, -1), weight)

    def entry(self, at: Tensor, source: Tensor) -> Tensor:
        how = self.windows
        first, second, *here = multi_index(at, self.out_shape)
        batch, made, *there = multi_index(source, self.in_shape)
        steps = list(zip(here, there, how.stride, how.padding, how.dilation))
        if self.to_kernel and how.transposed:
            place = [(q + p - k * d) // s for k, q, s, p, d in steps]
            return self.other[(batch, first, *place)].double()
        if self.to_kernel:
            place = [q * s + k * d - p for k, q, s, p, d in steps]
            per = self.out_shape[0] // how.groups
            partner = first // per * self.out_shape[1] + second
            return self.other[(batch, partner, *place)].double()
        if how.transposed:
            place = [(q - i * s + p) // d for i, q, s, p, d in steps]
            return self.other[(second, made % self.other.shape[1], *place)].double()
        place = [(i - q * s + p) // d for i, q, s, p, d in steps]
        return self.other[(made, second % self.other.shape[1], *place)].double()

    @property
    def width(self) -> int:
        x, y, w = self._geometry()
        if self.to_kernel:
            return x[0] * prod(x[2:] if self.windows.transposed else y[2:])
        outs = w[1] if self.windows.transposed else w[0] // self.windows.groups
        return outs * prod(w[2:])

    def may_be_nonzero(self, x: Tensor) -> Tensor | None:
        if not self.to_kernel or self.windows.groups > 1:
            return None
        mine, theirs = (
            (part != 0).any(0).reshape(part.shape[1], -1).any(1) for part in (x, self.other)
        )
        first, second = (theirs, mine) if self.windows.transposed else (mine, theirs)
        both = first.unsqueeze(1) & second
        return both.reshape(*both.shape, *[1] * (len(self.out_shape) - 2)).expand(self.out_shape)

    def narrow(self, dim: int, index: Tensor) -> Map | None:
        if dim or not self.to_kernel:
            return None
        other = self.other.index_select(0, index)
        shape = resized(self.in_shape, 0, len(index))
        return Convolve(other, self.windows, True, shape, self.out_shape)

    def max_source(self, x: Tensor) -> Tensor:
        if not x.numel():
            return x.new_zeros(self.out_shape)
        if self.to_kernel:
            return x.amax().expand(self.out_shape)
        most = x.flatten(1).amax(1)
        return most.reshape(-1, *[1] * (len(self.out_shape) - 1)).expand(self.out_shape)

    def _geometry(self) -> tuple[Shape, Shape, Shape]:
        """Shapes of (input, output, kernel) of the convolution."""
        if self.to_kernel:
            return tuple(self.other.shape), self.in_shape, self.out_shape
        return self.out_shape, self.in_shape, tuple(self.other.shape)

    def routes(self, count: Count) -> Count:
        ones = torch.ones(self.other.shape, dtype=torch.float64, device="cpu")
        if isinstance(count, Tensor):
            return self._apply_with(count, ones)
        return self._apply_with(
            torch.full(self.in_shape, count, dtype=torch.float64, device="cpu"), ones
        )

    def tensors(self) -> tuple[str, ...]:
        return ("other",)


def _has_nonfinite(x: Tensor) -> bool:
    """Whether an element is infinite or NaN."""
    return not bool(x.sum().isfinite()) and not bool(x.isfinite().all())


def _flat(index: list[Tensor], shape: Shape) -> Tensor:
    """The number of the element with this multi-index."""
    total = index[0]
    for number, size in zip(index[1:], shape[1:]):
        total = total * size + number
    return total
