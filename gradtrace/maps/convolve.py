"""The contraction over windows: both ways back through a convolution."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from gradtrace.errors import Unsupported
from gradtrace.maps.base import Count, Map
from gradtrace.semirings import Semiring
from gradtrace.shapes import Shape

aten = torch.ops.aten


@dataclass(frozen=True)
class Windows:
    """How a convolution reads its input."""

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
        self.other = other
        self.windows = windows
        self.to_kernel = to_kernel
        self.in_shape = in_shape
        self.out_shape = out_shape

    def _apply(self, g: Tensor, other: Tensor) -> Tensor:
        w = self.windows
        shape = g.new_zeros(()).expand(self.out_shape)
        x, kernel = (other, shape) if self.to_kernel else (shape, other)
        mask = [not self.to_kernel, self.to_kernel, False]
        geometry = (w.stride, w.padding, w.dilation, w.transposed, w.output_padding, w.groups)
        found = aten.convolution_backward(g, x, kernel, None, *geometry, mask)
        return found[1] if self.to_kernel else found[0]  # type: ignore[no-any-return]

    def pull(self, x: Tensor, semiring: Semiring) -> Tensor:
        if semiring.name != "SUM":
            raise Unsupported(f"{semiring.name} is not defined on convolutions yet")
        return self._apply(x, self.other.to(x.dtype))

    def dense(self) -> Tensor:
        if self.windows.transposed:
            return self._dense(self._kernel_entries_transposed())
        return self._dense(self._kernel_entries())

    def _geometry(self) -> tuple[Shape, Shape, Shape]:
        """Shapes of (input, output, kernel) of the convolution."""
        if self.to_kernel:
            return tuple(self.other.shape), self.in_shape, self.out_shape
        return self.out_shape, self.in_shape, tuple(self.other.shape)

    def _kernel_entries(self) -> list[tuple[Shape, Shape, Shape]]:
        """Every (input element, output element, kernel element) that meet in a product."""
        x, y, w = self._geometry()
        per_group_in, per_group_out = w[1], w[0] // self.windows.groups
        found = []
        for n in range(x[0]):
            for o in range(w[0]):
                for i in range(w[1]):
                    channel = (o // per_group_out) * per_group_in + i
                    for q in _each(y[2:]):
                        for k in _each(w[2:]):
                            p = self._reach(q, k)
                            if all(0 <= a < size for a, size in zip(p, x[2:])):
                                found.append(((n, channel, *p), (n, o, *q), (o, i, *k)))
        return found

    def _kernel_entries_transposed(self) -> list[tuple[Shape, Shape, Shape]]:
        """The same for a transposed convolution, whose kernel is (in, out / groups, ...)."""
        x, y, w = self._geometry()
        per_group_in, per_group_out = w[0] // self.windows.groups, w[1]
        found = []
        for n in range(x[0]):
            for i in range(w[0]):
                for o in range(w[1]):
                    channel = (i // per_group_in) * per_group_out + o
                    for p in _each(x[2:]):
                        for k in _each(w[2:]):
                            q = self._reach(p, k)
                            if all(0 <= a < size for a, size in zip(q, y[2:])):
                                found.append(((n, i, *p), (n, channel, *q), (i, o, *k)))
        return found

    def _reach(self, q: Shape, k: Shape) -> Shape:
        w = self.windows
        return tuple(
            a * s + b * d - pad for a, s, b, d, pad in zip(q, w.stride, k, w.dilation, w.padding)
        )

    def _dense(self, entries: list[tuple[Shape, Shape, Shape]]) -> Tensor:
        matrix = self.other.new_zeros(*self.out_shape, *self.in_shape)
        for x, y, w in entries:
            out, other = (w, x) if self.to_kernel else (x, w)
            matrix[(*out, *y)] += self.other[other]
        return matrix.reshape(self.outputs, self.inputs)

    def routes(self, count: Count) -> Count:
        ones = torch.ones(self.other.shape, dtype=torch.float64)
        if isinstance(count, Tensor):
            return self._apply(count, ones)
        return self._apply(torch.full(self.in_shape, count, dtype=torch.float64), ones)

    def tensors(self) -> tuple[str, ...]:
        return ("other",)


def _each(sizes: Shape) -> list[Shape]:
    """All multi-indices below ``sizes``."""
    if not prod(sizes):
        return []
    return [
        tuple(row)
        for row in torch.cartesian_prod(*map(torch.arange, sizes)).reshape(-1, len(sizes)).tolist()
    ]
