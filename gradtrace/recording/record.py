"""``record``: the backward program of a loss.

Every autograd node is called in reverse order, and the linear maps from its cotangents to those of
its arguments are recorded. For node types in the table of ``node_rules`` these maps are known. The
formulas of other nodes run under a dispatch mode that records their ATen operations (``formula``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import cached_property
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from gradtrace.autodiff import hooks, nodes
from gradtrace.autodiff.hooks import HookWatch
from gradtrace.autodiff.labels import labels_of
from gradtrace.autodiff.names import NO_MODULE, ModuleCall, NameTable, off_thread_calls, placed
from gradtrace.autodiff.nodes import ACCUMULATE, FACTS, VIEWS, Edges, Node, Outputs, learn
from gradtrace.autodiff.pass_scope import one_pass
from gradtrace.autodiff.traversal import walk
from gradtrace.errors import GradtraceError, Unsupported
from gradtrace.ir.program import HOOKS, Block, Constants, Leaf, MapTable, Program, Step
from gradtrace.kernels import backend_of
from gradtrace.kernels.sync import DeferredChecks
from gradtrace.linops import Map
from gradtrace.pytorch import memory_limits
from gradtrace.pytorch.dtensor import LocalParts
from gradtrace.pytorch.plain_tensors import plain
from gradtrace.recording import node_rules
from gradtrace.recording.aten_rules import real_dtype, shape_of
from gradtrace.recording.devices import on_one_device
from gradtrace.recording.dispatch import DispatchRecorder
from gradtrace.recording.formula import FormulaRecorder, Given
from gradtrace.recording.gradients import (
    DeferredGradients,
    GradientCache,
    GradientProducts,
    conformed,
)
from gradtrace.recording.node_rules import Chain, Edge, NodeRule, same

DENSE_MAX_ENTRIES = 1 << 24
"""Operators without a structured rule are stored as dense matrices of at most this many entries."""


class NodeKind(NamedTuple):
    """What is known about a type of node."""

    name: str
    rule: NodeRule | None
    joint: bool
    conform_at: tuple[int, ...] | None  # argument positions to conform; None: all
    ending: bool  # is a leaf, or a view that may be next to one


class ProgramRecorder:
    """Walks the graph like ``GradientWalk`` and records the linear maps of each node.

    ``adjoints`` holds, by node and output slot, each pending cotangent with its value number in the
    program. ``limit`` bounds the entries of a dense matrix, ``keep`` the bytes of gradients to
    cache. With ``checks``, tests of numbers on a GPU are deferred; None: they are done at once.
    """

    def __init__(
        self,
        loss: Tensor,
        seed: Tensor,
        name_table: NameTable,
        watch: HookWatch,
        limit: int,
        keep: int = 0,
        bare: bool = False,
        checks: DeferredChecks | None = None,
    ) -> None:
        self.name_table = name_table
        self.off_thread: dict[Node, ModuleCall] = {}  # nodes made on other threads
        self.sums: set[int] = set()
        self.clear_since = watch.clear_since()
        self.new: Callable[[], int] = count().__next__  # the next unused value number
        self.maps = MapTable()
        self.cache = GradientCache(keep, self.maps)
        self.outputs = Outputs()
        self.limit, self.bare, self.checks = limit, bare, checks
        self.products = GradientProducts(self.clear_since, bare, self.cache)
        self.deferred = DeferredGradients()
        self.seed = seed
        self.first = self.new()
        self.adjoints: dict[Node, dict[int, tuple[Tensor, int]]] = {
            nodes.root_of(loss): {nodes.slot_of(loss): (seed, self.first)}
        }
        self.blocks: list[Block] = []
        self.leaves: list[Leaf] = []
        self.kinds: dict[type, NodeKind] = {}
        # nodes with their edges, and the block or the value of the leaf that each became
        self.visited: dict[Node, tuple[Edges, Block | int | None]] = {}
        # of each formula a value number before its own, its first map and the end of its maps
        self.formula_spans: dict[Node, tuple[int, int, int]] = {}
        self.not_replayable = ""  # why the recording cannot be replayed
        # nodes with sequence numbers in [start, end) were made by the module call ``place``
        self.place, self.start, self.end = NO_MODULE, 0, 0

    @cached_property
    def formulas(self) -> FormulaRecorder:
        """Records nodes without a rule; made for the first."""
        recorder = DispatchRecorder(self.limit, self.bare, self.checks)
        recorder.new, recorder.maps = self.new, self.maps
        return FormulaRecorder(recorder, self.clear_since, self.outputs)

    def close(self) -> None:
        """Called at the end of the pass."""

    def parts(self) -> LocalParts | None:
        """The values of which this rank has its own part, in a tensor-parallel model."""
        return None

    def visit(self, node: Node, edges: Edges) -> None:
        """Record the maps of a node and pass its results on to the nodes of its arguments."""
        arrived = self.adjoints.pop(node, None)
        if arrived is None:
            self.visited[node] = edges, None
            return
        kind = type(node)
        if kind is ACCUMULATE:
            self.visited[node] = edges, arrived[0][1]
            self.name_table.check_leaf(node)
            self._leaf(node.variable, *arrived[0])
            return
        known = self.kinds.get(kind) or self._kind(kind)
        number = node._sequence_nr()
        if not self.start <= number < self.end:
            self._find_module_call(number)
        place = self.off_thread.get(node, self.place) if self.off_thread else self.place
        block = Block(known.name, place, {})
        self.visited[node] = edges, block
        takes = block.takes
        for slot in arrived:
            takes[slot] = arrived[slot][1]
        try:
            if number < self.clear_since or not self._record_by_rule(
                known, node, edges, arrived, block
            ):
                block.operator = nodes.name_of(node)
                for position, out, value in self._formula(node, edges, arrived, block):
                    self.products.changes_device |= out.device != self.seed.device
                    self._pass_on(block, position, edges[position], out, value)
        except Exception as error:
            raise self.name_table.place(error, node, self.off_thread.get(node)) from error
        self.blocks.append(block)

    def _formula(
        self, node: Node, edges: Edges, arrived: dict[int, tuple[Tensor, int]], block: Block
    ) -> list[Given]:
        """Record a node by its formula; the results by position."""
        if node._sequence_nr() < self.clear_since:
            self.not_replayable = "hooks may stand on its operators"
        elif nodes.is_python(node) and labels_of(node) is None:
            self.not_replayable = f"{block.operator} runs code of the user's"
        start, first = self.new(), len(self.maps)
        found = self.formulas.follow(node, edges, arrived, block)
        self.formula_spans[node] = start, first, len(self.maps)
        return found

    def _kind(self, kind: type) -> NodeKind:
        """Look up, once per type of node, what is known about it."""
        name, facts = kind.__name__, FACTS.get(kind) or learn(kind)
        rule, joint = node_rules.NODES.get(name), name in node_rules.MULTI_OUTPUT_RULES
        ending = kind is ACCUMULATE or name in VIEWS
        self.kinds[kind] = found = NodeKind(name, rule, joint, facts.conform_at, ending)
        return found

    def _find_module_call(self, number: int) -> None:
        """Set the module call of a node, and the range of sequence numbers that belongs to it."""
        starts, at = self.name_table.starts, bisect_right(self.name_table.starts, number)
        self.place = self.name_table.places[at - 1] if at else NO_MODULE
        self.start = starts[at - 1] if at else 0
        self.end = starts[at] if at < len(starts) else number + 1

    def _record_by_rule(
        self,
        kind: NodeKind,
        node: Node,
        edges: Edges,
        arrived: dict[int, tuple[Tensor, int]],
        block: Block,
    ) -> bool:
        """Record a node by its rule in ``node_rules``. False if no rule applies."""
        _, rule, joint, conform_at, _ = kind
        if rule is None or len(arrived) > 1 or 0 not in arrived:
            return joint and self._record_multi_output(node, edges, arrived, block)
        grad, value = arrived[0]
        found = None if grad.is_complex() else rule(node, grad, edges, self.products)
        if found is None:
            return False
        for position, result in enumerate(found):
            if result is None or (edge := edges[position])[0] is None:
                continue
            out, chain = result
            if conform_at is None or position in conform_at:
                out, maps = conformed(out, chain, self.outputs.wanted(*edge))
                number = self._steps(maps, value, block)
            else:
                number = self._chain(chain, value, out, block)
            if self.deferred or self.products.deferred_outputs:
                self._defer(value, grad, chain, number, out)
            self._pass_on(block, position, edge, out, number)
        return True

    def _pass_on(self, block: Block, position: int, edge: Edge, out: Tensor, value: int) -> None:
        """Add a result of a block to the cotangents of the node at the other end of ``edge``."""
        child, slot = edge
        out = plain(out)
        if out.dtype.itemsize == 1:
            raise Unsupported(
                f"a gradient of {out.dtype} cannot be followed, since PyTorch does not compute in "
                "it; convert to float8 outside of the graph, or use a straight-through estimate "
                "(torch.autograd.Function) that hands on gradients of a wider type"
            )
        block.gives[position] = value
        if self.cache.bytes_left > 0:
            kind = self.kinds.get(type(child)) or self._kind(type(child))
            if not kind.ending or not nodes.reaches_leaf(child):
                self.cache.add(value, out, block)
        slots = self.adjoints.get(child)
        if slots is None:
            self.adjoints[child] = {slot: (out, value)}
            return
        there = slots.get(slot)
        slots[slot] = (out, value) if there is None else self._merge(block, there, out, value)

    def _chain(self, chain: Chain, value: int, out: Tensor, block: Block) -> int:
        """Append the maps of a chain as steps; an empty chain becomes an identity step.

        Returns the number of the last value.
        """
        dtype = out.dtype
        return self._steps(
            [(map_, dtype) for map_ in chain or same(out.shape, out.shape)], value, block
        )

    def _steps(self, maps: Iterable[tuple[Map, torch.dtype]], value: int, block: Block) -> int:
        """Append maps as steps, each with the dtype of its result."""
        for map_, dtype in maps:
            result = self.new()
            block.steps += (self.maps.single(result, map_, value, dtype),)
            value = result
        return value

    def _defer(self, value: int, grad: Tensor, chain: Chain, number: int, out: Tensor) -> None:
        """Keep, for a deferred gradient, the cotangent and the maps that it is computed from."""
        starts = self.products.deferred_outputs.pop(id(out), None) is not None
        if self.deferred.follow(value, grad, chain, number, starts):
            self.cache.hold(value, grad)

    def _record_multi_output(
        self, node: Node, edges: Edges, arrived: dict[int, tuple[Tensor, int]], block: Block
    ) -> bool:
        """Record a node with several outputs, whose cotangents are slices of its argument's."""
        grads = {slot: arrived[slot][0] for slot in sorted(arrived)}
        if any(grad.is_complex() for grad in grads.values()):
            return False
        out, slots = node_rules.MULTI_OUTPUT_RULES[block.operator](node, grads)
        terms = tuple([self.maps.term(map_, arrived[slot][1]) for slot, map_ in slots.items()])
        result = self.new()
        block.steps = (Step(result, terms, tuple(out.shape), out.dtype),)
        self._pass_on(block, 0, edges[0], out, result)
        return True

    def _leaf(self, leaf: Tensor, tensor: Tensor, value: int) -> None:
        """Add a leaf with its gradient to the program, after the hooks on it."""
        self.products.changes_device |= leaf.device != self.seed.device and leaf.dim() > 0
        if leaf._backward_hooks:
            self.not_replayable = "hooks stand on its leaves"
        if leaf._backward_hooks and hooks.has_active_hooks(leaf):
            block = Block(HOOKS, NO_MODULE, {0: value})
            name = self.name_table.spoken(leaf)
            try:
                tensor = self.formulas.hooked(leaf, tensor, block, name)
            except GradtraceError as error:
                raise placed(error, f"a hook on {name}") from error.__cause__ or error
            value = block.gives[0]
            if value != block.takes[0]:  # else the hook did not change the gradient
                self.blocks.append(block)
        self.leaves.append(Leaf(leaf, value, self.deferred.get(value, plain(tensor))))

    def _merge(
        self, block: Block, there: tuple[Tensor, int], out: Tensor, value: int
    ) -> tuple[Tensor, int]:
        """Add a cotangent to one that is pending for the same output: ``there + out``.

        The sum becomes a step of ``block.merges``. If a summand is lazy, so is the sum.
        """
        shape, result = shape_of(out), self.new()
        total = there[0] if self.bare else self.deferred.add(there, (out, value), result)
        if result not in self.deferred and there[1] not in self.sums:
            for tensor, number in (there, (out, value)):  # semirings compare the summands
                self.cache.add(number, tensor, True)
        (move,) = same(shape, shape)
        terms = tuple([self.maps.term(move, number) for number in (there[1], value)])
        step = Step(result, terms, shape, real_dtype(out))
        block.merges += (step,)
        self.sums.add(result)
        if result not in self.deferred:
            self.cache.add(result, total, False)
        return total, result


def _no_user_code(loss: Tensor, clear_since: int) -> bool:
    """Whether the graph has no Python functions and no hooks, so that no user code reads gradients.

    Nodes with sequence numbers below ``clear_since`` may have hooks.
    """
    unseen = True

    def visit(node: Node, _: Edges) -> None:
        nonlocal unseen
        if type(node) is ACCUMULATE:
            unseen &= not node.variable._backward_hooks
        else:
            unseen &= not nodes.is_python(node) and node._sequence_nr() >= clear_since

    walk(loss, visit)
    return unseen


def record(
    loss: Tensor,
    seed: Tensor,
    name_table: NameTable,
    watch: HookWatch,
    order: str = "kahn",
    limit: int = DENSE_MAX_ENTRIES,
    keep: int = 0,
    bare: bool = False,
    make: Callable[..., ProgramRecorder] = ProgramRecorder,
    done: Callable[[ProgramRecorder, Program], object] | None = None,
) -> Program:
    """The backward program of a loss.

    An operator without a structured rule is stored as a matrix of at most ``limit`` entries; a
    larger one is refused. ``keep`` is the number of bytes of
    gradients to cache with the program. A ``bare`` program has placeholders instead of gradients,
    if no user code reads them. ``make`` makes the recorder; ``done`` is called with it at the end.

    Recording is repeated where an attempt was on a wrong assumption (``Retry``): first with
    placeholders if ``bare``, then with deferred checks on a GPU, then without either.
    """
    others = off_thread_calls(loss, name_table)

    def attempt(bare: bool, checks: DeferredChecks | None) -> Program:
        recorder = make(loss, seed, name_table, watch, limit, keep, bare, checks)
        recorder.off_thread = others
        recorder.not_replayable = "modules were called on several threads" if others else ""
        with closing(recorder), _assuming(bare, checks), one_pass():
            walk(loss, recorder.visit, order)
            recorder.products.batched_weights.flush()
        name_table.check_once([leaf.tensor for leaf in recorder.leaves])
        kept = {} if bare else recorder.cache.values
        constants = Constants(seed, recorder.maps, recorder.leaves, kept, recorder.parts())
        if recorder.products.changes_device:
            constants, recorder.not_replayable = (
                on_one_device(constants),
                "it is over several devices",
            )
        program = Program(recorder.first, recorder.new(), tuple(recorder.blocks), constants)
        if done is not None:
            done(recorder, program)
        return program

    backend = backend_of(seed)
    if bare and _no_user_code(loss, watch.clear_since()):
        with suppress(Retry):
            return attempt(True, backend.checks())
    if backend.synchronises:
        with suppress(Retry):
            return attempt(False, backend.checks())
    return attempt(False, None)


class Retry(Exception):
    """A program was recorded on an assumption that does not hold."""


@contextmanager
def _assuming(bare: bool, checks: DeferredChecks | None) -> Iterator[None]:
    """Raise ``Retry`` if a deferred check fails, or if a formula fails on placeholders, which can
    cause errors that true gradients do not.
    """
    try:
        yield
    except Exception as error:
        if memory_limits.ran_out(error):
            raise
        failed = bare and isinstance(error, (GradtraceError, RuntimeError))
        if failed or (checks is not None and not checks.fulfilled()):
            raise Retry from error
        raise
    if checks is not None and not checks.fulfilled():
        raise Retry
