"""What a view is made of."""

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
"""The names of leaves that have none of the user's."""


@dataclass(frozen=True)
class Source:
    """A trace, as far as a view needs it: its program, whose ``size`` was measured, the values that
    paths are followed through, and the tables of influence.

    ``gradients`` are those that the paths add up to: of the first loss, where there are several.
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
        """In the order of the model."""
        order = {name: n for n, name in enumerate(self.gradients)}
        return sorted(self.program.leaves, key=lambda leaf: order[self.names[leaf.value]])

    @cached_property
    def shapes(self) -> dict[int, Shape]:
        """The shape of each value."""
        return self.builder.labels.shapes

    def is_parameter(self, leaf: Leaf) -> bool:
        """Whether a leaf is a parameter; torch.func puts plain tensors in the place of some."""
        named = bool(self.modules) and not INPUT.fullmatch(self.names[leaf.value])
        return isinstance(leaf.tensor, Parameter) or named

    def gradient(self, leaf: Leaf) -> Tensor:
        """A leaf's gradient, on the processor."""
        return self.gradients[self.names[leaf.value]].detach().cpu()

    @cached_property
    def sizes(self) -> dict[str, int]:
        """How many elements each leaf has."""
        return {self.names[leaf.value]: leaf.tensor.numel() for leaf in self.leaves}

    @property
    def device(self) -> torch.device:
        """Where paths are followed."""
        return self.program.seed.device
