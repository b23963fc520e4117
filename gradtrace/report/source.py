"""The input of a view."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor
from torch.nn import Parameter

from gradtrace.flow import measure
from gradtrace.ir.program import Leaf
from gradtrace.table import Table
from gradtrace.tracing.traced_program import TracedProgram

INPUT = re.compile(r"leaf\d+")
"""The generated names of leaves that the user has not named."""


class Source:
    """A trace with its tables of influence, the ``size`` and the shape of each value, and the
    ``builder`` of its paths. ``gradients`` are those that the paths sum to: of the first loss, if
    there are several.
    """

    def __init__(
        self, traced: TracedProgram, tables: Mapping[str, Table], notes: tuple[str, ...]
    ) -> None:
        self.tables, self.notes = tables, notes
        self.traced, self.blocks, self.names = traced, traced.program.blocks, traced.names
        self.leaves = list(traced.leaves.values())  # in the order of the model
        self.builder = traced.builder(0)
        self.shapes = self.builder.labels.shapes
        self.size = measure(traced.program)
        self.gradients: Mapping[str, Tensor] = traced.gradients
        if traced.pairs > 1:
            first = self.builder.follower.gradients
            self.gradients = {name: first[leaf.value] for name, leaf in traced.leaves.items()}

    def is_parameter(self, leaf: Leaf) -> bool:
        """Whether a leaf is a parameter; torch.func replaces some by tensors that are not."""
        named = bool(self.traced.modules) and not INPUT.fullmatch(self.names[leaf.value])
        return isinstance(leaf.tensor, Parameter) or named

    def gradient(self, leaf: Leaf) -> Tensor:
        """A leaf's gradient, where it is: that of a large model takes long to copy."""
        return self.gradients[self.names[leaf.value]].detach()
