"""Fused operators computed by elementary ones: softmax, log-softmax and norms taken apart.

To autograd ``softmax`` is one operator, so a path goes through it in one step, and what its pieces
hand back is summed before it is compared. Written as ``exp(x - log Σ exp(x))`` the same function,
with the same gradient, has a fork, and other paths. While ``Opened`` is entered, functions of
PyTorch that this thread calls are replaced by such compositions.
"""

from __future__ import annotations

import contextlib
import math
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradtrace.errors import GradtraceError, not_one_of

HALVES = (torch.float16, torch.bfloat16)
"""Dtypes in which PyTorch's fused operators accumulate in float32, and so do the compositions."""


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in HALVES else x


def logsumexp(x: Tensor, dim: int) -> Tensor:
    """``log Σ exp(x)`` along ``dim``, which is kept; a constant shift keeps exp in range."""
    shift = x.detach().amax(dim, keepdim=True)
    return (x - shift).exp().sum(dim, keepdim=True).log() + shift


def log_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """``x - log Σ exp(x)``."""
    x = x if dtype is None else x.to(dtype)
    wide = _wide(x)
    return (wide - logsumexp(wide, dim)).to(x.dtype)


def softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """``exp(x - log Σ exp(x))``."""
    x = x if dtype is None else x.to(dtype)
    wide = _wide(x)
    return (wide - logsumexp(wide, dim)).exp().to(x.dtype)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``softmax(query·keyᵀ·scale + mask)·value``: ``F.scaled_dot_product_attention``."""
    if enable_gqa:
        times = [query.shape[-3] // x.shape[-3] for x in (key, value)]
        key, value = (x.repeat_interleave(n, -3) for x, n in zip((key, value), times))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = query @ key.transpose(-1, -2) * scale
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return torch.dropout(softmax(scores, -1), dropout_p, dropout_p > 0) @ value


def cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """``-log_softmax(x)`` at the target, or in its mean, as ``F.cross_entropy`` defines it."""
    dim = 1 if x.dim() > 1 else 0
    logs, classes = log_softmax(x, dim), x.shape[dim]
    shape = [-1 if n == dim else 1 for n in range(x.dim())]
    scaled = logs if weight is None else logs * weight.view(shape)
    if target.is_floating_point():
        if label_smoothing:
            target = target * (1 - label_smoothing) + label_smoothing / classes
        rows = -(scaled * target).sum(dim)
        return _reduced(rows, reduction, float(max(rows.numel(), 1)))
    # nll_loss of PyTorch is one choice of an element: there is nothing to take apart
    how = ("none", "mean", "sum")[reduction]
    near = F.nll_loss(logs, target, weight, ignore_index=ignore_index, reduction=how)
    if not label_smoothing:
        return near
    kept = target != ignore_index
    rows = -scaled.sum(dim).masked_fill(~kept, 0.0)
    total = kept.sum() if weight is None else weight[target[kept]].sum()
    far = _reduced(rows, reduction, total)
    return near * (1 - label_smoothing) + far * (label_smoothing / classes)


def _reduced(rows: Tensor, reduction: int, count: Tensor | float) -> Tensor:
    """``reduction``: 0 for none, 1 for the mean, 2 for the sum."""
    return rows if not reduction else rows.sum() if reduction == 2 else rows.sum() / count


def _standardised(x: Tensor, dims: Sequence[int], eps: float) -> Tensor:
    """``(x - mean) / √(mean of (x - mean)² + eps)``."""
    centred = x - x.mean(list(dims), keepdim=True)
    return centred / ((centred * centred).mean(list(dims), keepdim=True) + eps).sqrt()


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """``(x - mean) / √(variance + eps) · weight + bias`` over the last dimensions."""
    wide = _standardised(_wide(x), range(-len(normalized_shape), 0), eps)
    return _affine(wide, weight, bias).to(x.dtype)


def rms_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """``x / √(mean of x² + eps) · weight`` over the last dimensions."""
    wide, dims = _wide(x), list(range(-len(normalized_shape), 0))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return _affine(wide / ((wide * wide).mean(dims, keepdim=True) + eps).sqrt(), weight, None).to(
        x.dtype
    )


def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """Each group of channels standardised."""
    grouped = _wide(x).view(x.shape[0], num_groups, -1, *x.shape[2:])
    flat = _standardised(grouped, range(2, grouped.dim()), eps).flatten(1, 2)
    return _affine(flat, _channels(weight, x), _channels(bias, x)).to(x.dtype)


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """Each channel standardised over the batch; otherwise it is affine, and stays as it is."""
    given = (running_mean, running_var, training, momentum, eps, cudnn_enabled)
    if not training:
        return torch.batch_norm(x, weight, bias, *given)
    dims = [n for n in range(x.dim()) if n != 1]
    wide = _wide(x)
    with torch.no_grad():
        variance, mean = torch.var_mean(wide, dims)
        for running, now in ((running_mean, mean), (running_var, variance)):
            if running is not None:
                running.mul_(1 - momentum).add_(now.to(running.dtype), alpha=momentum)
    found = _standardised(wide, dims, eps)
    return _affine(found, _channels(weight, x), _channels(bias, x)).to(x.dtype)


def _channels(parameter: Tensor | None, x: Tensor) -> Tensor | None:
    """A parameter of channels, to be multiplied with x."""
    return None if parameter is None else parameter.view(-1, *(1,) * (x.dim() - 2))


Table = dict[Any, Callable[..., Any]]

OPENED: dict[str, Table] = {
    "softmax": {
        torch.softmax: softmax,
        Tensor.softmax: softmax,
        torch.special.softmax: softmax,
        F.scaled_dot_product_attention: attention,
    },
    "log_softmax": {
        torch.log_softmax: log_softmax,
        Tensor.log_softmax: log_softmax,
        torch.special.log_softmax: log_softmax,
        torch._C._nn.cross_entropy_loss: cross_entropy,
    },
    "layer_norm": {torch.layer_norm: layer_norm},
    "rms_norm": {torch.rms_norm: rms_norm},
    "group_norm": {torch.group_norm: group_norm},
    "batch_norm": {torch.batch_norm: batch_norm},
}
"""What can be opened: by name, the functions of PyTorch and what they are replaced by."""

WRAPPERS = frozenset(
    (F.softmax, F.log_softmax, F.softmin, F.gumbel_softmax, F.cross_entropy, F.layer_norm)
    + (F.rms_norm, F.group_norm, F.batch_norm, F.multi_head_attention_forward)
)
"""Functions written in Python that call one of these."""


def _looked_into(function: Any) -> Any:
    """A wrapper whose calls can be replaced: it does not ask who would replace the wrapper."""
    asked = [name for name in function.__globals__ if name.startswith("has_torch_function")]
    names = {**function.__globals__, **dict.fromkeys(asked, lambda *_: False)}
    copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


class _ThreadState(threading.local):
    names: tuple[str, ...] = ()  # of operators that this thread has opened


_HERE = _ThreadState()


class _Replacing(TorchFunctionMode):
    """Calls the compositions of a table in place of the functions that are its keys."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self._table = table

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, or what it is composed of."""
        kwargs = dict(kwargs or {})
        if func in WRAPPERS:
            with self:
                return _looked_into(func)(*args, **kwargs)
        found = self._table.get(func)
        if found is None:
            return func(*args, **kwargs)
        first = (kwargs.pop("input"),) if "input" in kwargs else ()
        return found(*first, *args, **kwargs)


@contextlib.contextmanager
def opened(names: Sequence[str]) -> Iterator[None]:
    """Inside, operators of these names are computed by elementary ones, on this thread."""
    before = _HERE.names
    _HERE.names = (*before, *(name for name in names if name not in before))
    table: Table = {}
    for name in _HERE.names:
        table |= OPENED[name]
    try:
        with _Replacing(table) if table else contextlib.nullcontext():
            yield
    finally:
        _HERE.names = before


def open_names() -> tuple[str, ...]:
    """The names of the operators that this thread has opened."""
    return _HERE.names


def checked(names: Sequence[str]) -> tuple[str, ...]:
    """The names of operators to open, if they can be."""
    if isinstance(names, str):
        names = (names,)
    for name in names:
        if name not in OPENED:
            raise GradtraceError(f"open: {not_one_of('operator', name, tuple(OPENED))}")
    return tuple(names)
