"""Provenance ids on a GPU, element by element: the larger of terms, renumbering.

Tensors are read by their strides and in their own dtype, half precisions included.
"""

from __future__ import annotations

import sys
from ctypes import c_float
from functools import lru_cache

import torch
from torch import Tensor

from gradtrace.kernels import cuda_launch, tuning
from gradtrace.kernels.cuda_launch import KINDS, STEPS, TALLY_THREADS, THREADS, WIDE, blocks
from gradtrace.kernels.pointers import on_device
from gradtrace.kernels.strides import merged


def merge(size: Tensor, ids: Tensor, value: Tensor, other: Tensor | int, shift: int) -> bool:
    """``Backend.merge``; False if the kernel does not support the tensors."""
    n = size.numel()
    if not n or (isinstance(other, int) and not other):
        return True
    if value.dtype not in KINDS or size.dtype not in WIDE or ids.dtype is not torch.int32:
        return False
    shape = size.shape
    value = value if value.shape == shape else value.expand(shape)
    beside, constant = ids, other
    if isinstance(other, Tensor):
        beside, constant = other if other.dtype is torch.int32 else other.to(torch.int32), 0
        beside = beside if beside.shape == shape else beside.expand(shape)
    steps = size.stride(), ids.stride(), value.stride(), beside.stride()
    how = merged(shape, *steps)
    if how is None:
        return False
    there = 0 if isinstance(other, int) else on_device(beside)
    device = size.device
    with cuda_launch.at(device):
        cuda_launch.kernel(device, STEPS, f"merge_{WIDE[size.dtype]}")(
            blocks(n), THREADS,
            (
                on_device(size), on_device(ids), on_device(value), there, int(constant), shift,
                KINDS[value.dtype], n, *how,
            ),
        )  # fmt: skip
    return True


def merge_pair(
    first: Tensor,
    ids: Tensor | int,
    unmasked: bool,
    second: Tensor,
    others: Tensor | int,
    shift: int,
    sized: bool = False,
) -> tuple[Tensor, Tensor | None] | None:
    """``Backend.merge_pair``; the size only if ``sized``."""
    beside = [x for x in (ids, others) if isinstance(x, Tensor)]
    n, kind, other = first.numel(), KINDS.get(first.dtype), KINDS.get(second.dtype)
    if (
        not cuda_launch.serves(STEPS, first, second, *beside)
        or not n
        or kind is None
        or other is None
    ):
        return None
    shape, device = first.shape, first.device
    if second.shape != shape:
        return None
    for x in beside:
        if x.dtype is not torch.int32 or x.shape != shape:
            return None
    out, size = torch.empty(shape, dtype=torch.int32, device=device), None
    mine, here, one = _ids_operand(ids, out)
    theirs, there, another = _ids_operand(others, out)
    strides = (out.stride(), first.stride(), mine.stride(), second.stride(), theirs.stride())
    if sized:
        size = torch.empty(shape, dtype=WIDER[kind == 1], device=device)
    how = merged(shape, *strides, *(() if size is None else (size.stride(),)))
    if how is None:
        return None
    words = (
        on_device(out), on_device(first), here, on_device(second), there,
        0 if size is None else on_device(size), one, another, shift, int(unmasked), kind, other, n,
        *how,
    )  # fmt: skip
    with cuda_launch.at(device):
        cuda_launch.kernel(device, STEPS, LARGER[sized, kind == 1])(blocks(n), THREADS, words)
    return out, size


LARGER = {
    (False, False): "larger_float",
    (False, True): "larger_double",
    (True, False): "larger_sized_float",
    (True, True): "larger_sized_double",
}
"""Kernels of ``merge_pair``, by whether the size is wanted and whether values are double."""

WIDER = {False: torch.float32, True: torch.float64}
"""The dtype of sizes, by whether values are double."""


def scaled(x: Tensor, weight: Tensor | float, ids: Tensor | None) -> Tensor | None:
    """``Backend.scaled_ids``; None if the kernel does not support the tensors."""
    given = [each for each in (x, weight, ids) if isinstance(each, Tensor)]
    kind, shape, constant, by = KINDS.get(x.dtype, 1), x.shape, 0, x
    if isinstance(weight, Tensor):
        by = weight if weight.shape == shape else weight.expand(shape)
        other = KINDS.get(weight.dtype, 1)
    else:
        other, constant = 0, _bits(weight)
    if kind == 1 or other == 1 or not cuda_launch.serves(STEPS, *given):
        return None
    if ids is not None and (ids.dtype is not torch.int32 or ids.shape != shape):
        return None
    like = x if ids is None else ids
    out = torch.empty_like(like, dtype=torch.int32)
    beside = out if ids is None else ids
    how = merged(shape, out.stride(), x.stride(), by.stride(), beside.stride())
    if how is None:
        return None
    n, device = x.numel(), x.device
    if n:
        words = (
            on_device(out), on_device(x), on_device(by) if isinstance(weight, Tensor) else 0,
            0 if ids is None else on_device(ids), constant, kind, other, n, *how,
        )  # fmt: skip
        with cuda_launch.at(device):
            cuda_launch.kernel(device, STEPS, "scaled_ids")(blocks(n), THREADS, words)
    return out


@lru_cache(1024)
def _bits(number: float) -> int:
    """The bits of a number in float32."""
    return int.from_bytes(bytes(c_float(number)), sys.byteorder)


def _ids_operand(ids: Tensor | int, out: Tensor) -> tuple[Tensor, int, int]:
    """A tensor with the strides of the ids, their address, and the constant id. A tensor of ids
    has no constant (0); a constant has no address (0), and ``out`` supplies the strides.
    """
    return (ids, on_device(ids), 0) if isinstance(ids, Tensor) else (out, 0, ids)


def used(numbers: Tensor, count: int) -> Tensor | None:
    """Bitmap of the numbers below ``count`` that occur, lowest bit first, in int32 words. None if
    the kernel does not support the tensor.
    """
    if numbers.dtype is not torch.int32 or not cuda_launch.serves(STEPS, numbers):
        return None
    how = merged(numbers.shape, numbers.stride())
    if how is None:
        return None
    device, n, words = numbers.device, numbers.numel(), -(-count // 32)
    there = torch.zeros(words, dtype=torch.int32, device=device)
    if n and words:
        slots = min(words, tuning.SHARED_BYTES // 4)
        grid = min(-(-n // tuning.BLOCK_MIN_ELEMENTS), 2 * cuda_launch.processors(device))
        with cuda_launch.at(device):
            cuda_launch.kernel(device, STEPS, "used")(
                (grid, 1, 1), TALLY_THREADS,
                (on_device(numbers), on_device(there), words, slots, n, *how), 4 * slots,
            )  # fmt: skip
    return there


def closed(there: Tensor, count: int) -> Tensor:
    """Table that renumbers the numbers in the bitmap ``there`` (from ``used``) to 1, 2, ... without
    gaps, in order; other numbers below ``count``, and 0, become 0.
    """
    table = torch.empty(count, dtype=torch.int32, device=there.device)
    if count:
        with cuda_launch.at(there.device):
            words = on_device(there), on_device(table), count
            cuda_launch.kernel(there.device, STEPS, "close")((1, 1, 1), TALLY_THREADS, words)
    return table


def renumbered(numbers: Tensor, table: Tensor) -> Tensor | None:
    """``table[numbers]``, 0 for a number out of range; both int32, the table contiguous. None if
    the kernel does not support the tensors.
    """
    if numbers.dtype is not torch.int32 or not cuda_launch.serves(STEPS, numbers, table):
        return None
    out = torch.empty_like(numbers)
    how = merged(numbers.shape, out.stride(), numbers.stride())
    if how is None:
        return None
    n = numbers.numel()
    if n:
        with cuda_launch.at(numbers.device):
            cuda_launch.kernel(numbers.device, STEPS, "renumber")(
                blocks(n), THREADS,
                (on_device(out), on_device(numbers), on_device(table), len(table), n, *how),
            )  # fmt: skip
    return out
