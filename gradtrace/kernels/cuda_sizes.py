"""How large tensors on a GPU are, many in two launches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradtrace.kernels import cuda_launch
from gradtrace.kernels.cuda_launch import KINDS, STEPS, THREADS, UNUSED_WORDS
from gradtrace.kernels.pointers import on_device
from gradtrace.kernels.strides import is_dense

MAX_TENSORS, ELEMENTS_PER_BLOCK = 64, 256 * 64
"""Tensors per launch, and elements per thread block; the same as in ``steps.cu``."""


def serves(xs: Sequence[Tensor]) -> bool:
    """Whether the kernels support these tensors: without gaps, of up to 32 bits an element."""
    known = all(x.dtype in KINDS and x.itemsize <= 4 and x.numel() and is_dense(x) for x in xs)
    return known and not any(x.is_neg() for x in xs) and cuda_launch.serves(STEPS, *xs)


def sizes(xs: Sequence[Tensor]) -> Tensor:
    """``Backend.sizes`` of tensors that are served, at least one."""
    device = xs[0].device
    counts = [-(-x.numel() // ELEMENTS_PER_BLOCK) for x in xs]
    rows = len(xs) + sum(counts)  # the results, and a row for each thread block
    table = torch.empty((rows, 4), dtype=torch.float64, device=device)
    out, partial = on_device(table), on_device(table) + 32 * len(xs)
    with cuda_launch.at(device):
        for start in range(0, len(xs), MAX_TENSORS):
            some, first = xs[start : start + MAX_TENSORS], 0
            words = [len(some)]
            for x, count in zip(some, counts[start:]):
                words += (on_device(x), x.numel(), KINDS[x.dtype], first, partial, out)
                first, partial, out = first + count, partial + 32 * count, out + 32
            words += UNUSED_WORDS[: 6 * (MAX_TENSORS - len(some))]
            given = tuple(words)
            cuda_launch.kernel(device, STEPS, "sizes")((first, 1, 1), THREADS, given)
            combine = cuda_launch.kernel(device, STEPS, "sizes_combined")
            combine((len(some), 1, 1), THREADS, given)
    return table[: len(xs)]
