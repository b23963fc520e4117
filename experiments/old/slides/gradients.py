"""Gradients by differences of losses and by our backward pass, and functions to try them on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

import gradtrace as gt

Function: TypeAlias = Callable[[Tensor], Tensor]
"""A scalar of a vector."""

EPSILON = {"float32": 2.0**-23, "float64": 2.0**-52}
"""The distance from 1 to the next number."""

ORDER = {"forward": 1, "central": 2}
"""The power of h in the truncation error."""

INPUTS, BATCH = 4, 8


def best_step(scheme: str, kind: str) -> float:
    """``ε^(1/(p+1))``: where the truncation error ``hᵖ`` meets the rounding error ``ε/h``."""
    return float(EPSILON[kind] ** (1 / (ORDER[scheme] + 1)))


def least_error(scheme: str, kind: str) -> float:
    """``ε^(p/(p+1))``: both errors there."""
    return float(EPSILON[kind] ** (ORDER[scheme] / (ORDER[scheme] + 1)))


def analytic(function: Function, at: Tensor) -> Tensor:
    """The gradient, by one evaluation and one backward pass of ours."""
    leaf = at.detach().clone().requires_grad_()
    return gt.backward(function(leaf), names={"x": leaf})["x"]


def numerical(function: Function, at: Tensor, step: float, scheme: str) -> Tensor:
    """``(f(x + h eᵢ) - f(x)) / h`` or ``(f(x + h eᵢ) - f(x - h eᵢ)) / 2h``, for each i."""
    with torch.no_grad():
        return _forward(function, at, step) if scheme == "forward" else _central(function, at, step)


def _forward(function: Function, at: Tensor, step: float) -> Tensor:
    """``d + 1`` evaluations."""
    here, found, moved = function(at), torch.empty_like(at), at.clone()
    for i in range(len(at)):
        moved[i] = at[i] + step
        found[i] = (function(moved) - here) / step
        moved[i] = at[i]
    return found


def _central(function: Function, at: Tensor, step: float) -> Tensor:
    """``2 d`` evaluations."""
    found, moved = torch.empty_like(at), at.clone()
    for i in range(len(at)):
        moved[i] = at[i] + step
        above = function(moved)
        moved[i] = at[i] - step
        found[i] = (above - function(moved)) / (2 * step)
        moved[i] = at[i]
    return found


def wave(x: Tensor) -> Tensor:
    """``Σ sin(5·exp(x))``, the slides' example at each element."""
    return torch.sin(5 * torch.exp(x)).sum()


def slope(x: Tensor) -> Tensor:
    """``5·cos(5·exp(x))·exp(x)``, as the slides have it."""
    return torch.exp(x).mul(5 * torch.cos(5 * torch.exp(x)))


def network(width: int, seed: int, kind: torch.dtype) -> tuple[Function, Tensor]:
    """The square loss of a tanh network, as a function of all its parameters in one vector.

    All numbers are float32's, so that the function is the same one in both precisions.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes = [(width, INPUTS), (width,), (width, width), (width,), (1, width), (1,)]
    sizes = [math.prod(shape) for shape in shapes]
    x, y = torch.randn(2, BATCH, INPUTS, generator=generator).to(kind)
    start = torch.randn(sum(sizes), generator=generator).to(kind)
    scale = 2.0 ** -round(math.log2(width) / 2)  # about 1/√width, and exact

    def loss(vector: Tensor) -> Tensor:
        w = [part.view(shape) for part, shape in zip(torch.split(vector, sizes), shapes)]
        h = torch.tanh(x @ w[0].T + w[1])
        h = torch.tanh(scale * (h @ w[2].T) + w[3])
        out = torch.add(w[5], h @ w[4].T, alpha=scale)
        return torch.sub(out, y[:, :1]).square().mean()

    return loss, start
