"""Softmax and normalisation layers: maps that are diagonal plus low rank (``Normaliser``)."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from gradtrace.linops import Map, Normaliser, Reduce, Scale
from gradtrace.recording.aten_rules.call import Call, Chains, as_shape, from_shape, shape_of
from gradtrace.types import Shape


def softmax(call: Call) -> Chains:
    """``g·y − y·Σ g·y``."""
    g, y, dim = call.args[:3]
    shape = shape_of(call.only(g))
    if not shape:
        return [([Scale(0.0, shape)], g)]
    return [([Normaliser(y, [(-y, y)], [dim], shape)], g)]


def log_softmax(call: Call) -> Chains:
    """``g − exp(y)·Σ g``."""
    g, y, dim = call.args[:3]
    shape = shape_of(call.only(g))
    if not shape:
        return [([Scale(0.0, shape)], g)]
    one = torch.ones((), dtype=y.dtype, device=y.device)
    return [([Normaliser(one, [(-y.exp(), one)], [dim], shape)], g)]


def _norm(gain: Tensor | None, scale: Tensor, unit: Tensor, dims: list[int], n: int) -> Normaliser:
    """``s·(γg − mean(γg) − x̂·mean(γg·x̂))``, with means over ``dims``, of n elements.

    γ is ``gain`` (None: 1), s is ``scale``, x̂ is ``unit``, the normalised input.
    """
    gain = torch.ones((), dtype=unit.dtype, device=unit.device) if gain is None else gain
    shape = tuple(unit.shape)
    gained, down, along, diagonal = _factors(gain, scale, unit, n)
    return Normaliser(_expanded(diagonal, shape), [(down, gain), (along, gained)], dims, shape)


def _factors(gain: Tensor, scale: Tensor, unit: Tensor, n: int) -> tuple[Tensor, ...]:
    """``γ·x̂``, ``−s/n``, ``−s·x̂/n`` and ``s·γ``: the weights of ``_norm``."""
    return gain * unit, scale / -n, scale * unit / -n, scale * gain


def _expanded(x: Tensor, shape: Shape) -> Tensor:
    """``x.expand(shape)``, skipped where ``x`` has that shape, which is faster."""
    return x if x.shape == shape else x.expand(shape)


def layer_norm(call: Call) -> Any:
    """The gradient of layer norm by its input, gain and bias."""
    g, x, sizes, *_, mask = call.args
    call.only(g)
    inner = list(range(x.dim() - len(sizes), x.dim()))
    outer = list(range(x.dim() - len(sizes)))
    shape = tuple(g.shape)
    kept = tuple(sizes)
    into, unit = _layer_maps(call, inner, prod(kept), shape)
    return [
        [([into], g)] if mask[0] else [],
        [([unit, Reduce(outer, shape, kept)], g)] if mask[1] else [],
        [([Reduce(outer, shape, kept)], g)] if mask[2] else [],
    ]


def _layer_maps(call: Call, inner: list[int], n: int, shape: Shape) -> tuple[Normaliser, Scale]:
    """The map to the input of a layer norm, and the scale by its normalised input.

    With ``call.batched_weights``, both are created with provisional weights, which are replaced
    when the weights of all layers are computed in one batch.
    """
    _, x, _, mean, rstd, gain, *_ = call.args
    if call.batched_weights is None or gain is None:
        unit = (x.to(rstd.dtype) - mean) * rstd
        return _norm(gain, rstd, unit, inner, n), Scale(unit, shape)
    into, scale = Normaliser(gain, [(gain, gain), (gain, gain)], inner, shape), Scale(gain, shape)

    def fill(unit: Tensor, gained: Tensor, down: Tensor, along: Tensor, diagonal: Tensor) -> None:
        scale.weight = unit
        into.diagonal = _expanded(diagonal, shape)
        into.left, into.right = (down, along), (gain, gained)

    call.batched_weights.request(_layer_weights, (x, mean, rstd, gain), fill, n)
    return into, scale


def _layer_weights(
    x: Tensor, mean: Tensor, rstd: Tensor, gain: Tensor, n: int
) -> tuple[Tensor, ...]:
    """The weights of several layer norms; the first dimension of all tensors is the layer."""
    unit = (x.to(rstd.dtype) - mean) * rstd
    gain = gain.reshape(len(gain), *[1] * (x.dim() - gain.dim()), *gain.shape[1:])
    return unit, *_factors(gain, rstd, unit, n)


def rms_norm(call: Call) -> Any:
    """The gradient of RMS norm: ``s·γg − s³·x/n·Σ γg·x``."""
    g, x, sizes, rstd, gain, mask = call.args
    call.only(g)
    inner = list(range(x.dim() - len(sizes), x.dim()))
    outer = list(range(x.dim() - len(sizes)))
    unit = x.to(rstd.dtype) * rstd
    shape, kept = tuple(g.shape), tuple(sizes)
    gained = torch.ones((), dtype=unit.dtype, device=x.device) if gain is None else gain
    pairs = [(rstd * unit / -prod(kept), gained * unit)]
    into = Normaliser(_expanded(rstd * gained, shape), pairs, inner, shape)
    return [
        [([into], g)] if mask[0] else [],
        [([Scale(unit, shape), Reduce(outer, shape, kept)], g)] if mask[1] else [],
    ]


def group_norm(call: Call) -> Any:
    """The gradient of group norm, as a matrix with one row for each sample and group."""
    g, x, mean, rstd, gain, n, c, _, groups, mask = call.args
    call.only(g)
    shape = tuple(g.shape)
    per = x.numel() // max(n * groups, 1)
    lines = (n * groups, per)
    unit = (x.reshape(lines).to(rstd.dtype) - mean.reshape(-1, 1)) * rstd.reshape(-1, 1)
    spatial = [1] * (x.dim() - 2)
    gained = None
    if gain is not None:
        gained = gain.reshape(1, c, *spatial).expand(x.shape).reshape(lines)
    into = _norm(gained, rstd.reshape(-1, 1), unit, [1], per)
    others = [d for d in range(x.dim()) if d != 1]
    return [
        [(as_shape(from_shape([into], shape), shape), g)] if mask[0] else [],
        [([Scale(unit.reshape(shape), shape), Reduce(others, shape, (c,))], g)] if mask[1] else [],
        [([Reduce(others, shape, (c,))], g)] if mask[2] else [],
    ]


def batch_norm(call: Call) -> Any:
    """The gradient of batch norm: in training a ``Normaliser`` over the batch, else a scale."""
    g, x, gain, running_mean, running_var, mean, rstd, train, eps, mask = call.args
    call.only(g)
    shape, c = tuple(g.shape), x.shape[1]
    others = [d for d in range(x.dim()) if d != 1]
    wide = [1, c, *[1] * (x.dim() - 2)]
    if not train:
        mean, rstd = running_mean, torch.rsqrt(running_var + eps)
    unit = (x - mean.reshape(wide)) * rstd.reshape(wide)
    gained = None if gain is None else gain.reshape(wide)
    into: Map
    if train:
        into = _norm(gained, rstd.reshape(wide), unit, others, x.numel() // max(c, 1))
    else:
        into = Scale(rstd.reshape(wide) * (1 if gained is None else gained), shape)
    return [
        [([into], g)] if mask[0] else [],
        [([Scale(unit, shape), Reduce(others, shape, (c,))], g)] if mask[1] else [],
        [([Reduce(others, shape, (c,))], g)] if mask[2] else [],
    ]


def weight_norm(call: Call) -> Any:
    """The gradient of ``w = g₀·v/‖v‖`` by v and g₀."""
    g, v, gain, norms, dim = call.args
    call.only(g)
    shape = tuple(g.shape)
    others = [d for d in range(v.dim()) if d != dim % v.dim()]
    pairs = [(-gain * v / norms**3, v)]
    into = Normaliser((gain / norms).expand(shape), pairs, others, shape)
    return [
        [([into], g)],
        [([Scale(v / norms, shape), Reduce(others, shape, tuple(gain.shape))], g)],
    ]
