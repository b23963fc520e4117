"""The gradient alone: calls PyTorch's backward formulas node by node and records nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradtrace.autodiff import hooks, nodes
from gradtrace.autodiff.hooks import HookWatch
from gradtrace.autodiff.names import ModuleCall, NameTable, off_thread_calls, unit_around
from gradtrace.autodiff.nodes import ACCUMULATE, FACTS, Edges, Grads, Node, Outputs, learn
from gradtrace.autodiff.pass_scope import one_pass
from gradtrace.autodiff.traversal import walk
from gradtrace.errors import NotScalar, Unsupported
from gradtrace.pytorch.fsdp import POST_BACKWARD, Residency, resident

RECENT = HookWatch()
"""Refreshed after each pass: nodes made since its reset have no hooks, if none was registered."""


def seed_of(loss: Tensor, cotangent: Tensor | None) -> Tensor:
    """The cotangent of the loss: 1, or the caller's ``cotangent`` if the loss is not a scalar."""
    nodes.refuse_complex(loss)
    if cotangent is not None:
        if not isinstance(cotangent, Tensor):
            raise NotScalar(
                f"the cotangent is a {type(cotangent).__name__}; pass a tensor of the loss's shape"
            )
        if tuple(cotangent.shape) != tuple(loss.shape):
            raise NotScalar(
                f"the cotangent has shape {tuple(cotangent.shape)}, the loss {tuple(loss.shape)}; "
                "they must agree"
            )
        if cotangent.device != loss.device:
            raise Unsupported(
                f"the cotangent is on {cotangent.device}, the loss on {loss.device}; move one"
            )
        return cotangent.detach().to(loss.dtype)
    if loss.numel() != 1:
        raise NotScalar(
            f"the loss has {loss.numel():,} elements (shape {tuple(loss.shape)}) and nothing says "
            "how to weigh them; pass loss.sum() or loss.mean(), or cotangent= with one weight for "
            "each"
        )
    return torch.ones_like(loss, memory_format=torch.preserve_format)


class GradientWalk:
    """One backward pass over a graph.

    ``adjoints`` holds the pending cotangents by node and output slot; each is dropped when used.
    ``leaves`` holds each leaf with its gradient when the pass is done.
    """

    conform = staticmethod(nodes.conform)

    def __init__(self, loss: Tensor, seed: Tensor, name_table: NameTable, watch: HookWatch) -> None:
        self.name_table, self.loss = name_table, loss
        self.clear_since = watch.clear_since()
        start = [None] * nodes.slot_of(loss) + [seed]
        self.adjoints: dict[Node, list[Tensor | None]] = {nodes.root_of(loss): start}
        self.leaves: list[tuple[Tensor, Tensor]] = []
        self.outputs = Outputs()

    def visit(self, node: Node, edges: Edges) -> None:
        """Call a node with its cotangents and add the results to those of its arguments."""
        grads = self.adjoints.pop(node, None)
        if grads is None:
            return  # no cotangent reaches this node
        kind = type(node)
        if kind is ACCUMULATE:
            variable = node.variable
            self.name_table.check_leaf(node)
            if variable._backward_hooks and hooks.has_active_hooks(variable):
                grads = hooks.run_leaf_hooks(variable, grads, self.name_table.spoken(variable))
            grad = grads[0]
            assert grad is not None
            if grad._is_zerotensor():  # has no storage; users get real zeros
                grad = torch.zeros_like(grad)
            self.leaves.append((variable, grad))
            return
        facts = FACTS.get(kind) or learn(kind)
        if facts.multi_output:
            grads += [None] * (len(node._input_metadata) - len(grads))
        conform_at, adjoints, position = facts.conform_at, self.adjoints, -1
        conform = self.conform
        try:
            if facts.python or node._sequence_nr() < self.clear_since:
                outs = self._call_with_hooks(node, grads)
            else:
                outs = node(*grads)
                if type(outs) is not tuple:
                    outs = (outs,)
            for (child, slot), out in zip(edges, outs):
                position += 1
                if child is None or out is None:
                    continue
                if conform_at is None or position in conform_at:
                    out = conform(out, self.outputs.wanted(child, slot))
                waiting = adjoints.get(child)
                if waiting is None:
                    adjoints[child] = [None] * slot + [out] if slot else [out]
                    continue
                if slot >= len(waiting):
                    waiting += [None] * (slot + 1 - len(waiting))
                there = waiting[slot]
                waiting[slot] = out if there is None else there + out
        except Exception as error:
            raise self.name_table.place(error, node, self.place_of(node)) from error

    def place_of(self, node: Node) -> ModuleCall:
        """The module call that made a node."""
        return off_thread_calls(self.loss, self.name_table).get(node) or self.name_table.place_of(
            node
        )

    def _call_with_hooks(self, node: Node, grads: Grads) -> Grads:
        """Call a Python function, or a node that may have hooks, with these."""
        if node._sequence_nr() < self.clear_since:
            ready = hooks.before(node, grads)
            return hooks.after(node, nodes.call_ready(node, ready), ready)
        if any(grad is None for grad in grads):
            grads = nodes.engine_cotangents(node, grads)
        return nodes.call_ready(node, grads)


def _dense(grad: Tensor, meta: Any) -> Tensor:
    sparse = grad.layout is torch.sparse_coo
    return nodes.conform(grad.to_dense() if sparse else grad, meta)


class DenseWalk(GradientWalk):
    """A ``GradientWalk`` that makes sparse gradients, as of ``nn.Embedding(sparse=True)``, dense:
    their sizes are measured, and no element is followed.
    """

    conform = staticmethod(_dense)


class ShardedWalk(GradientWalk):
    """A ``GradientWalk`` over a sharded model, of which units are gathered as they are needed."""

    def __init__(self, residency: Residency, *given: Any) -> None:
        super().__init__(*given)
        self.residency = residency
        self.off_thread = off_thread_calls(self.loss, self.name_table)

    def visit(self, node: Node, edges: Edges) -> None:
        """Call a node, after its unit is gathered; those of FSDP only pass cotangents on."""
        if type(node).__name__ != POST_BACKWARD:
            if node in self.adjoints and type(node) is not ACCUMULATE:
                self.residency.at(unit_around(node, self.off_thread, self.name_table))
            super().visit(node, edges)
            return
        for (child, slot), grad in zip(edges, self.adjoints.pop(node, ())):
            if child is not None and grad is not None:
                waiting = self.adjoints.setdefault(child, [])
                waiting += [None] * (slot + 1 - len(waiting))
                there = waiting[slot]
                waiting[slot] = grad if there is None else there + grad


@contextmanager
def walking(
    loss: Tensor, seed: Tensor, name_table: NameTable, watch: HookWatch
) -> Iterator[GradientWalk]:
    """The walk over a graph; within, units of a sharded model are gathered."""
    model = name_table.sharded
    if model is None:
        yield GradientWalk(loss, seed, name_table, watch)
        return
    with resident(model) as residency:
        yield ShardedWalk(residency, loss, seed, name_table, watch)


def gradient(
    loss: Tensor, seed: Tensor, name_table: NameTable, watch: HookWatch, order: str = "kahn"
) -> list[tuple[Tensor, Tensor]]:
    """Every leaf with its gradient, as ``torch.autograd.grad`` gives it."""
    with one_pass(), walking(loss, seed, name_table, watch) as state:
        walk(loss, state.visit, order)
    name_table.check_once([leaf for leaf, _ in state.leaves])
    return state.leaves


class BadGradient(NamedTuple):
    """A node that gave a gradient which is not finite, and what it gave."""

    node: Node
    gradient: Tensor


def first_bad_gradient(
    loss: Tensor, seed: Tensor, name_table: NameTable, watch: HookWatch
) -> tuple[BadGradient, ModuleCall] | None:
    """The first operator, counted from the loss, that gives a gradient which is not finite, and the
    module call that made it.
    """
    state = DenseWalk(loss, seed, name_table, watch)
    found: list[tuple[BadGradient, ModuleCall]] = []

    def visit(node: Node, edges: Edges) -> None:
        if found or nodes.name_of(node) in nodes.REFUSED:
            return
        state.visit(node, edges)
        for child, _ in edges:
            for grad in state.adjoints.get(child, ()):
                if not found and grad is not None and not bool(torch.isfinite(grad).all()):
                    found.append((BadGradient(node, grad), state.place_of(node)))

    with one_pass():
        walk(loss, visit)
    return found[0] if found else None


def first_nonfinite(loss: Tensor, seed: Tensor, name_table: NameTable, watch: HookWatch) -> str:
    """The first operator, counted from the loss, that gives a gradient which is not finite."""
    if name_table.sharded is not None:  # other ranks do not walk along
        return "an operator that was not looked for, since all ranks would have to"
    found = first_bad_gradient(loss, seed, name_table, watch)
    if found is None:
        return "the last sum into a leaf"
    return name_table.describe(found[0].node, found[1])
