"""Elementwise operations: each element of the result from one element of each argument."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from gradtrace.errors import NotLinear
from gradtrace.linops import Contract, Identity, Index, Map, Scale
from gradtrace.linops.indexing import nearby
from gradtrace.recording.aten_rules.call import (
    Call,
    Chain,
    Chains,
    Rule,
    Undecided,
    as_shape,
    broadcast_maps,
    real,
    shape_of,
)
from gradtrace.types import Shape


def same(call: Call) -> Chains:
    """The argument itself, possibly in another dtype."""
    dep, out = call.dep, call.out
    if dep.is_complex() and not out.is_complex():
        return [([_part(dep, 0)], dep)]
    if out.is_complex() and not dep.is_complex():
        return [([_into(dep, 0)], dep)]
    return [([], dep)]


def constant(call: Call) -> Chains:
    """The result depends only on the shape of the argument."""
    return []


def _part(dep: Tensor, k: int) -> Map:
    """The real (k = 0) or imaginary (k = 1) part."""
    return Index(lambda x: x.select(-1, k), shape_of(dep), tuple(dep.shape), injective=True)


def _into(dep: Tensor, k: int) -> Map:
    """A real value as the real (k = 0) or imaginary (k = 1) part of a complex one."""

    def move(x: Tensor) -> Tensor:
        parts = [torch.zeros_like(x), torch.zeros_like(x)]
        parts[k] = x
        return torch.stack(parts, -1)

    return Index(move, tuple(dep.shape), (*dep.shape, 2), fills=True, injective=True)


def weigh(dep: Tensor, out: Tensor, weight: Any) -> Chain:
    """``out = weight · dep``, broadcasting, for a real or complex weight."""
    chain = broadcast_maps(dep, tuple(out.shape))
    complex_weight = isinstance(weight, complex) or (
        isinstance(weight, Tensor) and weight.is_complex()
    )
    if complex_weight:
        here = weight if isinstance(weight, Tensor) else torch.tensor(weight, device="cpu")
        number = nearby(here, dep.device)
        parts = torch.view_as_real(number.resolve_conj())
        re, im = parts[..., 0], parts[..., 1]
        return _mixed(chain, dep, out, re, im)
    if out.is_complex() and isinstance(weight, Tensor) and weight.dim():
        weight = weight.unsqueeze(-1)
    if not dep.is_complex() and out.is_complex():
        chain = [*chain, _into(out, 0)]
    return [*chain, Scale(weight, shape_of(out))], dep


def _mixed(chain: list[Map], dep: Tensor, out: Tensor, re: Tensor, im: Tensor) -> Chain:
    """A product with the complex factor ``re + i·im``, as a 2×2 matrix for each element."""
    one = torch.stack([re, im], -1)
    columns = [one, torch.stack([-im, re], -1)] if dep.is_complex() else [one]
    return _matrix(chain, dep, out, columns)


def _matrix(chain: list[Map], dep: Tensor, out: Tensor, columns: list[Tensor]) -> Chain:
    """A small matrix for each element, between real and imaginary parts.

    ``columns[b][..., a]`` is part a of the result for a unit in part b of the argument.
    """
    n, parts = out.numel(), len(columns)
    rows = 2 if out.is_complex() else 1
    weight = torch.stack([c.expand(*out.shape, rows) for c in columns], -1).reshape(n, rows, parts)
    begin = (*out.shape, 2) if parts == 2 else tuple(out.shape)
    steps: list[Map] = [*chain, Identity(begin, (n, parts))]
    steps.append(Contract("nb,nab->na", weight, (n, parts), (n, rows)))
    return as_shape(steps, shape_of(out)), dep


def add(call: Call) -> Chains:
    """``a + alpha·b`` or ``a - alpha·b``."""
    out, alpha = call.out, call.get(2, "alpha", 1)
    sign = -1 if call.func._schema.name.startswith("aten::sub") else 1
    chains: Chains = []
    for x, factor in ((call.args[0], 1), (call.args[1], sign * alpha)):
        if call.depends(x):
            if factor == 1 and x.is_complex() == out.is_complex():
                chains.append((broadcast_maps(x, tuple(out.shape)), x))
            else:
                chains.append(weigh(x, out, factor))
    return chains


def mul(call: Call) -> Chains:
    """``dep · other``."""
    a, b = call.args[0], call.args[1]
    call.one_of(a, b)
    return [weigh(call.dep, call.out, b if call.dep is a else a)]


def div(call: Call) -> Chains:
    """``dep / other``."""
    dep = call.only(call.args[0])
    call.one_of(*call.args[:2])
    if call.kwargs.get("rounding_mode") or len(call.args) > 2:
        raise NotLinear("a division that rounds is not linear")
    by = call.args[1]
    if isinstance(by, Tensor) and not (by.is_floating_point() or by.is_complex()):
        by = by.to(call.out.dtype.to_real())  # an integer, such as a count of equal maxima
    weight = by.reciprocal() if isinstance(by, Tensor) else (1 / by if by else float("nan"))
    return [weigh(dep, call.out, weight)]


def negative(call: Call) -> Chains:
    """``-dep``."""
    return [weigh(call.dep, call.out, -1)]


def mask_map(mask: Tensor, shape: Shape) -> Index:
    """The input where the mask is true; elsewhere no entry, which differs from a weight of 0."""

    def move(x: Tensor) -> Tensor:
        return torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))

    return Index(move, shape, shape, fills=True, injective=True)


def _masked(dep: Tensor, out: Tensor, mask: Tensor) -> Chain:
    """``dep``, broadcast to the result, where the mask is true."""
    mask = mask.unsqueeze(-1) if out.is_complex() and mask.dim() else mask
    return [*broadcast_maps(dep, tuple(out.shape)), mask_map(mask, real(out.shape, dep))], dep


def where(call: Call) -> Chains:
    """``condition ? a : b``."""
    condition, *branches = call.args
    masks = (condition, ~condition)
    return [_masked(x, call.out, m) for x, m in zip(branches, masks) if call.depends(x)]


def masked_fill(call: Call) -> Chains:
    """``dep`` where the mask is false."""
    dep = call.only(call.args[0])
    return [_masked(dep, call.out, ~call.args[1])]


def triangle(call: Call) -> Chains:
    """``tril`` and ``triu``."""
    dep = call.dep
    mask = call.func(torch.ones(dep.shape, dtype=torch.bool, device=dep.device), *call.args[1:])
    return [_masked(dep, call.out, mask)]


def threshold(call: Call) -> Chains:
    """The gradient of ReLU: ``dep`` where the input was above the threshold."""
    dep = call.only(call.args[0])
    return [_masked(dep, call.out, call.args[1] > call.args[2])]


def probe(call: Call) -> Chains:
    """Any elementwise operation: its weight is its result for ones (for 1 and i, if complex)."""
    chains = []
    for dep in call.deps:
        f = call.function(dep)
        out = call.out
        if not dep.is_complex() and not out.is_complex():
            chains.append(weigh(dep, out, f(torch.ones_like(dep))))
            continue
        units = [1, 1j] if dep.is_complex() else [1]
        found = [f(torch.full_like(dep, unit)) for unit in units]
        columns = [
            torch.view_as_real(c.resolve_conj()) if out.is_complex() else c.unsqueeze(-1)
            for c in found
        ]
        chains.append(_matrix(broadcast_maps(dep, tuple(out.shape)), dep, out, columns))
    return chains


def per_sample(dim: int) -> Rule:
    """Losses with one cotangent in all, or one for each sample; samples are indexed by ``dim`` of
    the result. The weight is the operation's result for ones.
    """

    def rule(call: Call) -> Chains:
        g = call.only(call.args[0])
        shape = tuple(call.out.shape)
        many = tuple(n if d == dim else 1 for d, n in enumerate(shape)) if g.dim() else ()
        if g.is_complex() or g.numel() != prod(many):
            raise Undecided
        weight = call.function(g)(torch.ones_like(g))
        widen = Index(lambda x: x.reshape(many).expand(shape), tuple(g.shape), shape)
        return [([widen, Scale(weight, shape)], g)]

    return rule


def complex_parts(call: Call) -> Chains:
    """``complex(re, im)``."""
    chains = []
    for k, x in enumerate(call.args[:2]):
        if call.depends(x):
            step = broadcast_maps(x, tuple(call.out.shape))
            chains.append(([*step, _into(call.out, k)], x))
    return chains


def as_parts(call: Call) -> Chains:
    """``view_as_real`` and ``view_as_complex``: equal in the real representation."""
    return [([], call.dep)]


def conjugate(call: Call) -> Chains:
    """The complex conjugate: negates the imaginary part."""
    dep = call.dep
    if not dep.is_complex():
        return [([], dep)]
    return [([Scale(torch.tensor([1.0, -1.0], device=dep.device), shape_of(dep))], dep)]


def real_part(call: Call) -> Chains:
    """``x.real``."""
    return [([_part(call.dep, 0)], call.dep)] if call.dep.is_complex() else [([], call.dep)]


def imaginary_part(call: Call) -> Chains:
    """``x.imag``."""
    return [([_part(call.dep, 1)], call.dep)]
