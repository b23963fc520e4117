"""The TopK contraction on a GPU: keeps the largest products in registers, materialises none."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradtrace.kernels import cuda_launch
from gradtrace.kernels.pointers import on_device

FILE = "top.cu"
MAX_PARTS = 8
"""The most products per result that are kept in registers."""

MAX_BATCH = 65_535
"""The most matrices per launch."""

ROWS, COLUMNS = 16, 64
NAMES = {torch.float32: "top_float", torch.float64: "top_double"}
NULL_PART = (0, 0, 0, 0)


def serves(parts: Sequence[Tensor], weight: Tensor) -> bool:
    """Whether these parts can be contracted with the weight; half precision is taken as float32."""
    dtype = torch.float32 if weight.dtype.itemsize == 2 else weight.dtype
    if (
        len(parts) > MAX_PARTS
        or dtype not in NAMES
        or any(part.dtype is not dtype for part in parts)
    ):
        return False
    return cuda_launch.serves(FILE, weight, *parts)


def contraction(parts: Sequence[Tensor], weight: Tensor) -> tuple[Tensor, ...]:
    """The ``len(parts)`` largest of ``parts[p][i, m, k] · weight[i, k, n]`` over k and p, in
    descending order, each (i, m, n). Values are nonnegative, and ``parts[p]`` descends in p.
    """
    (i, m, k), n, device = parts[0].shape, weight.shape[2], weight.device
    shape = (len(parts), i, m, n)
    if not k or not i * m * n:
        return torch.zeros(shape, dtype=weight.dtype, device=device).unbind()
    out = torch.empty(shape, dtype=weight.dtype, device=device)
    grid = -(-m // ROWS) * -(-n // COLUMNS)
    first = on_device(weight), weight.stride(0), weight.stride(2), weight.stride(1)
    given = [word for part in parts for word in (on_device(part), *part.stride())]
    rest = NULL_PART * (MAX_PARTS - len(parts))
    with cuda_launch.at(device):
        kernel = cuda_launch.kernel(device, FILE, NAMES[weight.dtype], (f"TOP {len(parts)}",))
        for at in range(0, i, MAX_BATCH):
            some, step = min(MAX_BATCH, i - at), weight.element_size()
            here = [
                word + step * at * given[4 * (place // 4) + 1] if place % 4 == 0 else word
                for place, word in enumerate(given)
            ]
            right = (first[0] + step * at * first[1], *first[1:])
            there = on_device(out) + step * at * m * n
            kernel(
                (grid, 1, some), (16, 16, 1), (*here, *rest, *right, m, n, k, i * m * n, there)
            )  # fmt: skip
    return out.unbind()
