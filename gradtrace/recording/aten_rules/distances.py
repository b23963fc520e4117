"""Gradients of pairwise distances: one weight for each pair of points and coordinate."""

from __future__ import annotations

from math import inf, prod

import torch
from torch import Tensor

from gradtrace.linops import Distances, Map, Scale, gather
from gradtrace.recording.aten_rules.call import Call, Chains, Undecided, broadcast_maps
from gradtrace.types import Shape


def distance_maps(x: Tensor, y: Tensor, power: float, distance: Tensor) -> list[Map]:
    """Maps from the cotangent of the distances (..., n, m) to that of x (..., n, k):
    ``∂‖x − y‖ₚ/∂x = φ(x − y) / ‖x − y‖ₚ^(p − 1)``, which is 0 where the points coincide.
    """
    batch = tuple(distance.shape[:-2])
    n, m, k = x.shape[-2], y.shape[-2], x.shape[-1]
    shape = (*batch, n, m)
    flat = prod(batch)
    near, far = (
        part.expand(*batch, size, k).reshape(flat, size, k) for part, size in ((x, n), (y, m))
    )
    off = distance.reshape(flat, n, m)
    there = distance != 0
    if power in (1, inf):
        scale = there.to(distance.dtype)
    else:
        scale = torch.where(there, distance, 1).pow(1 - power) * there
    return [
        Scale(scale, shape),
        Distances(near, far, power, off, (shape, (*batch, n, k))),
    ]


def cdist(call: Call) -> Chains:
    """``_cdist_backward(g, x1, x2, p, cdist)``: the gradient by x1."""
    g, x, y, power, distance = call.args
    call.only(g)
    if not power or not g.numel() or not call.out.numel():
        return []  # p = 0 counts coordinates that differ: the gradient is zero
    shape = tuple(distance.shape)
    chain = [*broadcast_maps(g, shape), *distance_maps(x, y, power, distance)]
    if chain[-1].out_shape != call.out.shape:
        raise Undecided
    return [(chain, g)]


def pdist(call: Call) -> Chains:
    """``_pdist_backward(g, x, p, pdist)``: distances of each pair once, in the order of the upper
    triangle.
    """
    g, x, power, distance = call.args
    call.only(g)
    if not power or not g.numel() or not call.out.numel():
        return []
    n = x.shape[0]
    pair = torch.full((n, n), -1, dtype=torch.int64, device=g.device)
    first, second = torch.triu_indices(n, n, 1, device=g.device)
    pair[first, second] = pair[second, first] = torch.arange(len(first), device=g.device)
    square: Shape = (n, n)
    whole = gather(pair, tuple(g.shape))
    return [([whole, *distance_maps(x, x, power, whole.apply(distance).reshape(square))], g)]
