"""Average pooling, interpolation and grid sampling, as sparse matrices.

Each element of the resampled plane is a weighted sum of a few elements ("taps") of the original,
and all channels use the same weights. Average pooling and interpolation are separable, so their
matrix is a Kronecker product of one small matrix for each dimension. Its entries are found with
the operation itself: it resamples rows in which only every p-th element is nonzero, with p large
enough that each result has at most one nonzero tap.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, prod
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from gradtrace.linops import Around, Contract, Scatter, Sparse
from gradtrace.recording.aten_rules.call import Call, Chains, Rule, Undecided, as_shape, from_shape
from gradtrace.recording.aten_rules.movement import ids64
from gradtrace.types import Shape

aten = torch.ops.aten


def nearest(forward: Any) -> Rule:
    """The gradient of nearest-neighbour upsampling; ``forward`` is the forward operation."""

    def rule(call: Call) -> Chains:
        g, size, input_size, *scales = call.args
        target = forward(ids64(input_size, g.device), size, *scales).long()
        return [([Scatter(target, tuple(input_size))], call.only(g))]

    return rule


# Separable resampling ----------------------------------------------------------------------------


class ResamplingRows(NamedTuple):
    """Resampling along one dimension, as a sparse matrix in CSR layout.

    Row i holds the weights of element i of the original in the elements ``source`` (ascending) of
    the result.
    """

    starts: Tensor
    source: Tensor
    weight: Tensor

    @classmethod
    def of(cls, size: int, element: Tensor, point: Tensor, weight: Tensor) -> ResamplingRows:
        """From entries (element, point, weight) in any order; ``size`` is the number of rows."""
        order = point.argsort(stable=True)
        order = order[element[order].argsort(stable=True)]
        count = torch.bincount(element, minlength=size)
        starts = torch.cat([count.new_zeros(1), count.cumsum(0)])
        return cls(starts, point[order], weight[order])

    def identity(self, points: int) -> bool:
        """Whether this is the identity matrix of size ``points``."""
        own = torch.arange(points + 1, device=self.source.device)
        return (
            torch.equal(self.starts, own)
            and torch.equal(self.source, own[:-1])
            and bool((self.weight == 1).all())
        )

    def times(self, other: ResamplingRows, points: int) -> ResamplingRows:
        """The Kronecker product with ``other``, which has ``points`` columns."""
        mine, others = self.starts.diff(), other.starts.diff()
        count = (mine.unsqueeze(1) * others).reshape(-1)
        starts = torch.cat([count.new_zeros(1), count.cumsum(0)])
        row = torch.arange(len(count), device=count.device).repeat_interleave(count)
        first, second = row // max(len(others), 1), row % max(len(others), 1)
        number = torch.arange(len(row), device=row.device) - starts[row]
        each = others[second]
        a = self.starts[first] + number // each
        b = other.starts[second] + number % each
        return ResamplingRows(
            starts, self.source[a] * points + other.source[b], self.weight[a] * other.weight[b]
        )


Along: TypeAlias = "Callable[[Call, int, int, int], ResamplingRows]"
"""``along(call, d, size, points)``: the matrix of a call along its d-th spatial dimension, which
has ``size`` elements in the original and ``points`` in the result."""


def interpolation(forward: Any, taps: int, blurred: bool = False) -> Along:
    """Interpolation by ``forward(x, output_size, align_corners, *scales)``.

    Each point depends on ``taps`` neighbours; with ``blurred`` (antialiasing), on more of them
    when downsampling.
    """

    def along(call: Call, d: int, size: int, points: int) -> ResamplingRows:
        spatial = len(call.args[1])
        align, *scales = call.args[3:]
        scales = [*scales, *[None] * (spatial - len(scales))]
        shrink = max(1, size / points, 1 / scales[d] if scales[d] else 0)
        period = 2 * ceil(taps / 2 * shrink) + 2 if blurred else taps
        sizes, factors = [2] * spatial, [None] * spatial
        sizes[d], factors[d] = points, scales[d]
        shape = [2] * spatial  # not 1: PyTorch's antialiasing is wrong for planes of width 1
        shape[d] = size

        def sample(x: Tensor) -> Tensor:
            along = x.reshape(len(x), 1, *[1] * d, size, *[1] * (spatial - d - 1))
            found: Tensor = forward(
                along.expand(-1, -1, *shape).contiguous(), sizes, align, *factors
            )
            return found.transpose(2, 2 + d).reshape(len(x), points, -1)[..., 0]

        return _matrix_of_rows(sample, size, min(size, period), call.args[0].device)

    return along


def _matrix_of_rows(
    sample: Callable[[Tensor], Tensor], size: int, period: int, device: torch.device
) -> ResamplingRows:
    """The matrix of ``sample``, which maps float64 rows (n, size) to rows (n, points).

    Elements are divided into ``period`` classes by ``index % period``. For each class, sampling its
    indicator gives the weights; sampling the indicator times the element numbers, divided by the
    weights, gives the element that each weight belongs to.
    """
    number = torch.arange(size, device=device)
    chosen = number % period == torch.arange(period, device=device).unsqueeze(1)
    lines = torch.cat([chosen.double(), chosen * (number + 1.0).double()])
    ones, numbers = sample(lines).chunk(2)
    cls, point = (ones != 0).nonzero(as_tuple=True)
    weight = ones[cls, point]
    return ResamplingRows.of(size, (numbers[cls, point] / weight).round().long() - 1, point, weight)


def average_pool(call: Call, d: int, size: int, points: int) -> ResamplingRows:
    """Average pooling along one dimension: see ``Along``."""
    _, _, kernels, strides, paddings, _, padded, divisor = call.args
    kernel, stride, padding = (
        numbers[d] if len(numbers) > 1 else numbers[0]
        for numbers in (kernels, strides or kernels, paddings)
    )
    start = torch.arange(points, device=call.args[0].device) * stride - padding
    end = (start + kernel).clamp(max=size + padding)
    whole = end - start
    start, end = start.clamp(min=0), end.clamp(max=size)
    if divisor is not None:  # for all dimensions: divide once, in the first
        over = torch.full_like(whole, divisor if d == 0 else 1)
    else:
        over = whole if padded else end - start
    return _windows(start, end, over, size)


def adaptive_average_pool(call: Call, d: int, size: int, points: int) -> ResamplingRows:
    """Adaptive average pooling along one dimension: windows that cover all elements."""
    point = torch.arange(points, device=call.args[0].device)
    start = point * size // points
    end = -(-(point + 1) * size // points)
    return _windows(start, end, end - start, size)


def _windows(start: Tensor, end: Tensor, over: Tensor, size: int) -> ResamplingRows:
    """Points that are the sum of elements ``start`` to ``end`` (exclusive), divided by ``over``."""
    length = (end - start).clamp(min=0)
    point = torch.arange(len(start), device=start.device).repeat_interleave(length)
    first = length.cumsum(0) - length
    element = torch.arange(len(point), device=start.device) - first[point] + start[point]
    return ResamplingRows.of(size, element, point, 1 / over[point].double())


def separable(spatial: int, along: Along) -> Rule:
    """The gradient of separable resampling over the last ``spatial`` dimensions.

    Leading and trailing dimensions with an identity matrix are left out of the Kronecker product.
    """

    def rule(call: Call) -> Chains:
        g, out = call.only(call.args[0]), call.out
        if not g.numel() or not out.numel():
            raise Undecided
        points, sizes = g.shape[-spatial:], out.shape[-spatial:]
        planes, inner = prod(g.shape[:-spatial]), 1
        lines = [(along(call, d, sizes[d], points[d]), points[d]) for d in range(spatial)]
        while len(lines) > 1 and lines[0][0].identity(lines[0][1]):
            planes *= lines.pop(0)[1]
        while len(lines) > 1 and lines[-1][0].identity(lines[-1][1]):
            inner *= lines.pop()[1]
        whole, _ = lines[0]
        for line, size in lines[1:]:
            whole = whole.times(line, size)
        shapes = tuple(g.shape), tuple(out.shape)
        around = Around(planes=planes, inner=inner)
        weight = whole.weight.to(g.dtype)
        return [([Sparse(whole.starts, whole.source, weight, *shapes, around)], g)]

    return rule


# Grids -------------------------------------------------------------------------------------------


def _taps_of_planes(
    sample: Callable[[Tensor], Tensor], size: Shape, period: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The source element and the weight of each tap of each sampled point: (taps, n, points) each.

    ``sample`` maps float64 planes ``(classes, *size)`` to ``(classes, n, points)``; the method is
    that of ``_matrix_of_rows``, with classes by the residues of all coordinates.
    """
    numbers = ids64(size, device) + 1
    chosen = torch.ones(1, *size, dtype=torch.bool, device=device)
    for axis, length in enumerate(size):
        shape = [1] * len(size)
        shape[axis] = length
        residue = torch.arange(length, device=device).reshape(shape) % period
        here = torch.stack([residue == r for r in range(period)])
        chosen = (chosen.unsqueeze(1) & here).flatten(0, 1)
    ones, where = sample(torch.cat([chosen.double(), chosen * numbers])).chunk(2)
    number = torch.where(ones != 0, where / torch.where(ones != 0, ones, 1), 0)
    return number.round().long() - 1, ones


def grid_sampler(call: Call) -> Any:
    """The gradient of ``grid_sampler`` by the image and by the grid."""
    g, x, grid, mode, padding, align, mask = call.args
    call.only(g)
    spatial = x.dim() - 2
    forward = aten.grid_sampler_2d if spatial == 2 else aten.grid_sampler_3d
    n, c = x.shape[:2]
    points, size = prod(g.shape[2:]), tuple(x.shape[2:])

    def sample(images: Tensor) -> Tensor:
        classes = len(images)
        many = images.expand(n, *images.shape)  # a channel for each class
        found: Tensor = forward(many, grid.double(), mode, padding, align)
        return found.reshape(n, classes, points).transpose(0, 1)

    result: list[Chains] = [[], []]
    if mask[0]:
        source, weight = _taps_of_planes(sample, size, (2, 1, 4)[mode], g.device)
        tap, sample_, point = (weight != 0).nonzero(as_tuple=True)
        here = (tap, sample_, point)
        row, column = sample_ * prod(size) + source[here], sample_ * points + point
        shapes, around = (tuple(g.shape), tuple(x.shape)), Around(blocks=n, planes=c)
        entries = (row, column, weight[here].to(g.dtype))
        result[0] = [([Sparse.of(entries, *shapes, around)], g)]
    if mask[1]:
        planes = x.reshape(n * c, 1, *size)
        grids = grid.repeat_interleave(c, 0)
        one = g.new_ones(n * c, 1, *g.shape[2:])
        slopes = call.func(one, planes, grids, mode, padding, align, [False, True])[1]
        weight = slopes.reshape(n, c, points, spatial)
        step = Contract("ncp,ncpd->npd", weight, (n, c, points), (n, points, spatial))
        result[1] = [(as_shape(from_shape([step], tuple(g.shape)), tuple(grid.shape)), g)]
    return result
