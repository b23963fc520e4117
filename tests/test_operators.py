"""SUM equals autograd over PyTorch's operator database, by calling the nodes and as a program."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
from agreement import WAYS, assert_agree
from operators import entries, label, losses
from thorough import few

from gradtrace.errors import Unsupported

ENTRIES = {label(op): op for op in entries()}
SPARSE = {"sparse.sampled_addmm", "sparse.mm.reduce", "to_sparse"}
"""Operators on sparse layouts: refused, and listed in docs/limits.md."""

NOISY = {"native_layer_norm", "nn.functional.layer_norm"}
"""Norms over a single element: the gradient is 0, and PyTorch's is what rounding leaves of it."""

SAMPLES = few(2, 4)
TENTH = random.Random(0).sample(sorted(set(ENTRIES) - SPARSE), len(ENTRIES) // 10)


def _compare(op: Any, dtype: torch.dtype, most: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the samples' own: deprecated arguments, beta operators
        found = 0
        for loss, leaves in losses(op, dtype, most):
            wanted = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
            for way in WAYS.values():
                assert_agree(way(loss), leaves, wanted, 1e-3 if label(op) in NOISY else 0)
            found += 1
    assert found


@pytest.mark.parametrize("name", sorted(set(ENTRIES) - SPARSE))
def test_gradient_equals_autograd(name: str) -> None:
    _compare(ENTRIES[name], torch.float32, SAMPLES)


@pytest.mark.parametrize("name", TENTH)
def test_gradient_equals_autograd_in_float64(name: str) -> None:
    _compare(ENTRIES[name], torch.float64, 2 * SAMPLES)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", sorted(SPARSE))
def test_sparse_layouts_are_refused_clearly(name: str, way: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss, _ = next(losses(ENTRIES[name], torch.float32, 1))
        with pytest.raises(Unsupported, match=r"(?s)sparse.*dense"):
            WAYS[way](loss)


def test_at_least_99_percent_are_covered() -> None:
    assert set(ENTRIES) >= SPARSE
    assert len(SPARSE) / len(ENTRIES) < 0.01
