"""Outputs of one module that overlap in memory, and what takes their places likewise.

A module may return a tensor and views of it (``return hidden, hidden[:, 0]``). What is written in
place to one of them is then in the others, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from gradtrace.errors import GradtraceError


class Replaced(NamedTuple):
    """A tensor that a module returned, and what takes its place."""

    output: Tensor
    value: Tensor


def rejoined(pairs: Iterable[Replaced], name: str, computed: bool) -> dict[int, Tensor]:
    """Views of common memory for those values whose outputs overlap, by the value's id.

    Where the values do not agree, they cannot be in one place: an error if they were ``computed``,
    else they stay apart, as the user gave them.
    """
    groups: dict[object, list[Replaced]] = {}
    for pair in pairs:
        key = _memory(pair.output)
        if key is not None:
            groups.setdefault(key, []).append(pair)
    found: dict[int, Tensor] = {}
    for some in groups.values():
        views = _views(some) if len(some) > 1 else None
        if views is None:
            continue
        if all(_close(view, pair.value) for view, pair in zip(views, some)):
            found |= {id(pair.value): view for view, pair in zip(views, some)}
        elif computed:
            shapes = " and ".join(str(tuple(pair.output.shape)) for pair in some)
            raise GradtraceError(
                f"module {name!r} returns tensors that overlap in memory (shapes {shapes}), and "
                "their means along the batch dimension differ where they do, so samples are not "
                "along that dimension in all of them; give values, or use how='zero'"
            )
    return found


def _memory(tensor: Tensor) -> object | None:
    """A key that tensors which may overlap have in common; None where it cannot be told."""
    plain = tensor.layout is torch.strided and not is_functorch_wrapped_tensor(tensor)
    if not plain or tensor.is_conj() or tensor.is_neg() or not tensor.numel():
        return None
    try:
        return int(tensor.untyped_storage()._cdata), tensor.dtype
    except (NotImplementedError, RuntimeError):
        return None


def _views(pairs: list[Replaced]) -> list[Tensor] | None:
    """The values in common memory, laid out as the outputs are; None if these do not overlap."""
    outputs = [pair.output for pair in pairs]
    first = min(int(each.storage_offset()) for each in outputs)
    size = max(_end(each) for each in outputs) - first
    times = torch.zeros(size, dtype=torch.uint8, device=outputs[0].device)
    try:
        for each in outputs:
            _once(_as(times, each, first)).add_(1)
    except RuntimeError:  # an output that overlaps with itself, to which nothing can be written
        return None
    if int(times.max()) < 2:
        return None
    base = outputs[0].detach().new_zeros(size)
    views = [_as(base, each, first) for each in outputs]
    with torch.no_grad():
        for view, pair in zip(views, pairs):
            _once(view).copy_(_once(pair.value, view))
    return views


def _end(tensor: Tensor) -> int:
    """One past the last element of a tensor in its memory."""
    spans = (stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape))
    return int(tensor.storage_offset()) + sum(spans) + 1


def _as(base: Tensor, like: Tensor, first: int) -> Tensor:
    """The elements of memory that begins with element ``first``, as another tensor has them."""
    return base.as_strided(like.shape, like.stride(), int(like.storage_offset()) - first)


def _once(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Without the repetitions along dimensions that are expanded (in ``like``)."""
    for dim, stride in enumerate((tensor if like is None else like).stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _close(found: Tensor, wanted: Tensor) -> bool:
    """Equal up to how differently laid out memory is summed."""
    scale = float(wanted.abs().max()) * torch.finfo(wanted.dtype).eps ** 0.5
    return torch.allclose(found, wanted, rtol=0, atol=scale, equal_nan=True)
