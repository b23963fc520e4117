"""Chains of movements are one movement, and nothing else is folded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import programs
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import matrix_of
from torch import Tensor

import gradtrace as gt
from gradtrace.ir import interpreter
from gradtrace.ir.passes.fuse_moves import composed
from gradtrace.ir.program import Block, Program
from gradtrace.linops import Identity, Index, Scale
from gradtrace.semirings import COUNT, MAX, SUM

Function = Callable[[Tensor], Tensor]


class Formula(torch.autograd.Function):
    """The identity, with a backward formula of the caller's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, backward: Function) -> Tensor:
        ctx.formula = backward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return ctx.formula(g), None


def block_of(formula: Function, x: Tensor) -> tuple[Block, Program]:
    x = x.detach().requires_grad_()
    cotangent = torch.randn(x.shape, dtype=x.dtype)
    program = programs.program(Formula.apply(x, formula), cotangent=cotangent)
    (block,) = program.blocks
    assert torch.equal(interpreter.run(program, SUM)[x], formula(cotangent))
    return block, program


def kinds(block: Block, program: Program) -> list[type]:
    assert len(program.maps) == sum(len(step.terms) for step in block.steps)  # no others are kept
    return [type(map_) for step in block.steps for map_ in program.maps.of(step)]


def test_movements_become_one() -> None:
    def turned(g: Tensor) -> Tensor:
        return g.t().flip(0).reshape(2, 6).roll(1, 1).reshape(3, 4)

    block, program = block_of(turned, torch.randn(3, 4))
    assert kinds(block, program) == [Index]
    (term,) = block.steps[0].terms
    assert term.value in block.takes.values()
    numbers = torch.arange(12).reshape(3, 4)
    assert torch.equal(program.maps[term.map].source(), turned(numbers))  # type: ignore[attr-defined]


def test_shapes_alone_stay_an_identity() -> None:
    block, program = block_of(
        lambda g: g.reshape(6, 2).reshape(12).reshape(3, 4), torch.randn(3, 4)
    )
    assert kinds(block, program) == [Identity]


def test_scales_are_not_folded_and_end_a_chain() -> None:
    block, program = block_of(lambda g: (g.flip(0).flip(1) * 3.0 * 0.1).t().t(), torch.randn(3, 4))
    assert kinds(block, program) == [Index, Scale, Scale, Index]


def test_what_two_use_stays() -> None:
    def both(g: Tensor) -> Tensor:
        turned = g.flip(0)
        return turned.roll(1, 0) + turned.roll(2, 0)

    block, _ = block_of(both, torch.randn(5))
    used = [term.value for step in block.steps for term in step.terms]
    assert max(map(used.count, used)) == 2  # what is turned, or what turns it


def test_a_rounding_between_two_movements_stays() -> None:
    block, _ = block_of(lambda g: g.flip(0).half().roll(1, 0).float(), torch.randn(5) * 1e-6)
    assert len(block.steps) >= 2


def test_a_path_runs_through_what_was_folded() -> None:
    x = torch.tensor([3.0, -1.0, 2.0], requires_grad=True)
    weights = torch.tensor([5.0, 7.0, 11.0])
    moved = Formula.apply(x, lambda g: g.flip(0).roll(1, 0))  # 5 7 11, 11 7 5, 5 11 7
    trace = gt.trace((moved * weights).sum(), names={"x": x})
    assert [trace.path("x", n).weight for n in range(3)] == [5.0, 11.0, 7.0]


MOVES: dict[str, Callable[[tuple[int, int]], Index | Identity]] = {
    "flip": lambda s: Index(lambda x: x.flip(0), s, s, injective=True),
    "turn": lambda s: Index(lambda x: x.t(), s, (s[1], s[0]), injective=True),
    "first": lambda s: Index(lambda x: x[:1], s, (1, s[1]), injective=True),
    "twice": lambda s: Index(lambda x: x.repeat(2, 1), s, (2 * s[0], s[1])),
    "pad": lambda s: Index(
        lambda x: torch.nn.functional.pad(x, (1, 0)), s, (s[0], s[1] + 1), True, True
    ),
    "flat": lambda s: Identity(s, (1, s[0] * s[1])),
}


@given(st.lists(st.sampled_from(sorted(MOVES)), min_size=2, max_size=5))
def test_composed_is_one_after_the_other(names: list[str]) -> None:
    first = MOVES[names[0]]((2, 3))
    whole, dense = first, matrix_of(first)
    for name in names[1:]:
        part = MOVES[name](whole.out_shape)
        whole, dense = composed(whole, part), matrix_of(part) @ dense
    assert torch.equal(matrix_of(whole), dense)
    assert whole.single_target == bool((dense.sum(0) <= 1).all())
    x = torch.randn(2, 3)
    assert torch.equal(whole.apply(x).reshape(-1), dense.float() @ x.reshape(-1))
    for semiring in (MAX, COUNT):
        value = semiring.lift(x)
        pulled = whole.apply_in(value, semiring)
        wanted = whole.generic(value, semiring)
        assert all(torch.equal(a, b) for a, b in zip(pulled, wanted))
