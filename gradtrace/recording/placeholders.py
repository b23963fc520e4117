"""Tensors that stand in for gradients that nobody will read.

What a backward program is does not depend on the gradient. Where only a semiring's values are
wanted, products and convolutions, which are nearly all of the work, need not be computed: a tensor
of the right shape serves as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def like(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers between 1/2 and 3/2 with no pattern to speak of, ``out[i, j, ...] = line[i + j +
    ...]``, in the memory of one line.
    """
    length = max(1, sum(shape) - len(shape) + 1)
    golden = 0.5 * (1 + 5**0.5)  # multiples of it are spread evenly over the unit interval
    base = torch.arange(length, dtype=torch.float64, device=device).mul_(golden).frac_().add_(0.5)
    return base.to(dtype).as_strided(tuple(shape), (1,) * len(shape))


def product(a: Tensor, b: Tensor) -> Tensor:
    """In place of ``a @ b``, of matrices or batches of them."""
    return like((*a.shape[:-1], b.shape[-1]), a.dtype, a.device)


def convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *args: Any) -> list[Any]:
    """In place of the operation of this name."""
    bias, mask = (weight.shape[1 if args[4] else 0],), args[-1]
    shapes: list[Sequence[int]] = [x.shape, weight.shape, bias]
    return [like(s, grad.dtype, grad.device) if m else None for s, m in zip(shapes, mask)]
