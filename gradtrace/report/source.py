"""The input of a view."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import Parameter

from gradtrace.flow import Size
from gradtrace.ir.program import Block, Leaf, Program
from gradtrace.tracing.influence import Influence
from gradtrace.tracing.paths import Builder
from gradtrace.types import Shape

INPUT = re.compile(r"leaf\d+")
"""The generated names of leaves that the user has not named."""


@dataclass(frozen=True)
class Source:
    """The parts of a trace that a view needs: its program with the ``size`` of each value, the
    values that paths are followed through, and the tables of influence.

    ``gradients`` are those that the paths sum to: of the first loss, if there are several.
    """

    program: Program
    builder: Builder
    gradients: Mapping[str, Tensor]
    size: Mapping[int, Size]
    names: Mapping[int, str]  # by leaf value
    aliases: Mapping[str, tuple[str, ...]]
    modules: Mapping[str, str]
    rule: str
    granularity: str
    pairs: int
    notes: tuple[str, ...]
    tables: Mapping[str, Influence]

    @property
    def blocks(self) -> list[Block]:
        """The operators."""
        return self.program.blocks

    @cached_property
    def leaves(self) -> list[Leaf]:
        """The leaves in the order of the model."""
        order = {name: n for n, name in enumerate(self.gradients)}
        return sorted(self.program.leaves, key=lambda leaf: order[self.names[leaf.value]])

    @cached_property
    def shapes(self) -> dict[int, Shape]:
        """The shape of each value."""
        return self.builder.labels.shapes

    def is_parameter(self, leaf: Leaf) -> bool:
        """Whether a leaf is a parameter; torch.func replaces some by tensors that are not."""
        named = bool(self.modules) and not INPUT.fullmatch(self.names[leaf.value])
        return isinstance(leaf.tensor, Parameter) or named

    def gradient(self, leaf: Leaf) -> Tensor:
        """A leaf's gradient, on the CPU."""
        return self.gradients[self.names[leaf.value]].detach().cpu()

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The number of elements of each leaf, by name."""
        return {self.names[leaf.value]: leaf.tensor.numel() for leaf in self.leaves}

    @property
    def device(self) -> torch.device:
        """The device on which paths are followed."""
        return self.program.seed.device
