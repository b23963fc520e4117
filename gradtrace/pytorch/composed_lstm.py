"""``nn.LSTM`` computed operator by operator, so that its time steps can be traced.

On a CPU PyTorch computes an LSTM with oneDNN, as one node for all time steps. The setting that
disables this is process-wide and would affect other threads. So within ``composed`` the
layers are computed here, operator by operator, as in PyTorch's own implementation
(``aten/src/ATen/native/RNN.cpp``), with the same graph and the same bits.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from gradtrace.pytorch.global_switches import Change, Switch

State: TypeAlias = tuple[Tensor, Tensor]  # hidden and cell state, (batch, size) each

_VF: Any = torch._VF  # nn.LSTM calls _VF.lstm


class _ThreadState(threading.local):
    depth = 0  # contexts of this thread
    asks: Callable[[], bool] | None = None  # of ``beside``


_THREAD = _ThreadState()


@contextlib.contextmanager
def composed() -> Change:
    """Within, ``nn.LSTM`` is computed on this thread operator by operator."""
    _THREAD.depth += 1
    try:
        with _PATCH():
            yield
    finally:
        _THREAD.depth -= 1


@contextlib.contextmanager
def beside(asks: Callable[[], bool]) -> Change:
    """Within, ``nn.LSTM`` is computed fused, and operator by operator beside it: training goes on
    with the bits of the fused form. A backward pass while ``asks()`` takes the graph of the other.
    """
    before, _THREAD.asks = _THREAD.asks, asks
    try:
        with composed():
            yield
    finally:
        _THREAD.asks = before


def _patched() -> Change:
    functions = vars(_VF)
    try:
        functions["lstm"] = _lstm
        yield
    finally:
        functions.pop("lstm", None)


_PATCH = Switch(_patched)


def _lstm(*args: Any, **kwargs: Any) -> Any:
    """Replaces ``torch._VF.lstm``."""
    if _THREAD.depth and not kwargs and len(args) == 9 and _fused(*args[:3]):
        return lstm(*args) if _THREAD.asks is None else _both(_THREAD.asks, *args)
    return _VF.vf.lstm(*args, **kwargs)


def _both(asks: Callable[[], bool], *args: Any) -> Any:
    """The fused outputs, with the graphs of both forms."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks  # as a checkpoint has
    if not torch.is_grad_enabled() or hooks(True) is not None:
        return _VF.vf.lstm(*args)
    with torch.random.fork_rng(devices=()):
        composed = lstm(*args)
    pairs = zip(_VF.vf.lstm(*args), composed)
    return tuple(_Both.apply(asks, *pair) for pair in pairs)  # type: ignore[no-untyped-call]


class _Both(torch.autograd.Function):
    """A value with two graphs, of which a backward pass takes one."""

    @staticmethod
    def forward(ctx: Any, asks: Callable[[], bool], fused: Tensor, composed: Tensor) -> Tensor:
        ctx.asks = asks
        return fused.view_as(fused)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (None, None, grad) if ctx.asks() else (None, grad, None)


FUSED = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes for which PyTorch may use oneDNN."""


def _fused(x: Any, state: Any, weights: Sequence[Tensor]) -> bool:
    """Whether PyTorch may use oneDNN for this call; never for packed sequences or projections."""
    if isinstance(state, Tensor) or not torch._C._has_mkldnn:
        return False
    hidden, cell = state
    plain = x.device.type == "cpu" and x.dtype in FUSED and hidden.shape == cell.shape
    return bool(plain and x.numel() and torch._C._get_mkldnn_enabled())


def lstm(
    x: Tensor,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    biased: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The outputs of the last layer, (time, batch, size), and the final states of all layers.

    With ``batch_first``, input and outputs are (batch, time, size).
    """
    x = x.transpose(0, 1) if batch_first else x
    each = 4 if biased else 2
    found = [weights[n : n + each] for n in range(0, len(weights), each)]
    states = list(zip(state[0].unbind(0), state[1].unbind(0)))
    ends: list[State] = []
    for layer in range(layers):
        parts = []
        for step in (1, -1)[: 1 + bidirectional]:
            n = len(ends)
            out, end = _direction(x, states[n], step, *found[n])
            parts.append(out)
            ends.append(end)
        x = torch.cat(parts, parts[0].dim() - 1) if bidirectional else parts[0]
        if dropout and train and layer < layers - 1:
            x = torch.dropout(x, dropout, True)
    hidden, cell = torch.stack([h for h, _ in ends], 0), torch.stack([c for _, c in ends], 0)
    return x.transpose(0, 1) if batch_first else x, hidden, cell


def _direction(
    x: Tensor,
    state: State,
    step: int,
    w_input: Tensor,
    w_hidden: Tensor,
    b_input: Tensor | None = None,
    b_hidden: Tensor | None = None,
) -> tuple[Tensor, State]:
    """One layer, forward (``step`` 1) or backward (-1) in time.

    Returns its outputs (time, batch, size), and its final state.
    """
    h, c = state
    outs = []
    for given in F.linear(x, w_input, b_input).unbind(0)[::step]:
        gates = F.linear(h, w_hidden, b_hidden).add_(given)
        i, f, g, o = gates.unsafe_chunk(4, 1)
        i, f, g, o = i.sigmoid_(), f.sigmoid_(), g.tanh_(), o.sigmoid_()
        c = (f * c).add_(i * g)
        h = o * c.tanh()
        outs.append(h)
    return torch.stack(outs[::step], 0), (h, c)
