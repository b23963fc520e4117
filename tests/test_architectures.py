"""SUM equals autograd on real architectures, in training mode with dropout."""

from __future__ import annotations

import warnings

import pytest
import torch
from agreement import assert_agree
from architectures import ARCHITECTURES

import gradtrace
from gradtrace import engine


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("watched", [True, False])
def test_all_parameters_agree(name: str, watched: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own
        model, loss_of = ARCHITECTURES[name]()
        assert model.training
        torch.manual_seed(0)
        if watched:
            with gradtrace.watch(model) as watch:
                loss = loss_of(model)
            grads = watch.backward(loss)
            program = watch.program(loss)
        else:
            loss = loss_of(model)
            grads = gradtrace.backward(loss, names=dict(model.named_parameters()))
            program = gradtrace.program(loss)
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        leaves = list(named.values())
        wanted = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
    assert_agree({named[n]: g for n, g in grads.items() if n in named}, leaves, wanted)
    assert_agree(engine.run(program, gradtrace.SUM), leaves, wanted)
    assert sum(g is not None for g in wanted) > len(leaves) / 2
    if watched:
        assert all(block.place.module for block in program.blocks if "Addmm" in block.operator)
        assert not program.notes()
