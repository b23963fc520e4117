"""Operations that scatter elements and add up those with the same target."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from gradtrace.linops import Index, Map, Scale, Scatter
from gradtrace.recording.aten_rules.call import (
    Call,
    Chains,
    Rule,
    broadcast_maps,
    pairwise,
    real,
    shape_of,
)
from gradtrace.recording.aten_rules.movement import ids, ids64, move

aten = torch.ops.aten


def index_put(call: Call) -> Any:
    """``self[indices] = values``, or ``+=``."""
    base, indices, values = call.args[:3]
    if not call.get(3, "accumulate", False):
        return move(call)
    chains: Chains = [([], base)] if call.depends(base) else []
    if call.depends(values):
        target = aten.index(ids(base.shape, values.device), indices)
        chains.append((_scatter_add(values, target, base.shape), values))
    return chains


def _scatter_add(values: Tensor, target: Tensor, shape: Sequence[int]) -> list[Map]:
    """Scatter-add of ``values``, broadcast to ``target``: flat indices into ``shape``."""
    chain = broadcast_maps(values, tuple(target.shape))
    if values.is_complex():
        target = torch.stack([2 * target, 2 * target + 1], -1)
    return [*chain, Scatter(target, real(shape, values))]


def index_add(call: Call) -> Chains:
    """``self.index_add(dim, index, source)``."""
    base, dim, index, source = call.args[:4]
    chains: Chains = [([], base)] if call.depends(base) else []
    if call.depends(source):
        places = ids(base.shape, source.device)
        target = places.index_select(dim, index) if base.dim() else places.expand(source.shape)
        chain = _scatter_add(source, target.reshape(source.shape), base.shape)
        alpha = call.kwargs.get("alpha", 1)
        chains.append(
            ([*chain, Scale(alpha, chain[-1].out_shape)] if alpha != 1 else chain, source)
        )
    return chains


def scatter_add(call: Call) -> Chains:
    """``self.scatter_add(dim, index, src)``."""
    base, dim, index, source = call.args[:4]
    chains: Chains = [([], base)] if call.depends(base) else []
    if call.depends(source):
        target = ids(base.shape, source.device).gather(dim, index)
        box = tuple(slice(0, n) for n in index.shape)
        crop = pairwise(lambda x: x[box]) if source.is_complex() else lambda x: x[box]
        cut = Index(crop, shape_of(source), real(index.shape, source))
        chains.append(([cut, *_scatter_add(source[box], target, base.shape)], source))
    return chains


def put(call: Call) -> Any:
    """``self.put(index, source)``: an index into the flattened tensor."""
    base, index, source = call.args[:3]
    if not call.get(3, "accumulate", False):
        return move(call)
    chains: Chains = [([], base)] if call.depends(base) else []
    if call.depends(source):
        target = torch.where(index < 0, index + base.numel(), index)
        chains.append((_scatter_add(source, target.reshape(source.shape), base.shape), source))
    return chains


def embedding(call: Call) -> Chains:
    """The gradient of an embedding: rows of the cotangent added to the rows of the table."""
    g, indices, rows, padding, by_frequency = call.args
    call.only(g)
    chain: list[Map] = []
    if by_frequency:
        counts = torch.bincount(indices.reshape(-1), minlength=rows)
        weight = 1 / counts[indices].to(g.dtype)
        chain = [Scale(weight.unsqueeze(-1), tuple(g.shape))]
    return [([*chain, Scatter.table(indices, tuple(g.shape), rows, padding)], g)]


def max_pool(spatial: int, at: int) -> Rule:
    """The gradient of maximum pooling: scatters to the elements that were chosen.

    ``at`` is the position of ``indices``, which count the elements of a plane of ``spatial``
    dimensions.
    """

    def rule(call: Call) -> Chains:
        g, x, indices = call.args[0], call.args[1], call.get(at, "indices")
        call.only(g)
        plane = prod(x.shape[-spatial:])
        planes = prod(x.shape[:-spatial])
        offset = (torch.arange(planes, device=g.device) * plane).reshape(
            *x.shape[:-spatial], *[1] * spatial
        )
        return [([Scatter(indices + offset, tuple(x.shape))], g)]

    return rule


def padding_of(forward: Any) -> Rule:
    """The gradient of reflection and replication padding: adds up the copies of each element."""

    def rule(call: Call) -> Chains:
        g, x, padding = call.args
        call.only(g)
        target = forward(ids64(x.shape, g.device), padding).long()
        return [(_scatter_add(g, target, x.shape), g)]

    return rule


def unfold(call: Call) -> Chains:
    """The gradient of ``unfold``."""
    g, sizes, dim, size, step = call.args
    places = ids(sizes, g.device)
    return [(_scatter_add(call.only(g), places.unfold(dim, size, step), sizes), g)]


def col2im(call: Call) -> Chains:
    """``col2im``: adds overlapping windows."""
    g, _size, *window = call.args
    out = call.out
    target = aten.im2col(ids64(out.shape, g.device) + 1, *window).long() - 1  # padding: -1
    return [(_scatter_add(call.only(g), target, out.shape), g)]


def nll(call: Call) -> Chains:
    """The gradient of the negative log-likelihood: scatters to the target class of each sample."""
    g, x, target, weight, reduction, ignored, total = call.args
    call.only(g)
    classes = 0 if x.dim() == 1 else 1
    kept = target != ignored
    wanted = torch.where(kept, target, 0)
    factor = -torch.ones_like(wanted, dtype=x.dtype) if weight is None else -weight[wanted]
    if reduction == 1:  # the mean
        factor = factor / total
    shape, size = tuple(target.shape), tuple(x.shape)

    def move(y: Tensor) -> Tensor:
        zero = torch.zeros((), dtype=y.dtype, device=y.device)
        values = torch.where(kept, y, zero).unsqueeze(classes)
        return zero.expand(size).scatter(classes, wanted.unsqueeze(classes), values)

    return [
        ([*broadcast_maps(g, shape), Scale(factor, shape), Index(move, shape, size, fills=True)], g)
    ]


def segment_reduce(call: Call) -> Chains:
    """The gradient of ``segment_reduce``: each element depends on its own segment only."""
    g, data, axis = call.args[0], call.args[2], call.get(6, "axis", 0)
    call.only(g)
    lengths, ends = call.get(4, "lengths"), call.get(5, "offsets")
    ends = lengths.cumsum(-1) if ends is None else ends[..., 1:]
    number = torch.arange(data.shape[axis], device=g.device).expand(*ends.shape[:-1], -1)
    segment = torch.searchsorted(ends.contiguous(), number.contiguous(), right=True)
    shape = tuple(data.shape)
    segment = segment.reshape(*segment.shape, *[1] * (len(shape) - axis - 1)).expand(shape)
    weight = call.function(g)(torch.ones_like(g))
    move = Index(lambda x: x.gather(axis, segment), tuple(g.shape), shape)
    return [([move, Scale(weight, shape)], g)]
