"""Paths of some elements of a trace, followed by its rule: what coverage and agreement look at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradtrace.components.components import ComponentSelection
from gradtrace.ir.passes.provenance import NO_COMPONENTS, ComponentBits
from gradtrace.kernels.operands import Floats, Whole
from gradtrace.kernels.path_table import NOT_WHOLE
from gradtrace.paths.path_forest import PathForest, PathProvenance, different_sets
from gradtrace.paths.path_machine import follow
from gradtrace.paths.paths import path_bits, path_provenance, sampled
from gradtrace.pytorch.random_state import seeded
from gradtrace.tracing.traced_program import TracedProgram

MAX_LOSSES = 8
"""Of a vector of losses, elements are sampled for at most this many losses; each needs the values
of its own backward pass.
"""


class FollowedElements(NamedTuple):
    """The paths of some elements to one of the losses; ``drawn``: flat indices by value."""

    pair: int
    drawn: Mapping[int, Tensor]
    forest: PathForest


class FollowedPaths(NamedTuple):
    """What is counted of the paths of some elements to one of the losses: whether each reaches the
    root; its weight, ``mantissa · 2**exponent``; its start's gradient; the components it passes.
    """

    pair: int
    drawn: Mapping[int, Tensor]
    whole: npt.NDArray[np.bool_]
    mantissa: Floats
    exponent: Whole
    gradient: Tensor
    provenance: PathProvenance


def follow_paths(
    traced: TracedProgram,
    drawn: Mapping[int, Tensor],
    pair: int,
    chosen: ComponentSelection | None = None,
) -> FollowedPaths:
    """Follow the paths of elements, given by value, to one of the losses: by a kernel, in one
    launch, or else in a sweep over the program. ``chosen``: the components that are looked for.
    """
    follower, program = traced.builder(pair).follower, traced.program
    bits = NO_COMPONENTS if chosen is None else chosen.component_bits
    kept = traced.kept.tables if chosen is None else traced.kept.facts(chosen).tables
    found = None
    if not traced.sharded:
        told = partial(path_bits, program, bits)
        found = follow(follower, traced.rule, drawn, told, kept, traced.backend)
    if found is None:
        return ends_of(traced, follow_elements(traced, drawn, pair), bits)
    sets, mantissa, exponent, gradient = found
    provenance = different_sets(torch.from_numpy(sets))
    whole, numbers = exponent != NOT_WHOLE, torch.from_numpy(gradient)
    return FollowedPaths(pair, drawn, whole, mantissa, exponent, numbers, provenance)


def ends_of(
    traced: TracedProgram,
    followed: FollowedElements,
    component_bits: ComponentBits = NO_COMPONENTS,
) -> FollowedPaths:
    """The same of paths that have been followed element by element."""
    pair, drawn, forest = followed
    weights = path_weights(forest)
    mantissa, exponent = (x[forest.starts.numpy()] for x in weights)
    provenance = path_provenance(forest, traced.program, component_bits)
    gradient = forest.gradient[forest.starts]
    whole = forest.whole.numpy()
    return FollowedPaths(pair, drawn, whole, mantissa, exponent, gradient, provenance)


def path_weights(forest: PathForest) -> tuple[Floats, Whole]:
    """For each node the weight of its path to the root: ``mantissa · 2**exponent``, which does not
    underflow on long paths. One sweep over the forest, however many paths share a node.
    """
    onward, weight = forest.onward.numpy(), forest.weight.numpy()
    mantissa, exponent = np.zeros(len(onward) + 1), np.zeros(len(onward) + 1, dtype=np.int64)
    last = len(onward)
    with np.errstate(invalid="ignore"):  # infinity times 0
        for value, first in zip(reversed(forest.values), reversed(forest.firsts)):
            if value == forest.root:
                found, power = np.frexp(forest.gradient[first:last].numpy())
                mantissa[first:last], exponent[first:last] = found, power
            else:
                after = onward[first:last]  # -1, the last entry, for none: its weight is 0
                found, power = np.frexp(weight[first:last] * mantissa[after])
                mantissa[first:last], exponent[first:last] = found, exponent[after] + power
            last = first
    return mantissa, exponent


def follow_elements(
    traced: TracedProgram, drawn: Mapping[int, Tensor], pair: int
) -> FollowedElements:
    """Follow the paths of elements, given by value, to one of the losses."""
    whole = torch.cat([torch.zeros(0, dtype=torch.int64, device="cpu"), *drawn.values()]).to(
        traced.device
    )
    starts = dict(zip(drawn, torch.split(whole, [len(some) for some in drawn.values()])))
    forest = traced.builder(pair).follower.follow(starts, traced.rule, gradients=False)
    return FollowedElements(pair, drawn, forest)


def drawn_sample(
    traced: TracedProgram, sample: int, seed: int, max_losses: int = MAX_LOSSES
) -> Iterator[tuple[int, dict[int, Tensor]]]:
    """Random elements, by value, for each of some losses: of a vector of losses at most
    ``max_losses`` are chosen at random, and the sample is divided among them.
    """
    sizes = {leaf.value: leaf.tensor.numel() for leaf in traced.leaves.values()}
    generator = seeded(seed)
    losses = torch.randperm(traced.pairs, generator=generator, device="cpu")[:max_losses]
    for number, pair in enumerate(losses.sort().values.tolist()):
        size = sample // len(losses) + (number < sample % len(losses))
        yield pair, sampled(sizes, size, seed + pair)
