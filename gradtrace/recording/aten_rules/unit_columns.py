"""The dense matrix of any small linear operation, column by column."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from gradtrace.errors import TooLarge
from gradtrace.linops import Dense
from gradtrace.recording.aten_rules.call import Call, Chains, shape_of


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
        "entries; raise dense_limit, or trace with granularity='operator'"
    )
