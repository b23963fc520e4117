"""Products of float32 with bfloat16 matrices on tensor cores, summed in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from gradtrace.kernels import cuda_launch, tuning
from gradtrace.kernels.cuda_launch import STEPS, THREADS
from gradtrace.kernels.pointers import on_device

PARTS = 2
"""Of 8 significant bits each. A third would make all 24 of a float32 number, for half again the
work; from some 256 products on the bound of their sum is larger than what two leave out.
"""


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

    Every element of a is the sum of two bfloat16 numbers, to 2⁻¹⁶ of it. Their products are exact,
    and summed in float32, so that for a, b ≥ 0 the relative error is at most 2⁻¹⁶ + (2k + 2)·2⁻²⁴;
    that of a float32 product is (k + 1)·2⁻²⁴.
    """
    return summed_products(split(a), repeated(b))


@cuda_launch.as_one_call
def split(a: Tensor) -> Tensor:
    """(i, m, 2k): the larger parts of every row, then the smaller ones."""
    i, m, k = a.shape
    a = a.contiguous()
    parts = torch.empty((i, m, PARTS * k), dtype=torch.bfloat16, device=a.device)
    words = (on_device(a), on_device(parts), a.numel(), k)
    with cuda_launch.at(a.device):
        run = cuda_launch.kernel(a.device, STEPS, "split")
        run(cuda_launch.blocks(a.numel()), THREADS, words)
    return parts


def repeated(b: Tensor) -> Tensor:
    """(i, 2k, n): the same factors for both parts, laid out as b is."""
    if b.stride(1) < b.stride(2):
        return torch.cat([b.mT] * PARTS, 2).mT
    return torch.cat([b] * PARTS, 1)


def summed_products(parts: Tensor, b: Tensor) -> Tensor:
    """A product of bfloat16 matrices, summed and returned in float32."""
    return torch.bmm(parts, b, out_dtype=torch.float32)
