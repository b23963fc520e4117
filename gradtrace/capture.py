"""From a loss to its backward program: every node is called, and what it computes is written down.

Nodes that are one map for each argument (``gradtrace.nodes``) are called and that is that. The formula
of any other runs under a ``Recorder``; one that even that cannot follow becomes a matrix, if it is
small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradtrace import autograd
from gradtrace.atlas import NOWHERE, Atlas
from gradtrace.autograd import ACCUMULATE, FACTS, Edges, HookWatch, Node, learn
from gradtrace.errors import GradtraceError, NotLinear, TooLarge
from gradtrace.linear import shape_of
from gradtrace.maps import Dense, Identity, Map
from gradtrace.nodes import NODES, UNDONE, summed
from gradtrace.program import Block, Leaf, Program, Step, Term
from gradtrace.reconverge import resolve
from gradtrace.recorder import Recorder, close
from gradtrace.schedules import walk

DENSE_LIMIT = 1 << 24
"""The most entries that an operator without a structured rule may have as a matrix."""

COMPOSED = frozenset({"MkldnnRnnLayerBackward0"})
"""Nodes that stand for several operators (a whole recurrent layer), and that PyTorch computes by
elementary operations when these may have to be derived again."""


class Record:
    """One pass over the nodes that leaves a program behind; ``Walk`` with a pen."""

    def __init__(
        self, loss: Tensor, seed: Tensor, atlas: Atlas, hooks: HookWatch, limit: int
    ) -> None:
        self.atlas = atlas
        self.clear_since = hooks.clear_since()
        self.recorder = Recorder(limit)
        self.seed = seed
        self.first = self.recorder.new()
        self.adjoints: dict[Node, dict[int, tuple[Tensor, int]]] = {
            autograd.root_of(loss): {autograd.slot_of(loss): (seed, self.first)}
        }
        self.blocks: list[Block] = []
        self.leaves: list[Leaf] = []

    def visit(self, node: Node, edges: Edges) -> None:
        """Record the formula of a node and hand its results to its arguments."""
        arrived = self.adjoints.pop(node, None)
        if arrived is None:
            return
        if type(node) is ACCUMULATE:
            self._leaf(node.variable, *arrived[0])
            return
        block = Block(
            autograd.name_of(node),
            self.atlas.place_of(node),
            {slot: value for slot, (_, value) in arrived.items()},
        )
        try:
            given = self._known(node, edges, arrived, block)
            if given is None:
                with self.recorder:
                    given = self._followed(node, edges, arrived, block)
        except GradtraceError as error:
            raise _placed(error, self.atlas.describe(node)) from error
        except Exception as error:
            raise autograd.explain(error, node, self.atlas.where(node)) from error
        for position, out in given:
            child, slot = edges[position]
            value = block.gives[position]
            waiting = self.adjoints.setdefault(child, {})
            there = waiting.get(slot)
            waiting[slot] = (out, value) if there is None else self._merge(block, there, out, value)
        self.blocks.append(block)

    def _known(
        self, node: Node, edges: Edges, arrived: dict[int, tuple[Tensor, int]], block: Block
    ) -> list[tuple[int, Tensor]] | None:
        """A node whose formula is known to be one map for each argument: no need to look inside."""
        rule = NODES.get(type(node).__name__)
        if rule is None or node._sequence_nr() < self.clear_since:
            return None
        grad, value = arrived[0]
        found = None if grad.is_complex() else rule(node, grad)
        if found is None:
            return None
        outs, maps = found
        given = []
        for position, (child, slot) in enumerate(edges):
            out, chain = outs[position], maps[position]
            if child is None or out is None or chain is None:
                continue
            meta = child._input_metadata[slot] if UNDONE.get(block.operator) == position else None
            if meta is not None and out.shape != tuple(meta.shape):
                chain = [*chain, *summed(tuple(out.shape), tuple(meta.shape))]
                out = autograd.conform(out, meta)
            block.gives[position] = self._chain(chain, value, out, block)
            given.append((position, out))
        return given

    def _chain(self, chain: list[Map], value: int, out: Tensor, block: Block) -> int:
        for step in chain:
            result = self.recorder.new()
            block.steps.append(Step(result, (Term(step, value),), step.out_shape, real_dtype(out)))
            value = result
        return value

    def _followed(
        self, node: Node, edges: Edges, arrived: dict[int, tuple[Tensor, int]], block: Block
    ) -> list[tuple[int, Tensor]]:
        """Any node: its formula is run, and what it does is written down."""
        recorder = self.recorder
        outs = self._formula(node, arrived, block)
        taken = set(block.takes.values())
        given = []
        asked = (FACTS.get(type(node)) or learn(type(node))).asked
        for position, ((child, slot), out) in enumerate(zip(edges, outs)):
            if child is None or out is None:
                continue
            if asked is None or position in asked:
                out = autograd.conform(out, child._input_metadata[slot])
            value = recorder.values.get(id(out))
            if value is None:
                continue  # a constant: nothing comes this way
            if value in taken:
                value = self._chain([Identity(shape_of(out))], value, out, block)
            taken.add(value)
            block.gives[position] = value
            given.append((position, out))
        block.opened = recorder.opened or type(node).__name__ in COMPOSED
        if not block.opened:
            shapes = {value: shape_of(tensor) for tensor, value in arrived.values()}
            resolve(block, recorder.new, shapes)
        return given

    def _leaf(self, leaf: Tensor, tensor: Tensor, value: int) -> None:
        if leaf._backward_hooks:
            block = Block("hooks", NOWHERE, {0: value})
            self.recorder.begin(block.steps)
            self.recorder.track(tensor, value)
            with self.recorder:
                (changed,) = autograd.run_leaf_hooks(leaf, [tensor])
            value = self.recorder.values.get(id(changed), -1)
            if value < 0:
                raise NotLinear("a hook replaced the gradient of a leaf by one that is unrelated")
            block.gives[0] = value
            self.blocks.append(block)
        self.leaves.append(Leaf(leaf, value))

    def _merge(
        self, block: Block, there: tuple[Tensor, int], out: Tensor, value: int
    ) -> tuple[Tensor, int]:
        """A value that is used twice: its cotangent is the sum of both."""
        total = there[0] + out
        shape = shape_of(out)
        result = self.recorder.new()
        terms = (Term(Identity(shape), there[1]), Term(Identity(shape), value))
        block.merges.append(Step(result, terms, shape, real_dtype(out)))
        return total, result

    def _formula(
        self, node: Node, arrived: dict[int, tuple[Tensor, int]], block: Block
    ) -> Sequence[Tensor | None]:
        many = (FACTS.get(type(node)) or learn(type(node))).many
        grads: list[Tensor | None] = [None] * (len(node._input_metadata) if many else 1)
        recorder = self.recorder
        recorder.begin(block.steps)
        for slot, (tensor, value) in arrived.items():
            grads[slot] = tensor
            recorder.track(tensor, value)
        try:
            outs = self._call(node, grads)
            if all(o is None or id(o) in recorder.values or not _nonzero(o) for o in outs):
                return outs
            hidden: GradtraceError = NotLinear("the formula hides what it does with the gradient")
        except (NotLinear, TooLarge) as error:
            hidden = error
        return self._written_out(node, grads, arrived, block, hidden)

    def _call(self, node: Node, grads: list[Tensor | None]) -> Sequence[Tensor | None]:
        hooked = node._sequence_nr() < self.clear_since
        call = autograd.call_with_hooks if hooked else autograd.call
        if type(node).__name__ not in COMPOSED:
            return call(node, grads)
        with torch.enable_grad():
            outs = call(node, grads)
        return [None if out is None else out.detach() for out in outs]

    def _written_out(
        self,
        node: Node,
        grads: list[Tensor | None],
        arrived: dict[int, tuple[Tensor, int]],
        block: Block,
        reason: GradtraceError,
    ) -> Sequence[Tensor | None]:
        """A formula that cannot be followed, as matrices, if it is small enough."""
        recorder = self.recorder
        block.steps.clear()
        recorder.begin(block.steps)
        with torch._C._DisableTorchDispatch():
            outs = list(self._call(node, grads))
            found = matrices(lambda g: self._call(node, g), grads, outs, recorder.limit, reason)
        for k, out in enumerate(outs):
            if out is None:
                continue
            recorder.alive.append(out)
            terms = []
            for slot, matrix in found[k]:
                tensor, value = arrived[slot]
                terms.append(Term(Dense(matrix, shape_of(tensor), shape_of(out)), value))
            if terms:
                value = recorder.new()
                block.steps.append(Step(value, tuple(terms), shape_of(out), real_dtype(out)))
                recorder.values[id(out)] = value
        return outs


def matrices(
    f: Callable[[list[Tensor | None]], Sequence[Tensor | None]],
    grads: list[Tensor | None],
    outs: Sequence[Tensor | None],
    limit: int,
    reason: GradtraceError,
) -> list[list[tuple[int, Tensor]]]:
    """For each result, the matrices that lead to it from each cotangent, by unit cotangents."""
    found: list[list[tuple[int, Tensor]]] = [[] for _ in outs]
    rows = sum(shape_size(o) for o in outs if o is not None)
    columns = sum(shape_size(g) for g in grads if g is not None)
    if rows * columns > limit:
        raise reason
    totals = [None if o is None else torch.zeros_like(_flat(o)) for o in outs]
    for slot, grad in enumerate(grads):
        if grad is None:
            continue
        results = []
        for j in range(shape_size(grad)):
            unit = torch.zeros(shape_of(grad), dtype=grad.dtype.to_real(), device=grad.device)
            unit.reshape(-1)[j] = 1
            only: list[Tensor | None] = [None if g is None else torch.zeros_like(g) for g in grads]
            only[slot] = torch.view_as_complex(unit) if grad.is_complex() else unit
            results.append(f(only))
        for k, out in enumerate(outs):
            total = totals[k]
            if out is None or total is None:
                continue
            columns_k = [total * 0 if (c := r[k]) is None else _flat(c) for r in results]
            matrix = torch.stack(columns_k, -1) if columns_k else total.new_zeros(len(total), 0)
            found[k].append((slot, matrix))
            totals[k] = total + matrix @ _flat(grad)
    for out, total in zip(outs, totals):
        if out is not None and total is not None and not close(total, _flat(out)):
            raise reason
    return found


def real_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a tensor's real representation."""
    return x.dtype.to_real() if x.is_complex() else x.dtype


def shape_size(x: Tensor) -> int:
    """How many real numbers a tensor holds."""
    return x.numel() * (2 if x.is_complex() else 1)


def _flat(x: Tensor) -> Tensor:
    return (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).reshape(-1)


def _nonzero(x: Tensor) -> bool:
    with torch._C._DisableTorchDispatch():
        return bool((x != 0).any())


def _placed(error: GradtraceError, where: str) -> GradtraceError:
    """The same error, saying where in the user's model it happened."""
    text = str(error)
    return error if text.startswith(where) else type(error)(f"{where}: {text}")


def record(
    loss: Tensor,
    seed: Tensor,
    atlas: Atlas,
    hooks: HookWatch,
    order: str = "kahn",
    limit: int = DENSE_LIMIT,
) -> Program:
    """The backward program of a loss."""
    pen = Record(loss, seed, atlas, hooks, limit)
    with autograd.one_pass():
        walk(loss, pen.visit, order)
    return Program(seed, pen.first, pen.blocks, pen.leaves)
