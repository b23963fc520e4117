"""Records the formula of any node while it runs.

The formula and the hooks around it run under a ``DispatchRecorder``. A formula that cannot be
recorded is stored as a dense matrix, if that is small enough. User code (hooks,
``torch.autograd.Function``) is checked to be linear in the cotangent.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from gradtrace.autodiff import hooks, nodes
from gradtrace.autodiff.labels import labels_of
from gradtrace.autodiff.nodes import FACTS, Edges, Grads, Node, Outputs, learn
from gradtrace.autodiff.pass_scope import recomputed_once
from gradtrace.errors import NotLinear, TooLarge
from gradtrace.ir.interpreter import gradient_of
from gradtrace.ir.program import Block, Step
from gradtrace.kernels import backend_of
from gradtrace.linops import Dense, Identity, nothing
from gradtrace.recording.aten_rules import as_real, real_dtype, shape_of
from gradtrace.recording.dense_fallback import (
    Refusal,
    matrices,
)
from gradtrace.recording.dispatch import DispatchRecorder, close

COMPOSED = frozenset({"MkldnnRnnLayerBackward0"})
"""Fused nodes (a whole recurrent layer) that PyTorch computes by elementary operations when grad
mode is on, since a double backward might follow."""


SEVERAL = COMPOSED | {"DifferentiableGraphBackward"}
"""Nodes that contain several operators; the last is a graph that TorchScript has optimised."""

Given: TypeAlias = tuple[int, Tensor, int]
"""A result of a node: the argument's position, its cotangent, and the value number of that."""


class FormulaRecorder:
    """Records one node at a time.

    Nodes with sequence numbers below ``clear_since`` may have hooks.
    """

    def __init__(self, recorder: DispatchRecorder, clear_since: int, outputs: Outputs) -> None:
        self.recorder = recorder
        self.clear_since = clear_since
        self.outputs = outputs

    def follow(
        self, node: Node, edges: Edges, arrived: dict[int, tuple[Tensor, int]], block: Block
    ) -> list[Given]:
        """Run the formula of a node and record its steps in ``block``.

        Returns the results by position. ``arrived`` holds, by output slot, each cotangent with its
        value number.
        """
        block.label = labels_of(node)
        with self.recorder:
            outs = self._formula(node, arrived, block)
            results = self._results(node, edges, arrived, outs, block)
        block.steps = tuple(self.recorder.steps)
        block.composed = True
        block.opened = self.recorder.opened or block.operator in SEVERAL
        return [(position, out, block.gives[position]) for position, out in results]

    def _results(
        self,
        node: Node,
        edges: Edges,
        arrived: dict[int, tuple[Tensor, int]],
        outs: Sequence[Tensor | None],
        block: Block,
    ) -> list[tuple[int, Tensor]]:
        """The results by position; each gets a value number of its own, if need be by an identity
        step.
        """
        taken = set(block.takes.values())
        taken.update(term.value for step in self.recorder.steps for term in step.terms)
        given = []
        conform_at = (FACTS.get(type(node)) or learn(type(node))).conform_at
        for position, ((child, slot), out) in enumerate(zip(edges, outs)):
            if child is None or out is None:
                continue
            if conform_at is None or position in conform_at:
                out = nodes.conform(out, self.outputs.wanted(child, slot))
            value = self.recorder.values.get(id(out))
            if value is None:  # of round(), sign(): zeros, whatever the cotangent is
                value = self._nothing(*next(iter(arrived.values())), out)
            elif value in taken:
                shape, same = shape_of(out), self.recorder.new()
                step = self.recorder.maps.single(same, Identity(shape), value, real_dtype(out))
                self.recorder.steps.append(step)
                value = same
            taken.add(value)
            block.gives[position] = value
            given.append((position, out))
        return given

    def _nothing(self, grad: Tensor, given: int, out: Tensor) -> int:
        """Record a result to which no path leads; the number of its value."""
        shape, value = shape_of(out), self.recorder.new()
        map_ = nothing(shape_of(grad), shape)
        self.recorder.steps.append(self.recorder.maps.single(value, map_, given, real_dtype(out)))
        return value

    def hooked(self, leaf: Tensor, tensor: Tensor, block: Block, name: str) -> Tensor:
        """Run the hooks on a leaf, which is called ``name`` in messages, and record them as the
        steps of ``block``; the new gradient.
        """
        self._finish_checks()
        self.recorder.begin(users=True)
        self.recorder.track(tensor, block.takes[0])
        given = self._known([tensor])
        with self.recorder:
            (changed,) = hooks.run_leaf_hooks(leaf, [tensor], name)
        if id(changed) not in self.recorder.values:
            if changed is None or _nonzero(changed):
                raise NotLinear("the gradient was replaced by one that has nothing to do with it")
            self.recorder.values[id(changed)] = self._nothing(tensor, block.takes[0], changed)
        self.recorder.end_users_code()
        self._check_linear(self.recorder.steps, [tensor], given, [changed])
        block.steps = tuple(self.recorder.steps)
        block.gives[0] = self.recorder.values[id(changed)]
        return tensor if changed is None else changed

    def _finish_checks(self) -> None:
        """Evaluate all deferred checks now, and defer none from here on.

        Called before user code runs: that must run once only, so recording cannot be repeated
        after it.
        """
        checks, self.recorder.checks = self.recorder.checks, None
        if checks is not None and not checks.fulfilled():
            raise NotLinear("a formula is not what it was taken for")

    def _formula(
        self, node: Node, arrived: dict[int, tuple[Tensor, int]], block: Block
    ) -> Sequence[Tensor | None]:
        """Run the node's formula, and the hooks around it, under the recorder."""
        facts = FACTS.get(type(node)) or learn(type(node))
        grads: list[Tensor | None] = [None] * (nodes.outputs_of(node) if facts.multi_output else 1)
        recorder = self.recorder
        hooked = node._sequence_nr() < self.clear_since
        users = hooked or facts.python
        recorder.begin(users)
        for slot, (tensor, value) in arrived.items():
            if any(tensor is other for other in grads):  # a + b passes one tensor to both
                tensor = tensor.clone()
            grads[slot] = tensor
            recorder.track(tensor, value)
        if hooked or (facts.python and block.label is None):
            self._finish_checks()
        given = self._known(grads) if users else {}
        ready: Grads = grads
        if hooked:
            ready = hooks.before(node, grads)
        elif facts.python and any(grad is None for grad in grads):
            ready = nodes.engine_cotangents(node, grads)
        if ready is not grads:
            self._check_linear(recorder.steps, grads, given, ready)
            given = self._known(ready)
        formula = len(recorder.steps)
        outs = self._call(node, ready)
        if facts.python:
            self._check_linear(recorder.steps[formula:], ready, given, outs)
        if hooked:
            formula, before, given = len(recorder.steps), outs, self._known(outs)
            outs = hooks.after(node, outs, ready)
            self._check_linear(recorder.steps[formula:], before, given, outs)
        if users:
            recorder.end_users_code()
        return outs

    def _known(self, given: Grads) -> dict[int, Tensor]:
        """What user code is given, by value number; copies, since it may write to its arguments."""
        values = self.recorder.values
        with _disable_current_modes():
            return {
                values[id(x)]: as_real(x).clone()
                for x in given
                if x is not None and id(x) in values
            }

    def _check_linear(
        self, steps: list[Step], given: Grads, known: dict[int, Tensor], wanted: Grads
    ) -> None:
        """Check that the steps recorded for user code give the results ``wanted`` of that code.

        ``given`` are its inputs, ``known`` what they held. Raises ``NotLinear`` if they differ.
        """
        values = self.recorder.values
        if not steps and all(any(x is y for y in given) for x in wanted):
            return
        with _disable_current_modes():
            known = dict(known)
            for step in steps:
                known[step.out] = gradient_of(step, self.recorder.maps, known)
            most = max((float(x.abs().amax()) for x in known.values() if x.numel()), default=0.0)
            for x in wanted:
                here = known.get(values.get(id(x), -1))
                if x is None or (here is None and not _nonzero(x)):
                    continue
                if here is None or not close(here, as_real(x), 1e-4 * most):
                    raise NotLinear("it is not linear in the gradient it is given")

    def _call(self, node: Node, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Run the formula without hooks; if it cannot be recorded, store it as matrices."""
        values, before = self.recorder.values, len(self.recorder.steps)
        try:
            if type(node).__name__ in COMPOSED:
                with torch.enable_grad():
                    found = nodes.call_ready(node, grads)
                outs: Sequence[Tensor | None] = [None if o is None else o.detach() for o in found]
            else:
                outs = nodes.call_ready(node, grads)
            if all(o is None or id(o) in values or self._zero(o) for o in outs):
                return outs
            refusal: Refusal = partial(
                NotLinear, "the formula hides what it does with the gradient"
            )
        except (NotLinear, TooLarge) as error:
            refusal = partial(type(error), str(error))
        del self.recorder.steps[before:]
        return self._record_dense(node, grads, refusal)

    def _zero(self, out: Tensor) -> bool:
        """Whether a result that does not depend on the cotangent is zero; deferred on a GPU."""
        with _disable_current_modes():
            return backend_of(out).check(self.recorder.checks, lambda: out == 0)

    def _record_dense(
        self, node: Node, grads: Sequence[Tensor | None], refusal: Refusal
    ) -> Sequence[Tensor | None]:
        """Store a formula that cannot be recorded as dense matrices, if these are small enough."""
        recorder = self.recorder

        def call(given: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
            with recomputed_once():  # a checkpoint returns each saved value once per recomputation
                return nodes.call_ready(node, given)

        with _disable_current_modes():
            outs = list(call(grads))
            found = matrices(call, grads, outs, recorder.limit, refusal)
        for out, terms in zip(outs, found):
            if out is None:
                continue
            recorder.alive.append(out)
            dense = [
                recorder.maps.term(
                    Dense(matrix, shape_of(grad), shape_of(out)), recorder.values[id(grad)]
                )
                for slot, matrix in terms
                if (grad := grads[slot]) is not None and id(grad) in recorder.values
            ]
            if dense:
                value = recorder.new()
                recorder.steps.append(Step(value, tuple(dense), shape_of(out), real_dtype(out)))
                recorder.values[id(out)] = value
        return outs


def _nonzero(x: Tensor) -> bool:
    if not x.numel():
        return False
    with _disable_current_modes():
        return bool((x != 0).any())
