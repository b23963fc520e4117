"""Records the program of a scalar with some tensors as its only leaves, wherever they were made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradtrace.attribution.frozen import frozen
from gradtrace.attribution.lrp import SavedValues, attnlrp
from gradtrace.autodiff import nodes
from gradtrace.autodiff.backward import RECENT
from gradtrace.autodiff.hooks import HookWatch
from gradtrace.autodiff.loss_checks import admit, isolated
from gradtrace.autodiff.names import LazyGradients, NameTable
from gradtrace.autodiff.nodes import Edges, Node
from gradtrace.components.module_parts import WholeProgram
from gradtrace.errors import GradtraceError, NotScalar, Unsupported
from gradtrace.ir.optimise import simplified
from gradtrace.ir.passes.select_leaves import select_leaves
from gradtrace.ir.program import Leaf, Program
from gradtrace.pytorch.plain_tensors import plain
from gradtrace.pytorch.wrapped_modules import named_modules
from gradtrace.recording.record import ProgramRecorder, record
from gradtrace.recording.sharded import recorder_of
from gradtrace.traced import Trace


class InputRecorder(ProgramRecorder):
    """A ``ProgramRecorder`` that ends at given outputs of nodes, as if these were leaves."""

    def __init__(
        self, ends: Mapping[Node, Mapping[int, Tensor]], saved: SavedValues | None, *given: Any
    ) -> None:
        super().__init__(*given)
        self.ends, self.saved = ends, saved

    def visit(self, node: Node, edges: Edges) -> None:
        """Record a node; cotangents of inputs go no further."""
        for slot, tensor in self.ends.get(node, {}).items():
            arrived = self.adjoints.get(node, {})
            if slot in arrived:
                gradient, value = arrived.pop(slot)
                self.leaves.append(Leaf(tensor, value, plain(gradient)))
                if not arrived:
                    del self.adjoints[node]
        count = len(self.blocks)
        super().visit(node, edges)
        if self.saved is not None and len(self.blocks) == count + 1:
            self.saved.add(count, node, nodes.name_of(node))


def one_number(scalar: Tensor) -> Tensor:
    """The scalar; an error if it is several numbers."""
    if scalar.numel() != 1:
        raise NotScalar(
            f"attribute takes one number, got shape {tuple(scalar.shape)}; choose a logit, a "
            "difference of logits, or a loss"
        )
    return scalar


@dataclass
class InputTracer:
    """Traces scalars back to inputs, by the names of modules that a session knows."""

    name_table: NameTable
    hooks: HookWatch
    classes: Mapping[str, str]
    model: nn.Module | None

    @isolated()
    def trace(self, scalar: Tensor, inputs: Mapping[str, Tensor], rule: str) -> Trace:
        """The trace of a scalar whose leaves are the inputs; those that do not reach it are left
        out.
        """
        admit(scalar, self.name_table)
        one_number(scalar)
        if recorder_of(scalar, self.name_table) is not ProgramRecorder:
            raise Unsupported("inputs of sharded models are not attributed; use the whole model")
        known = {name: tensor.detach() for name, tensor in inputs.items()}
        ends: dict[Node, dict[int, Tensor]] = {}
        for name, tensor in inputs.items():
            if not tensor.is_leaf:
                ends.setdefault(nodes.root_of(tensor), {})[nodes.slot_of(tensor)] = known[name]
        leaves = {id(tensor): name for name, tensor in inputs.items() if tensor.is_leaf}
        cut = {id(known[name]): name for name, tensor in inputs.items() if not tensor.is_leaf}
        seed = torch.ones_like(scalar, memory_format=torch.preserve_format).detach()
        saved = SavedValues() if rule == "attnlrp" else None
        make = partial(InputRecorder, ends, saved)
        program = simplified(record(scalar, seed, self.name_table, self.hooks, make=make))
        RECENT.refresh()
        by_id = leaves | cut
        names = {
            leaf.value: by_id[id(leaf.tensor)]
            for leaf in program.leaves
            if id(leaf.tensor) in by_id
        }
        if not names:
            raise GradtraceError(
                f"the scalar depends on none of the inputs {', '.join(inputs)}: pass the very "
                "tensors that the model was called with, and compute the scalar from its output"
            )
        whole = self._whole(program)
        program = select_leaves(program, set(names))
        if rule != "gradient":
            program = frozen(program) if saved is None else self._attnlrp(program, saved)
            reached = {leaf.value for leaf in program.leaves}
            names = {value: name for value, name in names.items() if value in reached}
        else:
            program = replace(program, constants=replace(program.constants, kept={}))
        named = {names[leaf.value]: leaf for leaf in program.leaves}
        order = {name: named[name] for name in inputs if name in named}
        gradients = LazyGradients({name: leaf.compute for name, leaf in order.items()}, {})
        values = {leaf.value: name for name, leaf in order.items()}
        found = (program, gradients, "greedy", 1, self.classes, values)
        return Trace(*found, model=self.model, whole=whole)

    def _whole(self, program: Program) -> WholeProgram:
        """The program with the weights as leaves, without their gradients."""
        known = {leaf.value: self.name_table.names_of(leaf.tensor) for leaf in program.leaves}
        names = {value: every[0] for value, every in known.items() if every}
        leaves = {every[0]: every for every in known.values() if every}
        constants = replace(program.constants, leaves=[], kept={})
        return WholeProgram(replace(program, constants=constants), names, leaves)

    def _attnlrp(self, program: Program, saved: SavedValues) -> Program:
        modules = {} if self.model is None else dict(named_modules(self.model))
        return attnlrp(program, saved, modules)
