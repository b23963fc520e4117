"""Convolutions: the backward maps to the input and to the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from gradtrace.kernels import Contraction, backend_of
from gradtrace.kernels.precision import exact
from gradtrace.linops.axes import MIXED, Axis
from gradtrace.linops.base import Count, Map, Rows, Selection, per_element
from gradtrace.linops.conv_windows import (
    Dimension,
    WindowProducts,
    to_input,
    to_kernel,
    with_margins,
)
from gradtrace.linops.indexing import element_number, multi_index, resized
from gradtrace.linops.side_by_side import SideBySide
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
    weights = ("other",)

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

    def select(self, x: Tensor, ids: Tensor, value: bool = False) -> Selection:
        how = self._products(x)
        if how is None:
            return super().select(x, ids, value)
        found = self._contractions(how, x, ids, value)
        largest = self._assembled(how, [part.value for part in found]) if value else None
        return largest, self._assembled(how, [part.ids for part in found])

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
            how = to_input(dims, self.in_shape, self.out_shape, self.other, w.groups, w.transposed)
        inside = x if self.to_kernel and not w.transposed else self.other
        return how if how.pieces and not (how.beyond and _has_nonfinite(inside)) else None

    def _contractions(
        self, how: WindowProducts, x: Tensor, ids: Tensor | None = None, value: bool = True
    ) -> list[Contraction]:
        """The result of each batched product."""
        backend, padded = backend_of(x), with_margins(x, how.margins)
        padded_ids = None if ids is None else with_margins(ids, how.margins)
        return [
            backend.contract(
                piece.left.left(padded),
                piece.right,
                value=value,
                ids=None if padded_ids is None else piece.left.left(padded_ids),
            )
            for piece in how.pieces
        ]

    def _assembled(self, how: WindowProducts, parts: Sequence[Tensor | None]) -> Tensor:
        return how.whole([part for part in parts if part is not None]).reshape(self.out_shape)

    # Entry by entry ------------------------------------------------------------------------------

    def rows(self, at: Tensor) -> Rows:
        w, (narrow, broad, kernel) = self.windows, self._geometry()
        out = [i.unsqueeze(1) for i in multi_index(at, self.out_shape)]
        number = torch.arange(self.width, device=at.device)
        if self.to_kernel:
            (a, b, *k), (n, *q) = out, multi_index(number, (narrow[0], *narrow[2:]))
        elif w.transposed:
            (n, a, *q), (b, *k) = out, multi_index(number, kernel[1:])
        else:
            n, b, *p = out
            a, *k = multi_index(number, (kernel[0] // w.groups, *kernel[2:]))
            a, b = b // kernel[1] * (kernel[0] // w.groups) + a, b % kernel[1]
            k = [taps - 1 - tap for taps, tap in zip(kernel[2:], k)]  # so that sources ascend
            reach = [i + pad - tap * d for i, tap, pad, d in zip(p, k, w.padding, w.dilation)]
            q = [i.div(s, rounding_mode="floor") for i, s in zip(reach, w.stride)]
            there = _inside(q, narrow[2:])
            for i, here, s in zip(reach, q, w.stride):
                there = there & (here * s == i)
            source = element_number([n, a, *q], self.in_shape)
            return Rows(torch.where(there, source, -1), self.other[(a, b, *k)])
        p = self._over_p(q, k)
        there = _inside(p, broad[2:])
        p = [i.clamp(0, size - 1) for i, size in zip(p, broad[2:])]
        over_q, over_p = [n, a, *q], [n, self._broad_channel(a, b), *p]
        given, other = (over_p, over_q) if w.transposed else (over_q, over_p)
        source = element_number(given, self.in_shape)
        weight = self.other[tuple(other) if self.to_kernel else (a, b, *k)]
        return Rows(torch.where(there, source, -1), weight)

    def entry(self, at: Tensor, source: Tensor) -> Tensor:
        w, (_, _, kernel) = self.windows, self._geometry()
        out, given = multi_index(at, self.out_shape), multi_index(source, self.in_shape)
        if not self.to_kernel:
            over_q, over_p = (out, given) if w.transposed else (given, out)
            along = zip(over_p[2:], over_q[2:], w.stride, w.padding, w.dilation)
            taps = [(p - q * s + pad) // d for p, q, s, pad, d in along]
            return self.other[(over_q[1], over_p[1] % kernel[1], *taps)].double()
        a, b, *k = out
        if w.transposed:
            along = zip(given[2:], k, w.stride, w.padding, w.dilation)
            place = [(p + pad - tap * d) // s for p, tap, s, pad, d in along]
            return self.other[(given[0], a, *place)].double()
        place = self._over_p(given[2:], k)
        return self.other[(given[0], self._broad_channel(a, b), *place)].double()

    def _over_p(self, q: list[Tensor], k: list[Tensor]) -> list[Tensor]:
        """``p = q·stride + k·dilation − padding``."""
        w = self.windows
        along = zip(q, k, w.stride, w.dilation, w.padding)
        return [i * s + tap * d - pad for i, tap, s, d, pad in along]

    def _broad_channel(self, a: Tensor, b: Tensor) -> Tensor:
        """The channel over p of the kernel's element (a, b): b is numbered within a group."""
        _, _, kernel = self._geometry()
        return a // (kernel[0] // self.windows.groups) * kernel[1] + b

    def _geometry(self) -> tuple[Shape, Shape, Shape]:
        """The shapes of the tensor over q, of the one over p, and of the kernel, which is
        (channels over q, channels over p of a group, *taps).
        """
        theirs = tuple(self.other.shape)
        of_input, kernel = (theirs, self.out_shape) if self.to_kernel else (self.out_shape, theirs)
        if self.windows.transposed:
            return of_input, self.in_shape, kernel
        return self.in_shape, of_input, kernel

    @property
    def width(self) -> int:
        narrow, _, kernel = self._geometry()
        if self.to_kernel:
            return narrow[0] * prod(narrow[2:])
        outs = kernel[1] if self.windows.transposed else kernel[0] // self.windows.groups
        return outs * prod(kernel[2:])

    def may_be_nonzero(self, x: Tensor) -> Tensor | None:
        if not self.to_kernel or self.windows.groups > 1:
            return None
        mine, theirs = (
            (part != 0).any(0).reshape(part.shape[1], -1).any(1) for part in (x, self.other)
        )
        first, second = (theirs, mine) if self.windows.transposed else (mine, theirs)
        both = first.unsqueeze(1) & second
        return both.reshape(*both.shape, *[1] * (len(self.out_shape) - 2)).expand(self.out_shape)

    def sums_over(self, dim: int) -> bool:
        return self.to_kernel and dim == 0

    def narrow(self, dim: int, index: Tensor) -> Map:
        shape = resized(self.in_shape, 0, index.shape[1])
        others = (self.other.index_select(0, row) for row in index)
        return SideBySide([Convolve(o, self.windows, True, shape, self.out_shape) for o in others])

    def max_source(self, x: Tensor) -> Tensor:
        if not x.numel():
            return x.new_zeros(self.out_shape)
        if self.to_kernel:
            return x.amax().expand(self.out_shape)
        most = x.flatten(1).amax(1)
        return most.reshape(-1, *[1] * (len(self.out_shape) - 1)).expand(self.out_shape)

    def follow_axis(self, axis: Axis, device: torch.device) -> Axis | None:
        if self.to_kernel:
            return MIXED
        return None if axis.dim else axis

    def routes(self, count: Count, device: torch.device) -> Count:
        ones = torch.ones(self.other.shape, dtype=torch.float64, device=device)
        return self._apply_with(per_element(count, self.in_shape, device), ones)


def _has_nonfinite(x: Tensor) -> bool:
    """Whether an element is infinite or NaN."""
    return not bool(x.sum().isfinite()) and not bool(x.isfinite().all())


def _inside(place: Sequence[Tensor], sizes: Shape) -> Tensor:
    """Whether a multi-index is within these sizes."""
    there = torch.ones((), dtype=torch.bool, device=place[0].device)
    for here, size in zip(place, sizes):
        there = there & (here >= 0) & (here < size)
    return there
