"""Replays recordings: a loss of the structure of an earlier one is not recorded from scratch.

``record`` orders the nodes, decides for each which maps it has, numbers values, and makes blocks of
steps. All of that is the same for the next loss of a training loop; only tensors differ. So what a
recording made without tensors is kept (``Replay``), and for the next loss the rules of
``node_rules`` run alone. Each map that they make is compared with the one that was recorded: type,
shapes and dtype, so that the program of the earlier loss is also that of this one, or else
(``Mismatch``) the loss is recorded. A formula without a rule is recorded again, and its block
compared. Code of the user's must run once only, so losses with some are not replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import count
from typing import Any, TypeVar

import torch
from torch import Tensor

from gradtrace.autodiff import nodes
from gradtrace.autodiff.graph_shape import Mismatch
from gradtrace.autodiff.hooks import HookWatch
from gradtrace.autodiff.names import NameTable
from gradtrace.autodiff.nodes import Edges, Node, Outputs
from gradtrace.autodiff.pass_scope import one_pass
from gradtrace.ir.memory import see_recording
from gradtrace.ir.optimise import simplified
from gradtrace.ir.program import Block, Constants, Leaf, MapTable, Program
from gradtrace.kernels import backend_of
from gradtrace.kernels.sync import DeferredChecks
from gradtrace.linops import Map
from gradtrace.pytorch.dtensor import in_use
from gradtrace.pytorch.plain_tensors import plain
from gradtrace.recording import gradients
from gradtrace.recording.aten_rules import as_real
from gradtrace.recording.dispatch import DispatchRecorder
from gradtrace.recording.formula import FormulaRecorder
from gradtrace.recording.gradients import DeferredGradients, GradientProducts, conformed
from gradtrace.recording.kept_recordings import (
    RECORDINGS,
    Entry,
    ExpectedResult,
    ExpectedStep,
    FormulaNode,
    JoinNode,
    KeptRecording,
    LeafNode,
    RuleNode,
    kept_recording,
    structures_of,
)
from gradtrace.recording.node_rules import MULTI_OUTPUT_RULES, Chain, Edge, same
from gradtrace.recording.record import DENSE_MAX_ENTRIES, ProgramRecorder, record
from gradtrace.recording.sharded import recorder_of

T = TypeVar("T")


class _Products(GradientProducts):
    """``GradientProducts`` that are deferred where they were when the loss was recorded."""

    def __init__(self, clear_since: int, defers: Sequence[bool]) -> None:
        super().__init__(clear_since)
        self.decided = iter(defers)

    def _defers(self, leaf: Tensor, size: int, grad: Tensor) -> bool:
        found = next(self.decided, None)
        if found is None:
            raise Mismatch("other gradients are deferred")
        return found


class _Run:
    """One replay: the gradients that are pending by value, and what was found so far."""

    def __init__(
        self,
        recording: KeptRecording,
        seed: Tensor,
        clear_since: int,
        checks: DeferredChecks | None,
    ) -> None:
        self.recording, self.seed = recording, seed
        self.products = _Products(clear_since, recording.defers)
        self.outputs = Outputs()
        self.checks = checks
        self.deferred = DeferredGradients()
        self.grads = {recording.root: seed}
        self.kept = {recording.root: seed} if recording.root in recording.kept else {}
        self.maps = MapTable()
        self.leaves: list[Leaf] = []

    @cached_property
    def formulas(self) -> FormulaRecorder:
        """Records nodes without a rule; made for the first."""
        recorder = DispatchRecorder(self.recording.limit, False, self.checks)
        recorder.maps, clear_since = self.maps, self.products.clear_since
        return FormulaRecorder(recorder, clear_since, self.outputs)

    def visit_all(
        self, found: Iterable[Node], edges: Iterable[Edges], entries: Iterable[Entry]
    ) -> None:
        """Make the maps of all nodes, and pass their results on."""
        for node, out, entry in zip(found, edges, entries):
            if type(entry) is RuleNode:
                self._rule(node, out, entry)
            elif type(entry) is LeafNode:
                self._leaf(node, entry)
            elif type(entry) is FormulaNode:
                self._formula(node, out, entry)
            elif type(entry) is JoinNode:
                self._join(node, entry)

    @staticmethod
    def _called(rule: Callable[..., T], *args: Any) -> T:
        """The result of a rule or formula, which may run code of the user's (in a checkpoint). If
        that fails it will do so again when the loss is recorded, which says where.
        """
        try:
            return rule(*args)
        except Exception as error:
            raise Mismatch("an error") from error

    def _rule(self, node: Node, edges: Edges, entry: RuleNode) -> None:
        value, products = entry.value, self.products
        grad = self.grads.pop(value)
        try:
            found = entry.rule(node, grad, edges, products)
        except Exception as error:
            raise Mismatch("an error") from error  # as in _called, which would take a call more
        if found is None:
            raise Mismatch(f"{type(node).__name__} has no rule")
        many = len(found)
        for position in entry.without:
            if position < many and found[position] is not None:
                raise Mismatch(f"{type(node).__name__} has other results")
        for how in entry.results:
            result = found[how.position] if how.position < many else None
            if result is None:
                raise Mismatch(f"{type(node).__name__} has fewer results")
            out, chain = result
            only = how.only
            if how.conforms:
                out = self._conform(node, result, edges[how.position], how)
            elif (
                only is not None
                and len(chain) == 1
                and out.dtype is only.dtype
                and (chain[0] is only.shared or only.has(chain[0]))
            ):
                self.maps.append(chain[0])
            else:
                maps = chain or same(out.shape, out.shape)
                self._compare(node, maps, (out.dtype,) * len(maps), how.steps)
            if self.deferred or products.deferred_outputs:
                starts = products.deferred_outputs.pop(id(out), None) is not None
                self.deferred.follow(value, grad, chain, how.value, starts)
            out = plain(out)
            if how.keeps:
                self.kept[how.value] = out
            if how.there is None:
                self.grads[how.value] = out
            else:
                self._add(out, how)

    def _conform(
        self, node: Node, result: tuple[Tensor, Chain], edge: Edge, how: ExpectedResult
    ) -> Tensor:
        """A result as its argument is; its maps are compared and added to the table."""
        (out, chain), meta, map_ = result, self.outputs.wanted(*edge), how.follows
        if (
            map_ is not None
            and not chain
            and map_.out_shape  # scalars may come from another device
            and out.shape == map_.in_shape
            and meta.shape == map_.out_shape
            and out.dtype is how.steps[0].dtype is meta.dtype
            and out.layout is torch.strided
        ):
            self.maps.append(map_)
            return out if map_.in_shape == map_.out_shape else nodes.conform(out, meta)
        out, pairs = conformed(out, chain, meta)
        self._compare(node, [m for m, _ in pairs], [d for _, d in pairs], how.steps)
        return out

    def _compare(
        self,
        node: Node,
        maps: Sequence[Map],
        dtypes: Sequence[torch.dtype],
        steps: Sequence[ExpectedStep],
    ) -> None:
        """Add maps, each with the dtype of its result, to the table if they are as expected."""
        if len(maps) != len(steps):
            raise Mismatch(f"{type(node).__name__} has derivatives of another kind")
        for map_, dtype, step in zip(maps, dtypes, steps):
            if not step.has(map_):
                there, shape = tuple(map_.out_shape), step.shape
                what = f"shape {there}, not {shape}" if there != shape else "another derivative"
                raise Mismatch(f"{type(node).__name__}: {what}")
            if dtype is not step.dtype:
                raise Mismatch(f"{type(node).__name__}: {dtype}, not {step.dtype}")
        self.maps += maps

    def _pass_on(self, out: Tensor, how: ExpectedResult) -> None:
        """Add a result to the pending gradients."""
        out = plain(out)
        if how.keeps:
            self.kept[how.value] = as_real(out)
        if how.there is None:
            self.grads[how.value] = out
        else:
            self._add(out, how)

    def _add(self, out: Tensor, how: ExpectedResult) -> None:
        """Add a result to the value that is there."""
        assert how.there is not None and how.move is not None
        self.maps += (how.move, how.move)
        there = self.grads.pop(how.there), how.there
        out = self.deferred.add(there, (out, how.value), how.total)
        if how.keeps_total:
            self.kept[how.total] = as_real(out)
        self.grads[how.total] = out

    def _join(self, node: Node, entry: JoinNode) -> None:
        grads = {slot: self.grads.pop(value) for slot, value in entry.takes}
        out, slots = self._called(MULTI_OUTPUT_RULES[entry.name], node, grads)
        (step,) = entry.result.steps
        structures = tuple([map_.structure() for map_ in slots.values()])
        if structures != entry.structures or (out.shape, out.dtype) != (step.shape, step.dtype):
            raise Mismatch(f"{entry.name}: shape {tuple(out.shape)}, not {step.shape}")
        self.maps += slots.values()
        self._pass_on(out, entry.result)

    def _formula(self, node: Node, edges: Edges, entry: FormulaNode) -> None:
        wanted, first = entry.block, len(self.maps)
        block = Block(wanted.operator, wanted.place, dict(wanted.takes))
        arrived = {slot: (self.grads.pop(value), value) for slot, value in wanted.takes.items()}
        self.formulas.recorder.new = count(entry.start + 1).__next__
        found = self._called(self.formulas.follow, node, edges, arrived, block)
        block.merges = wanted.merges
        structures = tuple([map_.structure() for map_ in self.maps[first:]])
        if block != wanted or structures != entry.structures:
            raise Mismatch(f"the formula of {wanted.operator} has other steps")
        for (_, out, _), how in zip(found, entry.results, strict=True):
            self.products.changes_device |= out.device != self.seed.device
            self._pass_on(out, how)

    def _leaf(self, node: Node, entry: LeafNode) -> None:
        leaf = node.variable
        if nodes.replaced(node):
            raise Mismatch("a leaf was replaced after the forward pass")
        if leaf._backward_hooks:
            raise Mismatch("hooks stand on its leaves")
        if leaf.device != self.seed.device and leaf.dim():
            raise Mismatch("leaves are on several devices")
        value, lazy = entry
        given = self.deferred.get(value)
        if lazy is not (given is not None):
            raise Mismatch("other gradients are deferred")
        grad = self.grads.pop(value)
        self.leaves.append(Leaf(leaf, value, given or grad))

    def constants(self) -> Constants:
        """The tensors of the program, once all nodes have been visited."""
        if (
            len(self.maps) != len(self.recording.maps.shared)
            or next(self.products.decided, None) is not None
        ):
            raise Mismatch("it has other maps")
        if len({id(leaf.tensor) for leaf in self.leaves}) < len(self.leaves):
            raise Mismatch("a leaf is two leaves to autograd")
        if self.products.changes_device:
            raise Mismatch("it is over several devices")
        if self.checks is not None and not self.checks.fulfilled():
            raise Mismatch("a formula is not what it was taken for")
        kept = {value: self.kept[value] for value in self.recording.kept}
        return Constants(self.seed, self.maps, self.leaves, kept)


def replayed(
    recording: KeptRecording,
    loss: Tensor,
    seed: Tensor,
    table: NameTable,
    clear_since: int,
    checks: DeferredChecks | None,
) -> Program:
    """The program of a loss; raises ``Mismatch`` if it has another structure, or if one of
    ``checks`` fails.
    """
    found, edges = recording.graph.find(loss, table, clear_since)
    run = _Run(recording, seed, clear_since, checks)
    try:
        with one_pass():
            run.visit_all(found, edges, recording.entries)
            run.products.batched_weights.flush()
    finally:
        recording.graph.limit_recursion(found)
    program = Program(recording.root, recording.size, recording.blocks, run.constants())
    if recording.composed:
        program = simplified(program)
    if not recording.composed or recording.passes_made_the_same(program):
        program.facts = recording.facts
    program.recorded = ""
    return program


def recorded(
    loss: Tensor,
    seed: Tensor,
    name_table: NameTable,
    watch: HookWatch,
    order: str,
    limit: int = DENSE_MAX_ENTRIES,
    keep: int = 0,
    bare: bool = False,
) -> Program:
    """The simplified program of a loss, replayed if a loss of its structure was recorded before;
    the options are those of ``record``.
    """
    clear_since, backend = watch.clear_since(), backend_of(seed)
    settings = gradients.DEFER_MIN_ELEMENTS, backend.synchronises
    key = (order, limit, settings, *_signature(loss))

    def attempt(recording: KeptRecording) -> Program:
        recording.check(backend.synchronises, keep)
        needed = see_recording(loss, backend, keep, recording.needed)
        program = replayed(recording, loss, seed, name_table, clear_since, backend.checks())
        recording.needed = needed  # the same for all losses that are replayed
        return program

    program, reason = None, ""
    if not bare and name_table.sharded is None:
        program, reason = RECORDINGS.replayed(key, attempt)
    if program is not None:
        return program  # of the same types of nodes, so that there are no DTensors to look for
    see_recording(loss, backend, keep)
    plain_model = name_table.sharded is None and not in_use()
    make = ProgramRecorder if plain_model else recorder_of(loss, name_table)
    options = (loss, seed, name_table, watch, order, limit, keep, bare, make)
    if bare or make is not ProgramRecorder:
        return simplified(record(*options))
    kept: list[KeptRecording | str] = []

    def done(recorder: ProgramRecorder, raw: Program) -> None:
        kept.append(kept_recording(loss, recorder, raw))

    program = simplified(record(*options, done=done))
    made = kept[-1]
    if isinstance(made, KeptRecording):
        program.facts = made.facts
        made.simplified = program.blocks, structures_of(program)
        RECORDINGS.add(key, made)
    else:
        reason = made
    program.recorded = reason
    return program


def _signature(loss: Tensor) -> tuple[object, ...]:
    """What is quickly read of a graph: the type of its root, shapes and dtypes around it."""
    root = nodes.root_of(loss)

    def meta(edge: Edge) -> Any:
        found = None if edge[0] is None else nodes.wanted(*edge)
        return found if found is None else (tuple(found.shape), found.dtype)

    try:
        around = tuple(map(meta, nodes.edges_of(root)))
    except RuntimeError:  # a nested tensor
        around = ()
    return type(root), tuple(loss.shape), loss.dtype, loss.device, around
