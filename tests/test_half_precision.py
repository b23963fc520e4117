"""Llama's build in half precisions and under autocast: gradients, tables and paths are those of
what PyTorch computes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import pytest
import torch
from random_transformers import llama
from test_architectures import agree
from torch import Tensor, nn

import gradtrace
from gradtrace.ir import interpreter
from gradtrace.traced import Trace

HALVES = (torch.bfloat16, torch.float16)
SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class Case(NamedTuple):
    """A traced model."""

    model: nn.Module
    loss: Tensor
    trace: Trace


@contextmanager
def quiet() -> Iterator[None]:
    """PyTorch says once that a processor has no instructions for bfloat16."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def traced(dtype: torch.dtype, cast: torch.dtype | None = None, rule: str = "greedy") -> Case:
    torch.manual_seed(0)
    with quiet():
        model, loss_of = llama(6, dtype, **SIZES)
        autocast = nullcontext() if cast is None else torch.autocast("cpu", cast)
        with gradtrace.watch(model) as watch, autocast:
            loss = loss_of()
        return Case(model, loss, watch.trace(loss, rule=rule))


CASES = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "float16": (torch.float16, None),
    "autocast to bfloat16": (torch.float32, torch.bfloat16),
    "autocast to float16": (torch.float32, torch.float16),
}


@pytest.mark.parametrize("name", CASES)
def test_sum_is_the_gradient(name: str) -> None:
    """Up to the last bits of the narrowest type that a gradient passes through."""
    dtype, cast = CASES[name]
    model, loss, trace = traced(dtype, cast)
    leaves = list(model.parameters())
    with quiet():
        wanted = torch.autograd.grad(loss, leaves, retain_graph=True)
        found = interpreter.run(trace.program, gradtrace.semirings.SUM)
    near = 2e-6 if dtype is torch.float32 and cast is None else 0.02
    for leaf, grad in zip(leaves, wanted):
        assert found[leaf].dtype is grad.dtype is dtype
        most = float(grad.double().abs().max())
        assert most > 0
        far = float((found[leaf].double() - grad.double()).abs().max())
        assert far <= near * most
    assert set(map(id, found)) == set(map(id, leaves))
    assert not trace.program.notes()


@pytest.mark.parametrize("rule", ["greedy", "edge", "viterbi"])
@pytest.mark.parametrize("name", CASES)
def test_tables_are_whole_and_close_to_those_of_float32(name: str, rule: str) -> None:
    model, _, trace = traced(*CASES[name], rule=rule)
    table, exact = trace.influence(), traced(torch.float32, rule=rule).trace.influence()
    every = sum(p.numel() for p in model.parameters())
    for row in table:
        assert 0 <= row.through <= row.eligible
        assert row.eligible + row.unreached + row.own <= every
    whole = {"model.layers", "model.layers.0", "model.layers.1", "model.norm", "lm_head"}
    assert whole <= {row.name for row in table}
    # A choice between two that are close falls either way; shares move little for that.
    for part in ("model.layers.0.mlp", "model.layers.1.self_attn", "model.layers.1.mlp"):
        assert abs(table.shares[part] - exact.shares[part]) < 0.15
    assert table.shares["lm_head"] == 1.0


@pytest.mark.parametrize("rule", ["greedy", "edge", "viterbi"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_paths_have_the_marks_of_the_table(dtype: torch.dtype, rule: str) -> None:
    """Every path, followed by itself, has visited what the streaming pass has marked."""
    trace = traced(dtype, rule=rule).trace
    paths = trace.paths(sample=60)
    assert len(paths) > 40
    agree(trace, paths)
