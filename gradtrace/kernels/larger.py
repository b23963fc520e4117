"""Of two terms of a sum the larger, element by element: its mark, in one pass over memory."""

from __future__ import annotations

import torch
from torch import Tensor

from gradtrace.kernels import launch
from gradtrace.kernels.between import KINDS, THREADS, WIDE, _blocks, _together

FILE = "larger.cu"


def larger(
    first: Tensor,
    marks: Tensor | int,
    loose: bool,
    second: Tensor,
    others: Tensor | int,
    shift: int,
) -> Tensor | None:
    """``others + shift`` where others is not 0 and |second| is larger than |first|, else ``marks``;
    of ``loose`` marks only those count whose element is not 0. NaN is largest of all, and the first
    of equals stays. None where there is no kernel for it: ``steps.merge`` says the same in more
    steps.
    """
    beside = [x for x in (marks, others) if isinstance(x, Tensor)]
    if not launch.serves(FILE, first, second, *beside) or not first.numel():
        return None
    if first.dtype not in KINDS or second.dtype not in KINDS:
        return None
    shape = first.shape
    if any(x.dtype is not torch.int32 or x.shape != shape for x in beside) or second.shape != shape:
        return None
    out = torch.empty(shape, dtype=torch.int32, device=first.device)
    mine, theirs = (x if isinstance(x, Tensor) else out for x in (marks, others))
    tensors = (out, first, mine, second, theirs)
    how = _together(shape, *(x.stride() for x in tensors))
    if how is None:
        return None
    places = [0 if x is out and n else x.data_ptr() for n, x in enumerate(tensors)]
    constants = [0 if isinstance(x, Tensor) else x for x in (marks, others)]
    kinds = KINDS[first.dtype], KINDS[second.dtype]
    with launch.at(out.device):
        launch.kernel(out.device, FILE, f"larger_{WIDE.get(first.dtype, 'float')}")(
            _blocks(out.numel()), THREADS,
            (*places, *constants, shift, int(loose), *kinds, out.numel(), *how),
        )  # fmt: skip
    return out
