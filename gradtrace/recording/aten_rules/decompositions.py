"""Decompositions of fused operations for which PyTorch has none."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from gradtrace.errors import NotLinear
from gradtrace.kernels.plain_contraction import widened
from gradtrace.recording.aten_rules.sparse import bag_weights

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
    """The gradient of fused attention on the CPU; the attention weights are recomputed."""
    how = logsumexp, dropout_p, is_causal, attn_mask, scale
    return _through_attention(g, q, k, v, *how)[:3]


def flash_attention(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, *more: Any, scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of flash attention on GPUs."""
    _, _, _, _, _, _, dropout_p, is_causal, *_ = more
    return _through_attention(g, q, k, v, None, dropout_p, is_causal, None, scale)[:3]


def cudnn_attention(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, *more: Any, scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of cuDNN's attention."""
    _, _, _, _, mask, _, _, _, _, dropout_p, is_causal = more
    return _through_attention(g, q, k, v, None, dropout_p, is_causal, mask, scale)[:3]


def efficient_attention(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    seed: Tensor,
    offset: Tensor,
    dropout_p: float,
    wanted: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    """The gradient of memory-efficient attention on GPUs."""
    found = _through_attention(g, q, k, v, None, dropout_p, is_causal, mask, scale)
    to_mask = found[3] if mask is None else found[3].sum_to_size(mask.shape)
    return tuple(x if asked else None for x, asked in zip((*found[:3], to_mask), wanted))


def _through_attention(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    logsumexp: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    mask: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients by queries, keys, values and scores.

    ``logsumexp`` is that of the scores, if the forward pass saved it.
    """
    if dropout_p:
        raise NotLinear("fused attention with dropout does not say what it dropped")
    dtypes = q.dtype, k.dtype, v.dtype, q.dtype if mask is None else mask.dtype
    g, q, k, v = (widened(x) for x in (g, q, k, v))
    shared = q.shape[1] // k.shape[1] if q.dim() == 4 else 1  # query heads for each key head
    if shared > 1:
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    factor = 1 / sqrt(q.shape[-1]) if scale is None else scale
    scores = (q * factor) @ k.transpose(-2, -1)
    if is_causal:
        above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(above, float("-inf"))
    if mask is not None:
        scores = scores + mask
    if logsumexp is None:
        logsumexp = scores.logsumexp(-1)
    # The fused kernel computes the weights from the saved logsumexp. Where a mask of large numbers
    # absorbs the scores of a whole row, rounding gives weights that do not add up to one, and
    # autograd's gradient uses these; so the same is done here.
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
    found = (x.to(dtype) for x, dtype in zip((to_q, to_k, to_v, to_scores), dtypes))
    return next(found), next(found), next(found), next(found)


def grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """A grouped matrix product (mixture of experts), one group at a time."""
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


def lstm_cell(
    to_h: Tensor | None,
    to_c: Tensor | None,
    before: Tensor,
    after: Tensor,
    workspace: Tensor,
    biased: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradient of the LSTM cell that is fused on GPUs: by its gates (before the activations),
    by the previous cell state ``before``, and by the bias.

    The workspace holds the four gates (i, f, g, o), after the activations.
    """
    i, f, g, o = widened(workspace).chunk(4, 1)
    squashed = widened(after).tanh()
    slope = o * (1 - squashed * squashed)
    none = torch.zeros_like(f)
    into = torch.stack([g * i * (1 - i), widened(before) * f * (1 - f), i * (1 - g * g), none], 1)
    last = torch.stack([none, none, none, squashed * o * (1 - o)], 1)
    each = (to_h, into * slope.unsqueeze(1) + last, slope * f), (to_c, into, f)
    given = [(widened(x), gate, cell) for x, gate, cell in each if x is not None]
    parts = [(x.unsqueeze(1) * gate).flatten(1) for x, gate, _ in given]
    gates = _total(parts).to(workspace.dtype)
    cell = _total([x * weight for x, _, weight in given]).to(before.dtype)
    bias = _total([part.sum(0) for part in parts]).to(workspace.dtype) if biased else None
    return gates, cell, bias


def gru_cell(
    to_h: Tensor, workspace: Tensor, biased: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradient of the GRU cell that is fused on GPUs: by the gates from its input and from its
    state, by that state, and by both biases.

    The workspace holds the gates (reset, update, new), the previous state, and the factor of the
    reset gate.
    """
    r, z, n, h, hidden = widened(workspace).chunk(5, 1)
    g = widened(to_h)
    new = (1 - z) * (1 - n * n)
    shared = new * hidden * r * (1 - r), (h - n) * z * (1 - z)
    from_input, from_state = (
        (g.unsqueeze(1) * torch.stack([*shared, last], 1)).flatten(1).to(workspace.dtype)
        for last in (new, new * r)
    )
    biases = (from_input.sum(0), from_state.sum(0)) if biased else (None, None)
    return from_input, from_state, (g * z).to(workspace.dtype), *biases


def _total(terms: list[Tensor]) -> Tensor:
    """The sum of one or two terms."""
    return terms[0] if len(terms) == 1 else terms[0] + terms[1]


OPENED: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention_for_cpu_backward": attention,
    "_scaled_dot_product_flash_attention_backward": flash_attention,
    "_scaled_dot_product_cudnn_attention_backward": cudnn_attention,
    "_scaled_dot_product_efficient_attention_backward": efficient_attention,
    "_thnn_fused_lstm_cell_backward_impl": lstm_cell,
    "_thnn_fused_gru_cell_backward": gru_cell,
    "_grouped_mm": grouped_mm,
    "_embedding_bag_per_sample_weights_backward": bag_weights,
}
"""Decompositions by name of the ATen operation."""
