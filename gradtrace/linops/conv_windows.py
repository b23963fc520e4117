"""A convolution's maps as batched matrix products over windows, which are not materialised.

Windows that extend beyond the border read zeros from a padded copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd, prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gradtrace.kernels import Matrices, Operand
from gradtrace.linops.indexing import merged_dims, strides_of
from gradtrace.types import Shape

Axis = tuple[Sequence[int], ...]
"""The memory offsets along one matrix axis: all sums of one number from each sequence, with the
last sequence varying fastest.
"""

Margins = list[tuple[int, int]]
"""The number of zeros before and after each of the last dimensions."""


# Memory layout -----------------------------------------------------------------------------------


class WindowLayout(NamedTuple):
    """The layout of a batch of matrices: element (i, r, k) is at offset
    ``first + batch[i] + rows[r] + inner[k]``.
    """

    first: int
    batch: Axis
    rows: Axis
    inner: Axis

    def left(self, data: Tensor) -> Matrices:
        """The matrices (batch, rows, inner); a strided view if each axis has a constant stride."""
        flat = data.reshape(-1)
        lines = [line for axis in self[1:] if (line := _constant_stride(axis)) is not None]
        if len(lines) == 3 and all(step >= 0 for _, step, _ in lines):
            sizes, steps, firsts = zip(*lines)
            return flat.as_strided(sizes, steps, flat.storage_offset() + self.first + sum(firsts))
        return Operand(flat, *self.offsets(data.device))

    def right(self, data: Tensor) -> Matrices:
        """The same as the right operand of a product: transposed to (batch, inner, rows)."""
        found = self.left(data)
        return found.transpose(1, 2) if isinstance(found, Tensor) else found

    def offsets(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """``first + batch``, ``rows`` and ``inner`` as tensors of offsets."""
        batch, rows, inner = (_sums(axis, device) for axis in self[1:])
        return batch + self.first, rows, inner


def _constant_stride(axis: Axis) -> tuple[int, int, int] | None:
    """(size, stride, first offset) of an axis with a constant stride; None for others."""
    parts = [part for part in axis if len(part) > 1]
    steps = tuple(part.step for part in parts if isinstance(part, range))
    merged = merged_dims(tuple(map(len, parts)), steps) if len(steps) == len(parts) else ()
    if len(merged) != bool(parts):
        return None
    _, size, step = merged[0] if merged else (1, 1, 0)
    return size, step, sum(part[0] for part in axis)


def _sums(axis: Axis, device: torch.device) -> Tensor:
    total = torch.zeros(1, dtype=torch.int64, device=device)
    for part in axis:
        total = (total.unsqueeze(1) + torch.tensor(part, device=device)).reshape(-1)
    return total


def _times(numbers: Sequence[int], step: int) -> Sequence[int]:
    """Each number times a positive step; a range stays a range."""
    if isinstance(numbers, range):
        return range(numbers.start * step, numbers.stop * step, numbers.step * step)
    return tuple(number * step for number in numbers)


def with_margins(x: Tensor, margins: Margins) -> Tensor:
    """A contiguous tensor padded with zeros along its last dimensions."""
    if not any(map(any, margins)):
        return x.contiguous()
    return F.pad(x, [size for pair in reversed(margins) for size in pair])


def _padded_strides(shape: Shape, margins: Margins) -> Shape:
    """The strides of the result of ``with_margins``."""
    return strides_of((*shape[:2], *(low + n + high for n, (low, high) in zip(shape[2:], margins))))


# Along one dimension -----------------------------------------------------------------------------


@dataclass(frozen=True)
class WindowLine:
    """Positions of the result along one dimension that read with the same shifts.

    Position ``firsts[c] + j·stride`` (class c, ``j < count``) reads, for each n, the element at
    ``j·step + shifts[n]``, with the weight of tap ``taps[c] + n·tap``. Shifts ascend with n.
    """

    firsts: Sequence[int]
    stride: int
    count: int
    step: int
    shifts: range
    taps: Sequence[int]
    tap: int

    @property
    def last(self) -> int:
        """The highest position that is read, perhaps beyond the last element."""
        return (self.count - 1) * self.step + self.shifts[-1]

    @property
    def gapless(self) -> bool:
        """Whether it has all classes modulo the stride, in order."""
        return list(self.firsts) == list(range(self.stride))

    def places(self, c: int) -> slice:
        """The positions of one class."""
        first = self.firsts[c]
        return slice(first, first + (self.count - 1) * self.stride + 1, self.stride)

    def along(self) -> range:
        """The offsets of the taps of a class from its lowest tap, in the order of shifts."""
        steps = range(0, len(self.shifts) * abs(self.tap), abs(self.tap))
        return steps if self.tap > 0 else steps[::-1]

    def lowest(self) -> Sequence[int]:
        """The lowest tap of each class."""
        down = min(0, (len(self.shifts) - 1) * self.tap)
        return [tap + down for tap in self.taps]


@dataclass(frozen=True)
class Dimension:
    """A convolution along one dimension: ``p = q·stride + tap·dilation − padding``."""

    stride: int
    padding: int
    dilation: int
    taps: int

    def over_p(self, places: int, size: int) -> list[WindowLine]:
        """How a result over q reads elements over p; ``places`` is the result's size, ``size`` that
        of the input.
        """
        shifts = range(-self.padding, self.taps * self.dilation - self.padding, self.dilation)
        used = _used(shifts, (places - 1) * self.stride, size)
        if not used:
            return []
        shifts = shifts[used[0] : used[-1] + 1]
        return [WindowLine((0,), 1, places, self.stride, shifts, (used[0],), 1)]

    def over_q(self, places: int, size: int) -> list[WindowLine]:
        """How a result over p reads elements over q.

        Positions with the same remainder modulo the stride read the same taps; remainders with
        equal counts and shifts become classes of one ``WindowLine``.
        """
        groups: dict[tuple[int, range], list[tuple[int, int]]] = {}
        tap_step = self.stride // gcd(self.stride, self.dilation)
        for first in range(min(self.stride, places)):
            count = -(-(places - first) // self.stride)
            taps = self._taps_to(first, tap_step)
            shifts = [self._q_of(first, tap) for tap in taps]
            used = _used(shifts, count - 1, size)
            if used:
                step = tap_step * self.dilation // self.stride
                there = range(shifts[used[0]], shifts[used[-1]] + 1, step)
                groups.setdefault((count, there), []).append((first, taps[used[0]]))
        return [
            WindowLine(
                [p for p, _ in members],
                self.stride,
                count,
                1,
                shifts,
                [t for _, t in members],
                -tap_step,
            )
            for (count, shifts), members in groups.items()
        ]

    def _taps_to(self, p: int, tap_step: int) -> Sequence[int]:
        """The taps through which some q contributes to p, descending, so that q ascends."""
        for tap in range(min(tap_step, self.taps)):
            if (p + self.padding - tap * self.dilation) % self.stride == 0:
                return range(tap, self.taps, tap_step)[::-1]
        return []

    def _q_of(self, p: int, tap: int) -> int:
        """The q that contributes to p through a tap."""
        return (p + self.padding - tap * self.dilation) // self.stride

    def margin(self, places: int, size: int) -> tuple[int, int]:
        """How far the windows of all ``q < places`` extend beyond both ends of p."""
        last = (places - 1) * self.stride + (self.taps - 1) * self.dilation - self.padding
        return self.padding, max(0, last - size + 1)


def _used(shifts: Sequence[int], span: int, size: int) -> list[int]:
    """The shifts that lead to an element within ``size`` from at least one position."""
    return [n for n, shift in enumerate(shifts) if shift + span >= 0 and shift < size]


def _margin(lines: list[WindowLine], size: int) -> tuple[int, int]:
    """How far window lines extend beyond both ends of a dimension."""
    low = max((-line.shifts[0] for line in lines), default=0)
    return max(low, 0), max(max((line.last for line in lines), default=0) - size + 1, 0)


# Along all of them -------------------------------------------------------------------------------


class Piece(NamedTuple):
    """One batched product of the map's input with ``right``: the layout of the input's matrices in
    its padded copy and, for the map to the input, the positions of the result that it computes
    (``lines``).
    """

    left: WindowLayout
    right: Matrices
    lines: tuple[WindowLine, ...] = ()


@dataclass(frozen=True)
class WindowProducts:
    """A convolution's map as batched products. ``margins`` are those of the map's input, ``beyond``
    says whether either operand has any. The result has ``shape`` (batch, groups, channels of a
    group, *places); for the map to the kernel, the shape is permuted by ``order``.
    """

    pieces: list[Piece]
    margins: Margins
    beyond: bool
    shape: Shape
    order: tuple[int, ...] = ()

    def whole(self, found: list[Tensor]) -> Tensor:
        """The result assembled from those of the pieces; 0 where no piece writes."""
        if self.order:
            return found[0].reshape(self.shape).permute(self.order)
        parts = [self._unpacked(*pair) for pair in zip(self.pieces, found)]
        gapless = all(line.gapless for line in self.pieces[0].lines)
        if len(parts) == 1 and gapless and parts[0].numel() == prod(self.shape):
            return parts[0].reshape(self.shape)
        out = found[0].new_zeros(self.shape)
        for piece, part in zip(self.pieces, parts):
            for numbers in product(*(range(len(line.firsts)) for line in piece.lines)):
                there = tuple(line.places(n) for line, n in zip(piece.lines, numbers))
                taken = part
                for d, n in enumerate(numbers):
                    taken = taken.select(4 + d, n)
                out[(...,) + there] = taken
        return out

    def _unpacked(self, piece: Piece, found: Tensor) -> Tensor:
        """(groups, rows, columns) as (batch, groups, channels, place, class, place, class, ...)."""
        batch, groups, channels = self.shape[:3]
        d = len(piece.lines)
        counts = [line.count for line in piece.lines]
        classes = [len(line.firsts) for line in piece.lines]
        found = found.reshape(groups, batch, *counts, channels, *classes)
        pairs = [at for n in range(d) for at in (2 + n, 3 + d + n)]
        return found.permute(1, 0, 2 + d, *pairs)


def to_input(
    how: Sequence[Dimension],
    shape: Shape,
    result: Shape,
    kernel: Tensor,
    groups: int,
    transposed: bool,
) -> WindowProducts:
    """The map from a cotangent of this shape to the convolution's input: a product
    ``windows · kernel`` for each combination of window lines.
    """
    batch, channels, *places = result
    lines = [
        d.over_p(n, size) if transposed else d.over_q(n, size)
        for d, n, size in zip(how, places, shape[2:])
    ]
    sizes = (batch, groups, shape[1] // groups, channels // groups)
    margins = [_margin(some, size) for some, size in zip(lines, shape[2:])]
    kernel = kernel.contiguous()
    pieces = []
    for some in product(*lines):
        left = _input_windows(some, sizes, _padded_strides(shape, margins), margins)
        right = _kernel_layout(some, sizes, strides_of(tuple(kernel.shape)), transposed)
        pieces.append(Piece(left, right.right(kernel), some))
    grouped = (batch, groups, channels // groups, *places)
    return WindowProducts(pieces, margins, any(map(any, margins)), grouped)


def _input_windows(
    lines: tuple[WindowLine, ...], sizes: Shape, strides: Shape, margins: Margins
) -> WindowLayout:
    """The layout of windows: rows are (sample, *place), inner is (channel, *tap)."""
    batch, groups, outs, _ = sizes
    sample, channel, *steps = strides
    along = list(zip(lines, steps))
    counts = [_times(range(line.count), line.step * step) for line, step in along]
    taps = [_times(range(len(line.shifts)), line.shifts.step * step) for line, step in along]
    return WindowLayout(
        sum((low + line.shifts[0]) * step for (low, _), (line, step) in zip(margins, along)),
        (_times(range(groups), outs * channel),),
        (_times(range(batch), sample), *counts),
        (_times(range(outs), channel), *taps),
    )


def _kernel_layout(
    lines: tuple[WindowLine, ...], sizes: Shape, strides: Shape, transposed: bool
) -> WindowLayout:
    """The layout of the kernel: rows are (channel of the result, *class), inner is
    (channel, *tap).
    """
    _, groups, outs, ins = sizes
    first, second, *steps = strides
    made, taken, group = (first, second, ins) if transposed else (second, first, outs)
    classes = [_times(line.lowest(), step) for line, step in zip(lines, steps)]
    taps = [_times(line.along(), step) for line, step in zip(lines, steps)]
    return WindowLayout(
        0,
        (_times(range(groups), group * first),),
        (_times(range(ins), made), *classes),
        (_times(range(outs), taken), *taps),
    )


def to_kernel(
    how: Sequence[Dimension], shape: Shape, other: Tensor, groups: int, transposed: bool
) -> WindowProducts:
    """The map from a cotangent of this shape to the kernel. The sum runs over samples and positions
    q; of the two tensors the one over p is read in windows.
    """
    narrow, broad = (tuple(other.shape), shape) if transposed else (shape, tuple(other.shape))
    margins = [d.margin(q, p) for d, q, p in zip(how, narrow[2:], broad[2:])]
    channels = _channel_layout(narrow, groups)
    windows = _window_layout(how, narrow, broad, groups, margins)
    taps, beyond = tuple(d.taps for d in how), any(map(any, margins))
    over_q, over_p = narrow[1] // groups, broad[1] // groups
    if transposed:
        last = 2 + len(how)
        piece = Piece(windows, channels.right(other.contiguous()))
        result, order = (groups, over_p, *taps, over_q), (0, last, *range(1, last))
        return WindowProducts([piece], margins, beyond, result, order)
    piece = Piece(channels, windows.right(with_margins(other, margins)))
    result, order = (groups, over_q, over_p, *taps), tuple(range(3 + len(how)))
    return WindowProducts([piece], [(0, 0)] * len(how), beyond, result, order)


def _channel_layout(shape: Shape, groups: int) -> WindowLayout:
    """The layout of the tensor over q: rows are channels, inner is (sample, *place)."""
    sample, channel, *steps = strides_of(shape)
    per = shape[1] // groups
    return WindowLayout(
        0,
        (_times(range(groups), per * channel),),
        (_times(range(per), channel),),
        (_times(range(shape[0]), sample), *map(_times, map(range, shape[2:]), steps)),
    )


def _window_layout(
    how: Sequence[Dimension], narrow: Shape, broad: Shape, groups: int, margins: Margins
) -> WindowLayout:
    """The layout of the windows of the tensor over p: rows are (channel, *tap), inner is
    (sample, *place q).
    """
    sample, channel, *steps = _padded_strides(broad, margins)
    per, along = broad[1] // groups, list(zip(how, steps))
    taps = [_times(range(d.taps), d.dilation * step) for d, step in along]
    places = [_times(range(q), d.stride * step) for q, (d, step) in zip(narrow[2:], along)]
    return WindowLayout(
        sum((low - d.padding) * step for (low, _), (d, step) in zip(margins, along)),
        (_times(range(groups), per * channel),),
        (_times(range(per), channel), *taps),
        (_times(range(narrow[0]), sample), *places),
    )
