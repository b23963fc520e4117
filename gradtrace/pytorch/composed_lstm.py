"""``nn.LSTM`` computed operator by operator, so that its time steps can be traced.

On a CPU PyTorch computes an LSTM with oneDNN, as one node for all time steps. The setting that
disables this is process-wide and would affect other threads. So for calls inside ``composed`` the
layers are computed here, operator by operator, as in PyTorch's own implementation
(``aten/src/ATen/native/RNN.cpp``), with the same graph and the same bits.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

State: TypeAlias = tuple[Tensor, Tensor]  # hidden and cell state, (batch, size) each
Weights: TypeAlias = tuple[Tensor, Tensor, Tensor | None, Tensor | None]

_VF: Any = torch._VF  # nn.LSTM calls _VF.lstm
_LOCK = threading.RLock()
_ACTIVE = 0  # calls of begin without end, of all threads


class _ThreadState(threading.local):
    depth = 0  # calls of begin without end, of this thread


_THREAD = _ThreadState()


@contextlib.contextmanager
def composed() -> Iterator[None]:
    """Within, on this thread, ``nn.LSTM`` is computed operator by operator."""
    begin()
    try:
        yield
    finally:
        end()


def begin() -> None:
    """Compute ``nn.LSTM`` on this thread operator by operator, until ``end``."""
    global _ACTIVE
    _THREAD.depth += 1
    with _LOCK:
        _ACTIVE += 1
        vars(_VF)["lstm"] = _lstm


def end() -> None:
    """Undo one ``begin`` of this thread."""
    global _ACTIVE
    _THREAD.depth -= 1
    with _LOCK:
        _ACTIVE -= 1
        if not _ACTIVE:
            vars(_VF).pop("lstm", None)


def _lstm(*args: Any, **kwargs: Any) -> Any:
    """Replaces ``torch._VF.lstm``."""
    if _THREAD.depth and not kwargs and len(args) == 9 and _fused(*args[:3]):
        return lstm(*args)
    return _VF.vf.lstm(*args, **kwargs)


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
    directions = [_forwards, _backwards][: 1 + bidirectional]
    states = list(zip(state[0].unbind(0), state[1].unbind(0)))
    ends: list[State] = []
    for layer in range(layers):
        parts = []
        for direction in directions:
            n = len(ends)
            own: list[Any] = [*found[n], None, None]
            out, end = direction(x, states[n], (own[0], own[1], own[2], own[3]))
            parts.append(out)
            ends.append(end)
        x = torch.cat(parts, parts[0].dim() - 1) if bidirectional else parts[0]
        if dropout and train and layer < layers - 1:
            x = torch.dropout(x, dropout, True)
    hidden, cell = torch.stack([h for h, _ in ends], 0), torch.stack([c for _, c in ends], 0)
    return x.transpose(0, 1) if batch_first else x, hidden, cell


def _forwards(x: Tensor, state: State, weights: Weights) -> tuple[Tensor, State]:
    """One layer, forward in time: its outputs (time, batch, size), and its final state."""
    outs, end = _steps(F.linear(x, weights[0], weights[2]).unbind(0), state, weights)
    return torch.stack(outs, 0), end


def _backwards(x: Tensor, state: State, weights: Weights) -> tuple[Tensor, State]:
    """``_direction``, backward in time."""
    inputs = F.linear(x, weights[0], weights[2]).unbind(0)
    outs, end = _steps(inputs[::-1], state, weights)
    return torch.stack(outs[::-1], 0), end


def _steps(inputs: Sequence[Tensor], state: State, weights: Weights) -> tuple[list[Tensor], State]:
    """The LSTM cell for each time step; ``inputs`` are already multiplied by the input weights."""
    h, c = state
    outs = []
    linear: Callable[..., Tensor] = F.linear
    for x in inputs:
        gates = linear(h, weights[1], weights[3]).add_(x)
        i, f, g, o = gates.unsafe_chunk(4, 1)
        i, f, g, o = i.sigmoid_(), f.sigmoid_(), g.tanh_(), o.sigmoid_()
        c = (f * c).add_(i * g)
        h = o * c.tanh()
        outs.append(h)
    return outs, (h, c)
