"""The (max, ×) contraction in Triton: any float dtype, NaN as specified, argmax updated at every k.

Slower than the CUDA kernels by half, so used as their fallback: for double precision, for small
matrices (no operand is copied first), and where CUDA cannot be compiled.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradtrace.kernels.operands import Contraction, Matrices, Operand, columns, sizes

ROWS = COLUMNS = 64
"""Size of the result tile of one program."""


class TileRead(NamedTuple):
    """How a kernel addresses a batch of matrices: the data, its offset tables (the data again where
    there are none), its strides, and whether the tables are used (``listed``).
    """

    data: Tensor
    batches: Tensor
    rows: Tensor
    inners: Tensor
    steps: tuple[int, int, int]
    listed: bool


def reading(x: Matrices, rows: int, inner: int) -> TileRead:
    """The addressing of a tensor whose rows and k are these dimensions, or of an operand."""
    if isinstance(x, Operand):
        return TileRead(x.data, x.batch, x.rows, x.inner, (0, 0, 0), True)
    steps = x.stride()
    return TileRead(x, x, x, x, (steps[0], steps[rows], steps[inner]), False)


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    a, a_batches, a_rows, a_inners, a0, a1, a2,
    b, b_batches, b_rows, b_inners, b0, b1, b2,
    g, g_batches, g_rows, g_inners, g0, g1, g2,
    value, index, ids, M, N, K,
    A_LISTED: tl.constexpr, B_LISTED: tl.constexpr, G_LISTED: tl.constexpr,
    VALUE: tl.constexpr, INDEX: tl.constexpr, IDS: tl.constexpr, OF_B: tl.constexpr,
    DTYPE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    wide, tiles = tl.cdiv(N, BN), tl.cdiv(M, BM) * tl.cdiv(N, BN)
    i, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    m = (tile // wide).to(tl.int64) * BM + tl.arange(0, BM)
    n = (tile % wide).to(tl.int64) * BN + tl.arange(0, BN)
    here_m, here_n = m < M, n < N
    if A_LISTED:
        pa = a + tl.load(a_batches + i) + tl.load(a_rows + m, mask=here_m, other=0)
    else:
        pa = a + i * a0 + m * a1
    if B_LISTED:
        pb = b + tl.load(b_batches + i) + tl.load(b_rows + n, mask=here_n, other=0)
    else:
        pb = b + i * b0 + n * b1
    best = tl.zeros((BM, BN), dtype=DTYPE)
    at = tl.zeros((BM, BN), dtype=tl.int32)
    for k in range(K):
        if A_LISTED:
            x = tl.load(pa + tl.load(a_inners + k), mask=here_m, other=0)
        else:
            x = tl.load(pa, mask=here_m, other=0)
            pa += a2
        if B_LISTED:
            y = tl.load(pb + tl.load(b_inners + k), mask=here_n, other=0)
        else:
            y = tl.load(pb, mask=here_n, other=0)
            pb += b2
        x, y = tl.abs(x.to(DTYPE)), tl.abs(y.to(DTYPE))
        p = x[:, None] * y[None, :]
        wins = (p > best) | ((p != p) & (best == best))
        best = tl.where(wins, p, best)
        if INDEX or IDS:
            at = tl.where(wins, k, at)
    here = here_m[:, None] & here_n[None, :]
    out = (i * M + m[:, None]) * N + n[None, :]
    if VALUE:
        tl.store(value + out, best, mask=here)
    if INDEX:
        tl.store(index + out, at.to(tl.int64), mask=here)
    if IDS:
        won = here & (best != 0)
        if G_LISTED:
            pg = tl.load(g_batches + i) + tl.load(g_inners + at, mask=won, other=0)
            if OF_B:
                pg += tl.load(g_rows + n, mask=here_n, other=0)[None, :]
            else:
                pg += tl.load(g_rows + m, mask=here_m, other=0)[:, None]
        else:
            pg = i * g0 + at.to(tl.int64) * g2
            if OF_B:
                pg += n[None, :] * g1
            else:
                pg += m[:, None] * g1
        tl.store(ids + out, tl.load(g + pg, mask=won, other=0), mask=here)


def contraction(
    a: Matrices,
    b: Matrices,
    out: Contraction,
    dtype: torch.dtype,
    ids: Matrices | None,
    of_b: bool,
) -> None:
    """Fill in the tensors of ``out`` that are not None."""
    (i, m, k), n = sizes(a), columns(b)
    left, right = reading(a, 1, 2), reading(b, 2, 1)
    given = left if ids is None else reading(ids, *((2, 1) if of_b else (1, 2)))
    spare = left.data
    places: list[Any] = [spare if each is None else each for each in out]
    _kernel[(i * triton.cdiv(m, ROWS) * triton.cdiv(n, COLUMNS),)](
        *left[:4], *left.steps, *right[:4], *right.steps, *given[:4], *given.steps,
        *places, m, n, k,
        left.listed, right.listed, given.listed,
        out.value is not None, out.index is not None, ids is not None, of_b,
        tl.float64 if dtype is torch.float64 else tl.float32, ROWS, COLUMNS,
    )  # fmt: skip
