"""Placeholder tensors for gradients that are never read.

The maps of a backward program do not depend on the gradient. Where only the values of a semiring
are needed, matrix products and convolutions, which are nearly all of the work, need not be
computed: a tensor of the same shape, dtype and device replaces them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def like(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Irregular numbers in [1/2, 3/2): ``out[i, j, ...] = base[i + j + ...]``.

    All strides are 1, so the storage holds only ``1 + sum(n - 1 for n in shape)`` elements.
    """
    length = max(1, sum(shape) - len(shape) + 1)
    golden = 0.5 * (1 + 5**0.5)  # its multiples modulo 1 are spread evenly over [0, 1)
    base = torch.arange(length, dtype=torch.float64, device=device).mul_(golden).frac_().add_(0.5)
    return base.to(dtype).as_strided(tuple(shape), (1,) * len(shape))


def product(a: Tensor, b: Tensor) -> Tensor:
    """A placeholder for ``a @ b``, of matrices or batches of matrices."""
    return like((*a.shape[:-1], b.shape[-1]), a.dtype, a.device)


def convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *args: Any) -> list[Any]:
    """Placeholders for the results of ``aten::convolution_backward``."""
    bias, mask = (weight.shape[1 if args[4] else 0],), args[-1]
    shapes: list[Sequence[int]] = [x.shape, weight.shape, bias]
    return [like(s, grad.dtype, grad.device) if m else None for s, m in zip(shapes, mask)]
