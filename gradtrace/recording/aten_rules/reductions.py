"""Sums, means and cumulative sums."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gradtrace.linops import Map, Reduce, Scale, Scan
from gradtrace.recording.aten_rules.call import Call, Chains, shape_of


def total(call: Call) -> Chains:
    """``sum``."""
    return [([_reduce(call.dep, call.get(1, "dim"), call.out)], call.dep)]


def _reduce(dep: Tensor, dims: Any, out: Tensor) -> Map:
    if isinstance(dims, int):
        dims = [dims]
    every = range(dep.dim())
    over = [d % dep.dim() for d in dims] if dims and dep.dim() else every
    return Reduce(list(over), shape_of(dep), shape_of(out))


def mean(call: Call) -> Chains:
    """``sum / n``."""
    dep, out = call.dep, call.out
    n = dep.numel() // out.numel() if out.numel() else 1
    return [([_reduce(dep, call.get(1, "dim"), out), Scale(1 / max(n, 1), shape_of(out))], dep)]


def cumsum(call: Call) -> Chains:
    """``cumsum``."""
    dep = call.dep
    if not dep.dim():
        return [([], dep)]
    return [([Scan(call.args[1] % dep.dim(), shape_of(dep))], dep)]
