"""Paths of some elements of a trace, followed by its rule: what coverage and agreement look at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from gradtrace.errors import GradtraceError
from gradtrace.tracing.path_forest import PathForest
from gradtrace.tracing.paths import sampled
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


def follow_sample(
    traced: TracedProgram, sample: int, seed: int, max_losses: int = MAX_LOSSES
) -> Iterator[FollowedElements]:
    """Follow the paths of ``sample`` random elements. Of a vector of losses at most ``max_losses``
    are chosen at random, and the sample is divided among them.
    """
    if traced.granularity == "operator":
        raise GradtraceError(
            "at operator granularity paths run through whole tensors and have no weight, so there "
            "is no part of a gradient that they carry; trace with granularity='scalar'"
        )
    sizes = {leaf.value: leaf.tensor.numel() for leaf in traced.leaves.values()}
    generator = torch.Generator().manual_seed(seed)
    losses = torch.randperm(traced.pairs, generator=generator, device="cpu")[:max_losses]
    for number, pair in enumerate(losses.sort().values.tolist()):
        size = sample // len(losses) + (number < sample % len(losses))
        yield follow_elements(traced, sampled(sizes, size, seed + pair), pair)
