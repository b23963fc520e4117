"""The program with attention patterns and norms taken as constants.

With ``A = softmax(q kᵀ)`` and ``y = A v``, no gradient goes through A: what is left is that through
the values v. Of a layer norm ``(x - mean) / std · gain``, and of RMS norm, no gradient goes through
the denominator. What remains is linear in the residual stream where activations are.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace

from gradtrace.components.module_parts import ProgramPlaces
from gradtrace.components.operator_names import MOVES, spoken
from gradtrace.ir import interpreter
from gradtrace.ir.program import Block, Leaf, Program, Step
from gradtrace.linops import Normaliser, Scale
from gradtrace.semirings import SUM

SOFTMAX = ("SoftmaxBackward0", "SafeSoftmaxBackward0")
DENOMINATORS = ("RsqrtBackward0", "StdBackward0")
CENTRED = {"NativeLayerNormBackward0": 1, "NativeGroupNormBackward0": 1, "FusedRmsNormBackward0": 0}
"""Fused norms, and how many of their map's low-rank terms are not of the denominator: the mean."""


def frozen(program: Program) -> Program:
    """The program without the routes through attention patterns and denominators of norms, and the
    gradients that it gives.
    """
    places = ProgramPlaces(program, {}, {}, {})
    cut = {
        number
        for number, block in enumerate(program.blocks)
        if block.operator in DENOMINATORS
        or (block.operator in SOFTMAX and _is_pattern(places, block))
    }
    blocks = [
        without_denominator(program, block) if block.operator in CENTRED else block
        for block in program.blocks
    ]
    return rebuilt(program, blocks, cut)


def rebuilt(
    program: Program, rewritten: Sequence[Block], cut: Container[int], gradients: bool = True
) -> Program:
    """The program of other blocks, without those that are cut and what only they lead to; with its
    gradients, unless these are not needed.
    """
    alive = {program.root}
    blocks = [_living(block, alive, n in cut) for n, block in enumerate(rewritten)]
    leaves = [leaf for leaf in program.leaves if leaf.value in alive]
    constants = replace(program.constants, leaves=leaves, kept={})
    found = Program(program.root, program.size, tuple(blocks), constants)
    if not leaves or not gradients:
        return found
    given = interpreter.run(found, SUM)
    leaves = [Leaf(leaf.tensor, leaf.value, given[leaf.tensor]) for leaf in leaves]
    return replace(found, constants=replace(constants, leaves=leaves))


def _is_pattern(places: ProgramPlaces, block: Block) -> bool:
    """Whether a softmax weighs values: its result, moved or masked, is the first factor of a
    product of matrices. Of plain matrices the second factor must depend on the inputs too.
    """
    pending = list(block.takes.values())
    while pending:
        value = pending.pop()
        for number, given in places.givers.get(value, ()):
            user = places.program.blocks[number]
            move = spoken(user.operator) in MOVES or user.operator == "MulBackward0"
            plain = user.operator == "MmBackward0" and 1 in user.gives
            if (plain or user.operator == "BmmBackward0") and user.gives.get(0) == given:
                return True
            if move and len(user.gives) == 1:
                pending += user.takes.values()
    return False


def without_denominator(program: Program, block: Block) -> Block:
    """A fused norm whose map to its input has a constant denominator."""
    count, steps = CENTRED[block.operator], []
    for step in block.steps:
        terms = []
        for term in step.terms:
            map_ = program.maps[term.map]
            if isinstance(map_, Normaliser):
                pairs = list(zip(map_.left, map_.right))[:count]
                kept = Normaliser(map_.diagonal, pairs, map_.dims, map_.in_shape)
                new = kept if pairs else Scale(map_.diagonal, map_.in_shape)
                term = program.maps.term(new, term.value)
            terms.append(term)
        steps.append(step._replace(terms=tuple(terms)))
    return replace(block, steps=tuple(steps))


def _living(block: Block, alive: set[int], cut: bool) -> Block:
    """The block with the steps whose values come from the root; none of them if it is ``cut``."""
    steps = [] if cut else _reached(block.steps, alive)
    merges = _reached(block.merges, alive)
    return replace(
        block,
        takes={slot: value for slot, value in block.takes.items() if value in alive and not cut},
        steps=tuple(steps),
        gives={at: value for at, value in block.gives.items() if value in alive},
        merges=tuple(merges),
        note=block.note if steps else "",
    )


def _reached(steps: Sequence[Step], alive: set[int]) -> list[Step]:
    """The steps with the terms that are alive; their results are alive then."""
    found = []
    for step in steps:
        terms = tuple(term for term in step.terms if term.value in alive)
        if terms:
            found.append(step._replace(terms=terms))
            alive.add(step.out)
    return found
