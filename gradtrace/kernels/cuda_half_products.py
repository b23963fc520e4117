"""Products of float32 with bfloat16 matrices on tensor cores, summed in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from gradtrace.kernels import cuda_launch, tuning
from gradtrace.kernels.cuda_launch import STEPS, THREADS
from gradtrace.kernels.pointers import on_device

PARTS = 3
"""A float32 number has 24 significant bits, a bfloat16 number 8."""


def serves(a: Tensor, b: Tensor) -> bool:
    """Whether there are products of half-precision matrices with results in float32 (since torch
    2.8), and these are operands of one.
    """
    there = hasattr(torch.ops.aten.bmm, "dtype")  # the overload
    half = a.dtype is torch.float32 and b.dtype is torch.bfloat16
    pays = a.numel() > 0 and b.numel() > 0 and a.shape[-1] >= tuning.SPLIT_PRODUCT_MIN_K
    return there and half and pays and cuda_launch.serves(STEPS, a, b)


def product(a: Tensor, b: Tensor) -> Tensor:
    """``Σₖ a[i, m, k]·b[i, k, n]`` for float32 a and bfloat16 b.

    Every element of a is the sum of three bfloat16 numbers, exactly, so that all products are exact
    too. They are summed in float32: for a, b ≥ 0 the relative error is at most (k + 2)·2⁻²⁴, the
    bound of a float32 product whose sums are rounded one by one.
    """
    i, m, k = a.shape
    parts = split(a).view(i, PARTS * m, k)
    found = summed_products(parts, b)
    return found.view(i, PARTS, m, -1).sum(1)


def split(a: Tensor) -> Tensor:
    """(i, 3, m, k): the three parts of every element, the largest first."""
    i, m, k = a.shape
    a = a.contiguous()
    parts = torch.empty((i, PARTS, m, k), dtype=torch.bfloat16, device=a.device)
    words = (on_device(a), on_device(parts), a.numel(), m * k)
    with cuda_launch.at(a.device):
        run = cuda_launch.kernel(a.device, STEPS, "split")
        run(cuda_launch.blocks(a.numel()), THREADS, words)
    return parts


def summed_products(parts: Tensor, b: Tensor) -> Tensor:
    """A product of bfloat16 matrices, summed and returned in float32."""
    return torch.bmm(parts, b, out_dtype=torch.float32)
