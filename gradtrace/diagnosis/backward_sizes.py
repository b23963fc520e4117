"""The size of every cotangent of one backward pass, and which nodes handed it on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradtrace.autodiff import hooks, nodes
from gradtrace.autodiff.backward import DenseWalk, seed_of
from gradtrace.autodiff.hooks import HookWatch
from gradtrace.autodiff.names import NameTable
from gradtrace.autodiff.nodes import (
    ACCUMULATE,
    REFUSED,
    Edges,
    Grads,
    Node,
    name_of,
    sequence_of,
)
from gradtrace.autodiff.pass_scope import one_pass
from gradtrace.autodiff.traversal import walk
from gradtrace.diagnosis.forward_record import Extent, extent_of
from gradtrace.errors import FreedGraph


class HookedWalk(DenseWalk):
    """A backward pass that notes where hooks make nothing but zeros of a gradient."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.stopped: set[Node] = set()

    def _call_with_hooks(self, node: Node, grads: Grads) -> Grads:
        number = sequence_of(node)
        if number is None or number >= self.clear_since:
            return super()._call_with_hooks(node, grads)
        ready = hooks.before(node, grads)
        outs = nodes.call_ready(node, ready)
        done = hooks.after(node, outs, ready)
        for first, last in ((grads, ready), (outs, done)):
            if first is not last and _any(first) and not _any(last):
                self.stopped.add(node)
        return done


def _any(grads: Grads) -> bool:
    return any(grad is not None and bool(grad.any()) for grad in grads)


@dataclass(eq=False)
class BackwardSizes:
    """Cotangents by node: the range of each output's. ``leaves`` has each leaf's gradient.

    ``closed`` are nodes that cannot be called: reentrant checkpoints, whose own backward pass
    writes on ``.grad``. Leaves below them are not measured.
    """

    order: list[Node] = field(default_factory=list)  # from the loss on
    size: dict[Node, list[Extent]] = field(default_factory=dict)
    edges: dict[Node, Edges] = field(default_factory=dict)
    users: dict[Node, list[Node]] = field(default_factory=dict)
    leaves: dict[int, tuple[Node, Tensor]] = field(default_factory=dict)  # by id: node, gradient
    empty: set[Node] = field(default_factory=set)  # what reached them has no elements
    closed: list[Node] = field(default_factory=list)
    stopped: set[Node] = field(default_factory=set)  # at which hooks make zeros of a gradient
    failure: str = ""
    freed: str = ""  # the text of an error that says that values are gone
    failed: Node | None = None  # where

    @property
    def numbers(self) -> set[int]:
        """The sequence numbers of all nodes."""
        return {n for node in self.edges if (n := sequence_of(node)) is not None}

    def below(self, nodes: Iterable[Node]) -> list[Node]:
        """The nodes of all leaves below some nodes."""
        seen = set(nodes)
        stack = list(seen)
        while stack:
            for child, _ in self.edges[stack.pop()]:
                if child is not None and child not in seen:
                    seen.add(child)
                    stack.append(child)
        return [node for node in seen if type(node) is ACCUMULATE]

    def is_zero(self, node: Node) -> bool:
        """Whether nothing but zeros reached a node."""
        found = self.size.get(node)
        return bool(found) and all(each.zero for each in found or ())

    def largest(self, node: Node) -> float:
        """The largest |cotangent| that reached a node."""
        return max((each.largest for each in self.size.get(node, ())), default=0.0)


def backward_sizes(loss: Tensor, name_table: NameTable, watch: HookWatch) -> BackwardSizes:
    """Run a backward pass and measure it. An error in it ends it, and is kept as ``failure``."""
    found = BackwardSizes()
    seed = seed_of(loss, None if loss.numel() == 1 else torch.ones_like(loss))
    state = HookedWalk(loss, seed, name_table, watch)
    found.stopped = state.stopped

    def visit(node: Node, edges: Edges) -> None:
        found.edges[node] = edges
        for child, _ in edges:
            if child is not None:
                found.users.setdefault(child, []).append(node)
        grads = state.adjoints.get(node)
        if grads is None or found.failure:
            return
        found.order.append(node)
        if all(grad is None or not grad.numel() for grad in grads):
            found.empty.add(node)
        sizes = [extent_of(grad) for grad in grads if grad is not None]
        found.size[node] = [size for size in sizes if size is not None]
        if name_of(node) in REFUSED:
            state.adjoints.pop(node)
            found.closed.append(node)
            return
        try:
            state.visit(node, edges)
        except Exception as error:  # of a custom function, or values that were overwritten
            found.failure, found.failed = str(error), node
            found.freed = found.failure if isinstance(error, FreedGraph) else ""
        if type(node) is ACCUMULATE and not found.failure:
            found.leaves[id(node.variable)] = node, state.leaves[-1][1]

    with one_pass():
        walk(loss, visit)
    return found
