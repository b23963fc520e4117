"""Records the graph of a model that ``fully_shard`` has sharded, a unit at a time.

Before a node is visited, the units around its module are gathered, as FSDP does in its own backward
pass; the others are freed. What maps hold of a gathered parameter becomes a view that is gathered
again when it is read, so that never all weights are in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from gradtrace.autodiff.names import NameTable, unit_around
from gradtrace.autodiff.nodes import ACCUMULATE, Edges, Node, edges_of
from gradtrace.errors import Unsupported
from gradtrace.ir.lazy_gradient import LazyPart
from gradtrace.ir.program import Block
from gradtrace.linops.read_through import gathered_on_read, reads_memory_of
from gradtrace.pytorch.dtensor import in_use
from gradtrace.pytorch.fsdp import POST_BACKWARD, Residency, ShardedModel
from gradtrace.recording.node_rules import Edge
from gradtrace.recording.record import ProgramRecorder
from gradtrace.recording.tensor_parallel import TensorParallelRecorder, mesh_of


class ShardedRecorder(ProgramRecorder):
    """A ``ProgramRecorder`` of a sharded model; ``close`` ends it."""

    def __init__(self, model: ShardedModel, *given: Any) -> None:
        super().__init__(*given)
        model.forget()
        self.model = model
        self.residency = Residency(model, self._release)
        self.recorded = 0  # how many maps have been looked at
        self.shards = {id(each.gathered): each.sharded for each in model.parameters()}

    def visit(self, node: Node, edges: Edges) -> None:
        """Record a node, after the units around its module are gathered."""
        if node in self.adjoints and type(node) is not ACCUMULATE:
            self.residency.at(unit_around(node, self.off_thread, self.name_table))
        super().visit(node, edges)

    def _pass_on(self, block: Block, position: int, edge: Edge, out: Tensor, value: int) -> None:
        super()._pass_on(block, position, through_units(edge), out, value)

    def _leaf(self, leaf: Tensor, tensor: Tensor, value: int) -> None:
        super()._leaf(leaf, tensor, value)
        self.leaves[-1].shard = self.shards.get(id(leaf))

    def close(self) -> None:
        """Free all units."""
        self.residency.close()

    def _release(self) -> None:
        """What refers to gathered parameters refers to views that are gathered when read."""
        self.products.batched_weights.flush()
        owners = {key: unit for unit in self.model.units.values() for key, _ in unit.storages()}
        for at in range(self.recorded, len(self.maps)):
            self.maps[at] = gathered_on_read(self.maps[at], self.model, owners)
        self.recorded = len(self.maps)
        for lazy in self.deferred.values():
            if any(reads_memory_of(map_, owners) for part in lazy.parts for map_ in part.maps):
                lazy.parts = [LazyPart((), lazy.total())]
                lazy.versions, lazy.data = [], []


def recorder_of(loss: Tensor, name_table: NameTable) -> Callable[..., ProgramRecorder]:
    """What makes the recorder of a graph: that of a sharded model, if its watch knows one, or of a
    tensor-parallel one, if there are operators on DTensors.
    """
    model = name_table.sharded
    if in_use() and (mesh := mesh_of(loss)) is not None:
        if model is not None:
            raise Unsupported(
                "fully_shard has sharded a model whose parameters are DTensors (tensor parallel), "
                "which is traced with one of the two only"
            )
        return partial(TensorParallelRecorder, mesh)
    return ProgramRecorder if model is None else partial(ShardedRecorder, model)


def through_units(edge: Edge) -> Edge:
    """Where a cotangent goes that is passed along an edge: nodes of FSDP only pass it on."""
    child, slot = edge
    while child is not None and type(child).__name__ == POST_BACKWARD:
        child, slot = edges_of(child)[slot]
    return child, slot
