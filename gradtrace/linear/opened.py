"""What PyTorch fuses and does not open, composed."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from gradtrace.errors import NotLinear
from gradtrace.linear.sparse import bag_weights

aten = torch.ops.aten


def attention(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Back through fused attention on the CPU, composed: the weights are computed again."""
    if dropout_p:
        raise NotLinear("fused attention with dropout does not say what it dropped")
    shared = q.shape[1] // k.shape[1] if q.dim() == 4 else 1  # queries to a key, in groups
    if shared > 1:
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    factor = 1 / sqrt(q.shape[-1]) if scale is None else scale
    scores = (q * factor) @ k.transpose(-2, -1)
    if is_causal:
        above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(above, float("-inf"))
    if attn_mask is not None:
        scores = scores + attn_mask
    # As the fused kernel does, from the logarithm it saved: where a mask has swallowed the scores
    # of a whole row, that rounds to weights which do not add up to one, and so does autograd's
    # gradient.
    raw = (scores - logsumexp.unsqueeze(-1)).exp().nan_to_num(0)
    total = raw.sum(-1, keepdim=True)
    weights = raw / torch.where(total == 0, 1, total)
    to_v = raw.transpose(-2, -1) @ g
    to_weights = g @ v.transpose(-2, -1)
    to_scores = aten._softmax_backward_data(to_weights, weights, -1, weights.dtype) * total
    to_q, to_k = (to_scores * factor) @ k, (to_scores * factor).transpose(-2, -1) @ q
    if shared > 1:
        to_k = torch.unflatten(to_k, 1, (-1, shared)).sum(2)
        to_v = torch.unflatten(to_v, 1, (-1, shared)).sum(2)
    return to_q, to_k, to_v


def grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """A grouped matrix product (mixtures of experts), group by group."""
    if offs is None:
        return torch.bmm(a, b)
    ends = offs.tolist()
    starts = [0, *ends[:-1]]
    bounds = list(zip(starts, ends))
    if a.dim() == 2 and b.dim() == 3:
        rows = [a[s:e] @ b[i] for i, (s, e) in enumerate(bounds)]
        rest = a.new_zeros(a.shape[0] - ends[-1], b.shape[-1])
        return torch.cat([*rows, rest])
    if a.dim() == 3:
        columns = [a[i] @ b[:, s:e] for i, (s, e) in enumerate(bounds)]
        return torch.cat([*columns, a.new_zeros(a.shape[1], b.shape[1] - ends[-1])], 1)
    return torch.stack([a[:, s:e] @ b[s:e] for s, e in bounds])


OPENED: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention_for_cpu_backward": attention,
    "_grouped_mm": grouped_mm,
    "_embedding_bag_per_sample_weights_backward": bag_weights,
}
"""Decompositions of our own, for what PyTorch fuses and does not open."""
