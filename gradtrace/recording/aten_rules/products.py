"""Products with constants: matrices, convolutions, Fourier transforms; linear solves, distances."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, prod
from string import ascii_letters
from typing import Any

import torch
from torch import Tensor

from gradtrace.errors import TooLarge
from gradtrace.linops import (
    Contract,
    Convolve,
    Dense,
    Distances,
    Map,
    Reduce,
    Scale,
    Windows,
    gather,
)
from gradtrace.recording.aten_rules import sparse
from gradtrace.recording.aten_rules.call import (
    Call,
    Chain,
    Chains,
    Rule,
    Undecided,
    as_shape,
    broadcast_maps,
    from_shape,
    shape_of,
)
from gradtrace.recording.aten_rules.elementwise import weigh
from gradtrace.types import Shape

aten = torch.ops.aten


def _product(dep: Tensor, out: Tensor, weight: Tensor, spec: str) -> Chain:
    """``out = einsum(spec, dep, weight)``."""
    if dep.is_complex() or weight.is_complex():
        return _complex_product(dep, out, weight, spec)
    return [Contract(spec, weight, tuple(dep.shape), tuple(out.shape))], dep


def _complex_product(dep: Tensor, out: Tensor, weight: Tensor, spec: str) -> Chain:
    """``_product`` of complex tensors, with indices y and z for the real and imaginary parts of
    the argument and of the result.
    """
    x, rest = spec.split(",")
    w, o = rest.split("->")
    parts = torch.view_as_real(weight.to(dep.dtype.to_complex()).resolve_conj())
    re, im = parts[..., 0], parts[..., 1]
    one = torch.stack([re, im], -1)  # (..., z): the result for a unit real part
    columns = [one, torch.stack([-im, re], -1)] if dep.is_complex() else [one]
    matrix = torch.stack(columns, -2)  # (..., y, z)
    y = len(columns)
    step = Contract(f"{x}Y,{w}YZ->{o}Z", matrix, (*dep.shape, y), (*out.shape, 2))
    return from_shape([step], shape_of(dep)), dep


def product(left: str, right: str) -> Rule:
    """A rule for products of two arguments: ``left`` is ``"a->out"``, ``right`` is ``"b"``, in the
    letters of ``einsum("a,b->out")``.
    """
    a, o = left.split("->")
    b = right

    def rule(call: Call) -> Chains:
        x, y = call.args[0], call.args[1]
        if x.layout is not torch.strided or y.layout is not torch.strided:
            return sparse.product(call)
        call.one_of(x, y)
        dep = call.dep
        if dep is x:
            return [_product(dep, call.out, y, f"{a},{b}->{o}")]
        return [_product(dep, call.out, x, f"{b},{a}->{o}")]

    return rule


def trilinear(call: Call) -> Chains:
    """``_trilinear``, used by ``nn.Bilinear``: the product of three tensors, summed over some
    dimensions. Each tensor lacks the dimensions in its ``expanded``, along which it is broadcast.
    """
    factors, expanded, summed = call.args[:3], call.args[3:6], call.args[6]
    call.one_of(*factors)
    dep = call.dep
    letters = ascii_letters[
        : dep.dim() + len(next(e for x, e in zip(factors, expanded) if x is dep))
    ]
    words = ["".join(c for d, c in enumerate(letters) if d not in e) for e in expanded]
    ((_, own),) = [(x, word) for x, word in zip(factors, words) if x is dep]
    (a, first), (b, second) = [(x, word) for x, word in zip(factors, words) if x is not dep]
    out = "".join(c for d, c in enumerate(letters) if d not in summed)
    sizes = dict(zip(first + second + own, (*a.shape, *b.shape, *dep.shape)))
    kept = "".join(c for c in letters if c in first + second and (c in own or c in out))
    weight = torch.einsum(f"{first},{second}->{kept}", a, b)
    alone = "".join(c for c in own if c not in kept and c not in out)  # summed without a weight
    weight = weight.expand(*(sizes[c] for c in alone), *weight.shape)
    chain, _ = _product(dep, call.out, weight, f"{own},{alone}{kept}->{out}")
    return [(chain, dep)]


def vdot(call: Call) -> Chains:
    """``conj(a) · b``; linear in b, conjugate-linear in a."""
    a, b = call.args
    if call.dep is b:
        return [_product(b, call.out, a.conj(), "k,k->")]
    chain, dep = _product(a, call.out, b, "k,k->")
    sign = torch.tensor([1.0, -1.0], device=a.device)
    return [([Scale(sign, shape_of(a)), *chain], dep)] if a.is_complex() else [(chain, dep)]


def solve(position: int, flag: str = "") -> Rule:
    """A rule for ``out = M·dep`` (or ``dep·M``) with a constant M, which is the operation's result
    for the identity matrix. ``position`` is that of ``dep``; ``flag`` names the keyword argument
    that is False for ``dep·M``.
    """

    def rule(call: Call) -> Any:
        several = isinstance(call.out, (tuple, list))
        dep, out = call.only(call.args[position]), call.out[0] if several else call.out
        if dep.dim() < 2:
            raise Undecided
        left = call.kwargs.get(flag, True)
        batch = tuple(out.shape[:-2])
        n = dep.shape[-2] if left else dep.shape[-1]
        unit = torch.eye(n, dtype=dep.dtype, device=dep.device).expand(*batch, n, n)
        found = call.function(dep)(unit.contiguous())
        b = "abcdefgh"[: len(batch)]
        spec = f"{b}kn,{b}mk->{b}mn" if left else f"{b}mk,{b}kn->{b}mn"
        wide = (*batch, *dep.shape[-2:])
        maps, _ = _product(dep.expand(wide), out, found[0] if several else found, spec)
        chains = [([*broadcast_maps(dep, wide), *maps], dep)]
        return [chains, *([] for _ in call.out[1:])] if several else chains

    return rule


def convolution(call: Call) -> Any:
    """The gradient of a convolution by its input, kernel and bias."""
    g, x, w, _bias, stride, padding, dilation, transposed, output_padding, groups, mask = call.args
    call.only(g)
    spatial = w.dim() - 2
    windows = Windows(
        stride=_each(stride, spatial),
        padding=_each(padding, spatial),
        dilation=_each(dilation, spatial),
        transposed=transposed,
        output_padding=_each(output_padding, spatial),
        groups=groups,
    )
    shape = tuple(g.shape)
    result: list[Chains] = [[], [], []]
    if mask[0]:
        result[0] = [([Convolve(w, windows, False, shape, tuple(x.shape))], g)]
    if mask[1]:
        result[1] = [([Convolve(x, windows, True, shape, tuple(w.shape))], g)]
    if mask[2]:
        dims = [d for d in range(g.dim()) if d != 1]
        result[2] = [([Reduce(dims, shape, (shape[1],))], g)]
    return result


def _each(value: Sequence[int], n: int) -> tuple[int, ...]:
    """One number for each of n dimensions; a single one is repeated."""
    return tuple(value) if len(value) == n else tuple(value) * n


def fourier(call: Call) -> Chains:
    """Fourier transforms, one dimension at a time, each as a contraction with a real matrix."""
    dep, dims = call.dep, list(call.args[1])
    kind = call.func._schema.name
    scale = call.args[2]
    if not dims or not dep.numel():
        return [weigh(dep, call.out, 1)] if not dims else dense(call)
    steps: list[Map] = []
    shape, pair = list(dep.shape), dep.is_complex()

    def apply(f: Callable[[Tensor], Tensor], dim: int, out_pair: bool) -> None:
        nonlocal pair
        n, parts = shape[dim], 2 if pair else 1
        unit = torch.eye(n, dtype=dep.dtype.to_real(), device=dep.device)
        rows = [unit, unit * 1j] if pair else [unit]
        found = [f(row) for row in rows]  # each (n, m)
        found = [torch.view_as_real(r) if out_pair else r.unsqueeze(-1) for r in found]
        weight = torch.stack(found, 1)  # (n, parts, m, out parts)
        letters = "abcdefghijkl"[: len(shape)]
        into = letters.replace(letters[dim], "m")
        spec = f"{letters}y,{letters[dim]}ymz->{into}z"
        before = (*shape, parts)
        shape[dim] = weight.shape[2]
        after = (*shape, weight.shape[3])
        if steps:
            steps.extend(as_shape([steps.pop()], before))
        steps.append(Contract(spec, weight, before, after))
        pair = out_pair

    last = dims[-1]
    if kind.endswith("r2c"):
        onesided = call.args[3]
        apply(lambda u: aten._fft_r2c(u, [1], scale, onesided), last, True)
        for d in dims[:-1]:
            apply(lambda u: aten._fft_c2c(u + 0j, [1], scale, True), d, True)
    elif kind.endswith("c2r"):
        for d in dims[:-1]:
            apply(lambda u: aten._fft_c2c(u + 0j, [1], scale, False), d, True)
        apply(lambda u: aten._fft_c2r(u + 0j, [1], scale, call.args[3]), last, False)
    else:
        for d in dims:
            apply(lambda u: aten._fft_c2c(u + 0j, [1], scale, call.args[3]), d, True)
    return [(as_shape(from_shape(steps, shape_of(dep)), shape_of(call.out)), dep)]


def dense(call: Call) -> Any:
    """The matrices of any linear operation, from its results for all unit vectors.

    Raises ``TooLarge`` if one has more than ``call.limit`` entries.
    """
    many = isinstance(call.out, (list, tuple))
    outs = [o for o in call.out if isinstance(o, Tensor)] if many else [call.out]
    result: list[Chains] = [[] for _ in (call.out if many else [0])]
    for dep in call.deps:
        n = prod(shape_of(dep))
        m = sum(prod(shape_of(o)) for o in outs)
        if n * max(m, 1) > call.limit:
            raise TooLarge(too_large(call, m, n))
        f = call.function(dep)
        columns: list[list[Tensor]] = []
        for j in range(n):
            unit = torch.zeros(shape_of(dep), dtype=dep.dtype.to_real(), device=dep.device)
            unit.reshape(-1)[j] = 1
            found = f(torch.view_as_complex(unit) if dep.is_complex() else unit)
            columns.append(list(found) if many else [found])
        for k, out in enumerate(call.out if many else [call.out]):
            if not isinstance(out, Tensor) or not (out.is_floating_point() or out.is_complex()):
                continue
            flat = [_parts(column[k]) for column in columns]
            size = prod(shape_of(out))
            matrix = torch.stack(flat, -1) if flat else out.new_zeros(size, 0)
            if bool((matrix != 0).any()):
                result[k].append(([Dense(matrix, shape_of(dep), shape_of(out))], dep))
    return result if many else result[0]


def _parts(x: Tensor) -> Tensor:
    """The real representation, flattened."""
    return (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).reshape(-1)


def too_large(call: Call, rows: int, columns: int) -> str:
    """The error message for a matrix that exceeds the limit."""
    return (
        f"{call.name} has no structured rule, and as a matrix it has {rows:,} x {columns:,} "
        "entries, which are too many: use a smaller input, or write it with other operators"
    )


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
