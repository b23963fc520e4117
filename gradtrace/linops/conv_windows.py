"""A convolution's maps as batched products of windows that are not written out.

Where a window reaches over the border it reads the zeros that a padded copy has there.
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
from gradtrace.linops.base import strides_of
from gradtrace.types import Shape

Axis = tuple[Sequence[int], ...]
"""What an index adds to an element's number: one choice of each sequence, the last fastest."""

Margins = list[tuple[int, int]]
"""How many zeros lie before and behind each of the last dimensions."""


# Where elements are ------------------------------------------------------------------------------


class WindowLayout(NamedTuple):
    """Where the elements of a batch of matrices are: ``first + batch[i] + rows[r] + inner[k]``."""

    first: int
    batch: Axis
    rows: Axis
    inner: Axis

    def left(self, data: Tensor) -> Matrices:
        """The matrices (batch, rows, inner), as a view if each axis has one step."""
        flat = data.reshape(-1)
        lines = [line for axis in self[1:] if (line := _line(axis)) is not None]
        if len(lines) == 3 and all(step >= 0 for _, step, _ in lines):
            sizes, steps, firsts = zip(*lines)
            return flat.as_strided(sizes, steps, flat.storage_offset() + self.first + sum(firsts))
        return Operand(flat, *self.offsets(data.device))

    def right(self, data: Tensor) -> Matrices:
        """The same as the right operand of a product, whose rows are its columns."""
        found = self.left(data)
        return found.transpose(1, 2) if isinstance(found, Tensor) else found

    def offsets(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """``first + batch``, ``rows`` and ``inner``, written out."""
        batch, rows, inner = (_sums(axis, device) for axis in self[1:])
        return batch + self.first, rows, inner


def _line(axis: Axis) -> tuple[int, int, int] | None:
    """(size, step, first) of an axis whose elements are equally far apart."""
    size, step = 1, 0
    for part in reversed(axis):
        if len(part) == 1:
            continue
        if not isinstance(part, range) or (size > 1 and part.step != size * step):
            return None
        step = step if size > 1 else part.step
        size *= len(part)
    return size, step, sum(part[0] for part in axis)


def _sums(axis: Axis, device: torch.device) -> Tensor:
    total = torch.zeros(1, dtype=torch.int64, device=device)
    for part in axis:
        total = (total.unsqueeze(1) + torch.tensor(part, device=device)).reshape(-1)
    return total


def _times(numbers: Sequence[int], step: int) -> Sequence[int]:
    """Each number times a positive step."""
    if isinstance(numbers, range):
        return range(numbers.start * step, numbers.stop * step, numbers.step * step)
    return tuple(number * step for number in numbers)


def with_margins(x: Tensor, margins: Margins) -> Tensor:
    """A tensor with zeros around its last dimensions; itself if there are none."""
    if not any(map(any, margins)):
        return x.contiguous()
    return F.pad(x, [size for pair in reversed(margins) for size in pair])


def _broadened(shape: Shape, margins: Margins) -> Shape:
    """The shape of ``with_margins``."""
    return (*shape[:2], *(low + n + high for n, (low, high) in zip(shape[2:], margins)))


# Along one dimension -----------------------------------------------------------------------------


@dataclass(frozen=True)
class WindowLine:
    """Places of the result along a dimension that read alike.

    Place ``firsts[c] + j·stride`` takes, for each n, the element at ``j·step + shifts[n]``, with
    the weight of tap ``taps[c] + n·tap``; shifts rise with n.
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
        """The highest place that is read, perhaps behind the last element."""
        return (self.count - 1) * self.step + self.shifts[-1]

    @property
    def gapless(self) -> bool:
        """Whether its classes are all there are, in order."""
        return list(self.firsts) == list(range(self.stride))

    def places(self, c: int) -> slice:
        """Those of one class."""
        first = self.firsts[c]
        return slice(first, first + (self.count - 1) * self.stride + 1, self.stride)

    def along(self) -> range:
        """Steps from the lowest tap of a class."""
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
        """The lines of a result over q that is made of elements over p."""
        shifts = range(-self.padding, self.taps * self.dilation - self.padding, self.dilation)
        used = _used(shifts, (places - 1) * self.stride, size)
        if not used:
            return []
        shifts = shifts[used[0] : used[-1] + 1]
        return [WindowLine((0,), 1, places, self.stride, shifts, (used[0],), 1)]

    def over_q(self, places: int, size: int) -> list[WindowLine]:
        """The lines of a result over p that is made of elements over q.

        Places with one remainder modulo the stride read through the same taps; remainders whose
        taps lie alike are taken together.
        """
        alike: dict[tuple[int, range], list[tuple[int, int]]] = {}
        apart = self.stride // gcd(self.stride, self.dilation)
        for first in range(min(self.stride, places)):
            count = -(-(places - first) // self.stride)
            taps = self._meeting(first, apart)
            shifts = [self._met(first, tap) for tap in taps]
            used = _used(shifts, count - 1, size)
            if used:
                step = apart * self.dilation // self.stride
                there = range(shifts[used[0]], shifts[used[-1]] + 1, step)
                alike.setdefault((count, there), []).append((first, taps[used[0]]))
        return [
            WindowLine(
                [p for p, _ in members],
                self.stride,
                count,
                1,
                shifts,
                [t for _, t in members],
                -apart,
            )
            for (count, shifts), members in alike.items()
        ]

    def _meeting(self, p: int, apart: int) -> Sequence[int]:
        """The taps through which some q meets p, falling, so that q rises."""
        for tap in range(min(apart, self.taps)):
            if (p + self.padding - tap * self.dilation) % self.stride == 0:
                return range(tap, self.taps, apart)[::-1]
        return []

    def _met(self, p: int, tap: int) -> int:
        return (p + self.padding - tap * self.dilation) // self.stride

    def margin(self, places: int, size: int) -> tuple[int, int]:
        """How far windows at q below ``places`` reach beyond both ends of p."""
        last = (places - 1) * self.stride + (self.taps - 1) * self.dilation - self.padding
        return self.padding, max(0, last - size + 1)


def _used(shifts: Sequence[int], span: int, size: int) -> list[int]:
    """Which shifts lead to an element from any place."""
    return [n for n, shift in enumerate(shifts) if shift + span >= 0 and shift < size]


def _margin(lines: list[WindowLine], size: int) -> tuple[int, int]:
    """How far lines reach beyond both ends of a dimension."""
    low = max((-line.shifts[0] for line in lines), default=0)
    return max(low, 0), max(max((line.last for line in lines), default=0) - size + 1, 0)


# Along all of them -------------------------------------------------------------------------------


class Piece(NamedTuple):
    """One batched product of what the map is applied to with ``right``: where its matrices lie in
    the padded copy (``left``), where in the tensor itself (``source``), and, to the input, for
    which places it is.
    """

    left: WindowLayout
    source: WindowLayout
    right: Matrices
    lines: tuple[WindowLine, ...] = ()


@dataclass(frozen=True)
class WindowProducts:
    """A convolution's map as products. ``margins`` are those of what it is applied to, ``beyond``
    says whether either side has any; the result is (batch, groups, channels of a group, *places),
    or, to the kernel, in an order of its own.
    """

    pieces: list[Piece]
    margins: Margins
    beyond: bool
    shape: Shape
    order: tuple[int, ...] = ()

    def whole(self, found: list[Tensor], nothing: int) -> Tensor:
        """The result from that of each piece; ``nothing`` where no piece leads to."""
        if self.order:
            return found[0].reshape(self.shape).permute(self.order)
        parts = [self._turned(*pair) for pair in zip(self.pieces, found)]
        gapless = all(line.gapless for line in self.pieces[0].lines)
        if len(parts) == 1 and gapless and parts[0].numel() == prod(self.shape):
            return parts[0].reshape(self.shape)
        out = found[0].new_full(self.shape, nothing)
        for piece, part in zip(self.pieces, parts):
            for numbers in product(*(range(len(line.firsts)) for line in piece.lines)):
                there = tuple(line.places(n) for line, n in zip(piece.lines, numbers))
                taken = part
                for d, n in enumerate(numbers):
                    taken = taken.select(4 + d, n)
                out[(...,) + there] = taken
        return out

    def _turned(self, piece: Piece, found: Tensor) -> Tensor:
        """(groups, rows, columns) as (batch, groups, channels, place, class, place, class, ...)."""
        batch, groups, channels = self.shape[:3]
        d = len(piece.lines)
        counts = [line.count for line in piece.lines]
        classes = [len(line.firsts) for line in piece.lines]
        found = found.reshape(groups, batch, *counts, channels, *classes)
        pairs = [at for n in range(d) for at in (2 + n, 3 + d + n)]
        return found.permute(1, 0, 2 + d, *pairs)


def to_input(
    lines: Sequence[list[WindowLine]], shape: Shape, result: Shape, kernel: Tensor, transposed: bool
) -> WindowProducts:
    """From a cotangent of this shape to ``result`` (batch, groups, channels of a group, *places):
    ``windows · kernel`` for each choice of lines.
    """
    batch, groups, ins = result[:3]
    sizes = (batch, groups, shape[1] // groups, ins)
    margins = [_margin(some, size) for some, size in zip(lines, shape[2:])]
    outside = strides_of(_broadened(shape, margins))
    kernel = kernel.contiguous()
    pieces = []
    for some in product(*lines):
        left = _windows(some, sizes, outside, [low for low, _ in margins])
        source = _windows(some, sizes, strides_of(shape), [0] * len(margins))
        right = _taps(some, sizes, strides_of(tuple(kernel.shape)), transposed).right(kernel)
        pieces.append(Piece(left, source, right, some))
    return WindowProducts(pieces, margins, any(map(any, margins)), result)


def _windows(
    lines: tuple[WindowLine, ...], sizes: Shape, strides: Shape, lows: list[int]
) -> WindowLayout:
    """Rows are (sample, *place), inner is (channel, *tap)."""
    batch, groups, outs, _ = sizes
    sample, channel, *steps = strides
    along = list(zip(lines, steps))
    return WindowLayout(
        sum((low + line.shifts[0]) * step for low, (line, step) in zip(lows, along)),
        (_times(range(groups), outs * channel),),
        (
            _times(range(batch), sample),
            *(_times(range(line.count), line.step * step) for line, step in along),
        ),
        (
            _times(range(outs), channel),
            *(_times(range(len(line.shifts)), line.shifts.step * step) for line, step in along),
        ),
    )


def _taps(
    lines: tuple[WindowLine, ...], sizes: Shape, strides: Shape, transposed: bool
) -> WindowLayout:
    """Rows are (channel of the result, *class), inner is (channel, *tap)."""
    _, groups, outs, ins = sizes
    first, second, *steps = strides
    made, taken, group = (first, second, ins) if transposed else (second, first, outs)
    return WindowLayout(
        0,
        (_times(range(groups), group * first),),
        (
            _times(range(ins), made),
            *(_times(line.lowest(), step) for line, step in zip(lines, steps)),
        ),
        (
            _times(range(outs), taken),
            *(_times(line.along(), step) for line, step in zip(lines, steps)),
        ),
    )


def to_kernel(
    how: Sequence[Dimension], shape: Shape, other: Tensor, groups: int, transposed: bool
) -> WindowProducts:
    """From a cotangent of this shape to the kernel: the sum runs over samples and places q, and of
    the two tensors the one over p is read in windows.
    """
    narrow, broad = (tuple(other.shape), shape) if transposed else (shape, tuple(other.shape))
    margins = [d.margin(q, p) for d, q, p in zip(how, narrow[2:], broad[2:])]
    padded = strides_of(_broadened(broad, margins))
    plain = _plain(narrow, groups)
    windows = _swept(how, narrow, broad[1] // groups, (groups, padded), margins)
    taps = tuple(d.taps for d in how)
    each = (narrow[1] // groups, broad[1] // groups)
    none, beyond = [(0, 0)] * len(how), any(map(any, margins))
    if transposed:
        source = _swept(how, narrow, each[1], (groups, strides_of(broad)), none)
        piece = Piece(windows, source, plain.right(other.contiguous()))
        last = 2 + len(how)
        order = (0, last, *range(1, last))
        return WindowProducts([piece], margins, beyond, (groups, each[1], *taps, each[0]), order)
    piece = Piece(plain, plain, windows.right(with_margins(other, margins)))
    order = tuple(range(3 + len(how)))
    return WindowProducts([piece], none, beyond, (groups, *each, *taps), order)


def _plain(shape: Shape, groups: int) -> WindowLayout:
    """Rows are channels, inner is (sample, *place)."""
    sample, channel, *steps = strides_of(shape)
    per = shape[1] // groups
    return WindowLayout(
        0,
        (_times(range(groups), per * channel),),
        (_times(range(per), channel),),
        (_times(range(shape[0]), sample), *map(_times, map(range, shape[2:]), steps)),
    )


def _swept(
    how: Sequence[Dimension],
    narrow: Shape,
    per: int,
    broad: tuple[int, Shape],
    margins: Margins,
) -> WindowLayout:
    """Rows are (channel, *tap), inner is (sample, *place q), in a tensor over p."""
    groups, (sample, channel, *steps) = broad
    along = list(zip(how, steps))
    first = sum((low - d.padding) * step for (low, _), (d, step) in zip(margins, along))
    places = [_times(range(q), d.stride * step) for q, (d, step) in zip(narrow[2:], along)]
    return WindowLayout(
        first,
        (_times(range(groups), per * channel),),
        (
            _times(range(per), channel),
            *(_times(range(d.taps), d.dilation * step) for d, step in along),
        ),
        (_times(range(narrow[0]), sample), *places),
    )
