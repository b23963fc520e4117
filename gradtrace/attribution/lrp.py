"""Layer-wise relevance propagation as gradient × input of a rewritten program (AttnLRP).

With relevance ``R = c · x`` of a value x, a rule for R is a rule for the cotangent c (Achtibat et
al., AttnLRP, 2024):

- Linear maps, the ε-rule with ε → 0: ``R_i = Σ_j W[j,i] x_i R_j / z_j``, that is ``c_i = Σ_j W[j,i]
  c_j``: the gradient. What a bias contributes to z is lost.
- Products of two values that depend on the inputs, the uniform rule: half to each factor.
- Softmax, its Taylor expansion at the input: ``R_i = x_i (R_i - s_i Σ_j R_j)``: the gradient.
- Elementwise functions, the identity rule: ``R_in = R_out``, so c is multiplied by ``f(x) / x``.
- Norms, the identity rule: their denominators are constants.

Relevance adds up to the scalar but for biases, softmax and means of norms; the defect says how far.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradtrace.attribution.frozen import CENTRED, DENOMINATORS, rebuilt, without_denominator
from gradtrace.autodiff.nodes import Node
from gradtrace.components.module_parts import ProgramPlaces
from gradtrace.errors import Unsupported
from gradtrace.ir.passes.select_leaves import select_leaves
from gradtrace.ir.program import Block, Program, Step
from gradtrace.linops import Identity, Map, Scale

PRODUCTS = {
    **dict.fromkeys(("MulBackward0", "MmBackward0", "BmmBackward0", "DotBackward0"), (0, 1)),
    **dict.fromkeys(("MvBackward0", "MatmulBackward0"), (0, 1)),
    **dict.fromkeys(("AddmmBackward0", "BaddbmmBackward0", "AddbmmBackward0"), (1, 2)),
    **dict.fromkeys(("AddcmulBackward0", "AddmvBackward0"), (1, 2)),
}
"""Operators that multiply two of their arguments."""

QUOTIENT = "DivBackward0"
"""Its second argument is taken as a constant, as denominators of norms are."""


def _of_input(function: Callable[..., Tensor], *options: str) -> Callable[[Node], Tensor]:
    """``f(x) / x`` of a node that has saved its input x."""

    def found(node: Any) -> Tensor:
        more = {name: getattr(node, f"_saved_{name}") for name in options}
        return ratio(function(node._saved_self, **more), node._saved_self)

    return found


def _of_result(inverse: Callable[[Tensor], Tensor]) -> Callable[[Node], Tensor]:
    """``f(x) / x`` of a node that has saved its result, by the inverse function."""
    return lambda node: ratio(node._saved_result, inverse(node._saved_result))


def _inside(result: Tensor, low: float) -> Tensor:
    """A result within the open range from ``low`` to 1, where the inverse function is finite."""
    margin = torch.finfo(result.dtype).eps
    return result.clamp(low + margin, 1 - margin)


ELEMENTWISE: dict[str, Callable[[Any], Tensor]] = {
    "GeluBackward0": _of_input(F.gelu, "approximate"),
    "SiluBackward0": _of_input(F.silu),
    "MishBackward0": _of_input(F.mish),
    "HardswishBackward0": _of_input(F.hardswish),
    "HardsigmoidBackward0": _of_input(F.hardsigmoid),
    "SoftplusBackward0": _of_input(F.softplus, "beta", "threshold"),
    "ErfBackward0": _of_input(torch.erf),
    "SinBackward0": _of_input(torch.sin),
    "CosBackward0": _of_input(torch.cos),
    "LogBackward0": _of_input(torch.log),
    "TanhBackward0": _of_result(lambda y: torch.atanh(_inside(y, -1))),
    "SigmoidBackward0": _of_result(lambda y: torch.logit(_inside(y, 0))),
    "ExpBackward0": _of_result(torch.log),
    "SqrtBackward0": lambda node: node._saved_result.reciprocal(),
    "PowBackward0": lambda node: ratio(node._saved_self**node._saved_exponent, node._saved_self),
}
"""``f(x) / x`` of elementwise functions; those with ``f(a x) = a f(x)``, as ReLU, need none."""

SAVED_INPUTS = {
    **{key: {0: "_saved_self"} for key in ("PowBackward0", "ErfBackward0", "GeluBackward0")},
    "MulBackward0": {0: "_saved_self", 1: "_saved_other"},
}
"""Which arguments operators have saved, for functions that modules write out."""


def ratio(y: Tensor, x: Tensor) -> Tensor:
    """``y / x``, with at least ε in the denominator.

    >>> ratio(torch.tensor([2.0, 0.0]), torch.tensor([4.0, 0.0])).tolist()
    [0.5, 0.0]
    """
    least = torch.finfo(x.dtype).eps
    return y / torch.where(x.abs() < least, torch.full_like(x, least).copysign(x), x)


@dataclass
class SavedValues:
    """What nodes have saved that the rules need, by the number of their blocks."""

    ratios: dict[int, Tensor] = field(default_factory=dict)
    inputs: dict[int, dict[int, Tensor]] = field(default_factory=dict)

    def add(self, number: int, node: Any, name: str) -> None:
        """Keep what a node has saved."""
        if name in ELEMENTWISE:
            with torch.no_grad():
                self.ratios[number] = ELEMENTWISE[name](node).detach()
        for at, key in SAVED_INPUTS.get(name, {}).items():
            value = getattr(node, key, None)
            if isinstance(value, Tensor):
                self.inputs.setdefault(number, {})[at] = value.detach()


def attnlrp(program: Program, saved: SavedValues, modules: Mapping[str, nn.Module]) -> Program:
    """The program whose gradient × input is the relevance by the rules above."""
    fused = next((b.operator for b in program.blocks if "ScaledDotProduct" in b.operator), None)
    if fused is not None:
        raise Unsupported(
            f"{fused} has no rule of rule='attnlrp': run the forward pass inside gradtrace.watch, "
            "where attention is computed by products and a softmax"
        )
    leaves = [leaf.value for leaf in program.leaves]
    blocks = [
        without_denominator(program, b) if b.operator in CENTRED else b for b in program.blocks
    ]
    cut = {n for n, block in enumerate(blocks) if block.operator in DENOMINATORS}
    program = select_leaves(rebuilt(program, blocks, cut, gradients=False), leaves)
    rewriter = RuleRewriter(program, saved, modules)
    blocks = rewriter.rewritten()
    return rebuilt(replace(program, size=rewriter.size), blocks, rewriter.cut)


@dataclass
class RuleRewriter:
    """Rewrites the maps of products and elementwise functions."""

    program: Program
    saved: SavedValues
    modules: Mapping[str, nn.Module]
    cut: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.places = ProgramPlaces(self.program, self.modules, {}, {})
        self.size = self.program.size

    def rewritten(self) -> list[Block]:
        """The blocks with the maps of the rules."""
        done = self._activations()
        blocks = []
        for number, block in enumerate(self.program.blocks):
            if number in done:
                blocks.append(done[number])
            elif block.operator in PRODUCTS:
                blocks.append(self._halved(block))
            elif block.operator == QUOTIENT and len(block.gives) > 1:
                blocks.append(replace(block, gives={0: block.gives[0]}, steps=self._of(block, 0)))
            elif number in self.saved.ratios and len(block.steps) == 1:
                blocks.append(self._scaled(block, self.saved.ratios[number]))
            else:
                blocks.append(block)
        return blocks

    def _of(self, block: Block, at: int) -> tuple[Step, ...]:
        """The steps that lead to one of a block's arguments."""
        needed, found = {block.gives[at]}, list[Step]()
        for step in reversed(block.steps):
            if step.out in needed:
                needed |= {term.value for term in step.terms}
                found.append(step)
        return tuple(found[::-1])

    def _scaled(self, block: Block, weight: Tensor) -> Block:
        """An elementwise function with another factor."""
        (step,) = block.steps
        shape = step.shape
        new: Map = Scale(weight.to(step.dtype).expand(shape), shape)
        term = self.program.maps.term(new, step.terms[0].value)
        return replace(block, steps=(step._replace(terms=(term,)),))

    def _halved(self, block: Block) -> Block:
        """A product that hands half to each of two factors."""
        factors = [block.gives[at] for at in PRODUCTS[block.operator] if at in block.gives]
        if len(factors) < 2:
            return block
        steps = []
        for step in block.steps:
            if step.out not in factors:
                steps.append(step)
                continue
            whole, self.size = self.size, self.size + 1
            steps.append(step._replace(out=whole))
            half = self.program.maps.term(Scale(0.5, step.shape), whole)
            steps.append(step._replace(terms=(half,)))
        return replace(block, steps=tuple(steps))

    # Functions that a module writes out -----------------------------------------------------------

    def _activations(self) -> dict[int, Block]:
        """Blocks of modules that are elementwise functions of one value, such as GELU in several
        operators: one way through each, with ``f(x) / x``; the other blocks are cut.
        """
        found: dict[int, Block] = {}
        calls: dict[Any, list[int]] = {}
        for number, block in enumerate(self.program.blocks):
            if block.takes and block.gives:
                calls.setdefault(block.place, []).append(number)
        for place, numbers in calls.items():
            module = self.modules.get(place.module)
            plain = module is not None and not module._modules and not module._parameters
            if plain and len(numbers) > 1 and self._is_elementwise(numbers):
                assert module is not None
                found |= self._as_one(numbers, module)
        return found

    def _is_elementwise(self, numbers: Sequence[int]) -> bool:
        maps = self.program.maps
        blocks = [self.program.blocks[n] for n in numbers]
        single = all(len(step.terms) == 1 for block in blocks for step in block.steps)
        kinds = (maps[t.map] for block in blocks for step in block.steps for t in step.terms)
        return single and all(m.is_diagonal or isinstance(m, Identity) for m in kinds)

    def _as_one(self, numbers: Sequence[int], module: nn.Module) -> dict[int, Block]:
        """The blocks of a call as one factor; none if its input is not known."""
        inside, blocks = set(numbers), self.program.blocks
        ends = {self._made(v) for n in numbers for v in blocks[n].gives.values()} - inside
        x = next((x for n in numbers if (x := self._input(n, inside)) is not None), None)
        way = self._way(numbers[0], inside)
        if len(ends) != 1 or x is None or way is None:
            return {}
        with torch.no_grad():
            weight = ratio(module.forward(x), x)
        found = {}
        for n, at in way:
            step = self._of(blocks[n], at)[-1]
            last = (n, at) == way[-1]
            shape = step.shape
            new = Scale(weight.to(step.dtype).expand(shape), shape) if last else Scale(1.0, shape)
            (taken,) = blocks[n].takes.values()
            term = self.program.maps.term(new, taken)
            given = blocks[n].gives[at]
            steps = (step._replace(out=given, terms=(term,)),)
            found[n] = replace(blocks[n], gives={at: given}, steps=steps)
        self.cut |= inside - found.keys()
        return found

    def _made(self, value: int) -> int | None:
        """The block that made an argument, or None for an input."""
        return self.places.takers.get(self.places.wholes.get(value, value))

    def _input(self, number: int, inside: set[int]) -> Tensor | None:
        """The input of a module, if this block has saved it."""
        kept, gives = self.saved.inputs.get(number, {}), self.program.blocks[number].gives
        ends = (at for at, value in gives.items() if self._made(value) not in inside)
        return next((kept[at] for at in ends if at in kept), None)

    def _way(self, number: int, inside: set[int]) -> list[tuple[int, int]] | None:
        """Arguments from a module's output to its input."""
        way = []
        while True:
            block = self.program.blocks[number]
            at, value = next(iter(block.gives.items()))
            way.append((number, at))
            maker = self._made(value)
            if maker not in inside:
                return way
            assert maker is not None
            number = maker
