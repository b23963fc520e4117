"""SUM equals autograd on real architectures, in training mode with dropout; both rules trace."""

from __future__ import annotations

import dataclasses
import warnings

import programs
import pytest
import torch
from agreement import assert_agree
from architectures import ARCHITECTURES
from leaves import bits_at, traced_leaves
from thorough import few, some

import gradtrace
from gradtrace.ir import interpreter
from gradtrace.ir.passes.provenance import ComponentBits
from gradtrace.ir.program import HOOKS
from gradtrace.paths.paths import Paths
from gradtrace.traced import Trace

RULES = ("greedy", "edge", "viterbi")


@pytest.mark.parametrize(
    ("watched", "name"),
    [*((True, n) for n in ARCHITECTURES), *((False, n) for n in some(ARCHITECTURES, 5))],
)
def test_all_parameters_agree(watched: bool, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own
        model, loss_of = ARCHITECTURES[name]()
        assert model.training
        torch.manual_seed(0)
        if watched:
            with gradtrace.watch(model) as watch:
                loss = loss_of(model)
            grads = watch.backward(loss)
            program = programs.of(watch)(loss)
        else:
            loss = loss_of(model)
            grads = gradtrace.backward(loss, names=dict(model.named_parameters()))
            program = programs.program(loss)
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        leaves = list(named.values())
        wanted = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
    assert_agree({named[n]: g for n, g in grads.items() if n in named}, leaves, wanted)
    assert_agree(interpreter.run(program, gradtrace.semirings.SUM), leaves, wanted)
    assert sum(g is not None for g in wanted) > len(leaves) / 2
    if watched:
        assert all(block.place.module for block in program.blocks if "Addmm" in block.operator)
        assert not program.notes()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_all_rules_trace(name: str) -> None:
    """The table is printed, of one rule, and its marks are those of the paths, followed one by one.

    To print a table is to trace by the other rules, too, and to find what paths it covers.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, loss_of = ARCHITECTURES[name]()
        torch.manual_seed(0)
        with gradtrace.watch(model) as watch:
            loss = loss_of(model)
        greedy = watch.trace(loss)
        for rule in RULES:
            trace = dataclasses.replace(greedy, rule=rule)
            table = trace.influence()
            if rule == RULES[list(ARCHITECTURES).index(name) % 3]:
                assert str(table).count("\n") >= min(len(table), 40)
            assert all(0 <= row.through <= row.eligible for row in table)
            assert any(row.through for row in table)
            paths = trace.paths(sample=few(20, 40))
            assert len(paths) > few(5, 10)
            agree(trace, paths)


def agree(trace: Trace, paths: Paths) -> None:
    """Every sampled path against the mark that the streaming pass gave its element."""
    blocks = trace.program.blocks
    modules = sorted({block.place.module for block in blocks} - {""})
    numbers = {module: n + 1 for n, module in enumerate(modules)}
    entered = {
        n: 1 << numbers[block.place.module]
        for n, block in enumerate(blocks)
        if block.place.module and block.operator != HOOKS
    }
    marks = ComponentBits(entered, {}, {})
    with torch.no_grad():
        leaves = traced_leaves(trace.program, trace.rule, marks)
        states = {trace.names[f.leaf.value]: f.state for f in leaves}
    for path in paths:
        bits = bits_at(states[path.name], path.index)
        assert bits & 1
        assert {m for m, n in numbers.items() if bits >> n & 1} == set(path.modules), path
