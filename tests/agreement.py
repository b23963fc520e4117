"""What it means that two gradients agree: equal up to the rounding of the terms they sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from programs import program
from torch import Tensor

import gradtrace
from gradtrace.autodiff.backward import RECENT, gradient
from gradtrace.autodiff.names import NameTable
from gradtrace.ir import interpreter


def fast(loss: Tensor) -> dict[Tensor, Tensor]:
    """Every leaf's gradient by calling the nodes."""
    return dict(gradient(loss, torch.ones_like(loss), NameTable(), RECENT))


def recorded(loss: Tensor) -> dict[Tensor, Tensor]:
    """Every leaf's gradient by recording the backward program and running it in SUM."""
    return interpreter.run(program(loss), gradtrace.semirings.SUM)


WAYS = {"fast": fast, "recorded": recorded}


def assert_agree(
    found: Mapping[Tensor, Tensor],
    leaves: Sequence[Tensor],
    wanted: Sequence[Tensor | None],
    noise: float = 0,
) -> None:
    """All gradients are as wanted; None means that the leaf was not reached, or only by zeros.

    Sums that cancel (a bias in front of a norm) leave rounding behind of the size of what
    cancelled, so the tolerance is also relative to the largest gradient of the loss.
    """
    present = [g for g in wanted if g is not None and g.numel()]
    largest = max((float(g.abs().nan_to_num(0, 0, 0).amax()) for g in present), default=0.0)
    for leaf, grad in zip(leaves, wanted):
        ours = found.get(leaf)
        if grad is None:
            assert ours is None or not ours.any()
            continue
        if ours is None:
            ours = torch.zeros_like(grad)
        loose = grad.dtype in (torch.float32, torch.complex64)
        rtol, floor = (1e-3, 1e-5) if loose else (1e-7, 1e-11)
        atol = max(floor * largest, 1e-5 if loose else 1e-11, noise)
        torch.testing.assert_close(ours, grad, rtol=rtol, atol=atol, equal_nan=True)
