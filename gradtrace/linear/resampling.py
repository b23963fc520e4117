"""Pooling, interpolation and grid sampling: the same few taps for every plane.

Each element of the resampled plane is a weighted sum of a few elements of the original. Where the
matrix of a plane is small it is used as it is; otherwise the taps are found by sampling the
original with only every p-th element of it set, p such that no two taps of an element agree.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradtrace.errors import TooLarge
from gradtrace.linear.call import Call, Chains, Rule, Undecided, as_shape, from_shape
from gradtrace.linear.general import too_large
from gradtrace.linear.movement import ids64
from gradtrace.maps import Contract, Index, Map, Scale, Scatter
from gradtrace.shapes import Shape

aten = torch.ops.aten

SMALL = 1 << 20
"""The most entries of a plane's matrix that is preferred to taps."""


def nearest(forward: Any) -> Rule:
    """Back through an enlargement by repetition."""

    def rule(call: Call) -> Chains:
        g, size, input_size, *scales = call.args
        target = forward(ids64(input_size, g.device), size, *scales).long()
        return [([Scatter(target, tuple(input_size))], call.only(g))]

    return rule


Sampling: TypeAlias = "Callable[[Call], tuple[Callable[[Tensor], Tensor], int]]"
"""The resampling of planes itself, and how wide the window is that a point takes its taps from."""


def interpolated(forward: Any, period: int) -> Sampling:
    """``forward(x, output_size, ...)`` takes each point from ``period`` neighbours a dimension."""
    return lambda call: (lambda x: forward(x, call.args[1], *call.args[3:]), period)


def averaged(forward: Any) -> Sampling:
    """``forward(x, kernel, ...)`` takes each point from a window of the kernel's size."""
    return lambda call: (lambda x: forward(x, *call.args[2:]), max(call.args[2]))


def adapted(forward: Any, spatial: int) -> Sampling:
    """``forward(x, output_size)`` takes each point from a window of about input over output."""

    def sampling(call: Call) -> tuple[Callable[[Tensor], Tensor], int]:
        box, size = call.args[0].shape[-spatial:], call.out.shape[-spatial:]
        return lambda x: forward(x, list(box)), max(-(-n // m) + 1 for n, m in zip(size, box))

    return sampling


def plane(spatial: int, sampling: Sampling | None = None) -> Rule:
    """Back through linear maps that treat every plane alike."""

    def rule(call: Call) -> Chains:
        g, out = call.only(call.args[0]), call.out
        box, size = tuple(g.shape[-spatial:]), tuple(out.shape[-spatial:])
        p, q = prod(box), prod(size)
        planes = prod(g.shape[:-spatial])
        maps: list[Map]
        if sampling is not None and p * q > SMALL:
            forward, period = sampling(call)
            shape = (planes, p)
            maps = _tapped(lambda x: forward(x).reshape(1, p), size, period, shape, g)
        elif p * q > call.limit:
            raise TooLarge(too_large(call, p, q))
        else:
            maps = [Contract("bp,pq->bq", _matrix(call, box, size), (planes, p), (planes, q))]
        return [(as_shape(from_shape(maps, tuple(g.shape)), tuple(out.shape)), g)]

    return rule


def _matrix(call: Call, box: Shape, size: Shape) -> Tensor:
    """What a plane's unit cotangents become, all of them as one batch."""
    g, out, p = call.args[0], call.out, prod(box)
    unit = torch.eye(p, dtype=g.dtype, device=g.device).reshape(p, 1, *box)

    def adjust(a: Any) -> Any:
        if isinstance(a, Tensor) and a.shape == out.shape:
            return a.new_zeros(p, 1, *size)
        if isinstance(a, (list, tuple)) and len(a) == out.dim() and list(a) == list(out.shape):
            return [p, 1, *size]
        return a

    rest = [adjust(a) for a in call.args[1:]]
    found: Tensor = call.func(unit, *rest, **call.kwargs)
    return found.reshape(p, prod(size))


def _taps(
    sample: Callable[[Tensor], Tensor], size: Shape, period: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Where each sampled point takes its value from, and with what weight.

    ``sample`` takes a plane ``(1, 1, *size)`` of float64 to ``(n, points)``. The weights of one
    class of elements are what the plane with ones there becomes; their numbers are what the plane
    of element numbers becomes, over that.
    """
    numbers = ids64(size, device) + 1
    at = torch.stack(torch.meshgrid(*[torch.arange(n, device=device) for n in size], indexing="ij"))
    sources, weights = [], []
    for residue in product(range(period), repeat=len(size)):
        chosen = torch.ones(size, dtype=torch.bool, device=device)
        for axis, r in enumerate(residue):
            chosen &= at[axis] % period == r
        ones = sample(chosen.double().reshape(1, 1, *size))
        where = sample((chosen * numbers).reshape(1, 1, *size))
        number = torch.where(ones != 0, where / torch.where(ones != 0, ones, 1), 0)
        sources.append(number.round().long() - 1)
        weights.append(ones)
    return torch.stack(sources), torch.stack(weights)  # (taps, n, points)


def _tapped(
    sample: Callable[[Tensor], Tensor], size: Shape, period: int, shape: Shape, g: Tensor
) -> list[Map]:
    """From ``(planes, points)`` back to ``(planes, elements)``: spread over taps, weigh, add up."""
    source, weight = _taps(sample, size, period, g.device)
    taps, n, points = weight.shape
    planes, q = shape[0], prod(size)
    wide = (taps, planes, points)
    per = planes // n
    source = source.repeat_interleave(per, 1)
    offset = (torch.arange(planes, device=g.device) * q).reshape(1, -1, 1)
    target = torch.where(source < 0, -1, source + offset)
    return [
        Index(lambda x: x.expand(wide), shape, wide),
        Scale(weight.repeat_interleave(per, 1).to(g.dtype), wide),
        Scatter(target, (planes, q)),
    ]


def sampled(call: Call) -> Any:
    """Back through ``grid_sampler``: to the image, and to the grid."""
    g, x, grid, mode, padding, align, mask = call.args
    call.only(g)
    spatial = x.dim() - 2
    forward = aten.grid_sampler_2d if spatial == 2 else aten.grid_sampler_3d
    n, c = x.shape[:2]
    points, size = prod(g.shape[2:]), tuple(x.shape[2:])

    def sample(image: Tensor) -> Tensor:
        many = image.expand(n, *image.shape[1:])
        found: Tensor = forward(many, grid.double(), mode, padding, align)
        return found.reshape(n, points)

    result: list[Chains] = [[], []]
    if mask[0]:
        maps = _tapped(sample, size, 4 if mode == 2 else 2, (n * c, points), g)
        result[0] = [(as_shape(from_shape(maps, tuple(g.shape)), tuple(x.shape)), g)]
    if mask[1]:
        slopes = []
        for k in range(c):
            one = torch.zeros_like(g)
            one[:, k] = 1
            slopes.append(call.func(one, x, grid, mode, padding, align, [False, True])[1])
        weight = torch.stack(slopes, 1).reshape(n, c, points, spatial)
        step = Contract("ncp,ncpd->npd", weight, (n, c, points), (n, points, spatial))
        result[1] = [(as_shape(from_shape([step], tuple(g.shape)), tuple(grid.shape)), g)]
    return result


def ctc(call: Call) -> Chains:
    """CTC loss: one cotangent for each sequence, spread over its time steps and classes."""
    g = call.only(call.args[0])
    if g.dim() != 1:
        raise Undecided
    weight = call.function(g)(torch.ones_like(g))
    shape = tuple(call.out.shape)
    chain: list[Map] = [Index(lambda x: x.reshape(1, -1, 1).expand(shape), tuple(g.shape), shape)]
    return [([*chain, Scale(weight, shape)], g)]
