"""Records the graph of a tensor-parallel model: operators on ``DTensor``s, and on local parts.

Between operators on DTensors, cotangents are whole on every rank; weights are gathered when they
are read. Where the model works on local parts (``to_local``), a rank records its own part: maps
``RankGather`` and ``own_part`` lead from one to the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradtrace.autodiff import nodes
from gradtrace.autodiff.nodes import Edges, Node, edges_of, sequence_of
from gradtrace.autodiff.traversal import pending
from gradtrace.errors import Unsupported
from gradtrace.ir.program import Block
from gradtrace.linops.across_ranks import RankGather, own_part
from gradtrace.linops.read_through import gathered_on_read
from gradtrace.pytorch.dtensor import (
    NODES,
    REDISTRIBUTE,
    TO_LOCAL,
    Layout,
    LocalParts,
    WholeTensors,
    is_dtensor,
    replicate,
    replicated,
    whole,
)
from gradtrace.recording.node_rules import Edge
from gradtrace.recording.record import NodeKind, ProgramRecorder
from gradtrace.types import Shape


class WholeNode:
    """A node on DTensors, as one on whole tensors: what it has saved is gathered when it is read.
    ``owners`` are these DTensors, by the memory of the whole ones.
    """

    def __init__(self, node: Node, mesh: Any) -> None:
        self.node, self.mesh = node, mesh
        self.owners: dict[int, Any] = {}
        self.held: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.node, name)
        if isinstance(found, (list, tuple)):
            return type(found)(self._whole(each) for each in found)
        return self._whole(found)

    def __call__(self, *grads: Tensor | None) -> Any:
        """Call the node with cotangents that are the same on all ranks."""
        given = [None if grad is None else replicate(grad, self.mesh) for grad in grads]
        outs = self.node(*given)
        return tuple(map(self._whole, outs)) if isinstance(outs, tuple) else self._whole(outs)

    def _whole(self, x: Any) -> Any:
        if not is_dtensor(x):
            return x
        if replicated(x):
            return x.detach().to_local()
        found = whole(x).contiguous()
        self.held.append(found)
        self.owners[found.untyped_storage()._cdata] = x.detach()
        return found


class TensorParallelRecorder(ProgramRecorder):
    """A ``ProgramRecorder`` of a graph with operators on DTensors."""

    def __init__(self, mesh: Any, *given: Any) -> None:
        super().__init__(*given)
        self.mesh = mesh
        self.distributed = operators_on_dtensors(nodes.root_of(given[0]))
        self.whole_tensors = WholeTensors()
        self.on_parts: set[int] = set()  # values of which this rank has its own part
        self.following: list[Block] = []  # after the block of the node that is visited
        self.products.defers = False  # it would hold whole operands

    def _record_by_rule(
        self,
        kind: NodeKind,
        node: Node,
        edges: Edges,
        arrived: dict[int, tuple[Tensor, int]],
        block: Block,
    ) -> bool:
        if kind.name in NODES:  # the root: others are passed by
            ((grad, value),) = arrived.values()
            self._pass_on(block, 0, (node, 0), grad, self._chain((), value, grad, block))
            return True
        if node not in self.distributed:
            return super()._record_by_rule(kind, node, edges, arrived, block)
        reader, first = WholeNode(node, self.mesh), len(self.maps)
        found = super()._record_by_rule(kind, reader, edges, arrived, block)
        if not found:
            raise Unsupported(
                "it works on DTensors, and its formula is not among those that can be followed "
                "there; make its input local (to_local()), or load the full state dict into a "
                "plain module and trace that"
            )
        for at in range(first, len(self.maps)) if reader.owners else ():
            self.maps[at] = gathered_on_read(self.maps[at], self.whole_tensors, reader.owners)
        return found

    def parts(self) -> LocalParts | None:
        """The values between ``from_local`` and ``to_local`` that are sharded."""
        return LocalParts(self.mesh, frozenset(self.on_parts)) if self.on_parts else None

    def visit(self, node: Node, edges: Edges) -> None:
        """Record a node, and what follows it on the way to local parts or from them."""
        number = sequence_of(node) if node in self.distributed and node in self.adjoints else None
        if number is not None and number < self.clear_since:
            raise Unsupported(
                f"{self.name_table.describe(node)} works on DTensors, and hooks may have been "
                "registered on it; run the forward pass inside gradtrace.watch(model), and "
                "register gradient hooks before"
            )
        super().visit(node, edges)
        self.blocks += self.following
        self.following = []

    def _pass_on(self, block: Block, position: int, edge: Edge, out: Tensor, value: int) -> None:
        """Pass a result on past nodes between DTensors and local tensors: their maps belong to the
        operator that gives it, unless that is made of several.
        """
        (child, slot), parts = edge, any(v in self.on_parts for v in block.takes.values())
        if parts and block.label is not None:
            raise Unsupported(
                "gradtrace.label names slices of a local part, of which each rank has other ones; "
                "label the whole tensor, or what is made of it"
            )
        while child is not None and (name := type(child).__name__) in NODES:
            layout = layout_of(name, child)
            if layout is not None and not layout.whole:
                if self.mesh.ndim > 1:
                    raise Unsupported(
                        "local parts of a DTensor are used on a mesh of several dimensions, which "
                        "cannot be followed; trace the model on a mesh of one dimension"
                    )
                if block.composed:
                    block.gives[position] = value
                    block = Block(name, block.place, {0: value})
                    self.following.append(block)
                parts = name != TO_LOCAL
                map_ = own_part(layout) if parts else RankGather(layout, tuple(out.shape))
                out = map_.apply(out)
                value = self._chain((map_,), value, out, block)
            child, slot = edges_of(child)[0]
        if child is None:
            return
        super()._pass_on(block, position, (child, slot), out, value)
        if parts:
            self.on_parts.update((value, self.adjoints[child][slot][1]))

    def _leaf(self, leaf: Tensor, tensor: Tensor, value: int) -> None:
        if value in self.on_parts:
            name = next(iter(self.name_table.names_of(leaf)), f"of shape {tuple(leaf.shape)}")
            raise Unsupported(
                f"leaf {name} is a plain tensor that is used on local parts of a DTensor, so each "
                "rank has a gradient of its own; distribute it (parallelize_module), or make what "
                "it is used on whole"
            )
        super()._leaf(leaf, tensor, value)
        if is_dtensor(leaf):
            found = self.leaves[-1]
            found.shard = leaf
            layout = Layout.of(leaf.device_mesh, leaf.placements, tuple(leaf.shape))  # type: ignore[attr-defined]
            if not layout.whole and bool(torch.isfinite(tensor).all()):
                found.given, found.layout = layout.part(tensor), layout


def mesh_of(loss: Tensor) -> Any:
    """The mesh of a graph's operators on DTensors; None if there are none."""
    for node in pending(nodes.root_of(loss))[0]:
        name = type(node).__name__
        if name == REDISTRIBUTE:
            return node.current_spec.mesh
        if name in NODES:
            return _side(name, node)[0]
    return None


def layout_of(name: str, node: Node) -> Layout | None:
    """The layout of the local side of a node between DTensors and local tensors; None: whole."""
    if name == REDISTRIBUTE:
        return None
    return Layout.of(*_side(name, node))


def _side(name: str, node: Node) -> tuple[Any, Any, Shape]:
    """The mesh, the placements and the shape of the whole tensor."""
    if name == TO_LOCAL:
        spec, placements = node.dtensor_spec, node.grad_placements
        return spec.mesh, placements or spec.placements, tuple(spec.shape)
    shape = nodes.shapes_of(node)[0]
    if hasattr(node, "forward_input_placements"):
        return node.forward_input_device_mesh, node.forward_input_placements, shape
    return node.previous_device_mesh, node.previous_placement, shape  # before torch 2.9


def operators_on_dtensors(root: Node) -> set[Node]:
    """The nodes whose outputs are DTensors: between ``to_local`` and ``from_local``."""
    found: set[Node] = set()
    seen, stack = {root}, [(root, False)]
    while stack:
        node, distributed = stack.pop()
        name = type(node).__name__
        if distributed:
            found.add(node)
        inside = name in (TO_LOCAL, REDISTRIBUTE) or (distributed and name not in NODES)
        for child, _ in edges_of(node):
            if child is not None and child not in seen:
                seen.add(child)
                stack.append((child, inside))
    return found
