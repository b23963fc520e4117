"""Products of float32 with bfloat16 matrices on tensor cores, summed in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from gradtrace.kernels import cuda_launch, tuning
from gradtrace.kernels.cuda_launch import STEPS, THREADS
from gradtrace.kernels.pointers import on_device

FEW_PARTS, ALL_PARTS = 2, 3
"""Of 8 significant bits each; three make all 24 of a float32 number. From some 256 products on the
bound of their sum is larger than what two leave out.
"""


def serves(a: Tensor, b: Tensor) -> bool:
    """Whether there are products of half-precision matrices with results in float32 (since torch
    2.8), and these are operands of one that pays.
    """
    there = hasattr(torch.ops.aten.bmm, "dtype")  # the overload
    half = a.dtype is torch.float32 and b.dtype is torch.bfloat16
    some = a.numel() > 0 and b.numel() > 0
    return there and half and some and _pays(a, b) and cuda_launch.serves(STEPS, a, b)


def _pays(a: Tensor, b: Tensor) -> bool:
    """Whether the product takes long, and splitting a, which it reads n times, does not."""
    n = b.shape[2]
    long = a.numel() * n >= tuning.SPLIT_PRODUCT_MIN_PRODUCTS
    return long and n >= tuning.SPLIT_PRODUCT_MIN_COLUMNS


def product(a: Tensor, b: Tensor) -> Tensor:
    """``Σₖ a[i, m, k]·b[i, k, n]`` for float32 a and bfloat16 b.

    Every element of a is the sum of bfloat16 numbers: of three, or of two to 2⁻¹⁶ of it if many are
    summed. Their products are exact, and summed in float32, so that for a, b ≥ 0 and p parts the
    relative error is at most (p·k + p)·2⁻²⁴, and 2⁻¹⁶ more with two; that of a float32 product is
    (k + 1)·2⁻²⁴.
    """
    parts = FEW_PARTS if a.shape[2] >= tuning.TWO_PARTS_MIN_K else ALL_PARTS
    return summed_products(split(a, parts), repeated(b, parts))


@cuda_launch.as_one_call
def split(a: Tensor, parts: int) -> Tensor:
    """(i, m, parts · k): the largest parts of every row, then the smaller ones."""
    i, m, k = a.shape
    a = a.contiguous()
    found = torch.empty((i, m, parts * k), dtype=torch.bfloat16, device=a.device)
    words = (on_device(a), on_device(found), a.numel(), k, parts)
    with cuda_launch.at(a.device):
        run = cuda_launch.kernel(a.device, STEPS, "split")
        run(cuda_launch.blocks(a.numel()), THREADS, words)
    return found


def repeated(b: Tensor, parts: int) -> Tensor:
    """(i, parts · k, n): the same factors for all parts, laid out as b is."""
    if b.stride(1) < b.stride(2):
        return torch.cat([b.mT] * parts, 2).mT
    return torch.cat([b] * parts, 1)


def summed_products(parts: Tensor, b: Tensor) -> Tensor:
    """A product of bfloat16 matrices, summed and returned in float32."""
    return torch.bmm(parts, b, out_dtype=torch.float32)
